"""Converts a torch module to a valid, simplified ONNX file that takes the card's inputs."""

import inspect
import io
import logging
import traceback
import warnings
from collections.abc import Sequence
from contextlib import redirect_stderr
from dataclasses import replace
from pathlib import Path
from typing import Any

from optpipe.backends.onnx_graph import find_unread_inputs, load_onnx
from optpipe.backends.onnx_layers import infer_graph_types
from optpipe.backends.onnx_size_inputs import find_compared_values, find_index_bounds
from optpipe.backends.plain_session import PlainSession
from optpipe.backends.torch_program import make_dynamic_shapes, make_example_inputs
from optpipe.core import onnx, torch
from optpipe.core.card import ModelCard, Task, TensorSpec
from optpipe.core.errors import BadInputError, OptpipeError, StageError, first_line
from optpipe.core.events import Listener, SilentListener
from optpipe.core.wording import Argument
from optpipe.models.export.source_graph import PreparedGraph, prepare_graph
from optpipe.models.inputs.samples import bound_noise, make_synthetic_tensor
from optpipe.models.sources.modules import LoadedModel, flatten_tensors
from optpipe.models.sources.onnx_file import check_graph, has_size, require_one_file
from optpipe.models.sources.python_file import describe_user_error

LARGEST_OPTIMIZED = 3000
"""Nodes of the largest graph that the exporter's own optimizer gets, whose time grows with their square: it took 188 s for the
5,654 nodes of SSDlite320. Larger graphs have their constants folded by the simplifier alone, in 26 s.
"""


def onnx_from_torch(
    module: Any, card: ModelCard, target: Path, listener: Listener | None = None
) -> PreparedGraph:
    """Exports with torch's dynamo exporter and simplifies, with the card's open dimensions; writes the graph to `target`.

    Raises BadInputError if the module does not take the card's inputs, changes in forward, or has weights that exceed
    an ONNX file; StageError with the operator or the line that cannot be exported.
    """
    require_one_file(
        card.name, sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))
    )
    listener = listener or SilentListener()
    try:
        with listener.step("convert to ONNX"):
            _export_program(module, card, target)
        with listener.step("simplify the graph"):
            prepared = prepare_graph(onnx.load(target), card, own_file=False)
            save_graph(prepared.graph, target)
    except StageError:
        _require_runs(module, card)  # the module's error is clearer than the exporter's
        raise
    return prepared


def read_outputs_early(loaded: LoadedModel) -> ModelCard | None:
    """The card with its outputs before the export: of an ONNX file, or of a module's forward at the smallest batch.

    None if a file does not state them. Raises BadInputError if the module does not take the card's inputs.
    """
    card = loaded.card
    if loaded.onnx is not None:
        graph = onnx.load(loaded.onnx, load_external_data=False).graph
        known = all(output.type.tensor_type.HasField("shape") for output in graph.output)
        return replace(card, outputs=_read_outputs(graph)) if known else None
    returned = _require_runs(loaded.module, card.with_profile((card.batch_range[0],) * 3, {}))
    said = [spec.name for spec in card.outputs] or _find_output_names(loaded.module, card)
    names = (
        said
        if len(said) == len(returned)
        else [f"output {place}" for place in range(len(returned))]
    )
    dtypes = [str(value.dtype).removeprefix("torch.") for value in returned]
    shapes = [("batch", *value.shape[1:]) if value.shape else () for value in returned]
    return replace(card, outputs=tuple(map(TensorSpec, names, dtypes, shapes)))


def _require_runs(module: Any, card: ModelCard) -> tuple[Any, ...]:
    """The module's outputs for the card's opt shapes. Raises BadInputError if it fails on them."""
    try:
        with torch.inference_mode():
            return flatten_tensors(module(*make_example_inputs(card.inputs, "cpu")))
    except Exception as error:
        shapes = ", ".join(
            f"{spec.name} {spec.dtype} {'x'.join(map(str, spec.opt))}" for spec in card.inputs
        )
        problem = f"{card.name} fails on the inputs in its description ({shapes})"
        way = ""
        if (own := getattr(module, "converted_from", None)) is not None:
            way = f"\nit was converted from {own} to float32; cast by the type of a weight in forward, not to {own}"
        raise BadInputError(f"{problem}: {describe_user_error(error)}{way}") from error


