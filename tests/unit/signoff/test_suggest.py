"""Every command that a verdict suggests is taken by the command line as it is printed, and measures what is missing."""

import re

import pytest
from tests.command_line import parse_command

from optpipe.cli.bench import bench, make_bench_plan
from optpipe.cli.groups import read_arguments
from optpipe.core.load import Mode, Scenario
from optpipe.core.measurement import Reason
from optpipe.core.metrics.sections import SECTIONS
from optpipe.core.verdict import Verdict
from optpipe.models.artifacts.judged_build import JudgedBuild
from optpipe.signoff.build_evidence import suggest_bench, suggest_fix, suggest_narrowing
from optpipe.signoff.policy import LoadFilter

EVERYTHING = """schema = 1
[build]
precision = "fp16"
[latency]
p50 = "%(ms)s ms"
"p99.9" = "%(ms)s ms"
[throughput]
minimum = "%(rate)s images/s"
[regression]
p50 = "%(share)s %%"
throughput = "%(share)s %%"
"p99.9" = "%(share)s %%"
[memory]
maximum = "%(mib)s MiB"
[energy]
maximum = "1 mJ/image"
[stability]
maximum_cv = "%(share)s %%"
[accuracy]
maximum_drop = "%(share)s points"
minimum_agreement = "99 %%"
[preprocessing]
minimum_agreement = "99.9 %%"
minimum_snr = "60 dB"
[precision]
fp16 = "99 %%"
[size]
maximum = "1 KiB"
[tensor_cores]
minimum_share = "50 %%"
"""
LIMITS = {
    "loose": {"ms": 50, "rate": 1, "share": 50, "mib": 900},
    "tight": {"ms": 1, "rate": 9999, "share": 0.01, "mib": 1},
    "straddling": {"ms": 8, "rate": 125, "share": 1, "mib": 201},
}
LOADS = [
    {"batches": (8,), "mode": "end-to-end"},
    {"scenario": "server", "rate": 500.0},
    {"scenario": "multi-stream", "streams": 4},
    {"options": {"threads": 2, "spinning": True}},
]
STATES = [
    ("loose", {}),
    ("tight", {}),
    ("straddling", {"max_cv": 0.025}),
    ("straddling", {"count": 80}),
    ("straddling", {"valid": False}),
    (
        "straddling",
        {"reasons": [Reason("stale-answer", "a stale output", "do not use it", invalidates=True)]},
    ),
    ("straddling", {"caveats": ["synthetic-inputs", "random-weights", "fallback"]}),
]


def list_commands(text):
    assert "…" not in text
    quoted = re.findall(r"`(optpipe [^`]*)`", text)
    return [
        *quoted,
        *(each.strip() for each in re.findall(r"optpipe [^;]*", re.sub(r"`[^`]*`", "", text))),
    ]


def load_of(command):
    """What `bench` would put on the artifacts, by the code that reads its options."""
    name, given = parse_command(command)
    assert name == "bench"
    read = read_arguments(bench, given)
    return make_bench_plan(read["load"], read["targets"], read["how"])


def judge(workspace, tmp_path, name, policy):
    return workspace.sign_off(policy, tmp_path / name)[0]


def require_readable(found):
    remedies = [one.remedy for one in found.criteria if one.verdict is not Verdict.PASS]
    assert all(remedies)
    remedies += [note.remedy for note in found.notes]
    commands = [command for remedy in remedies for command in list_commands(remedy)]
    for command in commands:
        parse_command(command)
    return commands


def test_what_is_suggested_of_a_build_that_was_never_measured(workspace, tmp_path):
    workspace.artifact("fp16", trained=False, passed=False, proven=False)
    commands = require_readable(judge(workspace, tmp_path, "one", EVERYTHING % LIMITS["loose"]))
    assert {each.split()[1] for each in commands} >= {
        "bench",
        "signoff",
        "evaluate",
        "preprocess",
        "profile",
        "build",
    }


@pytest.mark.parametrize(("limits", "state"), STATES, ids=str)
@pytest.mark.slow
def test_what_is_suggested_of_a_build_that_was(workspace, tmp_path, monkeypatch, limits, state):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "DIR").mkdir()  # what a suggestion leaves to the user
    old = workspace.artifact("fp16", macs=0.96)
    workspace.bench(old)
    workspace.approve(EVERYTHING % LIMITS["loose"], tmp_path / "approved")
    new = workspace.artifact("fp16")
    workspace.bench(new, **state)
    workspace.preprocess(noise=2e-3)
    commands = require_readable(judge(workspace, tmp_path, "one", EVERYTHING % LIMITS[limits]))
    measuring = [each for each in commands if each.split()[1] == "bench" and " A " not in each]
    assert all(new.id in each.split() for each in measuring)
    for command in measuring:
        if "reports the cause" not in command:
            load_of(command)


