"""Each value of records that no dossier of record has follows from another, or the format names it as a statement.

Profiles with modules, turns, pairs, rounds of preprocessing, figures of plug-ins, energy, and scores of other tasks.
`integration/test_every_leaf.py` holds the same for a dossier of record.
"""

import random
import re

import pytest
from tests.fakes.dossier_leaves import list_leaves
from tests.fakes.dossiers import examine
from tests.integration.test_every_leaf import sweep
from tests.unit.signoff.test_forgeries import put_right
from tests.unit.signoff.test_impossible_evidence import add_errors
from tests.unit.signoff.test_record_rules import add_rounds
from tests.unit.signoff.test_tasks import LIMITS, draw_rows

from optpipe.core.measurement import ProcessFigure
from optpipe.core.quantity import Dimension
from optpipe.signoff.verify import check_dossier

SEED, LEAVES = 53, 24
POLICY = """schema = 1
[build]
precision = "int8"
[[latency]]
p50 = "50 ms"
batch_size = 1
[energy]
maximum = "9 J/image"
[efficiency]
minimum = "0.1 images/s/W"
[speedup]
over = "fp32"
minimum = 1.2
[[regression]]
p50 = "50 %"
batch_size = 1
[preprocessing]
minimum_snr = "20 dB"
[outputs]
minimum_snr = "20 dB"
[tensor_cores]
minimum_share = "10%"
[metrics.watts]
maximum = 100
"""


def make_measured(workspace, folder, trace):
    """All kinds of runs, with and without a GPU's energy, beside a baseline."""
    fp32, int8 = workspace.artifact("fp32"), workspace.artifact("int8")
    own = {"watts": ProcessFigure(50.0, Dimension.NUMBER, "optpipe-watts")}
    workspace.bench(fp32, count=200, processes=3)
    workspace.approve(
        'schema = 1\n[build]\nprecision = "fp32"\n[size]\nmaximum = "9 MiB"\n', folder / "old"
    )
    workspace.bench(int8, count=400, processes=3, power=40.0, figures=own)
    workspace.pair(fp32, int8, rounds=4, count=200)
    workspace.turns(fp32, int8)
    workspace.preprocess(images=80)
    workspace.profile(int8, trace)
    _, dossier = workspace.sign_off(POLICY, folder / "one")
    add_errors(dossier)
    add_rounds(dossier)
    return dossier


def make_evaluated(workspace, folder, task):
    workspace.evaluate(workspace.artifact(), task=task, rows=draw_rows(task))
    policy = f'schema = 1\n[accuracy]\nminimum_agreement = "1 %"\n{LIMITS[task]}\n'
    return workspace.sign_off(policy, folder / "one")[1]


@pytest.fixture(scope="module", params=["measured", *LIMITS])
def honest(request, make_workspace, tmp_path_factory, small_trace):
    folder = tmp_path_factory.mktemp("leaves")
    workspace = make_workspace(folder / "workspace")
    if request.param == "measured":
        dossier = make_measured(workspace, folder, small_trace)
    else:
        dossier = make_evaluated(workspace, folder, request.param)
    put_right(dossier)
    assert check_dossier(dossier).problems == ()
    assert examine(dossier)[0].differs == []
    return dossier


def find_kind(leaf):
    """Leaves that differ in the number of a list or an ID alone are of one kind."""
    steps = ("*" if isinstance(each, int) else each for each in leaf.place)
    return re.sub(r"-[0-9A-Za-z-]+/|[0-9a-f]{12}", "*", "/".join((leaf.file, *steps)))


@pytest.mark.slow
def test_a_changed_leaf_is_refused_by_both_or_a_statement(honest, tmp_path):
    leaves = [*{find_kind(leaf): leaf for leaf in list_leaves(honest)}.values()]
    chosen = random.Random(SEED).sample(leaves, min(LEAVES, len(leaves)))
    wrong = [*sweep(honest, tmp_path / "one", chosen)]
    assert not wrong, "\n".join(wrong)
