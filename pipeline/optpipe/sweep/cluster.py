"""The Ray cluster that a sweep runs on, the executor that sends tasks to it, and what travels between driver and nodes."""

import hashlib
import os
import shutil
import tarfile
import tempfile
import threading
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import monotonic
from typing import IO, Any, cast

from optpipe.core import LazyModule
from optpipe.core.entries import ArtifactInfo, Environment, ModelInfo, VerificationInfo
from optpipe.core.errors import (
    BadInputError,
    MissingError,
    OptpipeError,
    StageError,
    escape,
    first_line,
)
from optpipe.core.process import redirect_output
from optpipe.core.records import json_from_record, record_from_json
from optpipe.core.wording import Argument, Call
from optpipe.models.artifacts.lookup import find_reference
from optpipe.sweep.job import Result, SweepOptions, Task, fail_task
from optpipe.sweep.ledger import take_in
from optpipe.sweep.local import PROGRAM, run_exclusively
from optpipe.sweep.matrix import choose_device_of_kind
from optpipe.sweep.slots import Slot, list_devices, list_slots
from optpipe.sweep.task import tell_on_one_line
from optpipe.workspace.entry import load_run
from optpipe.workspace.places import format_extra
from optpipe.workspace.store import Store

ray = LazyModule("ray")

PREFIX = "optpipe/"
LABEL = f"{PREFIX}kind"
FINGERPRINT = f"{PREFIX}fingerprint"
CHUNK_BYTES = 32 << 20
_DIGEST_BYTES = 32


def describe_node() -> dict[str, str]:
    """The labels of this node for `ray start --labels`. Raises BadInputError if its GPUs differ: a label has one value."""
    slots = list_slots()
    first = slots[0]
    labels = {LABEL: label_from_kind(first.kind), FINGERPRINT: first.fingerprint}
    if first.gpu is None:
        return labels
    if len({slot.kind for slot in slots if slot.gpu}) > 1:
        problem = "this host has GPUs of several kinds"
        raise BadInputError(f"{problem}; start one Ray node for each with CUDA_VISIBLE_DEVICES")
    if len({slot.fingerprint for slot in slots if slot.gpu}) > 1:
        problem = "this host has GPUs of one kind with different power limits or MIG modes"
        raise BadInputError(
            f"{problem}; set them alike, or start one Ray node for each with CUDA_VISIBLE_DEVICES"
        )
    gpu, device = (
        first.environment.gpus[0],
        next(device for device in list_devices() if device.uuid == first.gpu),
    )
    labels |= {
        f"{PREFIX}driver": gpu.driver,
        f"{PREFIX}memory-gib": str(round(gpu.memory_bytes / 2**30)),
    }
    labels[f"{PREFIX}mig"] = "unsupported" if device.mig is None else "on" if device.mig else "off"
    if device.power_limit_w is not None:
        labels[f"{PREFIX}power-limit-w"] = f"{device.power_limit_w:.0f}"
    return labels


def label_from_kind(kind: str) -> str:
    """The kind as a label of a Ray node, which has no spaces."""
    return kind.replace(" ", "_")


def selector_from_text(text: str) -> tuple[str, str]:
    """Reads `LABEL=VALUE` or `LABEL!=VALUE`: the label, and the value or `!VALUE` as Ray's label selectors write it.

    A label without a slash is one of ours. Raises BadInputError.
    """
    name, equals, value = text.partition("=")
    label, unequal = name.rstrip("!").strip(), "!" if name.endswith("!") else ""
    value = label_from_kind(value.strip())
    if not equals or not label or not value:
        raise BadInputError(
            "expected LABEL=VALUE or LABEL!=VALUE, such as driver=580.95.05 or mig=off",
            argument=Argument("node", text),
        )
    return label if "/" in label else f"{PREFIX}{label}", unequal + value


def is_selected(labels: Mapping[str, str], label: str, wanted: str) -> bool:
    return (labels.get(label) == wanted.removeprefix("!")) is not wanted.startswith("!")


_TOKEN = (
    "set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH to the token of the cluster"
)


