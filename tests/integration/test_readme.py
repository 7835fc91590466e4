"""The README's commands and the example CI workflow exist as written.

A README line that only shows a form ends in `# form` and is left out.
"""

import base64
import json
import re
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from optpipe.core.verdict import Verdict
from optpipe.deploy.attest import FILE, TEST_RESULT, make_statement
from tests.command_line import parse_command

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```sh\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


def commands():
    for line in "\n".join(BLOCKS).splitlines():
        if line.strip().endswith("# form"):
            continue
        words = shlex.split(line, comments=True)
        for position, word in enumerate(words):
            if word == "optpipe":
                yield shlex.join(words[position:])


COMMANDS = tuple(commands())


def test_the_walk_is_in_the_readme():
    named = {line.split()[1] for line in COMMANDS}
    assert {"build", "evaluate", "preprocess", "bench", "profile", "compare", "signoff", "verify", "run"} <= named


@pytest.mark.parametrize("line", COMMANDS)
def test_every_command_parses(line, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    parse_command(line)


def test_links_lead_somewhere():
    links = re.findall(r"\]\((?!https?:|#)([^)]+)\)", README)
    assert links
    assert not [link for link in links if not (ROOT / link.partition("#")[0]).exists()]


def test_short_enough_to_be_read():
    assert len(README.splitlines()) < 200


WORKFLOW = Path(__file__).parents[2] / "reports" / "examples" / "ci.yml"


def test_the_workflow_runs_commands_that_exist_and_keeps_what_they_write():
    document = yaml.safe_load(WORKFLOW.read_text())
    steps = document["jobs"]["signoff"]["steps"]
    assert all(set(step) <= {"name", "uses", "run", "with", "if"} for step in steps)
    lines = [step["run"] for step in steps if "run" in step]
    commands = [line.partition("uv run optpipe ")[2] for line in lines]
    parsed = dict(map(parse_command, [f"optpipe {each}" for each in commands]))
    assert list(parsed) == ["run", "verify"]
    run = parsed["run"]
    kept = next(step["with"]["path"].split() for step in steps if step.get("uses", "").startswith("actions/upload"))
    assert [str(run["output"]), str(run["junit"])] == kept
    assert "always()" in str(steps[-1]["if"]), "a failed sign-off is the one whose dossier is wanted"


def test_the_attestation_examples_run_our_commands_and_ask_for_our_result():
    examples = WORKFLOW.parent
    document = yaml.safe_load((examples / "attest.yml").read_text())
    lines = [step["run"] for step in document["jobs"]["attest"]["steps"] if "run" in step]
    commands = [line.partition("uv run optpipe ")[2] for line in lines if "uv run optpipe" in line]
    assert [parse_command(f"optpipe {each}")[0] for each in commands] == ["signoff attest", "verify"]
    assert any(TEST_RESULT in line and FILE in line for line in lines)
    policy = yaml.safe_load((examples / "kubernetes-admission.yaml").read_text())
    asked = policy["spec"]["rules"][0]["verifyImages"][0]["attestations"][0]
    assert asked["type"] == TEST_RESULT
    keys = asked["attestors"][0]["entries"][0]["keys"]
    unlogged = any("--tlog-upload=false" in line for line in lines)
    assert keys["rekor"]["ignoreTlog"] == keys["ctlog"]["ignoreSCT"] == unlogged, (
        "what is not logged cannot be asked for"
    )
    [condition] = asked["conditions"][0]["all"]
    assert (condition["operator"], condition["value"]) == ("Equals", "PASSED")
    field = condition["key"].strip("{ }")
    for verdict, admitted in ((Verdict.PASS, True), (Verdict.INCONCLUSIVE, False), (Verdict.FAIL, False)):
        artifact = SimpleNamespace(id="a", sha256="1")
        record: Any = SimpleNamespace(verdict=verdict, waived=(), criteria=(), dossier_name="d", artifact=artifact)
        judged_by: Any = SimpleNamespace(sha256="0")
        statement: Any = make_statement("2", judged_by, record)
        assert (statement["predicate"][field] == condition["value"]) == admitted


def test_the_workflow_takes_the_predicate_out_of_the_envelope_that_attest_writes():
    """The fields that `jq` is given are those of a DSSE envelope and of an in-toto statement."""
    pytest.importorskip("securesystemslib", reason="securesystemslib is not installed: the extra `attest`")
    from securesystemslib.dsse import Envelope

    document = yaml.safe_load((WORKFLOW.parent / "attest.yml").read_text())
    [text] = [step["run"] for step in document["jobs"]["attest"]["steps"] if "cosign attest" in step.get("run", "")]
    outer, inner = re.findall(r"jq (?:-r )?\.(\w+)", text)
    statement = {"predicate": {"result": "PASSED"}}
    envelope = Envelope(json.dumps(statement).encode(), "application/vnd.in-toto+json", {}).to_dict()
    assert json.loads(base64.b64decode(envelope[outer]))[inner] == statement["predicate"]
