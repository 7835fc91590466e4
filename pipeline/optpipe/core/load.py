"""What a measurement asks of a model: batch size, arrival of the queries, and content of a query."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from math import inf
from typing import Annotated

from optpipe.core import params
from optpipe.core.errors import BadInputError
from optpipe.core.wording import Argument


class Scenario(StrEnum):
    """How queries arrive, after MLPerf inference."""

    SINGLE_STREAM = "single-stream"
    MULTI_STREAM = "multi-stream"
    OFFLINE = "offline"
    SERVER = "server"


class Mode(StrEnum):
    """Content of a query: the computation alone (inputs already on the device), or the copies in and out too."""

    COMPUTE = "compute"
    END_TO_END = "end-to-end"


@dataclass(frozen=True, slots=True)
class LoadSpec:
    """A load, from the command line to the worker. The first five fields say what is measured, the others how long."""

    batch_size: Annotated[int, params.BATCH]
    scenario: Annotated[Scenario, params.SCENARIO] = Scenario.SINGLE_STREAM
    mode: Annotated[Mode, params.MODE] = Mode.COMPUTE
    streams: Annotated[int, params.STREAMS] = 1
    rate_per_s: Annotated[float | None, params.RATE] = None
    min_seconds: Annotated[float, params.MIN_TIME] = 1.0
    max_seconds: Annotated[float, params.MAX_TIME] = 60.0
    percentile: Annotated[float, params.PERCENTILE] = 99.0
    warm_up_seconds: Annotated[float, params.WARM_UP] = 0.5
    max_warm_up_seconds: Annotated[float, params.MAX_WARM_UP] = 20.0
    output_checks: int = 16
    cache_probes: int = 12
    length: Annotated[int | None, params.LENGTH] = None
    """Tokens per sequence, with padding; None without sequences, or if it was not recorded."""
    images: bool | None = None
    """None if it was not recorded."""

    @property
    def key(self) -> tuple[int, Scenario, Mode, int, float | None, int | None]:
        """Equal for measurements of the same load."""
        return self.batch_size, self.scenario, self.mode, self.streams, self.rate_per_s, self.length

    @property
    def size(self) -> str:
        """`batch 8`, or `batch 8, length 128` for sequences."""
        return ", ".join([f"batch {self.batch_size}", *self.list_lengths()])

    @property
    def sample(self) -> str:
        """Unit of rates and energy: `image`, or `sample` for sequences and other tensors."""
        return "sample" if self.images is False or self.length is not None else "image"

    def require_sound(self, *, needs_rate: bool = True) -> None:
        """Raises BadInputError for an impossible load; `needs_rate` is False while the rate is searched."""
        scenario, streams, rate = self.scenario, self.streams, self.rate_per_s
        if streams < 1 or (
            streams > 1 and scenario not in (Scenario.MULTI_STREAM, Scenario.OFFLINE)
        ):
            raise BadInputError(
                "must be at least 1; more than 1 requires "
                + Argument("scenario", Scenario.MULTI_STREAM)
                + " or offline",
                argument=Argument("streams", streams),
            )
        if rate is not None and (scenario is not Scenario.SERVER or not 0 < rate < inf):
            raise BadInputError(
                Argument("rate")
                + " must be positive and requires "
                + Argument("scenario", Scenario.SERVER)
            )
        if rate is None and needs_rate and scenario is Scenario.SERVER:
            raise BadInputError(
                Argument("scenario", Scenario.SERVER)
                + " requires "
                + Argument("rate", "QUERIES_PER_SECOND")
                + "; "
                + Argument("slo")
                + " finds the maximum rate"
            )
        if not 0 < self.percentile < 100:
            raise BadInputError(
                "expected a number between 0 and 100, such as 99 or 99.9",
                argument=Argument("percentile", self.percentile),
            )
        measuring = 0 < self.min_seconds <= self.max_seconds < inf
        if not (measuring and 0 <= self.warm_up_seconds <= self.max_warm_up_seconds < inf):
            raise BadInputError(
                "times must be positive and finite, with "
                + Argument("min_time")
                + " <= "
                + Argument("max_time")
                + ", and the warm-up must not be longer than its limit"
            )

    def list_lengths(self) -> list[str]:
        """`length 128`; empty without sequences."""
        return [] if self.length is None else [f"length {self.length}"]

    @property
    def arrivals(self) -> str:
        """`at 500/s` or `in 4 streams`; empty for one stream without a rate."""
        if self.rate_per_s is not None:
            return f"at {self.rate_per_s:g}/s"
        return f"in {self.streams} streams" if self.streams > 1 else ""

    def __str__(self) -> str:
        """`batch 8, single-stream, compute`; `batch 1, length 128, server at 500/s, compute`."""
        return f"{self.size}, {self.scenario} {self.arrivals}".rstrip() + f", {self.mode}"


def list_load_options(load: LoadSpec) -> dict[str, object]:
    """Options of `bench` that define what is measured, not how long: batch 8, scenario server, rate 500."""
    how_long = (
        "min_seconds",
        "max_seconds",
        "percentile",
        "warm_up_seconds",
        "max_warm_up_seconds",
    )
    return params.list_options(load, *how_long)


def name_sample(samples: Iterable[str]) -> str:
    """Unit of the rates of several loads: `sample` if any of them counts samples."""
    return "sample" if "sample" in samples else "image"