def connect() -> None:
    """Connects to the cluster of this machine, or of RAY_ADDRESS. Raises MissingError if there is none."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # read on import: under `uv run` Ray would start workers through uv
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    try:
        import ray
    except ModuleNotFoundError as error:
        raise MissingError(
            Argument("on", "ray") + f" requires Ray; install it with: {format_extra('ray')}"
        ) from error
    if ray.is_initialized():
        return
    with tempfile.NamedTemporaryFile(prefix="optpipe-ray-") as log:
        try:
            with redirect_output(Path(log.name)), warnings.catch_warnings(action="ignore"):
                ray.init("auto", log_to_driver=False, configure_logging=False)
        except (
            ConnectionError,
            RuntimeError,
            ValueError,
            ImportError,
            ray.exceptions.RayError,
        ) as error:
            raise MissingError(_explain(error, log.read().decode(errors="replace"))) from error


def _explain(error: Exception, log: str) -> str:
    said = first_line(error)
    if type(error).__name__ == "AuthenticationError":
        return Argument("on", "ray") + f": {said.partition('. ')[0].rstrip('.')}\n{_TOKEN}"
    if "InvalidAuthToken" in log or "missing authentication token" in log:
        problem = ": the Ray cluster rejected the connection: its token is missing or incorrect"
        return Argument("on", "ray") + f"{problem}\n{_TOKEN}"
    start = "start one with `ray start --head` and set RAY_ADDRESS, or omit " + Argument("on")
    return f"no Ray cluster: {said}\n" + start


NODE_ID = "ray.io/node-id"
ANSWER_S = 120.0
"""Seconds that nodes have to send their labels."""


def list_cluster_slots(selectors: Mapping[str, str] = {}) -> tuple[Slot, ...]:
    """A slot for each GPU of the nodes that match, one for each CPU node. Raises MissingError if there is none.

    The labels of nodes are trusted. If no node has ours, a short task queries each node.
    """
    nodes = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) >= 1]
    described = [(node, node.get("Labels") or {}) for node in nodes]
    if asked := not any(LABEL in labels for _, labels in described):
        described = [
            (node, labels | answer)
            for (node, labels), answer in zip(described, _ask_nodes(nodes), strict=True)
        ]
    described = [(node, labels) for node, labels in described if LABEL in labels]
    free: list[Slot] = []
    for node, labels in described:
        if not all(is_selected(labels, *selector) for selector in selectors.items()):
            continue
        kind, ident = (
            labels[LABEL].replace("_", " "),
            node["NodeID"],
        )  # NVML's names have no underscores
        count = int(node["Resources"].get("GPU", 0)) if choose_device_of_kind(kind) == "cuda" else 1
        slot = Slot(
            "", kind, (), labels.get(FINGERPRINT, ""), Environment(), node=ident if asked else ""
        )
        free += [replace(slot, name=f"{ident[:8]}-{at}") for at in range(count)]
    if not free:
        unmet = [
            selector
            for selector in selectors.items()
            if not any(is_selected(labels, *selector) for _, labels in described)
        ]
        if not described or not unmet:
            labels_asked = "matches all " + Argument("node") + " labels"
            needs = ", has a processor and, if labeled so, a GPU"
            raise MissingError("no node of the Ray cluster " + labels_asked + needs)
        (label, value), *_ = unmet
        has = sorted({labels.get(label, "none") for _, labels in described})
        sign = "!=" if value.startswith("!") else "="
        asked_for = f"{label.removeprefix(PREFIX)}{sign}{value.removeprefix('!')}"
        raise MissingError(
            f"no node of the Ray cluster has it; nodes have {', '.join(has)}",
            argument=Argument("node", asked_for),
        )
    return tuple(free)


def _ask_nodes(nodes: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    ask = ray.remote(num_cpus=0)(describe_node)
    answers = [ask.options(label_selector={NODE_ID: node["NodeID"]}).remote() for node in nodes]
    try:
        return list(ray.get(answers, timeout=ANSWER_S))
    except ray.exceptions.RayError as error:
        why = first_line(getattr(error, "cause", None) or error)
        raise MissingError(
            f"a node of the Ray cluster cannot be identified: {why}",
            remedy="install optpipe[ray] of this version on every node, or start "
            'nodes with: ray start … --labels="$(' + Call("sweep", node_labels=True) + ')"',
        ) from error


BEGUN = b"begun"


def run_on_node(content: bytes, inputs: Sequence[Any]) -> Iterator[bytes]:
    """On the node: yields BEGUN, runs the task, and yields its result, then chunks of what it made.

    `content` holds the task, the options, the program, and the fingerprints of the nodes with this kind of GPU as the driver sees
    them. If the task names no workspace, its content is sent.
    """
    task, options, program, fingerprints = record_from_json(
        content, tuple[Task, SweepOptions, tuple[str, ...], tuple[str, ...]], "the driver"
    )
    yield BEGUN
    with suppress(
        PermissionError
    ):  # Ray starts workers at nice 15, and their children would be measured at it
        os.setpriority(os.PRIO_PROCESS, 0, 0)
    with tempfile.TemporaryDirectory(prefix="optpipe-node-") as folder:
        workspace = Path(task.workspace or folder)
        try:
            slot = _find_slot(task.kind, fingerprints)
            unpack(map(ray.get, inputs), Store(workspace))
        except OptpipeError as error:
            yield json_from_record(fail_task(task, tell_on_one_line(error), fingerprints[0]))
            return
        here = replace(
            task,
            workspace=str(workspace),
            side_by_side=1 if slot.gpu is None else len(list_devices()),
        )
        result = run_exclusively(here, slot, options, threading.Event(), program)
        yield json_from_record(result)
        if not task.workspace:
            runs = dict.fromkeys(
                f"runs/{outcome.run}" for outcome in result.outcomes if outcome.run
            )
            yield from pack(workspace, runs if task.timing else list_all(workspace))


def _find_slot(kind: str, fingerprints: Sequence[str]) -> Slot:
    """The slot that Ray gave this worker. Raises StageError if the node differs from its labels."""
    slots = list_slots()
    whole = next(slot for slot in slots if slot.gpu is None)
    slot = replace(whole, kind=kind) if choose_device_of_kind(kind) == "cpu" else slots[0]
    if slot.kind != kind:
        raise StageError(
            f"the node's label {LABEL} is {kind}, but it has {slot.kind}; start it with its own labels"
        )
    if slot.fingerprint not in fingerprints:
        problem = f"the node's environment differs from its label {FINGERPRINT} (driver, power limit or versions)"
        raise StageError(f"{problem}; start it again with its own labels")
    return slot


def list_needed(store: Store, artifact: str) -> tuple[str, ...]:
    """The entries that a bench of an artifact reads: it, its model, its reference and their verifications; every byte checked."""
    entry = store.verify_entry(store.find(artifact, ArtifactInfo))
    model = store.verify_entry(store.find(entry.manifest.parents[0], ModelInfo))
    reference = find_reference(entry, model, store)
    paths = [entry.path, model.path]
    if reference is not None:
        pair = {entry.id, reference.id}
        verified = [
            verification
            for verification in store.list_entries(VerificationInfo)
            if pair <= set(verification.manifest.parents)
        ]
        paths += [
            store.verify_entry(reference).path,
            *(store.verify_entry(verification).path for verification in verified),
        ]
    return tuple(f"store/{path.name}" for path in paths)


def list_all(workspace: Path) -> tuple[str, ...]:
    """Every entry, finished run and job of a task's workspace; every byte checked."""
    store = Store(workspace)
    for entry in store.list_entries():
        store.verify_entry(entry)
    for path in (workspace / "runs").glob("*/"):
        if (path / "manifest.json").is_file() and (problems := load_run(path).find_problems()):
            raise StageError(f"run {path.name}: {problems[0]}")
    paths = sorted(path for folder in ("store", "runs") for path in (workspace / folder).glob("*"))
    return tuple(str(path.relative_to(workspace)) for path in paths)


