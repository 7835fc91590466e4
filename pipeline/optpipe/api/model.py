"""A model: a module in memory, or whatever the command line takes as MODEL."""

import inspect
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from optpipe.api.arguments import check_arguments, describe_type
from optpipe.api.door import speak_of_arguments
from optpipe.api.workspace import Workspace, resolve_workspace
from optpipe.core import np, torch
from optpipe.core.card import DTYPES, InputSpec, ModelCard, Shape, Task
from optpipe.core.entries import Device, weights_from_text
from optpipe.core.errors import BadInputError
from optpipe.core.values import describe_elements

if TYPE_CHECKING:
    from optpipe.api.builds import Builds
    from optpipe.models.export.exported import Model as SourceModel

Batch = Annotated[
    int | tuple[int, int, int],
    "one size, or (min, opt, max) with 1 <= min <= opt <= max, such as (1, 8, 64)",
]
ShapeRange = Shape | tuple[Shape, Shape, Shape]
Shapes = Annotated[
    Mapping[str, ShapeRange],
    "a mapping of inputs to shapes, such as {'images': (8, 3, 224, 224)}, or to three of them (min, opt, max)",
]
Axes = Annotated[Mapping[str, int | None], "a mapping of inputs to axes, such as {'state': 1}"]
Decibels = Annotated[str, "a ratio such as '40 dB'"]
Share = Annotated[str, "a share such as '99.5%'"]
Points = Annotated[str, "percentage points such as '1 point'"]


class Model:
    """The source of builds: a `torch.nn.Module` in memory, or a name, file, or card as on the command line.

    A module is copied at once and never changed: its mode, hooks, device, and gradients stay as they are. It needs an `example` of
    its inputs: a tensor or array, a tuple of them in the order of forward, or a mapping by the names of forward's arguments.
    `batch` is the batch size, or (min, opt, max); by default that of the command line, (1, 8, 64). `axes` names the batch axis of
    inputs where it is not 0, or None for an input that all samples share; all other axes have the example's size, unless `shape`
    gives a range. `trained` asserts that the weights are trained, which a verdict records; if nobody says so, no verdict is PASS.

    Raises BadInputError for a module that torch.export cannot represent (with forward hooks, TorchScript, tensors on several
    devices), and for an example that it does not take, with the module's own error as the cause.

    >>> import torch, optpipe as op
    >>> net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    >>> model = op.Model(net, example=torch.randn(2, 8), batch=(1, 8, 64), workspace="work")
    >>> model
    Model('Sequential', input float32 1x8:8x8:64x8)
    >>> net.training
    True
    """

    @check_arguments
    def __init__(
        self,
        source: Any,
        example: Any = None,
        *,
        batch: Batch | None = None,
        axes: Axes | None = None,
        shape: Shapes | None = None,
        trained: bool | None = None,
        weights: str = "default",
        name: str | None = None,
        task: str | None = None,
        labels: Sequence[str] = (),
        workspace: Workspace | str | os.PathLike[str] | None = None,
    ) -> None:
        self.workspace = resolve_workspace(workspace)
        batch_range = _read_batch(batch)
        shapes = {key: _read_range(value) for key, value in (shape or {}).items()}
        text = os.fspath(source) if isinstance(source, str | os.PathLike) else None
        with self.workspace.call("Model", source=text or type(source).__name__):
            if text is not None:
                given = {
                    "example": example is not None,
                    "axes": axes,
                    "trained": trained is not None,
                    "name": name,
                    "task": task,
                    "labels": labels,
                }
                if wrong := [key for key, value in given.items() if value]:
                    raise BadInputError(
                        f"{wrong[0]} is for a module in memory, not for {text!r}\nput it into a model card (models/README.md)"
                    )
                self._model = _model_from_text(text, weights, batch_range, shapes, self.workspace)
            else:
                if weights != "default":
                    raise BadInputError(
                        "weights is for a model by name; a module in memory has its own\nload them into it first"
                    )
                self._model = _model_from_module(
                    source, example, batch_range, axes or {}, shapes, trained, name, task, labels
                )

    @property
    def name(self) -> str:
        return self.card.name

    @property
    def card(self) -> ModelCard:
        """Its inputs, task, and preprocessing."""
        with speak_of_arguments():
            return self._model.load().card

    @property
    def id(self) -> str:
        """The ID of its content: 12 hexadecimal digits, which cover the exported graph, its tensors, and the names and types of
        inputs and outputs. A module has the same ID in memory and as `file.py:make`, whatever its name, batch range, or example.

        Exports the model into the workspace, or finds it there, as `build` does; an export takes seconds. Raises what the export
        raises.

        >>> import torch, optpipe as op
        >>> net = torch.nn.Linear(8, 4)
        >>> op.Model(net, example=torch.randn(2, 8)).id == op.Model(net, example=torch.randn(3, 8), trained=True).id
        True
        """
        from optpipe.models.export.exported import export_model, prepare_model

        with self.workspace.call("Model.id", model=self.name) as listener:
            self.require_unchanged()
            store = self.workspace.store
            model, stored = prepare_model(self._model, store, listener)
            entry, _ = export_model(model, store, listener, stored)
            return entry.info.content

    def __repr__(self) -> str:
        inputs = ", ".join(
            f"{spec.name} {spec.dtype} {spec.format_profile()}" for spec in self.card.inputs
        )
        return f"Model({self.name!r}, {inputs})"

    @check_arguments
    def build(
        self,
        precision: str | Sequence[str] = "fp16",
        *,
        backend: str | Sequence[str] = "auto",
        device: Device | None = None,
        calibration: Any = None,
        data: Any = None,
        budget: Points | None = None,
        recover: str | None = None,
        option: Mapping[str, Mapping[str, Any]] | None = None,
        truncate: bool = False,
        min_snr: Decibels | None = None,
        require_share: Share | None = None,
        steps: str | None = None,
    ) -> "Builds":
        """Builds and verifies every combination, or finds it in the workspace; the arguments are the options of `optpipe build`.

        `calibration` and `data` are a Data, or anything that Data() takes.

        Returns all of them by precision; a candidate that failed is there too, with its reason. `precision="auto"` builds and
        measures every candidate. Raises what the export raises, and BadInputError if the module has changed since `Model()`.

        >>> import torch, optpipe as op
        >>> net = torch.nn.Linear(8, 4)
        >>> builds = op.Model(net, example=torch.randn(2, 8), workspace="work").build("fp32", backend="onnxruntime", device="cpu")
        >>> builds["fp32"](torch.zeros(3, 8)).shape
        torch.Size([3, 4])
        """
        from optpipe.api.building import build_model_from_library

        return build_model_from_library(
            self,
            self._model,
            precision=precision,
            backend=backend,
            device=device,
            calibration=calibration,
            data=data,
            budget=budget,
            recover=recover,
            option=option or {},
            truncate=truncate,
            min_snr=min_snr,
            require_share=require_share,
            steps=steps,
        )

    def require_unchanged(self) -> None:
        """Raises BadInputError if a tensor of the module in memory has changed since its snapshot."""
        from optpipe.models.sources.in_memory import ModuleSource

        if isinstance(self._model.source, ModuleSource):
            self._model.source.require_unchanged()

    def exported(self) -> "SourceModel":
        """The model as optpipe's own functions take it."""
        return self._model


