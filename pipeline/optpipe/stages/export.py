"""From a source model to a checked ONNX file, with proof that the two compute the same."""

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optpipe.backends.onnx_graph import named
from optpipe.core.card import ModelCard, card_from_file
from optpipe.core.environment import package_version
from optpipe.core.events import Listener
from optpipe.core.precision import Precision
from optpipe.core.store import Entry, Store, entry_id
from optpipe.core.tensors import TensorSpec
from optpipe.errors import GateError, StageError
from optpipe.inputs.samples import Samples, row_batches, sample_inputs, samples_for
from optpipe.inputs.tokens import SENTENCES
from optpipe.stages.model import Model, with_available_weights
from optpipe.stats.agreement import TOLERATED_RELATIVE_ERROR, output_error, same_rows

if TYPE_CHECKING:
    import numpy as np

REVISION = 2
"""Raised whenever this stage would write something else from the same recipe."""
OLDEST_IR = 4
"""Before it, weights had to be listed as inputs; the simplifier lists none."""
NEWEST_IR = 13
"""The newest that ONNX Runtime 1.31 reads; onnx 1.23 writes 14, and no operator here needs it."""
ONNX = "model.onnx"
CARD = "card.json"
TOKENIZER = "tokenizer.json"
REFERENCE = "reference.npz"


def stored_model(model: Model, store: Store) -> Entry | None:
    """What `exported_model` made before, every byte of it checked; None where there is nothing."""
    return store.get("model", _recipe(model))


def model_id(model: Model) -> str:
    """The id of what `exported_model` makes of `model`, made or not."""
    return entry_id("model", _recipe(model))


def exportable(model: Model, store: Store, listener: Listener) -> tuple[Model, Entry | None]:
    """`model` with weights that can be had here, and its store entry where it needs none any more."""
    if model.source.runs_code:  # which model it is shows only when it is made
        with listener.step("load"):
            model.loaded()
    stored = stored_model(model, store)
    return (model if stored else with_available_weights(model, store.workspace, listener)), stored


def exported_model(model: Model, store: Store, listener: Listener, stored: Entry | None = None) -> tuple[Entry, bool]:
    """The store entry `model` with `model.onnx` and `card.json`, and whether it was there; its info holds the weights' record.

    `stored` is what `exportable` found: to look for it again would hash all of it twice.
    """
    if stored is not None:
        return stored, True

    def make(directory: Path) -> Mapping[str, Any]:
        loaded = model.loaded()
        target = directory / ONNX
        if loaded.onnx is not None:
            _copy_onnx(loaded.onnx, target)
        else:
            onnx_from_torch(loaded.module, loaded.card, target)
        simplified = simplify(target)
        card = replace(loaded.card, outputs=_outputs(target))
        _write_card(directory / CARD, card)
        if loaded.tokenizer is not None:
            (directory / TOKENIZER).write_text(loaded.tokenizer, encoding="utf-8")
        return {"name": card.name, "source": card.source, "weights": loaded.weights.to_dict(), "simplified": simplified}

    return store.produce("model", _recipe(model), make, listener=listener)


def _recipe(model: Model) -> dict[str, Any]:
    return {
        "revision": REVISION,
        "model": model.recipe(),
        "tools": {name: package_version(name) for name in ("onnx", "onnxscript", "onnxslim", "torch")},
    }


def onnx_from_torch(module: Any, card: ModelCard, target: Path) -> None:
    """Exports with torch's dynamo exporter; open dimensions of the card stay open.

    Raises `StageError` with the operator or the line that cannot be exported.
    """
    import logging
    import warnings

    import torch

    from optpipe.backends.torch_program import dynamic_shapes, example_inputs

    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            program = torch.onnx.export(
                module,
                example_inputs(card.inputs, "cpu"),
                dynamo=True,
                dynamic_shapes=_positional(module, dynamic_shapes(card.inputs)),
                input_names=[each.name for each in card.inputs],
                verbose=False,
            )
    except torch.onnx.OnnxExporterError as error:
        message = f"{card.name} cannot be exported to ONNX: {_cause(error)}"
        raise StageError(message) from error
    program.save(str(target), external_data=False)


def _positional(module: Any, shapes: tuple[dict[int, Any], ...]) -> Any:
    """Dynamic shapes as the forward's signature wants them: a starred parameter takes one nested tuple."""
    import inspect

    starred = any(each.kind is each.VAR_POSITIONAL for each in inspect.signature(module.forward).parameters.values())
    return (shapes,) if starred else shapes


def _cause(error: BaseException) -> str:
    """The innermost reason of an export failure, on one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:240]}" if lines else type(error).__name__


def _copy_onnx(source: Path, target: Path) -> None:
    """A user's file, with its external data drawn in so that the entry is whole."""
    import onnx

    from optpipe.sources.onnx_file import external_files

    if external_files(source):
        onnx.save(onnx.load(source), target)
    else:
        shutil.copyfile(source, target)


