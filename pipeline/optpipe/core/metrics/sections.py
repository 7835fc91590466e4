"""The tables of a policy: what each limits, where its evidence comes from, and what helps if a limit is not met."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from optpipe.core.metrics.contract import Metric
from optpipe.core.metrics.measured import (
    BUILD_TIME,
    CV,
    EFFICIENCY,
    ENERGY,
    LOAD_TIME,
    MEMORY,
    OTHERS,
    POWER,
    SHOWN,
    THROUGHPUT,
    Percentile,
)
from optpipe.core.precision import Precision
from optpipe.core.quantity import Dimension


class Sense(StrEnum):
    AT_MOST = "at most"
    AT_LEAST = "at least"
    EQUALS = "is"


Limit = tuple[Sense, Dimension]
MAX_TIME = Sense.AT_MOST, Dimension.TIME
MAX_SHARE = Sense.AT_MOST, Dimension.SHARE
MIN_SHARE = Sense.AT_LEAST, Dimension.SHARE
MAX_DROP = Sense.AT_MOST, Dimension.POINTS
MIN_SCORE = Sense.AT_LEAST, Dimension.POINTS
MAX_SIZE = Sense.AT_MOST, Dimension.SIZE
MIN_FACTOR = Sense.AT_LEAST, Dimension.FACTOR
MIN_RATIO = Sense.AT_LEAST, Dimension.DECIBEL
MIN_COSINE = Sense.AT_LEAST, Dimension.NUMBER
MAX_ERROR = Sense.AT_MOST, Dimension.NUMBER


def limit_from_metric(metric: Metric) -> Limit:
    return (Sense.AT_LEAST if metric.higher_is_better else Sense.AT_MOST), metric.dimension


class Evidence(StrEnum):
    """Kind of the run that shows a figure, in the order in which a sign-off measures; `build` is the build's record."""

    EVALUATE = "evaluate"
    PREPROCESS = "preprocess"
    BENCH = "bench"
    TURNS = "turns"
    PROFILE = "profile"
    BUILD = "build"


@dataclass(frozen=True, slots=True)
class Section:
    """One table of a policy. Two tables of one policy have no key in common but those of the load."""

    name: str
    about: str
    """A sentence, for editors and the documentation."""
    evidence: Evidence
    limits: Mapping[str, Limit] = field(default_factory=dict)
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    """The measured metric of each limit; a table with metrics may name a load."""
    tile: int | None = None
    """Place of its figure among those at the top of a report; None for none."""
    names_key_first: bool = False
    """Whether a criterion is called `p99 latency`, not `Accuracy drop`."""
    needs_gpu: bool = False
    of_loss: bool = False
    """Whether a limit is on the loss against an approved baseline, a ratio minus one."""
    is_open: bool = False
    """Whether plug-ins name its metrics: a table of tables, by name."""
    can_repeat: bool = True
    """Whether another machine of the kind can measure it again and compare (`verify --audit`)."""

    @property
    def is_measured(self) -> bool:
        return bool(self.metrics) or (self.is_open and self.evidence is Evidence.BENCH)

    def __str__(self) -> str:
        return self.name


def _limit_measured(
    name: str,
    about: str,
    metrics: Mapping[str, Metric],
    *,
    tile: int | None = None,
    names_key_first: bool = False,
    can_repeat: bool = True,
) -> Section:
    """A table with a limit on each of some measured metrics, by key."""
    return Section(
        name,
        about,
        Evidence.BENCH,
        limits={key: limit_from_metric(metric) for key, metric in metrics.items()},
        metrics=metrics,
        tile=tile,
        names_key_first=names_key_first,
        needs_gpu=any(metric.needs_gpu for metric in metrics.values()),
        can_repeat=can_repeat,
    )


_PERCENTILES = {
    metric.name: metric for metric in (*SHOWN, *OTHERS) if isinstance(metric, Percentile)
}
_LOSSES = {metric.name: metric for metric in SHOWN if metric.in_regression}

