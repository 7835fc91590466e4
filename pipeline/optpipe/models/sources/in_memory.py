"""A `torch.nn.Module` that a Python program holds in memory: its snapshot, its checks, and its identity by content.

The user's module is never changed: it is copied at once, and everything runs on the copy, in evaluation mode, on the CPU.
The identity is a hash of the program that torch.export makes of the copy: of its operations, constants, and tensors. It is
the same for renamed variables and for example inputs of another batch size, and another for a changed attribute or closure.
"""

import copy
import inspect
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from optpipe.backends.torch_program import make_dynamic_shapes, make_example_inputs
from optpipe.core import torch
from optpipe.core.card import ModelCard
from optpipe.core.entries import WeightsRecord, WeightsRequest
from optpipe.core.errors import BadInputError, OptpipeError, StageError
from optpipe.core.files import hash_value
from optpipe.models.sources.modules import LoadedModel, hash_module_weights, hash_tensors
from optpipe.models.sources.nesting import Arrange, arrange_inputs
from optpipe.models.sources.own_type import find_quantized_part, make_loaded_model
from optpipe.models.sources.python_file import describe_user_error

PREFIX = "memory"
"""First part of the source's name, `memory:Net`."""


@dataclass(frozen=True, eq=False)
class ModuleSource:
    """A snapshot of a module, which takes the card's inputs in order and returns a flat tuple.

    `original` is the user's module, which is only compared with the snapshot.
    """

    loaded: LoadedModel
    snapshot: Any
    original: Any = field(repr=False)
    trained: bool | None = None
    """What the user asserts about the weights; None if he says nothing."""

    @property
    def name(self) -> str:
        return self.loaded.card.source

    @property
    def has_module(self) -> bool:
        return True

    @property
    def runs_code(self) -> bool:
        return False

    @cached_property
    def content(self) -> str:
        """SHA-256 of the exported program. Raises StageError if torch cannot export the module."""
        return hash_program(export_module(self.loaded.module, self.loaded.card))

    @cached_property
    def _tensors(self) -> Mapping[str, str]:
        return hash_tensors(self.snapshot)

    def collect_identity(self) -> Mapping[str, Any]:
        return {
            "content": self.content,
            "card": hash_value(self.loaded.card.to_dict()),
            "converted_from": self.loaded.weights.converted_from,
            "trained": self.trained,
        }

    def require_unchanged(self) -> None:
        """Raises BadInputError if a tensor of the user's module differs from the snapshot's."""
        now, name = hash_tensors(self.original), self.loaded.card.name
        known = self._tensors
        if isinstance(self.snapshot, torch.fx.GraphModule):  # by another name
            changed = [key for key, sha256 in now.items() if sha256 not in known.values()]
        else:
            changed = [key for key in {**known, **now} if now.get(key) != known.get(key)]
        if changed:
            others = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
            raise BadInputError(
                f"{name} has changed since Model() took its snapshot: {changed[0]}{others}\n"
                "make a new Model of it"
            )

    def load(self, weights: WeightsRequest) -> LoadedModel:
        """A copy of the snapshot, since backends change the types of parameters in place.

        Raises BadInputError for other weights than its own.
        """
        if weights.kind != "default":
            raise BadInputError(
                f"{self.loaded.card.name} is in memory, with its weights; weights= is for models by name"
            )
        return replace(
            self.loaded,
            module=copy.deepcopy(self.loaded.module),
            own_module=copy.deepcopy(self.loaded.own_module),
        )


def unwrap_module(module: Any) -> Any:
    """The module inside `torch.compile`, DataParallel, and DistributedDataParallel. Raises BadInputError for TorchScript."""
    while True:
        if isinstance(module, torch.jit.ScriptModule | torch.jit.ScriptFunction):
            raise BadInputError(
                "the module is compiled by torch.jit, which torch.export cannot read\ngive the Python module instead"
            )
        inner = getattr(module, "_orig_mod", None)
        if inner is None and type(module).__name__ in ("DataParallel", "DistributedDataParallel"):
            inner = module.module
        if inner is None:
            return module
        module = inner


