"""Finds the stored artifacts that a command names as `resnet50`, an id, or a file, and the facts of their builds."""

import json
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from optpipe.backends.base import Device
from optpipe.backends.onnx_graph import load_onnx
from optpipe.backends.registry import BACKENDS, resolve_effective_options
from optpipe.core.card import ModelCard, name_from_factory
from optpipe.core.entries import ArtifactInfo, ModelInfo, ReferenceInfo, VerificationInfo
from optpipe.core.errors import BadInputError, MissingError
from optpipe.core.files import Files, hash_file, hash_value
from optpipe.core.precision import PrecisionShare
from optpipe.core.wording import IN_MEMORY, Argument, Call, Message, join_texts
from optpipe.models.sources.onnx_file import hash_onnx_file
from optpipe.models.sources.resolve import CardSource, find_model_cards, source_from_text
from optpipe.models.stored_card import find_card_file, read_stored_card
from optpipe.workspace.entry import (
    ID_LENGTH,
    MANIFEST,
    Entry,
    Manifest,
    UnreadableManifestError,
    drop_folder,
    read_manifest,
)
from optpipe.workspace.environment import get_package_version
from optpipe.workspace.file_names import CARD, ONNX
from optpipe.workspace.store import Store

_ID = re.compile(rf"((artifact|model)-)?[0-9a-f]{{4,{ID_LENGTH}}}")


@dataclass(frozen=True, slots=True)
class JudgedBuild:
    model: str
    artifact: str
    backend: str
    precision: str
    source: str = ""
    """MODEL as `build` takes it."""
    sha256: str | None = None
    size_bytes: int | None = None
    share: PrecisionShare | None = None
    """The shares of the types in the built network."""
    weights: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    """Runtime options of the build, and the defaults of a run."""
    model_sha256: str | None = None
    """`hash_model` of the exported model; None if its record is missing."""
    packages: tuple[str, ...] = ()
    """The distributions whose versions decide how it behaves; empty in entries of earlier versions."""

    @property
    def argument(self) -> str:
        """The MODEL of a command that names its model."""
        return format_model_argument(self.model, self.source)

    @property
    def in_memory(self) -> bool:
        """Whether it is of a module in memory, which no command can name."""
        return self.source.startswith(IN_MEMORY)

    def choose_way(self, call: Call) -> str:
        """`call`, whose MODEL is this build's; for a module in memory the library's wording, empty if the library lacks it."""
        return choose_way(call, self.source)

    def has_other_file(self, artifact: str | None, sha256: str | None) -> bool:
        """Whether a record of `artifact` is of another file with the build's id, since not every backend is
        reproducible. Records without a hash are from versions that stored none and count as the same file."""
        return (
            artifact == self.artifact
            and None not in (sha256, self.sha256)
            and sha256 != self.sha256
        )


def choose_way(call: Call, source: str) -> str:
    """`call`, whose MODEL is of `source`; for a module in memory the library's wording, empty if the library lacks it."""
    if not source.startswith(IN_MEMORY):
        return call
    return Call(call.verb, source, **call.options).find_library_call() or ""


def judged_build_from_entry(
    entry: Entry[ArtifactInfo], exported: Mapping[str, Manifest] | None = None
) -> JudgedBuild:
    """The manifest of the model is in `exported`, by id, or lies next to the artifact's."""
    info, model, sha256 = entry.info, next(iter(entry.manifest.parents), ""), None
    if exported is not None:
        sha256 = hash_model(exported[model]) if model in exported else None
    else:
        with suppress(UnreadableManifestError):
            sha256 = hash_model(
                read_manifest(Files(entry.path.parent / f"{ModelInfo.KIND}-{model}"))
            )
    return JudgedBuild(
        model=info.model,
        artifact=entry.id,
        backend=info.backend,
        precision=info.precision,
        source=info.source,
        sha256=hash_engine(entry),
        size_bytes=measure_engine(entry),
        share=info.precision_proof.share,
        weights=info.weights.source,
        options=info.options,
        model_sha256=sha256,
        packages=info.packages,
    )