ENVIRONMENT = Section(
    "environment",
    "The GPU's name or \"none\", the CPU's name, and the versions of driver, Python, and packages of a figure.",
    Evidence.BENCH,
)
LATENCY = _limit_measured(
    "latency",
    "Maximum query latency: p50 as the mean over processes, others over all requests, `mean_p99` as p50.",
    _PERCENTILES,
    tile=0,
    names_key_first=True,
)
RATE = _limit_measured(
    "throughput",
    "Images, or samples of another kind, per second.",
    {"minimum": THROUGHPUT},
    tile=1,
)
REGRESSION = Section(
    "regression",
    "Maximum loss compared with the approved baseline, tested against the bound of its interval.",
    Evidence.BENCH,
    dict.fromkeys(_LOSSES, MAX_SHARE),
    _LOSSES,
    names_key_first=True,
    of_loss=True,
    can_repeat=False,
)
PEAK_MEMORY = _limit_measured(
    "memory",
    "Peak memory: device memory on a GPU, process memory on a CPU.",
    {"maximum": MEMORY},
    tile=5,
)
ENERGY_PER_SAMPLE = _limit_measured(
    "energy",
    "Energy per image or sample; approximate, from the driver's counter.",
    {"maximum": ENERGY},
    tile=4,
)
PER_WATT = _limit_measured(
    EFFICIENCY.name,
    "Images or samples per second and watt, the reciprocal of the energy of one; approximate, from the driver's counter.",
    {"minimum": EFFICIENCY},
)
POWER_DRAW = _limit_measured(
    POWER.name,
    "Mean power of the GPU while it answers; approximate, from the driver's counter.",
    {"maximum": POWER},
)
LOADING = _limit_measured(
    LOAD_TIME.name,
    "From the start of loading the build to its first answer, in fresh processes.",
    {"maximum": LOAD_TIME},
)
STABILITY = _limit_measured(
    "stability",
    "Stability of the runtime: coefficient of variation of the latency.",
    {"maximum_cv": CV},
    can_repeat=False,
)
SPEEDUP = Section(
    "speedup",
    "How many times as fast as another build of the model (`over`, a precision or an ID), measured in turns.",
    Evidence.TURNS,
    {"minimum": MIN_FACTOR},
    tile=2,
)
DROP, LEAST_SCORE, F1_DROP = "maximum_drop", "minimum_score", "maximum_f1_drop"
AGREEMENT = "minimum_agreement"
ACCURACY = Section(
    "accuracy",
    "The task's scores on the validation set, on paired predictions with the source model.",
    Evidence.EVALUATE,
    {
        DROP: MAX_DROP,
        LEAST_SCORE: MIN_SCORE,
        "minimum_top1": MIN_SHARE,
        AGREEMENT: MIN_SHARE,
        F1_DROP: MAX_DROP,
    },
    tile=3,
)
PARITY = Section(
    "preprocessing",
    "Agreement between DALI and the model's own preprocessing, measured on the model's outputs.",
    Evidence.PREPROCESS,
    {AGREEMENT: MIN_SHARE, "minimum_snr": MIN_RATIO},
)
OUTPUTS = Section(
    "outputs",
    "The build's outputs against the source model's, on the samples that the build was verified on.",
    Evidence.BUILD,
    {
        "minimum_snr": MIN_RATIO,
        "minimum_cosine": MIN_COSINE,
        AGREEMENT: MIN_SHARE,
        "maximum_abs_error": MAX_ERROR,
    },
    tile=6,
)
PRECISION = Section(
    "precision",
    "Share of the MACs that run in a precision, verified in the built network.",
    Evidence.BUILD,
    dict.fromkeys(map(str, Precision), MIN_SHARE),
    tile=8,
)
SIZE = Section("size", "Size of the engine file.", Evidence.BUILD, {"maximum": MAX_SIZE}, tile=7)
TENSOR_CORES = Section(
    "tensor_cores",
    "Share of Tensor Core eligible kernel time that uses Tensor Cores, from the profile.",
    Evidence.PROFILE,
    {"minimum_share": MIN_SHARE},
    needs_gpu=True,
)
MORE_METRICS = Section(
    "metrics",
    "Metrics of plug-ins, by name, each with a maximum or a minimum: means over processes.",
    Evidence.BENCH,
    is_open=True,
)
"""After the other tables."""
LEAST_KEY, MOST_KEY = "minimum", "maximum"
MORE_SCORES = Section(
    "scores",
    "Scores of plug-ins and of Python programs, by name: each with the largest drop, a minimum, or a maximum.",
    Evidence.EVALUATE,
    {DROP: MAX_DROP, LEAST_KEY: MIN_SHARE, MOST_KEY: MAX_SHARE},
    is_open=True,
)
"""After the metrics of plug-ins."""
JUDGED = (
    LATENCY,
    RATE,
    REGRESSION,
    PEAK_MEMORY,
    ENERGY_PER_SAMPLE,
    PER_WATT,
    POWER_DRAW,
    LOADING,
    STABILITY,
    SPEEDUP,
    ACCURACY,
    PARITY,
    OUTPUTS,
    PRECISION,
    SIZE,
    TENSOR_CORES,
)
"""The tables with limits, in the order of the criteria."""
SECTIONS: Mapping[str, Section] = {
    section.name: section for section in (ENVIRONMENT, *JUDGED, MORE_METRICS, MORE_SCORES)
}


def explain_no_limit(name: str) -> str | None:
    """Why no table limits the figure `name`; None if one may."""
    if name != BUILD_TIME.name:
        return None
    return "the time of one build, which its manifest states, decides nothing; [load_time] limits how long it takes to load"


def list_tiles() -> list[Section]:
    """The tables whose figures head a report, the most important first."""
    return sorted(
        (section for section in JUDGED if section.tile is not None),
        key=lambda section: section.tile or 0,
    )
