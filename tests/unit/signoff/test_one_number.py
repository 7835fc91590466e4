"""A report states one confidence, one drop, and one count: all renderings of a verdict are read and compared."""

import json
import re
from xml.etree import ElementTree as Xml

import pytest
from tests.fakes.console import text_of

from optpipe.core.events import SilentListener
from optpipe.core.files import Files
from optpipe.core.measurement import read_measurements
from optpipe.core.records import read_record
from optpipe.evaluate.document import document_from_evaluation
from optpipe.evaluate.result import Evaluation
from optpipe.measure.bench import record_from_run
from optpipe.measure.compare_workspace import compare_workspace
from optpipe.measure.document import document_from_bench
from optpipe.report.document import format_drop
from optpipe.signoff.collect import SignoffRequest
from optpipe.signoff.dossier import read_dossier
from optpipe.signoff.judge import judge_dossier
from optpipe.signoff.policy import policy_from_toml
from optpipe.signoff.release import sign_off
from optpipe.signoff.reports import document_from_verdict
from optpipe.workspace.file_names import EVALUATION
from optpipe.workspace.runs import list_runs

pytestmark = pytest.mark.slow

BUILD = 'schema = 1\n[build]\nprecision = "int8"\n'
TIMES = '[[latency]]\np50 = "7 ms"\np99 = "50 ms"\nbatch_size = 1\n'
DROP = '[accuracy]\nmaximum_drop = "0.5 points"\n'


def measure_nothing(workspace):
    workspace.artifact("int8")
    return TIMES + DROP, {}


def measure_one_process(workspace):
    workspace.bench(workspace.artifact("int8"), processes=1)
    return TIMES, {}


def evaluate_twice_beside_another_build(workspace):
    wide, narrow = workspace.artifact("fp32"), workspace.artifact("int8")
    workspace.bench(wide, narrow, batches=(1, 8))
    workspace.evaluate(narrow, lost=5, n=400, beside=(wide.id,))
    workspace.evaluate(narrow, lost=8, n=500, first=1000, budget=0.02, beside=(wide.id,))
    return TIMES + DROP + 'minimum_top1 = "90 %"\n', {}


def waive_what_fails(workspace):
    build = workspace.artifact("int8")
    workspace.bench(build)
    workspace.evaluate(build, lost=30)
    waivers = {"size.maximum": "ticket 12", "accuracy.maximum_drop": "ticket 13"}
    return TIMES + DROP + '[size]\nmaximum = "1 KiB"\n', waivers


def measure_energy_in_two_runs(workspace):
    build = workspace.artifact("int8")
    for seed in (1, 2):
        workspace.bench(build, power=100, batches=(4,), seed=seed)
    return '[energy]\nmaximum = "1 mJ/image"\n[[latency]]\np50 = "50 ms"\nbatch_size = 4\n', {}


def measure_a_server_beside_batches(workspace):
    builds = [workspace.artifact(each) for each in ("int8", "fp32")]
    workspace.bench(*builds, batches=(64,))
    workspace.bench(*builds, scenario="server", rate=100.0)
    return '[[latency]]\np50 = "50 ms"\nbatch_size = 64\n', {}


def take_turns(workspace):
    wide, narrow = workspace.artifact("fp32"), workspace.artifact("int8")
    workspace.turns(wide, narrow)
    workspace.evaluate(narrow, lost=3)
    speedup = '[[speedup]]\nminimum = "1.2 times"\nover = "fp32"\nbatch_size = 1\n'
    return speedup + DROP, {}


