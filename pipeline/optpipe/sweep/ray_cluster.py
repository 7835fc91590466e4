"""The Ray cluster that a sweep runs on: how it is reached, and which of its nodes carry our labels."""

import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from optpipe.core.entries import Environment
from optpipe.core.errors import BadInputError, MissingError, first_line
from optpipe.core.process import redirect_output
from optpipe.sweep.matrix import choose_device_of_kind
from optpipe.sweep.slots import Slot, describe_device, list_slots

PREFIX = "optpipe/"
LABEL = f"{PREFIX}kind"
FINGERPRINT = f"{PREFIX}fingerprint"


def describe_node() -> dict[str, str]:
    """The labels of this node for `ray start --labels`: its kind by NVML's full name, memory, power limit, driver, MIG, environment.

    Raises BadInputError where its GPUs differ: a label can say one thing.
    """
    slots = list_slots()
    first = slots[0]
    labels = {LABEL: label_from_kind(first.kind), FINGERPRINT: first.fingerprint}
    if first.gpu is None:
        return labels
    if len({slot.kind for slot in slots if slot.gpu}) > 1:
        raise BadInputError(
            "this host has GPUs of several kinds; start one Ray node for each with CUDA_VISIBLE_DEVICES"
        )
    if len({slot.fingerprint for slot in slots if slot.gpu}) > 1:
        raise BadInputError(
            "this host has GPUs of one kind with different power limits or MIG modes; set them alike, or start one Ray node for "
            "each with CUDA_VISIBLE_DEVICES"
        )
    gpu, power_w, mig = first.environment.gpus[0], *describe_device(first.gpu)
    labels |= {f"{PREFIX}driver": gpu.driver, f"{PREFIX}memory-gib": str(round(gpu.memory_bytes / 2**30))}
    labels[f"{PREFIX}mig"] = "unsupported" if mig is None else "on" if mig else "off"
    if power_w is not None:
        labels[f"{PREFIX}power-limit-w"] = f"{power_w:.0f}"
    return labels


def label_from_kind(kind: str) -> str:
    """The kind as a label of a cluster's node may be written: without spaces."""
    return kind.replace(" ", "_")


def kind_from_label(label: str) -> str:
    """The kind that a label names; NVML's names have no underscores."""
    return label.replace("_", " ")


@dataclass(frozen=True, slots=True)
class Selector:
    """`--node driver=580.95.05`, or `!=`: what a node's label has to be, or must not be."""

    label: str
    value: str
    equal: bool = True

    def __str__(self) -> str:
        return f"{self.label.removeprefix(PREFIX)}{'=' if self.equal else '!='}{self.value}"

    def matches(self, labels: Mapping[str, str]) -> bool:
        """Whether a node with these labels is meant."""
        return (labels.get(self.label) == self.value) is self.equal

    @property
    def for_ray(self) -> str:
        """The value as Ray's label selectors write it."""
        return self.value if self.equal else f"!{self.value}"


def selector_from_text(text: str) -> Selector:
    """Reads `LABEL=VALUE` or `LABEL!=VALUE`; a label without a slash is one of ours. Raises BadInputError."""
    name, equals, value = text.partition("=")
    label, equal = name.rstrip("!").strip(), not name.endswith("!")
    value = label_from_kind(value.strip())
    if not equals or not label or not value:
        raise BadInputError(f"--node {text}: expected LABEL=VALUE or LABEL!=VALUE, such as driver=580.95.05 or mig=off")
    return Selector(label if "/" in label else f"{PREFIX}{label}", value, equal)


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
