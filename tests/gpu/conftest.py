"""Every test of this folder needs an NVIDIA GPU and its driver."""

from pathlib import Path

import pytest

from optpipe.workspace.environment import list_gpus


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = pytest.mark.skipif(
        not list_gpus(), reason="no NVIDIA GPU or no driver on this machine"
    )
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            item.add_marker(missing)
