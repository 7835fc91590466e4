"""torchvision's networks that take no single image: by name, with tensors as inputs, or refused with the way out."""

import pytest

from optpipe.core.card import Task
from optpipe.core.entries import WeightsRequest
from optpipe.core.errors import BadInputError
from optpipe.models.sources.libraries import TorchvisionSource

torch = pytest.importorskip("torch")
pytest.importorskip("torchvision")
RANDOM = WeightsRequest("random")


@pytest.mark.slow
def test_an_optical_flow_network_takes_two_frames_and_gives_the_last_flow() -> None:
    loaded = TorchvisionSource("raft_small").load(RANDOM)
    card = loaded.card
    assert [each.name for each in card.inputs] == ["image1", "image2"]
    assert (card.task, card.batch_range, card.transform) == (Task.OTHER, (1, 1, 1), None)
    with torch.no_grad():
        flow = loaded.module(torch.zeros(1, 3, 128, 128), torch.ones(1, 3, 128, 128))
    assert [tuple(each.shape) for each in flow] == [(1, 2, 128, 128)]


@pytest.mark.slow
def test_a_video_network_takes_clips_and_knows_its_classes() -> None:
    card = TorchvisionSource("r3d_18").load(RANDOM).card
    assert [(each.name, each.opt) for each in card.inputs] == [("clips", (2, 3, 16, 112, 112))]
    assert (card.task, card.transform) == (Task.CLASSIFICATION, None)
    assert len(card.labels) == 400


@pytest.mark.parametrize("name", ["quantized_resnet18", "quantized_mobilenet_v2"])
def test_a_quantized_network_is_refused_with_the_one_to_quantize(name) -> None:
    plain = name.removeprefix("quantized_")
    with pytest.raises(BadInputError, match=f"\nquantize {plain} instead: optpipe build {plain} "):
        TorchvisionSource(name).load(RANDOM)
