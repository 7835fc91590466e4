import math
import re
import shlex
import subprocess
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from optpipe.backends.graph_names import iterate_graphs
from optpipe.backends.onnx_graph import find_unread_inputs, iterate_nodes
from optpipe.backends.onnx_pairs import find_faulty_pair
from optpipe.backends.plain_session import PlainSession
from optpipe.core import onnx
from optpipe.core.card import DTYPES, LARGEST_SIZE, InputSpec, ModelCard, Shape, Task
from optpipe.core.entries import WeightsRecord, WeightsRequest
from optpipe.core.errors import (
    BadInputError,
    StageError,
    escape,
    first_line,
    read_as_user_file,
    require_file,
)
from optpipe.core.files import get_memory_bytes, hash_file, hash_value, require_regular_file
from optpipe.core.process import run_python_code
from optpipe.core.quantity import format_bytes
from optpipe.core.wording import Argument
from optpipe.models.inputs.tensor_files import read_shapes
from optpipe.models.sources.modules import DEFAULT_BATCH_PROFILE, LoadedModel
from optpipe.models.sources.onnx_bounds import (
    MOST_AXES,
    count_item_bytes,
    iterate_declared_tensors,
    iterate_tensors,
    require_bounded_graph,
    require_bounded_lists,
    require_bounded_sizes,
    require_bounded_tensors,
    require_complete_data,
)
from optpipe.models.sources.onnx_forms import has_odd_form, state_usual_form

ShapeRanges = Mapping[str, tuple[Shape, Shape, Shape]]
"""The smallest, the usual, and the largest shape of each named input."""
Dims = Sequence[int | str | None]
"""Sizes, names of open dimensions, and None for those without a name."""
_BATCH = re.compile(r"batch|^(n|b|bs)$", re.IGNORECASE)
_NO_BATCH = re.compile(r"seq|time|len|height|width|sample|token|frame|channel|point", re.IGNORECASE)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*")


def read_input_specs(
    model: Any, shapes: ShapeRanges, path: Path, example: Mapping[str, Sequence[int]] | None = None
) -> tuple[InputSpec, ...]:
    """The inputs that are not constants, with `shapes` from `--shape`; `example` gives the shapes of arrays for suggestions.

    Raises BadInputError for an unsupported type, and for open dimensions, with the options to paste.
    """
    unneeded = {tensor.name for tensor in model.graph.initializer} | find_unread_inputs(model)
    values = [value for value in model.graph.input if value.name not in unneeded]
    if not values:
        raise BadInputError(
            f"{path}: its outputs depend on no input\nexport the model with its inputs, or use the constant itself"
        )
    _require_ranks(values, shapes, path)
    dims = [_read_dims(value, shapes) for value in values]
    axes = find_batch_axes(dims)
    missing = [
        (value.name, shape, axis)
        for value, shape, axis in zip(values, dims, axes, strict=True)
        if value.name not in shapes
        and any(not isinstance(size, int) and index != axis for index, size in enumerate(shape))
    ]
    if missing:
        known = example or {}
        proposed = {
            name: _propose_shape(model, dims, axis, known.get(name)) for name, dims, axis in missing
        }
        shown = "x".join(str(size) if isinstance(size, int) else "?" for size in missing[0][1])
        problem = f"{path}: input '{missing[0][0]}' is {shown}; give its open dimensions as min:opt:max, for example"
        raise BadInputError(problem, remedy=Argument("shape", proposed))
    return tuple(
        _make_spec(*described, shapes, path) for described in zip(values, dims, axes, strict=True)
    )


def _require_ranks(values: Sequence[Any], shapes: ShapeRanges, path: Path) -> None:
    for value in values:
        has_rank = not value.type.HasField("tensor_type") or value.type.tensor_type.HasField(
            "shape"
        )
        if has_rank or value.name in shapes:
            continue
        example = shlex.quote(f"{value.name}=1x3x224x224")
        raise BadInputError(
            f"{path}: input '{value.name}' has no shape, not even a number of dimensions",
            remedy="give it, for example " + Argument("shape", example),
        )


