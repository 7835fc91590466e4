"""A verdict, its dossier, and the build that a dossier signed off."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

from optpipe.api.arguments import check_arguments, require_type
from optpipe.api.data import resolve_data_argument
from optpipe.api.door import speak
from optpipe.api.evaluation import Evaluation, find_source, read_scores
from optpipe.api.metric import Metric, require_metric
from optpipe.api.policy import Policy, resolve_policy
from optpipe.api.workspace import Workspace, resolve_workspace
from optpipe.core.errors import BadInputError, GateError, InconclusiveError
from optpipe.core.metrics.sections import ACCURACY
from optpipe.core.verdict import CriterionResult, VerdictRecord, require_reason
from optpipe.core.verdict import Verdict as Outcome

if TYPE_CHECKING:
    from optpipe.api.build import Build
    from optpipe.core.metrics.sampled import SampleScore
    from optpipe.deploy.records import DeployResult, Form
    from optpipe.workspace.store import Store


DOSSIER_WAY_OUT = "give the folder that build.signoff(policy) wrote: verdict.dossier.path"


class Verdict:
    """PASS, FAIL, or INCONCLUSIVE, with the reasons, and the dossier that anyone can verify.

    `bool(verdict)` is True for PASS and False for FAIL; for INCONCLUSIVE it raises InconclusiveError, since neither is proven.

    >>> import torch, optpipe as op
    >>> model = op.Model(torch.nn.Linear(8, 4), example=torch.randn(2, 8), trained=True, workspace="work")
    >>> build = model.build("fp32", backend="onnxruntime", device="cpu", data=torch.randn(64, 8))["fp32"]
    >>> waive = {"trust.environment": "nothing is timed"}
    >>> verdict = build.signoff(op.Policy(size={"maximum": "1 MiB"}), waive=waive, figures=False)
    >>> verdict.require_pass().outcome
    'PASS'
    >>> verdict.dossier.verify().reasons
    ()
    """

    def __init__(self, workspace: Workspace, record: VerdictRecord, folder: Path) -> None:
        self.workspace, self.record = workspace, speak(record)
        self.dossier = Dossier(folder, workspace=workspace)

    @property
    def outcome(self) -> str:
        """`PASS`, `FAIL`, or `INCONCLUSIVE`."""
        return str(self.record.verdict)

    @property
    def criteria(self) -> tuple[CriterionResult, ...]:
        """Every criterion with its figure, interval, limit, and reason."""
        return self.record.criteria

    @property
    def reasons(self) -> tuple[str, ...]:
        """A line for each criterion that is not met or not decided, those that decide the verdict first."""
        worst = [
            criterion for criterion in self.record.counted if criterion.verdict is not Outcome.PASS
        ]
        worst.sort(key=lambda criterion: criterion.verdict is not self.record.verdict)
        return tuple(
            f"{criterion.name} {criterion.verdict}: " + criterion.reason for criterion in worst
        )

    def require_pass(self) -> "Verdict":
        """Returns itself. Raises GateError for FAIL, InconclusiveError for INCONCLUSIVE, each with the reasons."""
        if self.record.verdict is Outcome.PASS:
            return self
        kind = GateError if self.record.verdict is Outcome.FAIL else InconclusiveError
        raise kind("\n".join([f"{self.outcome}: {self.dossier.path}", *self.reasons]))

    def __bool__(self) -> bool:
        if self.record.verdict is Outcome.INCONCLUSIVE:
            self.require_pass()
        return self.record.verdict is Outcome.PASS

    def _document(self) -> Any:
        from optpipe.signoff.reports import document_from_verdict

        return speak(document_from_verdict(self.record, self.dossier.path))

    def __str__(self) -> str:
        from optpipe.report.terminal import text_from_document

        return text_from_document(self._document())

    def __repr__(self) -> str:
        return f"Verdict({self.outcome}, {self.dossier.path})"

    def _repr_html_(self) -> str:
        from optpipe.report.notebook import html_from_document

        return html_from_document(self._document())


class Dossier:
    """The evidence of a verdict: a sealed folder with the raw samples, the policy, and the reports.

    `workspace` is where the build lies that it signed off.

    >>> import optpipe as op
    >>> op.Dossier("nowhere").verify()
    Traceback (most recent call last):
    ...
    optpipe.core.errors.BadInputError: nowhere is not a dossier
    give the folder that build.signoff(policy) wrote: verdict.dossier.path
    """

    @check_arguments
    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        workspace: Workspace | str | os.PathLike[str] | None = None,
    ) -> None:
        self.path, self.workspace = Path(path), resolve_workspace(workspace)

    @property
    def report(self) -> Path:
        """Its report, an HTML file without external resources."""
        from optpipe.signoff.reports import HTML

        return self.path / HTML

    def verify(self) -> Verdict:
        """Recomputes every figure and the verdict from the raw files, offline.

        Raises BadInputError if a byte has changed, GateError if a figure does not follow from the raw files.
        """
        from optpipe.signoff.verify import verify_dossier

        with self.workspace.call("Dossier.verify", dossier=self.path) as listener:
            if not self.path.is_dir():
                raise BadInputError(f"{self.path} is not a dossier", remedy=DOSSIER_WAY_OUT)
            with listener.step("verify"):
                checked = verify_dossier(self.path)
            if checked.problems and checked.as_sealed:
                raise GateError(f"{self.path} failed verification: {checked.problems[0]}")
            _, record, _ = checked.require_intact()
            return Verdict(self.workspace, record, self.path)

    @check_arguments
    def deploy(
        self,
        output: str | os.PathLike[str],
        *,
        to: "Form" = "triton",
        because: str | None = None,
        ensemble: bool = True,
        storage_uri: str | None = None,
        image: str | None = None,
        prove: bool = False,
        tune: bool = False,
        server: str | None = None,
    ) -> "DeployResult":
        """Writes the signed-off build as a Triton model repository, with `to="kserve"` also an InferenceService, or a folder with a
        program that loads it.

        The arguments are the options of `optpipe deploy`. Raises GateError for anything but an unqualified PASS without `because`,
        and BadInputError if the dossier is not intact or the workspace has another build.
        """
        from optpipe.deploy.deploy import deploy_dossier, require_server
        from optpipe.deploy.records import Form

        if to not in get_args(Form):
            raise BadInputError(f"to={to!r}: choose from {', '.join(get_args(Form))}")
        with self.workspace.call("Dossier.deploy", dossier=self.path, to=to) as listener:
            program = require_server(to, server) if prove or tune else None
            return deploy_dossier(
                self.path,
                Path(output),
                to,
                self.workspace.store,
                listener,
                because=because,
                ensemble=ensemble,
                storage_uri=storage_uri,
                image=image,
                program=program,
                tune=tune,
            )

    @check_arguments
    def export(self, to: str, *, output: str | os.PathLike[str] | None = None) -> str:
        """Sends the dossier to the tracker `to`: `mlflow`, `wandb`, `model-card`, or one of a plug-in; returns where it is.

        `output` is the file of a model card, or the folder of an offline run. Raises MissingError without the tracker's library,
        StageError if it fails, and BadInputError if a byte of the dossier has changed.
        """
        from optpipe.deploy.trackers.registry import export_dossier

        with self.workspace.call("Dossier.export", dossier=self.path, to=to):
            return export_dossier(self.path, to, None if output is None else Path(output))

    def load(self) -> "Build":
        """The build that it signed off, from the workspace. Raises BadInputError if the workspace lacks it, or has another file."""
        from optpipe.api.build import find_build
        from optpipe.deploy.signed_build import find_signed_entry
        from optpipe.signoff.verify import verify_dossier

        with self.workspace.call("load", dossier=self.path):
            if not self.path.is_dir():
                raise BadInputError(f"{self.path} is not a dossier", remedy=DOSSIER_WAY_OUT)
            dossier, _, _ = verify_dossier(self.path).require_intact()
            entry = find_signed_entry(dossier, self.workspace.store)
            return find_build(self.workspace, entry.id)

    def __repr__(self) -> str:
        return f"Dossier({str(self.path)!r})"

    def _repr_html_(self) -> str:
        from markupsafe import escape

        return f'<div class="optpipe"><a href="{escape(self.report)}">{escape(self.path.name)}</a></div>'


@check_arguments
def load(
    dossier: Dossier | str | os.PathLike[str],
    *,
    workspace: Workspace | str | os.PathLike[str] | None = None,
) -> "Build":
    """The build of a dossier, from the workspace that made it, after the dossier was verified and the hash of its file was checked.

    Loading an engine runs code, so nothing is loaded from the dossier itself.

    >>> import optpipe as op
    >>> op.load("nowhere")
    Traceback (most recent call last):
    ...
    optpipe.core.errors.BadInputError: nowhere is not a dossier
    give the folder that build.signoff(policy) wrote: verdict.dossier.path
    """
    if isinstance(dossier, Dossier):
        return (
            dossier.load()
            if workspace is None
            else Dossier(dossier.path, workspace=workspace).load()
        )
    return Dossier(dossier, workspace=workspace).load()


def sign_off_build(
    build: "Build",
    policy: Policy | str | os.PathLike[str],
    *,
    evaluation: Evaluation | None,
    data: Any,
    metric: Metric | None,
    scores: "Sequence[SampleScore | Metric]",
    waive: Mapping[str, str],
    measure: bool,
    output: str | os.PathLike[str] | None,
    figures: bool,
) -> Verdict:
    from optpipe.signoff.collect import SignoffRequest
    from optpipe.signoff.missing import measure_missing_evidence
    from optpipe.signoff.release import require_possible, sign_off
    from optpipe.signoff.same import find_same_dossier, remember_dossier

    require_metric(metric)
    own = read_scores(scores)
    wanted_evaluation = Annotated[Evaluation | None, "what builds.evaluate(data) returns"]
    require_type("evaluation", evaluation, wanted_evaluation)
    if evaluation is not None:
        _require_no_samples(data=data, metric=metric, scores=own or None)
    workspace, rules, store = build.workspace, resolve_policy(policy), build.workspace.store
    samples = resolve_data_argument(data)
    with workspace.call(
        "Build.signoff", build=build.id, policy=f"{rules.name} ({rules.sha256[:12]})"
    ) as listener:
        for name, reason in waive.items():
            require_reason(reason, f"waive: {name}")
        wanted = SignoffRequest(
            _choose_model_text(build, rules, store),
            rules.parsed(),
            build.id,
            dict(waive),
            scores=frozenset(metric.name for metric in own),
        )
        target = None if output is None else Path(output)
        build.require_present()
        evaluates = samples is not None or metric is not None or bool(own)
        if evaluates:
            _require_scores(rules, own)
        require_possible(wanted, store, target, None)
        _require_accuracy(build, rules, evaluation, evaluates, store)
        if evaluates:
            evaluation = build.evaluate(samples, metric=metric, scores=own)
        if measure:
            measure_missing_evidence(wanted, lambda: find_source(build), store, listener)
        if target is None and (same := find_same_dossier(wanted, store)) is not None:
            from optpipe.signoff.verify import verify_dossier

            _, record, _ = verify_dossier(same).require_intact()
            return Verdict(workspace, record, same)
        record, folder = sign_off(wanted, store, target, None, listener, figures=figures)
        remember_dossier(wanted, store, folder)
        return Verdict(workspace, record, folder)


def _require_no_samples(**given: Any) -> None:
    """Raises BadInputError for what an evaluation has been given already."""
    for name, value in given.items():
        if value is not None:
            raise BadInputError(
                f"{name} and evaluation exclude each other\ngive {name} to builds.evaluate, or leave out evaluation="
            )


def _require_scores(policy: Policy, own: "Sequence[SampleScore | Metric]") -> None:
    """Raises BadInputError for a limit on a score that the coming evaluation will not have."""
    from optpipe.core.metrics.sampled import PLUGIN_SCORES

    known = {*(metric.name for metric in own), *PLUGIN_SCORES}
    for criterion in policy.criteria:
        if criterion.sampled_score not in (None, *known):
            raise BadInputError(
                f"the policy limits {criterion.name}, and no score has that name\ngive it: scores=[...]"
            )


def _choose_model_text(build: "Build", policy: Policy, store: "Store") -> str:
    """The MODEL of the request: the build's name, or another that the policy gives it."""
    from optpipe.models.artifacts.builds_by_name import find_builds

    asked = policy.parsed().model
    if asked is not None and build.id in {match.id for match in find_builds(asked, store)}:
        return asked
    return build.info.model


def _require_accuracy(
    build: "Build", policy: Policy, evaluation: Evaluation | None, given: bool, store: "Store"
) -> None:
    """Raises BadInputError, before anything is measured, for an evaluation of other builds, and for a limit of accuracy that
    nothing can show."""
    from optpipe.workspace.runs import list_runs

    if evaluation is not None and build.id not in evaluation.artifacts:
        raise BadInputError(
            f"evaluation {evaluation.run} did not score {build.label} ({build.id})\nevaluate this build: build.evaluate(data)"
        )
    limited = [criterion.name for criterion in policy.criteria if criterion.is_of(ACCURACY)]
    if not limited or evaluation is not None or given or "validation" in build.card.data:
        return
    runs = list_runs(store.workspace, "evaluate")
    if not any(build.id in run.manifest.parents for run in runs):
        raise BadInputError(
            f"the policy limits {limited[0]}, and {build.label} was never evaluated\ngive evaluation=builds.evaluate(data, "
            "metric=...), or data= with metric="
        )