def convert_program(module: Any, card: ModelCard) -> Any:
    """The `torch.onnx.ONNXProgram` of a module, as torch's dynamo exporter writes it.

    Raises StageError with the operator or the line that cannot be exported.
    """
    shapes: Any = make_dynamic_shapes(card.inputs)
    parameters = inspect.signature(module.forward).parameters.values()
    if any(
        parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters
    ):  # a starred parameter takes one nested tuple
        shapes = (shapes,)
    disabled = logging.root.manager.disable
    try:
        with (
            warnings.catch_warnings(),
            torch.no_grad(),
            redirect_stderr(io.StringIO()),
        ):  # it prints graphs of failures
            warnings.simplefilter("ignore")
            logging.disable(logging.ERROR)  # torch raises what it would log
            return torch.onnx.export(
                module,
                make_example_inputs(card.inputs, "cpu"),
                dynamo=True,
                dynamic_shapes=shapes,
                input_names=[spec.name for spec in card.inputs],
                output_names=[spec.name for spec in card.outputs] or None,
                verbose=False,
                optimize=False,
            )
    except torch.onnx.OnnxExporterError as error:
        inner: BaseException = error
        while inner.__cause__ is not None:
            inner = inner.__cause__
        way = _find_export_way_out(module, card, inner)
        raise StageError(
            f"{card.name} cannot be exported to ONNX: {describe_user_error(inner)}{way}"
        ) from error
    finally:
        logging.disable(disabled)


def _export_program(module: Any, card: ModelCard, target: Path) -> None:
    program = convert_program(module, card)
    if len(program.model.graph) <= LARGEST_OPTIMIZED:
        disabled = logging.root.manager.disable
        logging.disable(logging.ERROR)
        try:
            with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
                warnings.simplefilter("ignore")
                program.optimize()
        finally:
            logging.disable(disabled)
    if changed := set(program.exported_program.graph_signature.buffers_to_mutate.values()):
        buffer = min(changed).removeprefix("model.")
        problem = (
            f"{card.name} modifies its buffer '{buffer}' in forward, but engines are stateless"
        )
        raise BadInputError(f"{problem}\ndo this only in training mode (`if self.training:`)")
    if not card.outputs:
        for value, name in zip(
            program.model.graph.outputs, _find_output_names(module, card), strict=False
        ):
            value.name = name
    _restore_inputs(program.model, [spec.name for spec in card.inputs])
    _rename_clashes(program.model, {spec.name for spec in card.inputs})
    program.save(str(target), external_data=False)


def _calls_any(error: BaseException, *functions: str) -> bool:
    """Whether one of `functions` is in the traceback of an error, by its name or in a line of code."""
    frames = traceback.extract_tb(error.__traceback__)
    return any(name in f"{frame.name} {frame.line}" for frame in frames for name in functions)


def _find_export_way_out(module: Any, card: ModelCard, error: BaseException) -> str:
    """A line with the way out of a failed export; empty without any."""
    if _calls_any(error, "pack_padded_sequence", "pad_packed_sequence"):
        return (
            "\npack_padded_sequence gives sizes that depend on the data, which no engine has: run the layer on the padded batch, "
            "and mask its outputs or gather the last valid step"
        )
    parametrized = next(
        (
            f"remove_parametrizations(module.get_submodule('{name.removeprefix('model.')}'), '{weight}')"
            for name, part in module.named_modules()
            if torch.nn.utils.parametrize.is_parametrized(part)
            for weight in part.parametrizations
        ),
        None,
    )
    if parametrized is not None:
        return (
            "\nits weights are computed from parametrizations in every call: fix them before returning the module, with "
            f"torch.nn.utils.parametrize.{parametrized}"
        )
    if any(isinstance(submodule, torch.jit.ScriptModule) for submodule in module.modules()):
        return "\npart of it is compiled with torch.jit; use the original Python module instead"
    from_catalog = not card.source.rpartition(":")[0].endswith(".py")
    if from_catalog and card.task is Task.DETECTION:
        return (
            "\ntorch's exporter cannot follow this detector: choose a detector of one stage (retinanet_resnet50_fpn_v2, "
            "fcos_resnet50_fpn, ssd300_vgg16), or give an ONNX file of it"
        )
    if type(error).__name__ == "GuardOnDataDependentSymNode":
        if from_catalog:
            return "\nits control flow depends on the data; give an ONNX file of it instead"
        return "\ndata-dependent control flow is not supported; use torch.where or torch.cond"
    return ""


