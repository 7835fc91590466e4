"""The Ray cluster that a sweep runs on: how it is reached, and which of its nodes carry our labels."""

import logging
import os
import secrets
import sys
import tempfile
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from time import monotonic, sleep, time
from typing import Any

from optpipe.core.entries import Environment
from optpipe.core.errors import BadInputError, MissingError, OptpipeError, StageError, first_line
from optpipe.core.process import acknowledge_interrupt, redirect_output
from optpipe.core.records import json_from_record, record_from_json
from optpipe.sweep.job import Cell, CellOutcome, JobRecord, JobState, Task, compute_job_key
from optpipe.sweep.ledger import claim_job, read_job, write_job
from optpipe.sweep.local import Report, Setting, list_records, try_task
from optpipe.sweep.matrix import choose_device_of_kind
from optpipe.sweep.neighbors import list_disturbed_hosts, name_neighborhood
from optpipe.sweep.plan import sort_tasks, take_task
from optpipe.sweep.slots import Slot, count_neighbors, describe_device, list_slots
from optpipe.sweep.task import mark_all, tell_on_one_line
from optpipe.sweep.transport import Transport, get_chunk, list_all, pack, put_chunks, unpack
from optpipe.workspace.store import Store

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


@dataclass(frozen=True, slots=True)
class Selector:
    """`--node driver=580.95.05`, or `!=`: what a node's label has to be, or must not be."""

    label: str
    value: str
    equal: bool = True

    def __str__(self) -> str:
        return f"{self.label.removeprefix(PREFIX)}{'=' if self.equal else '!='}{self.value}"

    def matches(self, labels: Mapping[str, str]) -> bool:
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
        kind = labels[LABEL].replace("_", " ")  # NVML's names have no underscores
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


BEGUN = b"begun"
"""What a node says first."""


@dataclass(frozen=True, slots=True)
class Errand:
    task: Task
    setting: Setting
    shared: str | None
    """A workspace that driver and nodes see under one path; otherwise what is needed travels."""
    bucket: str | None = None
    """A folder that fsspec opens (`s3://…`, `gs://…`), through which chunks travel in place of the object store."""
    fingerprints: tuple[str, ...] = ()
    """Environments that nodes of the kind have by their labels."""
    disturbed: tuple[str, ...] = ()
    """Hosts whose GPUs have to time one after the other."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What a node says of a task before the parcels of what it made."""

    outcomes: tuple[CellOutcome, ...]
    records: tuple[JobRecord, ...]
    clock_s: float
    """By the node's clock, in Unix seconds."""


def run_errand(content: bytes, parcels: Sequence[Any], fetch: Callable[[Any], bytes]) -> Iterator[bytes]:
    """On the node: says that it has begun, does the task, and yields its records, then what it made."""
    errand = record_from_json(content, Errand, "the driver")
    yield BEGUN
    with suppress(PermissionError):  # Ray starts workers at nice 15, and their children would be measured at it
        os.setpriority(os.PRIO_PROCESS, 0, 0)
    with tempfile.TemporaryDirectory(prefix="optpipe-node-") as folder:
        workspace = Path(errand.shared or folder)
        store = Store(workspace)
        try:
            slot = _find_slot(errand.task.kind, errand.fingerprints)
            unpack((fetch(each) for each in parcels), store)
        except OptpipeError as error:
            lost = mark_all(errand.task, CellOutcome(JobState.FAILED, tell_on_one_line(error)))
            yield json_from_record(Reply(lost, (), time()))
            return
        serialized = name_neighborhood(slot) in errand.disturbed
        setting = replace(errand.setting, workspace=workspace, serialized=serialized)
        outcomes, attempts = try_task(errand.task, slot, setting, threading.Event())
        beside = 1 if serialized else count_neighbors(slot)
        records = tuple(list_records(errand.task, outcomes, slot, attempts, beside)) if errand.task.timing else ()
        yield json_from_record(Reply(outcomes, records, time()))
        if errand.shared is None:
            chunks = pack(
                workspace,
                list_all(workspace)
                if not errand.task.timing
                else dict.fromkeys(f"runs/{one.run}" for one in outcomes if one.run),
            )
            yield from (
                chunks if errand.bucket is None else (name.encode() for name in put_chunks(errand.bucket, chunks))
            )


def _find_slot(kind: str, fingerprints: Sequence[str]) -> Slot:
    """The slot that Ray gave this worker. Raises StageError where the node is not what its labels say."""
    slots = list_slots()
    whole = next(slot for slot in slots if slot.gpu is None)
    found = replace(whole, kind=kind) if choose_device_of_kind(kind) == "cpu" else slots[0]
    if found.kind != kind:
        raise StageError(f"the node's label {LABEL} says {kind}, but it has {found.kind}; start it with its own labels")
    if found.fingerprint not in fingerprints:
        raise StageError(
            f"the node's environment is not what its label {FINGERPRINT} says (driver, power limit or versions differ); "
            "start it again with its own labels"
        )
    return found


