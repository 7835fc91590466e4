"""The Ray cluster that a sweep runs on: how it is reached, and which of its nodes carry our labels."""

import os
from functools import partial

from optpipe.core.environment import Environment
from optpipe.errors import MissingError, first_line
from optpipe.sweep.matrix import choose_device_of_kind
from optpipe.sweep.ray_node import FINGERPRINT, LABEL
from optpipe.sweep.slots import Slot, kind_from_label


def connect(address: str) -> None:
    """Connects to `ray` (the cluster of this machine or RAY_ADDRESS) or `ray://HOST:PORT`. Raises MissingError where there is none.

    A cluster with token authentication takes the token from RAY_AUTH_TOKEN or its file, as Ray documents.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # read on import: under `uv run` Ray would start workers through uv
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    try:
        import ray
    except ModuleNotFoundError as error:
        raise MissingError("--on ray requires Ray; install it with: pip install 'optpipe[ray]'") from error
    if ray.is_initialized():
        return
    join = partial(ray.init, "auto" if address == "ray" else address, log_to_driver=False, configure_logging=False)
    try:
        try:
            join()
        except (
            ConnectionAbortedError
        ):  # a cluster gives its process for a Ray client 30 s to start, which the first may exceed
            join()
    except (ConnectionError, RuntimeError, ValueError, ImportError) as error:
        raise MissingError(
            f"no Ray cluster at {address}: {first_line(error)}\nstart one with `ray start --head`, or omit --on"
        ) from error


def is_client() -> bool:
    """Whether the cluster is reached through Ray Client (`ray://`)."""
    from ray.util.client import ray as client

    return bool(client.is_connected())


def list_cluster_slots() -> tuple[Slot, ...]:
    """A slot for each GPU of the nodes that carry our labels, one for each CPU node. Raises MissingError where none does."""
    import ray

    found: list[Slot] = []
    for node in ray.nodes():
        labels = node.get("Labels") or {}
        if not node["Alive"] or LABEL not in labels:
            continue
        kind = kind_from_label(labels[LABEL])
        count = int(node["Resources"].get("GPU", 0)) if choose_device_of_kind(kind) == "cuda" else 1
        fingerprint = labels.get(FINGERPRINT, "")
        found += [Slot(f"{node['NodeID'][:8]}-{at}", kind, (), fingerprint, Environment()) for at in range(count)]
    if not found:
        raise MissingError(
            f"no node of the Ray cluster has the label {LABEL}; start nodes with: ray start … "
            '--labels="$(optpipe sweep --node-labels)"'
        )
    return tuple(found)
