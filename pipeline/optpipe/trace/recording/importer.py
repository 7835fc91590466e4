"""From what nsys recorded to its SQLite export, through every way in which an installation leaves that half done.

`nsys profile` writes a .qdstrm and calls an importer to make the .nsys-rep. Debian puts the importer into another folder
than nsys looks in, and a copy of nsys inside Nsight Compute may lack a library the importer needs; both leave the
.qdstrm. `QdstrmImporter` is therefore looked for and called here when nsys did not.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from optpipe.core.errors import BadInputError, MissingError, StageError

NSYS_INSTALL_HINT = "sudo .ci/install-nsys (Debian), or the nsight-systems-cli package from NVIDIA's CUDA repository"
_IMPORT_TIMEOUT_S = 600


def find_nsys(otherwise: str = "") -> Path:
    """Where nsys is: `OPTPIPE_NSYS`, PATH, or the places where its packages put it; `otherwise` is what can be done without.

    Raises:
        MissingError: it is nowhere.
    """
    named = os.environ.get("OPTPIPE_NSYS")
    if named:
        if not Path(named).is_file():
            raise MissingError(f"OPTPIPE_NSYS={named}: no such file")
        return Path(named)
    found = shutil.which("nsys")
    if found:
        return Path(found)
    for pattern in (
        "nvidia/nsight-systems/*/bin/nsys",
        "nvidia/nsight-systems/*/target-linux-x64/nsys",
        "nvidia/nsight-compute/*/host/target-linux-x64/nsys",
    ):
        places = sorted(Path("/opt").glob(pattern))
        if places:
            return places[-1]
    missing = f"Nsight Systems (nsys) not found; install it: {NSYS_INSTALL_HINT}"
    raise MissingError(f"{missing}\n{otherwise}" if otherwise else missing)


def sqlite_from_recording(recording: Path, directory: Path) -> Path:
    """Exports a .nsys-rep or .qdstrm into `directory` and returns the SQLite file.

    Raises:
        MissingError: nsys, or for a .qdstrm its importer, is not here.
        BadInputError: the recording cannot be read. StageError: the export failed for another reason.
    """
    if recording.stat().st_size == 0:
        raise BadInputError(f"{recording}: the file is empty")
    find_nsys(
        otherwise=f"or export it where nsys is installed and pass the result: nsys export --type sqlite {recording.name}"
    )
    report = report_from_qdstrm(recording, directory) if recording.suffix == ".qdstrm" else recording
    target = directory / f"{recording.stem}.sqlite"
    options = ["--type", "sqlite", "--force-overwrite", "true", "--output", str(target)]
    finished = _run([str(find_nsys()), "export", *options, str(report)])
    if finished.returncode != 0 or not target.is_file():
        raise BadInputError(
            f"{recording}: nsys cannot export it: {_last_line(finished)}\n"
            f"it may come from a newer nsys than this one ({read_nsys_version()})"
        )
    return target


def report_from_qdstrm(qdstrm: Path, directory: Path) -> Path:
    """Runs the importer that nsys did not find."""
    importers = list(_find_importers(find_nsys()))
    if not importers:
        raise MissingError(
            f"nsys left {qdstrm.name} unconverted because its importer (QdstrmImporter) is not installed; install it: {NSYS_INSTALL_HINT}"
        )
    target = directory / f"{qdstrm.stem}.nsys-rep"
    said = ""
    for importer in importers:
        finished = _run([str(importer), "-i", str(qdstrm), "-o", str(target)])
        if finished.returncode == 0 and target.is_file():
            return target
        said = _last_line(finished)
    missing_library = "cannot open shared object" in said
    raise (MissingError if missing_library else StageError)(
        f"the nsys importer failed on {qdstrm.name}: {said}"
        + ("\ninstall the library it names" if missing_library else "")
    )


def read_nsys_version() -> str:
    """What `nsys --version` says of itself, such as 2025.3.2.0."""
    text = _run([str(find_nsys()), "--version"]).stdout.strip()
    words = [word for word in text.replace("-", " ").split() if word[:1].isdigit()]
    return words[0] if words else text or "unknown"


def _find_importers(nsys: Path) -> Iterator[Path]:
    """QdstrmImporter in the folders of this nsys, and in those of Debian's package, split between lib/TRIPLET and lib."""
    real = nsys.resolve()
    debian = [real.parents[3] / "nsight-systems"] if len(real.parents) > 3 else []
    roots = dict.fromkeys([nsys.parent, real.parent, real.parent.parent, *nsys.parents[1:3], *debian])
    seen = set()
    for root in roots:
        for candidate in (root / "QdstrmImporter", *sorted(root.glob("host-linux-*/QdstrmImporter"))):
            if candidate.is_file() and candidate.resolve() not in seen:
                seen.add(candidate.resolve())
                yield candidate


def _run(command: Sequence[str]) -> "subprocess.CompletedProcess[str]":
    try:
        return subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_IMPORT_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise StageError(f"{Path(command[0]).name} did not finish within {_IMPORT_TIMEOUT_S} s") from error
    except OSError as error:
        raise MissingError(f"cannot run {command[0]}: {error.strerror}") from error


def _last_line(finished: "subprocess.CompletedProcess[str]") -> str:
    lines = [line.strip() for line in f"{finished.stdout}\n{finished.stderr}".splitlines() if line.strip()]
    telling = [line for line in lines if "error" in line.lower() or "cannot" in line.lower()]
    return (telling or lines or [f"exit status {finished.returncode}"])[-1][:300]