def _read_batch(batch: Batch | None) -> tuple[int, int, int] | None:
    if batch is None:
        return None
    low, usual, high = batch if isinstance(batch, tuple | list) else (batch,) * 3
    if not 1 <= low <= usual <= high:
        raise BadInputError(f"batch: expected {describe_type(Batch)}, not {batch}")
    return int(low), int(usual), int(high)


def _read_range(value: ShapeRange) -> tuple[Shape, Shape, Shape]:
    several: Any = value if value and isinstance(value[0], tuple | list) else (value,) * 3
    low, usual, high = (tuple(int(size) for size in shape) for shape in several)
    return low, usual, high


def _model_from_text(
    text: str,
    weights: str,
    batch: tuple[int, int, int] | None,
    shapes: Mapping[str, tuple[Shape, Shape, Shape]],
    workspace: Workspace,
) -> "SourceModel":
    from optpipe.models.artifacts.named import model_from_text

    return model_from_text(
        text, workspace.store, weights=weights_from_text(weights), batch=batch, shapes=dict(shapes)
    )


def _model_from_module(
    module: Any,
    example: Any,
    batch: tuple[int, int, int] | None,
    axes: Mapping[str, int | None],
    shapes: Mapping[str, tuple[Shape, Shape, Shape]],
    trained: bool | None,
    name: str | None,
    task: str | None,
    labels: Sequence[str],
) -> "SourceModel":
    from optpipe.core.entries import WeightsRequest
    from optpipe.models.export.exported import Model as SourceModel
    from optpipe.models.sources.in_memory import (
        PREFIX,
        find_devices,
        require_plain,
        source_from_module,
        unwrap_module,
    )
    from optpipe.models.sources.modules import DEFAULT_BATCH_PROFILE
    from optpipe.models.sources.own_type import find_own_type

    if not isinstance(module, torch.nn.Module):
        kind = module.__name__ if isinstance(module, type) else type(module).__name__
        what = f"the class {kind}" if isinstance(module, type) else f"an object of type {kind}"
        way = f"make an instance: {kind}(...)" if isinstance(module, type) else "wrap it in one"
        if isinstance(module, torch.export.ExportedProgram):
            way = "save it with torch.export.save, and give the path of the file"
        raise BadInputError(
            f"expected a torch.nn.Module, a name, or the path of a file, not {what}\n{way}"
        )
    module = unwrap_module(module)
    require_plain(module)
    if example is None:
        raise BadInputError(
            f"{type(module).__name__} needs an example of its inputs\ngive a tensor, a tuple of tensors, or a mapping by the names of "
            "forward's arguments: example="
        )
    named = _read_example(module, example, find_own_type(module))
    places = find_devices(module)
    apart = {
        key: str(tensor.device)
        for key, tensor in named.items()
        if places and str(tensor.device) != places[0]
    }
    if apart:
        key, where = next(iter(apart.items()))
        raise BadInputError(
            f"the module is on {places[0]}, and its example '{key}' on {where}\nmove one of them with .to()"
        )
    if unknown := sorted({*axes} - {*named}):
        raise BadInputError(
            f"axes: no input is called '{unknown[0]}'; inputs are {', '.join(named)}"
        )
    called = name or type(module).__name__
    if not called.replace("-", "").replace(".", "").replace("_", "").isalnum():
        raise BadInputError(f"name {called!r}: expected letters, digits, and any of - . _")
    inputs = _specs_from_example(named, axes, batch or DEFAULT_BATCH_PROFILE)
    kinds = [str(task) for task in Task]
    if task is not None and task not in kinds:
        raise BadInputError(f"task {task!r}: choose from {', '.join(kinds)}")
    card = ModelCard(
        called, f"{PREFIX}:{called}", Task(task or "other"), inputs, labels=tuple(labels)
    )
    source = source_from_module(module, card, tuple(named.values()), trained)
    return SourceModel(source, WeightsRequest(), batch, dict(shapes))


