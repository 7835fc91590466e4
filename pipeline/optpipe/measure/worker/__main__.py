import gc
import os
import resource
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from optpipe.core import torch
from optpipe.core.errors import OptpipeError, first_line, is_out_of_memory
from optpipe.core.load import LoadSpec, Scenario
from optpipe.core.message_wire import text_from_message
from optpipe.core.process import end_with_parent
from optpipe.core.records import line_from_record, record_from_json
from optpipe.measure.worker.checks import (
    Reservoir,
    Rotation,
    check_outputs,
    compute_untimed_outputs,
    count_reference_inputs,
    draw_rotation,
    limit_output_checks,
    pool_from_files,
    probe_cache,
)
from optpipe.measure.worker.loading import LoadClock, draw_smallest_batch
from optpipe.measure.worker.loops import CpuLane, CudaLane, Lane, PointRun, run_load
from optpipe.measure.worker.messages import (
    Point,
    PointReport,
    SessionSpec,
    Spool,
    WorkerEvent,
    WorkerStart,
    session_from_loader,
)

_Prepared = tuple[Rotation, Sequence[Mapping[str, Any]], list[Lane]]


def main() -> None:
    """Imports the requested modules, loads the session, then answers points until standard input ends."""
    end_with_parent()
    events = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)  # output of libraries goes to the log on standard error
    _prepare(record_from_json(sys.stdin.readline(), WorkerStart, "standard input"))
    events.write(_line(WorkerEvent("standing-by")))
    if not (line := sys.stdin.readline()):
        return
    spec = record_from_json(line, SessionSpec, "standard input")
    try:
        with ExitStack() as stack:
            worker = Worker(spec, stack)
            events.write(_line(worker.ready()))
            for line in sys.stdin:
                report = worker.measured(record_from_json(line, Point, "standard input"), events)
                events.write(_line(WorkerEvent("done", report=report, modules=tuple(sys.modules))))
    except OptpipeError as error:
        message = text_from_message(error.message)
        events.write(_line(WorkerEvent("failed", status=int(error.exit_status), message=message)))
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        events.write(_line(WorkerEvent("out-of-memory", message=first_line(error))))


def _line(event: WorkerEvent) -> str:
    return line_from_record(event).decode()


def _prepare(start: WorkerStart) -> None:
    """Sets the affinity before importing, since libraries count processors on import."""
    if start.affinity:
        os.sched_setaffinity(0, start.affinity)
    for name in start.imports:
        with suppress(Exception):  # some modules are created by others; loading imports them
            import_module(name)


