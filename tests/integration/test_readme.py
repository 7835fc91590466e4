"""The commands of the README exist as written, and those of the tutorials and of the GitHub Action run."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from optpipe.signoff.bill import BILL, make_bill
from optpipe.signoff.verify import check_dossier
from tests.command_line import parse_command

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
TUTORIAL_BLOCK = re.compile(
    r"(?ms)^```\{code-block\} \w+\n:caption: (\S+)\n\n(.*?)^```|^```sh\n(.*?)^```"
)
COMMANDS = re.findall(
    r"\boptpipe [^#\n]+", "\n".join(re.findall(r"(?ms)^```sh\n(.*?)^```", README))
)


@pytest.mark.parametrize("line", COMMANDS)
def test_every_command_parses(line, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    parse_command(line)


def test_links_lead_somewhere():
    links = re.findall(r"\]\((?!https?:|#)([^)]+)\)", README)
    assert not [link for link in links if not (ROOT / link.partition("#")[0]).exists()]


def test_short_enough_to_be_read():
    """Both doors, the library and the command line, take 146 lines."""
    assert len(README.splitlines()) <= 150


WORKFLOW = ROOT / "reports" / "examples" / "ci.yml"


def run_shell(text, folder, **variables):
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    command, environment = (
        ["bash", "-eo", "pipefail", "-c", text],
        {**os.environ, **variables, "PATH": path},
    )
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    "page", sorted((ROOT / "docs" / "tutorials").glob("*.md")), ids=lambda page: page.stem
)
def test_a_tutorial_runs(page, tmp_path):
    """A verdict may be INCONCLUSIVE, for other work may disturb its measurements."""
    for name, content, commands in TUTORIAL_BLOCK.findall(page.read_text()):
        if name:
            (tmp_path / name).write_text(content)
        for line in commands.replace("\\\n", " ").splitlines():
            ran = run_shell(line, tmp_path)
            assert ran.returncode in ((0, 5) if "dossier" in line else (0,)), (
                f"{line}\n{ran.stderr}"
            )


def test_the_action_refuses_a_build_that_is_too_large(tmp_path, exported):
    """The shell code of each step runs as a runner would run it, and the example workflow gives inputs that exist."""
    action = yaml.safe_load((ROOT / "action.yml").read_text())
    exported(tmp_path / ".optpipe")
    text = 'schema = 1\nmodel = "digits"\n[build]\nprecision = "fp32"\n[size]\nmaximum = "1 KiB"\n'
    (tmp_path / "policy.toml").write_text(text)
    used = yaml.safe_load(WORKFLOW.read_text())["jobs"]["signoff"]["steps"][1]["with"]
    given = {
        **used,
        "baseline": ROOT / "reports/digits-cpu",
        "arguments": "--backend onnxruntime --no-preprocess --no-profile",
    }
    assert set(given) <= set(action["inputs"])
    values = {
        name: str(given.get(name, each.get("default"))) for name, each in action["inputs"].items()
    }
    files = {f"GITHUB_{each}": str(tmp_path / each) for each in ("OUTPUT", "PATH", "STEP_SUMMARY")}
    ended = []
    for step in (each for each in action["runs"]["steps"] if "run" in each):
        given = {key: values[text[11:-3].strip()] for key, text in step.get("env", {}).items()}
        ended.append(run_shell(step["run"], tmp_path, **files, **given))
    assert [each.returncode for each in ended] == [0, 0, 1, 1], ended
    assert (tmp_path / "OUTPUT").read_text() == "verdict=FAIL\n"
    assert "FAIL" in (tmp_path / "STEP_SUMMARY").read_text()
    assert "<failure" in (tmp_path / "dossier/junit.xml").read_text()


def test_the_attestation_examples_run_our_commands_and_ask_for_our_result():
    examples = WORKFLOW.parent
    document = yaml.safe_load((examples / "attest.yml").read_text())
    lines = [step["run"] for step in document["jobs"]["attest"]["steps"] if "run" in step]
    commands = [line.partition("uv run optpipe ")[2] for line in lines if "uv run optpipe" in line]
    assert [parse_command(f"optpipe {each}")[0] for each in commands] == [
        "signoff attest",
        "verify",
    ]
    assert any("--type cyclonedx" in line and f"attestations/{BILL}" in line for line in lines)
    policy = yaml.safe_load((examples / "kubernetes-admission.yaml").read_text())
    asked = policy["spec"]["rules"][0]["verifyImages"][0]["attestations"][0]
    assert asked["type"] == "https://cyclonedx.org/bom"
    keys = asked["attestors"][0]["entries"][0]["keys"]
    unlogged = any("--tlog-upload=false" in line for line in lines)
    assert keys["rekor"]["ignoreTlog"] == keys["ctlog"]["ignoreSCT"] == unlogged, (
        "what is not logged is not asked for"
    )
    [condition] = asked["conditions"][0]["all"]
    assert (condition["operator"], condition["value"]) == ("Equals", "PASSED")
    # tests/unit/signoff/test_bill.py holds the property against each verdict
    [name] = re.findall(r"metadata\.component\.properties\[\?name=='(.*?)'\]", condition["key"])
    content, verdict, _ = check_dossier(ROOT / "reports" / "digits-cpu").require_intact()
    component = json.loads(make_bill(content, verdict))["metadata"]["component"]
    found = {each["name"]: each["value"] for each in component["properties"]}
    assert (found[name] == "PASSED") == verdict.is_unqualified_pass
