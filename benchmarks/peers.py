"""INT8 on a CPU by optpipe and by four peers: speed at equal accuracy, time to build, and the lines that a user writes.

usage: python -m benchmarks.peers OUTPUT.json [--only resnet50,text-lines,…] [--without PEER] [--threads 1]

Needs onnxruntime (it comes with optpipe), openvino, nncf, and torchao; a peer that is not installed, or that cannot take a model, has the
reason in its row. All get the same file or module, the same calibration samples, and the same held-out samples with their truths. Their
calls take turns in one process, in an order that is drawn for each round, with one thread each, batch 1, arrays in and arrays out; the
speed is the ratio to ONNX Runtime in FP32 of the same round, with Student's t over rounds. OUTPUT.json has every round.

A function `build_…` holds what a user of that peer writes, by the peer's own documentation; its lines are the ones that are counted.
"""

import argparse
import inspect
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable, Collection, Mapping
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.gpu_turns import time_in_turns
from benchmarks.known.sign_off import Candidate, Tensors

import optpipe as op
from optpipe.stats.paired import figure_from_samples
from optpipe.stats.ratio import ratio_from_rounds

Arrays = Mapping[str, Any]
Run = Callable[[Arrays], Any]
"""Arrays by input to the first output."""
MODELS = ("resnet50", "text-lines", "text-direction", "image-classes")
PACKAGES = ("torch", "onnxruntime-gpu", "openvino", "nncf", "torchao", "optpipe")
MOST_SCORED = 600


class NotPossibleError(Exception):
    """Why a peer has no build of a model."""


def require_module(source: Any) -> Any:
    if not isinstance(source, torch.nn.Module):
        raise NotPossibleError("takes no ONNX file")
    return source


def list_samples(tensors: Arrays) -> list[dict[str, Any]]:
    """One mapping for each sample, with a batch of one."""
    kept = {name: value for name, value in tensors.items() if name not in ("labels", "group")}
    count = len(next(iter(kept.values())))
    return [{name: value[at : at + 1] for name, value in kept.items()} for at in range(count)]


# What users write ---------------------------------------------------------------------------------------------------


def build_onnxruntime_fp32(source: Any, _: Any, threads: int) -> Run:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    return lambda arrays: session.run(None, arrays)[0]


def build_onnxruntime_int8(source: Any, samples: list[dict[str, Any]], threads: int) -> Run:
    import onnx
    import onnxruntime
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    class Reader(CalibrationDataReader):
        def __init__(self):
            self.rest = iter(samples)

        def get_next(self):
            return next(self.rest, None)

    model = onnx.load(source)
    if model.opset_import[0].version < 13:  # scales per channel
        source = onnx.version_converter.convert_version(model, 17)
    quant_pre_process(source, "prepared.onnx", skip_symbolic_shape=True)
    quantize_static(
        "prepared.onnx", "int8.onnx", Reader(), quant_format=QuantFormat.QDQ, per_channel=True
    )
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession("int8.onnx", options, providers=["CPUExecutionProvider"])
    return lambda arrays: session.run(None, arrays)[0]


def build_openvino(source: Any, _: Any, threads: int) -> Run:
    import openvino

    core = openvino.Core()
    model = core.read_model(source)
    compiled = core.compile_model(model, "CPU", {"INFERENCE_NUM_THREADS": threads})
    return lambda arrays: compiled(arrays)[0]


def build_openvino_nncf(source: Any, samples: list[dict[str, Any]], threads: int) -> Run:
    import nncf
    import openvino

    core = openvino.Core()
    model = core.read_model(source)
    quantized = nncf.quantize(model, nncf.Dataset(samples), subset_size=len(samples))
    compiled = core.compile_model(quantized, "CPU", {"INFERENCE_NUM_THREADS": threads})
    return lambda arrays: compiled(arrays)[0]


def build_torch_compile(source: Any, _: Any, threads: int) -> Run:
    torch.set_num_threads(threads)
    module = torch.compile(require_module(source).to(memory_format=torch.channels_last))

    def run(arrays: Arrays) -> Any:
        with torch.inference_mode():
            return module(*map(torch.from_numpy, arrays.values())).numpy()

    return run


def build_torchao_pt2e(source: Any, samples: list[dict[str, Any]], threads: int) -> Run:
    from torchao.quantization.pt2e import move_exported_model_to_eval
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
    from torchao.quantization.pt2e.quantizer.x86_inductor_quantizer import (
        X86InductorQuantizer,
        get_default_x86_inductor_quantization_config,
    )

    torch.set_num_threads(threads)
    tensors = [tuple(map(torch.from_numpy, sample.values())) for sample in samples]
    quantizer = X86InductorQuantizer()
    quantizer.set_global(get_default_x86_inductor_quantization_config())
    with torch.no_grad():
        exported = torch.export.export(require_module(source), tensors[0]).module()
        prepared = prepare_pt2e(exported, quantizer)
        for sample in tensors:
            prepared(*sample)
        converted = convert_pt2e(prepared)
        move_exported_model_to_eval(converted)
        compiled = torch.compile(converted)

    def run(arrays: Arrays) -> Any:
        with torch.no_grad():
            return compiled(*map(torch.from_numpy, arrays.values())).numpy()

    return run


