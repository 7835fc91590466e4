"""A program of `torch.export` in a `.pt2` file, also with the quantize and dequantize operators of PT2E: `net.pt2`.

The program runs as it is, in torch, and that is the reference. Its Q/DQ operators become ONNX's QuantizeLinear and DequantizeLinear
when it is exported, so that everything behind that sees the one form that an ONNX file has.
"""

import io
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

from optpipe.core import onnx, torch
from optpipe.core.card import ModelCard, Task
from optpipe.core.entries import WeightsRecord, WeightsRequest
from optpipe.core.errors import BadInputError, escape, read_as_user_file, require_file
from optpipe.core.files import hash_file
from optpipe.core.precision import Precision
from optpipe.core.wording import Argument
from optpipe.models.sources.modules import LoadedModel, flatten_module
from optpipe.models.sources.onnx_file import ShapeRanges, read_input_specs
from optpipe.models.sources.own_type import find_own_type
from optpipe.models.sources.program_archive import read_plain_program
from optpipe.workspace.environment import get_package_version

REGISTERS_QUANTIZERS = "torch.ao.quantization.fx._decomposed"
"""The module of torch whose import makes the operators of `torch.ops.quantized_decomposed` known."""
_PAIRS = ("quantize_per_tensor", "dequantize_per_tensor", "quantize_per_channel", "dequantize_per_channel")  # fmt: skip
_FLOAT8 = "float8"
_QUANTIZED_NAMESPACES = ("quantized_decomposed", "torchao")


@dataclass(frozen=True)
class ProgramFileSource:
    path: Path
    shapes: ShapeRanges | None = None
    """From `--shape`: needed for open dimensions other than the batch."""
    _read: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    has_module: ClassVar[bool] = True
    runs_code: ClassVar[bool] = False

    @property
    def name(self) -> str:
        return str(self.path)

    def collect_identity(self) -> Mapping[str, Any]:
        return {
            "program": hash_file(require_file(self.path)),
            "torch": get_package_version("torch"),
        }

    def load(self, weights: WeightsRequest) -> LoadedModel:
        """The program as a module that takes its inputs in order.

        Raises BadInputError for weights from elsewhere, a file of something else, and quantization that ONNX cannot state.
        """
        if weights.kind != "default":
            given = Argument("weights", weights.kind)
            raise BadInputError(
                f"{self.path}: a program contains its own weights; " + given + " does not apply"
            )
        program = self._load_program()
        values = {node.name: node.meta.get("val") for node in program.graph.nodes}
        _require_tensors(program, values, self.path)
        graph = _describe_inputs(program, values)
        inputs = read_input_specs(graph, self.shapes or {}, self.path)
        # one image in and one row of scores out is a classifier
        ranks = [values[name].ndim for name in program.graph_signature.user_outputs]
        classifies = len(inputs) == 1 and inputs[0].is_image and ranks == [2]
        task = Task.CLASSIFICATION if classifies else Task.OTHER
        return LoadedModel(
            ModelCard(self.path.stem, self.name, task, inputs),
            WeightsRecord("embedded", hash_file(self.path)),
            module=_make_module(program),
            quantization=_read_quantization(program, self.path),
        )

    def _load_program(self) -> Any:
        content = read_plain_program(self.path)
        import_module(REGISTERS_QUANTIZERS)
        disabled = logging.root.manager.disable
        with read_as_user_file(
            self.path,
            f"a program of torch.export with torch {torch.__version__}",
            "save it again with this torch, without operators of other packages",
        ):
            try:
                logging.disable(logging.ERROR)  # torch raises what it would log
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    program = torch.export.load(io.BytesIO(content))
            finally:
                logging.disable(disabled)
            program._guards_code = []  # code from the file
        _require_float32(program, self.path)
        return program


def _require_float32(program: Any, path: Path) -> None:
    own = find_own_type(program.graph_module) or next(
        (
            str(tensor.dtype).removeprefix("torch.")
            for tensor in program.state_dict.values()
            if tensor.dtype in (torch.float16, torch.bfloat16, torch.float64)
        ),
        None,
    )
    if own is not None:
        raise BadInputError(
            f"its weights are in {own}, and the types of a program are fixed",
            place=path,
            remedy="export the module in float32 (.float()); " + Argument("precision") + " sets its precision",
        )  # fmt: skip