def _find_output_names(module: Any, card: ModelCard) -> tuple[str, ...]:
    """A module's output names after a run; empty if it has none, or if one is also an input's name."""
    names: tuple[str, ...] = getattr(module, "output_names", ())
    return () if {spec.name for spec in card.inputs} & set(names) else names


def _restore_inputs(graph: Any, names: Sequence[str]) -> None:
    """Gives inputs their names again: the exporter's optimizer renames one that is passed through to an output."""
    inputs = graph.graph.inputs
    if len(inputs) == len(names):
        for value, name in zip(inputs, names, strict=True):
            value.name = name


def _rename_clashes(graph: Any, taken: set[str]) -> None:
    """Renames inner values that share their name with an input or output."""
    outputs = {value.name for value in graph.graph.outputs}
    for node in graph.graph:
        for value in node.outputs:
            if value.name in taken or (value.name in outputs and not value.is_graph_output()):
                value.name = f"{value.name}_inside"


def save_graph(graph: Any, path: Path) -> None:
    """Raises StageError if the graph is not valid."""
    onnx.save(graph, path)
    try:
        check_graph(path)
    except (
        onnx.checker.ValidationError,
        onnx.shape_inference.InferenceError,
        ValueError,
    ) as error:
        raise StageError(f"the exported graph is not valid ONNX: {first_line(error)}") from error


def complete_card(card: ModelCard, path: Path) -> ModelCard:
    """`card` with the graph's outputs, and bounds of integer inputs.

    Raises BadInputError if the graph does not take the card's inputs in all shapes of the card.
    """
    graph = load_onnx(path, weights=False)
    taken = {value.name: value for value in graph.graph.input}
    unread = find_unread_inputs(graph)
    for spec in card.inputs:
        if spec.name not in taken or spec.name in unread:
            problem = f"{card.name} does not use input '{spec.name}'"
            raise BadInputError(
                f"{problem}; remove it from the description, or return a module without it"
            )
        dims = taken[spec.name].type.tensor_type.shape.dim
        sizes = [dim.dim_value if has_size(dim) else None for dim in dims]
        for axis, (size, low, high) in enumerate(zip(sizes, spec.min, spec.max, strict=False)):
            if size is not None and not low == size == high:
                way: str = Argument("batch", size)
                if axis != spec.batch:
                    shape = Argument("shape", {spec.name: "..."})
                    way = shape + ", or other sizes in its description"
                problem = (
                    f"{card.name} accepts only size {size} in dimension {axis} of '{spec.name}'"
                )
                raise BadInputError(f"{problem}, not {low} to {high}; use " + way)
    outputs = _read_outputs(graph.graph)
    if (stated := [spec.name for spec in card.outputs]) and stated != (
        named := [spec.name for spec in outputs]
    ):
        problem = f"{card.name}: its description lists outputs {', '.join(stated)}"
        raise BadInputError(f"{problem}, but it has {len(named)}: {', '.join(named)}")
    if card.batch_range[2] > 1 and (
        wrong := next((spec for spec in outputs if not spec.shape), None)
    ):
        problem = f"{card.name}: output '{wrong.name}' is a single value for a whole batch"
        smallest, _, largest = card.batch_range
        fixed = "export the model at batch size 1"
        way_out = fixed if smallest == largest else "give " + Argument("batch", 1)
        raise BadInputError(f"{problem}: leave it out, or " + way_out)
    outputs = _find_output_axes(outputs, card, graph, path)
    classes = outputs[0].classes
    if (
        card.labels
        and card.task is Task.CLASSIFICATION
        and classes is not None
        and classes != len(card.labels)
    ):
        problem = f"{card.name}: its description has {len(card.labels)} labels"
        raise BadInputError(f"{problem}, but its first output has {classes} classes")
    bounds = find_index_bounds(graph)
    inputs = (replace(spec, below=spec.below or bounds.get(spec.name)) for spec in card.inputs)
    return replace(card, inputs=tuple(inputs), outputs=outputs)


