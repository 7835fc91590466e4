"""An exported torch program in one precision: what the torch, inductor and torch-tensorrt backends start from.

The precision is set on the module before export, as types of its parameters; inputs and outputs stay FP32, as in the
ONNX graphs. It is read back from the exported program's own operators.
"""

import json
import os
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from optpipe.backends.base import Backend, BuildRequest, Capability, Device, prefers_channels_last
from optpipe.core.card import InputSpec, ModelCard
from optpipe.core.entries import ArtifactInfo
from optpipe.core.errors import OptpipeError, StageError, escape, first_line
from optpipe.core.precision import LayerType, Precision
from optpipe.core.quantity import format_duration
from optpipe.workspace.environment import get_gpu_name, get_package_version, list_gpus, read_cpu_model

_DTYPES = {Precision.FP32: "float32", Precision.TF32: "float32", Precision.FP16: "float16", Precision.BF16: "bfloat16"}
_NAMES = {
    "torch.float32": "fp32",
    "torch.float16": "fp16",
    "torch.bfloat16": "bf16",
    "torch.float64": "fp64",
    "torch.float8_e4m3fn": "fp8",
}
_DATA_MOVEMENT = {
    "_to_copy", "clone", "view", "permute", "expand", "cat", "slice", "select", "unsqueeze", "squeeze", "alias",
}  # fmt: skip
TORCH_PRECISIONS = frozenset(_DTYPES)
"""Of exported programs. INT8 is not here: torch's own convolutions have no INT8 kernel on a GPU; `torch_int8` has."""


def type_name_from_torch(dtype: Any) -> str:
    """A torch type as precisions are called: `fp16` for `torch.float16`; others by their own name."""
    return _NAMES.get(str(dtype), str(dtype).removeprefix("torch."))


