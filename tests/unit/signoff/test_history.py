"""A model's history: order, changes, and what is no history: other machines, wrong clocks, damaged and foreign runs."""

import json
import shutil

import pytest
from tests.command_line import call
from tests.fakes.dossiers import examine

from optpipe.api.history import history as read_history
from optpipe.cli.bench import compare
from optpipe.core.errors import BadInputError, ExitStatus, GateError, InconclusiveError
from optpipe.core.events import SilentListener
from optpipe.core.history import FailOn, Finding
from optpipe.core.metrics.measured import MEMORY, P50
from optpipe.signoff.history import collect_history, write_history
from optpipe.signoff.verify import verify_dossier
from optpipe.workspace.entry import MANIFEST

STEP = [10.0] * 10 + [11.0] * 6


def write_runs(workspace, levels, precision="fp16", **changes):
    """A bench of each level, whose processes scatter by half a percent."""
    entry = workspace.artifact(precision)
    return [
        workspace.bench(entry, mean_ms=level, seed=seed, count=300, processes=3, **changes)
        for seed, level in enumerate(levels)
    ]


def collect(*workspaces, model="digits", **how):
    return collect_history(model, [each.store for each in workspaces], SilentListener(), **how)


def find_series(found, metric=P50):
    return [each for each in found.series if each.metric == metric.name]


def edit_manifest(run, **changes):
    """`changes` of its fields; of the environment's and the info's if they are mappings."""
    manifest = json.loads((run.path / MANIFEST).read_text())
    for name, value in changes.items():
        manifest[name] = {**manifest[name], **value} if isinstance(value, dict) else value
    (run.path / MANIFEST).write_text(json.dumps(manifest))


@pytest.fixture(scope="module")
def stepped(tmp_path_factory, make_workspace):
    workspace = make_workspace(tmp_path_factory.mktemp("stepped") / "work")
    runs = write_runs(workspace, STEP)
    for at, run in enumerate(runs):
        info = {"commit": ("a" if at < 10 else "b") * 40}
        packages = {"packages": {"onnxruntime-gpu": "1.30" if at < 10 else "1.31"}}
        edit_manifest(run, info=info, environment=packages)
    return workspace, [run.name for run in runs]


def test_a_step_lies_between_the_right_runs_and_names_what_differs(stepped):
    workspace, names = stepped
    found = collect(workspace)
    (series,) = find_series(found)
    (change,) = series.changes
    assert (change.last_before, change.first_after) == (names[9], names[10])
    assert change.worse
    assert change.ratio == pytest.approx(0.1, abs=0.01)
    assert "commit: aaaaaaaaaaaa and bbbbbbbbbbbb" in change.differences
    assert "onnxruntime-gpu: 1.30 and 1.31" in change.differences
    assert found.finding is Finding.REGRESSION
    assert not any(each.changes for each in find_series(found, MEMORY))


def test_the_runs_are_in_order_with_their_commits(stepped):
    workspace, names = stepped
    found = collect(workspace)
    assert [each.name for each in found.runs] == names
    assert found.runs[0].commit == "a" * 40


def test_only_a_regression_that_was_asked_about_fails(stepped):
    workspace, _ = stepped
    assert call(compare, workspace=workspace.path, history="digits").status is ExitStatus.DONE
    outcome = call(compare, workspace=workspace.path, history="digits", fail_on=FailOn.REGRESSION)
    assert outcome.status is ExitStatus.FAIL


def test_the_library_raises_for_a_regression(stepped):
    workspace, _ = stepped
    past = read_history("digits", workspace=workspace.path)
    with pytest.raises(GateError, match=r"\+1\d\.\d%"):
        past.require_no_regression()
    assert past.changes()["worse"].to_list().count(True) >= 1
    assert past.frame().filter(metric="p50")["level"].to_list() == [0] * 10 + [1] * 6
    assert past.plot().to_dict()
    with pytest.raises(BadInputError, match="no run has it"):
        past.plot("p51")


