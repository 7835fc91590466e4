"""AOTInductor: compiles the exported program ahead of time into a package with a shared library.

Source: PyTorch documentation, "AOTInductor: Ahead-Of-Time Compilation for Torch.Export-ed Models".
"""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from optpipe.backends.base import (
    BuildRequest,
    BuildResult,
    Capability,
    Device,
    Marked,
    Option,
    Serving,
    SpeedBounds,
)
from optpipe.backends.inductor_layouts import AS_EXPORTED, keep_right_layouts, takes_layouts
from optpipe.backends.inductor_packages import (
    GENERAL,
    Compilation,
    Packages,
    compile_packages,
    load_package,
    name_static_package,
    parse_static_batches,
    read_static_batch,
)
from optpipe.backends.torch_backend import CUDA_GRAPH, THREADS, TorchBackend, name_processor
from optpipe.backends.torch_layers import LOWERING
from optpipe.backends.torch_layers.overflow import WIDENED
from optpipe.backends.torch_marked import MarkedProgram, mark_source, run_as_it_is
from optpipe.backends.torch_products import layers_from_program
from optpipe.backends.torch_program import export_program, export_rewritten, translate_refusals
from optpipe.backends.torch_session import (
    TorchSession,
    list_recorded_tensors,
    record_tensors,
    set_float32_products,
)
from optpipe.core import torch
from optpipe.core.entries import ArtifactInfo
from optpipe.core.errors import BadInputError, StageError, read_as_user_file
from optpipe.core.events import Steps, finish_steps
from optpipe.core.precision import Precision
from optpipe.core.wording import Argument
from optpipe.workspace.environment import get_package_version, list_gpus
from optpipe.workspace.files import hold_lock

if TYPE_CHECKING:
    from optpipe.backends.base import Session
    from optpipe.stats.ratio import Ratio

LEAST_CAPABILITY = {Precision.FP8: (8, 9), Precision.INT8: (9, 0)}
"""Least compute capability: the INT8 kernels use TMA copies and matrix instructions of Hopper."""
ON_CPU = "on a CPU, FP8 shows a GPU's outputs with attention in fp16; it is made for GPUs of compute capability 8.9 or later"
STATIC_BATCHES = "static_batches"
_MAX_AUTOTUNE = Option(
    "max_autotune", False, "measures more kernels while it compiles", builds=True
)
_STATIC = Option(
    STATIC_BATCHES,
    "",
    "batch sizes, such as 1,64, to compile separately; on a GPU the code is kept only if it is faster",
    builds=True,
)
_FUSE = Option(
    "fuse",
    True,
    "convolutions and attention by the fastest kernels of optpipe and cuDNN",
    builds=True,
)
OPTIONS: dict[Device, tuple[Option, ...]] = {
    "cpu": (THREADS, _STATIC),
    "cuda": (CUDA_GRAPH, _FUSE, _MAX_AUTOTUNE, _STATIC),
}
"""With a CUDA graph ResNet-50 in FP16 takes 0.41 instead of 0.97 ms at batch 1 on an H200 with torch 2.11. The capture fails with
torch's pool of runners, so packages are loaded for a single caller."""
CONFIGS: dict[Device, Mapping[str, Any]] = {
    "cpu": {},
    "cuda": {"cpp.vec_isa_ok": False},
}
"""GPU code needs no vector instructions of the CPU, which torch would probe for 16 to 25 s."""


