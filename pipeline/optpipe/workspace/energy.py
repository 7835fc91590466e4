"""Energy counters of this machine: of GPUs through NVML, of CPU packages through RAPL.

RAPL (Running Average Power Limit) is read from the kernel's powercap interface (docs.kernel.org/power/powercap/powercap.html),
which AMD's processors have too: `intel-rapl:0/energy_uj` counts microjoules of a package and wraps at `max_energy_range_uj`.
Since Linux 5.10 only root may read it. Both counters move in steps: over less than a second they say little.
"""

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from optpipe.workspace.environment import list_gpus, open_nvml

POWERCAP = Path("/sys/class/powercap")
_MOST_PACKAGE_W = 500
"""No package draws more for long: a counter whose range it could pass in the time may have wrapped more than once."""


@dataclass(frozen=True, slots=True)
class EnergyUse:
    """Joules of all visible GPUs and of all CPU packages over `seconds`, other work on the machine included."""

    seconds: float
    iterations: int = 0
    """Iterations in that time; 0 for a whole program."""
    gpu_j: float | None = None
    gpu_why_not: str = ""
    cpu_j: float | None = None
    cpu_why_not: str = ""


class _Zone(NamedTuple):
    microjoules: int
    range_uj: int


@dataclass(frozen=True, slots=True)
class EnergyReading:
    """The counters at one moment: millijoules by GPU, microjoules by package; why there are none."""

    at_s: float
    gpus: Mapping[str, int] = field(default_factory=dict)
    gpu_why_not: str = ""
    packages: Mapping[str, _Zone] = field(default_factory=dict)
    cpu_why_not: str = ""

    @property
    def has_counters(self) -> bool:
        return bool(self.gpus or self.packages)


def read_energy(powercap: Path = POWERCAP) -> EnergyReading:
    gpus, gpu_why_not = _read_gpus()
    packages, cpu_why_not = _read_packages(powercap)
    return EnergyReading(time.monotonic(), gpus, gpu_why_not, packages, cpu_why_not)


def read_package_energy(powercap: Path = POWERCAP) -> EnergyReading:
    """The counters of the CPU packages alone, which take some microseconds to read."""
    packages, cpu_why_not = _read_packages(powercap)
    return EnergyReading(time.monotonic(), packages=packages, cpu_why_not=cpu_why_not)


def compute_energy_use(
    before: EnergyReading, after: EnergyReading, iterations: int = 0
) -> EnergyUse:
    seconds = after.at_s - before.at_s
    gpu_j = None
    if before.gpus and before.gpus.keys() == after.gpus.keys():
        gpu_j = sum(after.gpus[name] - before.gpus[name] for name in before.gpus) / 1e3
    cpu_j, cpu_why_not = None, before.cpu_why_not
    if before.packages and before.packages.keys() == after.packages.keys():
        shortest_uj = min(zone.range_uj for zone in before.packages.values())
        if seconds * _MOST_PACKAGE_W * 1e6 < shortest_uj:
            cpu_j = (
                sum(
                    (after.packages[name].microjoules - zone.microjoules) % zone.range_uj
                    for name, zone in before.packages.items()
                )
                / 1e6
            )
        else:
            cpu_why_not = "the counter may have wrapped more than once in this time"
    return EnergyUse(seconds, iterations, gpu_j, before.gpu_why_not, cpu_j, cpu_why_not)


def _read_gpus() -> tuple[dict[str, int], str]:
    readings: dict[str, int] = {}
    with open_nvml() as nvml:
        if nvml is None or not list_gpus():
            return {}, "no NVIDIA GPU"
        for gpu in list_gpus():
            with suppress(nvml.NVMLError):
                handle = nvml.nvmlDeviceGetHandleByIndex(gpu.index)
                readings[str(gpu.index)] = nvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    if len(readings) < len(list_gpus()):
        return {}, "the driver has no energy counter for this GPU (Volta or newer)"
    return readings, ""


def _read_packages(powercap: Path) -> tuple[dict[str, _Zone], str]:
    """Packages alone: their parts (cores, memory) are zones below them, and `psys` is the whole board."""
    zones: dict[str, _Zone] = {}
    for folder in sorted(powercap.glob("intel-rapl:*")):
        try:
            name = (folder / "name").read_text(encoding="ascii").strip()
            if not name.startswith("package"):
                continue
            microjoules, range_uj = (
                int((folder / file).read_text(encoding="ascii"))
                for file in ("energy_uj", "max_energy_range_uj")
            )
        except PermissionError:
            return {}, f"only root may read {folder / 'energy_uj'}"
        except (OSError, ValueError) as error:
            return {}, f"{folder} cannot be read: {error}"
        zones[folder.name] = _Zone(microjoules, range_uj)
    return (zones, "") if zones else ({}, f"no RAPL counter in {powercap}")