def hash_model(manifest: Manifest) -> str:
    """Hash of everything that determines an exported model except batch sizes, shapes, and versions of tools."""
    return hash_value({**(manifest.recipe or {}).get("model", {}), "batch": None, "shapes": None})


def hash_engine(entry: Entry[ArtifactInfo]) -> str:
    """SHA-256 of the main file; with more files, a hash over all names and hashes."""
    names = list_engine_files(entry)
    return (
        entry.sha256(names[0])
        if len(names) == 1
        else hash_value({name: entry.sha256(name) for name in names})
    )


def measure_engine(entry: Entry[ArtifactInfo]) -> int:
    return sum(entry.manifest.files[name].size_bytes for name in list_engine_files(entry))


def list_engine_files(entry: Entry[ArtifactInfo]) -> tuple[str, ...]:
    """The files that `hash_engine` covers, the main one first."""
    return (entry.info.file, *entry.info.more_files)


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
    which = _list_arguments(options)
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


def make_unbuilt_error(
    text: str, store: Store, options: Mapping[str, object] | None = None
) -> BadInputError:
    """The error for a MODEL without a build; its way out is a build with `options`, unless `text` names nothing that can be built."""
    try:
        source_from_text(text)
        require_id(text, store)
    except BadInputError as error:
        return error
    here = explain_no_build(text, store)
    others = dict.fromkeys(each.info.model for each in reversed(store.list_entries(ArtifactInfo)))
    if not here and others:
        more = f" and {len(others) - 5} more" if len(others) > 5 else ""
        here = f", which has builds of {', '.join(list(others)[:5])}{more}"
    way_out = Call("build", text, **(options or {}))
    which = _list_arguments(options or {})
    return BadInputError(
        f"no build of {text}" + which + f" in {store.workspace}{here}",
        remedy="`" + way_out + "` builds it",
    )


def _list_arguments(options: Mapping[str, object]) -> Message:
    """` --precision fp16 --device cpu`, each after a space."""
    return join_texts("", (" " + Argument(name, value) for name, value in options.items()))


def explain_no_build(text: str, store: Store) -> str:
    """What the store has instead of a build of `text`: of another content, or of another version of optpipe. Empty if nothing."""
    return explain_other_content(text, store) or _describe_other_versions(store)


def _describe_other_versions(store: Store) -> str:
    """The builds that this version cannot read, with what their manifests still tell."""
    names = store.list_other_versions(ArtifactInfo)
    if not names:
        return ""
    told = []
    for name in names[-5:]:
        ident = name.partition("-")[2]
        with suppress(OSError, ValueError, AttributeError):
            info = json.loads((store.root / name / MANIFEST).read_bytes())["info"]
            words = [info.get(key) for key in ("model", "backend", "precision")]
            ident = " ".join(str(word) for word in (*words, ident) if word)
        told.append(ident)
    more = f" and {len(names) - len(told)} more" if len(names) > len(told) else ""
    which = "build" if len(names) == 1 else "builds"
    return f": {len(names)} {which} of another version of optpipe cannot be read: {', '.join(told)}{more}"


def can_be_id(text: str) -> bool:
    """Whether `text` has the form of an ID; a name may have it too."""
    return _ID.fullmatch(text) is not None


def require_id(text: str, store: Store) -> None:
    """Raises BadInputError if `text`, which names nothing, can hardly be anything other than an ID.

    Nothing of the store begins with it: the user removed the entry, mistyped the ID, or means another workspace.
    """
    if not can_be_id(text) or (text.isalpha() and len(text) < 8):
        return
    raise BadInputError(
        f"no build or model in {store.workspace} has the ID {text}{explain_no_build(text, store)}",
        remedy="`" + Call("store ls") + "` lists IDs; a removed build has to be built again",
    )


