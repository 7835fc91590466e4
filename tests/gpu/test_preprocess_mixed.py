"""Mixed decoding on a real GPU: nvJPEG's pixels stay near libjpeg-turbo's, and every odd file comes through."""

import numpy as np
import pytest
from PIL import Image
from tests.fakes.odd_images import make_edge_case_files, make_synthetic_image

from optpipe.core.events import SilentListener
from optpipe.core.transform import CenterCrop, Decode, Normalize, Pack, Rescale, Resize, Transform
from optpipe.models.inputs.image_set import image_set_from_path
from optpipe.models.inputs.images import preprocess_file
from optpipe.preprocess.dali_pipeline import INPUT, DaliPlan, dali_from_transform
from optpipe.preprocess.parity import prove_parity

pytest.importorskip("nvidia.dali", reason="DALI is not installed")
TRANSFORM = Transform(
    (
        Decode(),
        Resize((232,)),
        CenterCrop(224, 224),
        Rescale(),
        Normalize((0.5,) * 3, (0.25,) * 3),
        Pack(),
    )
)


@pytest.mark.parametrize("load", [0.0, 1.0])
def test_mixed_decoding_stays_within_a_level_on_average(tmp_path, load):
    for index in range(8):
        Image.fromarray(make_synthetic_image(430, 500, index)).save(
            tmp_path / f"{index}.jpg", quality=90
        )
    plan = DaliPlan(decode="mixed", device="gpu", batch_size=8, hw_decoder_load=load)
    weights = np.random.default_rng(0).standard_normal((3 * 224 * 224, 5)).astype(np.float32)
    record, _, _ = prove_parity(
        image_set_from_path(tmp_path)[0],
        TRANSFORM,
        plan,
        lambda batch: {"scores": batch.reshape(len(batch), -1) @ weights},
        SilentListener(),
        trained=False,
        classifies=True,
    )
    assert record.steps[-1].mean_levels < 1.0


def test_odd_files_come_through_as_pillow_reads_them():
    for name, data in make_edge_case_files():
        pipeline = dali_from_transform(
            TRANSFORM, DaliPlan(decode="mixed", device="gpu", batch_size=1), prefetch=1
        )
        pipeline.feed_input(INPUT, [np.frombuffer(data, np.uint8)])
        if name == "truncated.jpg":
            with pytest.raises(RuntimeError):
                pipeline.run()
            continue
        got = np.asarray(pipeline.run()[0].as_cpu()[0])
        levels = np.abs(got - preprocess_file(data, TRANSFORM)) * 255 * 0.25
        assert levels.max() <= (8 if name.endswith(".jpg") else 1.01), name
        assert levels.mean() <= 0.5, name