def simplify(path: Path) -> bool:
    """Folds constants and removes dead nodes in place, then checks the result; False where the graph stayed as it was."""
    import onnx
    import onnxslim

    try:
        slim = onnxslim.slim(onnx.load(path))
    except Exception:  # noqa: BLE001 - whatever a simplifier trips over, the valid graph goes on; the result says so
        slim = None
    graph = slim or onnx.load(path)
    named(graph)
    graph.ir_version = min(max(graph.ir_version, OLDEST_IR), NEWEST_IR)
    onnx.save(graph, path)
    try:
        onnx.checker.check_model(str(path), full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        message = f"the exported graph is not valid ONNX: {str(error).strip().splitlines()[0][:240]}"
        raise StageError(message) from error
    return slim is not None


def _outputs(path: Path) -> tuple[TensorSpec, ...]:
    import onnx

    graph = onnx.load(path, load_external_data=False).graph
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


def _write_card(path: Path, card: ModelCard) -> None:
    import json

    path.write_text(json.dumps(card.to_dict(), indent=2) + "\n", encoding="utf-8")


def reference(model: Model, entry: Entry, images: Path | None, store: Store, listener: Listener) -> tuple[Entry, bool]:
    """The store entry `reference`: the source model's outputs on real inputs, and the exported graph held against them.

    The graph is run at batch sizes 1, 3 and all samples where the profile allows; a graph outside the FP32 tolerance
    raises `GateError`.
    """
    card = card_from_file(entry.file(CARD))
    samples = samples_for(card, images, entry.file(TOKENIZER) if card.tokenization else None)
    recipe = {"revision": REVISION, "model": entry.id, "samples": samples.sha256}

    def make(directory: Path) -> Mapping[str, Any]:
        import numpy as np

        inputs = sample_inputs(card, samples)
        loaded = model.loaded()
        onnx_outputs = _onnx_outputs(entry.file(ONNX), card, inputs)
        outputs = onnx_outputs if loaded.module is None else torch_outputs(loaded.module, card, inputs)
        errors = [] if loaded.module is None else _parity(card, outputs, onnx_outputs)
        tensors = {f"input:{name}": value for name, value in inputs.items()}
        tensors |= {f"output:{name}": value for name, value in outputs.items()}
        if samples.labels:
            tensors["labels"] = np.asarray(samples.labels)
        np.savez(directory / REFERENCE, allow_pickle=False, **tensors)
        return {
            "samples": _samples_record(samples),
            "origin": "source model" if loaded.module is not None else "ONNX Runtime CPU on the FP32 graph",
            "export_parity": errors,
        }

    return store.produce("reference", recipe, make, parents=(entry.id,), listener=listener)


def _samples_record(samples: Samples) -> dict[str, Any]:
    count = len(SENTENCES) if samples.kind == "texts" else len(samples.files)
    return {"kind": samples.kind, "count": count, "sha256": samples.sha256}


def torch_outputs(module: Any, card: ModelCard, inputs: Mapping[str, "np.ndarray"]) -> dict[str, "np.ndarray"]:
    """The source model's outputs by name, in FP32 on the CPU, in batches that the profile allows."""
    import numpy as np
    import torch

    parts: list[tuple[np.ndarray, ...]] = []
    with torch.inference_mode():
        for batch in row_batches(card, inputs):
            found = module(*(torch.from_numpy(batch[each.name]) for each in card.inputs))
            flat = found if isinstance(found, tuple | list) else (found,)
            parts.append(
                tuple(tensor.float().numpy() if tensor.is_floating_point() else tensor.numpy() for tensor in flat)
            )
    names = [each.name for each in card.outputs]
    return {name: np.concatenate([part[index] for part in parts]) for index, name in enumerate(names)}


def _onnx_outputs(path: Path, card: ModelCard, inputs: Mapping[str, "np.ndarray"]) -> dict[str, "np.ndarray"]:
    import numpy as np

    from optpipe.backends.onnxruntime_session import OnnxRuntimeSession

    with OnnxRuntimeSession(path, "cpu", {}) as session:
        sizes = {
            size
            for size in (1, 3, len(next(iter(inputs.values()))))
            if card.inputs[0].min[0] <= size <= card.inputs[0].max[0]
        }
        found: dict[int, dict[str, np.ndarray]] = {}
        for size in sorted(sizes) or [card.inputs[0].opt[0]]:
            runs = [session.run(batch) for batch in row_batches(card, inputs, size)]
            found[size] = {each.name: np.concatenate([run[each.name] for run in runs]) for each in session.outputs}
    largest = found[max(found)]
    for size, outputs in found.items():
        _same_for_every_batch_size(size, outputs, largest)
    return largest


def _same_for_every_batch_size(
    size: int, outputs: Mapping[str, "np.ndarray"], largest: Mapping[str, "np.ndarray"]
) -> None:
    for name, value in outputs.items():
        error = output_error(name, *same_rows(largest[name], value))
        if error.relative > TOLERATED_RELATIVE_ERROR[Precision.FP32]:
            message = f"the exported graph gives other answers at batch size {size}: output '{name}' is off by {error.relative:.2e}"
            raise GateError(message)


def _parity(
    card: ModelCard, expected: Mapping[str, "np.ndarray"], found: Mapping[str, "np.ndarray"]
) -> list[dict[str, Any]]:
    errors = [output_error(name, *same_rows(value, found[name])) for name, value in expected.items()]
    for error in errors:
        if error.relative > TOLERATED_RELATIVE_ERROR[Precision.FP32]:
            message = (
                f"{card.name}: the exported graph does not compute what the source model does: output '{error.name}' has a "
                f"relative error of {error.relative:.2e}, {TOLERATED_RELATIVE_ERROR[Precision.FP32]:.0e} is tolerated"
            )
            raise GateError(message)
    return [error.to_dict() for error in errors]
