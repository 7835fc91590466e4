"""Settings of the whole suite."""

import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings

# wall-clock limits per example would make laws fail on a busy machine
settings.register_profile("fast", deadline=None, max_examples=10, derandomize=True)
settings.register_profile("thorough", deadline=None, max_examples=100)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fast"))

# Some hundred processes start here, many with torch. Container images like to forbid cached bytecode, and then each of
# them compiles torch's thousand modules anew: more than the tests' own work.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Tens of thousands of small files are written, synced and deleted: on a disk that is a third of the fast tier's time.
MEMORY = Path("/dev/shm")
if "TMPDIR" not in os.environ and MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > 8 * 2**30:
    tempfile.tempdir = str(MEMORY)
os.environ.setdefault("OPTPIPE_PLUGINS", "")  # plug-ins of this environment change what is listed
for name in ("POLARS_MAX_THREADS", "OMP_NUM_THREADS"):
    os.environ.setdefault(name, "1")  # a pytest worker for each core already


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """All of `integration/` is slow: the fast tier does not even import it."""
    return (
        True
        if config.option.markexpr == "not slow" and collection_path.name == "integration"
        else None
    )
