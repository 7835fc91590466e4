"""The executor of a Ray cluster: one Ray task per task, placed by the labels that we give nodes.

Ray's ids of GPUs are bookkeeping: the node's own lock per GPU, its watch and its process group keep figures true, as on one host.
`max_calls=1` stands in the decorator, since `.options()` refuses it: a worker that is used again keeps its CUDA context.
`max_retries=0`: a crash is a result, which we try again with its reason kept. A task that no node can take would wait for ever in
Ray: we count its time. Nothing is shipped by runtime_env: optpipe is installed on every node.
"""

import secrets
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import monotonic, sleep, time
from typing import Any

from optpipe.core.entries import Environment
from optpipe.core.errors import OptpipeError, StageError, first_line
from optpipe.core.process import acknowledge_interrupt
from optpipe.core.records import json_from_record, record_from_json
from optpipe.sweep.job import Cell, JobRecord, JobState, compute_job_key
from optpipe.sweep.ledger import claim_job, read_job, write_job
from optpipe.sweep.local import Report, Setting, make_record
from optpipe.sweep.matrix import choose_device_of_kind
from optpipe.sweep.neighbors import list_disturbed_hosts
from optpipe.sweep.order import sort_works, take_work
from optpipe.sweep.plan import Work
from optpipe.sweep.ray_cluster import LABEL, Selector, is_client, label_from_kind
from optpipe.sweep.ray_node import BEGUN, Errand, Reply, make_bell, make_remote
from optpipe.sweep.slots import Slot
from optpipe.sweep.task import CellOutcome, Task, TaskOutcome
from optpipe.sweep.transport import Transport, unpack
from optpipe.workspace.store import Store

CLOCKS_S = 2.0
"""Clocks of hosts that differ by less are one clock."""


class LostError(StageError):
    """A worker, a node or a parcel was lost: another try may succeed."""


@dataclass
class Flight:
    """One task that was sent."""

    name: str
    work: Work
    build: bool
    stream: Any
    """A generator of what it hands back; through Ray Client a reference to the list."""
    attempts: tuple[str, ...] = ()
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
    works: Sequence[Work],
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
    driver = _Driver(works, slots, setting, report, Transport(Store(setting.workspace), shared), selectors)
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


_Waiting = tuple[Work, tuple[str, ...]]
"""A work, and why its earlier tries gave nothing."""


