"""The slots of this host, one for each GPU or CPU part, with their locks and the processes on their GPUs."""

import errno
import os
import stat
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from time import monotonic
from typing import Any

from optpipe.core.entries import Environment
from optpipe.core.errors import StageError
from optpipe.core.wording import Argument
from optpipe.sweep.job import CPU, compute_fingerprint
from optpipe.workspace.environment import describe_environment, open_nvml, select_visible_gpus
from optpipe.workspace.files import try_lock


@dataclass(frozen=True, slots=True)
class Slot:
    """A GPU with adjacent processors, or a part of the CPU, which measures one job at a time."""

    name: str
    """The GPU's UUID; `cpu`, or `cpu-0-3` for a part of the processors."""
    kind: str
    """The GPU as NVML names it, or `cpu`."""
    cpus: tuple[int, ...]
    fingerprint: str
    environment: Environment
    part: bool = False
    """Whether other slots have other processors of the same CPU."""
    node: str = ""
    """The id of a cluster's node that has none of our labels."""

    @property
    def gpu(self) -> str | None:
        return None if self.name.startswith(CPU) else self.name


@dataclass(frozen=True, slots=True)
class Device:
    uuid: str
    numa: int
    power_limit_w: float | None
    """None if NVML does not say, like `mig`."""
    mig: bool | None


def list_slots(cpu_slots: int = 1) -> tuple[Slot, ...]:
    """One slot for each GPU that CUDA shows, then the processors in `cpu_slots` equal parts."""
    environment, cpus = describe_environment(), sorted(os.sched_getaffinity(0))
    return (*_list_gpu_slots(environment, cpus), *list_cpu_slots(environment, cpus, cpu_slots))


def list_kinds(slots: Sequence[Slot]) -> tuple[str, ...]:
    """The default kinds of a sweep: those of the GPUs, or the CPU if there is no GPU."""
    gpus = tuple(dict.fromkeys(slot.kind for slot in slots if slot.gpu))
    return gpus or tuple(dict.fromkeys(slot.kind for slot in slots)) or (CPU,)


def _list_gpu_slots(environment: Environment, cpus: Sequence[int]) -> tuple[Slot, ...]:
    devices = list_devices()
    parts = divide_cpus(
        cpus, [_read_node_cpus(device.numa) for device in devices]
    )  # also for GPUs that are hidden from us
    gpus = {gpu.index: gpu for gpu in environment.gpus}
    shown = select_visible_gpus(
        os.environ.get("CUDA_VISIBLE_DEVICES"), [device.uuid for device in devices]
    )
    slots = []
    for index in shown:
        slot_environment = replace(environment, gpus=(gpus[index],))
        fingerprint = compute_fingerprint(
            slot_environment, devices[index].power_limit_w, devices[index].mig
        )
        slots.append(
            Slot(devices[index].uuid, gpus[index].name, parts[index], fingerprint, slot_environment)
        )
    return tuple(slots)


def list_cpu_slots(environment: Environment, cpus: Sequence[int], count: int) -> tuple[Slot, ...]:
    """The processors in `count` equal parts. A part has another fingerprint than the whole."""
    environment = replace(environment, gpus=())
    size = max(1, len(cpus) // max(1, count))
    parts = [
        tuple(cpus[at * size : (at + 1) * size]) for at in range(max(1, min(count, len(cpus))))
    ]
    whole = len(parts) == 1
    slot_environment = replace(
        environment, cpu_count=len(parts[0]) if not whole else environment.cpu_count
    )
    fingerprint = compute_fingerprint(slot_environment, None, None)
    names = [CPU if whole else f"{CPU}-{part[0]}-{part[-1]}" for part in parts]
    named = zip(names, parts, strict=True)
    return tuple(
        Slot(name, CPU, part, fingerprint, slot_environment, part=not whole) for name, part in named
    )


def divide_cpus(cpus: Sequence[int], near: Sequence[Collection[int]]) -> list[tuple[int, ...]]:
    """Processors for each GPU, shared evenly by GPUs that are `near` the same ones, without overlap.

    A GPU with unknown neighbors is near all; GPUs that would get none share all.
    """
    wanted = [tuple(sorted(set(cpus) & set(node_cpus))) or tuple(cpus) for node_cpus in near]
    parts = []
    for at, mine in enumerate(wanted):
        rivals = [index for index, other in enumerate(wanted) if set(other) & set(mine)]
        size = len(mine) // len(rivals)
        place = rivals.index(at)
        parts.append(mine[place * size : (place + 1) * size] or mine)
    return parts


def _read_node_cpus(node: int) -> tuple[int, ...]:
    try:
        text = Path(f"/sys/devices/system/node/node{node}/cpulist").read_text(encoding="ascii")
    except OSError:
        return ()
    cpus: list[int] = []
    for part in text.strip().split(","):
        low, _, high = part.partition("-")
        cpus += range(int(low), int(high or low) + 1) if low else ()
    return tuple(cpus)


@cache
def list_devices() -> tuple[Device, ...]:
    with open_nvml() as nvml:
        if nvml is None:
            return ()
        handles = [
            nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())
        ]
        return tuple(_describe(nvml, handle) for handle in handles)


