"""Builds: callable, with their proofs, and with the reasons why other candidates failed."""

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Self, Unpack

from optpipe.api.arguments import check_arguments
from optpipe.api.calling import CallContract, arrays_from, pack_outputs
from optpipe.api.data import Data, resolve_data_argument
from optpipe.api.door import keep_caller_state, speak, speak_of_arguments
from optpipe.core import torch
from optpipe.core.entries import ArtifactInfo, Device, VerificationInfo
from optpipe.core.errors import BadInputError, MissingError, OptpipeError, StageError
from optpipe.core.events import Listener
from optpipe.core.precision import PrecisionProof

if TYPE_CHECKING:
    from optpipe.api.bench import Bench, BenchOptions, Times
    from optpipe.api.evaluation import Evaluation
    from optpipe.api.metric import Metric
    from optpipe.api.model import Model
    from optpipe.api.policy import Policy
    from optpipe.api.verdict import Verdict
    from optpipe.api.workspace import Workspace
    from optpipe.build.plan import BuildPlan
    from optpipe.build.records import ModelBuild
    from optpipe.core.card import ModelCard
    from optpipe.core.metrics.sampled import SampleScore
    from optpipe.models.artifacts.lookup import StoredArtifact
    from optpipe.models.export.exported import Model as SourceModel
    from optpipe.report.document import Document
    from optpipe.workspace.entry import Entry


