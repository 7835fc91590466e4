"""Forgeries by someone who knows the format and puts every hash, report and seal right again: found, or named as what it is.

Each row of the table is a change to an honest dossier and what `optpipe verify` says of it: among the problems, or among what
it names as stated by a record alone. The honest dossier is made once.
"""

import json
import random
import shutil
import subprocess
from contextlib import suppress
from datetime import datetime, timedelta
from functools import partial
from xml.etree import ElementTree

import polars as pl
import pytest
from tests.command_line import call
from tests.fakes.console import text_of
from tests.fakes.dossiers import VERIFIER, edit, examine, seal_anew
from tests.fakes.mutations import mutate_bytes
from tests.tiers import leave_to_slow_tier

from optpipe.cli.app import app
from optpipe.cli.signoff import verify
from optpipe.core.entries import VerificationInfo
from optpipe.core.errors import BadInputError
from optpipe.core.events import SilentListener
from optpipe.core.files import Files, hash_file, hash_text
from optpipe.core.measurement import InputPool, MeasurementsRecord, OutputCheck, read_measurements
from optpipe.core.records import json_from_record, plain_from_record
from optpipe.measure.figures import recompute_requested
from optpipe.signoff.dossier import read_dossier
from optpipe.signoff.judge import judge_dossier
from optpipe.signoff.reports import (
    document_from_verdict,
    render_dossier,
    summarize_verdict,
    write_reports,
)
from optpipe.signoff.verify import verify_dossier
from optpipe.workspace.entry import compute_entry_id, drop_folders
from optpipe.workspace.seal import approve_folder, seal_folder, sign_folder

POLICY = b"""schema = 1
[build]
precision = "fp16"
[[latency]]
p50 = "50 ms"
batch_size = 1
[precision]
fp16 = "80 %"
[memory]
maximum = "1 GiB"
[accuracy]
minimum_agreement = "90 %"
"""
ESCAPE = "\x1b[2J\x1b[31mred\x07\x00"


@pytest.fixture
def dossier(honest, tmp_path):
    return shutil.copytree(honest, tmp_path / "one")


@pytest.fixture(scope="module")
def honest(make_workspace, tmp_path_factory):
    folder = tmp_path_factory.mktemp("forgeries")
    workspace = make_workspace(folder / "workspace")
    fp16, fp32 = workspace.artifact("fp16"), workspace.artifact("fp32")
    workspace.bench(fp16, fp32, count=200, power=50, processes=3)
    workspace.bench(fp16, count=200, seed=7, processes=2)
    workspace.evaluate(fp16, lost=3, n=400)
    workspace.preprocess(images=40, pictures=(b"first picture", b"second picture"))
    signed = workspace.release(POLICY, folder / "one", waivers={"memory.maximum": "known"})
    checked = verify_dossier(signed)
    assert checked.problems == checked.not_compared == ()
    return signed


def show(dossier):
    outcome = call(verify, dossier)
    return text_of(outcome.show(outcome.document), width=200)


def find_one(folder, pattern):
    return sorted(folder.glob(pattern))[0]


def find_artifact(folder):
    chosen = json.loads((folder / "request.json").read_text())["artifact"]
    return folder / "builds" / f"artifact-{chosen}" / "manifest.json"


def put_right(folder):
    """Hashes, the verdict, the reports and the seal, by the project's own functions."""
    seal_anew(folder)
    try:
        found = read_dossier(Files(folder, kept={}))
        verdict, evidence = judge_dossier(found)
        (folder / "verdict.json").write_bytes(json_from_record(verdict))
        write_reports(render_dossier(found, verdict, evidence, figures=False), folder)
    except (BadInputError, ValueError, TypeError, IndexError):
        pass  # the project itself refuses it
    seal_folder(folder)


def tell_counts(folder):
    counts = {}
    for path in folder.glob("runs/bench-*/measurements.json"):
        counts[path.parent.name] = len(json.loads(path.read_text())["measurements"])
        edit(path.parent / "manifest.json", "info", "measurements", value=counts[path.parent.name])
    about = {
        name
        for name in json.loads((folder / "request.json").read_text())["measurements"]
        if name in counts
    }
    edit(
        folder / "request.json",
        "measurements",
        value={name: counts[name] for name in sorted(about)},
    )


def in_file(pattern, *steps, value=None):
    return lambda folder: edit(find_one(folder, pattern), *steps, value=value)


def in_artifact(*steps, value=None):
    return lambda folder: edit(find_artifact(folder), *steps, value=value)