def cast_module(precision: Precision, module: Any, device: Device) -> Any:
    """`module` with parameters of `precision` on `device`, in the layout that is fast there; FP32 tensors in and out."""
    import torch

    dtype = getattr(torch, _DTYPES[precision])
    layout = torch.channels_last if prefers_channels_last(precision, device) else torch.contiguous_format
    inner = module.to(device=device, dtype=dtype, memory_format=layout)

    class InPrecision(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = inner

        def forward(self, *inputs: Any) -> Any:
            outputs = self.model(*(_cast(each, dtype, layout) for each in inputs))
            flat = outputs if isinstance(outputs, tuple) else (outputs,)
            return tuple(_cast(each, torch.float32, layout) for each in flat)

    return InPrecision().eval()


def _cast(tensor: Any, dtype: Any, layout: Any) -> Any:
    """Floating tensors in `dtype`, images in `layout`; token ids stay as they are."""
    import torch

    if not tensor.is_floating_point():
        return tensor
    return tensor.to(dtype=dtype, memory_format=layout if tensor.dim() == 4 else torch.contiguous_format)


def make_example_inputs(inputs: tuple[InputSpec, ...], device: str) -> tuple[Any, ...]:
    """Seeded tensors of the `opt` shapes; an open dimension of size 1 becomes 2, since export takes 1 for a constant."""
    import torch

    generator = torch.Generator().manual_seed(0)
    tensors = []
    for each in inputs:
        shape = [
            max(usual, 2) if low != high and high > 1 else usual
            for low, usual, high in zip(each.min, each.opt, each.max, strict=True)
        ]
        if each.dtype.startswith("float"):
            tensors.append(torch.randn(shape, generator=generator).to(device))
        else:
            tensors.append(torch.ones(shape, dtype=getattr(torch, each.dtype), device=device))
    return tuple(tensors)


def make_dynamic_shapes(inputs: tuple[InputSpec, ...]) -> tuple[dict[int, Any], ...]:
    """One named dimension per open axis: the batch axis of all inputs is the same batch, equal ranges share a name."""
    import torch

    dims: dict[tuple[str, int, int], Any] = {}
    shapes = []
    for each in inputs:
        axes = {}
        for axis, (low, high) in enumerate(zip(each.min, each.max, strict=True)):
            if low != high:
                name = "batch" if axis == each.batch else f"dim{axis}"
                axes[axis] = dims.setdefault((name, low, high), torch.export.Dim(name, min=low, max=high))
        shapes.append(axes)
    return tuple(shapes)


def export_program(request: BuildRequest) -> Any:
    """`torch.export` of the source module in the precision asked for, run once: export does not see that an FP32 tensor made
    in forward meets FP16 weights.

    Raises what `export_module` raises, and `StageError` where the program does not run.
    """
    import torch

    name, precision = request.card.name, request.precision
    if request.module is None:
        raise StageError(f"{name} has no torch module to export")
    program = export_module(cast_module(precision, request.module(), request.device), request)
    try:
        with torch.no_grad():
            program.module()(*make_example_inputs(request.card.inputs, request.device))
    except Exception as error:
        cast = precision in (Precision.FP16, Precision.BF16)
        way_out = "--precision fp32, or on a GPU --backend onnxruntime" if cast else "another backend"
        raise StageError(f"torch cannot run {name} in {precision}: {first_line(error)}\ntry {way_out}") from error
    return program


def export_rewritten(program: Any, request: BuildRequest) -> Any:
    """`torch.export` of a GraphModule that was rewritten after its export, as `export_module` does it."""
    import torch

    class Rewritten(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.program = program

        def forward(self, *inputs: Any) -> Any:
            return self.program(*inputs)

    return export_module(Rewritten(), request)


def copy_where_needed(program: Any) -> None:
    """Views of a GraphModule become reshapes: exported again, a tensor may lie in another way than the one that was recorded."""
    import torch

    aten = torch.ops.aten
    for node in program.graph.nodes:
        if node.target in (aten.view.default, aten._unsafe_view.default):
            node.target = aten.reshape.default
    program.recompile()


def export_module(module: Any, request: BuildRequest) -> Any:
    """`torch.export` of a module whose starred forward takes the card's inputs.

    Raises `StageError` with torch's reason, where it does not export the module in all shapes of the card.
    """
    import torch

    examples = make_example_inputs(request.card.inputs, request.device)
    with torch.no_grad(), translate_refusals(request.card, "torch.export could not export"):
        return torch.export.export(module, examples, dynamic_shapes=(make_dynamic_shapes(request.card.inputs),))


@contextmanager
def translate_refusals(card: ModelCard, what: str) -> Iterator[None]:
    """Whatever torch raises while the block works on the model becomes a `StageError` with torch's reason and a way out."""
    try:
        yield
    except OptpipeError:
        raise
    except Exception as error:
        low, _, high = card.batch_range
        fixed = "a fixed size (--batch 1) or " if low != high else ""
        raise StageError(f"{what} {card.name}: {_find_reason(error)}\ntry {fixed}another backend") from error


def _find_reason(error: Exception) -> str:
    """torch's error on one line: of violated constraints, the range that torch suggests in place of the one asked for."""
    lines = [line.strip() for line in str(error).splitlines()]
    if "Suggested fixes:" not in lines:
        return f"{type(error).__name__}: {first_line(error)}"
    suggested = [line for line in lines[lines.index("Suggested fixes:") + 1 :] if " = " in line]
    return escape(f"{lines[0].partition('!')[0]}; torch suggests {', '.join(suggested)}")


def layers_from_program(program: Any, precision: Precision) -> tuple[LayerType, ...]:
    """The operators of an exported program by the type of their first floating input, with their MACs."""
    import torch
    from torch.utils.flop_counter import flop_registry

    layers = []
    for node in program.run_decompositions().graph.nodes:
        packet = getattr(node.target, "overloadpacket", None)
        if str(packet) == "optpipe.layer":
            from optpipe.backends.torch_int8.operators import describe_layer

            layers.append(replace(describe_layer(node), macs=_count_flops(flop_registry[packet], node) // 2))
            continue
        tensors = [each.meta["val"] for each in node.all_input_nodes if isinstance(each.meta.get("val"), torch.Tensor)]
        floats = [tensor for tensor in tensors if tensor.is_floating_point()]
        if packet is None or not floats or not isinstance(node.meta.get("val"), torch.Tensor | tuple):
            continue
        kind = type_name_from_torch(floats[0].dtype)
        flops = _count_flops(flop_registry[packet], node) if packet in flop_registry else 0
        if kind == "fp32" and flops and precision is Precision.TF32:
            kind = "tf32"
        op = str(packet).rpartition(".")[2]
        if flops or op not in _DATA_MOVEMENT:
            layers.append(LayerType(node.name, op, kind, flops // 2))
    return tuple(layers)


def _count_flops(count: Any, node: Any) -> int:
    """Floating-point operations of a node at the sizes of the example: two per multiply-add."""
    import torch

    def sized(value: Any) -> Any:
        if isinstance(value, torch.fx.Node):
            value = value.meta.get("val")
        if isinstance(value, torch.Tensor):
            sizes = [int(size.node.hint) if hasattr(size, "node") else int(size) for size in value.shape]
            return torch.empty(sizes, dtype=value.dtype, device="meta")
        return tuple(map(sized, value)) if isinstance(value, tuple | list) else value

    out = node.meta["val"]
    out = out[0] if isinstance(out, tuple) else out
    keywords = {key: sized(value) for key, value in node.kwargs.items()}
    return int(count(*(sized(each) for each in node.args), **keywords, out_val=sized(out)))


def refuse_pickles(package: Path) -> None:
    """Raises `StageError` where a torch package holds anything that loading would unpickle."""
    with zipfile.ZipFile(package) as archive:
        for name in archive.namelist():
            if name.endswith("_config.json") and _names_pickle(json.loads(archive.read(name))):
                raise StageError(
                    f"{package.name} contains pickled constants, which optpipe does not load; use another backend for this model"
                )


def _names_pickle(value: Any) -> bool:
    if isinstance(value, Mapping):
        return bool(value.get("use_pickle")) or any(_names_pickle(each) for each in value.values())
    return isinstance(value, list) and any(_names_pickle(each) for each in value)


def set_assembler() -> None:
    """Has Triton assemble in this process with the ptxas that torch's compile workers take, unless TRITON_PTXAS_PATH names one.

    torch 2.11 ships ptxas 13.0, and Triton 12.8. The workers set this variable for themselves alone, and Triton's cache is keyed by the
    assembler's version: each candidate was compiled once more, one after the other, in the process that timed it.
    """
    import torch

    ptxas = Path(torch.__file__).parent / "bin" / "ptxas"
    if os.access(ptxas, os.X_OK):
        os.environ.setdefault("TRITON_PTXAS_PATH", str(ptxas))


def set_float32_products(*, tf32: bool) -> None:
    """FP32 means IEEE arithmetic unless TF32 was asked for: in cuBLAS, in cuDNN and in what they are called from."""
    import torch

    torch.backends.cuda.matmul.allow_tf32 = tf32
    torch.backends.cudnn.allow_tf32 = tf32


class TorchBackend(Backend):
    """All of a backend but its recipe, its build and its session."""

    package = "torch"
    needs_module = True

    def precisions(self, device: Device) -> frozenset[Precision]:
        """Floating point; TF32 is a type of NVIDIA's Tensor Cores."""
        return TORCH_PRECISIONS if device == "cuda" else TORCH_PRECISIONS - {Precision.TF32}

    def devices(self) -> tuple[Device, ...]:
        return ("cuda", "cpu")

    def probe_capability(self, device: Device) -> Capability:
        """torch is always there; a GPU may not be."""
        version = get_package_version("torch")
        if device == "cuda" and not list_gpus():
            return Capability(False, False, version, "no NVIDIA GPU on this machine")
        return Capability(True, True, version)

    def find_run_blocker(self, info: ArtifactInfo) -> str | None:
        """It needs the kind of processor that it was compiled for, and the torch whose library its code calls."""
        here, version = name_processor(info.device), get_package_version("torch")
        if (made_for := info.details.get("compiled_for", here)) != here:
            return f"compiled for {made_for}, this is {here}"
        if (made_by := info.details.get("compiled_by", version)) != version:
            return f"compiled by torch {made_by}, this is torch {version}"
        return TorchBackend.probe_capability(self, info.device).why_not  # what only building needs may be missing

    def advise_fusion(self, options: Mapping[str, Any]) -> str:
        """torch fuses where it is told to; beside it the other of the two does."""
        if not options.get("fuse", True):
            option = f"optpipe build --option {self.name}.fuse=true"
            return f"{option} fuses elementwise work into the matrix kernels; so does --backend inductor"
        return Backend.advise_fusion(self, options).replace(f"{self.name},", "")

    def describe_details(self, details: Mapping[str, Any]) -> Iterator[str]:
        """What computes an INT8 network at each batch size, and what the build measured against FP16, in turns on its GPU."""
        for batch, chosen in details.get("tactics", {}).items():
            kernels = ", ".join(f"{name} {count}" for name, count in sorted(chosen["kernels"].items()))
            yield f"tactics  batch {batch}: {format_duration(chosen['sum_us'] * 1e3)} in {kernels}"
        for batch, each in details.get("against_fp16", {}).items():
            ratio = f"{each['speed']:.2f} ({each['low']:.2f} to {each['high']:.2f}) times the speed of fp16"
            yield f"against fp16  batch {batch}: {ratio}{'' if each['pays'] else ', not shown to be faster'}"


def name_processor(device: Device) -> str | None:
    """The GPU, or the CPU, that code for `device` is compiled for here."""
    return (get_gpu_name() if device == "cuda" else None) or read_cpu_model()


def record_tensors(request: BuildRequest) -> dict[str, Any]:
    """Names, types and shapes of inputs and outputs, which a torch package does not keep."""
    card = request.card
    return {
        "inputs": [each.tensor.to_dict() for each in card.inputs],
        "outputs": [each.to_dict() for each in card.outputs],
    }