def make_remote(*, gpu: bool, streaming: bool) -> Any:
    """The Ray task, `(errand, parcels, bell, name)`. Resources and max_calls have to stand here: a task whose worker is used again
    would keep a CUDA context. Not `streaming`, which Ray Client cannot, it hands back a list, and rings the bell as it begins.
    """
    import ray

    def stream(content: bytes, parcels: list[Any], _bell: Any, _name: str) -> Iterator[bytes]:
        yield from run_errand(
            content, parcels, lambda each: get_chunk(each) if isinstance(each, str) else ray.get(each)
        )

    def gather(content: bytes, parcels: list[Any], bell: Any, name: str) -> list[bytes]:
        ray.get(bell.ring.remote(name))
        return list(stream(content, parcels, bell, name))

    task = stream if streaming else gather
    if gpu:
        return ray.remote(num_gpus=1, num_cpus=1, max_calls=1, max_retries=0)(task)
    return ray.remote(num_cpus=1, max_calls=1, max_retries=0)(task)


def make_bell() -> Any:
    """A Ray actor that knows which tasks have begun."""
    import ray

    class Bell:
        def __init__(self) -> None:
            self.rung: set[str] = set()

        def ring(self, name: str) -> None:
            self.rung.add(name)

        def list_rung(self) -> set[str]:
            return self.rung

    return ray.remote(num_cpus=0)(Bell).remote()


CLOCKS_S = 2.0
"""Clocks of hosts that differ by less are one clock."""


class LostError(StageError):
    """A worker, a node or a parcel was lost: another try may succeed."""


@dataclass
class Flight:
    name: str
    task: Task
    stream: Any
    """A generator of what it hands back; through Ray Client a reference to the list."""
    claims: ExitStack = field(default_factory=ExitStack)
    sent: float = field(default_factory=monotonic)
    sent_s: float = field(default_factory=time)
    """When by this host's clock, in Unix seconds."""
    begun: bool = False
    reply: Reply | None = None
    chunks: list[bytes] = field(default_factory=list)
    clock_ahead_s: float = 0.0
    """How far the node's clock is ahead of this host's, at least; negative: behind."""

    def receive(self, *, streaming: bool) -> bool:
        """Takes the next item, or without streaming all of them. Returns whether all is here. Raises LostError."""
        import ray

        try:
            items = [ray.get(next(self.stream))] if streaming else ray.get(self.stream)
        except StopIteration:
            return True
        except ray.exceptions.RayTaskError as error:  # such as a disk of the node that is full
            raise LostError(f"its node failed: {type(error.cause).__name__}: {first_line(error.cause)}") from error
        except ray.exceptions.RayError as error:
            raise LostError(f"{type(error).__name__}: {first_line(error)}") from error
        for item in items:
            self._add(item)
        return not streaming

    def _add(self, item: bytes) -> None:
        if item == BEGUN:
            self.begun = True
        elif self.reply is None:
            self.reply = record_from_json(item, Reply, "a node")
            self.clock_ahead_s = bound_clock_difference(self.sent_s, self.reply.clock_s, time())
        else:
            self.chunks.append(item)


def bound_clock_difference(sent_s: float, replied_s: float, received_s: float) -> float:
    """Seconds that a node's clock is ahead of ours at least (negative: behind), by one reply: it was made after we sent and before
    we received. 0 where the clocks may agree to CLOCKS_S.
    """
    ahead, behind = replied_s - received_s, sent_s - replied_s
    return ahead if ahead > CLOCKS_S else -behind if behind > CLOCKS_S else 0.0


_POLL_S = 1.0


def run_on_ray(
    tasks: Sequence[Task],
    slots: Sequence[Slot],
    setting: Setting,
    report: Report,
    shared: str | None = None,
    selectors: Sequence[Selector] = (),
    warn: Callable[[str], None] = warnings.warn,
) -> bool:
    """Runs everything on the cluster that is connected; the driver's store takes in what comes back.

    `shared` is a workspace that all nodes see, or the address of a folder that fsspec opens; `selectors` are labels that nodes
    have to have beside their kind; `warn` is told what is left in a bucket.
    """
    driver = _Driver(tasks, slots, setting, report, Transport(Store(setting.workspace), shared), selectors)
    try:
        driver.run()
    except KeyboardInterrupt as interruption:
        acknowledge_interrupt(interruption)
        driver.cancel()
        return False
    finally:
        if (left := driver.transport.close()) is not None:
            warn(left)
    return True