in_bench = partial(in_file, "runs/bench-*/measurements.json", "measurements")
in_run = partial(in_file, "runs/bench-*/manifest.json")
in_request = partial(in_file, "request.json")
in_verdict = partial(in_file, "verdict.json")
in_verification = partial(in_file, "builds/verification-*/manifest.json", "info")
in_data = partial(in_file, "runs/evaluate-*/evaluate.json", "dataset")
in_pictures = partial(in_file, "runs/preprocess-*/preprocess.json", "parity", "worst")


def add_copy(folder, **changes):
    """One process once more, as another; with a file of its own where `changes` names one."""
    path = find_one(folder, "runs/bench-*/measurements.json")
    document = json.loads(path.read_text())
    first = document["measurements"][0]
    for field in ("samples_file", "machine_file"):
        if field in changes:
            shutil.copy(path.parent / first[field], path.parent / changes[field])
    document["measurements"].append({**first, "process": 9, **changes})
    path.write_text(json.dumps(document))
    tell_counts(folder)


def add_copy_of_run(folder):
    source = find_one(folder, "runs/bench-*")
    target = source.with_name(f"{source.name[:-2]}zz")
    shutil.copytree(source, target)
    edit(target / "manifest.json", "id", value=target.name.removeprefix("bench-"))
    edit(
        folder / "request.json",
        "measurements",
        value=lambda known: known | {target.name: known[source.name]},
    )


def remove_processes(folder, *, told, files):
    """Those of one process, with their raw files or without, and every count put right or not."""
    path = find_one(folder, "runs/bench-*/measurements.json")
    document = json.loads(path.read_text())
    gone = document["measurements"][-1]
    if told is not None:
        document["measurements"] = document["measurements"][:-1]
    path.write_text(json.dumps(document))
    for name in (gone["samples_file"], gone["machine_file"]) if files else ():
        (path.parent / name).unlink()
    if told:
        tell_counts(folder)


def remove_samples(folder, name="samples_file"):
    path = find_one(folder, "runs/bench-*/measurements.json")
    artifact = json.loads((folder / "request.json").read_text())["artifact"]
    mine = [
        each
        for each in json.loads(path.read_text())["measurements"]
        if each["subject"]["artifact"] == artifact
    ]
    (path.parent / mine[0][name]).unlink()


def remove_latency(folder):
    for name in ("samples_file", "latency_ns", "throughput_images_per_s"):
        in_bench(0, name)(folder)


def remove_model(folder):
    shutil.rmtree(find_one(folder, "builds/model-*"))


def add_link(folder):
    (find_one(folder, "runs/bench-*/samples") / "more.parquet").symlink_to("/etc/passwd")


def scale_samples(folder):
    for path in folder.glob("runs/bench-*/measurements.json"):
        for each in json.loads(path.read_text())["measurements"]:
            frame = pl.read_parquet(path.parent / each["samples_file"])
            columns = ("scheduled_ns", "start_ns", "end_ns", "enqueue_ns")
            frame.with_columns(pl.col(name) // 10 for name in columns).write_parquet(
                path.parent / each["samples_file"]
            )
        files = Files(path.parent)
        again = MeasurementsRecord(
            tuple(recompute_requested(each, files) for each in read_measurements(files))
        )
        path.write_bytes(json_from_record(again))


def swap_pictures(folder):
    first, second = sorted(folder.glob("runs/preprocess-*/worst-*.png"))
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)


def change_policy(folder):
    path = folder / "policy.toml"
    path.write_bytes(b'confidence = "50 %"\n' + path.read_bytes())


def repeat_key(pattern, key, folder):
    path = find_one(folder, pattern)
    path.write_text(path.read_text().replace("{", f'{{"{key}": 1, ', 1))


def pretend_version(folder):
    edit(folder / "request.json", "optpipe", value="0.0.9")
    put_right(folder)
    (folder / "report.md").write_text("anything")
    (folder / "junit.xml").write_text("<testsuites/>")


def move(by):
    return lambda text: (datetime.fromisoformat(text) + by).isoformat()


