"""What is said of every build of a race, and the texts of a choice, a build and doctor."""

from functools import partial
from math import inf
from types import SimpleNamespace
from typing import Any

import torch
from tests.fakes.console import assert_golden, text_of
from tests.fakes.entries import HASH, MIXED, WRONG, artifact_info, proof
from tests.fakes.sessions import PlantedSession

from optpipe.backends.inductor import Inductor
from optpipe.backends.onnxruntime import OnnxRuntime
from optpipe.backends.torch_eager import TorchEager
from optpipe.build import slowdowns as first_look
from optpipe.build.choose import ChoiceResult, judge_status
from optpipe.build.doctor import (
    ToolStatus,
    document_from_diagnosis,
    document_from_options,
    list_options,
)
from optpipe.build.records import (
    ArtifactResult,
    BuildResult,
    BuiltArtifact,
    document_from_build,
    document_from_choice,
)
from optpipe.build.slowdowns import (
    explain_hopeless,
    measure_gain,
    measure_slowdowns,
    rule_out_backend,
    rule_out_precision,
)
from optpipe.build.standings import list_candidates
from optpipe.core.card import InputSpec, ModelCard, Task
from optpipe.core.entries import SkippedLayer, VerificationInfo, WeightsRecord
from optpipe.core.errors import ExitStatus
from optpipe.core.precision import Budget, Precision
from optpipe.core.records import json_from_record, record_from_json
from optpipe.measure.race import race_builds
from optpipe.models.artifacts.decisions import CandidateAccuracy, Decision, Omission, Standing

POINTS = Budget(0.5, "points")
KEPT = CandidateAccuracy(True, 0.0, (-0.004, 0.004), 134.0)


def judged(ident, precision="fp32", accuracy=KEPT, **info):
    entry: Any = SimpleNamespace(id=ident, info=artifact_info(precision=precision, **info))
    return BuiltArtifact(entry, None, None, accuracy=accuracy)


def raced(times, sizes=(1,), noise=0.0):
    """Planted ns by build and size; `noise` moves every other process of a build up, the rest down."""
    count = dict.fromkeys(times, 0)

    def measure(name, wanted):
        count[name] += 1
        level = 1 + noise * (-1) ** count[name] * (1 if name < "bbbb" else -1)
        return {size: times[name][size] * level for size in wanted if size in times[name]}

    return race_builds(list(times), sizes, measure, 0)


def decided(builds, races, failures=None, left_out=(), failed=()):
    winners = {size: race.winner for size, race in races.items() if race.winner}
    candidates = list_candidates(builds, races, failures or {}, POINTS)
    sizes = tuple(races) or (1,)
    return Decision(
        "digits",
        "m" * 12,
        str(POINTS),
        "800 images of validation",
        sizes,
        winners,
        candidates,
        left_out,
        7,
        "top1",
        failed,
    )


def test_a_build_that_is_far_slower_in_one_process_is_not_raced(monkeypatch):
    """One that cannot be loaded here is: its process tells why."""
    delays = {"aaaa": 5.0, "bbbb": 5.0, "cccc": 20.0}
    load = SimpleNamespace(load=lambda path, *_: PlantedSession(delays[path], "none"))
    monkeypatch.setattr(first_look, "BACKENDS", {"onnxruntime": load})
    monkeypatch.setattr(
        first_look, "_time_launches", lambda binding, _device: binding.session.nanoseconds
    )
    builds = [judged(name) for name in (*delays, "dddd")]
    for each in builds:
        each.entry.path = each.entry.id
    card = ModelCard(
        "small",
        "small",
        Task.OTHER,
        (InputSpec("x", "float32", (1, 64), (1, 64), (8, 64), batch=0),),
    )
    hopeless = explain_hopeless(slowdowns := measure_slowdowns(builds, (1, 8), card, {}), "cuda")
    assert hopeless.keys() == {"cccc"}
    assert "takes 4.0 times" in (rule_out_backend(OnnxRuntime(), builds, slowdowns) or "")
    assert rule_out_backend(OnnxRuntime(), builds, slowdowns | {"cccc": 3.0}) is None
    races = raced({"aaaa": {1: 1e6}, "bbbb": {1: 1e6}, "dddd": {1: 2e6}})
    found = {
        each.artifact: each for each in list_candidates(builds, races, hopeless, POINTS, hopeless)
    }
    assert found["cccc"].standing is Standing.DROPPED
    assert "in one process" in found["cccc"].reason