class Build:
    """One build: call it like the module, on NumPy arrays or torch tensors.

    Inputs are given by position, by name, or as one mapping; their types and shapes are checked against the profile and never
    cast. Arrays give arrays, tensors give tensors on the device where the inputs lie; one output is returned as itself, several as
    a named tuple. The session is loaded at the first call, after the hash of its file was checked; calls from several threads take
    turns. As a context manager, a build frees its session at the end; it is loaded again when it is called again.

    A call raises BadInputError for inputs that do not fit, MissingError if the build cannot run on this machine, StageError if its
    file was changed or removed.

    >>> import torch, optpipe as op
    >>> model = op.Model(torch.nn.Linear(8, 4), example=torch.randn(2, 8), workspace="work")
    >>> build = model.build("fp32", backend="onnxruntime", device="cpu")["fp32"]
    >>> build.precision.proven, build.verification.passed
    (True, True)
    >>> build(torch.zeros(1, 8).numpy()).shape
    (1, 4)
    """

    def __init__(
        self,
        workspace: "Workspace",
        stored: "StoredArtifact",
        verification: "Entry[VerificationInfo] | None",
        model: "SourceModel | None" = None,
        required_share: float | None = None,
    ) -> None:
        self.workspace = workspace
        self._required_share = required_share
        self._stored, self._verification, self._model = stored, verification, model
        self._session: Any = None
        self._stream: Any = None
        """The stream of its session on a GPU."""
        self._contract = CallContract(stored.card)
        self._index = 0
        self._file = ""
        """The path of its main file while its session is loaded."""
        self._takes_tensors = False
        self._last_device: Any = None
        """The GPU of the last call's inputs, which its session takes."""
        self._lock = threading.Lock()

    @property
    def ok(self) -> bool:
        """Whether its precision is what was asked for and its outputs, if they could be compared, are verified.

        A share below `require_share` is not; without it, any share above zero is, and `precision` states it.
        """
        verified = self.verification is None or self.verification.passed is not False
        shortfall = self.precision.find_shortfall(self.info.precision, self._required_share)
        return shortfall is None and verified

    @property
    def runs_here(self) -> bool:
        """Whether it can run on this machine."""
        from optpipe.backends.registry import BACKENDS

        return BACKENDS[self.backend].find_run_blocker(self.info) is None

    @property
    def info(self) -> ArtifactInfo:
        """The record in its manifest."""
        return self._stored.entry.info

    @property
    def id(self) -> str:
        return self._stored.entry.id

    @property
    def label(self) -> str:
        """`onnxruntime int8 (cpu)`."""
        return self._stored.label

    @property
    def backend(self) -> str:
        return self.info.backend

    @property
    def device(self) -> Device:
        return self.info.device

    @property
    def precision(self) -> PrecisionProof:
        """The proof of its precision, read from the network that was built; `str(build.info.precision)` is its name."""
        return self.info.precision_proof

    @property
    def verification(self) -> VerificationInfo | None:
        """The errors of its outputs against the source model's; None if they were not compared, as for a build that cannot run
        here."""
        return None if self._verification is None else self._verification.info

    @property
    def card(self) -> "ModelCard":
        """Inputs with their profile, and outputs."""
        return self._stored.card

    @property
    def size(self) -> int:
        """Bytes of its files."""
        from optpipe.models.artifacts.lookup import measure_engine

        return measure_engine(self._stored.entry)

    @property
    def path(self) -> Path:
        """Its main file."""
        return self._stored.entry.file(self.info.file)

    @property
    def sha256(self) -> str:
        from optpipe.models.artifacts.lookup import hash_engine

        return hash_engine(self._stored.entry)

    @property
    def stored(self) -> "StoredArtifact":
        """The build as optpipe's own functions take it."""
        return self._stored

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        try:
            given, device = self._contract.read(inputs, named)
            with self._lock:
                session = self._session or self._open()
                if device is None or device.type == "cpu":
                    self._require_file()
                    outputs = session.run(arrays_from(given))
                else:
                    if device is not self._last_device:
                        self._require_device(device)
                        self._last_device = device
                    outputs = session.run_on(
                        {
                            name: value.detach() if value.requires_grad else value
                            for name, value in given.items()
                        }
                    )
                    self._require_file()  # last, since the GPU works meanwhile
        except OptpipeError as error:
            error.word_for_python()
            raise
        return pack_outputs(outputs, self._stored.card.outputs, as_tensors=device is not None)

    def _require_device(self, device: Any) -> None:
        """Raises BadInputError if the session, which is loaded, does not take tensors on that GPU."""
        if self.device != "cuda":
            raise BadInputError(
                f'the inputs are on {device}, and this build runs on the CPU\nmove them with .cpu(), or build with device="cuda"'
            )
        if device.index not in (None, self._index):
            raise BadInputError(
                f"the inputs are on {device}, and this build's session on cuda:{self._index}\nmove them there with .to()"
            )
        if not self._takes_tensors:
            raise BadInputError(
                f"{self.backend} does not take tensors on a GPU\ngive arrays, or tensors on the CPU"
            )

    def require_present(self) -> None:
        """Raises StageError if its files were removed from the workspace."""
        from optpipe.models.artifacts.lookup import list_engine_files
        from optpipe.workspace.entry import MANIFEST

        entry = self._stored.entry
        if not all(entry.file(name).exists() for name in (MANIFEST, *list_engine_files(entry))):
            raise self._describe_removal()

    def _describe_removal(self) -> StageError:
        return StageError(
            f"{self.label} ({self.id}) was removed from {self.workspace.path}",
            remedy="build it again: Model.build finds or makes it",
        )

    def _open(self) -> Any:
        """Loads the session; the caller holds the lock."""
        from optpipe.backends.base import RunsOnDevice
        from optpipe.backends.registry import BACKENDS, load_artifact

        self.require_present()
        backend, entry = BACKENDS[self.backend], self._stored.entry
        if (why_not := backend.find_run_blocker(self.info)) is not None:
            raise MissingError(f"{self.label} cannot run on this machine: {why_not}")
        with keep_caller_state(), self._use_stream():
            self._session = load_artifact(entry, self.workspace.store)
        self._takes_tensors = isinstance(self._session, RunsOnDevice)
        self._file = str(self.path)
        return self._session

    def _require_file(self) -> None:
        """Frees the session and raises StageError if the file that it was loaded from was removed."""
        if not os.access(self._file, os.F_OK):  # half the time of a Path's exists
            self._unload()
            raise self._describe_removal()

    @contextmanager
    def _use_stream(self) -> Iterator[None]:
        """A stream for a session on a GPU, so that its work and torch's can be ordered without waiting."""
        if self.device == "cpu":
            yield
            return
        from optpipe.backends.cuda_streams import STREAMS

        self._index = torch.cuda.current_device()
        self._stream = STREAMS.take(self._index)
        with torch.cuda.stream(self._stream):
            yield
        torch.cuda.current_stream().wait_stream(
            self._stream
        )  # the weights are there before the first call

    def close(self) -> None:
        """Frees the session's memory."""
        with self._lock:
            self._unload()

    def _unload(self) -> None:
        session, self._session = self._session, None
        stream, self._stream = self._stream, None
        self._last_device = None
        if session is not None:
            session.__exit__(None, None, None)
        if stream is not None:
            from optpipe.backends.cuda_streams import STREAMS

            STREAMS.give_back(stream)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def bench(self, **options: "Unpack[BenchOptions]") -> "Bench":
        """As `Builds.bench`, of this build alone."""
        return Builds(self.workspace, [self]).bench(**options)

    @check_arguments
    def time(self, *, batch: int | None = None, seconds: float = 1.0) -> "Times":
        """Times calls in this process for trying things out: stored, and never evidence. `bench` measures what counts.

        The inputs are those that the build was verified on, repeated to `batch` (default: the profile's opt).
        """
        from optpipe.api.bench import time_build

        return time_build(self, batch, seconds)

    def evaluate(self, data: Any = None, **options: Any) -> "Evaluation":
        """As `Builds.evaluate`, of this build alone."""
        return Builds(self.workspace, [self], model=self._model).evaluate(data, **options)

    @check_arguments
    def signoff(
        self,
        policy: "Policy | str | os.PathLike[str]",
        *,
        evaluation: "Evaluation | None" = None,
        data: Any = None,
        metric: "Metric | None" = None,
        scores: "Sequence[SampleScore | Metric]" = (),
        waive: Mapping[str, str] | None = None,
        measure: bool = True,
        output: str | os.PathLike[str] | None = None,
        figures: bool = True,
    ) -> "Verdict":
        """Judges this build by a policy and writes a dossier, after measuring what the policy needs and is missing.

        Limits of accuracy need an `evaluation` of this build, or `data`, with a `metric` where the model's task has none. `scores` are
        further scores, as in `Builds.evaluate`, which `[scores.NAME]` of a policy limits. `waive` gives the reason by criterion.
        Judging unchanged evidence again returns the same dossier.

        Raises BadInputError, before anything is measured, for a policy or data that do not fit.
        """
        from optpipe.api.verdict import sign_off_build

        return sign_off_build(
            self,
            policy,
            evaluation=evaluation,
            data=data,
            metric=metric,
            scores=scores,
            waive=waive or {},
            measure=measure,
            output=output,
            figures=figures,
        )

    def model(self) -> "SourceModel | None":
        """The model that it was built from in this program; None if it was found in the workspace."""
        return self._model

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy or an unpickled build is found in the workspace again, and loads a session when it is called."""
        return _restore_build, (str(self.workspace.store.workspace.absolute()), self.id)

    def __repr__(self) -> str:
        state = "" if self.ok else ", precision or outputs not as required"
        return f"Build({self._stored.card.name!r}, {self.label}, {self.id}{state})"

    def _repr_html_(self) -> str:
        return Builds(self.workspace, [self])._repr_html_()


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
        names = [_name_precision(each) for each in builds]
        self._builds: dict[str, Any] = {}
        for name, each in zip(names, builds, strict=True):
            device = getattr(each, "device", "") if isinstance(each, Build) else ""
            key = name if names.count(name) == 1 else f"{each.backend} {name}"
            self._builds[key if key not in self._builds else f"{key} {device}".rstrip()] = each

    def __getitem__(self, name: str) -> Build:
        if name in self._builds:
            found: Build = self._builds[name]
            return found
        matching = [
            each
            for each in self._builds.values()
            if name in (getattr(each, "backend", ""), _name_precision(each))
        ]
        able = [each for each in matching if isinstance(each, Build) and each.runs_here]
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
        return tuple(each for each in self._builds.values() if isinstance(each, Build))

    @property
    def failed(self) -> tuple[FailedBuild, ...]:
        """The candidates that were not built, with the reasons."""
        return tuple(each for each in self._builds.values() if isinstance(each, FailedBuild))

    def require_built(self) -> tuple[Build, ...]:
        """Raises StageError with the reasons if nothing was built, and if a build was removed from the workspace."""
        if not self.built:
            reasons = "; ".join(
                f"{each.backend} {each.wanted}: {each.reason}" for each in self.failed
            )
            raise StageError(f"nothing was built: {reasons}")
        for each in self.built:
            each.require_present()
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
            (each.label, each.id, str(each.info.precision_proof.reason), str(each.size))
            for each in self.built
        ]
        return (make_table(("Build", "ID", "Precision", "Bytes"), rows),)

    def __str__(self) -> str:
        from optpipe.report.terminal import text_from_document

        return text_from_document(self._document_now())

    def __repr__(self) -> str:
        return f"Builds({', '.join(f'{name}: {each!r}' for name, each in self._builds.items())})"

    def _repr_html_(self) -> str:
        from optpipe.report.notebook import html_from_document

        return html_from_document(self._document_now())


def _name_precision(build: "Build | FailedBuild") -> str:
    return str(build.info.precision) if isinstance(build, Build) else build.wanted


def build_model_from_library(
    model: "Model",
    source: "SourceModel",
    *,
    precision: str | Sequence[str],
    backend: str | Sequence[str],
    device: Device | None,
    calibration: Any,
    data: Any,
    budget: str | None,
    recover: str | None,
    option: Mapping[str, Mapping[str, Any]],
    truncate: bool,
    min_snr: str | None,
    require_share: str | None,
    steps: str | None,
) -> Builds:
    from optpipe.build.build import build_model
    from optpipe.build.plan import plan_builds
    from optpipe.build.records import document_from_build, result_from_build

    workspace, wanted = model.workspace, _join(precision, "precision")
    backends = _join(backend, "backend")
    ranges, checked = resolve_data_argument(calibration), resolve_data_argument(data)
    arguments = {
        "model": model.card.source,
        "precision": wanted,
        "backend": backends,
        "device": device,
        "calibration": ranges and (ranges.path or ranges.sha256[:12]),
        "data": checked and (checked.path or checked.sha256[:12]),
        "budget": budget,
        "recover": recover,
        "min_snr": min_snr,
        "require_share": require_share,
        "steps": steps,
    }
    with workspace.call("Model.build", **arguments) as listener:
        model.require_unchanged()
        store = workspace.store
        store.require_writable()
        plan = plan_builds(
            precision=wanted,
            backend=backends,
            device=device,
            calibration=_store_data(ranges, model.card, workspace, listener),
            images=_store_data(checked, model.card, workspace, listener),
            options={name: dict(given) for name, given in option.items()},
            budget=budget,
            recover=recover,
            minimum_snr=min_snr,
            require_share=require_share,
            steps=steps,
            truncate=truncate,
        )
        if wanted == "auto":
            return _choose(model, source, plan, listener)
        built = build_model(source, plan, store, listener)
        warnings = list(listener.warnings)
        document = document_from_build(result_from_build(built, "default", warnings))
        return Builds(
            workspace,
            _list_builds(built, workspace, source),
            model=source,
            document=document,
            warnings=warnings,
        )


def _choose(model: "Model", source: "SourceModel", plan: "BuildPlan", listener: Listener) -> Builds:
    """The builds that `--precision auto` made and kept."""
    from optpipe.build.choose import choose_build
    from optpipe.build.records import document_from_choice

    workspace = model.workspace
    chosen = choose_build(source, plan, "default", workspace.store, listener)
    builds = [find_build(workspace, each.id, source) for each in chosen.build.artifacts]
    failed = [
        FailedBuild(each.backend, each.precision, each.reason)
        for each in (*chosen.build.failed, *chosen.build.skipped)
    ]
    return Builds(
        workspace,
        [*builds, *failed],
        model=source,
        document=document_from_choice(chosen),
        warnings=listener.warnings,
    )


def _join(words: str | Sequence[str], name: str) -> str:
    if not words:
        raise BadInputError(f"{name}: nothing is given; give one name or several")
    return words if isinstance(words, str) else ",".join(map(str, words))


def _store_data(
    data: Data | None, card: "ModelCard", workspace: "Workspace", listener: Listener
) -> Path | None:
    return None if data is None else data.store_for(card, workspace.store, listener)[0]


def _list_builds(
    built: "ModelBuild", workspace: "Workspace", source: "SourceModel"
) -> list[Build | FailedBuild]:
    found: list[Build | FailedBuild] = [
        Build(
            workspace,
            _stored_from_entry(workspace, each.entry),
            each.verification,
            source,
            each.required_share,
        )
        for each in built.artifacts
    ]
    for omitted in (*built.failed, *built.skipped, *built.replaced):
        found += [
            FailedBuild(name.strip(), str(omitted.precision), omitted.reason)
            for name in omitted.backend.split(",")
        ]
    return found


def _stored_from_entry(workspace: "Workspace", entry: "Entry[ArtifactInfo]") -> "StoredArtifact":
    from optpipe.models.artifacts.lookup import stored_from_entry

    return stored_from_entry(entry, workspace.store)


def find_build(workspace: "Workspace", ident: str, source: "SourceModel | None" = None) -> Build:
    """The stored build with this ID, and its newest verification."""
    store = workspace.store
    entry = store.find(ident, ArtifactInfo)
    checked = [
        each for each in store.list_entries(VerificationInfo) if entry.id in each.manifest.parents
    ]
    stored = _stored_from_entry(workspace, entry)
    return Build(workspace, stored, checked[-1] if checked else None, source)


def _restore_build(folder: str, ident: str) -> Build:
    from optpipe.api.workspace import Workspace

    with speak_of_arguments():
        return find_build(Workspace(folder), ident)


def builds_from_store(
    workspace: "Workspace",
    model: str,
    precision: str | None,
    backend: str | None,
    device: Any,
) -> Builds:
    from optpipe.backends.registry import BACKENDS
    from optpipe.core.plan import choices_from_text
    from optpipe.core.precision import precisions_from_text
    from optpipe.models.artifacts.lookup import find_artifacts

    precisions = (
        [] if precision is None else [str(each) for each in precisions_from_text(precision)]
    )
    backends = () if backend is None else choices_from_text(backend, BACKENDS, "backend")
    stored = find_artifacts(model, workspace.store, precisions, backends, device)
    return Builds(workspace, [find_build(workspace, each.entry.id) for each in stored])
