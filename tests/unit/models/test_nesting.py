"""Nested inputs and outputs are the named tensors of an engine, in any structure that forward takes or returns."""

from collections import UserDict
from dataclasses import dataclass
from typing import Any, NamedTuple, TypedDict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optpipe.models.sources.nesting import arrange_inputs, flatten_outputs


@dataclass
class Fields:
    image: Any
    mask: Any = None


class Pair(NamedTuple):
    image: Any
    mask: Any


class Typed(TypedDict):
    image: Any
    mask: Any


class Encoding(UserDict[str, Any]):
    pass


class ByKind:
    def of_dict(self, batch: dict): ...
    def of_dict_of_any(self, batch: dict[str, Any]): ...
    def of_text(self, batch: "dict[str, Any]"): ...
    def of_nothing(self, batch): ...
    def of_fields(self, batch: Fields): ...
    def of_optional(self, batch: Fields | None = None): ...
    def of_pair(self, batch: Pair): ...
    def of_typed(self, batch: Typed): ...
    def of_encoding(self, batch: Encoding): ...
    def of_list(self, batch: list[Any]): ...
    def of_tuple(self, batch: tuple[Any, Any]): ...
    def of_names(self, image, mask): ...
    def of_keywords(self, *, image, mask): ...
    def of_any_name(self, **given): ...
    def of_any_number(self, *given): ...


@dataclass
class Module:
    forward: Any


KINDS = [
    ("of_dict", dict),
    ("of_dict_of_any", dict),
    ("of_text", dict),
    ("of_nothing", dict),
    ("of_fields", Fields),
    ("of_pair", Pair),
    ("of_typed", dict),
    ("of_encoding", Encoding),
    ("of_list", list),
    ("of_tuple", tuple),
]


@pytest.mark.parametrize(("method", "kind"), KINDS)
def test_one_nested_parameter_takes_the_inputs_by_their_names(method, kind) -> None:
    arrange = arrange_inputs(Module(getattr(ByKind(), method)), ["image", "mask"])
    positional, named = arrange([1, 2])
    assert not positional
    (given,) = named.values()
    assert type(given) is kind
    expected = {"image": 1, "mask": 2}
    made = {Fields: Fields(1, 2), Pair: Pair(1, 2), list: [1, 2], tuple: (1, 2)}
    assert given == made.get(kind, expected)


def test_a_path_is_a_place_in_a_parameter() -> None:
    def forward(x, batch, states: tuple[Any, ...], more: Fields | None = None): ...

    names = ["batch.image", "batch.deep.mask", "x", "states.0", "states.1", "more.image"]
    positional, named = arrange_inputs(Module(forward), names)([1, 2, 3, 4, 5, 6])
    assert not positional
    assert named == {
        "batch": {"image": 1, "deep": {"mask": 2}},
        "x": 3,
        "states": (4, 5),
        "more": Fields(6),
    }


@pytest.mark.parametrize("method", ["of_names", "of_keywords", "of_any_name"])
def test_names_of_parameters_stay_names(method) -> None:
    arrange = arrange_inputs(Module(getattr(ByKind(), method)), ["mask", "image"])
    assert arrange([1, 2]) == ((), {"mask": 1, "image": 2})


@pytest.mark.parametrize(
    ("method", "names"),
    [
        ("of_any_number", ["a", "b"]),
        ("of_names", ["a", "b"]),
        ("of_nothing", ["a"]),
        ("of_dict", ["batch", "batch.image"]),
    ],
)
def test_other_inputs_are_given_in_order(method, names) -> None:
    values = list(range(len(names)))
    arrange = arrange_inputs(Module(getattr(ByKind(), method)), names)
    assert arrange(values) == (tuple(values), {})


def make_outputs() -> st.SearchStrategy[Any]:
    """Nested outputs whose tensors are marked by None until they are numbered."""
    keys = st.sampled_from("abc")
    return st.recursive(
        st.sampled_from(["tensor", None, 3.5, "text"]),
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.lists(inner, max_size=3).map(tuple),
            st.dictionaries(keys, inner, max_size=3),
            st.builds(Fields, inner, inner),
        ),
        max_leaves=12,
    )


def count_leaves(value: Any, wanted: Any) -> int:
    if isinstance(value, Fields):
        return count_leaves([value.image, value.mask], wanted)
    if isinstance(value, dict):
        return count_leaves(list(value.values()), wanted)
    if isinstance(value, list | tuple):
        return sum(count_leaves(each, wanted) for each in value)
    return int(wanted(value))


def put_tensors(value: Any, tensor: Any) -> Any:
    if isinstance(value, Fields):
        return Fields(put_tensors(value.image, tensor), put_tensors(value.mask, tensor))
    if isinstance(value, dict):
        return {key: put_tensors(each, tensor) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(put_tensors(each, tensor) for each in value)
    return tensor if value == "tensor" else value


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(make_outputs())
def test_no_output_is_lost_without_a_word(output) -> None:
    import torch

    tensors = count_leaves(output, lambda leaf: leaf == "tensor")
    others = count_leaves(output, lambda leaf: leaf not in ("tensor", None))
    made = put_tensors(output, torch.zeros(1))
    if not tensors:
        with pytest.raises(TypeError, match="forward returns"):
            flatten_outputs(made)
        return
    found = flatten_outputs(made)
    assert len(found.tensors) == len(found.paths) == tensors
    assert len(found.left_out) == others
    assert found.names == () or len(set(found.names)) == tensors


LETTERS = st.text("abcxyz", min_size=1, max_size=3)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.lists(LETTERS, min_size=1, max_size=3), min_size=1, max_size=5))
def test_every_input_reaches_forward_once(paths) -> None:
    def forward(**given): ...

    parameters = sorted({path[0] for path in paths})
    names = list(dict.fromkeys(".".join(path) for path in paths))
    code = f"def forward({', '.join(parameters)}): ..."
    scope: dict[str, Any] = {}
    exec(code, scope)
    positional, named = arrange_inputs(Module(scope["forward"]), names)(list(range(len(names))))
    found = list(positional)

    def collect(value: Any) -> None:
        for part in value.values() if isinstance(value, dict) else ():
            collect(part)
        if not isinstance(value, dict):
            found.append(value)

    for value in named.values():
        collect(value)
    assert sorted(found) == list(range(len(names)))
