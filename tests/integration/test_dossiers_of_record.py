"""The dossiers committed under `reports/` are accepted on any machine, without a GPU, and fit a repository."""

from pathlib import Path
from shutil import copytree

import pytest
from typer.testing import CliRunner

from optpipe.cli.app import app
from optpipe.signoff.verify import verify_dossier
from optpipe.workspace.seal import SUMS

REPORTS = Path(__file__).parents[2] / "reports"
DOSSIERS = sorted(path.parent for path in REPORTS.rglob(SUMS))


@pytest.mark.parametrize("folder", DOSSIERS, ids=lambda path: path.name)
def test_a_dossier_of_record_is_intact_and_recomputed(folder):
    checked = verify_dossier(folder)
    assert checked.problems == ()
    assert checked.verdict is not None
    assert sum(checked.list_sizes()) < 8e6


def test_the_comparison_of_the_gallery_is_drawn_by_this_version(tmp_path, monkeypatch):
    """Its links to raw samples are relative, so that the dossier has to lie beside it."""
    copytree(REPORTS / "resnet50-h200" / "runs", tmp_path / "resnet50-h200" / "runs")
    monkeypatch.chdir(tmp_path)
    runs = sorted(map(str, Path("resnet50-h200/runs").glob("bench-*")))
    assert CliRunner().invoke(app, ["compare", *runs, "--output", "gallery/comparison"]).exit_code == 0
    for kept in (REPORTS / "gallery" / "comparison").iterdir():
        assert kept.read_bytes() == Path("gallery/comparison", kept.name).read_bytes(), "run reports/gallery.sh again"