def _make_module(program: Any) -> Any:
    """The program as a module of float32 tensors in order; without the guards that it has as code."""
    module = program.module(check_guards=False)
    for name in ("train", "eval"):  # which refuse, since a program has no modes
        vars(module).pop(name, None)
    spec = program.call_spec.in_spec

    def arrange(values: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        positional, named = torch.utils._pytree.tree_unflatten(list(values), spec)
        return tuple(positional), dict(named)

    return flatten_module(module, arrange)


def _require_tensors(program: Any, values: Mapping[str, Any], path: Path) -> None:
    """Raises BadInputError for numbers, symbols, and nothing among the inputs and outputs."""
    signature = program.graph_signature
    for name in (*signature.user_inputs, *signature.user_outputs):
        if not torch.is_tensor(values.get(name)):
            raise BadInputError(
                f"its inputs and outputs must be tensors, and {escape(str(name))[:80]} is none",
                place=path,
                remedy="export a module whose forward takes and returns tensors",
            )


def _describe_inputs(program: Any, values: Mapping[str, Any]) -> Any:
    """An ONNX graph that reads the inputs that the program reads: names, types, sizes, and symbols for open dimensions."""
    names = program.graph_signature.user_inputs
    read = [node.name for node in program.graph.nodes if node.name in names and node.users]
    nodes = [onnx.helper.make_node("Identity", [name], [f"{name}_read"]) for name in read]
    taken = [_describe_value(name, values[name]) for name in names]
    made = [_describe_value(f"{name}_read", values[name]) for name in read]
    return onnx.helper.make_model(onnx.helper.make_graph(nodes, "inputs", taken, made))


def _describe_value(name: str, value: Any) -> Any:
    kind = torch.onnx.JitScalarType.from_dtype(value.dtype).onnx_type()
    sizes = [size if isinstance(size, int) else str(size) for size in value.shape]
    return onnx.helper.make_tensor_value_info(name, kind, sizes)


def _list_quantizers(program: Any) -> Iterator[tuple[Any, str]]:
    """The nodes of quantized arithmetic with the names of their operators, without overloads."""
    for module in program.graph_module.modules():
        for node in getattr(module, "graph", torch.fx.Graph()).nodes:
            namespace, _, name = str(node.target).partition(".")
            if node.op == "call_function" and namespace in _QUANTIZED_NAMESPACES:
                yield node, name.partition(".")[0]


def _read_quantization(program: Any, path: Path) -> Precision | None:
    """INT8 or FP8 if the program quantizes what it computes; None also for one that only dequantizes weights.

    Raises BadInputError for granularities and ranges that Q/DQ pairs of ONNX cannot state.
    """
    precision = None
    for node, name in _list_quantizers(program):
        if name not in _PAIRS:
            raise BadInputError(
                f"node '{escape(node.name)[:80]}' calls {escape(str(node.target))[:80]}; pairs with fixed ranges per tensor or per "
                "channel are read",
                place=path,
                remedy="quantize it with fixed ranges, not at run time, and not by groups, tokens, or blocks",
            )
        if name.startswith("quantize"):
            dtype = next(
                (argument for argument in node.args if isinstance(argument, torch.dtype)), None
            )
            _require_whole_range(node, dtype, path)
            precision = Precision.FP8 if _FLOAT8 in str(dtype) else precision or Precision.INT8
    return precision


def _require_whole_range(node: Any, dtype: Any, path: Path) -> None:
    """Raises BadInputError for a quantizer that clips before the ends of its integers, where QuantizeLinear does not."""
    if dtype is None or dtype.is_floating_point or dtype.itemsize > 1:
        return
    ends = torch.iinfo(dtype)
    low, high = node.args[node.args.index(dtype) - 2 : node.args.index(dtype)]
    if (low, high) != (ends.min, ends.max):
        kind = str(dtype).removeprefix("torch.")
        raise BadInputError(
            f"node '{escape(node.name)[:80]}' clips to {low}…{high} of {kind}, and the runtimes' pairs clip to {ends.min}…{ends.max}",
            place=path,
            remedy=f"train or calibrate it for all of {ends.min}…{ends.max}",
        )
