"""A judged build's dossier: its verdict as a document, its seal, and holding it against its own raw files."""

import math
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optpipe.core.disagreements import find_disagreements, list_read_errors
from optpipe.core.quantity import RECORDED_UNITS, Dimension
from optpipe.errors import BadInputError, first_line
from optpipe.signoff.criteria import CriterionResult
from optpipe.signoff.judge import Signoff, judge_dossier
from optpipe.signoff.recompute import find_untrue_figures
from optpipe.workspace.file_names import VERDICT
from optpipe.workspace.runs import load_runs, read_json
from optpipe.workspace.seal import (
    SIGNATURE,
    find_seal_problems,
    find_signature_problem,
    seal_folder,
    sign_folder,
)


def document_from_signoff(signoff: Signoff) -> dict[str, Any]:
    """The content of `verdict.json`, and what `signoff --json` prints beside the dossier's place."""
    build = signoff.evidence.build
    return {
        "verdict": str(signoff.verdict),
        "dossier_name": name_dossier(signoff),
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
        "criteria": [_record_from_criterion(one) for one in signoff.criteria],
        "waived": [one.name for one in signoff.waived],
        **({"notes": [one.to_dict() for one in signoff.notes]} if signoff.notes else {}),
        "baseline": signoff.evidence.baseline_name,
        "expires_if": list(signoff.expires_if),
        "runs": sorted({one.run for one in signoff.evidence.measured}),
        "created_utc": signoff.request["created_utc"],
        "optpipe": signoff.request["optpipe"],
    }


def name_dossier(signoff: Signoff) -> str:
    """`resnet50-onnxruntime-fp16-20261121T072500`."""
    build = signoff.evidence.build
    when = "".join(character for character in signoff.request["created_utc"][:19] if character not in "-:")
    return f"{Path(build.model).stem}-{build.backend}-{build.precision}-{when}"


def _record_from_criterion(one: CriterionResult) -> dict[str, Any]:
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
        "unit": None if one.dimension is None else RECORDED_UNITS[one.dimension],
        "verdict": str(one.verdict),
        "reason": one.reason,
        "remedy": one.remedy,
        "limit": one.threshold_text,
        "about": seen.about if seen else None,
        "source": seen.source if seen else None,
        "waived": one.waived,
    }


@dataclass(frozen=True, slots=True)
class DossierCheck:
    """What `verify` found."""

    folder: Path
    problems: tuple[str, ...]
    as_sealed: bool
    """Whether every byte and the signature are right, so that `problems` are all about what the files say."""
    signoff: Signoff | None
    """The verdict as recomputed; None where the folder is not intact enough to compute it."""
    signed: bool
    files: int
    size_bytes: int

    @property
    def intact(self) -> bool:
        """Whether every byte is as sealed and every number follows from the raw files."""
        return not self.problems


def check_dossier(folder: Path, allowed_signers: Path | None = None) -> DossierCheck:
    """Verifies the seal, the signature and every number of a dossier, from its raw files alone.

    Raises BadInputError where `folder` is no dossier.
    """
    problems = find_seal_problems(folder)
    signature = find_signature_problem(folder, allowed_signers)
    problems += [signature] if signature else []
    as_sealed, signoff = not problems, None
    if as_sealed:
        try:
            signoff = judge_dossier(folder)
            problems += find_disagreements(read_json(folder / VERDICT), document_from_signoff(signoff), VERDICT)
            for run in (*load_runs(folder / "baseline" / "runs"), *load_runs(folder / "runs")):
                problems += find_untrue_figures(run)
        except list_read_errors() as error:
            problems.append(f"cannot be recomputed: {first_line(error)}")
    files = [path for path in folder.rglob("*") if path.is_file()]
    return DossierCheck(
        folder=folder,
        problems=tuple(problems),
        as_sealed=as_sealed,
        signoff=signoff,
        signed=(folder / SIGNATURE).is_file(),
        files=len(files),
        size_bytes=sum(path.stat().st_size for path in files),
    )


def require_unused_path(target: Path) -> None:
    """Raises BadInputError where something is at `target` already."""
    if target.exists():
        raise BadInputError(f"{target} already exists; choose another --output")


def finish_dossier(folder: Path, target: Path, key: Path | None = None) -> Path:
    """Seals `folder`, signs it with `key`, and moves it to `target` in one step."""
    seal_folder(folder)
    if key is not None:
        sign_folder(folder, key)
    for path in (folder, *folder.rglob("*")):  # scratch files are private; a dossier is there to be read
        path.chmod(0o755 if path.is_dir() else 0o644)
    target.parent.mkdir(parents=True, exist_ok=True)
    require_unused_path(target)
    beside = target.with_name(
        f".{target.name}.{folder.name}"
    )  # --output may be on another disk, where moving is copying
    try:
        shutil.move(folder, beside)
        beside.rename(target)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return target
