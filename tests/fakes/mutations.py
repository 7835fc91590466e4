"""Seeded damage to files that users give: bytes, and what a format means by them."""

import io
import json
import random
import re
import zipfile
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper
from tests.fakes.graphs import node_of, onnx_model, value_of

ODD_NUMBERS = (0, -1, 1, 2, 7, 99, 2**31 - 1, 2**31, 2**40, 2**62)
ODD_TEXTS = (
    "",
    "?",
    "\x00",
    "\x1b[31mred",
    "é\u202e",
    "a" * 5000,
    "..",
    "/etc/passwd",
    "None",
    "batch",
    " ",
)
ODD_TOML = (
    "-1",
    "0",
    "1e400",
    "nan",
    "inf",
    '""',
    '"\\u0000"',
    "[]",
    "{}",
    "true",
    "99999999999999999999",
    '"1 GiB"',
    '"\\u0665 ms"',
    '"-3 %"',
    "1979-05-27",
    "[[1]]",
    '"' + "x" * 3000 + '"',
)


def mutate_bytes(content: bytes, rng: random.Random) -> bytes:
    """Flips, cuts out, repeats, or inserts some bytes."""
    changed = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 8, 64))):
        at = rng.randrange(len(changed) + 1)
        match rng.randrange(5):
            case 0 if at < len(changed):
                changed[at] ^= 1 << rng.randrange(8)
            case 1 if at < len(changed):
                changed[at] = rng.choice((0, 0x7F, 0x80, 0xFF, rng.randrange(256)))
            case 2:
                del changed[at : at + rng.choice((1, 4, 64))]
            case 3:
                changed[at:at] = changed[at : at + rng.choice((1, 4, 64))]
            case _:
                changed[at:at] = rng.randbytes(rng.choice((1, 4, 16)))
    return bytes(changed[: rng.randrange(1, len(changed) + 1)] if rng.random() < 0.1 else changed)


def mutate_json(text: str, rng: random.Random) -> bytes:
    """Drops, repeats or replaces values; now and then bytes instead."""
    if rng.random() < 0.25:
        return mutate_bytes(text.encode(), rng)
    document = json.loads(text)
    for _ in range(rng.choice((1, 1, 2, 3))):
        if not (places := list(iterate_places(document))):
            break
        holder, key = rng.choice(places)
        match rng.randrange(6):
            case 0:
                del holder[key]
            case 1 if isinstance(holder, list):
                holder.append(holder[key])
            case _:
                odd = (
                    *ODD_NUMBERS,
                    *ODD_TEXTS,
                    None,
                    True,
                    [],
                    {},
                    1.5,
                    -1e308,
                    float("nan"),
                    float("inf"),
                    "0.png",
                )
                holder[key] = rng.choice(odd)
    return json.dumps(document).encode()


