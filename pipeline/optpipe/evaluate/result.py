"""The records of an evaluation, as in `evaluate.json` and `--json`."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from optpipe.core.entries import WeightsRecord
from optpipe.core.errors import ExitStatus, escape
from optpipe.core.metrics.sampled import Rule
from optpipe.core.verdict import Verdict
from optpipe.stats.paired import FEWEST_SAMPLES

Bounds = tuple[float, float]
"""Bounds of a 95% confidence interval."""


@dataclass(frozen=True, slots=True)
class Agreement:
    share: float
    ci: Bounds
    score_shift: Mapping[str, float] | None = None
    """The artifact's score less the source's, over a detector's matched boxes: `mean`, its bounds `low` and `high`, `p5`, `p50`, `p95`;
    and the number of `boxes`."""


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Accuracy on labeled samples, and the drop from the source model on the same samples, as shares."""

    top1: float
    top1_ci: Bounds
    top5: float | None
    """None for models with five classes or fewer."""
    macro_f1: float
    macro_f1_drop: float
    macro_f1_drop_ci: Bounds
    drop: float
    drop_ci: Bounds
    lost: int
    """Samples that only the source model predicts correctly."""
    won: int
    """Samples that only the artifact predicts correctly."""
    top5_ci: Bounds | None = None
    """None without `top5`."""
    macro_f1_ci: Bounds | None = None
    """None in records of older versions."""


@dataclass(frozen=True, slots=True)
class Score:
    """One score of a task, and its drop from the source model on the same samples, as fractions."""

    name: str
    """The name in a policy: `mIoU`, `AP50`."""
    value: float
    ci: Bounds
    drop: float
    drop_ci: Bounds


@dataclass(frozen=True, slots=True)
class ClassScore:
    """The first score of one class. Its intervals hold at 95% for all classes together, so that the worst may be picked out."""

    label: str
    value: float
    drop: float
    ci: Bounds | None = None
    """None if no truth has the class."""
    drop_ci: Bounds | None = None


@dataclass(frozen=True, slots=True)
class TaskScores:
    """The scores of a task other than classification."""

    scores: tuple[Score, ...]
    """The first score is judged."""
    classes: tuple[ClassScore, ...]


@dataclass(frozen=True, slots=True)
class ScoreRule:
    """A score of a plug-in or of a Python program, as its evaluation states it."""

    title: str
    rule: Rule
    lower_is_better: bool
    source: str
    """The code that scored: the distribution with its version, or the class and the hash of its source."""


@dataclass(frozen=True, slots=True)
class SampledFigure:
    """One such score of one model, from the samples' parts in the predictions, as a fraction."""

    value: float | None
    ci: Bounds | None
    drop: float | None
    drop_ci: Bounds | None
    why_not: str | None = None
    """Why it is withheld."""


@dataclass(frozen=True, slots=True)
class EvaluatedModel:
    backend: str
    precision: str
    device: str
    samples: int
    artifact: str | None = None
    """None for the source model."""
    why_not: str | None = None
    failed: bool = False
    """True if it can run on this machine but did not."""
    calibrated_on: int = 0
    """Samples that its INT8 ranges were computed from, which overestimate its accuracy."""
    snr_db: float | None = None
    """SNR of the first output against the source model's; None if they are equal or cannot be compared."""
    same_sizes: bool = True
    """False if the first output differs in size or order of rows from the source model's, as a list of boxes may."""
    agreement: Agreement | None = None
    """None if the source model predicts one class for all samples."""
    accuracy: Accuracy | None = None
    """Accuracy of a classifier; None without labels or trained weights."""
    scores: TaskScores | None = None
    """Scores of any other task; None without annotations or trained weights."""
    verdict: Verdict | None = None
    """Judgment of the drop by the budget; None for the source model and without a budget."""
    sha256: str | None = None
    """`hash_engine` of the artifact; None for the source model, and in records of older versions."""
    sampled: Mapping[str, SampledFigure] = field(default_factory=dict)
    """Scores of plug-ins and of Python programs, by name."""

    @property
    def drop_ci(self) -> Bounds | None:
        if self.scores is not None:
            return self.scores.scores[0].drop_ci
        return None if self.accuracy is None else self.accuracy.drop_ci


@dataclass(frozen=True, slots=True)
class Dataset:
    name: str
    kind: str
    """Name of its samples in the plural."""
    sha256: str
    count: int
    unreadable: tuple[str, ...]
    labeled: bool
    classes: int
    labels: tuple[str, ...] = ()
    """Names of the classes, if scores are listed by class."""
    truncated: int = 0
    """Texts that were cut at the model's maximum input length."""
    validation: bool | None = None
    """True for the whole validation set of the model's card; None in records of older versions."""
    groups: int | None = None
    """Sources of the samples, by the column `group`; None without it, and then the samples are taken as independent."""

    def describe(self) -> str:
        """`400 texts`, `400 texts (2 truncated)`."""
        return f"{self.count:,} {self.kind}" + (
            f" ({self.truncated} truncated)" if self.truncated else ""
        )

    def identify(self) -> str:
        """`800 images of digits/validation (19b36f9e202f)`."""
        data = f"{self.describe()} of {escape(self.name)} ({escape(self.sha256[:12])})"
        return f"{data}, {self.describe_groups()}"

    def describe_groups(self) -> str:
        """`in 40 groups`; `taken as independent`."""
        if self.groups is None:
            return "taken as independent"
        few = f", fewer than {FEWEST_SAMPLES}: no interval" if self.groups < FEWEST_SAMPLES else ""
        return f"in {self.groups} group{'s' if self.groups > 1 else ''}{few}"


@dataclass(frozen=True, slots=True)
class Evaluation:
    model: str
    source: str
    model_id: str
    weights: WeightsRecord
    dataset: Dataset
    accuracy_budget: float | None
    results: tuple[EvaluatedModel, ...]
    run_dir: str
    warnings: tuple[str, ...] = ()
    task: str = "classification"
    scoring: str = ""
    """The choices between outputs and predictions: `NMS outside the engine, IoU 0.7`."""
    sampled: Mapping[str, ScoreRule] = field(default_factory=dict)
    """Scores of plug-ins and of Python programs, by name."""

    @property
    def status(self) -> ExitStatus:
        """The worst verdict; STAGE_FAILED if an artifact failed to run."""
        verdicts = {row.verdict for row in self.results}
        if any(row.failed for row in self.results):
            return ExitStatus.STAGE_FAILED
        if Verdict.FAIL in verdicts:
            return ExitStatus.FAIL
        return ExitStatus.INCONCLUSIVE if Verdict.INCONCLUSIVE in verdicts else ExitStatus.DONE
