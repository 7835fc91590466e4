"""Policies: what is read, what is refused with its place, and limits on a task's own score."""

import json
import re
import tomllib
from pathlib import Path

import jsonschema
import pytest

from optpipe.core.errors import BadInputError
from optpipe.core.precision import Precision
from optpipe.core.verdict import Blocker, Observation
from optpipe.models.artifacts.judged_build import JudgedBuild
from optpipe.signoff.build_evidence import BuildEvidence
from optpipe.signoff.evidence import observe
from optpipe.signoff.policy import POLICY_SCHEMA, Criterion, policy_from_toml, read_policy_template

SCHEMA = json.loads(POLICY_SCHEMA.read_text())


def parsed(text):
    return policy_from_toml(text.encode(), "p.toml")


def test_the_template_parses_and_fits_the_schema():
    jsonschema.validate(tomllib.loads(read_policy_template()), SCHEMA)
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    loads = [
        "latency.p50.b1.single-stream",
        "latency.p99.b1.single-stream",
        "throughput.minimum.b1",
        "stability.maximum_cv.b1",
    ]
    for labeled, judged in ((True, "accuracy.maximum_drop"), (False, "outputs.minimum_snr")):
        assert [one.name for one in parsed(read_policy_template(labeled=labeled)).criteria] == [
            *loads,
            judged,
        ]


def test_every_commented_example_in_the_template_is_right_too():
    lines = [re.sub(r"^# (?=\[|\S+ = )", "", line) for line in read_policy_template().splitlines()]
    assert len([line for line in lines if line.startswith("# ")]) < 12, "prose only"
    names = {one.name for one in parsed("\n".join(lines)).criteria}
    assert {
        "regression.p99.b1",
        "tensor_cores.minimum_share",
        "environment.packages.onnxruntime-gpu",
    } <= names


def test_options_are_read_as_they_are_typed():
    text = (
        "schema = 1\n[size]\nmaximum = '1 MiB'\n[build]\nbackend = 'onnxruntime'\n[build.options]\n"
    )
    found = parsed(text + "threads = 2\nspinning = false\ncudnn_search = 'HEURISTIC'")
    assert found.options == {"threads": "2", "spinning": "false", "cudnn_search": "HEURISTIC"}
    assert found.build == {"backend": "onnxruntime"}


BAD = {
    "schema = 1\n[size]\nmaximum = '1 MiB'\n[build]\noptions = 2": "line 5: build.options = 2: expected a table",
    "schema = 1\n[size]\nmaximum = '1 MiB'\n[build.options]\nthreads = [2]": "build.options: [2] must be a number",
    "": "no schema version",
    "schema = 2": "schema version 2",
    "schema = 1": "no criteria",
    "schema = 1\n[[latncy]]\np99 = '1 ms'": "p.toml, line 2: unknown key 'latncy' in the top level; did you mean latency",
    "schema = 1\n[[latency]]\np98 = '1 ms'": "line 3: unknown key 'p98' in [latency]; did you mean p99?",
    "schema = 1\n[[latency]]\np99 = 15": 'p.toml, line 3: latency.p99 = 15 has no unit; for example "15 ms"',
    "schema = 1\n[[latency]]\np99 = '15'": "has no unit",
    "schema = 1\n[[latency]]\np99 = '15 MiB'": "MiB is not a unit of a time",
    "schema = 1\n[[latency]]\np99 = '0 ms'": "can never be met",
    "schema = 1\n[[latency]]\nbatch_size = 1": "sets no limit",
    "schema = 1\n[[latency]]\np99 = '1 ms'\nbatch_size = 0": "line 4: latency.batch_size = 0: expected an integer from 1 to 1000000",
    "schema = 1\n[[latency]]\np99 = '1 ms'\nbatch_size = 1000000000000000000000": "expected an integer from 1 to 1000000",
    "schema = 1\n[[latency]]\np99 = '\u0661\u0665 ms'": "'\u0661\u0665 ms' is not a time",
    "schema = 1\n[[latency]]\np99 = '1 ms'\n[[latency]]\np99 = 15": "line 5: latency.p99 = 15 has no unit",
    "schema = 1\n[[latency]]\np99 = '1 ms'\nscenario = 'burst'": "must be one of single-stream",
    "schema = 1\n[[latency]]\np99 = '1 ms'\nscenario = 'server'": "requires rate; for example rate",
    "schema = 1\n[[latency]]\np99 = '1 ms'\nscenario = 'server'\nrate = 500": "500 has no unit",
    "schema = 1\n[[latency]]\np99 = '1 ms'\nscenario = 'server'\nrate = '0 queries/s'": "invalid rate",
    "schema = 1\n[[latency]]\np99 = '1 ms'\nrate = '5 queries/s'": 'rate requires scenario = "server"',
    "schema = 1\n[[latency]]\np99 = '1 ms'\nscenario = 'multi-stream'": "for example streams = 4",
    "schema = 1\n[[latency]]\np99 = '1 ms'\nstreams = 2": 'streams requires scenario = "multi-stream"',
    "schema = 1\n[[latency]]\np50 = '2 ms'\np99 = '1 ms'": "has no effect",
    "schema = 1\n[[latency]]\np99 = '2 ms'\n[[latency]]\np99 = '1 ms'": "has two limits",
    "schema = 1\n[precision]\nfp16 = '60 %'\nint8 = '60 %'": "add up to 120%",
    "schema = 1\n[build]\nprecision = 'fp32'\n[precision]\nint8 = '80 %'": "contradicts build.precision",
    "schema = 1\n[environment]\ngpu = 'none'\n[energy]\nmaximum = '1 mJ/image'": "requires a GPU",
    "schema = 1\n[accuracy]\nminimum_top1 = '101 %'": "can never be met",
    "schema = 1\n[accuracy]\nminimum_score = '101 AP'": "can never be met",
    "schema = 1\n[accuracy]\nmaximum_drop = '0.5 GIoU'": "GIoU is not a unit",
    "schema = 1\n[accuracy]\nminimum_top1 = '0 %'": "is always met",
    "schema = 1\nlatency = 3": "latency = 3: expected a table or an array of tables",
    "schema = 1\n[environment]\ngpu = 3": "must be a quoted string",
    "schema = 1\nconfidence = '100 %'\n[size]\nmaximum = '1 MiB'": "at least 50%",
    "schema = ": "not TOML",
}