OUTSIDE, DAY = "../../../../../../etc/passwd", timedelta(days=1)
STATED_BENCH = "output checks, inputs, peak memory of the host, load times, reasons"
STATED_BUILDS = "facts of the builds: stated by"
FORGERIES = {
    # files outside the dossier
    "path of a picture": (in_pictures(0, "file", value=OUTSIDE), "not the name of a file in it"),
    "path of samples": (in_bench(0, "samples_file", value=OUTSIDE), "not the name of a file in it"),
    "absolute path of samples": (in_bench(0, "samples_file", value="/etc/passwd"), "not the name of a file in it"),
    "path of machine rows": (in_bench(0, "machine_file", value=OUTSIDE), "not the name of a file in it"),
    "link to samples": (add_link, "neither a regular file"),
    # one process counted twice
    "same entry twice": (add_copy, "is a copy of"),
    "same samples file twice": (partial(add_copy, id="m99"), "is a copy of"),
    "copied samples": (partial(add_copy, id="m99", samples_file="samples/m99.parquet", machine_file="machine/m99.parquet"), "is a copy of"),
    "same run twice": (add_copy_of_run, "is a copy of"),
    # figures without raw data
    "process without samples": (in_bench(0, "samples_file"), 'verdict says "VALID"'),
    "figures without samples": (remove_latency, "host_peak_bytes says"),
    "no machine rows": (in_bench(0, "machine_file"), 'verdict says "VALID", but the raw files give "INVALID"'),
    "warm-up": (in_bench(0, "warm_up_samples", value=9999), "warm_up_samples says 9999"),
    # what vanished
    "samples gone": (remove_samples, "samples/m1.parquet is missing"),
    "machine rows gone": (partial(remove_samples, name="machine_file"), "machine/m1.parquet: No such file"),
    "process gone": (partial(remove_processes, told=False, files=True), "the run made 6 measurements"),
    "process gone, its files left": (partial(remove_processes, told=False, files=False), "the run made 6 measurements"),
    "process gone from every count": (partial(remove_processes, told=True, files=True), "how many processes were started"),
    "run gone": (lambda folder: shutil.rmtree(sorted(folder.glob("runs/bench-*"))[1]), "measurements: bench-"),
    "removed runs hidden": (in_request("removed", value=[]), "which runs were removed: stated by request.json"),
    "build's record gone": (remove_model, "from which builds were made: no record"),
    # what only a record states
    "output check": (in_bench(0, "output_check", value=plain_from_record(OutputCheck(16, passed=True, reference="x"))), STATED_BENCH),
    "peak of the host": (in_bench(0, "host_peak_bytes", value=1), f"memory.maximum, {STATED_BENCH}"),
    "inputs": (in_bench(0, "inputs", value=plain_from_record(InputPool("images", 9, 9, 0, "0"))), STATED_BENCH),
    "witnessed reason": (in_bench(0, "reasons", value=[]), STATED_BENCH),
    "engine's size": (in_artifact("files", "model.onnx", "size_bytes", value=1), STATED_BUILDS),
    "machine": (in_run("environment", "cpu", value="another"), "hardware, driver, and package versions: stated by"),
    "SNR of the outputs": (in_verification("snr_db", value=99.0), "trust.outputs: stated by builds/verification-"),
    "agreement of the boxes": (in_verification("box_agreement", value=1.0), "trust.outputs: stated by builds/verification-"),
    "reference": (in_verification("reference", value=ESCAPE), "trust.outputs: stated by builds/verification-"),
    "name of the data": (in_data("name", value="ImageNet"), "hash of the data set 'ImageNet': stated by"),
    "swapped pictures": (swap_pictures, "pictures, and differences of steps and images: stated by"),
    "a tenth of every time": (scale_samples, "the clock of the queries and that of the dates differ"),
    # whole documents
    "prose of a criterion": (in_verdict("criteria", 0, "reason", value="perfect"), 'reason says "perfect"'),
    "limit of a criterion": (in_verdict("criteria", -1, "limit", value="at most 1 h"), 'limit says "at most 1 h"'),
    "added criterion": (in_verdict("criteria", value=lambda known: [*known, known[0] | {"name": "p99"}]), "verdict.json: criteria says"),
    "unknown key of the verdict": (in_verdict("certified", value="by me"), "verdict.json: certified says"),
    "one key twice": (partial(repeat_key, "verdict.json", "model"), "verdict.json: key 'model' occurs twice"),
    "unknown key of the request": (in_request("certified", value="by me"), "request.json: certified says"),
    "unknown key of a measurement": (in_bench(0, "certified", value="by me"), "certified says"),
    "unknown key of a build": (in_artifact("info", "certified", value="by me"), "info: certified says"),
    "one key of a run twice": (partial(repeat_key, "runs/bench-*/measurements.json", "schema_version"), "occurs twice"),
    "another version": (pretend_version, "report.md: differs from the report that the raw files give (written by optpipe 0.0.9"),
    # counts, names, dates, parents
    "count of the data": (in_data("count", value=10**6), "count says 1000000, but the raw files give 400"),
    "finished before it started": (in_run("finished_utc", value=move(-DAY)), "which is after"),
    "judged before it was measured": (in_request("created_utc", value=move(-9000 * DAY)), "which is after"),
    "judged in the future": (in_request("created_utc", value=move(9000 * DAY)), "which is after now"),
    "measured outside its run": (in_bench(0, "started_utc", value=move(-DAY)), "which is after"),
    "parents of a run": (in_run("parents", value=lambda known: known[:1]), "were measured"),
    "parents of a build": (in_artifact("parents", value=[]), "its recipe names"),
    "confidence": (change_policy, "intervals at a confidence of 50% (usual: 95%)"),
    "recipe that is not the id's": (in_artifact("recipe", "precision", value="fp16 "), "but its recipe gives"),
    "weights": (in_artifact("info", "weights", "source", value="default:digits"), "its weights are not those of builds/model-"),
    "samples of an evaluation": (in_file("runs/evaluate-*/evaluate.json", "results", 1, "samples", value=10**6), "samples says 1000000"),
    "bare NaN": (lambda folder: find_artifact(folder).write_text(find_artifact(folder).read_text().replace("{", '{"x": NaN,', 1)), "NaN"),
    "foreign file": (lambda folder: (folder / "notes.txt").write_text("{}"), "notes.txt: not part of a dossier"),
    "other build measured": (in_bench(1, "subject", "precision", value="int8"), "precision is 'int8'"),
}  # fmt: skip
AFTER = {
    "prose of a criterion",
    "limit of a criterion",
    "added criterion",
    "unknown key of the verdict",
    "one key twice",
    "another version",
}
"""Forgeries of what `put_right` writes."""
INFORMATIVE = {"prose of a criterion", "unknown key of a measurement", "unknown key of a build"}
"""Forgeries of what only optpipe compares."""