def find_by_id(text: str, store: Store) -> list[Entry[ArtifactInfo]]:
    """The artifacts whose ID, or whose model's ID, begins with `text`, of at least 4 digits."""
    if len(text) < 4:
        return []
    models = {
        each.id
        for each in store.list_entries(ModelInfo)
        if each.matches_id(text) or each.info.content.startswith(text)
    }
    return [
        each
        for each in store.list_entries(ArtifactInfo)
        if each.matches_id(text) or each.manifest.parents[0] in models
    ]


def find_content_id(artifact: str, store: Store) -> str:
    """The ID of the model that `artifact` was built from; empty if the store does not have both."""
    made_of = {each.id: each.manifest.parents[0] for each in store.list_entries(ArtifactInfo)}
    contents = {each.id: each.info.content for each in store.list_entries(ModelInfo)}
    return contents.get(made_of.get(artifact, ""), "")


def require_one_model(text: str, builds: Sequence[Entry[ArtifactInfo]], store: Store) -> None:
    """Raises BadInputError with the models' IDs if `builds`, which `text` names, are of several models.

    Models with the same content, or with the same source and weights, are one: they differ in profile or in tools.
    """
    stored = {each.id: each for each in store.list_entries(ModelInfo)}
    groups: list[tuple[set[str], list[Entry[ArtifactInfo]]]] = []
    for each in builds:
        model = stored.get(each.manifest.parents[0])
        if model is None:
            continue
        keys = {hash_model(model.manifest), model.info.content} - {""}
        for known, members in groups:
            if keys & known:
                known |= keys
                members.append(each)
                break
        else:
            groups.append((keys, [each]))
    if len(groups) < 2:
        return
    described = []
    for _, members in groups:
        model = stored[members[-1].manifest.parents[0]]
        labels = ", ".join(dict.fromkeys(f"{one.info.label}" for one in members))
        described.append(f"{model.info.content or model.id} ({labels})")
    raise BadInputError(
        f"{len(groups)} models in {store.workspace} are called {text}: {'; '.join(described)}",
        remedy="give the ID of one instead of the name; `" + Call("store ls") + "` lists them",
    )


def explain_other_content(text: str, store: Store) -> str:
    """What to know if `text` has no builds of its present content: those of its name, with their IDs; empty if there are none."""
    others = find_builds(text, store, any_content=True)
    if not others:
        return ""
    listed = ", ".join(f"{each.info.label} {each.id}" for each in others[-5:])
    return f": its source is not that of its builds ({listed}); it has changed, or they are of another file"


def select_runnable(
    artifacts: Sequence[StoredArtifact],
) -> tuple[tuple[StoredArtifact, ...], dict[str, str]]:
    """The artifacts that can run here, and why the others cannot. Raises MissingError if none can."""
    found = {
        each.label: BACKENDS[each.entry.info.backend].find_run_blocker(each.entry.info)
        for each in artifacts
    }
    reasons = {label: why_not for label, why_not in found.items() if why_not is not None}
    able = tuple(each for each in artifacts if each.label not in reasons)
    if not able:
        text = "; ".join(f"{label}: {why_not}" for label, why_not in reasons.items())
        raise MissingError(
            f"no built artifact can run on this machine: {text}",
            remedy="`" + Call("build", "MODEL", backend="auto") + "` builds one that can",
        )
    return able, reasons