def _find_output_axes(
    outputs: tuple[TensorSpec, ...], card: ModelCard, graph: Any, path: Path
) -> tuple[TensorSpec, ...]:
    """Adds each output's batch axis: the card's, the axis with the name of the inputs' batch, or the one that changes
    with it; None if no size depends on the batch, as for anchors; otherwise the first."""
    said = {spec.name: spec.batch for spec in card.outputs}
    taken = {value.name: value.type.tensor_type.shape.dim for value in graph.graph.input}
    batched = [spec for spec in card.inputs if spec.batch is not None]
    names = {taken[spec.name][spec.batch].dim_param for spec in batched} - {""}
    size = batched[0].opt[batched[0].batch or 0] if batched else 1
    batched_outputs = []
    for spec in outputs:
        if (axis := said.get(spec.name, 0)) == 0:
            first = spec.shape[0] if spec.shape else None
            if first is None:
                axis = None
            elif known := [place for place, name in enumerate(spec.shape) if name in names]:
                axis = known[0]
            elif (
                not names and isinstance(first, int) and first != size
            ):  # a fixed batch, recognized by its size
                axis = 1 if len(spec.shape) > 2 and spec.shape[1] == size else None
        batched_outputs.append(replace(spec, batch=axis))
    if names and any(not names & set(spec.shape) for spec in outputs):
        batched_outputs = _find_changing_axes(batched_outputs, names, card, graph, path)
    return tuple(batched_outputs)


def _find_changing_axes(
    outputs: list[TensorSpec], names: set[str], card: ModelCard, graph: Any, path: Path
) -> list[TensorSpec]:
    """The only axis whose size differs between two batch sizes, by shape inference or a run; None if no size differs."""
    low, _, high = card.batch_range
    if low == high:
        return outputs
    sizes = (high - 1 if high - low > 1 else low, high)
    for value in graph.graph.output:
        value.type.tensor_type.ClearField("shape")  # a file may state one size and compute another
    inputs = ([spec.with_batch(low, size, high) for spec in card.inputs] for size in sizes)
    few, many = (infer_graph_types(graph, specs).shapes for specs in inputs)
    # inference gives no shapes for outputs of If, Loop and similar operators
    if any(not few.get(spec.name) for spec in outputs if not names & set(spec.shape)):
        few, many = (_run_for_shapes(path, card, size, graph) for size in sizes)
    changed_specs = []
    for spec in outputs:
        shapes = few.get(spec.name, ()), many.get(spec.name, ())
        changed = [
            axis for axis, sizes in enumerate(zip(*shapes, strict=False)) if sizes[0] != sizes[1]
        ]
        unclear = names & set(spec.shape) or not all(shapes) or len(changed) > 1
        changed_specs.append(
            spec if unclear else replace(spec, batch=changed[0] if changed else None)
        )
    return changed_specs


def _run_for_shapes(
    path: Path, card: ModelCard, size: int, graph: Any
) -> dict[str, tuple[int, ...]]:
    """The shapes of the outputs for noise at one batch size."""
    compared = find_compared_values(graph)
    inputs = {
        spec.name: make_synthetic_tensor(
            spec.opt, spec.dtype, 0, spec.below, compared.get(spec.name)
        )
        for spec in bound_noise([spec.with_batch(size, size, size) for spec in card.inputs], graph)
    }
    try:
        with PlainSession(path) as session:
            return {name: value.shape for name, value in session.run(inputs).items()}
    except OptpipeError:
        return {}


def _read_outputs(graph: Any) -> tuple[TensorSpec, ...]:
    names = {
        1: "float32",
        10: "float16",
        16: "bfloat16",
        7: "int64",
        6: "int32",
        3: "int8",
        2: "uint8",
        9: "bool",
    }
    return tuple(
        TensorSpec(
            value.name,
            names.get(value.type.tensor_type.elem_type, "float32"),
            tuple(
                dim.dim_value if has_size(dim) else (dim.dim_param or f"dim{axis}")
                for axis, dim in enumerate(value.type.tensor_type.shape.dim)
            ),
        )
        for value in graph.output
    )