def require_plain(module: Any) -> None:
    """Raises BadInputError for forward hooks, which change results outside of forward, and for tensors without values or on
    several devices."""
    for name, submodule in module.named_modules():
        where = f"'{name}' ({type(submodule).__name__})" if name else type(submodule).__name__
        if getattr(submodule, "has_uninitialized_params", bool)():
            raise BadInputError(
                f"{where} has parameters without a shape yet\ncall the module once before it is given"
            )
        if hooks := [*submodule._forward_pre_hooks.values(), *submodule._forward_hooks.values()]:
            kind = getattr(hooks[0], "__qualname__", type(hooks[0]).__qualname__)
            raise BadInputError(
                f"{where} has a forward hook ({kind}), which an exported program would not have\n"
                "remove it with its handle, or compute the same in forward"
            )
        if isinstance(submodule, torch.jit.ScriptModule):
            unwrap_module(submodule)
    outer = torch.nn.modules.module
    if outer._global_forward_hooks or outer._global_forward_pre_hooks:
        raise BadInputError(
            "a forward hook is registered for all modules (register_module_forward_hook)\nremove it with its handle"
        )
    if (part := find_quantized_part(module)) is not None:
        raise BadInputError(
            f"the module is quantized already: {part}, whose integer kernels only torch has\n"
            'give the float module that it was made from; build("int8", calibration=...) quantizes it'
        )
    devices = find_devices(module)
    if "meta" in devices:
        raise BadInputError(
            "the module has tensors on the meta device, which have no values\nload its weights first (to_empty, load_state_dict)"
        )
    if len(devices) > 1:
        raise BadInputError(
            f"the module's tensors are on {' and '.join(devices)}\nmove them to one device with module.to()"
        )


def find_devices(module: Any) -> list[str]:
    """The devices of its parameters and buffers, sorted; empty without any."""
    return sorted({str(tensor.device) for tensor in (*module.parameters(), *module.buffers())})


def copy_module(module: Any, card: ModelCard, arrange: Arrange) -> Any:
    """A copy on the CPU in evaluation mode.

    A module that cannot be copied, such as one with a lock, is replaced by the program that torch.export makes of it.
    Raises StageError if that fails too.
    """
    try:
        made = copy.deepcopy(module)
    except Exception as error:  # noqa: BLE001 - whatever a user's attribute raises
        return _copy_by_export(module, card, arrange, error)
    for submodule in made.modules():
        submodule._compiled_call_impl = None  # of module.compile()
        for hooks in (submodule._backward_hooks, submodule._backward_pre_hooks):
            hooks.clear()
    return made.eval().requires_grad_(False).cpu()


def _copy_by_export(module: Any, card: ModelCard, arrange: Arrange, why: Exception) -> Any:
    inputs = make_example_inputs(card.inputs, "cpu")
    modes = {submodule: submodule.training for submodule in module.modules()}
    positional, named = arrange(inputs)
    shapes, named_shapes = arrange(make_dynamic_shapes(card.inputs))
    try:
        module.eval()
        program = _export(module, positional, named_shapes if named else shapes, named)
    except Exception as error:
        problem = f"the module can be neither copied ({describe_user_error(why)}) nor exported"
        raise StageError(f"{problem}: {describe_user_error(error)}") from error
    finally:
        for submodule, training in modes.items():
            submodule.training = training
    return copy.deepcopy(program.module())


