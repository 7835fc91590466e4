"""Gathers a build's evidence into a folder, and holds a finished dossier against its own raw files."""

import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from optpipe import __version__
from optpipe.core.criteria import Judged
from optpipe.core.environment import environment
from optpipe.core.manifest import MANIFEST
from optpipe.core.measurement import MEASUREMENTS_FILE
from optpipe.core.policy import Policy
from optpipe.core.quantity import Dimension
from optpipe.core.runs import Run, list_runs, load_run, write_json
from optpipe.core.sealed import SIGNATURE, broken, seal, signature_problem
from optpipe.core.store import Entry, Store
from optpipe.errors import BadInputError
from optpipe.stages.again import disagreements, untrue_figures
from optpipe.stages.judge import (
    ENVIRONMENT,
    POLICY,
    REQUEST,
    SCHEMA,
    SCHEMA_VERSION,
    VERDICT,
    Signoff,
    json_file,
    judged,
)
from optpipe.stages.recompute import require_unchanged

BASELINES = "baselines"
LARGEST_TABLE_BYTES = 256 * 1024
"""Of a profile or parity run; its record, which the verdict rests on, is always copied."""
JUDGED_KINDS = ("bench", "evaluate", "preprocess", "profile")


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is to be signed off."""

    model: str
    policy: Policy
    artifact: str | None = None
    waivers: Mapping[str, str] = field(default_factory=dict)


def collected(wanted: Wanted, store: Store, folder: Path) -> Path:
    """Fills the empty `folder` with everything that the verdict on `wanted` needs, verified while it is copied."""
    entry = judged_artifact(wanted, store)
    store.verified(entry)
    _copy(entry.path / MANIFEST, folder / "artifact" / MANIFEST)
    checked = _verification(store, entry)
    if checked is not None:
        _copy(checked.path / MANIFEST, folder / "verification" / MANIFEST)
    for run in list_runs(store.workspace):
        if run.kind in JUDGED_KINDS and _concerns(run, entry):
            _copy_run(run, folder / "runs" / run.run_id, entry.id)
    baseline = approved(store.workspace, str(entry.info["model"]))
    if baseline is not None:
        shutil.copytree(baseline / "runs", folder / "baseline" / "runs")
    (folder / POLICY).write_bytes(wanted.policy.source)
    request = {
        "schema": SCHEMA,
        "schema_version": SCHEMA_VERSION,
        "model": entry.info["model"],
        "artifact": entry.id,
        "waivers": dict(wanted.waivers),
        "baseline": None if baseline is None else json_file(baseline / VERDICT)["dossier_name"],
        "baseline_artifact": None if baseline is None else json_file(baseline / REQUEST)["artifact"],
        "optpipe": __version__,
        "created_utc": _now(),
    }
    write_json(folder / REQUEST, request)
    write_json(folder / ENVIRONMENT, environment())
    return folder


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def judged_artifact(wanted: Wanted, store: Store) -> Entry:
    """The one build that is judged. Raises BadInputError where none or several fit, saying what to do."""
    if wanted.policy.model and wanted.policy.model != wanted.model:
        message = (
            f"the policy is for {wanted.policy.model!r}, not for {wanted.model!r}; change its `model` or the command"
        )
        raise BadInputError(message)
    built = [one for one in store.entries() if one.manifest.kind == "artifact" and _is_model(one, wanted.model)]
    if not built:
        message = f"{wanted.model} has no build in {store.workspace}; first: optpipe build {wanted.model}"
        raise BadInputError(message)
    named = {**wanted.policy.build, **({"artifact": wanted.artifact} if wanted.artifact else {})}
    fitting = [one for one in built if all(_fits(one, key, value) for key, value in named.items())]
    newest = {(one.info["backend"], one.info["precision"], one.info["device"]): one for one in fitting}
    if not newest:
        have = ", ".join(sorted({f"{one.info['backend']} {one.info['precision']} ({one.id})" for one in built}))
        message = f"no build of {wanted.model} is {_asked(named)}; there are {have}"
        raise BadInputError(message)
    if len(newest) > 1:
        have = ", ".join(f"{one.info['backend']} {one.info['precision']} ({one.id})" for one in newest.values())
        message = (
            f"{len(newest)} builds of {wanted.model} fit: {have}\nname one in the policy's [build], or with --artifact"
        )
        raise BadInputError(message)
    return next(iter(newest.values()))


def _fits(entry: Entry, key: str, value: str) -> bool:
    if key == "artifact":
        return entry.id.startswith(value) or entry.path.name.startswith(value)
    return str(entry.info[key]) == value


def _asked(named: Mapping[str, str]) -> str:
    return ", ".join(f"{key} {value}" for key, value in named.items())


def _is_model(entry: Entry, model: str) -> bool:
    source = str(entry.info.get("source", ""))
    return model in (entry.info["model"], source, source.partition(":")[2])


def _verification(store: Store, artifact: Entry) -> Entry | None:
    found = [
        one for one in store.entries() if one.manifest.kind == "verification" and artifact.id in one.manifest.parents
    ]
    return found[-1] if found else None


def _concerns(run: Run, entry: Entry) -> bool:
    """Whether a run is about the build; a parity proof is about every build of its model."""
    if run.kind == "preprocess":
        return bool(run.manifest.get("details", {}).get("model") == entry.info["model"])
    return entry.id in run.manifest.get("parents", ())


def _copy_run(run: Run, target: Path, artifact: str) -> None:
    """Copies a run without what the verdict does not need: raw files of other builds, and large tables."""
    require_unchanged(run)
    foreign = _files_of_others(run, artifact) if run.kind == "bench" else set()
    for record in run.manifest["files"]:
        too_large = (
            run.kind in ("profile", "preprocess")
            and record["bytes"] > LARGEST_TABLE_BYTES
            and not record["path"].endswith(".json")
        )
        if record["path"] not in foreign and not too_large:
            _copy(run.path / record["path"], target / record["path"])
    _copy(run.path / "manifest.json", target / "manifest.json")


def _files_of_others(run: Run, artifact: str) -> set[str]:
    document = json_file(run.path / MEASUREMENTS_FILE)
    return {
        one[name]
        for one in document.get("measurements", ())
        for name in ("samples_file", "machine_file")
        if one.get(name) and one.get("artifact") != artifact
    }


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)


def verdict_document(signoff: Signoff) -> dict[str, Any]:
    """The content of `verdict.json`, and what `signoff --json` prints beside the dossier's place."""
    build = signoff.evidence.build
    return {
        "verdict": str(signoff.verdict),
        "dossier_name": dossier_name(signoff),
        "model": build.model,
        "artifact": {
            "id": build.artifact,
            "backend": build.backend,
            "precision": build.precision,
            "sha256": build.sha256,
            "size_bytes": build.size_bytes,
            "weights": build.weights,
        },
        "policy": {"name": signoff.policy.name, "sha256": signoff.policy.sha256},
        "criteria": [_criterion_record(one) for one in signoff.criteria],
        "waived": [one.name for one in signoff.waived],
        **({"notes": [one.to_dict() for one in signoff.notes]} if signoff.notes else {}),
        "baseline": signoff.evidence.baseline_name,
        "expires_if": list(signoff.expires_if),
        "runs": sorted({one.run for one in signoff.evidence.measured}),
        "created_utc": signoff.request["created_utc"],
        "optpipe": signoff.request["optpipe"],
    }


