"""The InferenceService is one that KServe's API takes, with resources that follow from the measurements."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest
import yaml
from tests.fakes.entries import artifact_info
from tests.fakes.measurements import planted

from optpipe.core.entries import Environment
from optpipe.core.errors import BadInputError
from optpipe.core.measurement import Subject
from optpipe.deploy.choices import Settings
from optpipe.deploy.kserve import CONTAINERFILE, MANIFEST, ServicePlan, plan_service, write_service
from optpipe.measure.groups import RecordedMeasurement

SCHEMA = json.loads((Path(__file__).parents[2] / "fakes" / "kserve_v1beta1.schema.json").read_text())


def written(folder, *, device="cpu", options=None, peak=300 << 20, name="Net_v2.1", plan=None, backend="onnxruntime"):
    subject = Subject("abc", "onnxruntime", "fp32", device, options=options or {})
    one = replace(planted(subject, 8, 2.0, low=1.0, high=1.0), host_peak_bytes=peak)
    preprocessing = SimpleNamespace(info=SimpleNamespace(plan=SimpleNamespace(threads=2, device="cpu")))
    build: Any = SimpleNamespace(
        artifact=SimpleNamespace(info=artifact_info(device=device), sha256=lambda _: "0" * 64),
        card=SimpleNamespace(name=name),
        reference=SimpleNamespace(name="net: 'a' \"b\"", sha256="1" * 64, verdict="PASS"),
        measured=(RecordedMeasurement(one, "bench-1", Environment(cpu_count=16)),) if peak else (),
        preprocessing=preprocessing,
    )
    settings = Settings(8, (8,), 0, 3, options or {}, ())
    choices = write_service(build, settings, plan or ServicePlan("s3://models/net"), backend, folder)
    document = yaml.safe_load((folder / MANIFEST).read_text())
    jsonschema.validate(document, SCHEMA)
    return document, {each.setting: each for each in choices}


def test_the_manifest_is_one_of_kserve_s_api_and_says_what_was_signed_off(tmp_path):
    document, _ = written(tmp_path, options={"threads": 2})
    model = document["spec"]["predictor"]["model"]
    assert document["metadata"]["name"] == "net-v2-1"
    assert document["metadata"]["annotations"]["optpipe/dossier"] == "net: 'a' \"b\""
    assert (model["modelFormat"]["name"], model["protocolVersion"]) == ("triton", "v2")
    assert model["storageUri"] == "s3://models/net"
    assert "image" not in model
    assert not (tmp_path / CONTAINERFILE).exists()
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**document, "spec": {"predictor": {"model": {**model, "storageURI": "x"}}}}, SCHEMA)


def test_resources_follow_from_what_was_measured(tmp_path):
    document, choices = written(tmp_path, options={"threads": 2})
    resources = document["spec"]["predictor"]["model"]["resources"]
    assert resources["requests"] == resources["limits"] == {"cpu": "8", "memory": f"{2048 + 3 * 300}Mi"}
    assert "run bench-1" in choices["resources.memory"].source
    document, _ = written(tmp_path)
    assert document["spec"]["predictor"]["model"]["resources"]["limits"]["cpu"] == "18", "16 cores and 2 threads"
    document, _ = written(tmp_path, device="cuda")
    limits = document["spec"]["predictor"]["model"]["resources"]["limits"]
    assert (limits["nvidia.com/gpu"], limits["cpu"]) == ("1", "5")


def test_an_oci_image_gets_its_containerfile_and_a_python_backend_needs_an_image(tmp_path):
    written(tmp_path, plan=ServicePlan("oci://registry.example.com/net:1", "triton:26.05"), backend="python")
    assert (tmp_path / CONTAINERFILE).read_text() == "FROM busybox:stable\nCOPY models /models\n"
    with pytest.raises(BadInputError, match="pass --image"):
        written(tmp_path, backend="python")


@pytest.mark.parametrize("uri", [None, "models/net", "s3://", "ftp://host/net", "s3://models/my net"])
def test_a_uri_that_kserve_refuses_is_refused(uri):
    with pytest.raises(BadInputError, match="--storage-uri"):
        plan_service(uri, None)
