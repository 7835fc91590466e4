"""A judged build's dossier: its seal, and whether it follows from its own raw files."""

from dataclasses import dataclass
from pathlib import Path

from optpipe.core.disagreements import find_disagreements, list_read_errors
from optpipe.core.errors import first_line
from optpipe.core.files import Files
from optpipe.core.records import plain_from_record, read_record
from optpipe.core.verdict import VerdictRecord
from optpipe.signoff.consistency import find_contradictions, list_unbacked
from optpipe.signoff.judge import judge_dossier
from optpipe.signoff.recompute import find_untrue_figures
from optpipe.workspace.file_names import VERDICT
from optpipe.workspace.places import move_folder
from optpipe.workspace.runs import load_runs
from optpipe.workspace.seal import SIGNATURE, find_seal_problems, find_signature_problem, seal_folder, sign_folder


@dataclass(frozen=True, slots=True)
class DossierCheck:
    """What `verify` found."""

    folder: Path
    problems: tuple[str, ...]
    as_sealed: bool
    """Whether every byte and the signature are right, so that `problems` are all about what the files say."""
    verdict: VerdictRecord | None
    """The verdict as recomputed; None where the folder is not intact enough to compute it."""
    signed: bool
    files: int
    size_bytes: int
    unbacked: tuple[str, ...] = ()
    """What is stated and no raw file in the dossier shows."""
    not_compared: tuple[str, ...] = ()
    """Reports that could not be rendered again here, and why."""

    @property
    def intact(self) -> bool:
        """Whether every byte is as sealed and every number follows from the raw files."""
        return not self.problems


def check_dossier(folder: Path, allowed_signers: Path | None = None) -> DossierCheck:
    """Verifies the seal, the signature and every number of a dossier, from its raw files alone.

    Raises BadInputError where `folder` is not a dossier.
    """
    problems = find_seal_problems(Files(folder))
    signature = find_signature_problem(Files(folder), allowed_signers)
    problems += [signature] if signature else []
    as_sealed, verdict = not problems, None
    if as_sealed:
        try:
            verdict = judge_dossier(folder)
            stored = read_record(folder / VERDICT, VerdictRecord)
            problems += find_disagreements(plain_from_record(stored), plain_from_record(verdict), VERDICT)
            problems += find_contradictions(folder)
            for run in (*load_runs(folder / "baseline" / "runs"), *load_runs(folder / "runs")):
                problems += find_untrue_figures(run)
        except list_read_errors() as error:
            problems.append(f"cannot be recomputed: {first_line(error)}")
    files = [path for path in folder.rglob("*") if path.is_file()]
    return DossierCheck(
        folder=folder,
        problems=tuple(problems),
        as_sealed=as_sealed,
        verdict=verdict,
        signed=(folder / SIGNATURE).is_file(),
        files=len(files),
        size_bytes=sum(path.stat().st_size for path in files),
        unbacked=tuple(list_unbacked(folder, verdict)) if verdict and not problems else (),
    )


def finish_dossier(folder: Path, target: Path, key: Path | None = None) -> Path:
    """Seals `folder`, signs it with `key`, and moves it to `target` in one step."""
    seal_folder(folder)
    if key is not None:
        sign_folder(folder, key)
    move_folder(folder, target)
    return target