def dossier_name(signoff: Signoff) -> str:
    """`resnet50-onnxruntime-fp16-20261121T072500`."""
    build = signoff.evidence.build
    when = "".join(character for character in signoff.request["created_utc"][:19] if character not in "-:")
    return f"{Path(build.model).stem}-{build.backend}-{build.precision}-{when}"


_UNITS = {
    Dimension.TIME: "ns",
    Dimension.RATE: "images/s",
    Dimension.SHARE: "fraction",
    Dimension.POINTS: "points",
    Dimension.SIZE: "bytes",
    Dimension.ENERGY: "J/image",
    Dimension.DECIBEL: "dB",
}


def _criterion_record(one: Judged) -> dict[str, Any]:
    seen = one.observation
    scale = 100 if one.dimension is Dimension.POINTS else 1

    def figure(value: float | str | None) -> float | str | None:
        if value is None or isinstance(value, str):
            return value
        return value * scale if math.isfinite(value) else None  # NaN stands for: could not be observed

    bounded = seen is not None and seen.low is not None and math.isfinite(seen.low)
    return {
        "name": one.name,
        "observed": figure(seen.value) if seen else None,
        "threshold": figure(one.threshold),
        "ci": [figure(seen.low), figure(seen.high)] if seen is not None and bounded else None,
        "unit": None if one.dimension is None else _UNITS[one.dimension],
        "verdict": str(one.verdict),
        "reason": one.reason,
        "remedy": one.remedy,
        "limit": one.threshold_text,
        "about": seen.about if seen else None,
        "source": seen.source if seen else None,
        "waived": one.waived,
    }


