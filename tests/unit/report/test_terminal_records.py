"""Whole texts of build, doctor, evaluate, calibrate, ls, show and gc."""

from dataclasses import replace

from tests.fakes.console import text_of
from tests.fakes.entries import artifact_info, proof
from tests.fakes.golden import assert_golden

from optpipe.build.doctor import ToolStatus, list_options
from optpipe.build.document import document_from_build, document_from_diagnosis, document_from_options
from optpipe.build.records import ArtifactResult, BuildResult, Omission
from optpipe.core.entries import (
    EngineLayer,
    EngineLayers,
    Environment,
    LintFinding,
    LintSummary,
    SkippedLayer,
    VerificationInfo,
    WeightsRecord,
)
from optpipe.core.errors import ExitStatus
from optpipe.core.precision import (
    Budget,
    KeptLayer,
    LayerType,
    MixedPrecision,
    PlacedNode,
    Placement,
    Precision,
    PrecisionCost,
    PrecisionProof,
    PrecisionShare,
)
from optpipe.core.records import plain_from_record
from optpipe.core.verdict import Verdict
from optpipe.evaluate.document import document_from_evaluation
from optpipe.evaluate.result import Accuracy, Agreement, Dataset, EvaluatedModel, Evaluation
from optpipe.models.artifacts.housekeeping import (
    EntryDetails,
    EntrySummary,
    Removal,
    RunDetails,
    RunSummary,
    StoreListing,
)
from optpipe.models.document import document_from_entry, document_from_listing, document_from_removal, document_from_run
from optpipe.quantize.calibration_run import CalibrationResult, CalibrationSet, MethodResult
from optpipe.quantize.document import document_from_calibration
from optpipe.quantize.sensitivity import KeptTrial, LayerCost, SelectionInfo, SensitivityInfo
from optpipe.workspace.entry import Manifest
from optpipe.workspace.files import FileHash

HASH, OTHER = "a1b2c3d4e5f6" + "0" * 52, "0" * 64
FINDING = LintFinding("reformat", "conv7", "floating point between INT8 layers", "quantize its input")
WRONG = PrecisionProof(
    PrecisionShare({}, {"fp16": 0.6, "fp32": 0.4}, 1000), False, "60.0% of MACs in fp16, 80% required",
    (LayerType("fc", "Gemm", "fp32", 400),), 3,
)  # fmt: skip

MIXED = MixedPrecision(
    Budget(0.5, "points"), "top1", 500, PrecisionCost(62.61, 0.002, (-0.001, 0.005)),
    (KeptLayer("norm/Pow", "Pow", 0, "alone turns outputs into NaN or Inf"),
     KeptLayer("conv5", "Conv", 37_700_000, "its weights come near the end of FP16's range")), 424_000_000,
)  # fmt: skip


def verified(**changes):
    known = {
        "reference": "source model", "samples": 800, "tolerance_relative": 0.02, "snr_db": 61.2, "top1_agreement": 0.99,
        "top1_accuracy": 0.9875, "source_top1_accuracy": 0.99, "outputs": (), "values": 8000, "passed": True,
    }  # fmt: skip
    return VerificationInfo(**{**known, **changes})


def built(ident, backend, precision, **changes):
    known = {
        "path": "p", "sha256": HASH, "size_bytes": 705_000, "build_seconds": 1.25, "why_not": None,
        "precision_proof": proof(precision), "lint": LintSummary(), "parity": verified(),
    }  # fmt: skip
    return ArtifactResult(ident, backend, Precision(precision), "cuda", **{**known, **changes})


def test_a_build():
    artifacts = (
        built("0123456789ab", "tensorrt", "fp16"),
        built("1123456789ab", "onnxruntime", "int8", lint=LintSummary({"reformat": 3}, (FINDING,)),
              parity=verified(passed=False, snr_db=3.2)),
        built("2123456789ab", "torch", "fp16", precision_proof=WRONG, parity=verified(snr_db=None, top1_accuracy=None),
              kept=(SkippedLayer("fc", "its weights are not constant"),)),
        built("3123456789ab", "tensorrt-rtx", "fp16", why_not="no NVIDIA GPU on this machine", parity=None, mixed=MIXED),
    )  # fmt: skip
    found = BuildResult(
        "digits", "card:digits", "m", WeightsRecord("random", HASH, 0, "3 of 8 tensors, first conv1"), "default",
        "no network", artifacts, (Omission("inductor", "int8", "has no int8 kernels on cuda", ExitStatus.MISSING),),
        (Omission("torch", "bf16", "out of memory", ExitStatus.STAGE_FAILED),), (), (), ExitStatus.FAIL,
    )  # fmt: skip
    assert_golden(text_of(document_from_build(found)), "build.txt")


def test_a_diagnosis():
    found = (
        ToolStatus("GPU", False, None, "tuned engines", None, "requires an NVIDIA GPU"),
        ToolStatus("backend onnxruntime", True, "1.31.1", "ONNX inference", "cuda: no NVIDIA GPU on this machine"),
        ToolStatus("nsys", False, None, "profiling", "/usr/bin/nsys failed to run", "`apt-get install nsight-systems`"),
    )
    assert_golden(text_of(document_from_diagnosis(found)), "doctor.txt")


def test_the_options_of_all_backends():
    assert_golden(text_of(document_from_options(list_options())), "doctor-options.txt")