def has_size(dim: Any) -> bool:
    """Whether a dimension states its size; 0 is one, and -1 is what some exporters write for an open one."""
    return bool(dim.HasField("dim_value")) and dim.dim_value >= 0


def _read_dims(value: Any, shapes: ShapeRanges) -> list[int | str | None]:
    if not value.type.tensor_type.HasField("shape") and value.name in shapes:
        return [None] * len(shapes[value.name][0])
    dims = value.type.tensor_type.shape.dim
    names = [str(dim.dim_param) if _NAME.fullmatch(dim.dim_param) else None for dim in dims]
    return [
        int(dim.dim_value) if has_size(dim) else name for dim, name in zip(dims, names, strict=True)
    ]


def find_batch_axes(inputs: Sequence[Dims]) -> list[int | None]:
    names = [size for dims in inputs for size in dims if isinstance(size, str)]
    first = next((dims for dims in inputs if dims), ())
    name = next((name for name in names if _BATCH.search(name)), None)
    if name is None and first and isinstance(first[0], str) and not _NO_BATCH.search(first[0]):
        name = first[0]
    fixed = first[0] if first and isinstance(first[0], int) and name is None else None
    return [_find_batch_axis(dims, name, fixed) for dims in inputs]


def _find_batch_axis(dims: Dims, name: str | None, fixed: int | None) -> int | None:
    if not dims:
        return None
    if name is not None and name in dims:
        return dims.index(name)
    first = dims[0]
    if first is None:
        return 0
    if isinstance(first, str):  # another name than the batch's
        return None if _NO_BATCH.search(first) or (name is not None and _BATCH.search(name)) else 0
    if fixed is None:  # the batch is open, but this axis is fixed
        return 1 if len(dims) == 3 and not isinstance(dims[1], int) else None
    return dims.index(fixed) if fixed in dims[:2] else None


def _propose_shape(
    model: Any, dims: Dims, axis: int | None, example: Sequence[int] | None
) -> tuple[Any, ...]:
    """The shape of an input, or three for batch sizes: an array's, otherwise from the model's metadata, otherwise the usual size of
    such an input."""
    sizes = (
        example if example and len(example) == len(dims) else [_guess_size(model, dims)] * len(dims)
    )
    shapes = [
        tuple(
            size if isinstance(size, int) else batch if index == axis else sizes[index]
            for index, size in enumerate(dims)
        )
        for batch in DEFAULT_BATCH_PROFILE
    ]
    return shapes[0] if len(set(shapes)) == 1 else tuple(shapes)


def _guess_size(model: Any, dims: Dims) -> int:
    metadata = {prop.key: prop.value for prop in model.metadata_props}
    if said := re.search(r"\d+", metadata.get("imgsz", "")):
        return int(said.group())
    if len(dims) == 4:
        scores = len(model.graph.output[0].type.tensor_type.shape.dim) == 2
        return 224 if scores else 640
    return 128 if len(dims) > 1 else 1


def _make_spec(
    value: Any, dims: Dims, axis: int | None, shapes: ShapeRanges, path: Path
) -> InputSpec:
    name: str = onnx.TensorProto.DataType.Name(value.type.tensor_type.elem_type).lower()
    dtype = "float32" if name == "float" else name
    if dtype not in DTYPES or not value.type.HasField("tensor_type"):
        shown = dtype if value.type.HasField("tensor_type") else "not a tensor"
        raise BadInputError(
            f"{path}: input '{escape(value.name)[:80]}' is {shown}; optpipe takes {', '.join(DTYPES)}\n"
            "cast it inside the model, so that it takes one of these"
        )
    if value.name in shapes:
        if len(shapes[value.name][0]) != len(dims):
            raise BadInputError(
                f"the file gives it {len(dims)} dimensions, not {len(shapes[value.name][0])}",
                argument=Argument("shape", value.name),
            )
        return InputSpec(value.name, dtype, *shapes[value.name], batch=axis)
    known = [
        tuple(size if isinstance(size, int) else batch for size in dims)
        for batch in DEFAULT_BATCH_PROFILE
    ]
    return InputSpec(value.name, dtype, *known, batch=axis)


