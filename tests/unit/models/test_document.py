"""Whole texts of what is stored."""

from dataclasses import replace

from tests.fakes.console import text_of
from tests.fakes.entries import HASH, MIXED, WRONG, artifact_info, proof
from tests.fakes.golden import assert_golden

from optpipe.core.entries import EngineLayer, EngineLayers, Environment, SkippedLayer
from optpipe.core.precision import PlacedNode, Placement
from optpipe.core.records import plain_from_record
from optpipe.models.artifacts.housekeeping import (
    EntryDetails,
    EntrySummary,
    Removal,
    RunDetails,
    RunSummary,
    StoreListing,
)
from optpipe.models.document import document_from_entry, document_from_listing, document_from_removal, document_from_run
from optpipe.workspace.entry import Manifest
from optpipe.workspace.files import FileHash


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