def build_optpipe(source: op.Model, samples: Tensors, threads: int) -> Run:
    builds = source.build(
        "int8",
        backend="onnxruntime",
        device="cpu",
        calibration=op.Data(samples),
        option={"onnxruntime": {"threads": threads}},
    )
    build = builds["int8"]
    return lambda arrays: build(**arrays)


# The comparison -----------------------------------------------------------------------------------------------------

PEERS: Mapping[str, tuple[str, Callable[..., Run]]] = {
    "ONNX Runtime FP32": ("onnxruntime-gpu", build_onnxruntime_fp32),
    "ONNX Runtime quantize_static": ("onnxruntime-gpu", build_onnxruntime_int8),
    "OpenVINO by default": ("openvino", build_openvino),
    "OpenVINO with NNCF": ("nncf", build_openvino_nncf),
    "torch.compile FP32": ("torch", build_torch_compile),
    "torchao PT2E (X86Inductor)": ("torchao", build_torchao_pt2e),
}


def count_lines(function: Any) -> int:
    """Lines of code of a function: without the line of its name, blank ones, and those that ask which model it is."""
    lines = [each.strip() for each in inspect.getsource(function).splitlines()]
    return len([each for each in lines[1:] if each and not each.startswith(("#", '"""'))])


def make_resnet50() -> Candidate:
    """Random weights: its accuracy means nothing, so its rows have the SNR of the outputs alone."""
    import torchvision

    torch.manual_seed(0)
    network = torchvision.models.resnet50(weights=None).eval()
    drawn = np.random.default_rng(0).standard_normal((80, 3, 224, 224)).astype(np.float32)
    metric = op.Metric(lambda *_: 0.0, range=(0, 1), name="none")
    model = op.Model(network, example=torch.from_numpy(drawn[:2]), batch=(1, 1, 8), name="resnet50")
    return Candidate(
        name="resnet50",
        source=network,
        model=model,
        calibration={"x": drawn[:48]},
        held_out={"x": drawn[48:]},
        metric=metric,
    )


def make_candidate(name: str) -> Candidate:
    if name == "resnet50":
        return make_resnet50()
    module = import_module(f"benchmarks.known.{name.replace('-', '_')}")
    found: Candidate = module.make_candidate()
    return found


def write_onnx(candidate: Candidate, folder: Path) -> str:
    """The source as ONNX: the file itself, or torch's own export of the module."""
    if not isinstance(candidate.source, torch.nn.Module):
        return str(candidate.source)
    target = folder / "source.onnx"
    sample = list_samples(candidate.calibration)[0]
    torch.onnx.export(
        candidate.source,
        tuple(map(torch.from_numpy, sample.values())),
        target,
        input_names=list(sample),
        dynamo=True,
        external_data=False,
    )
    return str(target)


def score_outputs(candidate: Candidate, outputs: list[Any]) -> Any:
    """The metric of each sample."""
    labels = candidate.held_out.get("labels")
    if labels is None:
        return None
    pairs = zip(outputs, labels, strict=False)
    return np.array([candidate.metric.function(each[0], truth) for each, truth in pairs])


def bound_drop(before: Any, after: Any) -> tuple[float, float, float]:
    """The mean drop in points with its 95% interval, as a sign-off computes it: equal scores show no interval of zero."""
    drops = before - after
    figure = figure_from_samples(float(drops.mean()), drops, len(drops), (-1.0, 1.0))
    low, high = figure.interval(0.95)
    return 100 * figure.value, 100 * low, 100 * high


def measure_snr(expected: list[Any], found: list[Any]) -> float:
    """dB, over all samples."""
    signal = sum(float(np.square(one.astype(np.float64)).sum()) for one in expected)
    noise = sum(
        float(np.square(np.asarray(two, np.float64) - one).sum())
        for one, two in zip(expected, found, strict=True)
    )
    return 10 * float(np.log10(signal / noise)) if noise else float("inf")


def try_build(build: Callable[[], Run], sample: Arrays) -> tuple[Run | None, float, str]:
    """What runs, the seconds until its first answer, and why there is none."""
    begun = time.monotonic()
    try:
        run = build()
        run(sample)
    except NotPossibleError as error:
        return None, 0.0, str(error)
    except Exception as error:  # noqa: BLE001 - whatever a peer raises is its row
        return None, 0.0, f"{type(error).__name__}: {error}".splitlines()[0][:300]
    return run, time.monotonic() - begun, ""


