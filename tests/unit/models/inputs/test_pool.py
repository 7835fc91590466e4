"""The inputs that a benchmark rotates through."""

import errno

import numpy as np
import pytest
from tests.fakes.small_disk import fill_disk, mount_small_disk

from optpipe.models.inputs.samples import save_pool


def test_a_full_disk_is_said_with_its_error_number(tmp_path):
    with mount_small_disk(tmp_path / "disk") as disk:
        fill_disk(disk, leave_bytes=40960)
        with pytest.raises(OSError, match="No space left") as refused:
            save_pool(disk / "pool", "input", {"x": np.zeros(1 << 20, np.uint8)})
    assert refused.value.errno == errno.ENOSPC
