"""Trackers: what arrives is what the dossier states, and a tracker that fails takes no verdict with it."""

import shutil
import sys

import pytest
import yaml

from optpipe.core.errors import BadInputError, MissingError, StageError
from optpipe.core.events import SilentListener
from optpipe.core.files import Files
from optpipe.core.records import record_from_files
from optpipe.core.verdict import VerdictRecord
from optpipe.deploy.trackers import registry
from optpipe.deploy.trackers.contract import Tracker
from optpipe.deploy.trackers.registry import (
    TRACKERS,
    export_after_signoff,
    export_dossier,
    read_tracker_plugin,
    require_tracker,
)

POLICY = b"schema = 1\n[build]\nprecision = 'fp16'\n[latency]\np50 = '20 ms'\nbatch_size = 1\nmode = 'compute'\n"


@pytest.fixture(scope="module")
def dossier(tmp_path_factory, make_workspace):
    workspace = make_workspace(tmp_path_factory.mktemp("trackers") / "work")
    workspace.bench(workspace.artifact("fp16"))
    return workspace.release(POLICY, workspace.path.parent / "dossier")


def read_verdict(folder):
    return record_from_files(Files(folder), "verdict.json", VerdictRecord)


def find_p50(folder):
    return next(one for one in read_verdict(folder).criteria if one.name.startswith("latency.p50"))


def test_a_model_card_keeps_what_is_there_and_is_written_twice_alike(dossier, tmp_path):
    pytest.importorskip("huggingface_hub")
    card = tmp_path / "README.md"
    card.write_text("---\nlicense: mit\n---\n# Ours\n\nOur own text.\n")
    assert export_dossier(dossier, "model-card", card) == str(card)
    first = card.read_text()
    export_dossier(dossier, "model-card", card)
    assert card.read_text() == first
    _, head, body = first.split("---\n", 2)
    data = yaml.safe_load(head)
    assert data["license"] == "mit"
    assert "Our own text." in body
    (model,) = data["model-index"]
    found = {metric["type"]: metric for result in model["results"] for metric in result["metrics"]}
    judged = find_p50(dossier)
    metric = found[judged.name]
    assert metric["value"] == judged.observed
    assert (metric["args"]["low"], metric["args"]["high"]) == judged.ci
    assert str(read_verdict(dossier).verdict) in body


def test_without_a_name_the_card_lies_beside_the_dossier_and_replaces_no_other_file(
    dossier, tmp_path, monkeypatch
):
    pytest.importorskip("huggingface_hub")
    copy = shutil.copytree(dossier, tmp_path / "release" / "digits")
    readme = tmp_path / "README.md"
    readme.write_text("ours")
    monkeypatch.chdir(tmp_path)
    card = copy.with_name("digits.model-card.md")
    assert export_dossier(copy, "model-card") == str(card)
    first = card.read_text()
    assert export_dossier(copy, "model-card") == str(card)
    assert (card.read_text(), readme.read_text()) == (first, "ours")
    card.write_text("a user's own notes")
    with pytest.raises(StageError, match="is not from an export"):
        export_dossier(copy, "model-card")
    assert card.read_text() == "a user's own notes"


@pytest.mark.slow
def test_mlflow_has_the_figures_the_dossier_and_the_verdict(dossier, tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.chdir(tmp_path)
    mlflow.set_tracking_uri(None)
    export_dossier(dossier, "mlflow")
    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name("optpipe")
    (run,) = client.search_runs([experiment.experiment_id])
    judged = find_p50(dossier)
    assert run.data.metrics[judged.name] == judged.observed
    assert run.data.metrics[f"{judged.name}.low"] == judged.ci[0]
    assert run.data.params["precision"] == "fp16"
    assert {each.path for each in client.list_artifacts(run.info.run_id, "dossier")} >= {
        "dossier/verdict.json",
        "dossier/SHA256SUMS",
    }
    (version,) = client.search_model_versions("name='digits'")
    assert version.tags["optpipe.verdict"] == str(read_verdict(dossier).verdict)
    assert run.info.status == "FINISHED"


@pytest.mark.slow
def test_an_offline_run_of_wandb_is_written(dossier, tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    said = export_dossier(dossier, "wandb", tmp_path / "runs")
    assert said.startswith("offline run")
    assert [*(tmp_path / "runs").rglob("*.wandb")]


class Broken(Tracker):
    name = "broken"

    def send(self, export):
        raise ConnectionError("no such server")


def test_a_tracker_that_fails_says_so(dossier, monkeypatch):
    monkeypatch.setitem(TRACKERS, "broken", Broken())
    with pytest.raises(StageError, match="no such server"):
        export_dossier(dossier, "broken")


def test_a_changed_dossier_is_not_exported(dossier, tmp_path, monkeypatch):
    monkeypatch.setitem(TRACKERS, "broken", Broken())
    changed = tmp_path / "changed"
    shutil.copytree(dossier, changed)
    (changed / "verdict.json").write_bytes((changed / "verdict.json").read_bytes() + b" ")
    with pytest.raises(BadInputError, match="nothing was exported"):
        export_dossier(changed, "broken")


def test_an_unknown_tracker_and_one_without_its_library_are_refused(monkeypatch):
    with pytest.raises(BadInputError, match="trackers are mlflow, wandb, model-card"):
        require_tracker("nowhere")
    monkeypatch.setattr(registry, "find_spec", lambda _: None)
    with pytest.raises(MissingError, match="pip install"):
        require_tracker("mlflow")


@pytest.mark.parametrize("seconds", [0.01, 60.0])
def test_after_a_sign_off_a_slow_or_absent_tracker_is_a_warning(dossier, monkeypatch, seconds):
    monkeypatch.setattr(sys, "executable", "/bin/false" if seconds > 1 else sys.executable)
    listener = SilentListener()
    assert export_after_signoff(dossier, ("model-card",), listener, seconds) == {}
    assert "was not exported to model-card" in listener.warnings[0]
    assert "signoff export" in listener.warnings[0]


def test_an_interrupted_export_ends_no_sign_off_and_no_further_tracker_is_waited_for(
    dossier, monkeypatch
):
    asked = []

    def interrupt(_folder, name, _seconds):
        asked.append(name)
        raise KeyboardInterrupt

    monkeypatch.setattr(registry, "_export_apart", interrupt)
    listener = SilentListener()
    assert export_after_signoff(dossier, ("mlflow", "model-card"), listener) == {}
    assert asked == ["mlflow"]
    assert ["interrupted" in each for each in listener.warnings] == [True, True]


def test_a_plug_in_has_its_name_and_a_send():
    assert read_tracker_plugin("broken", Broken).name == "broken"
    with pytest.raises(BadInputError):
        read_tracker_plugin("other", Broken)
    with pytest.raises(BadInputError):
        read_tracker_plugin("broken", object())
