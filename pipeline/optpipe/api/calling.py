"""The contract of calling a build, above all backends: names, types, and shapes are checked, and nothing is cast."""

from collections import namedtuple
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from optpipe.core import np, torch
from optpipe.core.card import InputSpec, ModelCard, TensorSpec
from optpipe.core.errors import BadInputError, first_line

MOST_SIGNATURES = 64


class CallContract:
    """Reads the inputs of a build's calls. Types, shapes, and devices that fitted once are not checked again, so that a call costs
    little more than the session's own."""

    def __init__(self, card: ModelCard) -> None:
        self._card = card
        self._names = [spec.name for spec in card.inputs]
        self._fitting: dict[Any, tuple[Any]] = {}
        """The device, by the types and shapes of inputs that fitted."""

    def read(self, inputs: Sequence[Any], named: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
        """The inputs by name, and the device on which all tensors lie; None for arrays.

        Raises BadInputError as `name_inputs`, `require_fitting`, and `find_device`.
        """
        if not named and len(inputs) == len(self._names):
            known = self._find_known(inputs)[1]
            if known is not None:
                return dict(zip(self._names, inputs, strict=True)), known[0]
        arrays = name_inputs(self._card, inputs, named)
        given = {name: arrays[name] for name in self._names}
        signature, known = self._find_known(given.values())
        if known is not None:
            return given, known[0]
        require_fitting(self._card, given)
        device = find_device(given)
        if signature is not None:
            if len(self._fitting) >= MOST_SIGNATURES:
                self._fitting.clear()
            self._fitting[signature] = (device,)
        return given, device

    def _find_known(self, values: Iterable[Any]) -> tuple[Any, tuple[Any] | None]:
        """The types and shapes of the values, and the device if values like these fit before; Nones if one is no array or tensor."""
        try:
            signature = tuple(
                [
                    (type(value), value.dtype, value.shape, getattr(value, "device", None))
                    for value in values
                ]
            )
            return signature, self._fitting.get(signature)
        except (AttributeError, TypeError):  # no tensor, which `require_fitting` names
            return None, None


def name_inputs(card: ModelCard, given: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
    """The inputs by name, from positions, keywords, or one mapping. Raises BadInputError for a name that is missing, unknown, or
    given twice."""
    names = [spec.name for spec in card.inputs]
    positional = list(given)
    if len(positional) == 1 and isinstance(positional[0], Mapping) and not named:
        named = positional.pop()
    if len(positional) > len(names):
        raise BadInputError(
            f"{len(positional)} inputs are given, and {card.name} takes {', '.join(names)}"
        )
    arrays = dict(zip(names, positional, strict=False))
    for name, value in named.items():
        if name in arrays or name not in names:
            what = "is given twice" if name in arrays else "is unknown"
            raise BadInputError(f"input '{name}' {what}; {card.name} takes {', '.join(names)}")
        arrays[name] = value
    if missing := [name for name in names if name not in arrays]:
        raise BadInputError(
            f"input '{missing[0]}' is missing; {card.name} takes {', '.join(names)}"
        )
    return arrays


def require_fitting(card: ModelCard, inputs: Mapping[str, Any]) -> None:
    """Raises BadInputError for a type or shape outside the profile, and for inputs that differ in batch size or kind."""
    batches: dict[str, int] = {}
    for spec in card.inputs:
        _require_spec(spec, inputs[spec.name])
        if spec.batch is not None:
            batches[spec.name] = inputs[spec.name].shape[spec.batch]
    if len(set(batches.values())) > 1:
        shown = ", ".join(f"{name} {size}" for name, size in batches.items())
        raise BadInputError(f"the inputs have different batch sizes: {shown}")


def _require_spec(spec: InputSpec, value: Any) -> None:
    if not hasattr(value, "shape") or not hasattr(value, "dtype"):
        raise BadInputError(
            f"input '{spec.name}' is a {type(value).__name__}\ngive a NumPy array or a torch tensor of {spec.dtype}"
        )
    dtype = str(value.dtype).removeprefix("torch.")
    if dtype != spec.dtype:
        way = f".to(torch.{spec.dtype})" if hasattr(value, "detach") else f".astype('{spec.dtype}')"
        raise BadInputError(
            f"input '{spec.name}' is {dtype}, and the build takes {spec.dtype}\nconvert it with {way}; nothing is cast silently"
        )
    shape = tuple(value.shape)
    fits = len(shape) == len(spec.min) and all(
        low <= size <= high for size, low, high in zip(shape, spec.min, spec.max, strict=True)
    )
    if not fits:
        shown = "x".join(map(str, shape)) or "a single value"
        raise BadInputError(
            f"input '{spec.name}' is {shown}, and the build takes {spec.format_profile()}\nsplit the batch, or build with another "
            "batch= or shape="
        )


def find_device(inputs: Mapping[str, Any]) -> Any:
    """The device that all tensors lie on; None for arrays. Raises BadInputError for a mixture."""
    kinds = {
        name: value.device if hasattr(value, "detach") else None for name, value in inputs.items()
    }
    if len({str(device) for device in kinds.values()}) > 1:
        shown = ", ".join(f"'{name}' {device or 'a NumPy array'}" for name, device in kinds.items())
        raise BadInputError(f"the inputs are in different places: {shown}\nmove them together")
    return next(iter(kinds.values()))


def arrays_from(inputs: Mapping[str, Any]) -> dict[str, "np.ndarray"]:
    """Host arrays without a copy of tensors on the CPU; contiguous. Raises BadInputError for a tensor without plain values, such as a
    sparse one, or one inside of vmap."""
    arrays = {}
    for name, value in inputs.items():
        try:
            plain = value.detach().numpy() if hasattr(value, "detach") else value
        except (TypeError, RuntimeError) as error:
            raise _describe_odd_tensor(name, error) from error
        arrays[name] = np.ascontiguousarray(plain)
    return arrays


def require_memory(inputs: Mapping[str, Any]) -> None:
    """Raises BadInputError for tensors that a session cannot read where they lie: without plain values, or not contiguous."""
    for name, value in inputs.items():
        try:
            value.data_ptr()
            lies_plain = value.is_contiguous()
        except (TypeError, RuntimeError) as error:
            raise _describe_odd_tensor(name, error) from error
        if not lies_plain:
            raise BadInputError(f"input '{name}' is not contiguous\ngive .contiguous()")


def _describe_odd_tensor(name: str, error: Exception) -> BadInputError:
    return BadInputError(
        f"input '{name}' is not a plain tensor: {first_line(error)}\ngive a dense tensor, outside of torch's transformations"
    )


def pack_outputs(
    outputs: Mapping[str, Any], specs: Sequence[TensorSpec], *, as_tensors: bool
) -> Any:
    """One output as itself, several as a named tuple; names that Python does not allow become `features_0` or `_0`."""
    if as_tensors and len(specs) == 1 and torch.is_tensor(only := outputs[specs[0].name]):
        return only
    values = [outputs[spec.name] for spec in specs]
    if as_tensors:
        values = [
            array if torch.is_tensor(array) else torch.from_numpy(np.array(array))
            for array in values
        ]
    if len(values) == 1:
        return values[0]
    return make_tuple_type(tuple(spec.name for spec in specs))(*values)


_TYPES: dict[tuple[str, ...], Any] = {}


def make_tuple_type(names: tuple[str, ...]) -> Any:
    if names not in _TYPES:
        fields = ["".join(part if part.isalnum() else "_" for part in name) for name in names]
        _TYPES[names] = namedtuple("Outputs", fields, rename=True)
    return _TYPES[names]
