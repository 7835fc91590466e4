"""One Ray cluster with invented labels for all tests of this folder."""

import os
from importlib.util import find_spec

import pytest

from tests.fakes.ray_nodes import start_cluster


@pytest.fixture(scope="package")
def cluster():
    """Three nodes that this process is connected to."""
    if find_spec("ray") is None:
        pytest.skip("needs Ray: pip install 'optpipe[ray]'")
    from optpipe.sweep.cluster import connect

    kept = dict(os.environ)
    made, _ = start_cluster()
    connect()
    import ray  # only now: it reads its environment when it is imported, under `uv run` one that starts workers through uv

    yield made
    ray.shutdown()
    made.shutdown()
    os.environ.clear()  # the nodes' variables end with them
    os.environ.update(kept)
