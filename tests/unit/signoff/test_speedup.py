"""A criterion on how many times as fast a build is as another of its model, by rounds in turns."""

import polars as pl
import pytest
from tests.fakes.dossiers import edit, examine, seal_anew
from tests.tiers import leave_to_slow_tier

from optpipe.core.errors import BadInputError
from optpipe.core.verdict import Verdict
from optpipe.measure.turns import compute_round
from optpipe.signoff.policy import policy_from_toml
from optpipe.signoff.verify import check_dossier

POLICY = """schema = 1
[build]
precision = "int8"
[speedup]
over = "fp32"
minimum = %s
"""
NAME = "speedup.minimum.over-fp32"


@pytest.fixture
def sign_off(workspace, tmp_path):
    """The results by name and the dossier, on which the independent verifier agrees."""

    def make(policy, name="one"):
        record, folder = workspace.sign_off(policy, tmp_path / name)
        found, verdict = examine(folder)
        assert (found.differs, found.open, verdict) == ([], [], record.verdict)
        assert check_dossier(folder).problems == ()
        return record, {one.name: one for one in record.criteria}, folder

    return make


@pytest.mark.parametrize(
    ("limit", "verdict"),
    [("1.2", "PASS"), ('"1.2 times"', "PASS"), ("2.5", "FAIL"), ("1.5", "INCONCLUSIVE")],
)
@pytest.mark.slow
def test_a_speedup_is_judged_by_its_interval_on_a_machine_of_changing_speed(
    workspace, sign_off, limit, verdict
):
    workspace.turns(workspace.artifact("fp32"), workspace.artifact("int8"), rounds=12)
    record, found, _ = sign_off(POLICY % limit)
    assert found[NAME].verdict == record.verdict == verdict
    low, high = found[NAME].ci
    assert low < 1.5 < high
    assert found["trust.environment"].verdict is Verdict.PASS


@pytest.mark.parametrize(
    "case",
    leave_to_slow_tier(
        ["nothing", "few rounds", "another precision", "other settings"], but=["few rounds"]
    ),
)
def test_a_speedup_without_evidence_is_undecided(workspace, sign_off, case):
    fp32, fp16, int8 = (workspace.artifact(name) for name in ("fp32", "fp16", "int8"))
    if case == "few rounds":
        workspace.turns(fp32, int8, rounds=2)
    elif case == "another precision":
        workspace.turns(fp16, int8)
    elif case == "other settings":  # only the newest settings are judged
        workspace.turns(fp32, int8)
        workspace.turns(fp32, int8, rounds=2, seed=1, options={"threads": 1})
    record, found, _ = sign_off(POLICY % "1.2")
    assert found[NAME].verdict is record.verdict is Verdict.INCONCLUSIVE
    assert "bench" in found[NAME].remedy
    assert "--turns" in found[NAME].remedy


@pytest.mark.slow
def test_runs_in_turns_are_pooled_and_each_counts_as_a_look(workspace, sign_off):
    fp32, int8 = workspace.artifact("fp32"), workspace.artifact("int8")
    workspace.turns(fp32, int8, seed=1)
    once = sign_off(POLICY % "1.2")[1][NAME]
    workspace.turns(fp32, int8, seed=2)
    record, found, _ = sign_off(POLICY % "1.2", "two")
    assert found[NAME].about.split("; ")[1].startswith("10 rounds")
    assert "speedup, look 2" in next(note.message for note in record.notes if note.code == "look")
    assert once.ci != found[NAME].ci


@pytest.mark.parametrize(
    "change", leave_to_slow_tier(["stated", "samples", "over"], but=["stated"])
)
def test_a_forged_speedup_is_found_by_both_verifiers(workspace, sign_off, change):
    run = workspace.turns(workspace.artifact("fp32"), workspace.artifact("int8"))
    *_, folder = sign_off(POLICY % "1.2")
    place = folder / "runs" / run.name
    if change == "stated":
        edit(place / "turns.json", "speedups", 0, value=9.0)
    elif change == "over":
        edit(place / "turns.json", "over", "precision", value="fp16")
    else:
        path = place / "samples" / "a000.parquet"
        pl.read_parquet(path).with_columns(end_ns=pl.col("end_ns") + 10**6).write_parquet(path)
    seal_anew(folder)
    assert check_dossier(folder).problems
    assert examine(folder)[0].differs


def test_a_steady_drift_does_not_look_like_a_speedup():
    def draw(first):
        return pl.DataFrame(
            {
                "start_ns": (start := [1000 * at for at in range(first, 40, 2)]),
                "end_ns": [each + 100 + each // 100 for each in start],
            }
        )

    assert abs(compute_round(draw(0), draw(1))) < 0.01


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[speedup]\nminimum = 1.2", "requires over"),
        ('[speedup]\nover = "fp32"', "sets no limit"),
        ('[speedup]\nover = "fp32"\nminimum = "20%"', "% is not a unit"),
        ('[speedup]\nover = "fp32"\nminimum = 0', "always met"),
        ('[speedup]\nover = "fp32"\nminimum = -1', "-1"),
    ],
)
def test_a_speedup_that_cannot_be_judged_is_refused(text, problem):
    with pytest.raises(BadInputError, match=problem):
        policy_from_toml(f"schema = 1\n{text}\n".encode())
