"""The stored builds that a measurement is about."""

from collections.abc import Sequence

from optpipe.backends.registry import BACKENDS
from optpipe.core.entries import Device
from optpipe.core.errors import BadInputError
from optpipe.core.events import Listener
from optpipe.core.params import choices_from_text
from optpipe.core.precision import precisions_from_text
from optpipe.core.wording import Argument, Call
from optpipe.models.artifacts.changed_source import explain_changed_source
from optpipe.models.artifacts.decisions import find_decision
from optpipe.models.artifacts.lookup import (
    StoredArtifact,
    explain_different_weights,
    find_artifacts,
    select_runnable,
)
from optpipe.workspace.store import Store


def find_targets(
    models: Sequence[str],
    store: Store,
    listener: Listener,
    *,
    precision: str | None = None,
    backend: str | None = None,
    device: Device | None = None,
) -> tuple[tuple[StoredArtifact, ...], ...]:
    """The runnable artifacts of each MODEL, in the precisions and backends that the texts list; warns about the others.

    The precision `auto` selects the choice of `build --precision auto`.
    """
    chosen = precision == "auto"
    precisions = (
        () if chosen or precision is None else tuple(map(str, precisions_from_text(precision)))
    )
    backends = () if backend is None else choices_from_text(backend, BACKENDS, "backend")
    groups: list[tuple[StoredArtifact, ...]] = []
    for model in models:
        named = find_artifacts(model, store, precisions, backends, device)
        if chosen:
            decided = find_decision(store.workspace, {artifact.entry.id for artifact in named})
            if decided is None:
                auto = Call("build", model, precision="auto")
                raise BadInputError(f"nothing is chosen for {model} yet; `" + auto + "` chooses")
            named = tuple(
                artifact for artifact in named if artifact.entry.id in decided[0].winners.values()
            )
        groups.append(keep_runnable(model, named, store, listener))
    return tuple(groups)


def keep_runnable(
    model: str, named: Sequence[StoredArtifact], store: Store, listener: Listener
) -> tuple[StoredArtifact, ...]:
    """Those of `named` that can run here; warns about the others, and about weights that say nothing or differ.

    Raises MissingError if none can run.
    """
    able, reasons = select_runnable(named)
    for label, why_not in reasons.items():
        listener.warn(f"not measured: {label}: " + why_not)
    if len(able) > 1 and (
        decided := find_decision(store.workspace, {artifact.entry.id for artifact in able})
    ):
        auto = Argument("precision", "auto")
        listener.inform("build " + auto + f" chose {decided[0].describe()}")
    if any(not artifact.entry.info.weights.trained for artifact in able):
        sources = {artifact.entry.info.weights.source for artifact in able}
        state = "not asserted to be trained" if sources == {"unknown"} else "random"
        listener.warn(f"{model}: weights are {state}; speed is meaningful, accuracy is not")
    if (why := explain_different_weights(able)) is not None:
        listener.warn(why)
    for artifact in able:
        if (why := explain_changed_source(artifact.entry, store)) is not None:
            listener.warn(why)
    return able
