"""The command of NVIDIA's own tool that builds the same engine: `trtexec`, or `tensorrt_rtx` for TensorRT-RTX.

Flags as `trtexec --help` of TensorRT 11.1 lists them. Networks are strongly typed there: the precision is in the graph.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from optpipe.backends.tensorrt_builder import PLUGIN_PREFIX
from optpipe.backends.tensorrt_options import (
    BuilderOptions,
    capabilities_from_text,
    list_profile_shapes,
    options_from_details,
)
from optpipe.core.card import card_from_file
from optpipe.core.entries import ArtifactInfo, ModelInfo
from optpipe.core.errors import BadInputError
from optpipe.core.precision import Precision
from optpipe.core.tensors import InputSpec, Shape
from optpipe.workspace.file_names import CARD, ONNX
from optpipe.workspace.store import Store

TOOLS = {"tensorrt": "trtexec", "tensorrt-rtx": "tensorrt_rtx"}


@dataclass(frozen=True, slots=True)
class ToolCommand:
    """A command of another tool."""

    arguments: tuple[str, ...]
    notes: tuple[str, ...]


def command_from_artifact(prefix: str, store: Store) -> ToolCommand:
    """The command for a stored TensorRT artifact. Raises BadInputError for an entry of another kind or backend."""
    found = store.find(prefix)
    backend = found.manifest.info.get("backend") if found.manifest.kind == ArtifactInfo.KIND else None
    if backend not in TOOLS:
        raise BadInputError(
            f"--as trtexec needs an artifact of {' or '.join(TOOLS)}; "
            f"{found.path.name} is {f'from {backend}' if backend else 'not an artifact'}"
        )
    entry = store.find(found.id, ArtifactInfo)
    info = entry.info
    parents = [store.find(parent) for parent in entry.manifest.parents]
    model = next(each for each in parents if each.manifest.kind == ModelInfo.KIND)
    options = options_from_details(info.details)
    arguments = (
        TOOLS[info.backend],
        f"--onnx={parents[-1].file(ONNX)}",
        f"--saveEngine={info.file}",
        *list_shape_flags(options, card_from_file(model.file(CARD)).inputs),
        *list_builder_flags(options, info.precision, info.backend),
        *(f"--dynamicPlugins={path}" for path in sorted(entry.path.glob(f"{PLUGIN_PREFIX}*"))),
        "--profilingVerbosity=detailed",
        "--skipInference",
    )
    notes = [f"{info.precision} is in the graph: networks are strongly typed"]
    if info.backend == "tensorrt-rtx":
        notes.append("flags are those of trtexec 11.1; `tensorrt_rtx --help` tells which of them your version has")
    return ToolCommand(arguments, tuple(notes))


def list_shape_flags(options: BuilderOptions, inputs: tuple[InputSpec, ...]) -> Iterator[str]:
    """The optimization profiles; inputs of one fixed shape are fixed in the graph and take no flag."""
    profiles = list_profile_shapes(options, inputs)
    for index, profile in enumerate(profiles):
        changing = [each for each in inputs if each.min != each.max]
        shown = [each for each in profile if each.name in {one.name for one in changing}]
        if not shown:
            return
        if len(profiles) > 1:
            yield f"--profile={index}"
        yield f"--minShapes={_format_shapes((each.name, each.min) for each in shown)}"
        yield f"--optShapes={_format_shapes((each.name, each.opt) for each in shown)}"
        yield f"--maxShapes={_format_shapes((each.name, each.max) for each in shown)}"


def _format_shapes(shapes: Iterable[tuple[str, Shape]]) -> str:
    return ",".join(f"{name}:{'x'.join(map(str, shape))}" for name, shape in shapes)


def list_builder_flags(options: BuilderOptions, precision: Precision, backend: str) -> Iterator[str]:
    """The builder's options; those at their defaults take no flag."""
    if precision is not Precision.TF32:
        yield "--noTF32"
    if options.workspace_bytes:
        yield f"--memPoolSize=workspace:{options.workspace_bytes}B"
    if options.optimization_level >= 0:
        yield f"--builderOptimizationLevel={options.optimization_level}"
    if options.hardware_compatibility != "none":
        yield f"--hardwareCompatibilityLevel={options.hardware_compatibility}"
    if options.aux_streams >= 0:
        yield f"--maxAuxStreams={options.aux_streams}"
    if options.tactic_sources:
        yield f"--tacticSources={options.tactic_sources}"
    if options.timing_cache:
        yield f"--timingCacheFile={options.timing_cache}"
    if options.sparse_weights:
        yield "--sparsity=enable"
    for flag, wanted in (
        ("--versionCompatible", options.version_compatible),
        ("--refit", options.refit or (options.strip_weights and backend == "tensorrt-rtx")),
        ("--stripWeights", options.strip_weights),
    ):
        if wanted:
            yield flag
    if options.compute_capabilities and backend == "tensorrt-rtx":
        numbers = (name.removeprefix("SM") for name in capabilities_from_text(options.compute_capabilities))
        yield f"--computeCapabilities={','.join(numbers)}"
