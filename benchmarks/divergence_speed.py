"""Time of `evaluate --layers` over that of the two plain inferences: ResNet-50 (random weights), 8 samples, ONNX Runtime on the CPU.

python benchmarks/divergence_speed.py [WORKSPACE]      # all tensors; processor seconds; the ratio has to be at most 6
"""

import sys
from pathlib import Path
from tempfile import mkdtemp
from time import process_time

from optpipe.backends.base import BuildRequest
from optpipe.backends.onnxruntime_session import OnnxRuntimeSession
from optpipe.backends.registry import BACKENDS
from optpipe.build.build import build_model
from optpipe.build.plan import BuildPlan
from optpipe.core.card import card_from_file
from optpipe.core.entries import WeightsRequest
from optpipe.core.events import SilentListener
from optpipe.core.precision import Precision
from optpipe.evaluate.layers import choose_tensors, compare_tensors
from optpipe.models.export.exported import Model
from optpipe.models.inputs.rows import split_batches
from optpipe.models.inputs.samples import choose_samples, load_sample_inputs
from optpipe.models.sources.resolve import source_from_text
from optpipe.workspace.file_names import CARD, ONNX
from optpipe.workspace.store import Store

SAMPLES = 8
backend = BACKENDS["onnxruntime"]
store = Store(Path(sys.argv[1] if len(sys.argv) > 1 else mkdtemp()))
model = Model(source_from_text("resnet50", {}), WeightsRequest("random", 0))
plan = BuildPlan((Precision.FP32,), (backend,), named=True, device="cpu")
built = build_model(model, plan, store, SilentListener())
entry, exported = built.artifacts[0].entry, built.model
card = card_from_file(exported.file(CARD))
rows = load_sample_inputs(card, choose_samples(card, None, None, exported), exported)
samples = [batch for batch, _ in split_batches(card, rows, 1)][:SAMPLES]
request = BuildRequest(
    card, Precision.FP32, exported.file(ONNX), None, "cpu", entry.info.options, entry.path
)


def time_plain() -> tuple[float, float]:
    """Processor seconds with and without the opening of both sessions."""
    began = process_time()
    with (
        backend.load(entry.path, entry.info, {}) as session,
        OnnxRuntimeSession(exported.file(ONNX), "cpu", {}) as source,
    ):
        opened = process_time()
        for run in (session.run, source.run):
            for inputs in samples:
                run(inputs)
        return process_time() - began, process_time() - opened


def time_comparison() -> tuple[int, float]:
    began = process_time()
    with backend.load(entry.path, entry.info, {}) as session:
        source, build = backend.open_marked(entry.info, request, exported.file(ONNX))
        tensors = choose_tensors(source, build)
        part = card.batch_range[0] / card.batch_range[1]
        compare_tensors(source, build, samples, tensors, session.run, part=part)
    return len(tensors), process_time() - began


time_plain()
plain_s, run_s = time_plain()
count, compared_s = time_comparison()
ratios = f"{compared_s / plain_s:.1f} times ({compared_s / run_s:.1f} times without the opening of the plain sessions)"
print(
    f"{count} tensors, {len(samples)} samples: {compared_s:.2f} s, plain {plain_s:.2f} s, {ratios}"
)
