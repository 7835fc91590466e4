"""Looks at the machine a few times a second while the worker measures: NVML and /proc, no spinning, no subprocess."""

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from time import perf_counter_ns
from typing import Any

from optpipe.workspace.environment import list_gpus

INTERVAL_S = 0.2

POWER_CAP = "power cap"
THROTTLE_REASONS: Mapping[int, str] = {
    0x04: POWER_CAP,
    0x08: "hardware slowdown",
    0x20: "thermal slowdown (software)",
    0x40: "thermal slowdown (hardware)",
    0x80: "power brake",
}
"""NVML's clock event reasons that take speed away. Idle, and clocks that someone set, do not count."""

MachineRow = dict[str, int | float | None]


class MachineSampler:
    """Looks at one worker, the processors it may use (all, where they are not given) and the device it uses."""

    def __init__(self, pid: int, gpu_uuid: str | None = None, cpus: Collection[int] | None = None) -> None:
        self._pid, self._cpus = pid, cpus
        self._gpu = _find_gpu(gpu_uuid) if gpu_uuid else None
        self._last = self._counters()
        self._ticks = os.sysconf("SC_CLK_TCK")

    def sample(self) -> MachineRow:
        """One row with the columns of `core.measurement.MACHINE_COLUMNS`; rates are since the last look."""
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
    """Everything that processors did but idle and wait for disks; time stolen by the hypervisor counts as busy.

    Of all of the machine, or of `cpus`: those of others disturb no worker that is kept off them.
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
    """Processor time of one process so far; 0 where it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return 0
    return int(fields[11]) + int(fields[12])


def _read_waited_ns(pid: int) -> int:
    total = 0
    for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        try:
            total += int(path.read_text(encoding="ascii").split()[1])
        except (OSError, IndexError):
            continue
    return total


def _read_resident_bytes(pid: int) -> int | None:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return None


def _read_cpu_mhz(cpus: Collection[int] | None) -> float | None:
    readings = []
    for name in ["cpu[0-9]*"] if cpus is None else [f"cpu{cpu}" for cpu in cpus]:
        for path in Path("/sys/devices/system/cpu").glob(f"{name}/cpufreq/scaling_cur_freq"):
            try:
                readings.append(int(path.read_text(encoding="ascii")) / 1000)
            except (OSError, ValueError):
                continue
    return sum(readings) / len(readings) if readings else None


def read_gpu_used_bytes() -> int | None:
    """Memory in use on CUDA's first GPU before a worker starts; None where NVML does not say."""
    gpu = _find_gpu(None)
    value = None if gpu is None else gpu.sample(0)["gpu_used_bytes"]
    return None if value is None else int(value)


def _find_gpu(uuid: str | None) -> "_Gpu | None":
    """The GPU with this UUID, else CUDA's first; None without NVML or without a GPU: its columns then stay null."""
    try:
        import pynvml
    except ModuleNotFoundError:
        return None
    try:
        pynvml.nvmlInit()
        try:
            if uuid:
                return _Gpu(pynvml, pynvml.nvmlDeviceGetHandleByUUID(uuid))
        except pynvml.NVMLError:
            pass
        return _Gpu(pynvml, pynvml.nvmlDeviceGetHandleByIndex(list_gpus()[0].index)) if list_gpus() else None
    except pynvml.NVMLError:
        return None


class _Gpu:
    """One GPU through NVML. What the driver does not support stays null."""

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
            "gpu_temperature_c": self._read(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
            "gpu_power_w": None if power is None else power / 1000,
            "gpu_energy_mj": self._read(nvml.nvmlDeviceGetTotalEnergyConsumption, handle),
            "gpu_utilization": None if load is None else int(load.gpu),
            "gpu_used_bytes": None if memory is None else int(memory.used),
            "gpu_worker_bytes": mine[0].usedGpuMemory if mine else None,
            # in a container NVML shows other processes by ids of the host: one process is the worker's own
            "gpu_other_processes": None if processes is None else len(processes) - min(1, len(processes)),
            "gpu_throttle_reasons": self._read(nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle),
        }

    def _read(self, call: Any, *arguments: Any) -> Any:
        try:
            return call(*arguments)
        except self._nvml.NVMLError:
            return None