class Inductor(TorchBackend):
    name = "inductor"
    purpose = "ahead-of-time compiled PyTorch"
    packages = ("torch", "triton")

    def speed_bounds(self, device: Device) -> SpeedBounds:
        return SpeedBounds(gain_over_eager=4.0 if device == "cpu" else inf, fuses=True)

    def describe_options(self, device: Device) -> tuple[Option, ...]:
        return OPTIONS[device]

    def precisions(self, device: Device) -> frozenset[Precision]:
        """Adds FP8 in linear layers, and on a GPU INT8 by optpipe's kernels."""
        own = {Precision.FP8, Precision.INT8} if device == "cuda" else {Precision.FP8}
        return TorchBackend.precisions(self, device) | own

    def probe_capability(self, device: Device) -> Capability:
        capability = TorchBackend.probe_capability(self, device)
        if capability.builds and shutil.which("g++") is None and shutil.which("clang++") is None:
            why_not = "AOTInductor needs a C++ compiler; none was found"
            return Capability(
                False, capability.runs, capability.version, why_not, "`apt-get install g++`"
            )
        return capability

    def find_obstacle(
        self,
        device: Device,
        precision: Precision | None = None,
        *,
        anywhere: bool = False,
        runs: bool = False,
    ) -> str | None:
        obstacle = TorchBackend.find_obstacle(self, device, precision, anywhere=anywhere, runs=runs)
        return obstacle or (
            find_old_gpu(device, precision)
            if precision in LEAST_CAPABILITY and not anywhere
            else None
        )

    def recipe(self, device: Device, options: Mapping[str, Any]) -> dict[str, Any]:
        kernels = (
            {"triton": get_package_version("triton"), "lowering": LOWERING}
            if device == "cuda"
            else {}
        )
        return {
            "torch": get_package_version("torch"),
            **kernels,
            "compiled_for": name_processor(device),
            "options": self.merge_options(options, device),
        }

    def merge_options(
        self, given: Mapping[str, Any], device: Device
    ) -> dict[str, bool | int | str]:
        merged = TorchBackend.merge_options(self, given, device)
        return {
            **merged,
            STATIC_BATCHES: ",".join(map(str, parse_static_batches(str(merged[STATIC_BATCHES])))),
        }

    def build(self, request: BuildRequest) -> BuildResult:
        return finish_steps(self.build_in_steps(request))

    def build_in_steps(self, request: BuildRequest) -> Steps[BuildResult]:
        """Exports, compiles, and packages; on a GPU compares FP8 and INT8 with FP16, unless `auto` does.

        Raises BadInputError for a static batch size outside the profile.
        """
        groups: list[list[Compilation]] = []
        tf32 = request.precision is Precision.TF32
        set_float32_products(tf32=tf32)
        with closing(compile_packages(groups, tf32=tf32, gpu_lock=request.gpu_lock)) as compiling:
            next(compiling)
            return (yield from self._build(request, groups, compiling))

    def _build(
        self,
        request: BuildRequest,
        groups: list[list[Compilation]],
        compiling: Steps[dict[str, str]],
    ) -> Steps[BuildResult]:
        options = self.merge_options(request.options, request.device)
        made: dict[str, object] = {
            "compiled_for": name_processor(request.device),
            "compiled_by": get_package_version("torch"),
        }
        rewritten, remarks = _lower(request, options, made)
        compiled = _list_compilations(request, options, rewritten, made)
        groups += compiled.group()
        with translate_refusals(request.card, "AOTInductor could not compile"):
            next(compiling)
        if request.gpu_lock is not None:
            yield

        layers = layers_from_program(compiled.general.program, request.precision)
        failures = finish_steps(compiling)
        _require_compiled(request, compiled, failures)
        if request.gpu_lock is not None:
            yield

        if request.device == "cuda":
            made_here = [compiled.general, *chain.from_iterable(compiled.static)]
            remarks = (*remarks, *_check_layouts(request, made_here, failures))
        if compiled.rival is not None:
            tactics = made.get("tactics", {})
            remarks = (*remarks, *_compare_with_fp16(request, compiled.rival.package, tactics))
        variants = len(compiled.static)
        kept, said = _keep_fastest(request, compiled.sizes if variants else (), failures, variants)
        made[STATIC_BATCHES] = kept
        low, _, high = request.card.batch_range
        remarks = (*remarks, *(said if low < high else ()))
        more = tuple(map(name_static_package, kept))
        details = {**record_tensors(request), **made}
        return BuildResult(layers, GENERAL, options, details, remarks=remarks, more_files=more)

    def open_marked(self, info: ArtifactInfo, request: BuildRequest, source: Path) -> Marked:
        """Compiles the program again, for the samples' shapes."""
        program, _ = _lower(request, info.options, {})
        if program is None:
            program = export_program(request).run_decompositions({}).module()

        def compile_program(marked: Any, examples: Sequence[Any]) -> Any:
            with (
                TemporaryDirectory() as folder,
                translate_refusals(request.card, "AOTInductor could not compile"),
            ):
                package = Path(folder, GENERAL)
                Compilation(
                    torch.export.export(marked, tuple(examples)), package, CONFIGS[request.device]
                ).run()
                return load_package(package, request.device)

        module = mark_source(request)
        build = MarkedProgram(program, request, compile_program, module)
        build.open_apart = lambda: (build, MarkedProgram(program, request, run_as_it_is, module))
        return module, build

    def list_files(self, info: ArtifactInfo) -> tuple[str, ...]:
        return (GENERAL, *map(name_static_package, self.list_static_batches(info)))

    def load(self, directory: Path, info: ArtifactInfo, options: Mapping[str, Any]) -> "Session":
        merged = self.merge_options({**info.options, **options}, info.device)
        inputs = list_recorded_tensors(info, "inputs")
        with read_as_user_file(directory / GENERAL, "an AOTInductor package", "build it again"):
            packages = Packages(directory, info.device, inputs, self.list_static_batches(info))
        return TorchSession(packages, info, merged)

    def find_run_blocker(self, info: ArtifactInfo) -> str | None:
        """Code with optpipe's layers also needs the operator that it was compiled for."""
        if "tactics" in info.details and info.details.get("lowering") != LOWERING:
            return "built by an older version of optpipe's kernels; build it again"
        return TorchBackend.find_run_blocker(self, info)

    def list_static_batches(self, info: ArtifactInfo) -> tuple[int, ...]:
        return tuple(info.details.get(STATIC_BATCHES, ()))

    def serving(self, info: ArtifactInfo, options: Mapping[str, Any], version: str) -> Serving:
        """Triton's PyTorch backend loads only the code for all batch sizes and addresses tensors by position.

        It does not have the operator that code with optpipe's layers calls.
        """
        if "tactics" in info.details:
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
    if device == "cpu" or not list_gpus():
        return None
    gpu, least = list_gpus()[0], LEAST_CAPABILITY[precision]
    if tuple(map(int, gpu.compute_capability.split("."))) >= least:
        return None
    needed = ".".join(map(str, least))
    return f"needs a GPU of compute capability {needed} or later for {precision}; {gpu.name} has {gpu.compute_capability}"


