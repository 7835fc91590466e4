"""AOTInductor: the exported program compiled ahead of time into a package with a shared library.

Source: PyTorch documentation, "AOTInductor: Ahead-Of-Time Compilation for Torch.Export-ed Models".
"""

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from optpipe.backends.base import (
    BuildRequest,
    BuildResult,
    Capability,
    Device,
    Option,
    Serving,
    describe_options,
    merge_options,
)
from optpipe.backends.inductor_packages import (
    GENERAL,
    Compilation,
    Packages,
    compile_packages,
    load_package,
    name_static_package,
    parse_static_batches,
)
from optpipe.backends.torch_int8 import LOWERING, find_stale_lowering
from optpipe.backends.torch_program import (
    TorchBackend,
    export_program,
    export_rewritten,
    layers_from_program,
    name_processor,
    record_tensors,
    set_float32_products,
    translate_refusals,
)
from optpipe.core.card import ModelCard, tensor_from_dict
from optpipe.core.entries import ArtifactInfo
from optpipe.core.errors import BadInputError, StageError
from optpipe.core.precision import Precision
from optpipe.workspace.environment import get_package_version, list_gpus

if TYPE_CHECKING:
    from pathlib import Path

    from optpipe.backends.base import Session
    from optpipe.backends.torch_int8.tuning import SpeedOverFp16

LEAST_CAPABILITY = {Precision.FP8: (8, 9), Precision.INT8: (9, 0)}
"""Of a GPU: the INT8 kernels use the TMA copies and matrix instructions of Hopper."""
ON_CPU = "on a CPU, FP8 only shows which outputs a GPU gives; it is made for GPUs of compute capability 8.9 or later"
STATIC_BATCHES = "static_batches"
OPTIONS: dict[Device, dict[str, bool | int | str]] = {
    "cpu": {"threads": 0, STATIC_BATCHES: ""},
    "cuda": {"cuda_graph": True, "max_autotune": False, STATIC_BATCHES: ""},
}
"""`cuda_graph`: 0.41 instead of 0.97 ms for ResNet-50 in FP16 at batch 1 on an H200 with torch 2.11. It needs the package loaded
for a single caller, as below: with torch's pool of runners the capture ended there."""
TUNED = {"max_autotune_gemm": True, "max_autotune_conv_backends": "ATEN"}
"""Matrix products, 1×1 convolutions among them, are chosen by time. Triton's own convolutions are not tried: the fastest took 430 times as
long as cuDNN for a depthwise one, and minutes to time."""
VARIANTS: dict[Device, tuple[Mapping[str, Any], ...]] = {"cpu": ({},), "cuda": ({}, TUNED)}
"""Code for one batch size is compiled in each of these ways, and the fastest is kept. With torch 2.11 neither is always faster: tuned, a
product with a bias is no longer cuBLASLt's, which adds the bias in its epilogue (12,608 × 768 → 3,072 in FP16 on an H200: 0.095 ms,
0.162 with the bias added after it). Tuned code for all sizes is not tried: ViT-B/16 took 8.90 ms at batch 64, untuned 8.41."""
BUILD_ONLY = ("max_autotune", STATIC_BATCHES)
"""Of the options, those that decide what is compiled and mean nothing when it is loaded."""
_HELP = {
    "threads": "threads of one operator; 0 leaves the number to torch",
    "cuda_graph": "captures an inference into a CUDA graph",
    "max_autotune": "times more kernels while it compiles",
    STATIC_BATCHES: "batch sizes, such as 1,64, that get code of their own, on a GPU where it is faster",
}


