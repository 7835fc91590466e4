"""Mixed decoding on a real GPU: nvJPEG's pixels stay near libjpeg-turbo's, and every odd file comes through."""

import numpy as np
import pytest
from PIL import Image

from optpipe.core.events import SilentListener
from optpipe.core.transform import CenterCrop, Decode, Normalize, Pack, Rescale, Resize, Transform
from optpipe.models.inputs.images import preprocess_file
from optpipe.models.inputs.samples import make_synthetic_image
from optpipe.preprocess.dali_pipeline import DaliPlan, make_reading_pipeline
from optpipe.preprocess.parity import check_edge_cases, prove_parity

TRANSFORM = Transform(
    (Decode(), Resize((232,)), CenterCrop(224, 224), Rescale(), Normalize((0.5,) * 3, (0.25,) * 3), Pack())
)


@pytest.mark.parametrize("load", [0.0, 1.0])
def test_mixed_decoding_stays_within_a_level_on_average(tmp_path, load):
    for index in range(8):
        Image.fromarray(make_synthetic_image(430, 500, index)).save(tmp_path / f"{index}.jpg", quality=90)
    plan = DaliPlan(decode="mixed", device="gpu", batch_size=8, hw_decoder_load=load)
    weights = np.random.default_rng(0).standard_normal((3 * 224 * 224, 5)).astype(np.float32)
    record, _, _ = prove_parity(
        sorted(tmp_path.glob("*.jpg")),
        TRANSFORM,
        plan,
        lambda batch: {"scores": batch.reshape(len(batch), -1) @ weights},
        SilentListener(),
        trained=False,
        classifies=True,
    )
    assert record.steps[-1].cumulative.mean_levels < 1.0


@pytest.mark.parametrize("cpu_share", [0.0, 0.5])
def test_odd_files_come_through_as_pillow_reads_them(cpu_share):
    plan = DaliPlan(decode="mixed", device="gpu", batch_size=8, cpu_share=cpu_share)
    found = {each.name: each for each in check_edge_cases(TRANSFORM, plan)}
    assert found.pop("truncated.jpg").outcome == "refused by both"
    for name, each in found.items():
        assert each.outcome == "equal" or (each.outcome == "near" and name.endswith(".jpg")), each


@pytest.mark.parametrize("cpu_share", [0.0, 0.25])
def test_a_share_decoded_by_the_cpu_is_as_good(tmp_path, cpu_share):
    paths = [tmp_path / f"{index:02}.jpg" for index in range(32)]
    for index, path in enumerate(paths):
        Image.fromarray(make_synthetic_image(300 + index, 400, index)).save(path, quality=90)
    plan = DaliPlan(decode="mixed", device="gpu", batch_size=32, cpu_share=cpu_share)
    tensors, index = make_reading_pipeline(paths, TRANSFORM, plan).run()
    got, rows = np.asarray(tensors.as_cpu().as_tensor()), np.asarray(index.as_tensor()).ravel()
    expected = np.stack([preprocess_file(paths[row], TRANSFORM) for row in rows])
    assert np.abs(got - expected).mean() * 255 * 0.25 < 0.1
    assert np.abs(got - expected).max() * 255 * 0.25 < 8