def _choose_static_batches(request: BuildRequest, text: str) -> tuple[int, ...]:
    low, usual, high = request.card.batch_range
    sizes = parse_static_batches(text)
    if outside := [size for size in sizes if not low <= size <= high]:
        raise BadInputError(
            f"option static_batches={text}: {outside[0]} is outside the profile {low}:{usual}:{high}; widen it with "
            + Argument("batch", ("MIN", "OPT", "MAX"))
        )
    return sizes if request.card.batched else ()


@dataclass(frozen=True, slots=True)
class _Compilations:
    """The packages that a build compiles."""

    general: Compilation
    """For all batch sizes, or for the only one."""
    static: Sequence[Sequence[Compilation]]
    """For single batch sizes, by variant and size."""
    sizes: Sequence[int]
    rival: Compilation | None
    """The model in FP16, which the build is measured against."""

    def group(self) -> list[list[Compilation]]:
        """The compilations of each process."""
        rivals = [] if self.rival is None else [[self.rival]]
        return [[self.general], *(list(variant) for variant in self.static if variant), *rivals]


def _list_compilations(
    request: BuildRequest,
    options: Mapping[str, Any],
    rewritten: Any,
    made: Mapping[str, object],
) -> _Compilations:
    """Exports the program, `rewritten` or as it is, in all variants and sizes."""
    sizes = _choose_static_batches(request, str(options[STATIC_BATCHES]))
    on_gpu, lowered = request.device == "cuda", request.precision in LEAST_CAPABILITY
    configs = {
        **CONFIGS[request.device],
        **({"max_autotune": True} if options.get("max_autotune") else {}),
    }
    export = partial(export_rewritten, rewritten) if rewritten is not None else export_program
    program = export(request)
    rival = None
    if lowered and on_gpu and request.gpu_lock is None:
        rival = _export_rival(request, options, configs)

    low, _, high = request.card.batch_range
    if on_gpu and low == high and request.card.batched:
        sizes = sizes or (low,)
    # of a single size, the code for all sizes is the first variant
    exports = [(export, configs)] if low < high else []
    if "convolution" in str(made.get("tactics", {})) and not lowered and WIDENED not in made:
        exports.append((export_program, configs))  # without optpipe's kernels
    if on_gpu and takes_layouts(program):
        exports.append((export, {**configs, **AS_EXPORTED}))

    fixed = {size: replace(request, card=request.card.with_batch(size)) for size in sizes}
    static = [
        [
            Compilation(make(sized), request.directory / name_static_package(size, variant), chosen)
            for size, sized in fixed.items()
        ]
        for variant, (make, chosen) in enumerate(exports)
    ]
    general = Compilation(program, request.directory / GENERAL, configs)
    return _Compilations(general, static, sizes, rival)


