"""The dossiers committed under `reports/` are accepted on any machine, without a GPU, and fit a repository."""

from pathlib import Path

import pytest

from optpipe.signoff.verify import verify_dossier
from optpipe.workspace.seal import SUMS

DOSSIERS = sorted(path.parent for path in (Path(__file__).parents[2] / "reports").rglob(SUMS))


@pytest.mark.parametrize("folder", DOSSIERS, ids=lambda path: path.name)
def test_a_dossier_of_record_is_intact_and_recomputed(folder):
    checked = verify_dossier(folder)
    assert checked.problems == ()
    assert checked.verdict is not None
    assert sum(checked.list_sizes()) < 8e6