def pack(workspace: Path, names: Iterable[str]) -> Iterator[bytes]:
    """The named folders as a tar, in chunks of at most CHUNK_BYTES, each after its SHA-256."""
    with tempfile.TemporaryFile() as file:
        with tarfile.open(fileobj=file, mode="w") as tar:
            for name in names:
                tar.add(workspace / name, arcname=name)
        file.seek(0)
        while chunk := file.read(CHUNK_BYTES):
            yield hashlib.sha256(chunk).digest() + chunk


def unpack(chunks: Iterable[bytes], store: Store) -> None:
    """Adds the chunks' content. Raises StageError if a byte changed in transfer, or does not match its manifest."""
    store.root.mkdir(parents=True, exist_ok=True)
    with store.scratch("received") as scratch, tempfile.TemporaryFile() as file:
        for number, chunk in enumerate(chunks, start=1):
            if hashlib.sha256(chunk[_DIGEST_BYTES:]).digest() != chunk[:_DIGEST_BYTES]:
                raise StageError(f"damaged in transfer: chunk {number} does not match its SHA-256")
            file.write(chunk[_DIGEST_BYTES:])
        if file.tell() == 0:
            return
        file.seek(0)
        try:
            with tarfile.open(fileobj=file, mode="r") as tar:
                _extract(tar, scratch / "received")
        except (tarfile.TarError, EOFError) as error:
            raise StageError(f"damaged in transfer: {error}") from error
        if damaged := take_in(scratch / "received", store)["damaged"]:
            raise StageError(f"damaged in transfer: {damaged[0]}")


def _extract(tar: tarfile.TarFile, folder: Path) -> None:
    """Folders and plain files below `folder`, nothing else. `extractall` has no such filter before Python 3.11.4."""
    for member in tar:
        target = folder / member.name
        if not (member.isdir() or member.isfile()) or not target.resolve().is_relative_to(
            folder.resolve()
        ):
            raise StageError(
                f"damaged in transfer: {escape(member.name)} is not a file of a workspace"
            )
        if member.isdir():
            target.mkdir(parents=True, exist_ok=True)
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("wb") as out:
            shutil.copyfileobj(cast("IO[bytes]", tar.extractfile(member)), out)


