import pytest
from torchvision import models

from optpipe.core.transform import CenterCrop
from optpipe.models.sources.torchvision import _letterbox
from optpipe.models.sources.transform import transform_from_torchvision


@pytest.mark.parametrize("name", ["retinanet_resnet50_fpn", "fcn_resnet50", "ssd300_vgg16"])
def test_a_preset_without_a_size_is_letterboxed_whole(name: str) -> None:
    preset = transform_from_torchvision(models.get_model_weights(name).DEFAULT.transforms())
    assert preset.size is None
    found = _letterbox(preset, 320, 320)
    assert found.size == (320, 320)
    resize, crop = found.geometry
    assert resize.fit == "long"  # type: ignore[union-attr]
    assert crop == CenterCrop(320, 320)
    assert [step for step in found.steps if step not in found.geometry] == [
        step for step in preset.steps if step not in preset.geometry
    ]
