"""From a source model to a checked ONNX file, with proof that the two compute the same."""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optpipe.core.card import ModelCard, card_from_file, require_matching_input
from optpipe.core.events import Listener
from optpipe.core.precision import Precision
from optpipe.errors import BadInputError, GateError
from optpipe.export.model import Model, choose_available_weights
from optpipe.export.onnx_export import complete_card, onnx_from_torch, simplify_onnx
from optpipe.inputs.samples import (
    Samples,
    choose_samples,
    load_sample_inputs,
    split_batches,
)
from optpipe.inputs.tokens import SENTENCES
from optpipe.stats.agreement import TOLERATED_RELATIVE_ERROR, compute_output_error, cut_to_same_rows
from optpipe.workspace.environment import get_package_version
from optpipe.workspace.file_names import CARD, ONNX, REFERENCE, TOKENIZER
from optpipe.workspace.store import Entry, Store, compute_entry_id

if TYPE_CHECKING:
    import numpy as np

REVISION = 3
"""Raised whenever this stage would write something else from the same recipe."""


def find_stored_model(model: Model, store: Store) -> Entry | None:
    """What `export_model` made before, every byte of it checked; None where there is nothing."""
    return store.get("model", _recipe(model))


def compute_model_id(model: Model) -> str:
    """The id of what `export_model` makes of `model`, made or not."""
    return compute_entry_id("model", _recipe(model))


def prepare_model(model: Model, store: Store, listener: Listener) -> tuple[Model, Entry | None]:
    """`model` with weights that can be had here, and its store entry where it needs none any more."""
    if model.source.runs_code:  # which model it is shows only when it is made
        with listener.step("load"):
            model.load()
    stored = find_stored_model(model, store)
    return (model if stored else choose_available_weights(model, store.workspace, listener)), stored


def export_model(model: Model, store: Store, listener: Listener, stored: Entry | None = None) -> tuple[Entry, bool]:
    """The store entry `model` with `model.onnx` and `card.json`, and whether it was there; its info holds the weights' record.

    `session_from_store` is what `prepare_model` found: to look for it again would hash all of it twice.
    """
    if stored is not None:
        return stored, True

    def make(directory: Path) -> Mapping[str, Any]:
        loaded = model.load()
        require_matching_input(loaded.card)
        target = directory / ONNX
        if loaded.onnx is not None:
            _copy_onnx(loaded.onnx, target)
            simplified = simplify_onnx(target)
        else:
            simplified = onnx_from_torch(loaded.module, loaded.card, target)
        card = complete_card(loaded.card, target)
        _write_card(directory / CARD, card)
        if loaded.tokenizer is not None:
            (directory / TOKENIZER).write_text(loaded.tokenizer, encoding="utf-8")
        return {"name": card.name, "source": card.source, "weights": loaded.weights.to_dict(), "simplified": simplified}

    return store.produce("model", _recipe(model), make, listener=listener)


def _recipe(model: Model) -> dict[str, Any]:
    return {
        "revision": REVISION,
        "model": model.recipe(),
        "tools": {name: get_package_version(name) for name in ("onnx", "onnxscript", "onnxslim", "torch")},
    }


def _copy_onnx(source: Path, target: Path) -> None:
    """A user's file, with its external data drawn in so that the entry is whole."""
    import onnx

    from optpipe.sources.onnx_file import find_external_files

    if find_external_files(source):
        onnx.save(onnx.load(source), target)
    else:
        shutil.copyfile(source, target)


def _write_card(path: Path, card: ModelCard) -> None:
    import json

    path.write_text(json.dumps(card.to_dict(), indent=2) + "\n", encoding="utf-8")


TORCH_WAY_OUT = (
    "its forward pass is random\n"
    "disable randomness in eval mode, as torch.nn.Dropout and functional.dropout(..., training=self.training) do"
)
ONNX_WAY_OUT = "its graph is random\nexport it in eval mode, or remove RandomNormal, Dropout and similar nodes"


def compute_reference(
    model: Model, entry: Entry, images: Path | None, store: Store, listener: Listener
) -> tuple[Entry, bool]:
    """The store entry `compute_reference`: the source model's outputs on real inputs, and the exported graph held against them.

    The graph is run at batch sizes 1, 3 and all samples where the profile allows; a graph outside the FP32 tolerance
    raises `GateError`.
    """
    card = card_from_file(entry.file(CARD))
    samples = choose_samples(card, images, entry.file(TOKENIZER) if card.tokenization else None)
    recipe = {"revision": REVISION, "model": entry.id, "samples": samples.sha256}

    def make(directory: Path) -> Mapping[str, Any]:
        import numpy as np

        inputs = load_sample_inputs(card, samples)
        loaded = model.load()
        try:
            onnx_outputs = _run_onnx_model(entry.file(ONNX), card, inputs)
            outputs = onnx_outputs if loaded.module is None else run_torch_model(loaded.module, card, inputs)
            errors = [] if loaded.module is None else _check_parity(card, outputs, onnx_outputs)
        except GateError:
            size, module = card.inputs[0].opt[0], loaded.module
            if module is None:
                _require_repeatable(_run_graph(entry.file(ONNX), card, inputs, size, size), card, ONNX_WAY_OUT)
            else:
                _require_repeatable([run_torch_model(module, card, inputs) for _ in range(2)], card, TORCH_WAY_OUT)
            raise
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