def _describe(nvml: Any, handle: Any) -> Device:
    def read(call: Any) -> Any:
        try:
            return call(handle)
        except nvml.NVMLError:
            return None

    pci = read(nvml.nvmlDeviceGetPciInfo)
    power = read(nvml.nvmlDeviceGetEnforcedPowerLimit)
    mig = read(nvml.nvmlDeviceGetMigMode)
    power_w = None if power is None else power / 1000
    mig_on = None if mig is None else bool(mig[0])
    return Device(str(nvml.nvmlDeviceGetUUID(handle)), _read_numa_node(pci), power_w, mig_on)


def _read_numa_node(pci: Any) -> int:
    bus = getattr(pci, "busId", b"")
    text = (bus.decode() if isinstance(bus, bytes) else str(bus)).lower()
    try:
        return int(Path(f"/sys/bus/pci/devices/{text[-12:]}/numa_node").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return -1


def list_gpu_processes(uuid: str) -> dict[int, str]:
    """Compute processes on the GPU, such as `python (process 17)`, by NVML's id, which in a container may be the host's.

    Empty if NVML does not say.
    """
    with open_nvml() as nvml:
        if nvml is None:
            return {}
        try:
            processes = nvml.nvmlDeviceGetComputeRunningProcesses(
                nvml.nvmlDeviceGetHandleByUUID(uuid)
            )
        except nvml.NVMLError:
            return {}
        return {
            process.pid: f"{_name_process(nvml, process.pid)} (process {process.pid})"
            for process in processes
        }


def _name_process(nvml: Any, pid: int) -> str:
    try:
        name = nvml.nvmlSystemGetProcessName(pid)
    except nvml.NVMLError:
        return "unknown"
    return Path(name.decode() if isinstance(name, bytes) else str(name)).name or "unknown"


def find_foreign(processes: Mapping[int, str], own: Collection[int]) -> dict[int, str]:
    """The foreign processes on a GPU while a job runs.

    In a container NVML gives ids of the host: an id that is unknown here may be the job's worker, and `busy-gpu` counts it.
    """
    return {
        pid: name
        for pid, name in processes.items()
        if pid not in own and Path(f"/proc/{pid}").exists()
    }


def list_descendants(pid: int) -> set[int]:
    """`pid` and every process below it."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        except OSError:
            continue
        children.setdefault(int(fields[1]), []).append(int(path.parent.name))
    tree, left = set(), [pid]
    while left:
        parent = left.pop()
        tree.add(parent)
        left += children.get(parent, [])
    return tree


FOLDER = Path("/tmp/optpipe-locks")  # one place for all users; share it with containers of the host
QUIET = "quiet"
"""Held by a job that needs all of the host's processors."""
POLL_S = 0.2


class TakenError(StageError):
    """Another process held a lock for longer than the limit."""


def list_locks(slot: Slot, *, timing: bool) -> list[tuple[str, bool]]:
    """The locks of a job, by name and whether shared, in the order in which all jobs take them."""
    locks = [(slot.name, False)] if slot.gpu or slot.part else []
    if slot.gpu is None:
        locks.append((QUIET, slot.part and timing))
    return sorted(locks)


@contextmanager
def hold_locks(
    names: Sequence[tuple[str, bool]],
    wait_s: float,
    folder: Path | None = None,
    stop: threading.Event | None = None,
) -> Iterator[None]:
    """Holds all of `names` while the block runs. Raises TakenError after `wait_s`, StageError once `stop` is set."""
    stop = stop or threading.Event()
    deadline = monotonic() + wait_s
    with ExitStack() as stack:
        for name, shared in names:
            descriptor = _open_lock(folder or FOLDER, name)
            stack.callback(os.close, descriptor)
            while not try_lock(descriptor, shared=shared):
                if monotonic() > deadline:
                    what, path = "the CPU" if name == QUIET else name, (folder or FOLDER) / name
                    limit = f"{wait_s:.0f} s (" + Argument("set", "lock-timeout") + ")"
                    problem = f"{what} has been in use for more than " + limit
                    raise TakenError(problem + f"; `fuser {path}` names the process")
                if stop.wait(POLL_S):
                    raise StageError("interrupted")
        yield


def _open_lock(folder: Path, name: str) -> int:
    """A descriptor of the lock's file. A file of another user opens only for reading, which is enough to lock; a link is refused."""
    path = folder / name
    try:
        if not folder.is_dir():
            folder.mkdir(parents=True, exist_ok=True)
            folder.chmod(stat.S_ISVTX | 0o777)
        try:
            return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:  # in a sticky folder O_CREAT on another user's file is refused
            return os.open(path, os.O_RDONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    except OSError as error:
        why = "is a symbolic link" if error.errno == errno.ELOOP else error.strerror
        raise StageError(
            f"cannot lock {path}: {why}; without it measurements could disturb each other"
        ) from error