def name_dimensions(model: Any, specs: Sequence[InputSpec]) -> None:
    """Names every open dimension of the inputs, the batch `batch`, in place; no new name is one of the file's.

    Exporters write invalid names (`?`, `-1`), two of which a runtime takes for one dimension. Other tensors lose such a
    name.
    """
    by_name = {spec.name: spec for spec in specs}
    graph = model.graph
    batches, others = set[str](), set[str]()
    for value in graph.input:
        spec = by_name.get(value.name)
        for axis, dim in enumerate(value.type.tensor_type.shape.dim):
            if _NAME.fullmatch(dim.dim_param):
                is_batch = spec is not None and axis == spec.batch
                (batches if is_batch else others).add(dim.dim_param)
    for value in (*graph.output, *graph.value_info):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param not in batches:
                others.add(dim.dim_param)

    # another dimension may have the name, or one name may stand for the batch and something else
    renamed = dict.fromkeys(batches - others, "batch")
    if "batch" in others:
        renamed["batch"] = _choose_name("batch_in_file", batches | others)
    taken = batches | others | set(renamed.values())

    for value in graph.input:
        spec = by_name.get(value.name)
        for axis, dim in enumerate(value.type.tensor_type.shape.dim):
            if has_size(dim):
                continue
            if spec is not None and axis == spec.batch:
                dim.dim_param = "batch"
            elif dim.dim_param in renamed:
                dim.dim_param = renamed[dim.dim_param]
            elif spec is not None and not _NAME.fullmatch(dim.dim_param):
                stem = f"{re.sub(r'[^A-Za-z0-9_]', '_', value.name)}_dim{axis}"
                dim.dim_param = _choose_name(stem, taken)
                taken.add(dim.dim_param)
    for value in (*graph.output, *graph.value_info):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param in renamed:
                dim.dim_param = renamed[dim.dim_param]
            elif (dim.dim_param and not _NAME.fullmatch(dim.dim_param)) or dim.dim_value < 0:
                dim.Clear()


def _choose_name(stem: str, taken: Collection[str]) -> str:
    """`stem`, or `stem_2` and so on, that is not among `taken`."""
    name, number = stem, 2
    while name in taken:
        name, number = f"{stem}_{number}", number + 1
    return name


OLDEST_OPSET = 7
LARGEST_ONNX_BYTES = 2**31 - 1
"""Maximum size of one file in protobuf, which holds both graph and weights here."""
INFERENCE_S = 60
"""Timeout of shape inference with functions or subgraphs: each level of nesting may double the time."""
LONGEST_NAME = 4096
"""Maximum characters of a name, and bytes of a path on Linux."""
_NOT_IN_NUMPY = re.compile("FLOAT[48]|U?INT[24]$")
_STANDARD_DOMAINS = ("", "ai.onnx", "ai.onnx.ml")
_PROBE_IR = 8
MOST_BYTES = 2**31
"""Protocol buffers hold no more; larger weights lie in files beside the graph."""
_RUNTIME_DOMAINS = ("com.microsoft", "ai.onnx.contrib")
_TENSORS_OF = {"SequenceConstruct": slice(None), "ZipMap": slice(None), "SplitToSequence": slice(1)}
"""Inputs that hold the tensors of an operator's sequence or map."""