@dataclass(eq=False, slots=True)
class _Sent:
    task: Task
    stream: Any
    """A generator of what `run_on_node` yields."""
    fingerprint: str
    sent: float
    """By the monotonic clock."""
    items: list[bytes] = field(default_factory=list)


class RayExecutor:
    """Runs tasks on the connected cluster and imports their results into the store; `shared` is a workspace that all nodes see."""

    remote = True

    def __init__(
        self,
        slots: Sequence[Slot],
        store: Store,
        options: SweepOptions,
        shared: str | None = None,
        selectors: Mapping[str, str] = {},
        program: Sequence[str] = PROGRAM,
    ) -> None:
        self.slots, self.options, self.program = slots, options, tuple(program)
        self.store, self.shared, self.selectors = store, shared, selectors
        self._artifacts: dict[str, list[Any]] = {}
        """The chunks of each artifact that was sent; the driver owns them, so that they outlive the workers."""
        self.remotes = {
            device: ray.remote(num_gpus=gpus, num_cpus=1, max_calls=1, max_retries=0)(run_on_node)
            for device, gpus in (("cpu", 0), ("cuda", 1))
        }
        """Tasks of `(content, inputs)`, each in a new worker: a reused one would keep a CUDA context."""

    def start(self, task: Task, slot: Slot) -> _Sent:
        """Sends the task and its artifact to a node of the slot's kind; without labels, to the slot's own node while it lives."""
        prints = tuple(
            dict.fromkeys(peer.fingerprint for peer in self.slots if peer.kind == task.kind)
        )
        given = replace(task, workspace=self.shared or ""), self.options, self.program, prints
        selector = {**self.selectors, LABEL: label_from_kind(task.kind)}
        if slot.node:
            alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
            others = {
                peer.node for peer in self.slots if peer.kind == task.kind and peer.node in alive
            }
            selector = {
                NODE_ID: slot.node
                if slot.node in alive or not others
                else f"in({', '.join(sorted(others))})"
            }
        remote = self.remotes[choose_device_of_kind(task.kind)].options(label_selector=selector)
        stream = remote.remote(json_from_record(given), self._send(task.artifact))
        return _Sent(task, stream, slot.fingerprint, monotonic())

    def _send(self, artifact: str | None) -> list[Any]:
        """The chunks that hold an artifact and what a bench of it reads."""
        if artifact is None or self.shared is not None:
            return []
        if artifact not in self._artifacts:
            chunks = pack(self.store.workspace, list_needed(self.store, artifact))
            self._artifacts[artifact] = [ray.put(chunk) for chunk in chunks]
        return self._artifacts[artifact]

    def poll(self, running: Collection[_Sent], timeout_s: float) -> Iterator[tuple[_Sent, Result]]:
        if not running:
            return
        ready, rest = ray.wait([sent.stream for sent in running], num_returns=1, timeout=timeout_s)
        if rest and ready:
            ready += ray.wait(rest, num_returns=len(rest), timeout=0)[0]
        limit_s = self.options.pending_s
        for sent in running:
            if sent.stream in ready:
                result = self._receive(sent)
            elif monotonic() - sent.sent > limit_s and not sent.items:
                ray.cancel(sent.stream, force=True)
                limit = "(" + Argument("set", "pending-timeout") + ")"
                why = f"no free node of kind {sent.task.kind} within {limit_s:.0f} s " + limit
                result = self._fail(sent, why, lost=False)
            else:
                continue
            if result is not None:
                yield sent, result

    def cancel(self, running: Collection[_Sent]) -> Collection[_Sent]:
        """Ray kills the workers, and their children die with them."""
        for sent in running:
            ray.cancel(sent.stream, force=True)
        return ()

    def close(self) -> None:
        """Nothing is left: a task's folder ends with it."""

    def _receive(self, sent: _Sent) -> Result | None:
        """None until all of the result is in the store: a record never names a run that is missing."""
        try:
            item = ray.get(next(sent.stream))
        except StopIteration:
            item = None
        except ray.exceptions.RayTaskError as error:  # such as a disk of the node that is full
            return self._fail(
                sent, f"its node failed: {type(error.cause).__name__}: {first_line(error.cause)}"
            )
        except ray.exceptions.RayError as error:
            return self._fail(sent, f"{type(error).__name__}: {first_line(error)}")
        if item is not None:
            sent.items.append(item)
            return None
        if len(sent.items) < 2:
            return self._fail(sent, "the node ended without a result")
        _, result, *chunks = sent.items
        try:
            unpack(chunks, self.store)
        except (OptpipeError, OSError) as error:  # damaged on the way, or this host's disk is full
            return self._fail(sent, first_line(error))
        return record_from_json(result, Result, "a node")

    def _fail(self, sent: _Sent, why: str, *, lost: bool = True) -> Result:
        return fail_task(sent.task, why, sent.fingerprint, lost=lost)