def evaluation(kind="images", *, labeled=True):
    accuracy = Accuracy(0.985, (0.97, 0.99), 0.999, 0.98, 0.004, (-0.001, 0.009), 0.005, (-0.002, 0.012), 9, 5, 0.42)
    source = EvaluatedModel("source", "source", "cpu", 800, accuracy=accuracy if labeled else None)
    rows = (
        source,
        EvaluatedModel("onnxruntime", "int8", "cpu", 800, "0123456789ab", snr_db=31.4,
                       agreement=Agreement(0.99, (0.98, 0.995), ()), accuracy=accuracy if labeled else None,
                       verdict=Verdict.INCONCLUSIVE),
        EvaluatedModel("onnxruntime", "fp32", "cpu", 800, "1123456789ab", verdict=Verdict.PASS),
        EvaluatedModel("tensorrt", "fp16", "cuda", 800, "2123456789ab", why_not="no NVIDIA GPU on this machine"),
        EvaluatedModel("torch", "fp32", "cpu", 800, "3123456789ab", why_not="model.pt2: changed", failed=True),
    )  # fmt: skip
    dataset = Dataset("digits/validation", kind, HASH, 800, (), labeled, 10)
    weights = WeightsRecord("file" if labeled else "random", HASH)
    return Evaluation("digits", "card:digits", "m", weights, dataset, 0.01, rows, "/w/runs/evaluate-1")


def test_an_evaluation():
    assert evaluation().status is ExitStatus.STAGE_FAILED
    text = text_of(document_from_evaluation(evaluation()), document_from_evaluation(evaluation("texts", labeled=False)))
    assert_golden(text, "evaluate.txt")


def test_a_calibration():
    cost, constant = PrecisionCost(24.31, 0.0125, (0.004, 0.021)), PrecisionCost(200.0)
    selection = SelectionInfo(
        Budget(0.5, "points"), 500, "top1", ("conv1",), 12, (KeptTrial(0, 1.0, cost), KeptTrial(1, 0.93, constant))
    )
    found = CalibrationResult(
        model="digits",
        model_id="m",
        weights=WeightsRecord("file", HASH),
        set=CalibrationSet("digits/calibration", "images", 500, 0, HASH, "/w/set.json", ()),
        target="tensorrt",
        tables=(MethodResult("max", "/w/max.json", OTHER, constant), MethodResult("mse", "/w/mse.json", OTHER, cost)),
        best="mse",
        compared_on_images=128,
        skipped=tuple(SkippedLayer(f"conv{index}", "fewer than 16 channels") for index in range(14)),
        lint=(FINDING,),
        sensitivity=SensitivityInfo(128, (LayerCost("conv1", cost, 1_200_000),), 10_000_000),
        selection=selection,
        table="/w/table-mse-spared.json",
    )
    assert_golden(text_of(document_from_calibration(found)), "calibrate.txt")


def test_what_is_stored():
    entry = EntrySummary("0123456789ab", "artifact", "digits", "onnxruntime", "fp32", "cpu", 705_000,
                         "2026-11-22T10:50:20+00:00", "/w/store/artifact-0123456789ab")  # fmt: skip
    run = RunSummary("bench-1", "bench", "interrupted", "optpipe bench digits", 103_000, "/w/runs/bench-1")
    listing = StoreListing("/w", (entry,), ("graph-0f",), (run,))
    files, environment = {"model.onnx": FileHash(HASH, 705_000)}, Environment(packages={"onnx": "1.23.2"})
    info = plain_from_record(artifact_info(precision_proof=WRONG, mixed=MIXED))
    manifest = Manifest(
        "artifact",
        entry.id,
        {},
        ("m", "m"),
        files,
        info,
        environment,
        "optpipe build digits",
        "2026-11-22T10:50:17.5+00:00",
        entry.created,
    )
    made = Manifest("bench", "1", None, (entry.id,), files, {}, environment, "optpipe bench digits",
                    "2026-11-22T10:50:20", "2026-11-22T10:51:20", "interrupted")  # fmt: skip
    parts = (
        document_from_listing(listing),
        document_from_entry(EntryDetails(entry, manifest)),
        document_from_run(RunDetails(run, made)),
        document_from_removal(Removal(("graph-0f",), 2048, True, 1024)),
    )
    assert_golden(text_of(*parts), "stored.txt")


def test_the_layers_of_an_engine():
    entry = EntrySummary("0123456789ab", "artifact", "digits", "tensorrt", "int8", "cuda", 705_000,
                         "2026-11-22T10:50:20+00:00", "/w/store/artifact-0123456789ab")  # fmt: skip
    placement = Placement(
        "CUDAExecutionProvider", 61, 2, 0.004,
        (PlacedNode("odd\x1b", "ConvInteger", "CPUExecutionProvider", 0.004), PlacedNode("top", "TopK", "CPUExecutionProvider", 0.0)),
    )  # fmt: skip
    info = plain_from_record(artifact_info(precision_proof=replace(proof("int8"), placement=placement)))
    manifest = Manifest(
        "artifact",
        entry.id,
        {},
        (),
        {},
        info,
        Environment(),
        "optpipe build digits",
        "2026-11-22T10:50:17.5+00:00",
        entry.created,
    )
    first = EngineLayer("conv1 + relu1", "CaskConvolution", ("Int8 NHWC",), ("Int8 NHWC",), "sm90_xmma_fprop")
    rest = tuple(EngineLayer(f"copy{index}", "NoOp", ("fp32", "int32"), ("fp32",)) for index in range(21))
    layers = EngineLayers("engine inspector", (first, *rest))
    skipped = (SkippedLayer("conv\x1b", "3 input channels: INT8 kernels pad them to 16"),)
    assert_golden(
        text_of(document_from_entry(EntryDetails(entry, manifest, layers, kept=skipped))), "engine-layers.txt"
    )