class Worker:
    def __init__(self, spec: SessionSpec, stack: ExitStack) -> None:
        self.spec = spec
        self.reference = pool_from_files(spec.reference)
        self.streams: list[Any] = [None] * spec.streams
        if spec.device.startswith("cuda"):
            self.streams = [torch.cuda.Stream() for _ in range(spec.streams)]
        self._last: tuple[tuple[object, ...], _Prepared] | None = None
        """The load of the previous point and the inputs prepared for it."""
        first, *others = self.streams
        clock = LoadClock()
        with clock.run():
            session = stack.enter_context(self._load_session(first))
        self.load_ns, self.load_why_not = self._answer_first(session, clock)
        more = [stack.enter_context(self._load_session(stream)) for stream in others]
        self.sessions = [session, *more]

    def _answer_first(self, session: Any, clock: LoadClock) -> tuple[int | None, str | None]:
        """The time to the first answer of a loaded session, or why it gave none; the point that is measured then fails too."""
        inputs = draw_smallest_batch(pool_from_files(self.spec.inputs), self.spec)
        try:
            with clock.run():
                session.run(inputs)
        except Exception as error:  # noqa: BLE001, a runtime may raise anything
            return None, f"the first call failed: {first_line(error)}"
        return clock.elapsed_ns, None

    def _load_session(self, stream: Any) -> Any:
        with (
            torch.cuda.stream(stream) if stream else nullcontext()
        ):  # ONNX Runtime keeps the current one when it loads
            return session_from_loader(self.spec.loader, self.spec.arguments)

    def ready(self) -> WorkerEvent:
        """The event with the facts that the parent needs to watch this process."""
        if not self.spec.device.startswith("cuda"):
            return WorkerEvent("ready", pid=os.getpid())
        return WorkerEvent(
            "ready", pid=os.getpid(), gpu_uuid=f"GPU-{torch.cuda.get_device_properties(0).uuid}"
        )

    def measured(self, point: Point, events: Any) -> PointReport:
        asked = point.load
        turns, before, lanes = self._prepare(asked)
        with suppress(OSError):  # otherwise the peak is the whole process's
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        kept = Reservoir(limit_output_checks(asked.output_checks, before[0]), self.spec.seed)
        measuring = partial(events.write, _line(WorkerEvent("measuring")))
        gc.collect()
        gc.freeze()
        gc.disable()
        with Spool(Path(point.spool)) as spool:
            load = PointRun(
                asked, spool, lanes, len(turns.batches), kept, measuring, point.arrivals_seed
            )
            run_load(load)
            stopped = spool.stopped
        gc.enable()
        peak_bytes = _read_peak_resident_bytes() - _count_own_bytes(lanes, before, kept)
        spec, session, probes = self.spec, self.sessions[0], 0 if stopped else asked.cache_probes
        answers = [(index, lanes[0].on_host(outputs)) for index, outputs in kept.kept]
        return PointReport(
            steady=load.steady,
            queries_needed=load.queries_needed,
            stopped=stopped,
            host_peak_bytes=max(0, peak_bytes),
            rotated=len(turns.batches),
            rotated_bytes=turns.nbytes if isinstance(lanes[0], CudaLane) else 0,
            output_check=check_outputs(
                answers,
                before,
                self.reference,
                turns.rows,
                spec.tolerance,
                spec.reference_name,
                spec.output_axes,
                spec.selection,
            ),
            cache_probe=probe_cache(
                session,
                lanes[0],
                turns,
                probes,
                spec.seed,
                spec.tolerance,
                spec.input_axes,
                spec.selection,
            ),
            load_ns=self.load_ns,
            load_why_not=self.load_why_not,
        )

    def _prepare(self, asked: LoadSpec) -> _Prepared:
        """The rotated inputs, the session's untimed outputs for them, and the lanes that they are bound to.

        A point without warm-up reuses those of the previous point, since untimed calls would take longer than a short
        point's timed ones. Probes of the cache overwrite inputs, so inputs that they touched are never reused.
        """
        used = (
            len(self.streams) if asked.scenario in (Scenario.MULTI_STREAM, Scenario.OFFLINE) else 1
        )
        load, prepared = (asked.batch_size, asked.mode, used), self._last
        if prepared is None or prepared[0] != load or asked.max_warm_up_seconds > 0:
            prepared = self._last = None  # frees the previous buffers
            pool, known = pool_from_files(self.spec.inputs), count_reference_inputs(self.reference)
            turns = draw_rotation(
                pool, asked.batch_size, self.spec.seed, known, self.spec.input_axes
            )
            before = compute_untimed_outputs(self.sessions[0], turns)
            turns = turns.first(len(before))
            prepared = (
                load,
                (turns, before, [self._lane(turns, asked, number) for number in range(used)]),
            )
        self._last = prepared if asked.cache_probes == 0 else None
        return prepared[1]

    def _lane(self, turns: Rotation, asked: LoadSpec, number: int) -> Lane:
        if self.streams[number] is None:
            return CpuLane(self.sessions[number], turns, asked.mode)
        return CudaLane(self.sessions[number], turns, asked.mode, self.streams[number])


def _count_own_bytes(
    lanes: Sequence[Lane], before: Sequence[Mapping[str, Any]], kept: Reservoir
) -> int:
    """Host memory of the measurement itself: rotated inputs and answers for the comparison."""
    answers = [*before, *(outputs for _, outputs in kept.kept if isinstance(lanes[0], CpuLane))]
    arrays = [array for answer in answers for array in answer.values()]
    arrays += [array for lane in lanes for array in lane.list_spare_arrays()]
    sizes = {
        array.__array_interface__["data"][0]: array.nbytes for array in arrays
    }  # several lanes share the arrays
    return sum(sizes.values())


def _read_peak_resident_bytes() -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
    peak = next((int(line.split()[1]) for line in lines if line.startswith("VmHWM")), None)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss if peak is None else peak) * 1024


if __name__ == "__main__":
    main()
