"""What an evaluation found: the record in `evaluate.json`, printed by `--json` and shown on the terminal."""

from dataclasses import dataclass

from optpipe.core.entries import WeightsRecord
from optpipe.core.errors import ExitStatus, escape
from optpipe.core.verdict import Verdict

Bounds = tuple[float, float]
"""The lower and upper bound of a 95 % confidence interval."""


@dataclass(frozen=True, slots=True)
class MovedPredictions:
    """Samples that the source model assigns to one class and an artifact to another."""

    source_class: int
    artifact_class: int
    count: int


@dataclass(frozen=True, slots=True)
class Agreement:
    """How often an artifact predicts the source model's class."""

    share: float
    ci: Bounds
    moved: tuple[MovedPredictions, ...]
    """The largest first."""


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Accuracy on labeled samples, and the drop from the source model on the same samples; shares, not percent."""

    top1: float
    top1_ci: Bounds
    top5: float | None
    """None for models of no more than five classes."""
    macro_f1: float
    macro_f1_drop: float
    macro_f1_drop_ci: Bounds
    drop: float
    drop_ci: Bounds
    lost: int
    """Samples that only the source model predicts correctly."""
    won: int
    """Samples that only the artifact predicts correctly."""
    mcnemar_p: float


@dataclass(frozen=True, slots=True)
class Score:
    """One score of a task, and its drop from the source model on the same samples; fractions, not percent."""

    name: str
    """As in a policy: `mIoU`, `AP50`."""
    value: float
    ci: Bounds
    drop: float
    drop_ci: Bounds


@dataclass(frozen=True, slots=True)
class ClassScore:
    """The task's first score of one class, and its drop."""

    label: str
    value: float
    drop: float


@dataclass(frozen=True, slots=True)
class TaskScores:
    """The scores of a task other than classification."""

    scores: tuple[Score, ...]
    """The first is the one that is judged."""
    classes: tuple[ClassScore, ...]
    """Of the classes that occur."""


@dataclass(frozen=True, slots=True)
class EvaluatedModel:
    """The source model, or one artifact."""

    backend: str
    precision: str
    device: str
    samples: int
    artifact: str | None = None
    """None for the source model."""
    why_not: str | None = None
    """Why it was not evaluated."""
    failed: bool = False
    """Whether it should have run here and did not."""
    calibrated_on: int = 0
    """How many of the samples its INT8 ranges were computed from: accuracy on those is overestimated."""
    snr_db: float | None = None
    """Of the first output against the source model's; None where they are equal or there is nothing to compare."""
    same_sizes: bool = True
    """Whether the first output has the size of the source model's, as boxes that were found may not."""
    agreement: Agreement | None = None
    """None where the source model predicts one class for all samples."""
    accuracy: Accuracy | None = None
    """Of a classifier; None without labels or trained weights."""
    scores: TaskScores | None = None
    """Of any other task; None without annotations or trained weights."""
    verdict: Verdict | None = None
    """Whether the drop is within the budget; None for the source model and without a budget."""
    sha256: str | None = None
    """Of the artifact's files (`hash_engine`); None for the source model, and in records of versions that stored none."""

    @property
    def drop_ci(self) -> Bounds | None:
        """The interval of the drop that is judged."""
        if self.scores is not None:
            return self.scores.scores[0].drop_ci
        return None if self.accuracy is None else self.accuracy.drop_ci


@dataclass(frozen=True, slots=True)
class Dataset:
    """The samples that were evaluated."""

    name: str
    kind: str
    """What its samples are called, in the plural."""
    sha256: str
    count: int
    unreadable: tuple[str, ...]
    labeled: bool
    classes: int
    labels: tuple[str, ...] = ()
    """Names of the classes, where scores are given by class."""
    truncated: int = 0
    """Texts that were cut at the model's maximum input length."""
    validation: bool | None = None
    """Whether it is the whole validation set that the model's card names; None in records of versions that did not say."""

    def describe(self) -> str:
        """`400 texts`, `400 texts (2 truncated)`."""
        return f"{self.count} {self.kind}" + (f" ({self.truncated} truncated)" if self.truncated else "")

    def identify(self) -> str:
        """`800 images of digits/validation (19b36f9e202f)`."""
        return f"{self.describe()} of {escape(self.name)} ({escape(self.sha256[:12])})"


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What `optpipe evaluate` found."""

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
    """How outputs became predictions, where there is a choice: `NMS outside the engine, IoU 0.7`."""

    @property
    def status(self) -> ExitStatus:
        """The worst of the verdicts; an artifact that failed to run is worse than any."""
        verdicts = {row.verdict for row in self.results}
        if any(row.failed for row in self.results):
            return ExitStatus.STAGE_FAILED
        if Verdict.FAIL in verdicts:
            return ExitStatus.FAIL
        return ExitStatus.INCONCLUSIVE if Verdict.INCONCLUSIVE in verdicts else ExitStatus.DONE