@pytest.mark.parametrize(
    "name",
    leave_to_slow_tier(
        FORGERIES,
        but=("a tenth of every time", "limit of a criterion", "path of a picture", "weights"),
    ),
)
def test_no_forgery_is_silent(dossier, name):
    forge, says = FORGERIES[name]
    for step in (put_right, forge) if name in AFTER else (forge, put_right):
        step(dossier)
    seal_folder(dossier)
    outcome = call(verify, dossier)
    said = text_of(outcome.show(outcome.document), width=10_000) + "\n".join(
        outcome.document.unbacked
    )
    assert says in said, said
    assert "\x1b[2J" not in said
    if name == "another version":
        assert outcome.status == 5
    elif name not in INFORMATIVE:
        differs = examine(dossier)[0].differs
        assert bool(differs) == bool(outcome.document.problems), differs


NO_REASONS = (
    *(
        "",
        " ",
        "\t",
        "\u200b",
        "\u200d\ufeff",
        "\u00ad",
        "\u3164",
        "\u115f\uffa0",
        "\u2800",
        "\u0301",
    ),
    *("---", "12", "two\nlines", "a\u202eb"),
)


@pytest.mark.parametrize("reason", leave_to_slow_tier(NO_REASONS, but=("", "---")), ids=ascii)
def test_a_waiver_without_a_reason_is_refused_by_both_verifiers(dossier, reason):
    edit(dossier / "request.json", "waivers", value={"memory.maximum": reason})
    put_right(dossier)
    edit_waived(dossier, reason)
    seal_folder(dossier)
    outcome = call(verify, dossier)
    assert outcome.status in (1, 2)
    assert "memory.maximum has no reason" in outcome.document.problems[0]
    assert any("memory.maximum has no reason" in each for each in examine(dossier)[0].differs)


SHARE = "info", "precision_proof", "share", "macs", "fp16"
OUT_OF_RANGE = {
    "MAC share of 17.5": (in_artifact(*SHARE, value=17.5), "the share of fp16 is 17.5"),
    "MAC share below zero": (in_artifact(*SHARE, value=-0.5), "the share of fp16 is -0.5"),
    "calibrated on fewer than none": (
        in_file("runs/evaluate-*/evaluate.json", "results", 1, "calibrated_on", value=-400),
        "calibrated on -400 of 400 samples",
    ),
    "calibrated on more than all": (
        in_file("runs/evaluate-*/evaluate.json", "results", 1, "calibrated_on", value=401),
        "calibrated on 401 of 400 samples",
    ),
}


@pytest.mark.parametrize("name", leave_to_slow_tier(OUT_OF_RANGE, but=("MAC share of 17.5",)))
@pytest.mark.slow
def test_a_share_or_count_out_of_range_is_refused_by_both_verifiers(dossier, name):
    forge, says = OUT_OF_RANGE[name]
    forge(dossier)
    put_right(dossier)
    assert any(says in each for each in verify_dossier(dossier).problems)
    assert examine(dossier)[0].differs