def test_a_narrow_type_is_ruled_out_by_a_trial_of_the_module():
    """With what torch gains by it over FP32; not where the FP32 build was not measured, or torch cannot compute the type."""
    card = ModelCard(
        "small", "small", Task.OTHER, (InputSpec("x", "float32", (1, 8), (1, 8), (8, 8), batch=0),)
    )

    def make():
        class Slow(torch.nn.Linear):
            def forward(self, x):
                if x.dtype == torch.bfloat16:
                    raise RuntimeError("not implemented for 'BFloat16'")
                for _ in range(200 if x.dtype == torch.float16 else 1):
                    y = torch.nn.functional.linear(x, self.weight, self.bias)
                return y

        return Slow(8, 8)

    gain = measure_gain(make, card, Precision.FP16, (1, 8))
    assert 0 < gain < 0.5
    assert measure_gain(make, card, Precision.BF16, (1,)) == inf

    builds = [judged("aaaa", backend="onnxruntime"), judged("bbbb", backend="torch")]
    planted = {"aaaa": 1.0, "bbbb": 1.5}
    assert "0.1 times as fast" in (
        rule_out_precision(TorchEager(), Precision.FP16, builds, planted, 0.1) or ""
    )
    assert rule_out_precision(TorchEager(), Precision.FP16, builds, planted, 1.0) is None
    assert rule_out_precision(TorchEager(), Precision.BF16, builds, planted, inf) is None
    assert rule_out_precision(TorchEager(), Precision.FP16, builds, {"aaaa": 1.0}, 0.1) is None

    # what was not compiled is judged by the eager build
    compiled = partial(rule_out_precision, Inductor(), Precision.FP32, builds)
    assert "at most 4 times as fast" in (compiled({"aaaa": 1.0, "bbbb": 15.4}, 1.0) or "")
    assert compiled({"aaaa": 1.0, "bbbb": 7.0}, 1.0) is None
    assert compiled({"aaaa": 1.0}, 1.0) is None


def test_a_build_that_a_cpu_disturbed_once_is_raced(monkeypatch):
    """Its best look counts; one that is slow each time is not raced."""
    seen = {"aaaa": [1.0], "bbbb": [9.0, 1.1], "cccc": [9.0, 8.0, 8.5]}
    monkeypatch.setattr(first_look, "_time_build", lambda build, *_: [seen[build.entry.id].pop(0)])
    builds = [judged(name) for name in seen]
    card = ModelCard("small", "small", Task.OTHER, (InputSpec("x", "float32", (1,), (1,), (1,)),))
    slowdowns = measure_slowdowns(builds, (1,), card, {})
    assert explain_hopeless(slowdowns, "cpu").keys() == {"cccc"}


def test_the_winner_comes_first_and_every_loser_has_its_reason():
    half = proof("fp16", 0.0, proven=False, reason="50.0% of MACs in fp16, 80% required")
    builds = [
        judged("aaaa"),
        judged("bbbb", "fp16", backend="inductor"),
        judged("cccc", "bf16", backend="torch"),
        judged("dddd", "int8", CandidateAccuracy(False, 0.02, (0.01, 0.03), 20.0)),
        judged(
            "eeee",
            "int8",
            CandidateAccuracy(None, 0.003, (-0.001, 0.004), 25.0, 0.03),
            backend="torch",
        ),
        judged("ffff", "fp16", None, backend="torch", precision_proof=half),
    ]
    races = raced(
        {"aaaa": {1: 2e6, 8: 9e6}, "bbbb": {1: 1e6, 8: 9e6}, "cccc": {1: 9e6, 8: 4e7}}, (1, 8), 0.01
    )
    left_out = (
        Omission("tensorrt", "", "not installed"),
        Omission("onnxruntime", "fp16", "has no fp16 kernels on cpu"),
    )
    failed = (Omission("torch", "tf32", "out of memory", ExitStatus.STAGE_FAILED),)
    decision = decided(builds, races, left_out=left_out, failed=failed)
    assert decision.winners == {1: "bbbb", 8: "aaaa"}
    assert [each.standing for each in decision.candidates] == [
        Standing.CHOSEN,
        Standing.CHOSEN,
        Standing.DROPPED,
        Standing.NOT_SHOWN,
        Standing.OVER_BUDGET,
        Standing.NOT_PROVEN,
    ]
    assert record_from_json(json_from_record(decision), Decision, "decision") == decision
    weights = WeightsRecord("file", "0" * 64)
    build = BuildResult(
        "digits", "card:digits", "m" * 12, weights, "default", None, (), (), (), (), ExitStatus.DONE
    )
    result = ChoiceResult(decision, build, "runs/choose-1", ExitStatus.DONE)
    assert_golden(text_of(document_from_choice(result), width=200), "choose.txt")


