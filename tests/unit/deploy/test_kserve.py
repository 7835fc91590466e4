"""The InferenceService that is written for KServe, against the fields of its custom resource definition."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.entries import artifact_info
from tests.fakes.measurements import planted

from optpipe.core.entries import Environment
from optpipe.core.errors import BadInputError
from optpipe.core.measurement import Subject
from optpipe.deploy.deploy import make_service
from optpipe.deploy.kserve import MANIFEST, InferenceService, name_service, write_service
from optpipe.measure.groups import RecordedMeasurement

SCHEMA = json.loads((Path(__file__).parents[2] / "fakes/kserve_v1beta1.schema.json").read_text())


def make_build(name: str = "Net_v2.1", device: Any = "cpu", measured: bool = True) -> Any:
    subject = Subject("abc", "onnxruntime", "fp32", device, options={})
    measurement = replace(planted(subject, 8, 2.0, low=1.0, high=1.0), host_peak_bytes=300 << 20)
    plan = SimpleNamespace(threads=2, device="cpu")
    return SimpleNamespace(
        artifact=SimpleNamespace(info=artifact_info(device=device), sha256=lambda _: "0" * 64),
        card=SimpleNamespace(name=name),
        reference=SimpleNamespace(name="net: 'a' \"b\"", sha256="1" * 64, verdict="PASS"),
        measured=(RecordedMeasurement(measurement, "bench-1", Environment(cpu_count=16)),)
        if measured
        else (),
        place=Environment(cpu_count=16),
        preprocessing=SimpleNamespace(info=SimpleNamespace(plan=plan)),
    )


def write(folder: Path, build: Any, threads: int = 0, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
    service = InferenceService("s3://models/net", kwargs.pop("image", None))
    backend = kwargs.pop("backend", "onnxruntime")
    choices = write_service(build, service, threads, backend, folder)
    document = yaml.safe_load((folder / MANIFEST).read_text())
    jsonschema.validate(document, SCHEMA)
    return document, {each.setting: each for each in choices}


def test_the_manifest_is_one_of_kserve_s_api_and_says_what_was_signed_off(tmp_path: Path) -> None:
    document, _ = write(tmp_path, make_build(), threads=2)
    model = document["spec"]["predictor"]["model"]
    assert document["metadata"]["name"] == "net-v2-1"
    assert document["metadata"]["annotations"]["optpipe/dossier"] == "net: 'a' \"b\""
    assert (model["modelFormat"]["name"], model["protocolVersion"]) == ("triton", "v2")
    assert model["storageUri"] == "s3://models/net"
    assert "image" not in model
    wrong = {**document, "spec": {"predictor": {"model": {**model, "storageURI": "x"}}}}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(wrong, SCHEMA)


@pytest.mark.parametrize(
    ("device", "threads", "wanted"),
    [
        ("cpu", 2, {"cpu": "4", "memory": f"{2048 + 300}Mi"}),
        ("cpu", 0, {"cpu": "18"}),  # 16 cores and 2 threads that decode
        ("cuda", 0, {"cpu": "3", "nvidia.com/gpu": "1"}),
    ],
)
def test_resources_follow_from_what_was_measured(
    tmp_path: Path, device: str, threads: int, wanted: dict[str, str]
) -> None:
    document, choices = write(tmp_path, make_build(device=device), threads)
    resources = document["spec"]["predictor"]["model"]["resources"]
    assert wanted.items() <= resources["limits"].items() == resources["requests"].items()
    assert "run bench-1" in choices["resources.memory"].source


def test_what_was_not_measured_is_said(tmp_path: Path) -> None:
    _, choices = write(tmp_path, make_build(measured=False))
    assert "nothing was measured" in choices["resources.memory"].source


def test_a_python_backend_needs_an_image(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="pass --image"):
        write(tmp_path, make_build(), backend="python")
    assert not (tmp_path / MANIFEST).exists()
    document, _ = write(tmp_path, make_build(), image="triton:26.05", backend="python")
    assert document["spec"]["predictor"]["model"]["image"] == "triton:26.05"


@pytest.mark.parametrize(
    "uri", [None, "", "models/net", "s3://", "s3:///net", "s3://models/my net", "s3://a\nb"]
)
def test_a_uri_that_kserve_refuses_is_refused(uri: str | None) -> None:
    with pytest.raises(BadInputError, match="--storage-uri"):
        InferenceService(uri)


@pytest.mark.parametrize("image", ["", "my image", "a\nb"])
def test_text_that_names_no_image_is_refused(image: str) -> None:
    with pytest.raises(BadInputError, match="--image"):
        InferenceService("s3://models/net", image)


def test_arguments_that_do_not_belong_together_are_refused() -> None:
    with pytest.raises(BadInputError, match="needs --to kserve"):
        make_service("triton", "s3://models/net", None, tune=False)
    with pytest.raises(BadInputError, match="needs --to kserve"):
        make_service("folder", None, "", tune=False)
    with pytest.raises(BadInputError, match="--tune"):
        make_service("kserve", "s3://models/net", None, tune=True)
    assert make_service("triton", None, None, tune=True) is None


@given(st.text(min_size=1))
def test_every_model_name_gives_a_name_of_kserve(name: str) -> None:
    pattern = SCHEMA["properties"]["metadata"]["properties"]["name"]["pattern"]
    jsonschema.validate(name_service(name), {"type": "string", "pattern": pattern, "maxLength": 50})