def _export_rival(
    request: BuildRequest, options: Mapping[str, Any], configs: Mapping[str, Any]
) -> Compilation:
    wanted = replace(request, precision=Precision.FP16)
    half, _ = _lower(wanted, options, {})
    program = export_program(wanted) if half is None else export_rewritten(half, wanted)
    return Compilation(program, request.directory / "fp16.pt2", configs)


def _require_compiled(
    request: BuildRequest, compiled: _Compilations, failures: Mapping[str, str]
) -> None:
    """Raises StageError for a package that a build cannot do without."""
    needed = {compiled.general.package: ""}
    if compiled.rival is not None:
        needed[compiled.rival.package] = (
            f" in fp16, to measure {request.precision.upper()} against it"
        )
    for package, use in needed.items():
        if why_not := failures.get(package.name):
            raise StageError(f"AOTInductor could not compile {request.card.name}{use}: {why_not}")


def _compare_with_fp16(request: BuildRequest, rival: Path, tactics: Any) -> Iterator[str]:
    """Measures the build against the package `rival`, and deletes that; yields remarks."""
    from optpipe.backends.torch_layers.tuning import compare_calls, draw_inputs, explain_speeds

    own, half = (
        load_package(package, request.device) for package in (request.directory / GENERAL, rival)
    )
    speeds = compare_calls(own, half, draw_inputs(request.card.inputs))
    rival.unlink()
    yield from explain_speeds(speeds, request.precision, tactics)


def _lower(
    request: BuildRequest, options: Mapping[str, Any], made: dict[str, object]
) -> tuple[Any, tuple[str, ...]]:
    """The rewritten program, or None to export the module, and remarks; adds the layers' measured tactics to `made`."""
    half, fp8 = request.precision is Precision.FP16, request.precision is Precision.FP8
    fuse = bool(options.get("fuse"))
    if not (fp8 or request.precision is Precision.INT8 or (half and fuse)):
        return None, ()
    old = fuse and find_old_gpu(request.device, Precision.INT8)
    said = (
        ("fuse has no effect: optpipe's kernels need a GPU of compute capability 9.0",)
        if old
        else ()
    )
    if half and old:
        return None, said
    from optpipe.backends.torch_fp8 import lower_fp8
    from optpipe.backends.torch_layers.lowering import lower_program
    from optpipe.backends.torch_layers.tuning import (
        draw_inputs,
        explain_copies,
        measure_copies,
        summarize_choices,
        tune_program,
    )

    program, missed = (
        lower_fp8(request, kernels=fuse and not old) if fp8 else lower_program(request)
    )
    missed = (*missed, *said, *((ON_CPU,) if fp8 and request.device == "cpu" else ()))
    if widened := program.meta.get(WIDENED):
        made[WIDENED] = [*widened]
    choices: Mapping[int, Any] = {}
    if request.device == "cuda":
        drawn = draw_inputs(request.card.inputs)
        with translate_refusals(request.card, "torch could not run the program of"):
            tuned = tune_program(program, drawn)
            copies = measure_copies(program, drawn[request.card.inputs[0].opt[0]])
        choices = tuned.choices
        if any(choices.values()):
            made["in_place"] = tuned.in_place
        if copies:
            made["layout_copies"] = copies
            missed = (*missed, explain_copies(copies))
    if request.precision is Precision.INT8 or any(choices.values()):
        made |= {
            "triton": get_package_version("triton"),
            "lowering": LOWERING,
            "tactics": summarize_choices(choices),
        }
    return program, missed


