"""Forgeries by someone who knows the format and seals the folder anew: found, or named as stated by nothing but one record."""

import json
import shutil

import pytest
from tests.fakes.console import text_of

from optpipe.core.events import SilentListener
from optpipe.core.files import Files
from optpipe.signoff.collect import SignoffRequest
from optpipe.signoff.dossier import read_dossier
from optpipe.signoff.policy import policy_from_toml
from optpipe.signoff.release import sign_off
from optpipe.signoff.verify import verify_dossier
from optpipe.workspace.entry import drop_folders
from optpipe.workspace.seal import seal_folder

POLICY = b"""schema = 1
[build]
precision = "fp16"
[[latency]]
p50 = "50 ms"
batch_size = 1
[precision]
fp16 = "80 %"
"""


@pytest.fixture
def dossier(signed_once, tmp_path):
    return shutil.copytree(signed_once, tmp_path / "one")


@pytest.fixture(scope="module")
def signed_once(make_workspace, tmp_path_factory):
    folder = tmp_path_factory.mktemp("forgeries")
    workspace = make_workspace(folder / "workspace")
    workspace.bench(workspace.artifact("fp16"), workspace.artifact("fp32"))
    wanted = SignoffRequest("digits", policy_from_toml(POLICY))
    signed = sign_off(wanted, workspace.store, folder / "one", None, SilentListener(), figures=False)
    checked = verify_dossier(signed.folder)
    assert checked.problems == checked.not_compared == ()
    return signed.folder


def artifact(folder):
    chosen = json.loads((folder / "request.json").read_text())["artifact"]
    return folder / "builds" / f"artifact-{chosen}" / "manifest.json"


def find_problems(folder):
    seal_folder(folder)
    return verify_dossier(folder).problems


def edit(path, *steps, value):
    document = inner = json.loads(path.read_text())
    for step in steps[:-1]:
        inner = inner[step]
    inner[steps[-1]] = value
    path.write_text(json.dumps(document))


def test_a_recipe_that_is_not_the_ids_is_found(dossier):
    edit(artifact(dossier), "recipe", "precision", value="fp16 ")
    assert any("but its recipe gives" in problem for problem in find_problems(dossier))


def test_weights_that_are_not_the_exported_models_are_found(dossier):
    edit(artifact(dossier), "info", "weights", "source", value="default:digits")
    assert any("its weights are not those of builds/model-" in problem for problem in find_problems(dossier))


def test_random_weights_relabeled_in_every_record_are_found(workspace, tmp_path):
    workspace.bench(workspace.artifact("fp16", trained=False))
    wanted = SignoffRequest("digits", policy_from_toml(POLICY))
    folder = sign_off(wanted, workspace.store, tmp_path / "one", None, SilentListener(), figures=False).folder
    for path in folder.glob("builds/*/manifest.json"):
        manifest = json.loads(path.read_text())
        if "weights" in manifest["info"]:
            edit(path, "info", "weights", "source", value="file")
    assert any("but its recipe says {'random': 0}" in problem for problem in find_problems(folder))


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("report.html", "<h1", "<script>1</script><h1"),
        ("report.html", "Ship digits", "Ship all digits"),
        ("report.md", "PASS", "pass"),
        ("junit.xml", 'failures="0"', 'failures="1"'),
        ("comparison.json", '"samples": 950', '"samples": 951'),
    ],
)
def test_a_report_that_was_rewritten_is_found(dossier, name, old, new):
    text = (dossier / name).read_text()
    assert old in text
    (dossier / name).write_text(text.replace(old, new, 1))
    problems = find_problems(dossier)
    assert len(problems) == 1
    assert problems[0].startswith(name)
    assert ("but the raw files give" if name == "comparison.json" else "that the raw files give") in problems[0]


def test_a_measurement_of_another_build_is_found(dossier):
    (path,) = dossier.glob("runs/bench-*/measurements.json")
    edit(path, "measurements", 1, "precision", value="int8")
    assert find_problems(dossier)


@pytest.mark.parametrize("file", ["notes.txt", "artifact/manifest.json", "builds/artifact-0/notes.txt"])
def test_a_file_that_is_no_part_of_a_dossier_is_found(dossier, file):
    (dossier / file).parent.mkdir(exist_ok=True)
    (dossier / file).write_text("{}")
    assert any(file in problem for problem in find_problems(dossier))


