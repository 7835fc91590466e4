"""The parent's side of a worker process: started ahead of time, given points, and watched while it measures.

Most of a process's start is importing a runtime. Modules that one worker imported are imported by the next of its kind
in advance, in as many processes as there are processors, and never during a measurement. Workers are not forked: the memory
layout is part of what a fresh process is measured for.
"""

import os
import select
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic, perf_counter_ns
from typing import Any, Self

from optpipe.core.errors import ExitStatus, StageError
from optpipe.core.message_wire import message_from_text
from optpipe.core.process import acknowledge_interrupt, start_python
from optpipe.core.records import line_from_record, record_from_json
from optpipe.measure.worker.messages import (
    Point,
    PointReport,
    SessionSpec,
    WorkerEvent,
    WorkerStart,
    request_stop,
)
from optpipe.workspace.energy import (
    EnergyReading,
    EnergyUse,
    compute_energy_use,
    read_package_energy,
)
from optpipe.workspace.environment import count_cores, list_gpus

INTERVAL_S = 0.2

POWER_CAP = "power cap"
THROTTLE_REASONS: Mapping[int, str] = {
    0x04: POWER_CAP,
    0x08: "hardware slowdown",
    0x20: "thermal slowdown (software)",
    0x40: "thermal slowdown (hardware)",
    0x80: "power brake",
}
"""NVML clock event reasons that reduce speed. Idle, and clocks that a user set, do not count."""

MachineRow = dict[str, int | float | None]


class MachineSampler:
    """Samples one worker, the processors it may use (default: all) and its device."""

    def __init__(
        self, pid: int, gpu_uuid: str | None = None, cpus: Collection[int] | None = None
    ) -> None:
        self._pid, self._cpus = pid, cpus
        self._gpu = _find_gpu(gpu_uuid) if gpu_uuid else None
        self._last = self._counters()
        self._ticks = os.sysconf("SC_CLK_TCK")

    def sample(self) -> MachineRow:
        """A row with the columns of `core.measurement.MACHINE_COLUMNS`; rates are since the last sample."""
        now = self._counters()
        seconds = max((now["time_ns"] - self._last["time_ns"]) / 1e9, 1e-9)
        rate = {name: max(0, now[name] - self._last[name]) / seconds for name in now}
        busy, worker, own = (rate[name] / self._ticks for name in ("busy", "worker", "own"))
        self._last = now
        row: MachineRow = {
            "time_ns": now["time_ns"],
            "other_cpu_cores": max(0.0, busy - worker - own),
            "worker_cpu_cores": worker,
            "worker_waited_cores": rate["waited_ns"] / 1e9,
            "worker_rss_bytes": _read_resident_bytes(self._pid),
            "cpu_mhz": _read_cpu_mhz(self._cpus),
        }
        return row | (self._gpu.sample(self._pid) if self._gpu else {})

    def _counters(self) -> dict[str, int]:
        return {
            "time_ns": perf_counter_ns(),
            "busy": read_busy_ticks(self._cpus),
            "worker": read_process_ticks(self._pid),
            "own": read_process_ticks(os.getpid()),
            "waited_ns": _read_waited_ns(self._pid),
        }


def read_busy_ticks(cpus: Collection[int] | None = None) -> int:
    """Ticks of everything except idle and I/O wait; time stolen by the hypervisor counts as busy.

    Over all processors, or `cpus`: others do not disturb a worker that is kept off them.
    """
    wanted = {"cpu"} if cpus is None else {f"cpu{cpu}" for cpu in cpus}
    total = 0
    with Path("/proc/stat").open(encoding="ascii") as file:
        for line in file:
            name, *ticks = line.split()
            if name in wanted:
                user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, ticks[:8])
                total += user + nice + system + irq + softirq + steal
    return total


def read_process_ticks(pid: int) -> int:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return 0
    return int(fields[11]) + int(fields[12])


def _read_waited_ns(pid: int) -> int:
    total = 0
    for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with suppress(OSError, IndexError):
            total += int(path.read_text(encoding="ascii").split()[1])
    return total