def change_samples(folder, **columns):
    path = find_one(folder, "runs/evaluate-*/predictions.parquet")
    pl.read_parquet(path).with_columns(**columns).write_parquet(path)


def hash_samples(folder):
    """The data set's hash of the rows that are there."""
    rows = pl.read_parquet(find_one(folder, "runs/evaluate-*/predictions.parquet"))
    lines = "".join(f"{known}  {path}\n" for path, known in rows.select("path", "sha256").rows())
    in_data("sha256", value=hash_text(lines))(folder)


TWO = pl.int_range(pl.len()) % 2
NUMBERS = pl.List(pl.Int64)
SIX = pl.concat_list([pl.lit(at, pl.Int64) for at in range(6)])
FOREIGN_SAMPLES = {
    "another data set": (in_data("sha256", value="1" * 64), False, "the data set is 1111"),
    "images replaced": (partial(change_samples, sha256=pl.col("sha256").first()), False, "the data set is"),
    "one sample twice": (partial(change_samples, path=pl.col("path").gather(TWO)), True, "a sample occurs twice"),
    "no path": (partial(change_samples, path=pl.lit(None, pl.String)), True, "has no path"),
    "six best classes": (partial(change_samples, **{"source:best": SIX}), True, "more than 5 classes"),
    "one class twice": (partial(change_samples, **{"source:best": pl.lit([3, 3])}), True, "is not possible"),
    "a class that there is not": (partial(change_samples, **{"source:best": pl.lit([10])}), True, "is not possible"),
    "a truth that there is not": (partial(change_samples, **{"class": pl.lit(10, pl.Int64)}), True, "is not possible"),
    "no answer": (partial(change_samples, **{"source:best": pl.lit([], NUMBERS)}), True, "is not possible"),
    "samples without a hash": (partial(change_samples, sha256=pl.lit("x")), True, "whose SHA-256 is none"),
    "class of another label": (partial(change_samples, label=TWO.cast(pl.String)), True, "same label are of different classes"),
}  # fmt: skip


@pytest.mark.parametrize("name", leave_to_slow_tier(FOREIGN_SAMPLES, but=("one sample twice",)))
def test_predictions_of_other_samples_are_refused_by_both_verifiers(dossier, name):
    forge, hashed, says = FOREIGN_SAMPLES[name]
    forge(dossier)
    if hashed:
        hash_samples(dossier)
    put_right(dossier)
    problems = verify_dossier(dossier).problems
    assert any(says in each for each in problems), problems
    assert examine(dossier)[0].differs


def test_copies_among_the_samples_are_stated_by_both_verifiers(dossier):
    change_samples(dossier, sha256=pl.col("sha256").gather(TWO))
    hash_samples(dossier)
    put_right(dossier)
    checked, stated = verify_dossier(dossier), examine(dossier)[0].stated
    assert checked.problems == ()
    assert any("398 of 400 samples are copies" in each for each in checked.unbacked)
    assert any("398 of 400 samples are copies" in each for each in stated)


def add_verification(folder, engine, **info):
    """Another verification of the judged build, whose recipe gives its id."""
    path = next(
        each
        for each in sorted(folder.glob("builds/verification-*/manifest.json"))
        if find_artifact(folder).parent.name.removeprefix("artifact-")
        in json.loads(each.read_text())["parents"]
    )
    document = json.loads(path.read_text())
    document["recipe"]["seed"] = 1
    document["recipe"]["artifact"]["sha256"] = engine or document["recipe"]["artifact"]["sha256"]
    document["info"] |= info
    document["id"] = compute_entry_id(VerificationInfo, document["recipe"])
    target = folder / "builds" / f"verification-{document['id']}"
    target.mkdir()
    (target / "manifest.json").write_text(json.dumps(document))
    edit(folder / "request.json", "verifications", value=lambda number: number + 1)


@pytest.mark.parametrize(
    ("engine", "info", "expected"),
    [
        (None, {"passed": False}, "FAIL"),
        (None, {"passed": None}, "INCONCLUSIVE"),
        (None, {"passed": True, "snr_db": 99.0}, "PASS"),
        ("0" * 64, {"passed": False}, "PASS"),
    ],
)
@pytest.mark.slow
def test_all_verifications_of_the_judged_file_are_judged(dossier, engine, info, expected):
    add_verification(dossier, engine, **info)
    put_right(dossier)
    checked = verify_dossier(dossier)
    (judged,) = [one for one in checked.verdict.criteria if one.name == "trust.outputs"]
    assert (checked.problems, judged.verdict) == ((), expected)
    assert examine(dossier)[0].differs == []


