"""From a torch module to a valid, simplified ONNX file that takes what the card says, or the reason why not."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from optpipe.backends.onnx_graph import find_index_bounds, name_nodes
from optpipe.core.card import ModelCard, Task
from optpipe.core.tensors import TensorSpec
from optpipe.errors import BadInputError, StageError
from optpipe.inputs.synthetic import SMALLEST_VOCABULARY
from optpipe.sources.user_code import describe_user_error

OLDEST_IR = 4
"""Before it, weights had to be listed as inputs; the simplifier lists none."""
NEWEST_IR = 13
"""The newest that ONNX Runtime 1.31 reads; onnx 1.23 writes 14, and no operator here needs it."""


def onnx_from_torch(module: Any, card: ModelCard, target: Path) -> bool:
    """Exports with torch's dynamo exporter and simplifies; open dimensions of the card stay open. Whether it was simplified.

    Raises `BadInputError` where the module does not take the card's inputs, or changes in forward; `StageError` with the
    operator or the line that cannot be exported.
    """
    try:
        _export_program(module, card, target)
        return simplify_onnx(target)
    except StageError:
        _require_runs(module, card)  # what it raises itself says more than what the export makes of it
        raise


def _require_runs(module: Any, card: ModelCard) -> None:
    import torch

    from optpipe.backends.torch_program import make_example_inputs

    try:
        with torch.inference_mode():
            module(*make_example_inputs(card.inputs, "cpu"))
    except Exception as error:
        shapes = ", ".join(f"{each.name} {each.dtype} {'x'.join(map(str, each.opt))}" for each in card.inputs)
        raise BadInputError(
            f"{card.name} fails on the inputs in its description ({shapes}): {describe_user_error(error)}"
        ) from error


def _export_program(module: Any, card: ModelCard, target: Path) -> None:
    import logging
    import warnings

    import torch

    from optpipe.backends.torch_program import make_dynamic_shapes, make_example_inputs

    disabled = logging.root.manager.disable
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            logging.disable(logging.ERROR)  # what torch would log of a failure, it raises too
            program = torch.onnx.export(
                module,
                make_example_inputs(card.inputs, "cpu"),
                dynamo=True,
                dynamic_shapes=_nest_starred(module, make_dynamic_shapes(card.inputs)),
                input_names=[each.name for each in card.inputs],
                output_names=[each.name for each in card.outputs] or None,
                verbose=False,
            )
    except torch.onnx.OnnxExporterError as error:
        scripted = any(isinstance(each, torch.jit.ScriptModule) for each in module.modules())
        way = "\npart of it is compiled with torch.jit; use the original Python module instead" if scripted else ""
        raise StageError(f"{card.name} cannot be exported to ONNX: {_explain_failure(error)}{way}") from error
    finally:
        logging.disable(disabled)
    if changed := set(program.exported_program.graph_signature.buffers_to_mutate.values()):
        raise BadInputError(
            f"{card.name} modifies its buffer '{min(changed).removeprefix('model.')}' in forward, but engines are stateless\n"
            "do this only in training mode (`if self.training:`)"
        )
    program.save(str(target), external_data=False)


def _nest_starred(module: Any, shapes: tuple[dict[int, Any], ...]) -> Any:
    """Dynamic shapes as the forward's signature wants them: a starred parameter takes one nested tuple."""
    import inspect

    starred = any(each.kind is each.VAR_POSITIONAL for each in inspect.signature(module.forward).parameters.values())
    return (shapes,) if starred else shapes


def _explain_failure(error: BaseException) -> str:
    """The innermost reason of an export failure, on one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    if type(error).__name__ == "GuardOnDataDependentSymNode":
        return (
            describe_user_error(error) + "\ndata-dependent control flow is not supported; use torch.where or torch.cond"
        )
    return describe_user_error(error)


def simplify_onnx(path: Path) -> bool:
    """Folds constants and removes dead nodes in place, then checks the result; False where the graph stayed as it was."""
    import onnx
    import onnxslim

    try:
        slim = onnxslim.slim(onnx.load(path))
    except Exception:  # noqa: BLE001 - whatever a simplifier trips over, the valid graph goes on; the result says so
        slim = None
    graph = slim or onnx.load(path)
    name_nodes(graph)
    graph.ir_version = min(max(graph.ir_version, OLDEST_IR), NEWEST_IR)
    onnx.save(graph, path)
    try:
        onnx.checker.check_model(str(path), full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise StageError(f"the exported graph is not valid ONNX: {str(error).strip().splitlines()[0][:240]}") from error
    return slim is not None


def complete_card(card: ModelCard, path: Path) -> ModelCard:
    """`card` with what the graph shows: its outputs, and how far the integers of an input may go.

    Raises `BadInputError` where the graph does not take the card's inputs in all shapes that the card promises.
    """
    import onnx

    graph = onnx.load(path, load_external_data=False)
    taken = {each.name: each for each in graph.graph.input}
    for each in card.inputs:
        if each.name not in taken:
            raise BadInputError(
                f"{card.name} does not use input '{each.name}'; remove it from the description, or return a module without it"
            )
        sizes = [dim.dim_value for dim in taken[each.name].type.tensor_type.shape.dim]
        for axis, (size, low, high) in enumerate(zip(sizes, each.min, each.max, strict=False)):
            if size > 0 and not low == size == high:
                way = f"--batch {size}" if axis == 0 else f"--shape {each.name}=..., or change its description"
                raise BadInputError(
                    f"{card.name} accepts only size {size} in dimension {axis} of '{each.name}', not {low} to {high}; use {way}"
                )
    outputs = _read_outputs(graph.graph)
    if (stated := [each.name for each in card.outputs]) and stated != (found := [each.name for each in outputs]):
        raise BadInputError(
            f"{card.name}: its description lists outputs {', '.join(stated)}, but it has {len(found)}: {', '.join(found)}"
        )
    batch = taken[card.inputs[0].name].type.tensor_type.shape.dim[0].dim_param
    if wrong := next((e for e in outputs if not e.shape or (batch in e.shape[1:] and e.shape[0] != batch)), None):
        shape = "x".join(map(str, wrong.shape)) or "a single value"
        raise BadInputError(
            f"{card.name}: the first dimension of output '{wrong.name}' ({shape}) is not the batch; transpose the output or remove it"
        )
    classes = outputs[0].shape[-1]
    if card.labels and card.task is Task.CLASSIFICATION and isinstance(classes, int) and classes != len(card.labels):
        raise BadInputError(
            f"{card.name}: its description has {len(card.labels)} labels, but its first output has {classes} classes"
        )
    bounds = find_index_bounds(graph)
    inputs = (replace(each, below=each.below or _limit_bound(bounds.get(each.name))) for each in card.inputs)
    return replace(card, inputs=tuple(inputs), outputs=outputs)


def _limit_bound(bound: int | None) -> int | None:
    """A bound that synthetic identifiers might exceed."""
    return bound if bound is not None and bound < SMALLEST_VOCABULARY else None


def _read_outputs(graph: Any) -> tuple[TensorSpec, ...]:
    names = {1: "float32", 10: "float16", 16: "bfloat16", 7: "int64", 6: "int32", 3: "int8", 2: "uint8", 9: "bool"}
    return tuple(
        TensorSpec(
            value.name,
            names.get(value.type.tensor_type.elem_type, "float32"),
            tuple(
                dim.dim_value if dim.dim_value > 0 else (dim.dim_param or f"dim{axis}")
                for axis, dim in enumerate(value.type.tensor_type.shape.dim)
            ),
        )
        for value in graph.output
    )