def _read_resident_bytes(pid: int) -> int | None:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]) * os.sysconf(
            "SC_PAGE_SIZE"
        )
    except OSError:
        return None


def _read_cpu_mhz(cpus: Collection[int] | None) -> float | None:
    readings = []
    for name in ["cpu[0-9]*"] if cpus is None else [f"cpu{cpu}" for cpu in cpus]:
        for path in Path("/sys/devices/system/cpu").glob(f"{name}/cpufreq/scaling_cur_freq"):
            with suppress(OSError, ValueError):
                readings.append(int(path.read_text(encoding="ascii")) / 1000)
    return sum(readings) / len(readings) if readings else None


def _find_gpu(uuid: str | None) -> "_Gpu | None":
    """The GPU with this UUID, otherwise CUDA's first; None without NVML or a GPU, whose columns then stay null."""
    try:
        import pynvml
    except ModuleNotFoundError:
        return None
    try:
        pynvml.nvmlInit()
        with suppress(pynvml.NVMLError):
            if uuid:
                return _Gpu(pynvml, pynvml.nvmlDeviceGetHandleByUUID(uuid))
        return (
            _Gpu(pynvml, pynvml.nvmlDeviceGetHandleByIndex(list_gpus()[0].index))
            if list_gpus()
            else None
        )
    except pynvml.NVMLError:
        return None


class _Gpu:
    """One GPU through NVML. Values that the driver does not support stay null."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml, self._handle = nvml, handle

    def sample(self, pid: int) -> MachineRow:
        nvml, handle = self._nvml, self._handle
        memory = self._read(nvml.nvmlDeviceGetMemoryInfo, handle)
        load = self._read(nvml.nvmlDeviceGetUtilizationRates, handle)
        power = self._read(nvml.nvmlDeviceGetPowerUsage, handle)
        processes = self._read(nvml.nvmlDeviceGetComputeRunningProcesses, handle)
        mine = [process for process in processes or [] if process.pid == pid]
        return {
            "gpu_sm_mhz": self._read(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM),
            "gpu_mem_mhz": self._read(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_MEM),
            "gpu_temperature_c": self._read(
                nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU
            ),
            "gpu_power_w": None if power is None else power / 1000,
            "gpu_energy_mj": self._read(nvml.nvmlDeviceGetTotalEnergyConsumption, handle),
            "gpu_utilization": None if load is None else int(load.gpu),
            "gpu_used_bytes": None if memory is None else int(memory.used),
            "gpu_worker_bytes": mine[0].usedGpuMemory if mine else None,
            "gpu_other_processes": None
            if processes is None
            else count_other_processes([process.pid for process in processes], pid),
            "gpu_throttle_reasons": self._read(
                nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle
            ),
        }

    def _read(self, call: Any, *arguments: Any) -> Any:
        try:
            return call(*arguments)
        except self._nvml.NVMLError:
            return None


def count_other_processes(listed: Sequence[int], worker: int) -> int:
    """How many of the processes with a context on the GPU are neither the worker nor this one, which waits for it.

    A program that calls the library mostly has a context: a module in memory, or builds that it called. In a container NVML shows
    the ids of the host, so that the worker counts as one of them, and this process as another if it uses CUDA.
    """
    if own := {worker, os.getpid()}.intersection(listed):
        return len(listed) - len(own)
    return max(0, len(listed) - 1 - has_cuda_context())


def has_cuda_context() -> bool:
    """Whether torch has a context on a GPU in this process."""
    module = sys.modules.get("torch")
    return module is not None and module.cuda.is_initialized()


MAX_STANDING_BY = 12
"""Bounds memory: each worker holds its libraries' data, some 300 MB with torch. A race of three builds mostly takes 11."""
STOP_SECONDS = 10.0
FAILURES = ("out-of-memory", "failed", "ended")
"""Events that end a point without a result."""