@dataclass(frozen=True, slots=True)
class Checked:
    """What `verify` found."""

    folder: Path
    problems: tuple[str, ...]
    signoff: Signoff | None
    """The verdict as recomputed; None where the folder is not intact enough to compute it."""
    signed: bool
    files: int
    size_bytes: int

    @property
    def intact(self) -> bool:
        """Whether every byte is as sealed and every number follows from the raw files."""
        return not self.problems


def checked_dossier(folder: Path, allowed_signers: Path | None = None) -> Checked:
    """Verifies the seal, the signature and every number of a dossier, from its raw files alone.

    Raises BadInputError where `folder` is no dossier.
    """
    problems = broken(folder)
    signature = signature_problem(folder, allowed_signers)
    problems += [signature] if signature else []
    signoff = None
    if not problems:
        try:
            signoff = judged(folder)
            problems += disagreements(json_file(folder / VERDICT), verdict_document(signoff), VERDICT)
            for run in (load_run(path) for path in sorted(folder.glob("**/runs/*/"))):
                problems += untrue_figures(run)
        except (BadInputError, KeyError, TypeError, ValueError) as error:
            problems.append(f"cannot be recomputed: {error}")
    files = [path for path in folder.rglob("*") if path.is_file()]
    return Checked(
        folder=folder,
        problems=tuple(problems),
        signoff=signoff,
        signed=(folder / SIGNATURE).is_file(),
        files=len(files),
        size_bytes=sum(path.stat().st_size for path in files),
    )


def finished(folder: Path, target: Path) -> Path:
    """Seals `folder` and moves it to `target` in one step."""
    seal(folder)
    for path in (folder, *folder.rglob("*")):  # scratch files are private; a dossier is there to be read
        path.chmod(0o755 if path.is_dir() else 0o644)
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.exists():
        message = f"{target} exists; choose another place with --output"
        raise BadInputError(message)
    shutil.move(folder, target)
    return target


def approved(workspace: Path, model: str) -> Path | None:
    """The dossier that is the baseline of `model`, or None."""
    folder = workspace / BASELINES / Path(model).name
    return folder if folder.is_dir() else None


def approve(folder: Path, workspace: Path, because: str | None = None) -> Path:
    """Stores the verified dossier in `folder` as the next baseline of its model; returns where.

    `because` is the reason for approving something else than a plain PASS; it is kept beside the dossier.
    """
    request = json_file(folder / REQUEST)
    target = workspace / BASELINES / Path(str(request["model"])).name
    scratch = target.with_name(f".{target.name}.new")
    shutil.rmtree(scratch, ignore_errors=True)
    shutil.copytree(folder, scratch)
    write_json(
        target.parent / f"{target.name}.json", {"approved_utc": _now(), "because": because, "dossier": folder.name}
    )
    if target.exists():
        old = target.with_name(f".{target.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        target.rename(old)
        scratch.rename(target)
        shutil.rmtree(old)
    else:
        scratch.rename(target)
    return target
