"""The example CI workflow is YAML, its commands are ours, and what it keeps is what they write."""

import base64
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from optpipe.core.verdict import Verdict
from optpipe.deploy.attest import FILE, TEST_RESULT, make_statement
from tests.command_line import parse_command

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