class _Driver:
    """Sends builds first, then loads, no more at once than a kind has slots, and takes in what comes back."""

    def __init__(
        self,
        tasks: Sequence[Task],
        slots: Sequence[Slot],
        setting: Setting,
        report: Report,
        transport: Transport,
        selectors: Sequence[Selector],
    ) -> None:
        self.setting, self.report, self.transport = setting, report, transport
        self.selectors = {each.label: each.for_ray for each in selectors}
        self.room = {kind: sum(slot.kind == kind for slot in slots) for kind in {slot.kind for slot in slots}}
        self.bell = make_bell() if is_client() else None
        streaming = self.bell is None
        self.remotes = {device: make_remote(gpu=device == "cuda", streaming=streaming) for device in ("cpu", "cuda")}
        self.prints = {slot.kind: [each.fingerprint for each in slots if each.kind == slot.kind] for slot in slots}
        self.loads = sort_tasks(tasks)
        self.builds = list({(task.recipe_key, task.kind): replace(task, cells=()) for task in self.loads}.values())
        self.ahead: dict[str, list[Task]] = {}
        """Builds for GPUs that wait until a node without one has done its part, by recipe."""
        self.parts: dict[str, str] = {}
        """What such nodes have built, by recipe: on the GPU it is found and verified."""
        self._build_ahead([kind for kind in self.room if choose_device_of_kind(kind) == "cpu"])
        self.built: dict[tuple[str, str], CellOutcome] = {}
        self.flights: list[Flight] = []
        self.models: dict[str, str] = {}
        """An artifact of each model that is built: what it was made from is sent to the model's next builds."""
        self.disturbed = list_disturbed_hosts(setting.workspace)

    def run(self) -> None:
        while self.builds or self.loads or self.flights:
            self._send_what_fits()
            self._listen()

    def _build_ahead(self, kinds: Sequence[str]) -> None:
        """Sends the part of builds that needs no GPU (export, calibration, some engines) to nodes without one, where there are any."""
        if not kinds:
            return
        for build in [each for each in self.builds if each.recipe.device == "cuda"]:
            self.builds.remove(build)
            self.ahead.setdefault(build.recipe_key, []).append(build)
        for number, builds in enumerate(self.ahead.values()):
            self.builds.append(replace(builds[0], kind=kinds[number % len(kinds)]))

    def cancel(self) -> None:
        """Ends what runs; Ray kills the workers, and their children die with them."""
        import ray

        for flight in self.flights:
            ray.cancel(flight.stream, force=True)

    def _send_what_fits(self) -> None:
        """Fills the room of every kind; looks no further when there is none, since thousands may wait."""
        busy = Counter(flight.task.kind for flight in self.flights)
        models = {flight.task.recipe.model for flight in self.flights if not flight.task.timing}
        for queue in (self.builds, self.loads):
            at = 0
            for _ in range(len(queue)):
                if all(busy[kind] >= most for kind, most in self.room.items()):
                    return
                task, build = queue[at], queue is self.builds
                same = build and task.recipe.model in models  # its export serves them all: one after the other
                ready = build or (task.recipe_key, task.kind) in self.built
                if busy[task.kind] >= self.room.get(task.kind, 0) or same or not ready:
                    at += 1
                    continue
                before = len(self.flights)
                if build:
                    models.add(task.recipe.model)
                    self._send(queue.pop(at), ExitStack())
                else:
                    self._send_unclaimed(self._take_loads(at))
                busy[task.kind] += len(self.flights) - before

    def _take_loads(self, at: int) -> Task:
        kind, now = self.loads[at].kind, monotonic()
        mine = [flight for flight in self.flights if flight.task.kind == kind]
        ends = [flight.sent + flight.task.expected_s for flight in mine if flight.task.timing]
        slots = self.room[kind] - sum(not flight.task.timing for flight in mine)
        return take_task(self.loads, at, ends, slots, now)

    def _send_unclaimed(self, task: Task) -> None:
        """Sends what no other driver of this workspace runs or has run; what one runs now is waited for."""
        claims, cells = ExitStack(), []
        for cell in task.cells:
            if not claims.enter_context(claim_job(self.setting.workspace, cell.key)):
                self.loads.append(replace(task, cells=(cell,)))
            elif (known := self._find_finished(cell)) is not None:
                self.report(known)
            else:
                cells.append(cell)
        if cells:
            self._send(replace(task, cells=tuple(cells)), claims)
        else:
            claims.close()

    def _find_finished(self, cell: Cell) -> JobRecord | None:
        if self.setting.limits.again:
            return None
        keys = (compute_job_key(cell, each) for each in dict.fromkeys(self.prints.get(cell.kind, ())))
        found = (read_job(self.setting.workspace, key) for key in keys)
        return next((one for one in found if one is not None and one.finished), None)

    def _send(self, task: Task, claims: ExitStack) -> None:
        if task.timing:
            task = replace(task, artifact=self.built[task.recipe_key, task.kind].artifact)
        prints = tuple(dict.fromkeys(self.prints[task.kind]))
        way = self.transport
        errand = Errand(
            task, replace(self.setting, workspace=Path()), way.workspace, way.bucket, prints, self.disturbed
        )
        selector = {**self.selectors, LABEL: label_from_kind(task.kind)}
        remote = self.remotes[choose_device_of_kind(task.kind)].options(label_selector=selector)
        name = secrets.token_hex(8)
        parcels = way.send(task.artifact or self.parts.get(task.recipe_key) or self.models.get(task.recipe.model))
        stream = remote.remote(json_from_record(errand), parcels, self.bell, name)
        self.flights.append(Flight(name, task, stream, claims))

    def _listen(self) -> None:
        import ray

        if not self.flights:  # another driver runs what is left
            sleep(_POLL_S)
            return
        streams = [flight.stream for flight in self.flights]
        ready, rest = ray.wait(streams, num_returns=1, timeout=_POLL_S)
        if rest and ready:
            ready += ray.wait(rest, num_returns=len(rest), timeout=0)[0]
        for flight in list(self.flights):
            if flight.stream in ready:
                self._take(flight)
            elif monotonic() - flight.sent > self.setting.limits.pending_s and not self._has_begun(flight):
                ray.cancel(flight.stream, force=True)
                why = f"no node of kind {flight.task.kind} took it within {self.setting.limits.pending_s:.0f} s (--set pending-timeout)"
                self._lose(flight, why, again=False)

    def _has_begun(self, flight: Flight) -> bool:
        import ray

        if not flight.begun and self.bell is not None:
            flight.begun = flight.name in ray.get(self.bell.list_rung.remote())
        return flight.begun

    def _take(self, flight: Flight) -> None:
        try:
            if flight.receive(streaming=self.bell is None):
                self._land(flight)
        except LostError as error:
            self._lose(flight, str(error), again=True)

    def _land(self, flight: Flight) -> None:
        """All of it is here: into the store, then into the ledger, so that a record never names a run that is not there."""
        reply = flight.reply
        if reply is None:
            raise LostError("the node ended without a reply")
        try:
            unpack(self.transport.fetch(flight.chunks), self.transport.store)
        except (OptpipeError, OSError) as error:  # damaged on the way, or this host's disk is full
            raise LostError(first_line(error)) from error
        self.flights.remove(flight)
        with flight.claims:
            if not flight.task.timing:
                self._note_build(flight.task, reply.outcomes[0])
                return
            for record in reply.records:
                place = record.place and replace(record.place, clock_ahead_s=round(flight.clock_ahead_s, 1))
                self._record(replace(record, place=place))
            if not reply.records:
                self._fail(flight.task, reply.outcomes[0])

    def _note_build(self, build: Task, found: CellOutcome) -> None:
        if found.artifact is not None:
            self.models.setdefault(build.recipe.model, found.artifact)
        if (waiting := self.ahead.pop(build.recipe_key, None)) is not None:
            self.builds += waiting  # whatever came of it: a node with a GPU may be able to
            if found.artifact is not None:
                self.parts[build.recipe_key] = found.artifact
        elif found.state is JobState.DONE:
            self.built[build.recipe_key, build.kind] = found
        else:
            needed = build.recipe_key, build.kind
            lost = [task for task in self.loads if (task.recipe_key, task.kind) == needed]
            self.loads = [task for task in self.loads if (task.recipe_key, task.kind) != needed]
            for task in lost:
                self._fail(replace(task, attempts=build.attempts), found)

    def _lose(self, flight: Flight, why: str, *, again: bool) -> None:
        """A worker, a node or a parcel was lost: tried again while tries are left, its reason kept."""
        self.flights.remove(flight)
        flight.claims.close()
        task, tried = flight.task, (*flight.task.attempts, why)
        if again and len(tried) <= self.setting.limits.retries:
            (self.loads if task.timing else self.builds).append(replace(task, attempts=tried))
        elif task.timing:
            self._fail(task, CellOutcome(JobState.FAILED, why))
        else:
            self._note_build(task, CellOutcome(JobState.FAILED, why))

    def _fail(self, task: Task, found: CellOutcome) -> None:
        slot = Slot("", task.kind, (), next(iter(self.prints.get(task.kind, [""]))), Environment())
        for record in list_records(task, (found,) * len(task.cells), slot, task.attempts, 1):
            self._record(record)

    def _record(self, record: JobRecord) -> None:
        with suppress(OptpipeError):  # a full disk: the row is in the report even so, and the next sweep runs it again
            write_job(self.setting.workspace, record)
        self.report(record)
