"""Exported torch programs in one precision, from which the torch, inductor, and torch-tensorrt backends start; and their sessions.

The module's parameters are cast before the export; inputs and outputs stay FP32, as in the ONNX graphs. The precision is read
back from the operators of the exported program.
"""

import json
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from difflib import SequenceMatcher
from math import prod
from pathlib import Path
from typing import Any, Self

from optpipe.backends.base import (
    Backend,
    Binding,
    BuildRequest,
    Capability,
    Device,
    MarkedNetwork,
    Option,
    Run,
    prefers_channels_last,
)
from optpipe.core import np, torch
from optpipe.core.card import InputSpec, ModelCard, TensorSpec, tensor_from_dict
from optpipe.core.entries import ArtifactInfo
from optpipe.core.errors import (
    BadInputError,
    OptpipeError,
    StageError,
    escape,
    first_line,
    is_out_of_memory,
)
from optpipe.core.precision import UNATTRIBUTED, LayerType, Precision
from optpipe.core.wording import Argument, Message, Text
from optpipe.workspace.environment import (
    get_gpu_name,
    get_package_version,
    list_gpus,
    read_cpu_model,
)

_DTYPES = {
    Precision.FP32: "float32",
    Precision.TF32: "float32",
    Precision.FP16: "float16",
    Precision.BF16: "bfloat16",
}
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
"""Precisions of exported programs. torch has no INT8 convolutions on a GPU; `torch_layers` has."""
THREADS = Option("threads", 0, "threads of one operator; with 0, torch chooses their number")
CUDA_GRAPH = Option("cuda_graph", True, "captures an inference into a CUDA graph")


def type_name_from_torch(dtype: Any) -> str:
    """`fp16` for `torch.float16`, and so on; other types keep torch's name."""
    return _NAMES.get(str(dtype), str(dtype).removeprefix("torch."))


def cast_module(precision: Precision, module: Any, device: Device) -> Any:
    dtype = getattr(torch, _DTYPES[precision])
    layout = (
        torch.channels_last if prefers_channels_last(precision, device) else torch.contiguous_format
    )
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
    if not tensor.is_floating_point():
        return tensor
    return tensor.to(
        dtype=dtype, memory_format=layout if tensor.dim() == 4 else torch.contiguous_format
    )


def make_example_inputs(inputs: tuple[InputSpec, ...], device: str) -> tuple[Any, ...]:
    """Seeded tensors of the `opt` shapes; an open dimension of size 1 becomes 2, since export specializes on 1."""
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
    """One named dimension per open axis. Inputs share the batch, and equal ranges of one axis share a dimension."""
    dims: dict[tuple[str, int, int], Any] = {}
    shapes = []
    for each in inputs:
        axes = {}
        for axis, (low, high) in enumerate(zip(each.min, each.max, strict=True)):
            if low != high:
                name = "batch" if axis == each.batch else f"dim{axis}"
                axes[axis] = dims.setdefault(
                    (name, low, high), torch.export.Dim(name, min=low, max=high)
                )
        shapes.append(axes)
    return tuple(shapes)


def export_program(request: BuildRequest) -> Any:
    """`torch.export` of the source module in the requested precision.

    Raises what `export_module` raises, and `StageError` if the program does not run: export does not see that an FP32 tensor
    made in forward meets FP16 weights.
    """
    name, precision = request.card.name, request.precision
    if request.module is None:
        raise StageError(f"{name} has no torch module to export")
    program = export_module(cast_module(precision, request.module(), request.device), request)
    try:
        with torch.no_grad():
            program.module()(*make_example_inputs(request.card.inputs, request.device))
    except Exception as error:
        cast = precision in (Precision.FP16, Precision.BF16)
        way_out: Text = "try another backend"
        if cast:
            way_out = "try " + Argument("precision", "fp32") + ", or on a GPU "
            way_out += Argument("backend", "onnxruntime")
        raise StageError(
            f"torch cannot run {name} in {precision}: {first_line(error)}", remedy=way_out
        ) from error
    return program


