"""The machine and the tools that something was made with: a part of every manifest."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Gpu:
    """One NVIDIA GPU."""

    index: int
    name: str
    compute_capability: str
    """Such as `9.0`."""
    memory_bytes: int
    driver: str


@dataclass(frozen=True, slots=True)
class Environment:
    """Versions, devices and driver; names neither the host nor its user."""

    python: str = "none"
    platform: str = "none"
    cpu: str = "none"
    cpu_count: int | None = None
    packages: Mapping[str, str] = field(default_factory=dict)
    """The version of every installed distribution that a build or a measurement depends on."""
    gpus: tuple[Gpu, ...] = ()

    def get_fact(self, key: str) -> str:
        """One fact by its policy name: `gpu`, `driver`, `cpu`, `python`, `packages.NAME`; or "none"."""
        facts = {"cpu": self.cpu, "python": self.python, "platform": self.platform}
        if self.gpus:
            facts |= {"gpu": self.gpus[0].name, "driver": self.gpus[0].driver}
        return self.packages.get(key.removeprefix("packages."), "none") if "." in key else facts.get(key, "none")