def find_builds(text: str, store: Store, *, any_content: bool = False) -> list[Entry[ArtifactInfo]]:
    """Artifacts built from the MODEL `text`: a name, a source, or the path of a file, factory or card.

    An ONNX file or card selects builds of its present content unless `any_content`: two may share a name, and one may
    have changed since. A copy of an ONNX file under another name is the same model.
    """
    artifacts = store.list_entries(ArtifactInfo)
    path, (file, _, factory) = Path(text), text.rpartition(":")
    if file.endswith(".py"):
        named = [
            each
            for each in artifacts
            if each.info.model == name_from_factory(text)
            and each.info.source.rpartition(":")[2] == factory
        ]
        if any_content or not named:
            return named
        folder = Path(file).resolve().parent
        models = {each.id: each for each in store.list_entries(ModelInfo)}
        fresh = {name for name, each in models.items() if _has_same_files(each, folder)}
        return [each for each in named if each.manifest.parents[0] in fresh]
    if path.suffix == ".toml" and path.is_file():
        source = CardSource(path)
        named = [each for each in artifacts if each.info.model == source.card.name]
        if any_content or not named:
            return named
        try:
            identity = source.collect_identity()
        except BadInputError:  # its file is gone: only the name is left
            return named
        made_of = {
            each.id: each.recipe["model"]["source"] for each in store.list_entries(ModelInfo)
        }
        return [
            each
            for each in named
            if identity.items() <= made_of.get(each.manifest.parents[0], {}).items()
        ]
    content = (
        hash_onnx_file(path)
        if not any_content and path.suffix == ".onnx" and path.is_file()
        else None
    )
    found = []
    for each in artifacts:
        info, bare = (
            each.info,
            each.info.weights.source == "embedded",
        )  # bare: an ONNX file without a card
        if content is not None and bare and info.weights.sha256 != content:
            continue
        called = text in _list_names(info.model, info.source)
        called |= path.suffix in (".onnx", ".toml") and path.stem == info.model
        if called or (
            content is not None and bare and _is_named_by_source(info.model, info.source)
        ):
            found.append(each)
    return found if any_content else _drop_changed(found, store)


def _drop_changed(builds: list[Entry[ArtifactInfo]], store: Store) -> list[Entry[ArtifactInfo]]:
    """Those of `builds` whose source has not changed since."""
    models = {each.id: each for each in store.list_entries(ModelInfo)}
    made_of = {each.manifest.parents[0] for each in builds}
    changed = {name for name in made_of & models.keys() if has_changed_source(models[name])}
    return [each for each in builds if each.manifest.parents[0] not in changed]


def has_changed_source(model: Entry[ModelInfo]) -> bool:
    """Whether the source that a stored model was made of is here with another content; runs no code.

    False if its files are gone, or if the model is a library's or was made in memory.
    """
    info, stored = model.info, model.recipe.get("model", {}).get("source", {})
    file, _, factory = info.source.rpartition(":")
    with suppress(BadInputError, OSError):
        if (path := find_card_file(model)) is not None:
            source = CardSource(path)
            identity = source.collect_identity() if source.path.is_file() else {}
            versions = ("torch",)
            return any(
                stored.get(name) != value
                for name, value in identity.items()
                if name not in versions
            )
        if factory and file.endswith(".py") and Path(file).is_file():
            known = bool(stored.get("made", {}).get("files"))
            return known and not _has_same_files(model, Path(file).resolve().parent)
        if info.weights.source == "embedded" and Path(info.source).is_file():
            return hash_onnx_file(Path(info.source)) != info.weights.sha256
    return False


def explain_changed_source(artifact: Entry[ArtifactInfo], store: Store) -> str | None:
    """A message if the source of a build that was named by its ID has changed since; None otherwise."""
    made_of = artifact.manifest.parents[:1]
    models = [each for each in store.list_entries(ModelInfo) if each.id in made_of]
    return explain_changed_model(models[0], artifact.id) if models else None


def explain_changed_model(model: Entry[ModelInfo], ident: str) -> str | None:
    """A message if the source of the stored `model`, which was named by the ID `ident`, has changed since; None otherwise."""
    if not has_changed_source(model):
        return None
    source = find_card_file(model) or model.info.source
    return f"{source} is not what {ident} was built from: it has changed, or it is another file; the stored build is used"