def write_file(name, content="<script>1</script>"):
    def forge(folder):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)

    return forge


def write_into_run(name, content="1"):
    def forge(folder):
        run = find_one(folder, "runs/bench-*/manifest.json").parent
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text(content)

    return forge


def replace_text(pattern, old, new):
    def forge(folder):
        path = find_one(folder, pattern)
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new, 1))

    return forge


def rename_run(folder):
    source = find_one(folder, "runs/evaluate-*")
    target = source.with_name(source.name.replace("evaluate", "magic"))
    source.rename(target)
    (target / "evaluate.json").rename(target / "magic.json")
    edit(target / "manifest.json", "kind", value="magic")


def add_run_to_baseline(folder):
    """An evaluation, which no baseline has."""
    source = find_one(folder, "runs/evaluate-*")
    shutil.copytree(source, folder / "baseline" / "runs" / source.name)


def start_long_ago(folder):
    path = find_one(folder, "runs/bench-*/samples/*.parquet")
    first = pl.when(pl.int_range(pl.len()) == 0).then(pl.lit(-(2**63), pl.Int64))
    pl.read_parquet(path).with_columns(
        start_ns=first.otherwise("start_ns"), scheduled_ns=first.otherwise("scheduled_ns")
    ).write_parquet(path)


def drop_zone(text):
    return text.partition("+")[0]


UNDEFINED = {
    "stray folder in baseline": write_file("baseline/runs/x/notes.html"),
    "run of an unknown kind": rename_run,
    "evaluation in the baseline": add_run_to_baseline,
    "start long ago": start_long_ago,
    "created without a time zone": in_request("created_utc", value=drop_zone),
    "run started without a time zone": in_run("started_utc", value=drop_zone),
    "measured without a time zone": in_bench(0, "started_utc", value=drop_zone),
    "created at no time": in_request("created_utc", value="yesterday"),
    "deep JSON": write_file("comparison.json", "[" * 100_000),
    "deep JSON of a run": write_file("request.json", '{"a":' * 100_000),
    "file among the runs": write_file("runs/notes.json"),
    "file beside the baseline's runs": write_file("baseline/notes.json"),
    "file among the baseline's runs": write_file("baseline/runs/notes.json"),
    "page in a run": write_into_run("page.html"),
    "program in a run": write_into_run("samples/run.sh"),
    "escape in a name": write_into_run("samples/\x1b[2J.json"),
    "backslash in a name": write_into_run("samples/a\\b.json"),
    "reversed letters in a name": write_into_run("samples/\u202egnp.json"),
    "names that differ in case": write_into_run("Manifest.json", "{}"),
    "version as a fraction": in_request("schema_version", value=1.0),
    "half of a pair of surrogates": in_request("model", value="\ud800"),
    "space after the model": in_request("model", value=lambda name: f"{name} "),
    "space before the model of an evaluation": in_file("runs/evaluate-*/evaluate.json", "model", value=lambda name: f" {name}"),
}  # fmt: skip


@pytest.mark.parametrize("name", leave_to_slow_tier(UNDEFINED, but=("start long ago",)))
def test_what_the_format_does_not_define_is_refused_by_both_verifiers(dossier, name):
    UNDEFINED[name](dossier)
    put_right(dossier)
    if name == "deep JSON":
        UNDEFINED[name](dossier)
        seal_folder(dossier)
    outcome = call(verify, dossier)
    found, _ = examine(dossier)
    assert (outcome.status in (1, 2), bool(outcome.document.problems)) == (True, True)
    assert found.differs


@pytest.mark.slow
def test_an_interrupted_process_may_have_two_reasons(dossier):
    """An honest dossier: the codes of a measurement are a set."""
    stored = json.loads(find_one(dossier, "runs/bench-*/measurements.json").read_text())
    reason = {"message": "m", "remedy": "r", "invalidates": True, "evidence": {}}
    codes = ("interrupted", "died")
    in_bench(0, "reasons", value=[reason | {"code": code} for code in codes])(dossier)
    in_bench(0, "interrupted", value=True)(dossier)
    path = find_one(dossier, "runs/bench-*/measurements.json")
    files = Files(path.parent)
    again = MeasurementsRecord(
        tuple(recompute_requested(each, files) for each in read_measurements(files))
    )
    path.write_bytes(json_from_record(again))
    assert len(again.measurements) == len(stored["measurements"])
    put_right(dossier)
    assert verify_dossier(dossier).problems == ()
    assert examine(dossier)[0].differs == []