@dataclass(frozen=True, slots=True)
class OnnxFileSource:
    path: Path
    card: ModelCard | None = None
    shapes: ShapeRanges | None = None
    """From `--shape`: needed for open dimensions other than the first."""
    example: Path | None = field(default=None, compare=False)
    has_module: ClassVar[bool] = False
    runs_code: ClassVar[bool] = False

    @property
    def name(self) -> str:
        return str(self.path)

    def collect_identity(self) -> Mapping[str, Any]:
        self._check_file()
        return _collect_hashes(self.path)

    def _check_file(self) -> None:
        if require_file(self.path).stat().st_size == 0:
            raise BadInputError(f"{self.path} is empty")

    def load(self, weights: WeightsRequest) -> LoadedModel:
        if weights.kind != "default":
            problem = f"{self.path}: an ONNX file contains its own weights"
            raise BadInputError(
                f"{problem}; " + Argument("weights", weights.kind) + " does not apply"
            )
        self._check_file()
        model = onnx_from_file(self.path)
        record = WeightsRecord("embedded", hash_onnx_file(self.path))
        if self.card is not None and self.card.inputs:
            return LoadedModel(self.card, record, onnx=self.path)
        example = read_shapes(self.example) if self.example is not None else None
        inputs = read_input_specs(model, self.shapes or {}, self.path, example)
        unread = tuple(sorted(find_unread_inputs(model)))
        if self.card is not None:
            card = replace(self.card, inputs=inputs)
            return LoadedModel(card, record, onnx=self.path, unread=unread)
        # one image in and one row of scores out is a classifier; other models are only compared by tensors
        outputs = [len(output.type.tensor_type.shape.dim) for output in model.graph.output]
        classifies = len(inputs) == 1 and inputs[0].is_image and outputs == [2]
        card = ModelCard(
            self.path.stem, self.name, Task.CLASSIFICATION if classifies else Task.OTHER, inputs
        )
        return LoadedModel(card, record, onnx=self.path, unread=unread)


def hash_onnx_file(path: Path) -> str:
    """SHA-256 of the file; with external data, over the hashes of all files."""
    hashes = _collect_hashes(path)
    return hash_value(hashes) if "external" in hashes else str(hashes["onnx"])


def _collect_hashes(path: Path) -> dict[str, Any]:
    hashes: dict[str, Any] = {"onnx": hash_file(path)}
    if external := find_external_files(path):
        folder = path.resolve().parent
        hashes["external"] = {str(file.relative_to(folder)): hash_file(file) for file in external}
    return hashes


def onnx_from_file(path: Path) -> Any:
    find_external_files(path)
    with read_as_user_file(
        path, "ONNX", "it may be truncated, in another format, or missing its external data"
    ):
        require_regular_file(path)
        model = onnx.load(path)
    with read_as_user_file(path, "ONNX"):
        _require_bounded(model, path)
        is_odd = has_odd_form(model)
        if is_odd:
            state_usual_form(model)
        versions = {opset.domain: opset.version for opset in model.opset_import}
        own = {(function.domain, function.name) for function in model.functions}
        unknown = dict.fromkeys(
            f"{node.domain}::{node.op_type}" if node.domain else node.op_type
            for node in model.graph.node
            if node.domain not in _RUNTIME_DOMAINS
            and (node.domain, node.op_type) not in own
            and not onnx.defs.has(node.op_type, versions.get(node.domain, 1), node.domain)
        )
        if fp8 := [op for op in unknown if op.startswith("trt::TRT_FP8")]:
            raise BadInputError(
                f"{path} has operators that only TensorRT defines: {', '.join(fp8)}",
                remedy="export it with opset 19 or later and the standard QuantizeLinear and DequantizeLinear in FLOAT8E4M3FN",
            )
        if unknown:
            named = ", ".join(escape(op)[:80] for op in list(unknown)[:5])
            problem = f"{path} has operators that neither ONNX nor ONNX Runtime defines: {named}"
            raise BadInputError(f"{problem}; use standard ones")
        _require_runtime_opsets(model, path)
        _require_drawable(model, path)
        _require_single_node_names(model, path)
        _require_single_outputs(model.graph, path)
        _require_tensor_outputs(model.graph, path)
        _require_known_outputs(model.graph, path)
        _require_quick_inference(model, path)
        _require_valid(model if is_odd else path, path)
        require_bounded_tensors(model, path, get_memory_bytes())
        if (fault := find_faulty_pair(model)) is not None:
            raise BadInputError(f"{path}: {fault}")
    return model


