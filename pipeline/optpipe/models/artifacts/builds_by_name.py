"""The stored artifacts of a MODEL, by its name, its file, or an ID."""

from pathlib import Path

from optpipe.core.card import name_from_factory
from optpipe.core.entries import ArtifactInfo, ModelInfo
from optpipe.core.errors import BadInputError
from optpipe.models.artifacts.changed_source import has_changed_source, has_same_files
from optpipe.models.artifacts.model_names import is_named_by_source, list_names
from optpipe.models.sources.onnx_file import hash_onnx_file
from optpipe.models.sources.resolve import CardSource
from optpipe.workspace.entry import Entry
from optpipe.workspace.store import Store


def find_by_id(text: str, store: Store) -> list[Entry[ArtifactInfo]]:
    """The artifacts whose ID, or whose model's ID, begins with `text`, of at least 4 digits."""
    if len(text) < 4:
        return []
    models = {
        model.id
        for model in store.list_entries(ModelInfo)
        if model.matches_id(text) or model.info.content.startswith(text)
    }
    return [
        build
        for build in store.list_entries(ArtifactInfo)
        if build.matches_id(text) or build.manifest.parents[0] in models
    ]


def find_content_id(artifact: str, store: Store) -> str:
    """The ID of the model that `artifact` was built from; empty if the store does not have both."""
    made_of = {build.id: build.manifest.parents[0] for build in store.list_entries(ArtifactInfo)}
    contents = {model.id: model.info.content for model in store.list_entries(ModelInfo)}
    return contents.get(made_of.get(artifact, ""), "")


def find_builds(text: str, store: Store, *, any_content: bool = False) -> list[Entry[ArtifactInfo]]:
    """Artifacts built from the MODEL `text`: a name, a source, or the path of a file, factory or card.

    An ONNX file or card selects builds of its present content unless `any_content`: two may share a name, and one may
    have changed since. A copy of an ONNX file under another name is the same model.
    """
    path, (file, _, factory) = Path(text), text.rpartition(":")
    if file.endswith(".py"):
        named = [
            build
            for build in store.list_entries(ArtifactInfo)
            if build.info.model == name_from_factory(text)
            and build.info.source.rpartition(":")[2] == factory
        ]
        return named if any_content else _keep_same_files(named, Path(file), store)

    if path.suffix == ".toml" and path.is_file():
        card = CardSource(path)
        named = [
            build
            for build in store.list_entries(ArtifactInfo)
            if build.info.model == card.card.name
        ]
        return named if any_content else _keep_same_identity(named, card, store)

    if any_content:
        return _find_by_name(text, None, store)
    content = hash_onnx_file(path) if path.suffix == ".onnx" and path.is_file() else None
    return _drop_changed(_find_by_name(text, content, store), store)


def _keep_same_files(
    builds: list[Entry[ArtifactInfo]], file: Path, store: Store
) -> list[Entry[ArtifactInfo]]:
    """Those of a factory's builds that were made of its source files as they are in its folder now."""
    if not builds:
        return []
    folder = file.resolve().parent
    models = {model.id: model for model in store.list_entries(ModelInfo)}
    fresh = {name for name, model in models.items() if has_same_files(model, folder)}
    return [build for build in builds if build.manifest.parents[0] in fresh]


def _keep_same_identity(
    builds: list[Entry[ArtifactInfo]], card: CardSource, store: Store
) -> list[Entry[ArtifactInfo]]:
    """Those of a card's builds that were made of its present content; all of them if its file is gone."""
    if not builds:
        return []
    try:
        identity = card.collect_identity()
    except BadInputError:  # only the name is left
        return builds
    made_of = {model.id: model.recipe["model"]["source"] for model in store.list_entries(ModelInfo)}
    return [
        build
        for build in builds
        if identity.items() <= made_of.get(build.manifest.parents[0], {}).items()
    ]


def _find_by_name(text: str, content: str | None, store: Store) -> list[Entry[ArtifactInfo]]:
    """The builds of a model that is called `text`, and with `content`, the hash of an ONNX file, those of its copies."""
    path = Path(text)
    builds = []
    for build in store.list_entries(ArtifactInfo):
        info = build.info
        without_card = info.weights.source == "embedded"
        if content is not None and without_card and info.weights.sha256 != content:
            continue

        is_called = text in list_names(info.model, info.source)
        is_file = path.suffix in (".onnx", ".toml") and path.stem == info.model
        is_copy = (
            content is not None and without_card and is_named_by_source(info.model, info.source)
        )
        if is_called or is_file or is_copy:
            builds.append(build)
    return builds


def _drop_changed(builds: list[Entry[ArtifactInfo]], store: Store) -> list[Entry[ArtifactInfo]]:
    """Those of `builds` whose source has not changed since."""
    models = {model.id: model for model in store.list_entries(ModelInfo)}
    made_of = {build.manifest.parents[0] for build in builds}
    changed = {name for name in made_of & models.keys() if has_changed_source(models[name])}
    return [build for build in builds if build.manifest.parents[0] not in changed]
