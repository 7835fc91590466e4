"""The equivalent trtexec command: every option has its flag, and every flag exists."""

import pytest
from tests.fakes.console import text_of
from tests.fakes.entries import artifact_info

from optpipe.backends.tensorrt_builder import BuilderOptions, list_builder_flags, list_shape_flags
from optpipe.core.card import InputSpec, ModelCard, Task
from optpipe.core.entries import ArtifactInfo, GraphInfo, ModelInfo, WeightsRecord
from optpipe.core.errors import BadInputError
from optpipe.core.events import SilentListener
from optpipe.core.precision import Precision
from optpipe.core.records import plain_from_record
from optpipe.models.artifacts.lookup import command_from_artifact
from optpipe.models.document import document_from_tool_command
from optpipe.workspace.files import write_json
from optpipe.workspace.store import Store

TRTEXEC_11 = {
    "--onnx", "--saveEngine", "--minShapes", "--optShapes", "--maxShapes", "--profile", "--noTF32", "--memPoolSize",
    "--builderOptimizationLevel", "--hardwareCompatibilityLevel", "--maxAuxStreams", "--tacticSources", "--timingCacheFile",
    "--sparsity", "--versionCompatible", "--refit", "--stripWeights", "--dynamicPlugins", "--profilingVerbosity", "--skipInference",
}  # fmt: skip
"""Of `trtexec --help`, samples/common/sampleOptions.cpp in NVIDIA/TensorRT at 11.1; `tensorrt_rtx` adds --computeCapabilities."""
IMAGE = InputSpec("image", "float32", (1, 3, 8, 8), (8, 3, 8, 8), (64, 3, 8, 8))
SCALE = InputSpec("scale", "float32", (1,), (1,), (1,), batch=None)
ALL = BuilderOptions(
    workspace_bytes=1 << 26, optimization_level=5, hardware_compatibility="ampere+", version_compatible=True, refit=True,
    strip_weights=True, sparse_weights=True, aux_streams=2, tactic_sources="-JIT_CONVOLUTIONS", timing_cache="/tmp/a cache",
)  # fmt: skip


def test_every_option_has_a_flag_that_trtexec_has() -> None:
    flags = list(list_builder_flags(ALL, Precision.FP16, "tensorrt"))
    assert {flag.partition("=")[0] for flag in flags} <= TRTEXEC_11
    assert flags == [
        "--noTF32", "--memPoolSize=workspace:67108864B", "--builderOptimizationLevel=5", "--hardwareCompatibilityLevel=ampere+",
        "--maxAuxStreams=2", "--tacticSources=-JIT_CONVOLUTIONS", "--timingCacheFile=/tmp/a cache", "--sparsity=enable",
        "--versionCompatible", "--refit", "--stripWeights",
    ]  # fmt: skip
    assert list(list_builder_flags(BuilderOptions(), Precision.TF32, "tensorrt")) == []
    rtx = BuilderOptions(compute_capabilities="8.6,12.0")
    assert list(list_builder_flags(rtx, Precision.TF32, "tensorrt-rtx")) == ["--computeCapabilities=86,120"]


def test_shapes_are_given_for_what_changes_and_once_for_each_profile() -> None:
    assert list(list_shape_flags(BuilderOptions(), (IMAGE, SCALE))) == [
        "--minShapes=image:1x3x8x8", "--optShapes=image:8x3x8x8", "--maxShapes=image:64x3x8x8",
    ]  # fmt: skip
    assert list(list_shape_flags(BuilderOptions(), (SCALE,))) == []
    several = list(list_shape_flags(BuilderOptions(profiles="1:1:1,1:32:64"), (IMAGE, SCALE)))
    assert several[:2] == ["--profile=0", "--minShapes=image:1x3x8x8"]
    assert several[3:6] == ["--maxShapes=image:1x3x8x8", "--profile=1", "--minShapes=image:1x3x8x8"]


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path)


def artifact_in(store, backend="tensorrt", **options):
    weights = WeightsRecord("file", "0" * 64)
    card = ModelCard("digits", "card:digits", Task.OTHER, (IMAGE,))

    def make_model(folder):
        write_json(folder / "card.json", card.to_dict())
        return ModelInfo("digits", "card:digits", weights, simplified=True, own_precision=None)

    model, _ = store.produce(ModelInfo, {"of": "model"}, make_model, listener=SilentListener())
    graph, _ = store.produce(
        GraphInfo, {"of": "graph"}, lambda _: GraphInfo(Precision.FP16), parents=(model.id,), listener=SilentListener()
    )

    def make(folder):
        (folder / "model.engine").write_bytes(b"engine")
        (folder / "plugin-0-mine.so").write_bytes(b"code")
        details = {"gpu": None, "builder": plain_from_record(BuilderOptions(**options))}
        return artifact_info(backend=backend, precision="fp16", device="cuda", file="model.engine", details=details)

    recipe, parents = {"of": backend}, (model.id, graph.id)
    return store.produce(ArtifactInfo, recipe, make, parents=parents, listener=SilentListener())[0], graph


def test_the_command_is_ready_to_paste(store) -> None:
    artifact, graph = artifact_in(store, timing_cache="/data/a cache")
    text = text_of(document_from_tool_command(command_from_artifact(artifact.id, "trtexec", store)), width=400)
    assert text.splitlines() == [
        "# fp16 is in the graph: networks are strongly typed",
        "trtexec \\",
        f"  --onnx={graph.path}/model.onnx \\",
        "  --saveEngine=model.engine \\",
        "  --minShapes=image:1x3x8x8 \\",
        "  --optShapes=image:8x3x8x8 \\",
        "  --maxShapes=image:64x3x8x8 \\",
        "  --noTF32 \\",
        "  '--timingCacheFile=/data/a cache' \\",
        f"  --dynamicPlugins={artifact.path}/plugin-0-mine.so \\",
        "  --profilingVerbosity=detailed \\",
        "  --skipInference",
    ]


def test_what_trtexec_cannot_build_is_refused(store) -> None:
    artifact, graph = artifact_in(store, backend="onnxruntime")
    with pytest.raises(BadInputError, match="artifact of onnxruntime"):
        command_from_artifact(artifact.id, "trtexec", store)
    with pytest.raises(BadInputError, match="--as trtexec needs an artifact"):
        command_from_artifact(graph.id, "trtexec", store)
