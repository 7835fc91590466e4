"""The dossiers committed under `reports/` are accepted on any machine, without a GPU, and fit a repository."""

from pathlib import Path
from shutil import copytree

import pytest

from optpipe.signoff.verify import verify_dossier
from optpipe.workspace.seal import SUMS

REPORTS = Path(__file__).parents[2] / "reports"


@pytest.mark.parametrize(
    "folder", sorted(path.parent for path in REPORTS.rglob(SUMS)), ids=lambda path: path.name
)
def test_a_dossier_of_record_is_intact_and_recomputed(folder):
    checked = verify_dossier(folder)
    assert checked.problems == ()
    assert checked.verdict is not None
    assert sum(checked.list_sizes()) < 8e6


def test_the_comparison_of_the_gallery_is_drawn_by_this_version(tmp_path, inside):
    """Its links to raw samples are relative, so the dossier has to lie beside it."""
    copytree(REPORTS / "resnet50-h200" / "runs", tmp_path / "resnet50-h200" / "runs")
    runs = sorted(
        path.relative_to(tmp_path) for path in (tmp_path / "resnet50-h200" / "runs").glob("bench-*")
    )
    assert inside("compare", *runs, "--output", "gallery/comparison", cwd=tmp_path).status == 0
    kept, made = REPORTS / "gallery" / "comparison", tmp_path / "gallery" / "comparison"
    assert [
        each.name for each in kept.iterdir() if each.read_bytes() != (made / each.name).read_bytes()
    ] == []