def name_arguments(module: Any, count: int) -> tuple[str, ...]:
    """Names for `count` positional inputs: those of forward's parameters, or `input_0`, …"""
    named = [
        parameter.name
        for parameter in inspect.signature(module.forward).parameters.values()
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    return tuple(named[place] if place < len(named) else f"input_{place}" for place in range(count))


def source_from_module(
    module: Any, card: ModelCard, example: Sequence[Any], trained: bool | None = None
) -> ModuleSource:
    """The snapshot of a module, which is run once on the example inputs.

    Raises BadInputError with the module's own error if it does not take them.
    """
    arrange = arrange_inputs(module, [spec.name for spec in card.inputs])
    snapshot = copy_module(module, card, arrange)
    kind = {True: "asserted", False: "random", None: "unknown"}[trained]
    record = WeightsRecord(kind, hash_module_weights(snapshot))
    loaded = make_loaded_model(snapshot, card, record, arrange)
    given = [
        tensor.detach().cpu().to(getattr(torch, spec.dtype))
        for tensor, spec in zip(example, loaded.card.inputs, strict=True)
    ]
    try:
        with torch.inference_mode():
            loaded.given(*given)
    except OptpipeError:
        raise
    except Exception as error:
        shown = ", ".join(
            f"{spec.name} {spec.dtype} {'x'.join(map(str, tensor.shape)) or 'a single value'}"
            for spec, tensor in zip(card.inputs, given, strict=True)
        )
        raise BadInputError(
            f"{card.name} fails on its example ({shown}): {describe_user_error(error)}"
        ) from error
    return ModuleSource(loaded, snapshot, module, trained)


def export_module(module: Any, card: ModelCard) -> Any:
    """torch's ExportedProgram with the card's open dimensions. Raises StageError with torch's reason."""
    inputs = make_example_inputs(card.inputs, "cpu")
    shapes: Any = make_dynamic_shapes(card.inputs)
    try:
        return _export(module, inputs, (shapes,))
    except Exception as error:
        inner: BaseException = error
        while inner.__cause__ is not None:
            inner = inner.__cause__
        raise StageError(f"{card.name} cannot be exported: {describe_user_error(inner)}") from error


def _export(
    module: Any, inputs: tuple[Any, ...], shapes: Any, named: Mapping[str, Any] | None = None
) -> Any:
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        return torch.export.export(
            module, inputs, dict(named or {}), dynamic_shapes=shapes, strict=False
        )


def hash_program(program: Any) -> str:
    """SHA-256 over an ExportedProgram's operations with their arguments, and the tensors that it holds; names do not count."""
    signature, tensors = program.graph_signature, {**program.constants, **program.state_dict}
    held: dict[str, Any] = {}
    for spec in signature.input_specs:
        name, target = getattr(spec.arg, "name", ""), spec.target
        if target is not None and target in tensors:
            held[name] = _hash_held(tensors[target])
        elif target is not None:
            held[name] = f"{spec.kind.name} {target}"
    return hash_value([*_list_operations(program.graph_module, held)])


def _hash_held(value: Any) -> str:
    if not torch.is_tensor(value):
        return f"{type(value).__qualname__} {value!r}"
    module = torch.nn.Module()
    module.register_buffer("value", value.detach())
    return hash_tensors(module)["value"]


def _list_operations(graph_module: Any, held: Mapping[str, str]) -> Iterator[Any]:
    numbers: dict[str, int] = {}

    def show(value: Any) -> Any:
        if isinstance(value, torch.fx.Node):
            return f"%{numbers[value.name]}"
        if isinstance(value, list | tuple):
            return [show(part) for part in value]
        if isinstance(value, Mapping):
            return {str(key): show(part) for key, part in value.items()}
        return repr(value) if isinstance(value, float) else str(value)

    for number, node in enumerate(graph_module.graph.nodes):
        numbers[node.name] = number
        if node.op == "placeholder":
            yield ["input", held.get(node.name)]
        elif node.op == "get_attr":
            inner = graph_module
            for part in str(node.target).split("."):
                inner = getattr(inner, part)
            is_graph = isinstance(inner, torch.fx.GraphModule)
            yield ["held", [*_list_operations(inner, {})] if is_graph else _hash_held(inner)]
        else:
            yield [str(node.target), show(node.args), show(node.kwargs)]