def iterate_places(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from iterate_places(value[key])


def mutate_npz(arrays: Mapping[str, np.ndarray], rng: random.Random) -> bytes:
    """Other names, types, shapes, and shapes that are declared alone; now and then bytes instead."""
    damaged, whole = rng.random() < 0.25, io.BytesIO()
    with zipfile.ZipFile(whole, "w") as file:
        for name, array in arrays.items():
            content, change = io.BytesIO(), 7 if damaged else rng.randrange(8)
            if change == 0:
                name = rng.choice(("y", "labels", *ODD_TEXTS))
            elif change == 1:
                array = array.astype(
                    rng.choice(
                        ("float64", "int64", "<U5", "complex64", "bool", "object", ">f4", "V3")
                    )
                )
            elif change == 2:
                array = np.zeros(
                    rng.choice(((), (0,), (8,), array.shape[1:], (*array.shape, 1))), array.dtype
                )
            np.save(content, array, allow_pickle=True)
            stated = content.getvalue()
            if change == 3:
                stated = stated.replace(b"(8,", b"(%d," % rng.choice(ODD_NUMBERS))
            file.writestr(f"{name[:200]}.npy".replace("\0", "?"), stated)
    return mutate_bytes(whole.getvalue(), rng) if damaged else whole.getvalue()


def mutate_toml(text: str, rng: random.Random) -> bytes:
    """Changes values, drops, repeats or swaps lines; now and then bytes."""
    lines = text.splitlines()
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        at = rng.randrange(len(lines))
        match rng.randrange(8):
            case 0:
                del lines[at]
            case 1:
                lines.insert(at, rng.choice(lines))
            case 2:
                other = rng.randrange(len(lines))
                lines[at], lines[other] = lines[other], lines[at]
            case 3:
                lines[at] = re.sub(
                    r"\d+", lambda _: str(rng.choice(ODD_NUMBERS)), lines[at], count=1
                )
            case 4:
                lines[at] = re.sub(r"^(\s*)(\w+)", rf"\1\2{rng.choice('_xé-')}", lines[at])
            case _:
                key, equals, _ = lines[at].partition("=")
                lines[at] = f"{key}= {rng.choice(ODD_TOML)}" if equals else lines[at]
        if not lines:
            return b""
    content = "\n".join(lines).encode()
    return mutate_bytes(content, rng) if content and rng.random() < 0.15 else content


def list_networks() -> list[onnx.ModelProto]:
    """A convolutional network, one with a state, one that branches, one that is quantized."""
    draw = np.random.default_rng(0)

    def normal(*shape):
        return draw.standard_normal(shape).astype(np.float32)

    network = onnx_model(
        [
            ("Conv", "x w b", "c", {"pads": [1, 1, 1, 1]}),
            ("Relu", "c", "r"),
            ("GlobalAveragePool", "r", "p"),
            ("Flatten", "p", "f"),
            ("Gemm", "f v", "y", {"transB": 1}),
        ],
        {"x": ["n", 3, 8, 8]},
        {"y": ["n", 4]},
        w=normal(16, 3, 3, 3),
        b=normal(16),
        v=normal(4, 16),
    )
    state = onnx_model(
        [
            ("Unsqueeze", "x zero", "s"),
            ("GRU", ["s", "w", "r", "", "", "h"], "all next", {"hidden_size": 4}),
            ("Squeeze", "next zero", "y"),
        ],
        {"x": ["n", 6], "h": [1, "n", 4]},
        {"y": ["n", 4], "next": [1, "n", 4]},
        w=normal(1, 12, 6),
        r=normal(1, 12, 4),
        zero=[0],
    )
    branches = {
        f"{side}_branch": helper.make_graph(
            [node_of(op, "x k", f"{side}_out")], side, [], [value_of(f"{side}_out", None)]
        )
        for side, op in (("then", "Mul"), ("else", "Add"))
    }
    branching = onnx_model(
        [
            ("Greater", "k zero", "yes"),
            ("If", "yes", "picked", branches),
            ("MatMul", "picked w", "y"),
        ],
        {"x": ["n", 6]},
        {"y": ["n", 4]},
        k=np.float32(0.5),
        zero=np.float32(0),
        w=normal(6, 4),
    )
    weights = draw.integers(-127, 127, (6, 4)).astype(np.int8)
    quantized = onnx_model(
        [
            ("QuantizeLinear", "x s z", "q"),
            ("DequantizeLinear", "q s z", "d"),
            ("DequantizeLinear", "w s z", "dw"),
            ("MatMul", "d dw", "y"),
        ],
        {"x": ["n", 6]},
        {"y": ["n", 4]},
        s=np.float32(0.05),
        z=np.int8(0),
        w=weights,
    )
    return [network, state, branching, quantized]


def mutate_onnx(model: onnx.ModelProto, rng: random.Random) -> bytes:
    """One to three changes of meaning; every fourth time bytes instead."""
    if rng.random() < 0.25:
        return mutate_bytes(model.SerializeToString(), rng)
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    for _ in range(rng.choice((1, 1, 2, 3))):
        _mutate_graph(changed, changed.graph, rng)
    content: bytes = changed.SerializeToString()
    return content


def _mutate_graph(model: onnx.ModelProto, graph: onnx.GraphProto, rng: random.Random) -> None:
    values = [*graph.input, *graph.output]
    match rng.randrange(14):
        case 0:
            model.opset_import[0].version = rng.choice((*ODD_NUMBERS, 3, 11, 13, 21, 26))
        case 1:
            model.opset_import[0].domain = rng.choice(
                ("com.microsoft", "ai.onnx.ml", *ODD_TEXTS[:5])
            )
        case 2:
            model.ir_version = rng.choice(ODD_NUMBERS)
        case 3 if graph.node:
            rng.choice(graph.node).op_type = rng.choice(
                ("Conv", "Loop", "NoSuchOp", "LSTM", "TopK", *ODD_TEXTS)
            )
        case 4 if graph.node:
            del graph.node[rng.randrange(len(graph.node))]
        case 5 if graph.node:
            node = rng.choice(graph.node)
            names = rng.choice((node.input, node.output))
            if names:
                names[rng.randrange(len(names))] = rng.choice(("x", "y", "nowhere", *ODD_TEXTS))
        case 6 if graph.node:
            node = rng.choice(graph.node)
            node.attribute.append(
                helper.make_attribute(
                    rng.choice(("axis", "pads", "group", "to")),
                    rng.choice(([1, -1], 2**40, 0.5, "x")),
                )
            )
        case 7 if graph.initializer:
            tensor = rng.choice(graph.initializer)
            if tensor.dims:
                tensor.dims[rng.randrange(len(tensor.dims))] = rng.choice(ODD_NUMBERS)
        case 8 if graph.initializer:
            rng.choice(graph.initializer).data_type = rng.choice(
                (-1, 0, 2, 7, 8, 10, 16, 99, 2**31 - 1)
            )
        case 9 if graph.initializer:
            tensor = rng.choice(graph.initializer)
            tensor.data_location = TensorProto.EXTERNAL
            entry = tensor.external_data.add()
            entry.key, entry.value = rng.choice(("location", "offset")), rng.choice(ODD_TEXTS)
        case 10 if values:
            shape = rng.choice(values).type.tensor_type.shape
            if shape.dim:
                dim = rng.choice(shape.dim)
                if rng.random() < 0.5:
                    dim.dim_value = rng.choice(ODD_NUMBERS)
                else:
                    dim.dim_param = rng.choice(ODD_TEXTS)
        case 11 if values:
            rng.choice(values).type.tensor_type.elem_type = rng.choice(
                (-1, 0, 1, 7, 8, 10, 99, 2**31 - 1)
            )
        case 12 if values:
            rng.choice(values).name = rng.choice(("x", "y", "c", *ODD_TEXTS))
        case _:
            if graph.initializer:
                del graph.initializer[rng.randrange(len(graph.initializer))]