def test_what_the_notes_on_an_int8_build_suggest(workspace, tmp_path):
    wide, narrow = (workspace.artifact(precision, macs=0.9) for precision in ("fp32", "int8"))
    policy = EVERYTHING.replace('"fp16"', '"int8"').replace("fp16 =", "int8 =") % LIMITS["loose"]
    workspace.bench(narrow)
    alone = judge(workspace, tmp_path, "alone", policy)
    workspace.bench(wide, narrow, mean_ms=12.0, noise=8.0, max_cv=5.0)
    beside = judge(workspace, tmp_path, "beside", policy)
    assert {note.code for found in (alone, beside) for note in found.notes} >= {"int8-alone"}
    for found in (alone, beside):
        require_readable(found)


@pytest.mark.parametrize("load", LOADS, ids=str)
@pytest.mark.slow
def test_a_suggested_measurement_is_of_the_load_that_is_missing(workspace, tmp_path, load):
    """Its processes join those of the group that lacks them."""
    old = workspace.artifact("fp16", macs=0.96)
    workspace.bench(old, **load)
    workspace.approve(EVERYTHING % LIMITS["loose"], tmp_path / "approved")
    entry = workspace.artifact("fp16")
    workspace.bench(entry, processes=2, **load)
    found = judge(workspace, tmp_path, "one", EVERYTHING % LIMITS["straddling"])
    (group,) = found.groups
    commands = [command for one in found.criteria for command in list_commands(one.remedy or "")]
    measuring = [each for each in commands if each.split()[1] == "bench"]
    assert {"--against" in each for each in measuring} == {False, True}
    for command in measuring:
        plan = load_of(command)
        assert (plan.batches, *plan.load.key[1:]) == (
            (group.load.batch_size,),
            *group.load.key[1:],
        ), command
        given = {**entry.info.options, **plan.options.get("onnxruntime", {})}
        assert {
            name: str(value).lower() for name, value in given.items()
        } | group.subject.settings == {name: str(value).lower() for name, value in given.items()}, (
            command
        )
        assert plan.limits["max_cv"] == 0.5
    assert any(load_of(command).load.percentile == 99.9 for command in measuring)
    assert any("--energy" in command for command in measuring)


@pytest.mark.parametrize(
    "where",
    [
        LoadFilter(),
        LoadFilter(batch_size=8, mode=Mode.END_TO_END),
        LoadFilter(batch_size=1, scenario=Scenario.SERVER, rate=1234567.5),
        LoadFilter(batch_size=1, scenario=Scenario.SERVER, rate=0.25),
        LoadFilter(scenario=Scenario.MULTI_STREAM, streams=4),
        LoadFilter(batch_size=8, length=128),
    ],
    ids=str,
)
def test_a_load_that_was_never_measured_is_suggested_as_the_policy_has_it(where):
    build = JudgedBuild("a model.onnx", "90d93930c3c6", "tensorrt", "fp16")
    plan = load_of(suggest_bench(build, where, {"timing_cache": "a b"}))
    assert plan.batches == (None if where.batch_size is None else (where.batch_size,))
    wanted = (
        where.scenario or "single-stream",
        where.mode or "compute",
        where.streams or 1,
        where.rate,
    )
    assert plan.load.key[1:5] == wanted
    assert plan.lengths == (None if where.length is None else (where.length,))
    assert plan.options == {"tensorrt": {"timing_cache": "a b"}}


@pytest.mark.parametrize("section", SECTIONS)
def test_no_command_names_a_module_in_memory(section):
    build = JudgedBuild("Net", "90d93930c3c6", "onnxruntime", "int8", source="memory:Net")
    for remedy in (suggest_narrowing(section, build), suggest_fix(section, build)):
        assert "``" not in remedy
        for command in list_commands(remedy):
            parse_command(command)
        verbs = ("build", "calibrate", "evaluate", "preprocess", "profile")
        assert not any(f"optpipe {verb}" in remedy for verb in verbs)
    assert 'workspace.builds("Net").evaluate(' in suggest_narrowing("accuracy", build)


@pytest.mark.parametrize("section", SECTIONS)
def test_a_model_whose_name_has_spaces_is_quoted(section):
    build = JudgedBuild("a model.onnx", "90d93930c3c6", "onnxruntime", "fp16")
    for remedy in (suggest_narrowing(section, build), suggest_fix(section, build)):
        for command in list_commands(remedy):
            parse_command(command)