def _check_layouts(
    request: BuildRequest, compiled: Sequence[Compilation], failures: Mapping[str, str]
) -> Iterator[str]:
    """Builds again without torch's choice of layouts what that choice made wrong; yields a remark for each.

    Holds the lock of the request, since compiling again times kernels.
    """
    from optpipe.backends.torch_layers.tuning import draw_inputs

    lock = nullcontext() if request.gpu_lock is None else hold_lock(request.gpu_lock)
    with lock:
        for compilation in compiled:
            if compilation.package.name in failures or not takes_layouts(compilation.program):
                continue
            drawn = draw_inputs(request.card.inputs)
            inputs = drawn[request.card.inputs[0].opt[0]]
            if (size := read_static_batch(compilation.package.name)) is not None:
                inputs = drawn.get(size) or draw_inputs(request.card.with_batch(size).inputs)[size]
            if (remark := keep_right_layouts(compilation, inputs)) is not None:
                yield remark


def _keep_fastest(
    request: BuildRequest, sizes: Sequence[int], failures: Mapping[str, str], variants: int
) -> tuple[list[int], list[str]]:
    """Renames the packages that are kept, and deletes others; returns their sizes, and remarks on the other sizes.

    A size keeps its fastest variant, on a GPU only if it is shown to be faster than the code for all sizes.
    """
    kept, said = [], []
    general = (
        load_package(request.directory / GENERAL, request.device)
        if sizes and request.device == "cuda"
        else None
    )
    for size in sizes:
        names = [name_static_package(size, variant) for variant in range(variants)]
        codes = [request.directory / name for name in names if name not in failures]
        if codes:
            best, why_not = _find_fastest(request, size, codes, general)
        else:
            best, why_not = None, f"size-specific code could not be compiled: {failures[names[0]]}"
        for code in codes:
            if code != best:
                code.unlink()
        if best is None:
            said.append(f"batch {size} runs the code for all sizes: {why_not}")
        else:
            best.replace(request.directory / names[0])
            kept.append(size)
    return kept, said


def _find_fastest(
    request: BuildRequest, size: int, codes: Sequence[Path], general: Any
) -> tuple[Path | None, str]:
    """The fastest package for `size`, or None and the reason if it is not shown to be faster than `general`, the code for all sizes.

    Without `general`, nothing is measured and the first package is returned.
    """
    best, *others = codes
    if general is None:
        return best, ""
    from optpipe.backends.torch_layers.tuning import compare_calls, draw_inputs, is_faster

    def compare(contender: Any, rival: Any) -> "Ratio":
        return next(iter(compare_calls(contender, rival, inputs).values()))

    inputs, own = (
        draw_inputs(request.card.with_batch(size).inputs),
        load_package(best, request.device),
    )
    for code in others:
        other = load_package(code, request.device)
        if is_faster(compare(other, own)):
            best, own = code, other
    ratio = compare(own, general)
    return (
        (best, "") if is_faster(ratio) else (None, f"size-specific code is {ratio} times as fast")
    )