_RUN_ALL_THE_SAME = ("is deprecated", "Field 'shape' of 'type' is required but missing")
"""Parts of the checker's messages about what runtimes run."""


def check_graph(graph: Any) -> None:
    """Raises what `onnx.checker` raises for a model or a file, unless it refuses what runtimes run.

    These are deprecated operators, and inputs and outputs without a rank. ONNX Runtime then checks the graph.
    """
    try:
        onnx.checker.check_model(str(graph) if isinstance(graph, Path) else graph, full_check=True)
    except onnx.checker.ValidationError as error:
        if not any(complaint in str(error) for complaint in _RUN_ALL_THE_SAME):
            raise
        with PlainSession(graph):
            pass


_WAYS_OUT = {
    "Inferred shape and existing shape differ": "correct the shape that the file states for a tensor, or leave it out",
    "single static assignment": "give each tensor a name of its own",
    "is not unique": "give each tensor a name of its own",
    "not compatible with the version imported by model": "give its functions the opset of the model, or inline them",
}
"""By a part of a reason of ONNX's checker."""


def _require_valid(graph: Any, path: Path) -> None:
    """Raises BadInputError for what ONNX's checker refuses, with a way out."""
    try:
        check_graph(graph)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        ways = [way for part, way in _WAYS_OUT.items() if part in str(error)]
        way_out = ways[0] if ways else "onnx.checker.check_model refuses it; export it again"
        problem = f"{path} cannot be read as ONNX: {type(error).__name__}: {first_line(error)}"
        raise BadInputError(f"{problem}\n{way_out}") from error


def _require_bounded(model: Any, path: Path) -> None:
    """Refuses names, versions, types and sizes that no valid model has, before anything computes with them."""
    if not model.graph.node:
        raise BadInputError(
            f"{path} contains no ONNX graph: it may be truncated or in another format"
        )
    if not model.graph.output:
        raise BadInputError(f"{path}: its graph has no outputs")
    opset = next(
        (opset.version for opset in model.opset_import if opset.domain in ("", "ai.onnx")), 0
    )
    if opset < OLDEST_OPSET:
        problem = f"{path} is opset {opset}; opset {OLDEST_OPSET} or later is required"
        raise BadInputError(f"{problem} (convert it with onnx.version_converter)")
    if opset > (newest := onnx.defs.onnx_opset_version()):
        raise BadInputError(
            f"{path} is opset {opset}; opset {newest} is the newest that onnx {onnx.__version__} knows"
        )
    require_bounded_graph(model, path)
    require_bounded_sizes(model, path)
    known = set(onnx.TensorProto.DataType.values())
    for name, dtype, sizes in iterate_declared_tensors(model):
        if dtype not in known:
            raise BadInputError(
                f"{path}: tensor '{escape(name)[:80]}' has the unknown data type {dtype}"
            )
        if len(sizes) > MOST_AXES:
            raise BadInputError(
                f"{path}: tensor '{escape(name)[:80]}' has {len(sizes)} axes; {MOST_AXES} is the most\nreshape it"
            )
        if wrong := next((size for size in sizes if not -1 <= size <= LARGEST_SIZE), None):
            problem = f"{path}: tensor '{escape(name)[:80]}' has a dimension of {wrong}"
            raise BadInputError(f"{problem}; {LARGEST_SIZE} is the largest")
    require_complete_data(iterate_tensors(model.graph), path)
    graph = model.graph
    names = [
        name
        for node in graph.node
        for name in (node.op_type, node.domain, node.name, *node.input, *node.output)
    ]
    for value in (*graph.input, *graph.output):
        names += [value.name, *(dim.dim_param for dim in value.type.tensor_type.shape.dim)]
    for name in names:
        if not isinstance(name, str):  # protobuf gives bytes that are not UTF-8
            raise BadInputError(f"{path}: the name {name[:80]!r} is not UTF-8; rename it")
        if len(name) > LONGEST_NAME or not name.isprintable():
            problem = (
                f"{path}: the name '{escape(name[:80])}' is too long or has control characters"
            )
            raise BadInputError(f"{problem}; rename it")


