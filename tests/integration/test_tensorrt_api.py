"""Backend `tensorrt` through TensorRT 11.4's own Python bindings, over TensorRT-RTX's library: no GPU and no TensorRT here.

What is real of it and what is not: tests/fakes/tensorrt_api/README.md.
"""

import json
import os
import subprocess
import sys

import pytest

from optpipe.core.files import hash_file
from optpipe.workspace.environment import list_gpus
from tests.fakes.tensorrt_api.install import HERE, find_missing, install, make_environment
from tests.integration.conftest import Ran

pytestmark = pytest.mark.skipif(find_missing() is not None, reason=f"needs {find_missing()}")


@pytest.fixture(scope="session")
def environment(shared):
    """The environment of a process that imports `tensorrt`."""
    return {**os.environ, **make_environment(shared("tensorrt_api", install))}


def run_python(environment, *arguments, text=None, cwd=None):
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        env=environment,
        input=text,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
        cwd=cwd,
    )
    return Ran(done.returncode, done.stdout, done.stderr)


def build_cases(environment, folder, backend, cases):
    """What becomes of a small graph with each set of options."""
    folder.mkdir(exist_ok=True)
    ran = run_python(
        environment,
        "-m",
        "tests.fakes.tensorrt_api.build_case",
        folder,
        backend,
        text=json.dumps(cases),
        cwd=folder,
    )
    assert ran.status == 0, ran.stderr
    return json.loads(ran.stdout)


TAKEN = {
    "default": {},
    "optimization_level": {"optimization_level": "5"},
    "workspace_bytes": {"workspace_bytes": str(1 << 26)},
    "profiles": {"profiles": "1:1:1,1:32:32"},
    "sparse_weights": {"sparse_weights": "true"},
}
TAKEN_BY_TENSORRT = {
    "hardware_compatibility": {"hardware_compatibility": "ampere+"},
    "same_hardware": {"hardware_compatibility": "sameComputeCapability"},
}
TAKEN_BY_RTX = {
    "compute_capabilities": {"compute_capabilities": "8.6,12.0"},
    "turing": {"compute_capabilities": "7.5"},
}
REFUSED = {
    "profiles": ({"profiles": "1:8:64"}, 2, "1:8:64 is outside the batch range of x, 1 to 32"),
    "plugins": ({"plugins": "nothing.so"}, 2, "no such file: nothing.so"),
    "a folder of plugins": ({"plugins": "."}, 2, "no such file: ."),
}
NEEDS_A_GPU = {
    name: ({name: "true"}, 3, f"compiles engines with {name} on a GPU")
    for name in ("refit", "strip_plan")
}
REFUSED_BY_TENSORRT = {
    "compute_capabilities": (
        {"compute_capabilities": "8.6"},
        2,
        "hardware_compatibility widens that",
    ),
    "hardware_compatibility": (
        {"hardware_compatibility": "turing"},
        2,
        "choose from none, ampere+",
    ),
    "timing_cache": ({"timing_cache": "no/such/folder/cache"}, 2, "its folder does not exist"),
    "version_compatible": ({"version_compatible": "true"}, 4, "libnvinfer_lean"),  # RTX has none
}
REFUSED_BY_RTX = {
    "hardware_compatibility": (
        {"hardware_compatibility": "ampere+"},
        2,
        "compute_capabilities narrows that",
    ),
    "timing_cache": ({"timing_cache": "cache"}, 2, "it times no kernels when it builds"),
    "version_compatible": ({"version_compatible": "true"}, 2, "it has no lean runtime"),
    "refit for two": (
        {"compute_capabilities": "8.6,8.9", "refit": "1"},
        2,
        "at most one with refit",
    ),
    "compute_capabilities": (
        {"compute_capabilities": "9.0"},
        2,
        "does not build for 9.0; choose from 7.5, 8.0",
    ),
    "no numbers": ({"compute_capabilities": "ada"}, 2, "expected numbers such as 8.6"),
}


@pytest.mark.parametrize(
    ("backend", "taken", "refused"),
    [
        ("tensorrt", TAKEN | TAKEN_BY_TENSORRT, REFUSED | REFUSED_BY_TENSORRT),
        ("tensorrt-rtx", TAKEN | TAKEN_BY_RTX, REFUSED | REFUSED_BY_RTX),
    ],
)
def test_every_option_is_taken_or_refused_with_the_reason(
    environment, tmp_path, backend, taken, refused
) -> None:
    refused = refused if list_gpus() else refused | NEEDS_A_GPU
    cases = {f"taken {name}": case for name, case in taken.items()}
    cases |= {f"refused {name}": case for name, (case, _, _) in refused.items()}
    found = build_cases(environment, tmp_path, backend, cases)
    for name in taken:
        assert found[f"taken {name}"].get("proven"), (name, found[f"taken {name}"])
        key = {**found["taken default"]["key"], **found[f"taken {name}"]["key"]}
        same = key == found["taken default"]["key"]
        assert same == (name == "default"), "an option that changes the engine is in its key"
    for name, (_, status, text) in refused.items():
        assert text in found[f"refused {name}"]["error"], name
        assert found[f"refused {name}"]["status"] == status, name
    assert found["taken profiles"]["bytes"] > found["taken default"]["bytes"], (
        "an engine per profile"
    )


