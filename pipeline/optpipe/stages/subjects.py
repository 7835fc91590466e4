"""Which stored artifacts a command means by `resnet50`, an id, or a file, and what is known about their inputs."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from optpipe.backends.base import Device
from optpipe.core.advice import advised
from optpipe.core.card import ModelCard, card_from_file
from optpipe.core.hashing import file_sha256
from optpipe.core.store import Entry, Store
from optpipe.errors import BadInputError, MissingError
from optpipe.stages.export import CARD, REFERENCE


@dataclass(frozen=True, slots=True)
class StoredArtifact:
    """An artifact of the store with its model's card and, where there is one, its reference."""

    entry: Entry
    card: ModelCard
    model: Entry
    reference: Path | None

    @property
    def label(self) -> str:
        """`onnxruntime fp16 (cuda)`."""
        info = self.entry.info
        return f"{info['backend']} {info['precision']} ({info['device']})"

    @property
    def batch_range(self) -> tuple[int, int]:
        """The smallest and largest batch of its profile."""
        return max(each.min[0] for each in self.card.inputs), min(each.max[0] for each in self.card.inputs)


def artifacts_named(
    text: str,
    store: Store,
    precisions: Sequence[str] = (),
    backends: Sequence[str] = (),
    device: Device | None = None,
) -> tuple[StoredArtifact, ...]:
    """The newest artifact of each backend, precision and device that `text` and the filters name.

    Raises BadInputError, with the build command, where there is none.
    """
    every = [entry for entry in store.entries() if entry.manifest.kind == "artifact"]
    content = _content(text)
    named = [entry for entry in every if _names(text, content, entry)]
    wanted = [
        entry
        for entry in named
        if (not precisions or entry.info["precision"] in precisions)
        and (not backends or entry.info["backend"] in backends)
        and (device is None or entry.info["device"] == device)
    ]
    if not wanted:
        other = content is not None and any(_names(text, None, entry) for entry in every)
        _refuse(text, store, named, precisions, backends, device, other_content=other and not named)
    newest = {(entry.info["backend"], entry.info["precision"], entry.info["device"]): entry for entry in wanted}
    return tuple(_with_model(entry, store) for entry in newest.values())


def runnable_here(artifacts: Sequence[StoredArtifact]) -> tuple[tuple[StoredArtifact, ...], dict[str, str]]:
    """Those that can run here, and why the others cannot. Raises MissingError where none can."""
    from optpipe.backends.registry import BACKENDS

    reasons: dict[str, str] = {}
    able = []
    for each in artifacts:
        info = each.entry.info
        why_not = BACKENDS[info["backend"]].runnable(info, info["device"])
        if why_not is None:
            able.append(each)
        else:
            reasons[each.label] = why_not
    if not able:
        text = "; ".join(f"{label}: {why_not}" for label, why_not in reasons.items())
        message = (
            f"nothing that was built can run here: {text}\n`{advised('build MODEL --backend auto')}` builds what can"
        )
        raise MissingError(message)
    return tuple(able), reasons


def _content(text: str) -> str | None:
    """The hash of the ONNX file that `text` names: two files may share a name, and one may have changed since."""
    path = Path(text)
    return file_sha256(path) if path.suffix == ".onnx" and path.is_file() else None


def _names(text: str, content: str | None, entry: Entry) -> bool:
    info = entry.info
    if content is not None and info["weights"]["source"] == "embedded" and info["weights"]["sha256"] != content:
        return False
    by_id = len(text) >= 4 and entry.fits(text)
    source = str(info["source"])
    by_path = Path(text).suffix in (".onnx", ".toml", ".py") and Path(text).stem == info["model"]
    return by_id or by_path or text in (info["model"], source, source.partition(":")[2] or source)


def _refuse(
    text: str,
    store: Store,
    named: Sequence[Entry],
    precisions: Sequence[str],
    backends: Sequence[str],
    device: Device | None,
    *,
    other_content: bool,
) -> None:
    flags = "".join(
        f" --{name} {','.join(values)}" for name, values in (("precision", precisions), ("backend", backends)) if values
    ) + (f" --device {device}" if device else "")
    what = f"{text}{flags}"
    built = sorted({f"{entry.info['backend']} {entry.info['precision']}" for entry in named})
    here = f" (built are: {', '.join(built)})" if built else ""
    if other_content:
        here = "; what was built by that name had another content"
    message = f"nothing is built for {what} in {store.workspace}{here}\n`{advised(f'build {text}{flags}', store.workspace)}` builds it"
    raise BadInputError(message)


def _with_model(entry: Entry, store: Store) -> StoredArtifact:
    model = store.find(f"model-{entry.manifest.parents[0]}")
    references = [
        each for each in store.entries() if each.manifest.kind == "reference" and model.id in each.manifest.parents
    ]
    reference = references[-1].file(REFERENCE) if references else None
    return StoredArtifact(entry, card_from_file(model.file(CARD)), model, reference)


def checked_batches(artifact: StoredArtifact, sizes: Sequence[int] | None) -> tuple[int, ...]:
    """The batch sizes to measure: those given, all inside the profile, or powers of two up to its end."""
    low, high = artifact.batch_range
    if sizes is None:
        return tuple(size for size in (1 << power for power in range(20)) if low <= size <= high) or (low,)
    outside = [size for size in sizes if not low <= size <= high]
    if outside:
        info, wider = artifact.entry.info, f"{min(low, *outside)}:{high}:{max(high, *outside)}"
        build = f"{artifact.card.name} --precision {info['precision']} --backend {info['backend']} --batch {wider}"
        message = (
            f"batch {outside[0]} is outside the profile {low}…{high} of {artifact.label}\n"
            f"`{advised(f'build {build}')}` builds one that holds it"
        )
        raise BadInputError(message)
    return tuple(sizes)