def _require_runtime_opsets(model: Any, path: Path) -> None:
    """Raises BadInputError for an opset that ONNX Runtime, which runs the reference, does not know.

    onnx declares opsets before runtimes have them; a graph of one Identity shows what the runtime says.
    """
    value = [
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1]) for name in ("x", "y")
    ]
    node = onnx.helper.make_node("Identity", ["x"], ["y"])
    graph = onnx.helper.make_graph([node], "probe", value[:1], value[1:])
    kept = [opset for opset in model.opset_import if opset.domain in _STANDARD_DOMAINS]
    probe = onnx.helper.make_model(graph, opset_imports=kept, ir_version=_PROBE_IR)
    try:
        with PlainSession(probe):
            pass
    except StageError as error:
        raise BadInputError(str(error).replace("the graph", str(path), 1)) from error


def _require_single_node_names(model: Any, path: Path) -> None:
    """Raises BadInputError for two nodes of one name in a graph, which ONNX Runtime rejects and ONNX's checker does not."""
    for graph in iterate_graphs(model.graph):
        counts = Counter(node.name for node in graph.node if node.name)
        if doubled := next((name for name, count in counts.items() if count > 1), None):
            raise BadInputError(
                f"{path}: {counts[doubled]} nodes are named '{escape(doubled)[:80]}'\n"
                "give each a name of its own, or none"
            )


def _require_single_outputs(graph: Any, path: Path) -> None:
    """Raises BadInputError for an output that is listed twice.

    ONNX and ONNX Runtime allow it, but outputs are told apart by their names, so that one of them would be lost.
    """
    names = [output.name for output in graph.output]
    if doubled := next((name for name in names if names.count(name) > 1), None):
        raise BadInputError(
            f"{path}: output '{escape(doubled)[:80]}' is listed twice\n"
            "list it once, or give each a name of its own with an Identity"
        )


def _require_tensor_outputs(graph: Any, path: Path) -> None:
    """Raises BadInputError for an output that is a sequence, a map, or a tensor of strings, with the command that cuts it off."""
    others = {output.name: _describe_other(output.type) for output in graph.output}
    others = {name: kind for name, kind in others.items() if kind is not None}
    if not others:
        return
    constant = {tensor.name for tensor in graph.initializer}
    made_of = {
        out: node.input[_TENSORS_OF.get(node.op_type, slice(0))]
        for node in graph.node
        for out in node.output
    }
    tensors: dict[str, None] = {}
    for name in (output.name for output in graph.output):
        tensors |= dict.fromkeys(made_of.get(name, ()) if name in others else (name,))
    name, kind = next(iter(others.items()))
    way_out = "return tensors from the model"
    given = {value.name for value in graph.input} | constant
    if tensors and given.isdisjoint(tensors):
        cut = (str(path), str(path.with_name(f"{path.stem}-tensors.onnx")))
        inputs = [value.name for value in graph.input if value.name not in constant]
        code = f"from onnx.utils import extract_model; extract_model{(*cut, inputs, list(tensors))}"
        way_out = f"cut the file to its tensors: python -c {shlex.quote(code)}"
    raise BadInputError(f"{path}: output '{escape(name)[:80]}' is {kind}\n{way_out}")


def _describe_other(kind: Any) -> str | None:
    """What a type is that is no tensor of numbers; None for one."""
    form = kind.WhichOneof("value")
    if form == "tensor_type" and kind.tensor_type.elem_type == onnx.TensorProto.STRING:
        return "a tensor of strings, which cannot be compared"
    if form in (None, "tensor_type"):
        return None
    return f"a {form.removesuffix('_type')}, not a tensor"


