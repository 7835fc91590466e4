"""The builds of a model, by precision, with the candidates that failed."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Unpack

from optpipe.api.arguments import check_arguments
from optpipe.api.build import Build, find_build
from optpipe.api.door import speak
from optpipe.core.errors import StageError

if TYPE_CHECKING:
    from optpipe.api.bench import Bench, BenchOptions
    from optpipe.api.data import Data
    from optpipe.api.evaluation import Evaluation
    from optpipe.api.metric import Metric
    from optpipe.api.workspace import Workspace
    from optpipe.core.metrics.sampled import SampleScore
    from optpipe.models.export.exported import Model as SourceModel
    from optpipe.report.document import Document


class FailedBuild:
    """A candidate that could not be built; `reason` says why, and any use raises it."""

    ok = False

    def __init__(self, backend: str, precision: str, reason: str) -> None:
        self.backend, self.wanted, self.reason = backend, precision, speak(reason)

    def __repr__(self) -> str:
        return f"FailedBuild({self.backend} {self.wanted}: {self.reason.splitlines()[0]})"

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):
            raise AttributeError(name)
        raise StageError(f"{self.backend} {self.wanted} was not built: {self.reason}")

    def __call__(self, *inputs: Any, **named: Any) -> NoReturn:
        raise StageError(f"{self.backend} {self.wanted} was not built: {self.reason}")


class Builds(Mapping[str, Build]):
    """The builds of a model, by precision: `builds["int8"]`; by `BACKEND PRECISION` where several backends built one precision.

    A precision that several backends built means the only one of them that can run on this machine, if there is only one.
    Candidates that could not be built are in it too, as `FailedBuild` with the reason.

    >>> import torch, optpipe as op
    >>> model = op.Model(torch.nn.Linear(8, 4), example=torch.randn(2, 8), workspace="work")
    >>> builds = model.build(["fp32", "fp8"], backend="onnxruntime", device="cpu")
    >>> {name: build.ok for name, build in builds.items()}
    {'fp32': True, 'fp8': False}
    >>> builds["fp8"].reason.split(",")[0]
    'has no fp8 kernels on cpu'
    """

    def __init__(
        self,
        workspace: "Workspace",
        builds: Sequence["Build | FailedBuild"],
        *,
        model: "SourceModel | None" = None,
        document: "Document | None" = None,
        warnings: Sequence[str] = (),
    ) -> None:
        self.workspace, self._model, self._document = workspace, model, speak(document)
        self.warnings = speak(tuple(warnings))
        names = [_name_precision(build) for build in builds]
        self._builds: dict[str, Any] = {}
        for name, build in zip(names, builds, strict=True):
            device = getattr(build, "device", "") if isinstance(build, Build) else ""
            key = name if names.count(name) == 1 else f"{build.backend} {name}"
            self._builds[key if key not in self._builds else f"{key} {device}".rstrip()] = build

    def __getitem__(self, name: str) -> Build:
        if name in self._builds:
            named: Build = self._builds[name]
            return named
        matching = [
            build
            for build in self._builds.values()
            if name in (getattr(build, "backend", ""), _name_precision(build))
        ]
        able = [build for build in matching if isinstance(build, Build) and build.runs_here]
        for chosen in (able, matching):
            if len(chosen) == 1:
                only: Build = chosen[0]
                return only
        raise KeyError(f"no single build is called {name!r}; there are {', '.join(self._builds)}")

    def __iter__(self) -> Iterator[str]:
        return iter(self._builds)

    def __len__(self) -> int:
        return len(self._builds)

    @property
    def built(self) -> tuple[Build, ...]:
        """The candidates that were built."""
        return tuple(build for build in self._builds.values() if isinstance(build, Build))

    @property
    def failed(self) -> tuple[FailedBuild, ...]:
        """The candidates that were not built, with the reasons."""
        return tuple(build for build in self._builds.values() if isinstance(build, FailedBuild))

    def require_built(self) -> tuple[Build, ...]:
        """Raises StageError with the reasons if nothing was built, and if a build was removed from the workspace."""
        if not self.built:
            reasons = "; ".join(
                f"{build.backend} {build.wanted}: {build.reason}" for build in self.failed
            )
            raise StageError(f"nothing was built: {reasons}")
        for build in self.built:
            build.require_present()
        return self.built

    def bench(self, **options: "Unpack[BenchOptions]") -> "Bench":
        """Measures latency, throughput, and memory in fresh processes: a try that counts, whatever it shows.

        `batch` (a size or sizes), `processes`, `scenario`, `mode`, `streams`, `rate`, `length`, `percentile`, `slo`, `energy`,
        `min_time`, `max_time`, `warm_up`, `max_warm_up`, `max_cv`, `affinity`, `keep_going`, `seed`, and `option` have the meaning
        and default of the options of `optpipe bench`. Builds that cannot run here are left out, with a warning.

        Raises BadInputError for values that contradict each other and for a batch outside a profile, before anything is measured.
        """
        from optpipe.api.bench import bench_builds

        return bench_builds(self, options)

    @check_arguments
    def evaluate(
        self,
        data: "Data | Any | None" = None,
        *,
        metric: "Metric | None" = None,
        scores: "Sequence[SampleScore | Metric]" = (),
        accuracy_budget: str | None = None,
        truncate: bool = False,
    ) -> "Evaluation":
        """Scores every build and the source model on the same samples: by the model's task, or by a `metric`.

        `scores` are further scores of the task, each with its drop and intervals: instances of a subclass of
        `optpipe.core.metrics.sampled.SampleScore`, or a `Metric`. A policy limits them in `[scores.NAME]`. Those of plug-ins are
        always there.

        Raises BadInputError for data that do not fit, and for a metric that raises or gives NaN, with its own exception as the
        cause. A score that raises or gives NaN is withheld with its reason.
        """
        from optpipe.api.evaluation import evaluate_builds

        return evaluate_builds(self, data, metric, scores, accuracy_budget, truncate=truncate)

    def model(self) -> "SourceModel | None":
        """The model that they were built from in this program; None if they were found in the workspace."""
        return self._model

    def _document_now(self) -> "Document":
        from optpipe.report.document import make_table

        if self._document is not None:
            return self._document
        rows = [
            (build.label, build.id, str(build.info.precision_proof.reason), str(build.size))
            for build in self.built
        ]
        return (make_table(("Build", "ID", "Precision", "Bytes"), rows),)

    def __str__(self) -> str:
        from optpipe.report.terminal import text_from_document

        return text_from_document(self._document_now())

    def __repr__(self) -> str:
        return f"Builds({', '.join(f'{name}: {build!r}' for name, build in self._builds.items())})"

    def _repr_html_(self) -> str:
        from optpipe.report.notebook import html_from_document

        return html_from_document(self._document_now())


def _name_precision(build: "Build | FailedBuild") -> str:
    return str(build.info.precision) if isinstance(build, Build) else build.wanted


def builds_from_store(
    workspace: "Workspace",
    model: str,
    precision: str | None,
    backend: str | None,
    device: Any,
) -> Builds:
    from optpipe.backends.registry import BACKENDS
    from optpipe.core.params import choices_from_text
    from optpipe.core.precision import precisions_from_text
    from optpipe.models.artifacts.lookup import find_artifacts

    precisions = (
        [] if precision is None else [str(kind) for kind in precisions_from_text(precision)]
    )
    backends = () if backend is None else choices_from_text(backend, BACKENDS, "backend")
    stored = find_artifacts(model, workspace.store, precisions, backends, device)
    return Builds(workspace, [find_build(workspace, artifact.entry.id) for artifact in stored])