def _read_example(module: Any, example: Any, own_type: str | None) -> dict[str, Any]:
    """The example's tensors by name, `states.0` for those inside of an argument. `own_type` is the module's, if not float32."""
    from optpipe.models.sources.in_memory import name_arguments

    if isinstance(example, Mapping):
        arguments = {str(key): value for key, value in example.items()}
        parameters = inspect.signature(module.forward).parameters
        free = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        if unknown := [key for key in arguments if key not in parameters and not free]:
            raise BadInputError(
                f"example: forward has no argument '{unknown[0]}'; it has {', '.join(parameters)}"
            )
    else:
        values = tuple(example) if isinstance(example, tuple | list) else (example,)
        _require_arguments(module, len(values))
        arguments = dict(zip(name_arguments(module, len(values)), values, strict=True))
    tensors: dict[str, Any] = {}
    for name, value in arguments.items():
        for place, part in _walk_example(name, value):
            tensors[place] = _tensor_from(place, part, own_type)
    if not tensors:
        raise BadInputError(
            "the example is empty\ngive a tensor or array for each argument of forward"
        )
    return tensors


def _require_arguments(module: Any, count: int) -> None:
    """Raises BadInputError if `count` inputs by position are more than forward takes."""
    parameters = inspect.signature(module.forward).parameters.values()
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
        return
    taken = [
        parameter.name
        for parameter in parameters
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    if count > len(taken):
        raise BadInputError(
            f"example: {count} inputs are given, and forward takes {len(taken)} ({', '.join(taken)})\n"
            "leave out what it does not take, such as the labels of a batch"
        )


def _walk_example(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from _walk_example(f"{name}.{key}", part)
    elif isinstance(value, tuple | list):
        for place, part in enumerate(value):
            yield from _walk_example(f"{name}.{place}", part)
    else:
        yield name, value


def _tensor_from(name: str, value: Any, own_type: str | None) -> Any:
    tensor = value
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in "biufc":
            raise BadInputError(
                f"example: input '{name}' is an array of {describe_elements(value)}\ngive numbers, as forward gets them"
            )
        tensor = torch.from_numpy(value)
    if not torch.is_tensor(tensor):
        raise BadInputError(
            f"example: input '{name}' is a {type(value).__name__}\ngive tensors or NumPy arrays, as forward gets them"
        )
    if tensor.layout != torch.strided:
        layout = str(tensor.layout).removeprefix("torch.")
        raise BadInputError(
            f"example: input '{name}' is a {layout} tensor, which no engine takes\nconvert it with .to_dense()"
        )
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in (*DTYPES, own_type):
        raise BadInputError(
            f"example: input '{name}' is {dtype}; engines take {', '.join(DTYPES)}\nconvert the example, such as with .float()"
        )
    if 0 in tensor.shape:
        raise BadInputError(
            f"example: input '{name}' is empty ({'x'.join(map(str, tensor.shape))})\ngive at least one sample"
        )
    return tensor


def _specs_from_example(
    named: Mapping[str, Any], axes: Mapping[str, int | None], batch: tuple[int, int, int]
) -> tuple[InputSpec, ...]:
    """Raises BadInputError for a batch axis that the example does not have, and for batch sizes that differ."""
    sizes: dict[str, int] = {}
    specs = []
    for name, tensor in named.items():
        shape = tuple(tensor.shape)
        axis = axes.get(name, 0) if shape else None
        if axis is not None and not 0 <= axis < len(shape):
            raise BadInputError(
                f"axes: '{name}' has {len(shape)} axes, so its batch axis cannot be {axis}"
            )
        if axis is not None:
            sizes[name] = shape[axis]
        spec = InputSpec(
            name, str(tensor.dtype).removeprefix("torch."), shape, shape, shape, batch=axis
        )
        specs.append(spec.with_batch(*batch))
    if len(set(sizes.values())) > 1:
        shown = ", ".join(f"{name} {size}" for name, size in sizes.items())
        raise BadInputError(
            f"the example's inputs have different batch sizes on their batch axes: {shown}\n"
            "name the batch axis of each in axes=, or None for an input that all samples share"
        )
    return tuple(specs)