@pytest.mark.parametrize("text", BAD)
def test_a_bad_policy_is_refused_with_its_place(text):
    with pytest.raises(BadInputError) as failure:
        parsed(text)
    assert str(failure.value).startswith("p.toml")
    assert BAD[text] in str(failure.value)
    assert "\n" not in str(failure.value)


def test_a_byte_order_mark_is_no_fault_and_control_characters_are():
    text = 'schema = 1\nname = "{}"\n[size]\nmaximum = "1 MiB"\n'
    assert policy_from_toml(b"\xef\xbb\xbf" + text.format("release").encode()).name == "release"
    with pytest.raises(BadInputError, match="must be a quoted string"):
        policy_from_toml(text.format("\\u0007").encode())
    with pytest.raises(BadInputError, match="not UTF-8"):
        policy_from_toml(b"\xff\xfe", "p.toml")
    with pytest.raises(BadInputError, match=r"schema version 1\.0"):
        policy_from_toml(text.format("x").replace("schema = 1", "schema = 1.0").encode())


ACROSS_KEYS = (
    "has no effect",
    "has two limits",
    "add up to",
    "contradicts",
    "requires a GPU",
    "can never be met",
    "is always met",
    "at least 50%",
    "invalid rate",
)


@pytest.mark.parametrize("text", [text for text, message in BAD.items() if message != "not TOML"])
def test_the_json_schema_refuses_what_the_parser_refuses_except_what_relates_two_keys(text):
    valid = jsonschema.Draft202012Validator(SCHEMA).is_valid(tomllib.loads(text))
    assert valid == any(message in BAD[text] for message in ACROSS_KEYS)


EXAMPLES = sorted((Path(__file__).parents[3] / "reports" / "examples").glob("*.toml"))
POLICIES = [
    path for path in EXAMPLES if "policy.schema.json" in path.read_text().partition("\n")[0]
]


@pytest.mark.parametrize("path", POLICIES, ids=lambda path: path.name)
def test_the_example_policies_parse_and_fit_the_schema_beside_them(path):
    policy_from_toml(path.read_bytes(), path.name)
    jsonschema.validate(tomllib.loads(path.read_text()), SCHEMA)


def test_the_share_of_every_precision_that_is_built_can_be_limited():
    text = "schema = 1\n[precision]\n" + "".join(f"{each} = '1 %'\n" for each in Precision)
    assert [one.name for one in parsed(text).criteria] == [
        f"precision.{each}" for each in Precision
    ]


FIGURES = {
    "AP": Observation(0.58, 0.55, 0.61),
    "drop of AP": Observation(0.002, -0.001, 0.004),
    "drop of AP50": Observation(0.01, 0.005, 0.02),
    "drop of F1@25%": Observation(0.03, 0.02, 0.04),
    "drop of F1@30%": Observation(0.007, 0.005, 0.02),
}
ACCURACY = {**FIGURES, "score": FIGURES["AP"], "drop": FIGURES["drop of AP"]}


def read_criterion(limit: str) -> Criterion:
    (criterion,) = policy_from_toml(f"schema = 1\n[accuracy]\n{limit}\n".encode()).criteria
    return criterion


def observe_limit(limit: str):
    evidence = BuildEvidence(JudgedBuild("m", "a", "onnxruntime", "int8"), accuracy=ACCURACY)
    return observe(read_criterion(limit), evidence)


@pytest.mark.parametrize(
    "limit",
    [
        'at_threshold = "33%"',
        'maximum_f1_drop = "1 AP"',
        'at_threshold = "5%"\nminimum_score = "9 AP"',
    ],
)
def test_a_threshold_is_one_of_the_grid_and_goes_with_f1(limit: str) -> None:
    with pytest.raises(BadInputError):
        read_criterion(limit)


@pytest.mark.parametrize(
    ("limit", "name", "said", "value"),
    [
        ('maximum_drop = "0.5 AP"', "accuracy.maximum_drop.AP", "at most 0.5 AP", 0.2),
        ('maximum_drop = "0.5 points"', "accuracy.maximum_drop", "at most 0.5 points", 0.2),
        ('maximum_drop = "2 AP50"', "accuracy.maximum_drop.AP50", "at most 2 AP50", 1.0),
        (
            'maximum_f1_drop = "5 points"',
            "accuracy.maximum_f1_drop.F1@25%",
            "at most 5 F1@25%",
            3.0,
        ),
        (
            'maximum_f1_drop = "1 F1"\nat_threshold = "30%"',
            "accuracy.maximum_f1_drop.F1@30%",
            "at most 1 point",
            0.7,
        ),
        ('minimum_score = "50 AP"', "accuracy.minimum_score.AP", "at least 50 AP", 58.0),
        ('minimum_score = "50 points"', "accuracy.minimum_score", "at least 50 points", 58.0),
    ],
)
def test_a_limit_names_its_score_and_finds_it(
    limit: str, name: str, said: str, value: float
) -> None:
    criterion = read_criterion(limit)
    assert (criterion.name, criterion.limit) == (name, said)
    found = observe_limit(limit)
    assert not isinstance(found, Blocker)
    assert found[0].value == pytest.approx(value)