class Inductor(TorchBackend):
    """torch's own compiler, without Python at run time."""

    name = "inductor"
    purpose = "ahead-of-time compiled PyTorch"

    def describe_options(self, device: Device) -> tuple[Option, ...]:
        return describe_options(OPTIONS[device], _HELP, BUILD_ONLY)

    def precisions(self, device: Device) -> frozenset[Precision]:
        """FP8 too, in linear layers; INT8 on a GPU, by optpipe's kernels."""
        return (
            TorchBackend.precisions(self, device) | {Precision.FP8} | ({Precision.INT8} if device == "cuda" else set())
        )

    def probe_capability(self, device: Device) -> Capability:
        """torch, and for the CPU a C++ compiler."""
        found = TorchBackend.probe_capability(self, device)
        if found.builds and shutil.which("g++") is None and shutil.which("clang++") is None:
            why_not = "AOTInductor needs a C++ compiler; none was found"
            return Capability(False, found.runs, found.version, why_not, "`apt-get install g++`")
        return found

    def find_obstacle(
        self, device: Device, precision: Precision | None = None, *, anywhere: bool = False, runs: bool = False
    ) -> str | None:
        """For FP8 and INT8 also a GPU that is too old."""
        found = TorchBackend.find_obstacle(self, device, precision, anywhere=anywhere, runs=runs)
        return found or (find_old_gpu(device, precision) if precision in LEAST_CAPABILITY and not anywhere else None)

    def recipe(self, device: Device, options: Mapping[str, Any]) -> dict[str, Any]:
        """torch's version, the processor that the code is compiled for, and on a GPU what INT8's kernels depend on."""
        kernels = {"triton": get_package_version("triton"), "lowering": LOWERING} if device == "cuda" else {}
        return {
            "torch": get_package_version("torch"),
            **kernels,
            "compiled_for": name_processor(device),
            "options": self._merge(options, device),
        }

    def _merge(self, options: Mapping[str, Any], device: Device) -> dict[str, bool | int | str]:
        merged = merge_options(options, OPTIONS[device], self.name)
        return {**merged, STATIC_BATCHES: ",".join(map(str, parse_static_batches(str(merged[STATIC_BATCHES]))))}

    def build(self, request: BuildRequest) -> BuildResult:
        """Exports, compiles and packages; for FP8 on a GPU says where it is not faster than FP16.

        Raises BadInputError for a static batch size outside the profile.
        """
        options = self._merge(request.options, request.device)
        sizes = _choose_static_batches(request, str(options[STATIC_BATCHES]))
        made: dict[str, object] = {
            "compiled_for": name_processor(request.device),
            "compiled_by": get_package_version("torch"),
        }
        tf32, on_gpu = request.precision is Precision.TF32, request.device == "cuda"
        lowered = request.precision in LEAST_CAPABILITY
        set_float32_products(tf32=tf32)
        configs = {"max_autotune": True} if options.get("max_autotune") else {}
        export, remarks = _prepare_export(request, made)
        program = export(request)
        rival = Compilation(None, request.directory / "fp16.pt2", configs)
        if lowered and on_gpu:
            rival = replace(rival, program=export_program(replace(request, precision=Precision.FP16)))
        static = _list_static(request, sizes, configs, export)
        with translate_refusals(request.card, "AOTInductor could not compile"):
            general = Compilation(program, request.directory / GENERAL, configs)
            failures = compile_packages(general, [*static, [rival] if rival.program else []], tf32=tf32)
            if why_not := failures.get(rival.package.name):
                raise StageError(
                    f"AOTInductor could not compile {request.card.name} in fp16, to measure "
                    f"{request.precision.upper()} against it: {why_not}"
                )
        if lowered and on_gpu:
            from optpipe.backends.torch_int8.tuning import explain_speeds

            speeds = _compare_with_fp16(request, rival.package)
            made["against_fp16"] = {str(each.batch_size): each.to_dict() for each in speeds}
            remarks = (*remarks, *explain_speeds(speeds, request.precision))
        kept, said = _keep_fastest(request, sizes, failures)
        made[STATIC_BATCHES] = kept
        remarks = (*remarks, *said)
        layers = layers_from_program(program, request.precision)
        more = tuple(map(name_static_package, kept))
        details = {**record_tensors(request), **made}
        return BuildResult(layers, GENERAL, options, details, remarks=remarks, more_files=more)

    def load(self, directory: "Path", info: ArtifactInfo, options: Mapping[str, Any]) -> "Session":
        from optpipe.backends.torch_session import TorchSession

        merged = merge_options({**info.options, **options}, OPTIONS[info.device], self.name)
        inputs = [tensor_from_dict(each) for each in info.details["inputs"]]
        packages = Packages(directory, info.device, inputs, self.list_static_batches(info))
        return TorchSession(packages, info, merged)

    def find_run_blocker(self, info: ArtifactInfo) -> str | None:
        """As of all torch programs; in INT8 the operator has to be the one that the code was compiled for."""
        return find_stale_lowering(info) or TorchBackend.find_run_blocker(self, info)

    def list_static_batches(self, info: ArtifactInfo) -> tuple[int, ...]:
        return tuple(info.details.get(STATIC_BATCHES, ()))

    def serving(self, info: ArtifactInfo, options: Mapping[str, Any], version: str) -> Serving:
        """Triton's PyTorch backend loads the code for all batch sizes alone, whose calling convention has positions, not names.

        It does not have the operator that INT8's code calls.
        """
        if info.precision is Precision.INT8:
            return Serving()
        static = {STATIC_BATCHES} if self.list_static_batches(info) else set()
        return Serving(
            f"the package needs a Triton release with platform torch_aoti and {self.package} {version}: see NVIDIA's support matrix",
            "pytorch",
            "torch_aoti",
            by_position=True,
            not_carried=tuple(sorted({*options} | static)),
        )


def find_old_gpu(device: Device, precision: Precision) -> str | None:
    """Why this machine's GPU cannot run FP8 or INT8. None where it can, on the CPU, and on a machine without a GPU."""
    if device == "cpu" or not list_gpus():
        return None
    gpu, least = list_gpus()[0], LEAST_CAPABILITY[precision]
    if tuple(map(int, gpu.compute_capability.split("."))) >= least:
        return None
    needed = ".".join(map(str, least))
    return (
        f"needs a GPU of compute capability {needed} or later for {precision}; {gpu.name} has {gpu.compute_capability}"
    )


