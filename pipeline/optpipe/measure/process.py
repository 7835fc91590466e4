"""A worker process from the parent's side: ask for points, listen for events, look at the machine in between."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Self

from optpipe.core.errors import ExitStatus, StageError
from optpipe.core.interrupts import acknowledge_interrupt
from optpipe.core.records import record_from_json
from optpipe.measure.machine import INTERVAL_S, MachineRow, MachineSampler, read_gpu_used_bytes
from optpipe.measure.pool import STOP_SECONDS, StartedWorker, WorkerPool
from optpipe.measure.worker.plan import Point, PointReport, SessionPlan, WorkerEvent
from optpipe.measure.worker.spool import count_spooled, request_stop


@dataclass(frozen=True, slots=True)
class PointResult:
    """What came back for one point. Samples lie in the point's spool whatever happened."""

    point: Point
    done: PointReport | None
    """The worker's closing words; None where it did not get that far."""
    failure: str | None = None
    """`out-of-memory`, `refused` or `died`."""
    message: str = ""
    status: ExitStatus = ExitStatus.STAGE_FAILED
    rows: tuple[MachineRow, ...] = ()
    interrupted: bool = False


@dataclass
class WorkerProcess:
    """A fresh process with a session: taken from the pool on entry, ended, by force if need be, on exit."""

    plan: SessionPlan
    pool: WorkerPool
    kind: str = ""
    """Which workers import the same: a runtime, a precision, a device."""
    on_progress: Callable[[Point, int], None] = lambda _point, _count: None
    ready: WorkerEvent | None = None
    """What it said of itself when it had loaded."""
    baseline_gpu_bytes: int | None = None
    _started: StartedWorker | None = None
    _buffer: bytes = b""

    def __enter__(self) -> Self:
        self._started = self.pool.take(self.kind)
        if self.plan.device.startswith("cuda"):
            self.baseline_gpu_bytes = read_gpu_used_bytes()
        self._started.send(self.plan)
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._running().end(0.1 if kind else STOP_SECONDS)

    @property
    def alive(self) -> bool:
        """Whether it can take another point."""
        return self._started is not None and self._started.process.poll() is None

    @property
    def affinity(self) -> tuple[int, ...]:
        """The processors that it may use: those of the pool, else this process's."""
        return tuple(sorted(self.pool.affinity or os.sched_getaffinity(0)))

    def measure(self, point: Point) -> PointResult:
        """Puts one point on the worker and waits for its end, looking at the machine every INTERVAL_S."""
        self._running().send(point)
        return self._listen(point)

    def _listen(self, point: Point) -> PointResult:
        rows: list[MachineRow] = []
        sampler: MachineSampler | None = self._sampler()
        deadline: float | None = None
        while True:
            try:
                event = self._event(INTERVAL_S)
                if event is None and sampler is not None:
                    rows.append(sampler.sample())
                    self.on_progress(point, count_spooled(Path(point.spool)))
            except KeyboardInterrupt as interruption:
                if deadline is not None:
                    raise
                acknowledge_interrupt(interruption)
                request_stop(Path(point.spool))
                begun = Path(point.spool).exists()  # else it is still loading, and there is nothing to wait for
                deadline = monotonic() + (STOP_SECONDS if begun else 0.0)
                continue
            kind = event.kind if event else None
            if event and kind == "ready":
                self.ready = event
                sampler = self._sampler()
            elif event and kind == "measuring" and sampler is not None:
                rows.append(sampler.sample())  # rates start anew with the measured part
            elif event and kind == "done":
                rows.extend([sampler.sample()] if sampler else [])
                # Asked to stop just as it was done, it has not stopped early; all ends here even so.
                self.pool.learn(self.kind, event.modules)
                stopped = (event.report is not None and event.report.stopped) or deadline is not None
                return PointResult(point, event.report, rows=tuple(rows), interrupted=stopped)
            elif event and deadline is not None:
                return PointResult(point, None, rows=tuple(rows), interrupted=True)
            elif event and kind in ("out-of-memory", "failed", "ended"):
                return self._failed(point, event, rows)
            if deadline is not None and monotonic() > deadline:
                self._running().process.kill()

    def _sampler(self) -> MachineSampler | None:
        return MachineSampler(self.ready.pid, self.ready.gpu_uuid, self.affinity) if self.ready else None

    def _failed(self, point: Point, event: WorkerEvent, rows: list[MachineRow]) -> PointResult:
        if event.kind == "out-of-memory":
            return PointResult(point, None, "out-of-memory", event.message, rows=tuple(rows))
        if event.kind == "failed":
            return PointResult(point, None, "refused", event.message, ExitStatus(event.status), tuple(rows))
        code = self._running().process.wait()
        killed = code == -9
        return PointResult(
            point,
            None,
            "out-of-memory" if killed else "died",
            "the worker was killed (signal 9), most likely because the host ran out of memory"
            if killed
            else self._last_words(code),
            rows=tuple(rows),
        )

    def _event(self, seconds: float) -> WorkerEvent | None:
        """The next event, None after `seconds` without one, `ended` when the worker has closed its output."""
        worker = self._running()
        while b"\n" not in self._buffer:
            if not worker.wait_for_event(seconds):
                return None
            chunk = os.read(worker.process.stdout.fileno(), 65536)  # type: ignore[union-attr]
            if not chunk:
                return WorkerEvent("ended")
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        return record_from_json(line, WorkerEvent, "worker")

    def _last_words(self, code: int) -> str:
        log = self._running().log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        how = f"signal {-code}" if code < 0 else f"status {code}"
        return f"the worker exited with {how}: {log[-1][:240] if log else 'no output'}"

    def _running(self) -> StartedWorker:
        if self._started is None:
            raise StageError("the worker was not started")
        return self._started
