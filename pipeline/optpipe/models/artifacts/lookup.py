"""Finds the stored artifacts that a command names as `resnet50`, an id, or a file, and the facts of their builds."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from optpipe.backends.base import Device
from optpipe.backends.registry import BACKENDS, resolve_effective_options
from optpipe.core.card import ModelCard
from optpipe.core.entries import ArtifactInfo, ModelInfo, ReferenceInfo, VerificationInfo
from optpipe.core.errors import BadInputError, MissingError
from optpipe.core.wording import Call, join_texts
from optpipe.models.artifacts.builds_by_name import find_builds, find_by_id
from optpipe.models.artifacts.engine_files import hash_model
from optpipe.models.artifacts.missing_builds import list_arguments, make_unbuilt_error
from optpipe.models.artifacts.model_names import choose_way, format_model_argument
from optpipe.models.stored_card import read_stored_card
from optpipe.workspace.entry import Entry
from optpipe.workspace.file_names import CARD
from optpipe.workspace.store import Store


@dataclass(frozen=True, slots=True)
class StoredArtifact:
    """An artifact of the store with its model's card, and its reference if there is one."""

    entry: Entry[ArtifactInfo]
    card: ModelCard
    model: Entry[ModelInfo]
    reference: Entry[ReferenceInfo] | None

    @property
    def label(self) -> str:
        return self.entry.info.label

    def given(self, options: Mapping[str, Mapping[str, Any]]) -> dict[str, bool | int | str]:
        """The `options` of its backend, as typed."""
        return dict(options.get(self.entry.info.backend, {}))

    def resolve_effective_options(
        self, options: Mapping[str, Mapping[str, Any]]
    ) -> dict[str, bool | int | str]:
        """Its runtime options overridden by `options`. Raises BadInputError for an option that its backend does not have."""
        return resolve_effective_options(self.entry.info, self.given(options))


def find_artifacts(
    text: str,
    store: Store,
    precisions: Sequence[str] = (),
    backends: Sequence[str] = (),
    device: Device | None = None,
) -> tuple[StoredArtifact, ...]:
    """The newest artifact of each backend, precision and device that `text` and the filters name.

    `text` is a MODEL, the ID of an artifact, or that of a model, for all of its artifacts. Raises BadInputError, with the build
    command, if there is none, and with the IDs if several models have that name.
    """
    by_id = find_by_id(text, store)
    named = by_id or find_builds(text, store)
    wanted = [
        entry
        for entry in named
        if (not precisions or entry.info.precision in precisions)
        and (not backends or entry.info.backend in backends)
        and (device is None or entry.info.device == device)
    ]
    devices = [device] if device else []
    chosen = {"precision": list(precisions), "backend": list(backends), "device": devices}
    options: dict[str, object] = {name: values for name, values in chosen.items() if values}
    which = list_arguments(options)
    if by_id and not wanted:
        model = format_model_argument(by_id[-1].info.model, by_id[-1].info.source)
        raise BadInputError(
            f"{text} is {by_id[-1].info.label}, not" + which,
            remedy=f"use `{shlex.quote(model)}" + which + "`, or the ID alone",
        )
    if not named:
        raise make_unbuilt_error(text, store, options)
    if not wanted:
        built = sorted({f"{entry.info.backend} {entry.info.precision}" for entry in named})
        way_out = choose_way(Call("build", text, **options), named[-1].info.source)
        raise BadInputError(
            f"no build of {text}"
            + which
            + f" in {store.workspace} (available: {', '.join(built)})",
            remedy="`" + way_out + "` builds it",
        )
    if not by_id:
        require_one_model(text, wanted, store)
    newest = {entry.info.label: entry for entry in wanted}
    return tuple(stored_from_entry(entry, store) for entry in newest.values())


def stored_from_entry(entry: Entry[ArtifactInfo], store: Store) -> StoredArtifact:
    """Raises BadInputError if its model is not in the store."""
    exported = store.find(entry.manifest.parents[0], ModelInfo)
    card = read_stored_card(store.verify_entry(exported, CARD))
    return StoredArtifact(entry, card, exported, find_reference(entry, exported, store))


def require_one_model(text: str, builds: Sequence[Entry[ArtifactInfo]], store: Store) -> None:
    """Raises BadInputError with the models' IDs if `builds`, which `text` names, are of several models.

    Models with the same content, or with the same source and weights, are one: they differ in profile or in tools.
    """
    stored = {model.id: model for model in store.list_entries(ModelInfo)}
    groups: list[tuple[set[str], list[Entry[ArtifactInfo]]]] = []
    for build in builds:
        model = stored.get(build.manifest.parents[0])
        if model is None:
            continue
        keys = {hash_model(model.manifest), model.info.content} - {""}
        for known, members in groups:
            if keys & known:
                known |= keys
                members.append(build)
                break
        else:
            groups.append((keys, [build]))
    if len(groups) < 2:
        return
    described = []
    for _, members in groups:
        model = stored[members[-1].manifest.parents[0]]
        labels = ", ".join(dict.fromkeys(f"{build.info.label}" for build in members))
        described.append(f"{model.info.content or model.id} ({labels})")
    raise BadInputError(
        f"{len(groups)} models in {store.workspace} are called {text}: {'; '.join(described)}",
        remedy="give the ID of one instead of the name; `" + Call("store ls") + "` lists them",
    )


def select_runnable(
    artifacts: Sequence[StoredArtifact],
) -> tuple[tuple[StoredArtifact, ...], dict[str, str]]:
    """The artifacts that can run here, and why the others cannot. Raises MissingError if none can."""
    blockers = {
        artifact.label: BACKENDS[artifact.entry.info.backend].find_run_blocker(artifact.entry.info)
        for artifact in artifacts
    }
    reasons = {label: why_not for label, why_not in blockers.items() if why_not is not None}
    able = tuple(artifact for artifact in artifacts if artifact.label not in reasons)
    if not able:
        text = join_texts("; ", (f"{label}: " + why_not for label, why_not in reasons.items()))
        raise MissingError(
            "no built artifact can run on this machine: " + text,
            remedy="`" + Call("build", "MODEL", backend="auto") + "` builds one that can",
        )
    return able, reasons


def explain_different_weights(artifacts: Sequence[StoredArtifact]) -> str | None:
    """A message if artifacts were built from different weights or sources, as after retraining; None otherwise."""
    made = [
        {key: artifact.model.recipe["model"].get(key) for key in ("source", "weights")}
        for artifact in artifacts
    ]
    other = next(
        (artifact for artifact, origin in zip(artifacts, made, strict=True) if origin != made[0]),
        None,
    )
    if other is None:
        return None
    first = artifacts[0]
    both = f"{first.label} ({first.entry.id}) and {other.label} ({other.entry.id})"
    return f"{both} were built from different versions of {first.card.name}; rebuild them together"


def find_reference(
    artifact: Entry[ArtifactInfo], model: Entry[ModelInfo], store: Store
) -> Entry[ReferenceInfo] | None:
    """The reference that the artifact was last verified on, otherwise the model's newest; None without one."""
    known = {
        reference.id: reference
        for reference in store.list_entries(ReferenceInfo)
        if model.id in reference.manifest.parents
    }
    parents = (
        verification.manifest.parents for verification in store.list_entries(VerificationInfo)
    )
    verified = [
        known[parent]
        for parents_of in parents
        if artifact.id in parents_of
        for parent in parents_of
        if parent in known
    ]
    references = verified or list(known.values())
    return references[-1] if references else None