@dataclass(frozen=True, slots=True)
class StartedWorker:
    process: "subprocess.Popen[bytes]"
    log: Path

    def send(self, record: object) -> None:
        if self.process.stdin:
            with suppress(BrokenPipeError):
                self.process.stdin.write(line_from_record(record))

    def wait_for_event(self, seconds: float | None) -> bool:
        """Whether its output is readable, or has ended, within `seconds`."""
        if self.process.stdout is None:
            raise StageError("the worker has no output")
        return bool(select.select([self.process.stdout], [], [], seconds)[0])

    def end(self, seconds: float = STOP_SECONDS) -> None:
        if self.process.stdin:
            self.process.stdin.close()
        try:
            self.process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.process.stdout:
            self.process.stdout.close()


class WorkerPool:
    """Starts workers; a context manager that ends unused ones."""

    def __init__(
        self,
        directory: Path,
        affinity: Sequence[int] | None = None,
        python: str = "",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Workers run in the interpreter `python`, or in this one, with `environment` or this process's variables."""
        self._python, self._environment = python, environment
        self.directory, self.affinity = directory, None if affinity is None else tuple(affinity)
        self.modules: dict[str, tuple[str, ...]] = {}
        self._waiting: dict[str, list[StartedWorker]] = {}
        self._prepared: list[StartedWorker] = []
        self._expected: dict[str, int] = {}
        self._count = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for worker in (
            worker for group in (*self._waiting.values(), self._prepared) for worker in group
        ):
            worker.process.kill()
            worker.end()
        self._waiting.clear()
        self._prepared.clear()

    def expect(self, kind: str, count: int) -> None:
        self._expected[kind] = self._expected.get(kind, 0) + count

    def prepare(self, modules: Sequence[str]) -> None:
        """Starts processes of any kind that import `modules` while something else is done before measurements."""
        self._prepared += [self._start(modules) for _ in range(min(count_cores(), MAX_STANDING_BY))]

    def take(self, kind: str) -> StartedWorker:
        """A fresh process. If none stands by, starts as many as are expected and have processors."""
        waiting = self._waiting.setdefault(kind, [])
        expected = self._expected.get(kind, 0)
        for worker in self._prepared:  # no imports during a measurement
            worker.wait_for_event(None)
        if not waiting and self._prepared:
            waiting.append(self._prepared.pop(0))
        if not waiting:
            many = (
                max(1, min(expected, count_cores(), MAX_STANDING_BY)) if kind in self.modules else 1
            )
            waiting += [self._start(self.modules.get(kind, ())) for _ in range(many)]
            for worker in waiting if many > 1 else ():  # no imports during a measurement
                worker.wait_for_event(None)
        self._expected[kind] = max(expected - 1, 0)
        return waiting.pop(0)

    def _start(self, modules: Sequence[str]) -> StartedWorker:
        self.directory.mkdir(parents=True, exist_ok=True)
        log = self.directory / f"worker-{self._count}.log"
        self._count += 1
        with log.open("ab") as errors:
            process = start_python(
                "optpipe.measure.worker",
                program=self._python,
                environment=self._environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,  # the parent handles Ctrl-C, and the worker ends its measurement in order
                bufsize=0,
            )
        started = StartedWorker(process, log)
        started.send(WorkerStart(self.affinity, tuple(modules)))
        return started


@dataclass(frozen=True, slots=True)
class PointResult:
    point: Point
    done: PointReport | None
    """None if the worker did not finish."""
    failure: str | None = None
    """`out-of-memory`, `refused` or `died`."""
    message: str = ""
    status: ExitStatus = ExitStatus.STAGE_FAILED
    rows: tuple[MachineRow, ...] = ()
    interrupted: bool = False
    energy: EnergyUse | None = None
    """Of the CPU packages while it was measured, if it ended."""


@dataclass
class WorkerProcess:
    """A fresh process with a session: taken from the pool on entry, ended, by force if necessary, on exit."""

    spec: SessionSpec
    pool: WorkerPool
    kind: str = ""
    """Workers of one kind import the same modules: a runtime, a precision, a device."""
    ready: WorkerEvent | None = None
    baseline_gpu_bytes: int | None = None
    _started: StartedWorker = field(init=False)
    _buffer: bytes = b""

    def __enter__(self) -> Self:
        self._started = self.pool.take(self.kind)
        if self.spec.device.startswith("cuda") and (gpu := _find_gpu(None)) is not None:
            used = gpu.sample(0)["gpu_used_bytes"]
            self.baseline_gpu_bytes = None if used is None else int(used)
        self._started.send(self.spec)
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._started.end(0.1 if kind else STOP_SECONDS)

    @property
    def alive(self) -> bool:
        return self._started.process.poll() is None

    @property
    def affinity(self) -> tuple[int, ...]:
        """Processors that it may use: those of the pool, otherwise this process's."""
        return tuple(sorted(self.pool.affinity or os.sched_getaffinity(0)))

    def measure(self, point: Point) -> PointResult:
        """Sends one point to the worker and waits for its end; samples the machine every INTERVAL_S."""
        self._started.send(point)
        rows: list[MachineRow] = []
        sampler: MachineSampler | None = self._sampler()
        deadline: float | None = None
        begun_energy: EnergyReading | None = None
        while True:
            try:
                event = self._event(INTERVAL_S)
                if event is None and sampler is not None:
                    rows.append(sampler.sample())
            except KeyboardInterrupt as interruption:
                if deadline is not None:
                    raise
                acknowledge_interrupt(interruption)
                request_stop(Path(point.spool))
                begun = Path(point.spool).exists()  # otherwise it is still loading
                deadline = monotonic() + (STOP_SECONDS if begun else 0.0)
                continue
            kind = event.kind if event else None
            if event and kind == "ready":
                self.ready = event
                sampler = self._sampler()
            elif event and kind == "measuring" and sampler is not None:
                rows.append(sampler.sample())  # rates start with the measured part
                begun_energy = read_package_energy()
            elif event and kind == "done":
                energy = None
                if begun_energy is not None:
                    energy = compute_energy_use(begun_energy, read_package_energy())
                rows.extend([sampler.sample()] if sampler else [])
                # a stop requested at the end does not shorten the point, but ends the run
                self.pool.modules[self.kind] = event.modules
                stopped = (
                    event.report is not None and event.report.stopped
                ) or deadline is not None
                return PointResult(
                    point, event.report, rows=tuple(rows), interrupted=stopped, energy=energy
                )
            elif event and deadline is not None:
                return PointResult(point, None, rows=tuple(rows), interrupted=True)
            elif event and kind in FAILURES:
                return self._failed(point, event, rows)
            if deadline is not None and monotonic() > deadline:
                self._started.process.kill()

    def _sampler(self) -> MachineSampler | None:
        return (
            MachineSampler(self.ready.pid, self.ready.gpu_uuid, self.affinity)
            if self.ready
            else None
        )

    def _failed(self, point: Point, event: WorkerEvent, rows: list[MachineRow]) -> PointResult:
        if event.kind == "out-of-memory":
            return PointResult(point, None, "out-of-memory", event.message, rows=tuple(rows))
        if event.kind == "failed":
            message = message_from_text(event.message)
            return PointResult(
                point, None, "refused", message, ExitStatus(event.status), tuple(rows)
            )
        if (code := self._started.process.wait()) == -9:
            message = (
                "the worker was killed (signal 9), most likely because the host ran out of memory"
            )
            return PointResult(point, None, "out-of-memory", message, rows=tuple(rows))
        return PointResult(point, None, "died", self._last_words(code), rows=tuple(rows))

    def _event(self, seconds: float) -> WorkerEvent | None:
        """The next event; None after `seconds` without one; `ended` when the worker has closed its output."""
        worker = self._started
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
        log = self._started.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        how = f"signal {-code}" if code < 0 else f"status {code}"
        return f"the worker exited with {how}: {log[-1][:240] if log else 'no output'}"