def compile_library(folder, name, source):
    (folder / f"{name}.c").write_text(source)
    library = folder / f"{name}.so"
    command = ["cc", "-shared", "-fPIC", "-o", library, folder / f"{name}.c"]
    subprocess.run(command, check=True)
    return library


NO_PLUGINS = """void *const *getCreators(int *n) { *n = 0; return 0; }
void *const *getPluginCreators(int *n) { *n = 0; return 0; }
void setLoggerFinder(void *f) { (void)f; }
"""


def test_plugins_are_stored_with_their_hashes_and_sparse_weights_are_named(environment, tmp_path):
    plugin = compile_library(tmp_path, "plugin", (HERE / "plugin.c").read_text())
    empty = compile_library(tmp_path, "empty", NO_PLUGINS)
    cases = {name: {"plugins": str(plugin)} for name in ("first", "second")}
    cases |= {"empty": {"plugins": str(empty)}, "dense": {}, "sparse": {"sparse_weights": "true"}}
    found = build_cases(environment, tmp_path / "work", "tensorrt", cases)
    for case in (found["first"], found["second"]):
        assert case["proven"], case
        assert case["more_files"] == ["plugin-0-plugin.so"]
        assert case["key"]["plugins"] == [f"plugin.so sha256 {hash_file(plugin)}"]
        assert str(tmp_path) not in json.dumps(case["details"]), "a record names no path"
    assert found["empty"]["status"] == 2
    assert "empty.so as a plugin library" in found["empty"]["error"]
    for name, said in (("dense", "sparse_weights=true lets"), ("sparse", "known on the GPU alone")):
        assert "1 of 2 convolutions" in found[name]["remarks"][0]
        assert said in found[name]["remarks"][0]


def test_the_timing_cache_is_one_file_for_all_builds(environment, tmp_path) -> None:
    cache, other = tmp_path / "timings", tmp_path / "notes.txt"
    other.write_text("not a timing cache, and not to be overwritten")
    cases = {name: {"timing_cache": str(cache)} for name in ("first", "second")}
    cases |= {"none": {}, "other": {"timing_cache": str(other)}}
    found = build_cases(environment, tmp_path / "work", "tensorrt", cases)
    assert cache.read_bytes().startswith(b"ptrtd")
    assert found["first"]["key"] == found["none"]["key"], (
        "where the cache lies says nothing about the engine"
    )
    assert "timing_cache" in found["other"]["error"]
    assert found["other"]["status"] == 2
    assert other.read_text().startswith("not a timing cache")
    assert sorted(path.name for path in tmp_path.iterdir() if "part" in path.name) == []


@pytest.fixture(scope="module")
def built(environment, exported, tmp_path_factory):
    """`digits` for backend `tensorrt` in all precisions."""
    folder = tmp_path_factory.mktemp("tensorrt")
    exported(folder / ".optpipe")
    ran = run_python(
        environment,
        "-m",
        "tests.fakes.tensorrt_api.run",
        "build",
        "digits",
        "--backend",
        "tensorrt",
        "--precision",
        "fp32,tf32,fp16,bf16,int8",
        "--json",
        cwd=folder,
    )
    assert ran.status == 0, ran.stderr + ran.stdout
    return folder, ran.document


def test_digits_is_built_and_proven_in_every_precision(built) -> None:
    folder, document = built
    assert [each["precision"] for each in document["artifacts"]] == [
        "fp32",
        "tf32",
        "fp16",
        "bf16",
        "int8",
    ]
    for each in document["artifacts"]:
        assert each["backend"] == "tensorrt"
        assert each["precision_proof"]["proven"], each
        assert each["precision_proof"]["share"]["macs"][each["precision"]] > 0.98
        assert (folder / each["path"]).stat().st_size == each["size_bytes"] > 10_000


@pytest.mark.skipif(bool(list_gpus()), reason="needs a machine without an NVIDIA GPU")
def test_loading_goes_as_far_as_the_missing_gpu(environment, built) -> None:
    folder, document = built
    program = """
import sys
from pathlib import Path
from optpipe.backends.tensorrt import TENSORRT
from optpipe.core.entries import ArtifactInfo
from optpipe.core.errors import StageError
from optpipe.workspace.store import Store
entry = Store(Path(".optpipe")).find(sys.argv[1], ArtifactInfo)
print(TENSORRT.find_run_blocker(entry.info))
try:
    TENSORRT.load(entry.path, entry.info, {"cuda_graph": "false"})
except StageError as error:
    print(error)
"""
    ran = run_python(environment, "-c", program, document["artifacts"][0]["id"], cwd=folder)
    assert "no NVIDIA GPU on this machine" in ran.stdout, ran.stderr
    assert "tensorrt 11.4.0.106 cannot load model.engine" in ran.stdout
    assert "CUDA driver version is insufficient" in ran.stdout, "the library's own reason"
    assert "[TRT]" not in ran.stdout + ran.stderr, (
        "what the library says is in the error, not printed beside --json"
    )