def _require_drawable(model: Any, path: Path) -> None:
    """Raises BadInputError for random numbers without a range: ONNX Runtime ends the whole process when it draws them."""
    for scope in (model.graph, *model.functions):
        for node in iterate_nodes(scope):
            values = {attribute.name: attribute.f for attribute in node.attribute}
            wrong = node.op_type.startswith("RandomNormal") and values.get("scale", 1.0) <= 0
            wrong |= node.op_type.startswith("RandomUniform") and (
                values.get("low", 0.0) > values.get("high", 1.0)
            )
            if wrong:
                raise BadInputError(
                    f"{path}: {escape(node.op_type)} '{escape(node.name)[:80]}' draws from an empty range\n"
                    "export the model for inference, without random numbers"
                )


def _require_known_outputs(graph: Any, path: Path) -> None:
    """Raises BadInputError for an output in FP8, FP4, or integers of less than a byte.

    ONNX Runtime gives some of them as bytes, whose numbers are not those of the output.
    """
    for value in graph.output:
        kind = onnx.TensorProto.DataType.Name(value.type.tensor_type.elem_type)
        if _NOT_IN_NUMPY.match(kind):
            problem = f"{path}: output '{escape(value.name)[:80]}' is {kind.lower()}"
            raise BadInputError(
                f"{problem}, which NumPy lacks\ncast it to float32 inside the model"
            )


def _require_quick_inference(model: Any, path: Path) -> None:
    """Raises BadInputError if ONNX's shape inference of functions or subgraphs takes too long, in a separate process."""
    if not model.functions and not any(
        attribute.HasField("g") for node in model.graph.node for attribute in node.attribute
    ):
        return
    code = "import sys, onnx; onnx.shape_inference.infer_shapes(onnx.load(sys.argv[1], load_external_data=False))"
    try:
        run_python_code(code, str(path.absolute()), timeout_s=INFERENCE_S)
    except subprocess.TimeoutExpired:
        problem = f"{path}: the shapes of its nested functions or subgraphs cannot be inferred within {INFERENCE_S} s"
        raise BadInputError(
            f"{problem}\ninline them before the export, or nest them less"
        ) from None


def find_external_files(path: Path) -> tuple[Path, ...]:
    """The external data files that a model names, in initializers and attributes, also of inner graphs.

    Raises BadInputError for an unreadable model, and for a file that is missing, lies outside the model's folder or,
    with the others, exceeds the size of one ONNX file.
    """
    with read_as_user_file(path, "ONNX", "it may be truncated, or of another format"):
        require_regular_file(path, min(MOST_BYTES, get_memory_bytes()))
        model = onnx.load(path, load_external_data=False)
        require_bounded_lists(model, path)
        outside = [
            tensor
            for tensor in iterate_tensors(model.graph)
            if tensor.data_location == onnx.TensorProto.EXTERNAL
        ]
        names = {
            entry.value
            for tensor in outside
            for entry in tensor.external_data
            if entry.key == "location"
        }
        require_one_file(
            str(path),
            sum(math.prod(tensor.dims) * count_item_bytes(tensor.data_type) for tensor in outside),
        )
        folder = path.resolve().parent
        files = []
        for name in sorted(names):
            shown = escape(name)[:80]
            if not name.isprintable() or len(name.encode()) > LONGEST_NAME:
                raise BadInputError(f"{path}: its external data '{shown}' is not a file name")
            file = (folder / name).resolve()
            if not file.is_relative_to(folder):
                raise BadInputError(f"{path} refers to external data outside its folder: {shown}")
            if not file.is_file():
                raise BadInputError(f"{path}: its external data {shown} is missing")
            require_one_file(f"{path} with its external data {shown}", file.stat().st_size)
            files.append(file)
    return tuple(files)


def require_one_file(model: str, weights_bytes: int) -> None:
    if weights_bytes > LARGEST_ONNX_BYTES:
        problem = f"{model}: its weights take {format_bytes(weights_bytes)}; an ONNX file holds 2 GiB at most"
        raise BadInputError(f"{problem}\ngive a smaller model, or a part of this one")
