"""Nested inputs and outputs of a module, as the flat named tensors that an engine has.

An input named `batch.image` is the entry `image` of the parameter `batch` of `forward`, and `states.0` the first tensor of
`states`; digits make a list, or a tuple where the annotation says so, and other keys a dict, or the dataclass, named tuple, or
mapping of the annotation. A `forward(self, batch: dict)` with one nested parameter takes inputs by their plain names too.
"""

import inspect
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from optpipe.core import torch

Arrange = Callable[[Sequence[Any]], tuple[tuple[Any, ...], dict[str, Any]]]
"""From the tensors of the inputs, in order, to the positional and keyword arguments of `forward`."""


@dataclass
class FlatOutputs:
    """The tensors of a nested output in order, and what else it has.

    >>> flatten_outputs({"logits": logits, "cache": cache}).left_out
    ('cache (DynamicCache)',)
    """

    tensors: list[Any] = field(default_factory=list)
    paths: list[tuple[Any, ...]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    """Outputs that are neither tensors nor containers of them, with their types, such as a cache."""

    @property
    def names(self) -> tuple[str, ...]:
        """Keys and fields of the tensors, such as `boxes` or `features.0`; empty if one has none."""
        paths = self.paths
        while paths and all(path and not isinstance(path[0], str) for path in paths):
            paths = [path[1:] for path in paths]
        names = tuple(".".join(map(str, path)) for path in paths)
        return names if all(names) and len(set(names)) == len(names) else ()


def flatten_outputs(value: Any) -> FlatOutputs:
    """The tensors of a tensor, tuple, list, mapping, dataclass, or transformers' ModelOutput, at any depth.

    None is nothing. Raises TypeError for an output without any tensor.
    """
    outputs = FlatOutputs()
    for path, part in _walk_parts(value, ()):
        if isinstance(part, torch.Tensor):
            outputs.tensors.append(part)
            outputs.paths.append(path)
        else:
            place = ".".join(map(str, path)) or "the output"
            outputs.left_out.append(f"{place} ({type(part).__name__})")
    if not outputs.tensors:
        what = ", ".join(outputs.left_out) or "no tensor"
        raise TypeError(
            f"forward returns {what}, not tensors or tuples, mappings, or dataclasses of tensors"
        )
    return outputs


def _walk_parts(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if value is None:
        return
    if isinstance(value, torch.Tensor):
        yield path, value
        return
    parts: list[tuple[Any, Any]]
    if isinstance(value, Mapping):
        parts = list(value.items())
    elif is_dataclass(value) and not isinstance(value, type):
        parts = [(member.name, getattr(value, member.name)) for member in fields(value)]
    elif isinstance(value, tuple | list):
        parts = list(zip(getattr(value, "_fields", range(len(value))), value, strict=True))
    else:
        yield path, value
        return
    for key, part in parts:
        yield from _walk_parts(part, (*path, key))


def arrange_inputs(module: Any, names: Sequence[str]) -> Arrange:
    """How `module.forward` takes the inputs `names`: by name, nested, or in order.

    >>> positional, named = arrange_inputs(module, ["batch.image", "batch.mask"])((image, mask))
    >>> named
    {'batch': {'image': image, 'mask': mask}}
    """
    known = _read_parameters(module)
    by_name = {name: parameter for name, parameter in known.items() if parameter.kind in _BY_NAME}
    kinds = {parameter.kind for parameter in known.values()}
    takes_any_name = (
        inspect.Parameter.VAR_KEYWORD in kinds and inspect.Parameter.VAR_POSITIONAL not in kinds
    )
    tree = _choose_tree(by_name, names, takes_any_name=takes_any_name)

    def in_order(values: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return tuple(values), {}

    if tree is None:
        return in_order
    hints = _read_hints(module)
    makers = {name: _make_value(part, hints.get(name)) for name, part in tree.items()}

    def by_keyword(values: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (), {name: make(values) for name, make in makers.items()}

    return by_keyword


_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
Tree = dict[str, Any]
"""Keys to trees, or to the place of an input."""


def _choose_tree(
    parameters: Mapping[str, Any], names: Sequence[str], *, takes_any_name: bool
) -> Tree | None:
    """The keyword arguments; None if the inputs are positional."""
    if set(parameters).issuperset(names):
        return {name: place for place, name in enumerate(names)}
    if all(name in parameters or name.partition(".")[0] in parameters for name in names):
        return _nest([[name] if name in parameters else name.split(".") for name in names])
    required = [
        name for name, parameter in parameters.items() if parameter.default is parameter.empty
    ]
    if takes_any_name and set(names).issuperset(required):
        return {name: place for place, name in enumerate(names)}
    if len(required) != 1:
        return None
    (only,) = required
    kind = _unwrap_optional(_read_annotation(parameters[only]))
    if kind is None and len(names) > len(parameters):
        kind = dict
    if not _is_container(kind):
        return None
    ordered = _is_sequence(kind)
    return _nest(
        [[only, *([str(at)] if ordered else name.split("."))] for at, name in enumerate(names)]
    )


def _nest(paths: Sequence[Sequence[str]]) -> Tree | None:
    """A tree of these paths; None if one of them ends inside another."""
    tree: Tree = {}
    for place, path in enumerate(paths):
        node = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
            if not isinstance(node, dict):
                return None
        if path[-1] in node:
            return None
        node[path[-1]] = place
    return tree


def _make_value(tree: Any, kind: Any) -> Callable[[Sequence[Any]], Any]:
    """A function that makes the value of a parameter, or of a part of it, from all tensors."""
    if isinstance(tree, int):
        return lambda values: values[tree]
    kind = _unwrap_optional(kind)
    if list(tree) == [str(place) for place in range(len(tree))] and not _has_fields(kind):
        inner = (typing.get_args(kind) or (None,))[0]
        parts = [_make_value(part, inner) for part in tree.values()]
        container = tuple if (typing.get_origin(kind) or kind) is tuple else list
        return lambda values: container(make(values) for make in parts)
    hints = _read_hints(kind) if isinstance(kind, type) else {}
    named = {key: _make_value(part, hints.get(key)) for key, part in tree.items()}
    if _has_fields(kind):
        return lambda values: kind(**{key: make(values) for key, make in named.items()})
    made_by = kind if _is_own_mapping(kind) else dict
    return lambda values: made_by({key: make(values) for key, make in named.items()})


def _read_parameters(module: Any) -> Mapping[str, inspect.Parameter]:
    """Parameters of forward; none of a scripted module."""
    try:
        return inspect.signature(module.forward).parameters
    except (TypeError, ValueError):
        return {}


def _read_annotation(parameter: inspect.Parameter) -> Any:
    """The annotation; its text where it is one, as under `from __future__ import annotations`."""
    if parameter.annotation is parameter.empty:
        return None
    known = {
        "dict": dict,
        "Dict": dict,
        "Mapping": dict,
        "list": list,
        "List": list,
        "tuple": tuple,
    }
    text = parameter.annotation
    if isinstance(text, str):
        return known.get(text.partition("[")[0].rpartition(".")[2], text)
    return text


def _read_hints(owner: Any) -> dict[str, Any]:
    """Resolved annotations of a module's forward, or of a class's fields; empty if they cannot be resolved."""
    try:
        return typing.get_type_hints(owner if isinstance(owner, type) else owner.forward)
    except Exception:  # noqa: BLE001 - annotations are a user's code
        return {}


def _unwrap_optional(kind: Any) -> Any:
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        others = [member for member in typing.get_args(kind) if member is not types.NoneType]
        return others[0] if len(others) == 1 else None
    return kind


def _is_container(kind: Any) -> bool:
    kind = typing.get_origin(kind) or kind
    return _has_fields(kind) or (
        isinstance(kind, type) and issubclass(kind, Mapping | list | tuple)
    )


def _is_own_mapping(kind: Any) -> bool:
    """Whether the type is a mapping with a class of its own, such as transformers' BatchEncoding."""
    return (
        isinstance(kind, type)
        and issubclass(kind, Mapping)
        and not typing.is_typeddict(kind)
        and not inspect.isabstract(kind)
    )


def _is_sequence(kind: Any) -> bool:
    kind = typing.get_origin(kind) or kind
    return isinstance(kind, type) and issubclass(kind, list | tuple) and not _has_fields(kind)


def _has_fields(kind: Any) -> bool:
    """Whether the type is made from its fields: a dataclass or a named tuple."""
    return isinstance(kind, type) and (is_dataclass(kind) or hasattr(kind, "_fields"))
