"""The executor of a Ray cluster: one Ray task per task, placed by the labels that we give nodes.

Ray's ids of GPUs are bookkeeping: the node's own lock per GPU, its watch and its process group keep figures true, as on one host.
`max_calls=1` stands in the decorator, since `.options()` refuses it: a worker that is used again keeps its CUDA context.
`max_retries=0`: a crash is a result, which we try again with its reason kept. A task that no node can take would wait for ever in
Ray: we count its time. Nothing is shipped by runtime_env: optpipe is installed on every node.
"""

import secrets
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from optpipe.core.environment import Environment
from optpipe.core.interrupts import acknowledge_interrupt
from optpipe.core.records import json_from_record, record_from_json
from optpipe.errors import OptpipeError, first_line
from optpipe.sweep.job import Cell, JobRecord, JobState, compute_job_key
from optpipe.sweep.ledger import claim_job, read_job, write_job
from optpipe.sweep.local import Report, Setting, make_record
from optpipe.sweep.neighbors import list_disturbed_hosts
from optpipe.sweep.order import sort_works, take_work
from optpipe.sweep.parcels import get_chunk, list_needed, pack, put_chunks, unpack
from optpipe.sweep.plan import Work
from optpipe.sweep.ray_cluster import is_client
from optpipe.sweep.ray_node import BEGUN, LABEL, Errand, Reply, make_bell, make_remote
from optpipe.sweep.slots import Slot, label_from_kind
from optpipe.sweep.task import CellOutcome, Task, TaskOutcome
from optpipe.workspace.store import Store

_POLL_S = 1.0


@dataclass
class _Flight:
    """A task that Ray has."""

    name: str
    work: Work
    build: bool
    stream: Any
    """A generator of what it hands back; through Ray Client a reference to the list."""
    sent: float
    attempts: tuple[str, ...] = ()
    begun: bool = False
    reply: Reply | None = None
    chunks: list[bytes] = field(default_factory=list)
    claims: ExitStack = field(default_factory=ExitStack)


def run_on_ray(
    works: Sequence[Work], slots: Sequence[Slot], setting: Setting, report: Report, shared: str | None = None
) -> bool:
    """Runs everything on the cluster that is connected; the driver's store takes in what comes back.

    `shared` is a workspace that all nodes see, or the address of a folder that fsspec opens.
    """
    driver = _Driver(works, slots, setting, report, shared)
    try:
        driver.run()
    except KeyboardInterrupt as interruption:
        acknowledge_interrupt(interruption)
        driver.cancel()
        return False
    return True


_Waiting = tuple[Work, tuple[str, ...]]
"""A work, and why its earlier tries gave nothing."""


