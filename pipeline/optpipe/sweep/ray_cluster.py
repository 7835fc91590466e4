"""The Ray cluster that a sweep runs on: how it is reached, and which of its nodes carry our labels."""

import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from optpipe.core.environment import Environment
from optpipe.core.errors import MissingError, first_line
from optpipe.core.quiet import redirect_output
from optpipe.sweep.matrix import choose_device_of_kind
from optpipe.sweep.node_labels import FINGERPRINT, LABEL, Selector, kind_from_label
from optpipe.sweep.slots import Slot

_TOKEN = "set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH to the token of the cluster"


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
    with tempfile.NamedTemporaryFile(prefix="optpipe-ray-") as log:
        try:
            with _record_connection(Path(log.name)):
                try:
                    join()
                except (
                    ConnectionAbortedError
                ):  # a cluster gives its process for a Ray client 30 s to start, which the first may exceed
                    join()
        except (ConnectionError, RuntimeError, ValueError, ImportError, ray.exceptions.RayError) as error:
            raise MissingError(_explain(address, error, log.read().decode(errors="replace"))) from error


@contextmanager
def _record_connection(log: Path) -> Iterator[None]:
    """Sends to `log` what Ray prints while it connects, a line for each try, and what a Ray client says for debugging alone."""
    client = logging.getLogger("ray.util.client.worker")
    level = client.level
    with redirect_output(log), warnings.catch_warnings(action="ignore"):
        handler = logging.StreamHandler(sys.stderr)
        client.addHandler(handler)
        client.setLevel(logging.DEBUG)
        try:
            yield
        finally:
            client.removeHandler(handler)
            client.setLevel(level)


def _explain(address: str, error: Exception, log: str) -> str:
    said = first_line(error)
    if type(error).__name__ == "AuthenticationError":
        return f"--on {address}: {said.partition('. ')[0].rstrip('.')}\n{_TOKEN}"
    if "InvalidAuthToken" in log or "missing authentication token" in log:
        return f"--on {address}: the Ray cluster rejected the connection: its token is missing or incorrect\n{_TOKEN}"
    return f"no Ray cluster at {address}: {said}\nstart one with `ray start --head`, or omit --on"


def is_client() -> bool:
    """Whether the cluster is reached through Ray Client (`ray://`)."""
    from ray.util.client import ray as client

    return bool(client.is_connected())


def list_cluster_slots(selectors: Sequence[Selector] = ()) -> tuple[Slot, ...]:
    """A slot for each GPU of the nodes that carry our labels and match, one for each CPU node. Raises MissingError where none does."""
    import ray

    nodes = [(node, node.get("Labels") or {}) for node in ray.nodes() if node["Alive"]]
    labeled = [(node, labels) for node, labels in nodes if LABEL in labels]
    if not labeled:
        raise MissingError(
            f"no node of the Ray cluster has the label {LABEL}; start nodes with: ray start … "
            '--labels="$(optpipe sweep --node-labels)"'
        )
    found: list[Slot] = []
    for node, labels in labeled:
        if not all(each.matches(labels) for each in selectors):
            continue
        kind = kind_from_label(labels[LABEL])
        count = int(node["Resources"].get("GPU", 0)) if choose_device_of_kind(kind) == "cuda" else 1
        fingerprint = labels.get(FINGERPRINT, "")
        found += [Slot(f"{node['NodeID'][:8]}-{at}", kind, (), fingerprint, Environment()) for at in range(count)]
    if not found:
        first = next((each for each in selectors if not any(each.matches(labels) for _, labels in labeled)), None)
        if first is None:
            raise MissingError("no node of the Ray cluster matches all --node labels, or those that match have no GPU")
        has = sorted({labels.get(first.label, "none") for _, labels in labeled})
        raise MissingError(f"--node {first}: no node of the Ray cluster has it; nodes have {', '.join(has)}")
    return tuple(found)