class _Driver:
    """Sends builds first, then loads, no more at once than a kind has slots, and takes in what comes back."""

    def __init__(
        self,
        works: Sequence[Work],
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
        works = sort_works(works)
        first = {(work.recipe_key, work.kind): work for work in works}
        self.builds: list[_Waiting] = [(work, ()) for work in first.values()]
        self.ahead: dict[str, list[_Waiting]] = {}
        """Builds for GPUs that wait until a node without one has done its part, by recipe."""
        self.parts: dict[str, str] = {}
        """What such nodes have built, by recipe: on the GPU it is found and verified."""
        self._build_ahead([kind for kind in self.room if choose_device_of_kind(kind) == "cpu"])
        self.loads: list[_Waiting] = [(work, ()) for work in works]
        self.built: dict[tuple[str, str], CellOutcome] = {}
        self.flights: list[Flight] = []
        self.models: dict[str, str] = {}
        """An artifact of each model that is built: what it was made from is sent to the model's next builds."""
        self.disturbed = list_disturbed_hosts(setting.workspace)

    def run(self) -> None:
        """Until nothing is left."""
        while self.builds or self.loads or self.flights:
            self._send_what_fits()
            self._listen()

    def _build_ahead(self, kinds: Sequence[str]) -> None:
        """Sends the part of builds that needs no GPU (export, calibration, some engines) to nodes without one, where there are any."""
        if not kinds:
            return
        for waiting in [each for each in self.builds if each[0].recipe.device == "cuda"]:
            self.builds.remove(waiting)
            self.ahead.setdefault(waiting[0].recipe_key, []).append(waiting)
        for number, works in enumerate(self.ahead.values()):
            self.builds.append((replace(works[0][0], kind=kinds[number % len(kinds)], cells=()), ()))

    def cancel(self) -> None:
        """Ends what runs; Ray kills the workers, and their children die with them."""
        import ray

        for flight in self.flights:
            ray.cancel(flight.stream, force=True)

    def _send_what_fits(self) -> None:
        """Fills the room of every kind; looks no further when there is none, since thousands may wait."""
        busy = Counter(flight.work.kind for flight in self.flights)
        models = {flight.work.recipe.model for flight in self.flights if flight.build}
        for queue, build in ((self.builds, True), (self.loads, False)):
            at = 0
            for _ in range(len(queue)):
                if all(busy[kind] >= most for kind, most in self.room.items()):
                    return
                work, attempts = queue[at]
                same = build and work.recipe.model in models  # its export serves them all: one after the other
                ready = build or (work.recipe_key, work.kind) in self.built
                if busy[work.kind] >= self.room.get(work.kind, 0) or same or not ready:
                    at += 1
                    continue
                before = len(self.flights)
                if build:
                    models.add(work.recipe.model)
                    queue.pop(at)
                    self._send(work, attempts, ExitStack(), build=True)
                else:
                    self._send_unclaimed(self._take_loads(at), attempts)
                busy[work.kind] += len(self.flights) - before

    def _take_loads(self, at: int) -> Work:
        kind, now = self.loads[at][0].kind, monotonic()
        mine = [flight for flight in self.flights if flight.work.kind == kind]
        ends = [flight.sent + flight.work.expected_s for flight in mine if not flight.build]
        slots = self.room[kind] - sum(flight.build for flight in mine)
        return take_work(self.loads, at, ends, slots, now)

    def _send_unclaimed(self, work: Work, attempts: tuple[str, ...]) -> None:
        """Sends what no other driver of this workspace runs or has run; what one runs now is waited for."""
        claims, cells = ExitStack(), []
        for cell in work.cells:
            if not claims.enter_context(claim_job(self.setting.workspace, cell.key)):
                self.loads.append((replace(work, cells=(cell,)), attempts))
            elif (known := self._find_finished(cell)) is not None:
                self.report(known)
            else:
                cells.append(cell)
        if cells:
            self._send(replace(work, cells=tuple(cells)), attempts, claims, build=False)
        else:
            claims.close()

    def _find_finished(self, cell: Cell) -> JobRecord | None:
        if self.setting.again:
            return None
        keys = (compute_job_key(cell, each) for each in dict.fromkeys(self.prints.get(cell.kind, ())))
        found = (read_job(self.setting.workspace, key) for key in keys)
        return next((one for one in found if one is not None and one.finished), None)

    def _send(self, work: Work, attempts: tuple[str, ...], claims: ExitStack, *, build: bool) -> None:
        artifact = None if build else self.built[work.recipe_key, work.kind].artifact
        task = Task("", work.recipe, () if build else work.cells, artifact)
        prints = tuple(dict.fromkeys(self.prints[work.kind]))
        setting = replace(self.setting, workspace=Path())
        way = self.transport
        errand = Errand(task, work.kind, setting, way.workspace, way.bucket, prints, self.disturbed)
        selector = {**self.selectors, LABEL: label_from_kind(work.kind)}
        remote = self.remotes[choose_device_of_kind(work.kind)].options(label_selector=selector)
        name = secrets.token_hex(8)
        parcels = way.send(artifact or self.parts.get(work.recipe_key) or self.models.get(work.recipe.model))
        stream = remote.remote(json_from_record(errand), parcels, self.bell, name)
        self.flights.append(Flight(name, work, build, stream, attempts, claims))

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
                why = f"no node of kind {flight.work.kind} took it within {self.setting.limits.pending_s:.0f} s (--set pending-timeout)"
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
            if flight.build:
                self._note_build(flight, reply.outcome.cells[0])
                return
            for record in reply.records:
                place = record.place and replace(record.place, clock_ahead_s=round(flight.clock_ahead_s, 1))
                self._record(replace(record, place=place, attempts=(*flight.attempts, *record.attempts)))
            if not reply.records:
                self._fail(flight.work.cells, flight, reply.outcome.cells[0])

    def _note_build(self, flight: Flight, found: CellOutcome) -> None:
        if (waiting := self.ahead.pop(flight.work.recipe_key, None)) is not None:
            self.builds += waiting  # whatever came of it: a node with a GPU may be able to
            if found.artifact is not None:
                self.parts[flight.work.recipe_key] = found.artifact
                self.models.setdefault(flight.work.recipe.model, found.artifact)
            return
        if found.state is JobState.DONE:
            self.built[flight.work.recipe_key, flight.work.kind] = found
            if found.artifact is not None:
                self.models.setdefault(flight.work.recipe.model, found.artifact)
            return
        lost = [work for work, _ in self.loads if self._needs(work, flight.work)]
        self.loads = [each for each in self.loads if not self._needs(each[0], flight.work)]
        self._fail([cell for work in lost for cell in work.cells], flight, found)

    @staticmethod
    def _needs(work: Work, built: Work) -> bool:
        return (work.recipe_key, work.kind) == (built.recipe_key, built.kind)

    def _lose(self, flight: Flight, why: str, *, again: bool) -> None:
        """A worker, a node or a parcel was lost: tried again while tries are left, its reason kept."""
        self.flights.remove(flight)
        flight.claims.close()
        tried = (*flight.attempts, why)
        if again and len(tried) <= self.setting.limits.retries:
            (self.builds if flight.build else self.loads).append((flight.work, tried))
            return
        found = CellOutcome(JobState.FAILED, why)
        if flight.build:
            self._note_build(flight, found)
        else:
            self._fail(flight.work.cells, flight, found)

    def _fail(self, cells: Sequence[Cell], flight: Flight, found: CellOutcome) -> None:
        slot = Slot("", flight.work.kind, (), next(iter(self.prints.get(flight.work.kind, [""]))), Environment())
        for cell in cells:
            self._record(make_record(cell, slot, TaskOutcome(()), found, flight.attempts, 1, 1))

    def _record(self, record: JobRecord) -> None:
        with suppress(OptpipeError):  # a full disk: the row is in the report even so, and the next sweep runs it again
            write_job(self.setting.workspace, record)
        self.report(record)