class _Driver:
    """Sends builds first, then loads, no more at once than a kind has slots, and takes in what comes back."""

    def __init__(
        self, works: Sequence[Work], slots: Sequence[Slot], setting: Setting, report: Report, shared: str | None
    ) -> None:
        self.setting, self.report = setting, report
        self.bucket = shared if shared is not None and "://" in shared else None
        self.shared = shared if self.bucket is None else None
        self.store = Store(setting.workspace)
        self.room = {kind: sum(slot.kind == kind for slot in slots) for kind in {slot.kind for slot in slots}}
        self.bell = make_bell() if is_client() else None
        streaming = self.bell is None
        self.remotes = {device: make_remote(gpu=device == "cuda", streaming=streaming) for device in ("cpu", "cuda")}
        self.prints = {slot.kind: [each.fingerprint for each in slots if each.kind == slot.kind] for slot in slots}
        works = sort_works(works)
        first = {(work.recipe_key, work.kind): work for work in works}
        self.builds: list[_Waiting] = [(work, ()) for work in first.values()]
        self.loads: list[_Waiting] = [(work, ()) for work in works]
        self.built: dict[tuple[str, str], CellOutcome] = {}
        self.flights: list[_Flight] = []
        self.parcels: dict[str, list[Any]] = {}
        self.models: dict[str, str] = {}
        """An artifact of each model that is built: what it was made from is sent to the model's next builds."""
        self.disturbed = list_disturbed_hosts(setting.workspace)

    def run(self) -> None:
        """Until nothing is left."""
        while self.builds or self.loads or self.flights:
            self._send_what_fits()
            self._listen()

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
        errand = Errand(task, work.kind, setting, self.shared, self.bucket, prints, self.disturbed)
        selector = {LABEL: label_from_kind(work.kind)}
        remote = self.remotes[work.recipe.device].options(label_selector=selector)
        name = secrets.token_hex(8)
        stream = remote.remote(json_from_record(errand), self._wrap(work, artifact), self.bell, name)
        self.flights.append(_Flight(name, work, build, stream, monotonic(), attempts, claims=claims))

    def _wrap(self, work: Work, artifact: str | None) -> list[Any]:
        """What the task reads, in chunks of the object store; the driver owns them, so that no worker's end loses them."""
        import ray

        needed = artifact or self.models.get(work.recipe.model)
        if needed is None or self.shared is not None:
            return []
        if needed not in self.parcels:
            chunks = pack(self.store.workspace, list_needed(self.store, needed))
            keep = (ray.put(chunk) for chunk in chunks) if self.bucket is None else put_chunks(self.bucket, chunks)
            self.parcels[needed] = list(keep)
        return self.parcels[needed]

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
                why = f"no node of kind {flight.work.kind} took it within {self.setting.limits.pending_s:.0f} s"
                self._lose(flight, why, again=False)

    def _has_begun(self, flight: _Flight) -> bool:
        import ray

        if not flight.begun and self.bell is not None:
            flight.begun = flight.name in ray.get(self.bell.list_rung.remote())
        return flight.begun

    def _take(self, flight: _Flight) -> None:
        import ray

        try:
            items = [ray.get(next(flight.stream))] if self.bell is None else ray.get(flight.stream)
        except StopIteration:
            self._land(flight)
            return
        except ray.exceptions.RayTaskError as error:  # such as a disk of the node that is full
            self._lose(flight, f"its node failed: {type(error.cause).__name__}: {first_line(error.cause)}", again=True)
            return
        except ray.exceptions.RayError as error:
            self._lose(flight, f"{type(error).__name__}: {first_line(error)}", again=True)
            return
        for item in items:
            if item == BEGUN:
                flight.begun = True
            elif flight.reply is None:
                flight.reply = record_from_json(item, Reply, "a node")
            else:
                flight.chunks.append(item)
        if self.bell is not None:
            self._land(flight)

    def _land(self, flight: _Flight) -> None:
        """All of it is here: into the store, then into the ledger, so that a record never names a run that is not there."""
        reply = flight.reply
        if reply is None:
            self._lose(flight, "the node ended without a reply", again=True)
            return
        try:
            unpack(self._fetch(flight), self.store)
        except OptpipeError as error:
            self._lose(flight, str(error).replace("\n", " "), again=True)
            return
        self.flights.remove(flight)
        with flight.claims:
            if flight.build:
                self._note_build(flight, reply)
                return
            for record in reply.records:
                self._record(replace(record, attempts=(*flight.attempts, *record.attempts)))
            if not reply.records:
                self._fail(flight.work.cells, flight, reply.outcome.cells[0])

    def _fetch(self, flight: _Flight) -> Iterator[bytes]:
        if self.bucket is None:
            return iter(flight.chunks)
        return (get_chunk(name.decode(), remove=True) for name in flight.chunks)

    def _note_build(self, flight: _Flight, reply: Reply) -> None:
        found = reply.outcome.cells[0]
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

    def _lose(self, flight: _Flight, why: str, *, again: bool) -> None:
        """A worker, a node or a parcel was lost: tried again while tries are left, its reason kept."""
        self.flights.remove(flight)
        flight.claims.close()
        tried = (*flight.attempts, why)
        if again and len(tried) <= self.setting.limits.retries:
            (self.builds if flight.build else self.loads).append((flight.work, tried))
            return
        found = CellOutcome(JobState.FAILED, why)
        if flight.build:
            self._note_build(flight, Reply(TaskOutcome((found,)), tried, ()))
        else:
            self._fail(flight.work.cells, flight, found)

    def _fail(self, cells: Sequence[Cell], flight: _Flight, found: CellOutcome) -> None:
        slot = Slot("", flight.work.kind, (), next(iter(self.prints.get(flight.work.kind, [""]))), Environment())
        for cell in cells:
            self._record(make_record(cell, slot, TaskOutcome(()), found, flight.attempts, 1, 1))

    def _record(self, record: JobRecord) -> None:
        with suppress(OptpipeError):  # a full disk: the row is in the report even so, and the next sweep runs it again
            write_job(self.setting.workspace, record)
        self.report(record)