def test_the_reports_name_both_runs(stepped, tmp_path):
    workspace, names = stepped
    written = write_history(collect(workspace), tmp_path)
    html = (tmp_path / "report.html").read_text()
    assert names[9] in html
    assert names[10] in html
    assert html.count("<svg") >= 2
    assert json.loads((tmp_path / "history.json").read_text())["finding"] == "regression"
    assert len(written.written) == 5


def test_a_level_that_came_back_is_no_regression(workspace):
    write_runs(workspace, [10.0] * 10 + [11.0] * 10 + [10.0] * 10)
    found = collect(workspace)
    (series,) = find_series(found)
    assert [each.worse for each in series.changes] == [True, False]
    assert series.changes[0].recovered
    assert found.finding is Finding.NO_REGRESSION


def test_what_was_before_a_date_does_not_count(stepped):
    workspace, _ = stepped
    first = collect(workspace).runs[10].started_utc
    found = collect(workspace, since=first)
    assert len(found.runs) == 6
    assert found.finding is Finding.TOO_FEW


@pytest.mark.parametrize("count", [1, 4])
def test_few_runs_are_inconclusive(workspace, count):
    write_runs(workspace, [10.0] * count)
    outcome = call(compare, workspace=workspace.path, history="digits", fail_on=FailOn.REGRESSION)
    assert outcome.status is ExitStatus.INCONCLUSIVE
    with pytest.raises(InconclusiveError):
        read_history("digits", workspace=workspace.path).require_no_regression()


def test_nothing_measured_is_refused_with_the_models_that_were(stepped, tmp_path):
    workspace, _ = stepped
    with pytest.raises(BadInputError, match="measured models: digits"):
        collect(workspace, model="resnet50")
    with pytest.raises(BadInputError, match="holds no runs"):
        call(compare, runs=[str(tmp_path)], workspace=workspace.path, history="digits")


def test_another_machine_is_another_series_unless_asked(workspace):
    runs = write_runs(workspace, STEP)
    for run in runs[10:]:
        edit_manifest(run, environment={"cpu": "another CPU"})
    assert len(find_series(collect(workspace))) == 2
    assert not any(each.changes for each in collect(workspace).series)
    (joined,) = find_series(collect(workspace, across=True))
    assert any(each.startswith("cpu: ") for each in joined.changes[0].differences)


def test_runs_of_two_workspaces_are_one_history_and_copies_count_once(tmp_path, make_workspace):
    one, other = (make_workspace(tmp_path / name) for name in ("one", "other"))
    first = write_runs(one, [10.0] * 10)
    second = write_runs(other, [11.0] * 6)
    shutil.copytree(first[0].path, other.path / "runs" / first[0].name)
    found = collect(one, other)
    (series,) = find_series(found)
    assert [each.run for each in series.points] == [each.name for each in (*first, *second)]
    assert series.changes[0].first_after == second[0].name


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"finished_utc": "2020-01-01T00:00:00+00:00"}, "ended before it began"),
        (
            {
                "started_utc": "2020-01-01T00:00:00+00:00",
                "finished_utc": "2020-01-01T00:00:01+00:00",
            },
            "outside of its own",
        ),
        (
            {
                "started_utc": "2999-01-01T00:00:00+00:00",
                "finished_utc": "2999-01-01T00:00:01+00:00",
            },
            "in the future",
        ),
        ({"started_utc": "yesterday"}, "cannot be read"),
    ],
)
def test_a_run_of_a_wrong_clock_is_shown_and_in_no_series(workspace, changes, why):
    _, doubtful, *_ = write_runs(workspace, [10.0] * 3)
    edit_manifest(doubtful, **changes)
    found = collect(workspace)
    (shown,) = [each for each in found.runs if each.doubt]
    assert shown.name == doubtful.name
    assert why in shown.doubt
    assert any(doubtful.name in each for each in found.warnings)
    (series,) = find_series(found)
    assert doubtful.name not in [each.run for each in series.points]