def _has_same_files(model: Entry[ModelInfo], folder: Path) -> bool:
    """Whether the source files of a factory's stored model are the same in `folder`, where its file lies now; runs no code.

    They are the file, the modules that it imported, and the files that it read, such as weights.
    """
    source = model.recipe.get("model", {}).get("source", {})
    files = source.get("made", {}).get("files", {})
    with suppress(OSError):
        return bool(files) and all(
            hash_file(folder / name) == digest for name, digest in files.items()
        )
    return False


def _list_names(name: str, source: str) -> tuple[str, ...]:
    """Names of a model: its own, its source with and without folder, and its name in a library (`hf:reader`, `resnet50`)."""
    file, _, inside = source.partition(":")
    library = () if file.endswith(".py") or not inside else (inside, f"{file}:{name}")
    return (name, source, drop_folder(source), *library)


def format_model_argument(name: str, source: str) -> str:
    """The MODEL of a `build` that means the model of this name and source, as far as they tell."""
    named = source.startswith(("timm:", "hf:"))
    return source if named or _is_named_by_source(name, source) else name


def find_stored_source(text: str, store: Store) -> str | None:
    """The MODEL of the newest stored model called `text`; None if `text` is a MODEL by itself.

    Messages and dossiers name a model without its library, folder or card: `reader` and `hf:reader` for
    `hf:/srv/models/reader`, `two axes` for `cards/two.toml`, `light` and `light.onnx` for `/srv/light.onnx`.
    """
    prefix, _, rest = text.rpartition(":")
    here = Path(prefix if prefix.endswith(".py") else rest)
    if (
        "/" in text
        or prefix in ("timm", "torchvision")
        or here.exists()
        or text in find_model_cards()
    ):
        return None
    found = [
        (place, each.info)
        for each in store.list_entries(ModelInfo)
        if text in _list_model_names(each.info) and (place := find_stored_place(each)) is not None
    ]
    if found and text.isidentifier() and get_package_version("torchvision"):
        from torchvision.models import list_models

        if text in list_models():
            return None
    _require_one_place(text, found, store)
    return found[-1][0] if found else None


def _require_one_place(text: str, found: Sequence[tuple[str, ModelInfo]], store: Store) -> None:
    """Raises BadInputError if `text` names models of several places that are not the same content."""
    places: dict[str, tuple[str, str]] = {}
    for place, info in found:
        file, colon, rest = place.rpartition(":")
        where = str(Path(file).resolve()) + colon + rest if file.endswith(".py") else place
        where = str(Path(place).resolve()) if place.endswith((".onnx", ".toml")) else where
        places[where] = place, info.content or place
    if len({content for _, content in places.values()}) > 1 and len(places) > 1:
        listed = ", ".join(place for place, _ in places.values())
        raise BadInputError(
            f"{len(places)} models in {store.workspace} are called {text}: {listed}\n"
            "give the one that you mean instead of the name"
        )


def _list_model_names(model: ModelInfo) -> tuple[str, ...]:
    return (model.name,) if model.card else _list_names(model.name, model.source)


def find_stored_place(model: Entry[ModelInfo]) -> str | None:
    """The MODEL that a stored one was exported from; None if its file is gone."""
    card, info = find_card_file(model), model.info
    file = str(card or info.source)
    if info.source.startswith(("hf:", "timm:", "torchvision:")):
        return file
    if card is None and not _is_named_by_source(info.name, info.source):
        return None
    exists = Path(file if file.endswith((".onnx", ".toml")) else file.rpartition(":")[0]).is_file()
    return file if exists else None


def _is_named_by_source(name: str, source: str) -> bool:
    """Whether it is a file or factory without a card, whose name follows from the source."""
    return name == (Path(source).stem if source.endswith(".onnx") else name_from_factory(source))