CASES = (
    measure_nothing,
    measure_one_process,
    evaluate_twice_beside_another_build,
    waive_what_fails,
    measure_energy_in_two_runs,
    measure_a_server_beside_batches,
    take_turns,
)


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.__name__)
def reported(request, make_workspace, tmp_path_factory):
    """The verdict, its evidence, its documents, and the text of every rendering by its name."""
    workspace = make_workspace(tmp_path_factory.mktemp("one") / "workspace")
    policy, waivers = request.param(workspace)
    wanted = SignoffRequest("digits", policy_from_toml((BUILD + policy).encode()), None, waivers)
    record, folder = sign_off(wanted, workspace.store, None, None, SilentListener(), figures=False)
    texts = {
        name: re.sub(r"<[^>]+>", " ", (folder / name).read_text())
        for name in ("report.html", "report.md", "junit.xml", "verdict.json", "comparison.json")
    }
    texts["terminal"] = text_of(document_from_verdict(record, folder), width=400)
    evidence = judge_dossier(read_dossier(Files(folder)))[1]
    return record, evidence, folder, texts


def test_each_count_of_criteria_is_that_of_the_verdict(reported):
    record, _, folder, texts = reported
    counted, waived = len(record.counted), len(record.waived)
    for name, text in texts.items():
        found = re.findall(r"(?:of|all) (\d+) criteria (?:is|are)", text)
        assert set(map(int, found)) <= {counted}, name
        found = re.findall(r"(\d+) criteri(?:on was|a were) waived", text)
        assert set(map(int, found)) <= {waived}, name
    page = (folder / "report.html").read_text()
    tally = [*map(int, re.findall(r'<span class="chip \w+">(\d+) [A-Z]+</span>', page))]
    rows = re.search(r'data-for="criteria-table".*?(\d+) of (\d+)</p>', page, re.DOTALL)
    suite = Xml.fromstring((folder / "junit.xml").read_text())[0]
    stated = sum(tally), *map(int, rows.groups()), int(suite.get("tests"))
    assert set(stated) == {counted + waived}, "tally, table, and JUnit"
    assert int(suite.get("skipped")) == waived


def test_each_drop_and_its_budget_are_those_of_the_criterion(reported):
    record, _, _, texts = reported
    drops = [one for one in record.criteria if one.name == "accuracy.maximum_drop" and one.ci]
    stated = {
        name: re.findall(r"drop \(([+-][\d.]+) points \[([+-][\d.]+), ([+-][\d.]+)\]", text)
        for name, text in texts.items()
    }
    budgets = {
        budget for text in texts.values() for budget in re.findall(r"([\d.]+)-point budget", text)
    }
    for one in drops:
        expected = tuple(f"{each:+.2f}" for each in (one.observed, *one.ci))
        assert {each for found in stated.values() for each in found} <= {expected}
        assert budgets <= {f"{one.threshold:g}"}


def test_each_top1_has_one_interval(reported):
    record, _, folder, _ = reported
    criteria = [one for one in record.criteria if one.name == "accuracy.minimum_top1"]
    rows = json.loads((folder / "comparison.json").read_text())["rows"]
    for one in criteria:
        mine = [row["top1"] for row in rows if row["artifact"] == record.artifact.id]
        assert mine
        for top1 in mine:
            shown = top1["value"], top1["low"], top1["high"]
            assert shown == pytest.approx((one.observed, *one.ci))


def test_each_figure_of_the_build_is_the_same_in_all_documents(reported):
    record, _, folder, _ = reported
    rows = json.loads((folder / "comparison.json").read_text())["rows"]
    for group in record.groups:
        if group.processes < 3:  # a single process has an interval within itself alone
            continue
        load = group.load
        (row,) = (
            row
            for row in rows
            if row["artifact"] == record.artifact.id
            and row["load"]["batch_size"] == load.batch_size
            and row["load"]["scenario"] == load.scenario
        )
        shown = row["latency_ns"] | {
            "throughput": row["throughput_images_per_s"],
            "energy": row["energy_j_per_image"],
        }
        for name, figure in shown.items():
            judged = group.figures.get(name)
            assert (figure is None) == (judged is None), name
            if judged is not None:
                of = judged.estimate
                found = figure["value"], figure["low"], figure["high"]
                assert found == pytest.approx((of.value, of.low, of.high)), name