def edit_waived(folder, reason):
    document = json.loads((folder / "verdict.json").read_text())
    for each in document["criteria"]:
        each["waived"] = reason if each["name"] == "memory.maximum" else each["waived"]
    (folder / "verdict.json").write_text(json.dumps(document))


@pytest.mark.parametrize(
    "reason", leave_to_slow_tier(["known", "bekannt, Ticket 12", "既知", "x"], but=["x"])
)
@pytest.mark.slow
def test_a_reason_with_a_letter_waives(dossier, reason):
    edit(dossier / "request.json", "waivers", value={"memory.maximum": reason})
    put_right(dossier)
    outcome = call(verify, dossier)
    assert outcome.document.problems == ()
    assert not examine(dossier)[0].differs
    assert "1 criterion was waived: memory.maximum" in show(dossier)


def test_a_dossier_put_right_without_a_change_is_the_same(dossier, honest):
    assert hash_file(VERIFIER) == json.loads((honest / "request.json").read_text())["verifier"]
    put_right(dossier)
    found = verify_dossier(dossier)
    assert (found.problems, found.not_compared, found.unbacked) == (
        (),
        (),
        verify_dossier(honest).unbacked,
    )
    assert not [
        each
        for each in ("verdict.json", "report.md", "report.html", "junit.xml")
        if (dossier / each).read_bytes() != (honest / each).read_bytes()
    ]


def test_an_unsigned_dossier_says_what_a_signature_would_add(dossier, tmp_path):
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / "key"], check=True
    )
    record = verify_dossier(dossier).verdict
    for adds in (True, False):
        assert ("A signature names" in show(dossier)) == adds
        told = text_of(document_from_verdict(record, dossier), width=10_000)
        assert ("A signature names" in told) == adds
        assert any("nobody vouches" in each for each in examine(dossier)[0].stated) == adds
        sign_folder(dossier, tmp_path / "key")


@pytest.mark.slow
def test_a_signature_by_an_unknown_key_is_named(dossier, tmp_path):
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / "key"], check=True
    )
    sign_folder(dossier, tmp_path / "key")
    assert "signed by an unknown key" in show(dossier)
    approve_folder(dossier, tmp_path / "key", "Ada", "release manager", None)
    assert "approved by Ada (release manager) on " in show(dossier)
    assert examine(dossier)[0].differs == []
    (tmp_path / "signers").write_text(f"ada@example.com {(tmp_path / 'key.pub').read_text()}")
    for words, signer in (
        ((), "unknown key"),
        (("--allowed-signers", tmp_path / "signers"), "ada@example.com"),
    ):
        with pytest.raises(SystemExit):
            app([*map(str, ("verify", dossier, *words, "--badge", tmp_path / "approved.html"))])
        first_page = (tmp_path / "approved.html").read_text().partition('<section id="criteria"')[0]
        assert signer in first_page.partition("approved by Ada (release manager) on ")[2]
    edit(dossier / "approval.json", "by", value="Eve")
    assert verify_dossier(dossier).problems


def test_no_control_character_reaches_the_terminal_or_a_report(dossier):
    edit(
        find_one(dossier, "builds/verification-*/manifest.json"), "info", "reference", value=ESCAPE
    )
    put_right(dossier)
    assert verify_dossier(dossier).problems == ()
    ElementTree.parse(dossier / "junit.xml")
    texts = [(dossier / name).read_text() for name in ("report.html", "report.md")]
    for text in (*texts, show(dossier)):
        assert "red" in text
        assert not [each for each in text if each != "\n" and not each.isprintable()]


