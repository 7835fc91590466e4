"""The inputs that a benchmark rotates through."""

import errno

import numpy as np
import pytest
from tests.fakes.small_disk import fill_disk, mount_small_disk

from optpipe.core.card import InputSpec, ModelCard, Task
from optpipe.core.errors import BadInputError
from optpipe.models.inputs.samples import load_image_pool, save_pool


def test_images_for_a_text_model_are_refused_with_a_way_out(tmp_path):
    tokens = InputSpec("input_ids", "int64", (1, 8), (8, 16), (64, 32))
    with pytest.raises(BadInputError, match="no image preprocessing in its card\nomit --images") as refused:
        load_image_pool(ModelCard("texts", "hf:texts", Task.EMBEDDING, (tokens,)), tmp_path)
    assert len(str(refused.value).splitlines()) == 2


def test_a_full_disk_is_said_with_its_error_number(tmp_path):
    with mount_small_disk(tmp_path / "disk") as disk:
        fill_disk(disk, leave_bytes=40960)
        with pytest.raises(OSError, match="No space left") as refused:
            save_pool(disk / "pool", "input", {"x": np.zeros(1 << 20, np.uint8)})
    assert refused.value.errno == errno.ENOSPC