def test_a_build_that_is_dropped_early_is_not_called_slower():
    idents = ["aaaa", "bbbb", "cccc", "dddd", "eeee"]
    noisy = decided(
        [judged(each) for each in idents], raced({each: {1: 1e6} for each in idents}, noise=0.05)
    )
    (dropped,) = (each for each in noisy.candidates if each.standing is Standing.DROPPED)
    (times,) = dropped.times
    assert (times.ratio, times.final_ns) == (None, ())
    assert (
        f"dropped after {len(times.race_ns)} rounds at {times.slowdown:.2f} times" in dropped.reason
    )
    assert record_from_json(json_from_record(noisy), Decision, "decision") == noisy


def test_without_a_build_within_the_budget_the_nearest_is_named_and_the_status_says_fail():
    builds = [
        judged("aaaa", "fp16", CandidateAccuracy(False, 0.03, (0.02, 0.04))),
        judged("bbbb", "int8", CandidateAccuracy(False, 0.02, (0.01, 0.03))),
    ]
    decision = decided(builds, {})
    assert decision.nearest.artifact == "bbbb"
    assert judge_status(decision, builds) is ExitStatus.FAIL
    unsure = [*builds, judged("cccc", accuracy=CandidateAccuracy(None, 0.0, (-0.01, 0.01)))]
    assert judge_status(decided(unsure, {}), unsure) is ExitStatus.INCONCLUSIVE


def test_a_build_that_cannot_be_measured_says_why():
    builds = [judged("aaaa"), judged("bbbb", "fp16")]
    decision = decided(
        builds, raced({"aaaa": {1: 1.0}, "bbbb": {}}), {"bbbb": "batch 1: out of memory"}
    )
    assert decision.winners == {1: "aaaa"}
    failed = decision.candidates[-1]
    assert (failed.standing, failed.reason) == (Standing.FAILED, "batch 1: out of memory")
    assert "the only build with a time" in decision.candidates[0].reason
    nobody = decided(builds, raced({"aaaa": {}, "bbbb": {}}))
    assert judge_status(nobody, builds) is ExitStatus.STAGE_FAILED


def verified(**changes):
    known = {
        "reference": "source model",
        "samples": 800,
        "tolerance_relative": 0.02,
        "snr_db": 61.2,
        "top1_agreement": 0.99,
        "top1_accuracy": 0.9875,
        "source_top1_accuracy": 0.99,
        "outputs": (),
        "values": 8000,
        "passed": True,
    }
    return VerificationInfo(**{**known, **changes})


def built(ident, backend, precision, **changes):
    known = {
        "path": "p",
        "sha256": HASH,
        "size_bytes": 705_000,
        "build_seconds": 1.25,
        "why_not": None,
        "precision_proof": proof(precision),
        "parity": verified(),
    }
    return ArtifactResult(ident, backend, Precision(precision), "cuda", **{**known, **changes})


def test_a_build():
    artifacts = (
        built("0123456789ab", "tensorrt", "fp16"),
        built("1123456789ab", "onnxruntime", "int8", parity=verified(passed=False, snr_db=3.2)),
        built(
            "2123456789ab",
            "torch",
            "fp16",
            precision_proof=WRONG,
            parity=verified(snr_db=None, top1_accuracy=None),
            kept=(SkippedLayer("fc", "its weights are not constant"),),
        ),
        built(
            "4123456789ab",
            "onnxruntime",
            "int8",
            kept=(SkippedLayer("loop/dot", "inside Loop: not quantized"),),
            parity=verified(
                snr_db=None,
                top1_accuracy=None,
                top1_agreement=None,
                selected=("boxes",),
                box_agreement=0.88,
            ),
        ),
        built(
            "3123456789ab",
            "tensorrt-rtx",
            "fp16",
            why_not="no NVIDIA GPU on this machine",
            parity=None,
            mixed=MIXED,
        ),
    )
    found = BuildResult(
        "digits",
        "card:digits",
        "m",
        WeightsRecord("random", HASH, 0, "3 of 8 tensors, first conv1"),
        "default",
        "no network",
        artifacts,
        (Omission("inductor", "int8", "has no int8 kernels on cuda", ExitStatus.MISSING),),
        (Omission("torch", "bf16", "out of memory", ExitStatus.STAGE_FAILED),),
        (),
        ExitStatus.FAIL,
    )
    assert_golden(text_of(document_from_build(found)), "build.txt")


def test_a_diagnosis():
    found = (
        ToolStatus("GPU", False, None, "tuned engines", None, "requires an NVIDIA GPU"),
        ToolStatus(
            "backend onnxruntime",
            True,
            "1.31.1",
            "ONNX inference",
            "cuda: no NVIDIA GPU on this machine",
        ),
        ToolStatus(
            "nsys",
            False,
            None,
            "profiling",
            "/usr/bin/nsys failed to run",
            "`apt-get install nsight-systems`",
        ),
    )
    assert_golden(text_of(document_from_diagnosis(found)), "doctor.txt")


def test_the_options_of_all_backends():
    assert_golden(text_of(document_from_options(list_options())), "doctor-options.txt")
