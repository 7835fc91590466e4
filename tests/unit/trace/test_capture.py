"""The nsys command for each version, and what becomes of a refusal."""

from pathlib import Path

import pytest

from optpipe.core.errors import MissingError, StageError
from optpipe.trace.nsys import Extra, Recording, export_recording, make_nsys_command


def _command(version: str, *extras: Extra, on_gpu: bool = True, whole: bool = False) -> str:
    return " ".join(make_nsys_command(set(extras), version, Path("out"), on_gpu=on_gpu, whole=whole))


@pytest.mark.parametrize(
    ("command", "has", "lacks"),
    [
        (_command("2025.3.2.0"), "--cuda-graph-trace node", "gpu-metrics"),
        (
            _command("2025.3.2.0"),
            "--capture-range nvtx --nvtx-capture optpipe.capture --capture-range-end stop",
            "osrt",
        ),
        (_command("2025.3.2.0", whole=True), "--trace nvtx,cuda,cublas,cudnn", "capture-range"),
        (_command("2022.4.2.1", on_gpu=False), "--trace nvtx", "cuda"),
        (_command("2022.4.2.1", Extra.GPU_METRICS), "--gpu-metrics-device all", "--gpu-metrics-devices"),
        (_command("2024.5.1", Extra.GPU_METRICS), "--gpu-metrics-devices all", "osrt"),
        (_command("2022.4.2.1", Extra.OS_CALLS, on_gpu=False), "--trace nvtx,osrt", "cuda"),
    ],
)
def test_the_command_of_each_version(command: str, has: str, lacks: str) -> None:
    assert has in command
    assert lacks not in command


@pytest.mark.parametrize(
    ("log", "error", "said"),
    [
        ("Generating...\nwrite failed: No space left on device\n", StageError, "the disk is full"),
        (
            "Collecting data...\nUnable to create a session: operation not permitted\n",
            MissingError,
            "Unable to create a session: operation not permitted",
        ),
    ],
)
def test_a_refusal_is_given_in_nsys_own_words(tmp_path: Path, log: str, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        export_recording(Recording(None, 1, log), tmp_path)