def test_each_kind_of_evidence_has_one_confidence(reported):
    record, evidence, folder, texts = reported
    looks = {
        name: set(re.findall(r"(\w[\w ]*), look \d+ \([^)]*\), at ([\d.]+)%", text))
        for name, text in texts.items()
        if name in ("report.html", "report.md", "verdict.json", "terminal")
    }
    assert len({frozenset(each) for each in looks.values()}) == 1
    stated = dict(looks["terminal"])
    for kind, name in (("bench", "measurements"), ("evaluate", "accuracy")):
        if name in stated:
            assert stated[name] == f"{100 * evidence.find_confidence(kind):.4g}"
    levels = json.loads((folder / "comparison.json").read_text())["confidence"]
    top1 = re.findall(r"top-1 at ([\d.]+)%", texts["report.md"])
    assert set(top1) <= {stated.get("accuracy")}
    if record.groups:
        assert f"{100 * levels['figures']:.4g}" == stated["measurements"]


def test_nothing_is_claimed_between_loads_of_different_kinds(reported):
    _, _, folder, _ = reported
    rows = json.loads((folder / "comparison.json").read_text())
    loads = {
        row["id"]: (row["load"]["scenario"], row["load"]["rate_per_s"]) for row in rows["rows"]
    }
    for row in rows["rows"]:
        if row["dominated_by"]:
            assert loads[row["dominated_by"].split(": ")[0]] == loads[row["id"]]
    for reason in rows["best_reason"].values():
        one, asked, other = reason.partition(" is not shown to be better than ")
        assert not asked or ("server" in one) == ("server" in other.partition(", among")[0])


def test_what_was_not_judged_has_no_look(reported):
    record, _, _, texts = reported
    if not record.groups:
        for text in texts.values():
            assert "measurements, look" not in text


def test_a_bench_and_the_comparison_of_its_run_state_the_same_figures(make_workspace, tmp_path):
    workspace = make_workspace(tmp_path / "workspace")
    builds = [workspace.artifact(each) for each in ("int8", "fp32")]
    run = workspace.bench(*builds, batches=(1, 8), power=100)
    record = record_from_run(run, read_measurements(run.files))
    text = text_of(document_from_bench(record), width=400)
    rows = compare_workspace(workspace.store)[0].rows
    assert len(rows) == len(record.groups) == 4
    for group in record.groups:
        (row,) = (
            row
            for row in rows
            if (row.artifact, row.load.batch_size)
            == (group.subject.artifact, group.load.batch_size)
        )
        compared = {**row.latency_ns, "throughput": row.throughput_images_per_s}
        compared["energy"] = row.energy_j_per_image
        for name, estimate in compared.items():
            figure = group.figures[name].estimate if name in group.figures else None
            assert figure == estimate, name
        p50 = group.figures["p50"].estimate
        half = (p50.high - p50.value) / p50.value
        assert re.search(rf"{p50.value / 1e6:.4g}\s*±{half:.1%}", text), group.load


def test_an_evaluation_and_the_sign_off_of_its_build_state_the_same_drop(make_workspace, tmp_path):
    workspace = make_workspace(tmp_path / "workspace")
    build = workspace.artifact("int8")
    workspace.evaluate(build, lost=8, n=1000)
    (run,) = list_runs(workspace.store.workspace, "evaluate")
    found = read_record(run.path / EVALUATION, Evaluation)
    text = text_of(document_from_evaluation(found, {}), width=400)
    policy = policy_from_toml((BUILD + DROP).encode())
    record, _ = sign_off(
        SignoffRequest("digits", policy),
        workspace.store,
        None,
        None,
        SilentListener(),
        figures=False,
    )
    (criterion,) = (one for one in record.criteria if one.name == "accuracy.maximum_drop")
    (row,) = (row for row in found.results if row.artifact == build.id)
    assert criterion.observed == pytest.approx(100 * row.accuracy.drop)
    low, high = (100 * each for each in row.drop_ci)
    assert criterion.ci[0] <= low <= high <= criterion.ci[1], "a look costs some confidence"
    assert format_drop(row.accuracy.drop, row.drop_ci) in text