@pytest.mark.parametrize("count", [5, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_mutated_dossiers_give_problems_and_never_a_traceback(honest, tmp_path, count):
    rng = random.Random(count)
    files = sorted(
        path
        for path in honest.rglob("*")
        if path.is_file() and not path.name.startswith("SHA256SUMS")
    )
    folder = shutil.copytree(honest, tmp_path / "one")
    for _ in range(count):
        name = rng.choice(files).relative_to(honest)
        (folder / name).write_bytes(mutate_bytes((honest / name).read_bytes(), rng))
        run = next((each for each in (folder / name).parents if each.parent.name == "runs"), None)
        if run is not None and name.name != "manifest.json":
            own = (folder / name).relative_to(run).as_posix()
            edit(run / "manifest.json", "files", own, "sha256", value=hash_file(folder / name))
        seal_folder(folder)
        with suppress(BadInputError):
            assert verify_dossier(folder).problems or not examine(folder)[0].differs
        for each in {name, name if run is None else (run / "manifest.json").relative_to(folder)}:
            shutil.copy(honest / each, folder / each)


def test_a_panic_of_polars_is_a_problem_of_the_dossier(dossier, monkeypatch):
    def panic(_):
        raise pl.exceptions.PanicException("range end index 7650 out of range")

    monkeypatch.setattr("optpipe.signoff.verify.find_contradictions", panic)
    (problem,) = verify_dossier(dossier).problems
    assert problem.startswith("cannot be recomputed: range end")


def test_random_weights_relabeled_in_every_record_are_found(workspace, tmp_path):
    workspace.bench(workspace.artifact("fp16", trained=False))
    folder = workspace.release(POLICY, tmp_path / "one")
    for path in folder.glob("builds/*/manifest.json"):
        if "weights" in json.loads(path.read_text())["info"]:
            edit(path, "info", "weights", "source", value="file")
    seal_folder(folder)
    assert any(
        "but its recipe says {'random': 0}" in problem
        for problem in verify_dossier(folder).problems
    )


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("report.html", "<h1", "<script>1</script><h1"),
        ("report.md", "PASS", "pass"),
        ("junit.xml", 'failures="0"', 'failures="1"'),
        ("comparison.json", '"samples": 1', '"samples": 2'),
    ],
)
def test_a_report_that_was_rewritten_is_found(dossier, name, old, new):
    text = (dossier / name).read_text()
    assert old in text
    (dossier / name).write_text(text.replace(old, new, 1))
    seal_folder(dossier)
    (problem,) = verify_dossier(dossier).problems
    assert problem.startswith(name)


@pytest.mark.parametrize(("max_cv", "shown"), [(0.5, True), (0.025, False)])
@pytest.mark.slow
def test_looser_limits_of_evidence_are_stated_wherever_the_verdict_is(
    workspace, tmp_path, max_cv, shown
):
    workspace.bench(workspace.artifact("fp16"), max_cv=max_cv, noise=0.1)
    listener = SilentListener()
    folder = workspace.release(POLICY, tmp_path / "one", listener)
    stated = "coefficient of variation up to 50% (usual: 2.5%)"
    checked = verify_dossier(folder)
    line = summarize_verdict(checked.verdict)
    (unbacked,) = (each for each in checked.unbacked if "than usual" in each)
    texts = [(folder / name).read_text() for name in ("report.html", "report.md", "junit.xml")]
    texts += [line, unbacked, *listener.warnings, (folder / "verdict.json").read_text()]
    assert [stated in text for text in texts] == [shown] * len(texts)
    loosened = {one.name: (one.value, one.usual) for one in checked.verdict.loosened}
    assert loosened.get("max_cv") == ((0.5, 0.025) if shown else None)
    assert examine(folder)[0].differs == []


def test_a_loosened_limit_cannot_be_left_out_of_the_verdict(workspace, tmp_path):
    workspace.bench(workspace.artifact("fp16"))
    folder = workspace.release(POLICY, tmp_path / "one")
    edit(folder / "verdict.json", "loosened", value=[])
    seal_folder(folder)
    assert any("loosened" in each for each in verify_dossier(folder).problems)
    assert any("loosened" in each for each in examine(folder)[0].differs)


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        (
            "optpipe bench /home/me/model.py:make --workspace /home/me/w",
            "optpipe bench model.py:make --workspace w",
        ),
        (
            "optpipe build hf:/srv/models/bert --option a.b=/tmp/x",
            "optpipe build hf:bert --option a.b=x",
        ),
        ("optpipe evaluate digits --data '/a b/c d/val'", "optpipe evaluate digits --data val"),
        (
            "optpipe run ~/m/model.onnx --policy ./p/policy.toml",
            "optpipe run model.onnx --policy ./p/policy.toml",
        ),
        ("optpipe bench digits --rate 5", "optpipe bench digits --rate 5"),
    ],
)
def test_a_command_line_keeps_no_absolute_path(command, shown):
    assert drop_folders(command) == shown


def test_a_dossier_names_no_folder_of_the_machine(workspace, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "sys.argv", ["optpipe", "bench", "digits", "--workspace", str(workspace.path)]
    )
    workspace.bench(workspace.artifact("fp16"))
    folder = workspace.release(POLICY, tmp_path / "one")
    for path in folder.rglob("*"):
        assert path.is_dir() or str(tmp_path).encode() not in path.read_bytes(), path