def test_a_bare_nan_where_nobody_reads_is_found(dossier):
    path = artifact(dossier)
    path.write_text(path.read_text().replace('"status":', '"extra": NaN, "status":', 1))
    assert find_problems(dossier)


def test_what_only_one_record_states_is_named(dossier):
    edit(next(dossier.glob("builds/verification-*/manifest.json")), "info", "samples", value=10_000)
    found = verify_dossier(dossier)
    assert found.problems, "the verdict quotes it"
    unbacked = list(verify_dossier_of(dossier))
    assert any(
        line.startswith("trust.weights, trust.precision, precision.fp16: stated by builds/artifact-")
        for line in unbacked
    )
    assert any(line.startswith("trust.outputs: stated by builds/verification-") for line in unbacked)
    assert any(line.startswith("hardware, driver and package versions: stated by") for line in unbacked)


@pytest.mark.parametrize(("max_cv", "said"), [(0.5, True), (0.025, False)])
def test_looser_limits_of_validity_than_usual_are_named(workspace, tmp_path, max_cv, said):
    workspace.bench(workspace.artifact("fp16"), max_cv=max_cv, noise=0.1)
    wanted, listener = SignoffRequest("digits", policy_from_toml(POLICY)), SilentListener()
    folder = sign_off(wanted, workspace.store, tmp_path / "one", None, listener, figures=False).folder
    (named,) = (each for each in verify_dossier(folder).unbacked if "looser limits" in each)
    assert ("max_cv 0.5 instead of 0.025" in named) == said
    assert [each in named for each in listener.warnings] == [True]


def verify_dossier_of(folder):
    from optpipe.signoff.judge import judge_dossier
    from optpipe.signoff.verify import list_unbacked

    return list_unbacked(read_dossier(Files(folder)), judge_dossier(read_dossier(Files(folder))).record)


def test_an_unsigned_dossier_says_what_it_proves(dossier):
    from tests.command_line import call

    from optpipe.cli.signoff import verify

    outcome = call(verify, dossier)
    assert outcome.status == 0
    assert outcome.document.unbacked
    said = text_of(outcome.show(outcome.document), width=200)
    assert "it proves that the folder agrees with itself, not who made it or where it was measured" in said
    assert "no raw file  trust.outputs: stated by builds/verification-" in said


def test_reports_of_another_version_are_said_not_to_be_compared(dossier):
    request, verdict = dossier / "request.json", dossier / "verdict.json"
    for path in (request, verdict):
        edit(path, "optpipe", value="0.0.9")
    (dossier / "report.html").write_text("anything")
    seal_folder(dossier)
    found = verify_dossier(dossier)
    assert found.problems == ()
    assert found.not_compared[0].startswith(
        "report.html, report.md, junit.xml, comparison.json: written by optpipe 0.0.9"
    )


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("optpipe bench /home/me/model.py:make --workspace /home/me/w", "optpipe bench model.py:make --workspace w"),
        ("optpipe build hf:/srv/models/bert --option a.b=/tmp/x", "optpipe build hf:bert --option a.b=x"),
        ("optpipe evaluate digits --data '/a b/c d/val'", "optpipe evaluate digits --data val"),
        ("optpipe run ~/m/model.onnx --policy ./p/policy.toml", "optpipe run model.onnx --policy ./p/policy.toml"),
        ("optpipe bench digits --rate 5", "optpipe bench digits --rate 5"),
    ],
)
def test_a_command_line_keeps_no_absolute_path(command, shown):
    assert drop_folders(command) == shown


def test_a_dossier_names_no_folder_of_the_machine(workspace, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["optpipe", "bench", "digits", "--workspace", str(workspace.path)])
    workspace.bench(workspace.artifact("fp16"))
    wanted = SignoffRequest("digits", policy_from_toml(POLICY))
    folder = sign_off(wanted, workspace.store, tmp_path / "one", None, SilentListener(), figures=False).folder
    for path in folder.rglob("*"):
        assert path.is_dir() or str(tmp_path).encode() not in path.read_bytes(), path