def _choose_static_batches(request: BuildRequest, text: str) -> tuple[int, ...]:
    """The sizes that get a package of their own; none without a batch axis."""
    low, usual, high = request.card.batch_range
    sizes = parse_static_batches(text)
    if outside := [size for size in sizes if not low <= size <= high]:
        raise BadInputError(
            f"option static_batches={text}: {outside[0]} is outside the profile {low}:{usual}:{high}; widen it with --batch MIN:OPT:MAX"
        )
    return sizes if request.card.batched else ()


def _prepare_export(
    request: BuildRequest, made: dict[str, object]
) -> tuple[Callable[[BuildRequest], Any], tuple[str, ...]]:
    """What exports the program in the shapes of a request, and what to say of it; INT8's measured tactics are noted in `made`."""
    if request.precision is Precision.FP8:
        from optpipe.backends.torch_fp8 import lower_fp8

        program, missed = lower_fp8(request)
        return partial(export_rewritten, program), (*missed, *(() if request.device == "cuda" else (ON_CPU,)))
    if request.precision is not Precision.INT8:
        return export_program, ()
    from optpipe.backends.torch_int8.lowering import lower_program
    from optpipe.backends.torch_int8.tuning import draw_inputs, summarize_choices, tune_program

    program, missed = lower_program(request)
    with translate_refusals(request.card, "torch could not run the INT8 program of"):
        measured = tune_program(program, draw_inputs(request.card.inputs)) if request.device == "cuda" else {}
    made |= {"triton": get_package_version("triton"), "lowering": LOWERING, "tactics": summarize_choices(measured)}
    return partial(export_rewritten, program), missed


def _list_static(
    request: BuildRequest, sizes: Sequence[int], configs: Mapping[str, Any], export: Callable[[BuildRequest], Any]
) -> tuple[list[Compilation], ...]:
    """For each variant a list with its code for each size; the first variant's packages have the names that are kept."""
    programs = {size: export(replace(request, card=fix_batch(request.card, size))) for size in sizes}
    variants = VARIANTS[request.device]
    return tuple(
        [
            Compilation(program, request.directory / name_static_package(size, variant), {**settings, **configs})
            for size, program in programs.items()
        ]
        for variant, settings in enumerate(variants)
    )


def fix_batch(card: ModelCard, size: int) -> ModelCard:
    """`card` for one batch size."""
    return card.with_profile((size, size, size), {})


def _keep_fastest(
    request: BuildRequest, sizes: Sequence[int], failures: Mapping[str, str]
) -> tuple[list[int], list[str]]:
    """The sizes that keep code of their own, under its name, and what to say of the others.

    On a GPU it is the fastest of the variants where that is measured to be faster than the code for all sizes.
    """
    kept, said = [], []
    general = load_package(request.directory / GENERAL, request.device) if sizes and request.device == "cuda" else None
    for size in sizes:
        names = [name_static_package(size, variant) for variant in range(len(VARIANTS[request.device]))]
        codes = [request.directory / each for each in names if each not in failures]
        if codes:
            best, why_not = _find_fastest(request, size, codes, general)
        else:
            best, why_not = None, f"code of its own could not be compiled: {failures[names[0]]}"
        for each in codes:
            if each != best:
                each.unlink()
        if best is None:
            said.append(f"batch {size} runs the code for all sizes: {why_not}")
        else:
            best.replace(request.directory / names[0])
            kept.append(size)
    return kept, said


def _find_fastest(request: BuildRequest, size: int, codes: "Sequence[Path]", general: Any) -> "tuple[Path | None, str]":
    """The fastest of the packages for `size`, or None and why, where `general`, the code for all sizes, is not shown to be slower.

    The first where there is no `general` to measure them against.
    """
    best, *others = codes
    if general is None:
        return best, ""
    from optpipe.backends.torch_int8.tuning import compare_calls, draw_inputs

    inputs, own = draw_inputs(fix_batch(request.card, size).inputs), load_package(best, request.device)
    for each in others:
        other = load_package(each, request.device)
        if compare_calls(other, own, inputs)[0].pays:
            best, own = each, other
    (found,) = compare_calls(own, general, inputs)
    return (best, "") if found.pays else (None, f"code of its own is {found.speed} times as fast")


def _compare_with_fp16(request: BuildRequest, rival: "Path") -> "tuple[SpeedOverFp16, ...]":
    """The package for all batch sizes against the same in FP16, which is then removed."""
    from optpipe.backends.torch_int8.tuning import compare_calls, draw_inputs

    low, half = (load_package(each, request.device) for each in (request.directory / GENERAL, rival))
    speeds = compare_calls(low, half, draw_inputs(request.card.inputs))
    rival.unlink()
    return speeds
