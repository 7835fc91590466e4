"""The example CI workflow is YAML, its commands are ours, and what it keeps is what they write."""

import shlex
from pathlib import Path

import yaml
from typer.core import TyperGroup
from typer.main import get_command

from optpipe.cli import app

WORKFLOW = Path(__file__).parents[2] / "reports" / "examples" / "ci.yml"


def test_the_workflow_runs_commands_that_exist_and_keeps_what_they_write():
    document = yaml.safe_load(WORKFLOW.read_text())
    steps = document["jobs"]["signoff"]["steps"]
    assert all(set(step) <= {"name", "uses", "run", "with", "if"} for step in steps)
    lines = [step["run"] for step in steps if "run" in step]
    commands = [line.partition("uv run optpipe ")[2] for line in lines]
    contexts, group = {}, get_command(app)
    assert isinstance(group, TyperGroup)
    for command in commands:
        name, *arguments = shlex.split(command)
        arguments = [word if word != "dossier" else "." for word in arguments]  # it is there only after the run
        contexts[name] = group.commands[name].make_context(name, arguments)
    assert list(contexts) == ["run", "verify"]
    run = contexts["run"].params
    kept = next(step["with"]["path"].split() for step in steps if step.get("uses", "").startswith("actions/upload"))
    assert [str(run["output"]).replace(".", "dossier"), str(run["junit"])] == kept
    assert "always()" in str(steps[-1]["if"]), "a failed sign-off is the one whose dossier is wanted"


def test_the_attestation_examples_run_our_commands_and_ask_for_our_property():
    from optpipe.deploy.statements import PASS_PROPERTY, SVR

    examples = WORKFLOW.parent
    document = yaml.safe_load((examples / "attest.yml").read_text())
    lines = [step["run"] for step in document["jobs"]["attest"]["steps"] if "run" in step]
    commands = [line.partition("uv run optpipe ")[2] for line in lines if "uv run optpipe" in line]
    for command in commands:
        name, *arguments = shlex.split(command)
        arguments = ["." if word == "$DOSSIER" else word for word in arguments]
        group = get_command(app)
        assert isinstance(group, TyperGroup)
        group.commands[name].make_context(name, arguments)
    assert [command.split()[0] for command in commands] == ["attest", "verify"]
    assert any(SVR in line and "svr.dsse.json" in line for line in lines)
    policy = yaml.safe_load((examples / "kubernetes-admission.yaml").read_text())
    asked = policy["spec"]["rules"][0]["verifyImages"][0]["attestations"][0]
    assert asked["type"] == SVR
    assert asked["conditions"][0]["all"][0]["key"] == PASS_PROPERTY
