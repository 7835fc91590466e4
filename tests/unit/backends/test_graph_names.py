"""Names that are given never collide, and plain names find their way back."""

import onnx
from hypothesis import given
from hypothesis import strategies as st
from onnx import helper
from tests.fakes.graphs import onnx_model

from optpipe.backends.graph_names import NameGiver, PlainNames, collect_names
from optpipe.backends.onnx_graph import name_nodes
from optpipe.backends.onnx_mends import rename_inner_twins

ENDS = (
    "",
    "_scale",
    "_zero_point",
    "_q",
    "_dq",
    "_bias",
    "_2",
    "_half",
    "_cast_to_fp16",
    "/own",
    "\x1b[2J",
    "'\"",
    "/../..",
    "$",
    ".*",
    " ",
    "\n",
    "ü",
)
odd_names = st.builds(
    lambda stem, ends: stem + "".join(ends),
    st.sampled_from(["x", "v1", "n2", "d3", "w", "/", "..", "unk", "axes"]),
    st.lists(st.sampled_from(ENDS), max_size=4),
)


def branching(names):
    """A graph whose value, node, size, branch and constant names are seven of `names`."""
    x, weight, inner, size, node, outer, result = names
    branches = [
        helper.make_graph(
            [helper.make_node(operator, [outer], [f"{inner}{operator}"], name=f"{node}{operator}")],
            f"{operator}{size}",
            [],
            [helper.make_tensor_value_info(f"{inner}{operator}", 1, [size, 4])],
        )
        for operator in ("Neg", "Abs")
    ]
    model = onnx_model(
        [
            helper.make_node("MatMul", [x, weight], [outer], name=node),
            helper.make_node(
                "If",
                ["flag"],
                [result],
                name="if",
                then_branch=branches[0],
                else_branch=branches[1],
            ),
        ],
        {x: [size, 4], "flag": ("BOOL", [])},
        {result: [size, 4]},
    )
    model.graph.initializer.append(helper.make_tensor(weight, 1, [4, 4], range(16)))
    return model


@given(
    st.lists(odd_names, min_size=1, max_size=20),
    st.lists(odd_names, min_size=7, max_size=7, unique=True),
)
def test_a_given_name_is_in_no_graph_and_is_given_once(wishes, names) -> None:
    model = branching(names)
    giver = NameGiver(model)
    given_names = [giver.give(wish) for wish in wishes]
    assert len({*given_names}) == len(wishes)
    assert collect_names(model).isdisjoint(given_names)


def test_names_of_functions_branches_and_sizes_are_known() -> None:
    model = branching(list("abcdefg"))
    node = helper.make_node("Relu", ["inside"], ["outside"], name="step")
    model.functions.append(
        helper.make_function(
            "own", "block", ["inside"], ["outside"], [node], [helper.make_opsetid("", 17)]
        )
    )
    assert {
        "a",
        "b",
        "cNeg",
        "cAbs",
        "d",
        "e",
        "eNeg",
        "f",
        "g",
        "Negd",
        "inside",
        "outside",
        "step",
        "block",
    } <= collect_names(model)


@given(st.lists(odd_names, min_size=7, max_size=7, unique=True))
def test_plain_names_hide_every_name_and_restore_it(names) -> None:
    model = branching(names)
    plain = PlainNames(model)
    hidden = collect_names(plain.model) - {"", "g", *(each.name for each in model.graph.node)}
    kinds = {each[0] for each in hidden if each[1:].isdigit()}
    assert kinds == {"v", "n", "d"}
    assert plain.restore(plain.model) == model


@given(st.lists(odd_names, min_size=7, max_size=7, unique=True))
def test_what_a_converter_added_never_collides(names) -> None:
    model = branching([*names[:6], f"{names[0]}_cast"])
    plain = PlainNames(model)
    source = plain.model.graph.node[0].input[0]
    plain.model.graph.node.insert(
        0, helper.make_node("Cast", [source], [f"{source}_cast"], name=f"{source}_cast", to=1)
    )
    restored = plain.restore(plain.model)
    made = [name for node in restored.graph.node for name in node.output]
    assert len(made) == len({*made})
    assert made[0] not in collect_names(model)
    assert restored.graph.node[0].input[0] == names[0]


def test_nodes_get_names_that_no_later_node_has() -> None:
    nodes = [
        helper.make_node("Relu", ["x"], ["a"]),
        helper.make_node("Relu", ["a"], ["b"], name="Relu_0"),
        helper.make_node("Relu", ["b"], ["y"], name="Relu_0"),
    ]
    named = [node.name for node in name_nodes(onnx_model(nodes, {"x": [2]}, {"y": [2]})).graph.node]
    assert len({*named}) == 3
    assert named[1] == "Relu_0"


def test_twins_in_branches_get_names_of_their_own() -> None:
    """A version converter numbers what it adds from one in each graph."""
    model = branching(list("abcdefg"))
    for attribute in model.graph.node[1].attribute:
        attribute.g.node.insert(0, helper.make_node("Identity", ["f"], ["f_inside"]))
        attribute.g.node[1].input[0] = "f_inside"
    rename_inner_twins(model)
    made = [
        name
        for graph in (model.graph, *(each.g for each in model.graph.node[1].attribute))
        for node in graph.node
        for name in node.output
    ]
    assert len(made) == len({*made})
    onnx.checker.check_model(model)