def export_with_weights(request: BuildRequest, precision: Precision) -> tuple[Any, dict[str, Any]]:
    """The exported program in `precision`, and the module's FP32 weights by the program's names for them."""
    module = request.module() if request.module else None
    weights = (
        {}
        if module is None
        else {f"model.{name}": each for name, each in module.state_dict().items()}
    )
    wanted = replace(request, precision=precision, module=(lambda: module) if module else None)
    return export_program(wanted), weights


def export_rewritten(program: Any, request: BuildRequest) -> Any:
    """Exports a GraphModule with its images channels last, whatever layouts it was traced with.

    Raises what `export_module` raises.
    """
    from optpipe.backends.torch_layers.layouts import make_arranger

    arranger = make_arranger()

    class Rewritten(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.program = program

        def forward(self, *inputs: Any) -> Any:
            return arranger(self.program).run(*inputs)

    return export_module(Rewritten(), request)


def copy_where_needed(program: Any) -> None:
    """Turns the views of a GraphModule into reshapes: in another export, a tensor may have other strides than the recorded ones."""
    aten = torch.ops.aten
    for node in program.graph.nodes:
        if node.target in (aten.view.default, aten._unsafe_view.default):
            node.target = aten.reshape.default
    program.recompile()


def export_module(module: Any, request: BuildRequest) -> Any:
    """`torch.export` of a module whose starred forward takes the card's inputs.

    Raises `StageError` with torch's reason if torch cannot export the module for all shapes of the card.
    """
    examples = make_example_inputs(request.card.inputs, request.device)
    with torch.no_grad(), translate_refusals(request.card, "torch.export could not export"):
        return torch.export.export(
            module, examples, dynamic_shapes=(make_dynamic_shapes(request.card.inputs),)
        )


@contextmanager
def translate_refusals(card: ModelCard, what: str) -> Iterator[None]:
    try:
        yield
    except OptpipeError:
        raise
    except Exception as error:
        low, _, high = card.batch_range
        fixed = "a fixed size (" + Argument("batch", 1) + ") or " if low != high else ""
        reason, lines = (
            f"{type(error).__name__}: {first_line(error)}",
            [each.strip() for each in str(error).splitlines()],
        )
        if "Suggested fixes:" in lines:  # constraints are violated
            suggested = [
                each for each in lines[lines.index("Suggested fixes:") + 1 :] if " = " in each
            ]
            reason = escape(f"{lines[0].partition('!')[0]}; torch suggests {', '.join(suggested)}")
        raise StageError(
            f"{what} {card.name}: {reason}", remedy=Message("try ", fixed, "another backend")
        ) from error


def read_arguments(node: Any) -> dict[str, Any]:
    """The arguments of a torch operator's call by name, in the order of its schema, including defaults."""
    schema = getattr(node.target, "_schema", None)
    known = () if schema is None else schema.arguments
    given = {
        **{each.name: value for each, value in zip(known, node.args, strict=False)},
        **node.kwargs,
    }
    return {each.name: given.get(each.name, each.default_value) for each in known}


def read_product(node: Any) -> tuple[Any, Any, Any, bool] | None:
    """A linear layer's input, weight, and bias, and whether the weight is (input features, output features).

    The first three are nodes of the program; the bias may be None. None if `node` is not a product with a stored weight.
    """
    aten = torch.ops.aten
    given = read_arguments(node) if node.op == "call_function" else {}
    if node.target is aten.linear.default:
        found = (given["input"], given["weight"], given["bias"], False)
    elif (
        node.target is aten.addmm.default and given["alpha"] == given["beta"] == 1
    ):  # GPT-2's layers
        found = (given["mat1"], given["mat2"], given["self"], True)
    elif node.target in (aten.mm.default, aten.matmul.default):
        found = (*node.args, None, True)
    else:
        return None
    return found if getattr(found[1], "op", None) == "get_attr" else None


def fold_normalization(
    weight: Any, bias: Any, parts: Iterable[Any], epsilon: float
) -> tuple[Any, Any]:
    """Weight and bias of a convolution that replaces it and the batch normalization after it.

    `parts` are scale and shift, which may be None, mean, and variance.
    """
    scale, shift, mean, variance = parts
    factor = (variance + epsilon).rsqrt()
    factor = factor if scale is None else factor * scale
    bias = (bias - mean) * factor
    return weight * factor.view(
        -1, *[1] * (weight.dim() - 1)
    ), bias if shift is None else bias + shift


def add_constant(program: Any, name: str, value: Any) -> Any:
    program.register_buffer(name, value)
    return program.graph.get_attr(name)


def split_outputs(graph: Any, joined: Any, nodes: Sequence[Any], sizes: Sequence[int]) -> list[Any]:
    """Replaces `nodes` by parts of the last axis of `joined`; returns the parts."""
    found = []
    for at, (node, size) in enumerate(zip(nodes, sizes, strict=True)):
        part = graph.call_function(torch.narrow, (joined, -1, sum(sizes[:at]), size))
        part.meta = {**node.meta, "value": node}
        node.replace_all_uses_with(part)
        found.append(part)
    return found


_MORE_PRODUCTS: dict[str, Callable[..., int]] = {
    "_int_mm": lambda left, right: prod(left) * right[-1],
    "_scaled_dot_product_flash_attention_for_cpu": lambda query, key, value, *_: (
        prod(query[:-1]) * key[-2] * (query[-1] + value[-1])
    ),
    "addmv": lambda _, matrix, __: prod(matrix),
    "dot": lambda left, _: prod(left),
    "mv": lambda matrix, _: prod(matrix),
    "vdot": lambda left, _: prod(left),
}
"""MACs by the shapes of the tensors that an operator reads; torch's table of operations (torch.utils.flop_counter) lacks these."""
_UNKNOWN_COST = re.compile(
    r"_?(fft|linalg|cdist|trilinear|weight_int\d+pack|dyn_quant|thnn|mkldnn|cudnn|miopen)|.*(rnn|lstm|gru)"
)
"""Operators of ATen whose products nothing here counts; they compute in the type of their data."""
_WITHOUT_PRODUCTS = {
    f"torchvision.{name}"
    for name in ("nms", "ps_roi_align", "ps_roi_pool", "roi_align", "roi_pool")
}
_COUNTED_DOMAINS = ("aten", "prims", "optpipe", "quantized_decomposed")


def layers_from_program(program: Any, precision: Precision) -> tuple[LayerType, ...]:
    """The operators of an exported program with the type of their first floating-point input, and their MACs.

    The MACs are None for operators of other libraries, for those in `_UNKNOWN_COST`, and for products inside branches and
    loops (torch.cond, torch.while_loop), since how often these run is not known.
    """
    decomposed = program.run_decompositions()
    return tuple(_list_layers(decomposed.graph, decomposed.graph_module, precision))


def _list_layers(graph: Any, owner: Any, precision: Precision) -> Iterator[LayerType]:
    """The layers of a graph of `owner`, and those of the graphs that its operators run."""
    from torch.utils.flop_counter import flop_registry

    for node in graph.nodes:
        packet = getattr(node.target, "overloadpacket", None)
        if str(packet) == "optpipe.layer":
            from optpipe.kernels.steps import step_from_text

            step = step_from_text(node.args[5])
            kind = "fp16" if step.floating else "int8"
            macs = _count_flops(flop_registry[packet], node) // 2
            yield LayerType(node.name, type(step).__name__, kind, macs)
            continue
        for each in _list_inner_modules(node, owner):
            for layer in _list_layers(each.graph, each, precision):
                yield replace(
                    layer,
                    name=f"{node.name}.{layer.name}",
                    macs=None if layer.macs != 0 else 0,
                )
        tensors = [
            each.meta["val"]
            for each in node.all_input_nodes
            if isinstance(each.meta.get("val"), torch.Tensor)
        ]
        floats = [tensor for tensor in tensors if tensor.is_floating_point()]
        if (
            packet is None
            or not floats
            or not isinstance(node.meta.get("val"), torch.Tensor | tuple)
        ):
            continue
        op = str(packet).rpartition(".")[2]
        kind = type_name_from_torch(floats[0].dtype)
        amount: int | None = 0
        if packet in flop_registry:
            amount = _count_flops(flop_registry[packet], node) // 2
        elif op in _MORE_PRODUCTS:
            operands = [each.meta["val"] for each in node.args if isinstance(each, torch.fx.Node)]
            amount = _MORE_PRODUCTS[op](*map(read_sizes, operands))
        elif str(packet) in _WITHOUT_PRODUCTS:
            amount = 0
        elif str(packet).partition(".")[0] not in _COUNTED_DOMAINS:
            kind, amount = UNATTRIBUTED, None
        elif _UNKNOWN_COST.match(op):
            amount = None
        if kind == "fp32" and amount != 0 and precision is Precision.TF32:
            kind = "tf32"
        if amount != 0 or op not in _DATA_MOVEMENT:
            yield LayerType(node.name, op, kind, amount)


def _list_inner_modules(node: Any, owner: Any) -> list[Any]:
    """The graph modules that a higher-order operator runs: its branches or its body."""
    if not isinstance(node.target, torch._ops.HigherOrderOperator):
        return []
    inner = [each for each in node.all_input_nodes if each.op == "get_attr"]
    modules = [getattr(owner, str(each.target), None) for each in inner]
    return [each for each in modules if isinstance(each, torch.fx.GraphModule)]


def read_sizes(value: Any) -> list[int]:
    """The sizes of a tensor; for symbolic ones, those of the example."""
    return [int(size.node.hint) if hasattr(size, "node") else int(size) for size in value.shape]


def _count_flops(count: Any, node: Any) -> int:
    """Floating-point operations of a node for the example's sizes: two per multiply-add."""

    def sized(value: Any) -> Any:
        if isinstance(value, torch.fx.Node):
            value = value.meta.get("val")
        if isinstance(value, torch.Tensor):
            return torch.empty(read_sizes(value), dtype=value.dtype, device="meta")
        return tuple(map(sized, value)) if isinstance(value, tuple | list) else value

    out = node.meta["val"]
    out = out[0] if isinstance(out, tuple) else out
    keywords = {key: sized(value) for key, value in node.kwargs.items()}
    return int(count(*(sized(each) for each in node.args), **keywords, out_val=sized(out)))


def refuse_pickles(package: Path) -> None:
    """Raises `StageError` if loading a torch package would unpickle anything."""
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


def set_float32_products(*, tf32: bool) -> None:
    torch.backends.cuda.matmul.allow_tf32 = tf32
    torch.backends.cudnn.allow_tf32 = tf32


def get_layer_name(node: Any) -> str:
    """The module that a node of an exported program comes from, such as `layer1.0.conv1`, or the node's own name."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path = str(stack[-1][0]) if stack else ""
    return path.removeprefix("L['self'].") or str(node.name)


REPRODUCER = """# {tensor}: compiled by AOTInductor, and run as it is. Needs torch alone, unless it imports more.

from pathlib import Path

import torch
{needed}
here = Path(__file__).parent
program = torch.export.load(here / "subgraph.pt2")
inputs = torch.load(here / "inputs.pt", weights_only=True)
expected = program.module()(*inputs)[0].double()
package = torch._inductor.aoti_compile_and_package(program, package_path=str(here / "compiled.pt2"))
found = torch._inductor.aoti_load_package(package)(*inputs)[0].double()
noise = (found - expected).square().sum()
print(torch.__version__, f"SNR {{10 * torch.log10(expected.square().sum() / noise):.1f}} dB",
      f"largest difference {{(found - expected).abs().max():.3g}}")
"""


def run_as_it_is(program: Any, _examples: Sequence[Any]) -> Any:
    """Compiles nothing, for a `MarkedProgram`."""
    return program


class MarkedProgram(MarkedNetwork):
    """A `MarkedNetwork` of the GraphModule `program`, made runnable by `compile_program(program, example tensors)`.

    Tensors are named as in `like`, after both sequences of layers are aligned. A node's meta `value` is the node that it replaced,
    and `codes` the functions that write and read the integers of a layer in INT8.
    """

    def __init__(
        self,
        program: Any,
        request: BuildRequest,
        compile_program: Callable[[Any, Sequence[Any]], Callable[..., Any]],
        like: "MarkedProgram | None" = None,
    ) -> None:
        self._program, self._card, self._device, self._compile = (
            program,
            request.card,
            request.device,
            compile_program,
        )
        found = []
        for node in program.graph.nodes:
            origin, value = node.meta.get("value", node), node.meta.get("val")
            op = str(getattr(origin.target, "overloadpacket", origin.target)).rpartition(".")[2]
            floats = isinstance(value, torch.Tensor) and value.is_floating_point()
            if node.op.startswith("call") and floats and op not in _DATA_MOVEMENT:
                found.append((node, origin.name, f"{get_layer_name(origin)} {op}"))
        if like is not None:
            known, layers = [*like.layers], [label for *_, label in found]
            blocks = SequenceMatcher(
                None, [*like.layers.values()], layers, autojunk=False
            ).get_matching_blocks()
            found = [
                (found[block.b + at][0], known[block.a + at], layers[block.b + at])
                for block in blocks
                for at in range(block.size)
            ]
        self._nodes = {name: node for node, name, _ in found}
        self.layers = {name: label for _, name, label in found}
        self.sizes = {
            name: prod(read_sizes(node.meta["val"])) for name, node in self._nodes.items()
        }
        self.ranges = {
            name: node.meta["range"] for name, node in self._nodes.items() if "range" in node.meta
        }
        self.outputs = tuple(each.name for each in request.card.outputs)

    def cut(self, tensors: Iterable[str], given: Iterable[str] = ()) -> tuple[tuple[str, ...], Run]:
        tensors, opened = tuple(tensors), list[Any]()
        program, read = self._cut_program(tensors, given)

        def run(values: Mapping[str, Any]) -> Mapping[str, Any]:
            with torch.no_grad():
                arguments = self._convert_inputs(read, values)
                if not opened:
                    opened.append(self._compile(program, arguments))
                found = zip(tensors, opened[0](*arguments), strict=True)
                return {name: self._convert(name, value, 1).cpu().numpy() for name, value in found}

        return tuple(name for name in read if name in self._nodes), run

    def save(
        self, tensor: str, given: Iterable[str], values: Mapping[str, Any], folder: Path
    ) -> None:
        program, read = self._cut_program((tensor,), given)
        with torch.no_grad():
            arguments = self._convert_inputs(read, values)
            exported = torch.export.export(program, tuple(arguments))
        folder.mkdir(parents=True, exist_ok=True)
        torch.export.save(exported, folder / "subgraph.pt2")
        torch.save(arguments, folder / "inputs.pt")
        own = "from optpipe.kernels.operators import register_operator\n\nregister_operator()\n"
        needed = own if "optpipe" in str(exported.graph) else ""
        (folder / "reproduce.py").write_text(
            REPRODUCER.format(tensor=tensor, needed=needed), encoding="utf-8"
        )

    def _cut_program(
        self, tensors: tuple[str, ...], given: Iterable[str]
    ) -> tuple[Any, tuple[str, ...]]:
        """The program that computes `tensors`, and the names of its inputs."""
        graph, new = torch.fx.Graph(), dict[Any, Any]()
        ends = dict(zip(self.outputs, graph.graph_copy(self._program.graph, new), strict=True))
        inputs = [each for each in graph.nodes if each.op == "placeholder"]
        feeds = dict(zip(inputs, (each.name for each in self._card.inputs), strict=True))
        for node in [
            each for each in graph.nodes if each.name.startswith(("_guards_fn", "_assert"))
        ]:
            graph.erase_node(node)
        for number, name in enumerate(given):
            with graph.inserting_after(inputs[-1]):
                held = graph.placeholder(f"given_{number}")
            new[self._nodes[name]].replace_all_uses_with(held)
            feeds[held] = name
        graph.output(
            tuple(new[self._nodes[name]] if name in self._nodes else ends[name] for name in tensors)
        )
        graph.eliminate_dead_code()
        for node in [each for each in feeds if not each.users]:
            graph.erase_node(node)
        read = tuple(feeds[each] for each in graph.nodes if each.op == "placeholder")
        return torch.fx.GraphModule(self._program, graph), read

    def _convert_inputs(self, read: tuple[str, ...], values: Mapping[str, Any]) -> list[Any]:
        return [
            self._convert(name, torch.from_numpy(values[name]).to(self._device), 0) for name in read
        ]

    def _convert(self, name: str, value: Any, at: int) -> Any:
        """An intermediate tensor in its type (`at` 0), or in FP32 again (1)."""
        if name not in self._nodes:
            return value
        meta = self._nodes[name].meta
        return (
            meta["codes"][at](value)
            if "codes" in meta
            else value.float()
            if at
            else value.to(meta["val"].dtype)
        )


def mark_source(request: BuildRequest) -> MarkedProgram:
    """The module in FP32 on the CPU."""
    wanted = replace(request, precision=Precision.FP32, device="cpu")
    program = export_program(wanted).run_decompositions({}).module()
    return MarkedProgram(program, wanted, run_as_it_is)


class TorchBackend(Backend):
    packages: tuple[str, ...] = ("torch",)
    needs_module = True

    def precisions(self, device: Device) -> frozenset[Precision]:
        return TORCH_PRECISIONS if device == "cuda" else TORCH_PRECISIONS - {Precision.TF32}

    def probe_capability(self, device: Device) -> Capability:
        version = get_package_version("torch")
        if device == "cuda" and not list_gpus():
            return Capability(False, False, version, "no NVIDIA GPU on this machine")
        return Capability(True, True, version)

    def find_run_blocker(self, info: ArtifactInfo) -> str | None:
        """Compiled code needs the same kind of processor and the same version of torch's library."""
        here, version = name_processor(info.device), get_package_version("torch")
        if (made_for := info.details.get("compiled_for", here)) != here:
            return f"compiled for {made_for}, this is {here}"
        if (made_by := info.details.get("compiled_by", version)) != version:
            return f"compiled by torch {made_by}, this is torch {version}"
        return TorchBackend.probe_capability(
            self, info.device
        ).why_not  # without what only a build needs


def name_processor(device: Device) -> str | None:
    return (get_gpu_name() if device == "cuda" else None) or read_cpu_model()


def record_tensors(request: BuildRequest) -> dict[str, Any]:
    card = request.card
    return {
        "inputs": [each.tensor.to_dict() for each in card.inputs],
        "outputs": [each.to_dict() for each in card.outputs],
    }


def list_recorded_tensors(info: ArtifactInfo, name: str) -> tuple[TensorSpec, ...]:
    """The `inputs` or `outputs` that a build's record names. Raises BadInputError if it names none that can be read."""
    try:
        return tuple(map(tensor_from_dict, info.details[name]))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        problem = (
            f"the record of {info.model} {info.backend} {info.precision} does not name its {name}"
        )
        raise BadInputError(f"{problem} ({first_line(error)})\nbuild it again") from error


class TorchSession:
    def __init__(
        self, call: Callable[..., Any], info: ArtifactInfo, options: Mapping[str, Any]
    ) -> None:
        self.device = info.device
        self.inputs = list_recorded_tensors(info, "inputs")
        self.outputs = list_recorded_tensors(info, "outputs")
        self._call = call
        self._options = options
        if info.device == "cpu" and options.get("threads"):
            torch.set_num_threads(int(options["threads"]))
        set_float32_products(tf32=info.precision is Precision.TF32)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        del self._call

    def run(self, inputs: Mapping[str, "np.ndarray"]) -> dict[str, "np.ndarray"]:
        binding = self._bind_buffers(inputs)
        binding.launch()
        return {name: tensor.cpu().numpy() for name, tensor in binding.tensors.items()}

    def bind(self, inputs: Mapping[str, "np.ndarray"]) -> Binding:
        binding = self._bind_buffers(inputs)
        binding.launch()
        if self.device == "cuda" and self._options["cuda_graph"]:
            return CudaGraphBinding(binding)
        return binding

    def run_on(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Compiled code reads inputs in the layout of its example, so others are made contiguous.

        The outputs are ordinary tensors, which may be changed in place; those of inference mode may not.
        """
        ordered = [inputs[each.name].contiguous() for each in self.inputs]
        with torch.no_grad():
            outputs = call_program(self._call, ordered)
        return {spec.name: value for spec, value in zip(self.outputs, outputs, strict=True)}

    def _bind_buffers(self, inputs: Mapping[str, "np.ndarray"]) -> "_TorchBinding":
        tensors = {
            each.name: torch.from_numpy(inputs[each.name]).to(self.device, copy=True)
            for each in self.inputs
        }
        return _TorchBinding(
            self._call, tensors, tuple(each.name for each in self.outputs), self.device
        )


def call_program(call: Callable[..., Any], inputs: Iterable[Any]) -> Sequence[Any]:
    """The program's outputs.

    Raises `StageError` with torch's reason, for example if the export specialized on a size that these inputs do not have.
    """
    try:
        outputs = call(*inputs)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise StageError(
            f"torch could not run the program: {first_line(error)}\ntry another backend, such as onnxruntime"
        ) from error
    return outputs if isinstance(outputs, tuple | list) else (outputs,)


class _TorchBinding:
    def __init__(
        self,
        call: Callable[..., Any],
        tensors: "dict[str, torch.Tensor]",
        outputs: tuple[str, ...],
        device: Device,
    ) -> None:
        self._call, self._inputs, self._names, self._device = call, tensors, outputs, device
        self.inputs = self._show(tensors)
        self.tensors: dict[str, torch.Tensor] = {}

    @property
    def outputs(self) -> Mapping[str, Any]:
        return self._show(self.tensors)

    def _show(self, tensors: Mapping[str, Any]) -> Mapping[str, Any]:
        return (
            {name: tensor.numpy() for name, tensor in tensors.items()}
            if self._device == "cpu"
            else tensors
        )

    def launch(self) -> None:
        """Calls the program, which allocates new outputs each time; raises as `call_program`."""
        with torch.inference_mode():
            outputs = call_program(self._call, self._inputs.values())
        self.tensors = dict(zip(self._names, outputs, strict=True))


WARM_UP_LAUNCHES = 3
"""Lazy initialization has to happen before capture (PyTorch documentation, "CUDA Graphs")."""


class CudaGraphBinding:
    def __init__(self, binding: Binding) -> None:
        self.inputs = binding.inputs
        self._binding = binding  # keeps the buffers alive that the graph writes to
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UP_LAUNCHES):
                binding.launch()
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            binding.launch()
        # the captured launch may have allocated new outputs, to which the graph writes
        self.outputs = binding.outputs

    def launch(self) -> None:
        self._graph.replay()