def _require_repeatable(answers: Sequence[Mapping[str, "np.ndarray"]], card: ModelCard, way_out: str) -> None:
    """Raises `GateError` for a source model that nothing can be held against: its answers are no numbers, or differ each time."""
    import numpy as np

    first, again = answers
    for name, value in first.items():
        if not np.isfinite(value).all():
            raise GateError(f"{card.name} produces NaN or Inf in output '{name}'; check its weights")
        if (
            compute_output_error(name, *cut_to_same_rows(value, again[name])).relative
            > TOLERATED_RELATIVE_ERROR[Precision.FP32]
        ):
            raise GateError(f"{card.name} is not deterministic (output '{name}'): {way_out}")


def _samples_record(samples: Samples) -> dict[str, Any]:
    count = len(SENTENCES) if samples.kind == "texts" else len(samples.files)
    return {"kind": samples.kind, "count": count, "sha256": samples.sha256}


def run_torch_model(module: Any, card: ModelCard, inputs: Mapping[str, "np.ndarray"]) -> dict[str, "np.ndarray"]:
    """The source model's outputs by name, in FP32 on the CPU, in batches that the profile allows."""
    import torch

    parts: list[tuple[np.ndarray, ...]] = []
    with torch.inference_mode():
        for batch in split_batches(card, inputs):
            found = module(*(torch.from_numpy(batch[each.name]) for each in card.inputs))
            flat = found if isinstance(found, tuple | list) else (found,)
            parts.append(
                tuple(tensor.float().numpy() if tensor.is_floating_point() else tensor.numpy() for tensor in flat)
            )
    names = [each.name for each in card.outputs]
    return {name: join_batches(name, [part[index] for part in parts]) for index, name in enumerate(names)}


def join_batches(name: str, parts: Sequence["np.ndarray"]) -> "np.ndarray":
    """One output's answers to all batches; raises `BadInputError` where they have no axes or not the same ones."""
    import numpy as np

    shapes = list(dict.fromkeys(part.shape[1:] for part in parts))
    if len(shapes) > 1 or not all(part.ndim for part in parts):
        seen = (
            "a single value for a whole batch"
            if len(shapes) == 1
            else f"{shapes[0]} for one batch and {shapes[1]} for another"
        )
        raise BadInputError(
            f"output '{name}' is {seen}, but outputs are compared per input; pad it in the model or remove it"
        )
    return np.concatenate(parts)


def _run_onnx_model(path: Path, card: ModelCard, inputs: Mapping[str, "np.ndarray"]) -> dict[str, "np.ndarray"]:
    sizes = {
        size
        for size in (1, 3, len(next(iter(inputs.values()))))
        if card.inputs[0].min[0] <= size <= card.inputs[0].max[0]
    }
    wanted = sorted(sizes) or [card.inputs[0].opt[0]]
    found = _run_graph(path, card, inputs, *wanted)
    for size, outputs in zip(wanted, found, strict=True):
        _require_batch_invariance(size, outputs, found[-1])
    return found[-1]


def _run_graph(
    path: Path, card: ModelCard, inputs: Mapping[str, "np.ndarray"], *sizes: int
) -> list[dict[str, "np.ndarray"]]:
    """What the graph answers in batches of each size, one after the other in one session."""
    from optpipe.backends.onnxruntime_session import OnnxRuntimeSession

    found = []
    with OnnxRuntimeSession(path, "cpu", {}) as session:
        for size in sizes:
            runs = [session.run(batch) for batch in split_batches(card, inputs, size)]
            found.append(
                {each.name: join_batches(each.name, [run[each.name] for run in runs]) for each in session.outputs}
            )
    return found


def _require_batch_invariance(
    size: int, outputs: Mapping[str, "np.ndarray"], largest: Mapping[str, "np.ndarray"]
) -> None:
    for name, value in outputs.items():
        error = compute_output_error(name, *cut_to_same_rows(largest[name], value))
        if error.relative > TOLERATED_RELATIVE_ERROR[Precision.FP32]:
            raise GateError(
                f"the exported graph differs at batch size {size}: output '{name}' has a relative error of {error.relative:.2e}"
            )


def _check_parity(
    card: ModelCard, expected: Mapping[str, "np.ndarray"], found: Mapping[str, "np.ndarray"]
) -> list[dict[str, Any]]:
    errors = [compute_output_error(name, *cut_to_same_rows(value, found[name])) for name, value in expected.items()]
    for error in errors:
        if error.relative > TOLERATED_RELATIVE_ERROR[Precision.FP32]:
            raise GateError(
                f"{card.name}: the exported graph does not match the source model: output '{error.name}' has a "
                f"relative error of {error.relative:.2e}; the tolerance is {TOLERATED_RELATIVE_ERROR[Precision.FP32]:.0e}"
            )
    return [error.to_dict() for error in errors]
