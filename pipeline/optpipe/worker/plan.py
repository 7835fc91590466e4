"""What a worker is told: one session, then points to measure, as JSON both ways."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from optpipe.core.measurement import Mode, Scenario


@dataclass(frozen=True, slots=True)
class SessionPlan:
    """How to load the artifact, and which inputs to rotate through."""

    loader: str
    """`module:function`; called with `arguments`, returns a backends.base.Session."""
    arguments: Mapping[str, Any]
    inputs: Mapping[str, str]
    """Input name → .npy file of a pool of single inputs, first axis the number of them."""
    reference: Mapping[str, str] = field(default_factory=dict)
    """Output name → .npy file of what each input of the pool must give; empty where there is no reference."""
    input_axes: Mapping[str, int | None] = field(default_factory=dict)
    """Input name → its batch axis, None for one value per call; the first axis where nothing is said."""
    output_axes: Mapping[str, int | None] = field(default_factory=dict)
    """Output name → its batch axis, likewise."""
    reference_name: str = ""
    tolerance: float = 1e-2
    """Largest relative L2 error against the reference."""
    device: str = "cpu"
    streams: int = 1
    affinity: tuple[int, ...] | None = None
    seed: int = 0

    def to_json(self) -> str:
        """One JSON document."""
        return json.dumps(asdict(self))


@dataclass(frozen=True, slots=True)
class Point:
    """One load to put on the session."""

    id: str
    batch_size: int
    scenario: Scenario
    mode: Mode
    spool: str
    """File that the samples go to."""
    min_seconds: float
    max_seconds: float
    percentile: float = 99.0
    """The highest one wanted: it decides how many samples are measured."""
    warm_up_seconds: float = 0.5
    max_warm_up_seconds: float = 20.0
    rate_per_s: float | None = None
    """Server: mean arrivals per second."""
    arrivals_seed: int = 0
    """Server: of the arrivals."""
    output_checks: int = 16
    cache_probes: int = 12

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self))


def session_plan_from_json(text: str) -> SessionPlan:
    """The inverse of `SessionPlan.to_json`."""
    value = json.loads(text)
    value["affinity"] = None if value["affinity"] is None else tuple(value["affinity"])
    return SessionPlan(**value)


def point_from_json(text: str) -> Point:
    """The inverse of `Point.to_json`."""
    value = json.loads(text)
    return Point(**value | {"scenario": Scenario(value["scenario"]), "mode": Mode(value["mode"])})