def explain_different_weights(artifacts: Sequence[StoredArtifact]) -> str | None:
    """A message if artifacts were built from different weights or sources, as after retraining; None otherwise."""
    made = [
        {key: each.model.recipe["model"].get(key) for key in ("source", "weights")}
        for each in artifacts
    ]
    other = next(
        (each for each, found in zip(artifacts, made, strict=True) if found != made[0]), None
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
        each.id: each
        for each in store.list_entries(ReferenceInfo)
        if model.id in each.manifest.parents
    }
    parents = (each.manifest.parents for each in store.list_entries(VerificationInfo))
    verified = [
        known[one] for each in parents if artifact.id in each for one in each if one in known
    ]
    found = verified or list(known.values())
    return found[-1] if found else None


def describe_network(model: Entry[ModelInfo]) -> str | None:
    """Facts that survive retraining and rarely agree between namesakes: task, inputs, outputs, number of weights.

    None if the store no longer has its files.
    """
    if not {CARD, ONNX} <= set(model.manifest.files):
        return None
    card = read_stored_card(model)
    inputs = [
        (each, [low if low == high else "n" for low, high in zip(each.min, each.max, strict=True)])
        for each in card.inputs
    ]
    sides = [
        ", ".join(
            f"{each.name} {'×'.join(str(size) if isinstance(size, int) and axis != each.batch else 'n' for axis, size in enumerate(shape))}"
            for each, shape in side
        )
        for side in (inputs, [(each, each.shape) for each in card.outputs])
    ]
    tensors = load_onnx(model.file(ONNX), weights=False).graph.initializer
    # whether other initializers are folded depends on the exporter
    count = sum(math.prod(each.dims) for each in tensors if len(each.dims) > 1)
    return f"{card.task}, {' to '.join(sides)}, {count:,} weights"


def choose_batch_sizes(
    artifact: StoredArtifact, sizes: Sequence[int] | None, wider: Call | None = None
) -> tuple[int, ...]:
    """The given batch sizes, all inside the profile, or powers of two up to its end.

    `wider` makes a build that includes them; by default that of this artifact with a wider profile.
    """
    low, _, high = artifact.card.batch_range
    if sizes is None:
        return tuple(
            size for size in (1 << power for power in range(20)) if low <= size <= high
        ) or (low,)
    if outside := [size for size in sizes if not low <= size <= high]:
        profile = (min(low, *outside), high, max(high, *outside))
        way = wider or _suggest_build_again(artifact, batch=profile)
        raise BadInputError(
            f"batch size {outside[0]} is outside the profile {low}…{high} of {artifact.label}",
            remedy="`" + way + "` builds one that includes it",
        )
    return tuple(sizes)


def _suggest_build_again(artifact: StoredArtifact, **changes: object) -> str:
    """Builds the artifact again, with `changes`."""
    info, card = artifact.entry.info, artifact.card
    model = format_model_argument(card.name, card.source)
    call = Call("build", model, precision=info.precision, backend=info.backend, **changes)
    return choose_way(call, card.source)


def require_lengths(artifact: StoredArtifact, lengths: Sequence[int] | None) -> None:
    """Raises BadInputError for a length outside the profile, or for a model without sequences."""
    if lengths is not None:
        wider = _suggest_build_again(artifact, shape=artifact.card.widen_shapes(lengths))
        way_out = "`" + wider + "` builds one that includes it"
        require_card_lengths(artifact.card, lengths, artifact.label, way_out)


def require_card_lengths(card: ModelCard, lengths: Sequence[int], name: str, way_out: str) -> None:
    """As `require_lengths` for a card's profile; `name` and `way_out` are for the message."""
    if card.length_range is None:
        inputs = ", ".join(f"{each.name} {each.format_profile()}" for each in card.inputs)
        raise BadInputError(
            f"{card.name} has no sequence length: its inputs are {inputs}", argument="length"
        )
    low, high = card.length_range
    if outside := [length for length in lengths if not low <= length <= high]:
        problem = f"length {outside[0]} is outside the profile {low}…{high} of {name}"
        raise BadInputError(problem, remedy=way_out + ", where the model takes that many tokens")
