"""Judges the dossiers of record again, after a change of the format, of an estimate, or of the reports' style.

usage: rejudge.py [FOLDER...]

Evidence stays as it was measured. What follows from it becomes that of this version: the scores of evaluations, the interval of
energy, the verdict, the reports, the hash of the verifier, and the seal. Without a folder, the comparison of the gallery is drawn
again too.
"""

import hashlib
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from shutil import rmtree

from optpipe.core.files import Files
from optpipe.core.measurement import MEASUREMENTS_FILE
from optpipe.core.records import json_from_record
from optpipe.evaluate.recompute import read_evaluation, recompute_evaluation
from optpipe.measure.figures import recompute_bench
from optpipe.signoff.dossier import hash_verifier, read_dossier
from optpipe.signoff.judge import judge_dossier
from optpipe.signoff.reports import list_drawing_versions, render_dossier, write_reports
from optpipe.workspace.entry import Run
from optpipe.workspace.file_names import EVALUATION, PREDICTIONS
from optpipe.workspace.seal import seal_folder

REPORTS = Path(__file__).parents[1] / "reports"


def score_again(run: Run, folder: Path) -> None:
    """Rewrites the scores of an evaluation in `folder` from its predictions."""
    _, *rows = recompute_evaluation(run)
    results = tuple(again for _, _, again in rows)
    rewrite(folder, EVALUATION, json_from_record(replace(read_evaluation(run), results=results)))


def measure_again(run: Run, folder: Path) -> None:
    """Rewrites the energies of a bench run in `folder` from its raw samples."""
    stored = json.loads((folder / MEASUREMENTS_FILE).read_bytes())
    again = {found.id: found.energy_j_per_image for _, _, found in recompute_bench(run)}
    changed = False
    for one in stored["measurements"]:
        energy = again.get(one["id"])
        if energy is not None and one["energy_j_per_image"]["low"] != energy.low:
            one["energy_j_per_image"] = json.loads(json_from_record(energy))
            changed = True
    if changed:
        text = json.dumps(stored, indent=1, ensure_ascii=False) + "\n"
        rewrite(folder, MEASUREMENTS_FILE, text.encode())


def rewrite(folder: Path, name: str, written: bytes) -> None:
    """Writes a file of a run, and its hash into the run's manifest."""
    (folder / name).write_bytes(written)
    manifest = folder / "manifest.json"
    known = json.loads(manifest.read_text(encoding="utf-8"))
    known["files"][name] = {
        "sha256": hashlib.sha256(written).hexdigest(),
        "size_bytes": len(written),
    }
    manifest.write_text(json.dumps(known, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def judge_again(folder: Path) -> str:
    """Rewrites what follows from the evidence in `folder`; returns the verdict."""
    request = folder / "request.json"
    wanted = json.loads(request.read_text(encoding="utf-8"))
    figures = bool(wanted["drawn_with"])
    wanted |= {
        "verifier": hash_verifier(),
        "drawn_with": list_drawing_versions() if figures else {},
    }
    request.write_text(json.dumps(wanted, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    for run in read_dossier(Files(folder, kept={})).every_run:
        if run.kind == "evaluate" and run.files.has(PREDICTIONS):
            score_again(run, folder / "runs" / run.path.name)
        if run.kind == "bench":
            measure_again(run, folder / "runs" / run.path.name)
    dossier = read_dossier(Files(folder, kept={}))
    verdict, evidence = judge_dossier(dossier)
    (folder / "verdict.json").write_bytes(json_from_record(verdict))
    write_reports(render_dossier(dossier, verdict, evidence, figures=figures), folder)
    seal_folder(folder)
    return str(verdict.verdict)


def draw_comparison() -> None:
    """Draws the comparison of the gallery again; its raw samples are those of a dossier, and stay there."""
    comparison = REPORTS / "gallery" / "comparison"
    runs = sorted((REPORTS / "resnet50-h200" / "runs").glob("bench-*"))
    optpipe = Path(sys.executable).with_name("optpipe")

    rmtree(comparison)
    subprocess.run(
        [optpipe, "compare", *runs, "--output", comparison], check=True, stdout=subprocess.DEVNULL
    )

    for name in ("*.parquet", "*.csv"):
        for copied in comparison.glob(name):
            copied.unlink()


def main() -> int:
    given = [Path(argument) for argument in sys.argv[1:]]
    for folder in given or sorted(request.parent for request in REPORTS.rglob("request.json")):
        print(f"{folder}: {judge_again(folder)}")

    if not given:
        draw_comparison()
    return 0


if __name__ == "__main__":
    sys.exit(main())