def compare(
    name: str, threads: int, folder: Path, left_out: Collection[str] = ()
) -> list[dict[str, Any]]:
    """A row for each peer; those that are `left_out` have none."""
    candidate = make_candidate(name)
    calibration = list_samples(candidate.calibration)
    held_out = list_samples(candidate.held_out)[:MOST_SCORED]
    onnx_file = write_onnx(candidate, folder)

    def bind(build: Callable[..., Run]) -> Callable[[], Run]:
        own = candidate.source if build.__name__.startswith("build_torch") else onnx_file
        return lambda: build(own, calibration, threads)

    builds = {label: bind(build) for label, (_, build) in PEERS.items() if label not in left_out}
    builds["optpipe"] = lambda: build_optpipe(candidate.model, candidate.calibration, threads)
    runs, rows = dict[str, Run](), list[dict[str, Any]]()
    for label, build in builds.items():
        run, seconds, reason = try_build(build, calibration[0])
        function = build_optpipe if label == "optpipe" else PEERS[label][1]
        row = {"model": name, "peer": label, "lines": count_lines(function)}
        rows.append(row | ({"reason": reason} if run is None else {"build_s": round(seconds, 1)}))
        print(json.dumps(rows[-1]), flush=True)
        if run is not None:
            runs[label] = run

    outputs = {label: [np.array(run(each)) for each in held_out] for label, run in runs.items()}
    sides = [lambda run=run: run(calibration[0]) for run in runs.values()]
    times = dict(zip(runs, time_in_turns(sides, "cpu"), strict=True))
    first = "ONNX Runtime FP32"
    before = score_outputs(candidate, outputs[first])
    for row in rows:
        label = str(row["peer"])
        if label not in runs:
            continue
        row |= {"rounds_ms": times[label], "median_ms": float(np.median(times[label]))}
        if label != first:
            ratio = ratio_from_rounds(times[label], times[first])
            row |= {"speed": ratio.value, "speed_ci": ratio.ci}
            row["snr_db"] = measure_snr(outputs[first], outputs[label])
        if before is not None:
            scores = score_outputs(candidate, outputs[label])
            drop = bound_drop(before, scores)
            row |= {"score": float(scores.mean()), "scores": [round(each, 6) for each in scores]}
            row |= {"drop_points": drop[0], "drop_ci": drop[1:], "samples": len(before)}
    return rows


def tabulate(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown."""
    heads = ("model", "peer", "ms", "× ONNX Runtime FP32", "drop, points", "SNR, dB", "build, s", "lines")  # fmt: skip
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    for row in rows:
        if "reason" in row:
            lines.append(f"| {row['model']} | {row['peer']} | {row['reason']} | | | | | |")
            continue
        low, high = row.get("speed_ci", (1, 1))
        drop = row.get("drop_points")
        shown = "" if drop is None else f"{drop:+.2f} [{row['drop_ci'][0]:+.2f}, {row['drop_ci'][1]:+.2f}]"  # fmt: skip
        speed = f"{row['speed']:.2f} [{low:.2f}, {high:.2f}]" if "speed" in row else "1"
        snr = f"{row['snr_db']:.1f}" if "snr_db" in row else ""
        cells = (row["model"], row["peer"], f"{row['median_ms']:.2f}", speed, shown, snr)
        lines.append(f"| {' | '.join(cells)} | {row['build_s']} | {row['lines']} |")
    return "\n".join(lines)


def describe_machine(threads: int) -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    versions = dict[str, str]()
    for each in PACKAGES:
        try:
            versions[each] = metadata.version(each)
        except metadata.PackageNotFoundError:
            versions[each] = "not installed"
    return {
        "cpu": names[0],
        "cores": len(os.sched_getaffinity(0)),
        "threads": threads,
        "load_1min": os.getloadavg()[0],
        "python": platform.python_version(),
        "versions": versions,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("output", type=Path)
    parser.add_argument("--only", default=",".join(MODELS))
    parser.add_argument(
        "--without", action="append", default=[], choices=list(PEERS), help="leave this peer out"
    )
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    output = given.output.resolve()
    rows, machine = list[dict[str, Any]](), describe_machine(given.threads)
    for name in given.only.split(","):
        with tempfile.TemporaryDirectory() as scratch:
            os.chdir(scratch)  # where quantize_static writes, as in its documentation
            rows += compare(name, given.threads, Path(scratch), given.without)
        document = {"machine": machine, "rows": rows}
        output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(tabulate(rows))


if __name__ == "__main__":
    main()
