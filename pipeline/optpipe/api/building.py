"""Builds a model that the library was given."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optpipe.api.build import Build, find_build
from optpipe.api.builds import Builds, FailedBuild
from optpipe.api.data import Data, resolve_data_argument
from optpipe.core.entries import Device
from optpipe.core.errors import BadInputError
from optpipe.core.events import Listener

if TYPE_CHECKING:
    from optpipe.api.model import Model
    from optpipe.api.workspace import Workspace
    from optpipe.build.plan import BuildPlan
    from optpipe.build.records import ModelBuild
    from optpipe.core.card import ModelCard
    from optpipe.models.export.exported import Model as SourceModel


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
    builds = [find_build(workspace, artifact.id, source) for artifact in chosen.build.artifacts]
    failed = [
        FailedBuild(omitted.backend, omitted.precision, omitted.reason)
        for omitted in (*chosen.build.failed, *chosen.build.skipped)
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
    from optpipe.models.artifacts.lookup import stored_from_entry

    builds: list[Build | FailedBuild] = [
        Build(
            workspace,
            stored_from_entry(artifact.entry, workspace.store),
            artifact.verification,
            source,
            artifact.required_share,
        )
        for artifact in built.artifacts
    ]
    for omitted in (*built.failed, *built.skipped, *built.replaced):
        builds += [
            FailedBuild(name.strip(), str(omitted.precision), omitted.reason)
            for name in omitted.backend.split(",")
        ]
    return builds