def damage_samples(run):
    next((run.path / "samples").iterdir()).write_bytes(b"nothing")


def remove_samples(run):
    shutil.rmtree(run.path / "samples")


def damage_manifest(run):
    (run.path / MANIFEST).write_text("{")


def use_other_version(run):
    edit_manifest(run, schema_version=99)


@pytest.mark.parametrize(
    "spoil", [damage_samples, remove_samples, damage_manifest, use_other_version]
)
def test_a_run_that_cannot_be_read_is_left_out_and_named(workspace, spoil):
    first, spoiled, *_ = write_runs(workspace, [10.0] * 3)
    spoil(spoiled)
    found = collect(workspace)
    assert set(found.left_out) == {spoiled.name}
    assert first.name in [each.name for each in found.runs]
    assert spoiled.name not in [each.name for each in found.runs]


def test_a_damaged_store_entry_hides_no_run(workspace):
    run, *_ = write_runs(workspace, [10.0] * 3)
    for path in (workspace.path / "store").glob("artifact-*/manifest.json"):
        path.write_text("{")
    assert run.name in [each.name for each in collect(workspace).runs]


def test_two_networks_of_one_name_are_kept_apart(workspace):
    narrow, wide = (workspace.artifact(width=width) for width in (4, 8))
    for entry, level in ((narrow, 10.0), (wide, 20.0)) * 3:
        workspace.bench(entry, mean_ms=level, count=300, processes=3)
    found = collect(workspace)
    assert len(find_series(found)) == 2
    assert any("2 networks are called digits" in each for each in found.warnings)
    alone = collect(workspace, model=narrow.id)
    assert len(alone.runs) == 3
    assert not alone.warnings


def test_evaluations_and_sign_offs_have_their_place(workspace):
    (run,) = write_runs(workspace, [10.0])
    entry = workspace.artifact("fp16")
    evaluated = workspace.evaluate(entry, lost=10)
    target = workspace.path / "dossiers" / "first"
    target.parent.mkdir()
    policy = "schema = 1\n[build]\nprecision = 'fp16'\n[size]\nmaximum = '1 GiB'\n"
    workspace.sign_off(policy, target)
    (target.parent / "damaged").mkdir()
    found = collect(workspace)
    assert [each.kind for each in found.runs][:2] == ["bench", "evaluate"]
    assert {each.name for each in found.runs} == {run.name, evaluated.name, "first"}
    signed = next(each for each in found.runs if each.kind == "signoff")
    assert signed.verdict is not None
    assert "99%" in found.runs[1].result
    assert "damaged" in found.left_out


def test_options_of_another_comparison_are_refused(workspace):
    with pytest.raises(BadInputError, match="cannot be combined with --baseline"):
        call(compare, workspace=workspace.path, history="digits", baseline="approved")
    with pytest.raises(BadInputError, match="requires --history"):
        call(compare, workspace=workspace.path, since="2026-11-21")


def test_a_report_says_what_changed_since_the_last_sign_off(workspace):
    policy = b"schema = 1\n[build]\nprecision = 'fp16'\n[latency]\np50 = '20 ms'\nbatch_size = 1\nmode = 'compute'\n"
    first = workspace.path / "dossiers" / "first"
    write_runs(workspace, [10.0])
    workspace.release(policy, first)
    assert "last sign-off" not in (first / "report.md").read_text()
    (run,) = (each for each in (workspace.path / "runs").iterdir())
    shutil.rmtree(run)
    write_runs(workspace, [12.0])
    second = workspace.path / "dossiers" / "second"
    workspace.release(policy, second)
    said = (second / "report.md").read_text()
    assert "last sign-off" in said
    assert "(+20." in said or "(+19." in said
    assert verify_dossier(second).problems == ()
    assert not examine(second)[0].differs
