"""Whatever a layer's size and the batch, there is something to run it with, and no tile is wider than the layer, rounded up."""

from types import SimpleNamespace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from optpipe.backends.torch_int8 import steps
from optpipe.backends.torch_int8.tactics import list_tactics


class Shaped(SimpleNamespace):
    """A tensor of which only the shape is asked for."""

    def numel(self):
        return int(np.prod(self.shape))


@given(
    kernel=st.sampled_from((1, 3, 5)),
    stride=st.sampled_from((1, 2)),
    channels=st.sampled_from((3, 8, 16, 32, 48, 64, 256, 2048)),
    width=st.sampled_from((1, 8, 10, 16, 24, 32, 64, 100, 512)),
    images=st.sampled_from((1, 8, 64, 256)),
    side=st.sampled_from((1, 4, 7, 8, 14, 28, 112)),
    groups=st.sampled_from((1, 2, 3)),
)
def test_every_convolution_has_a_tactic(kernel, stride, channels, width, images, side, groups):
    width *= 16 * groups if groups > 1 else 1
    step = steps.Convolution(
        width, (kernel, kernel), channels, 1, stride, (kernel // 2,) * 4, groups=groups, activation="relu"
    )
    found = list(list_tactics(step, Shaped(shape=(images, groups * channels, side, side))))
    assert found
    assert groups == 1 or not [each for each in found if width // groups % each.settings["BN"]]
    rounded = max(16, 1 << (width - 1).bit_length())
    assert all(each.settings["BN"] <= rounded for each in found)
