"""The inputs that a benchmark rotates through."""

import pytest

from optpipe.core.card import ModelCard, Task
from optpipe.core.tensors import InputSpec
from optpipe.errors import BadInputError
from optpipe.inputs.pool import load_image_pool


def test_images_for_a_text_model_are_refused_with_a_way_out(tmp_path):
    tokens = InputSpec("input_ids", "int64", (1, 8), (8, 16), (64, 32))
    with pytest.raises(BadInputError, match="no image preprocessing in its card\nomit --images") as refused:
        load_image_pool(ModelCard("texts", "hf:texts", Task.EMBEDDING, (tokens,)), tmp_path)
    assert len(str(refused.value).splitlines()) == 2
