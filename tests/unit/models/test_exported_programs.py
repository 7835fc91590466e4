"""Programs of torch.export are a source: their ranges stay bit for bit, and nothing that a file could run is run."""

import io
import json
import zipfile
from importlib import import_module
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

import optpipe as op
from optpipe.core.entries import WeightsRequest
from optpipe.core.errors import BadInputError, OptpipeError
from optpipe.core.precision import Precision
from optpipe.models.sources.exported_program import REGISTERS_QUANTIZERS
from optpipe.models.sources.program_archive import read_plain_program
from optpipe.models.sources.resolve import source_from_text

SCALE, ZERO = 0.0371, 3
pytestmark = pytest.mark.filterwarnings("ignore")


class Network(torch.nn.Module):
    """A quantized linear layer, whose weights have a scale for each channel; `quantize` may replace the pair of its input."""

    def __init__(self, quantize=None) -> None:
        super().__init__()
        import_module(REGISTERS_QUANTIZERS)
        self.quantize = quantize or make_pair
        drawn = torch.Generator().manual_seed(0)
        weight = torch.randint(-127, 128, (8, 16), generator=drawn, dtype=torch.int8)
        self.register_buffer("weight", weight)
        self.register_buffer("scales", torch.rand(8, generator=drawn) * 0.01 + 0.001)
        self.register_buffer("zeros", torch.zeros(8, dtype=torch.int64))

    def forward(self, x):
        weight = torch.ops.quantized_decomposed.dequantize_per_channel(
            self.weight, self.scales, self.zeros, 0, -128, 127, torch.int8
        )
        return make_pair(torch.nn.functional.linear(self.quantize(x), weight))


def make_pair(x, scale=SCALE, zero=ZERO, low=-128, high=127, back=None):
    operators = torch.ops.quantized_decomposed
    integers = operators.quantize_per_tensor(x, scale, zero, low, high, torch.int8)
    return operators.dequantize_per_tensor(integers, back or scale, zero, low, high, torch.int8)


def save_program(path: Path, module=None) -> Path:
    dynamic = ({0: torch.export.Dim.DYNAMIC},)
    program = torch.export.export(
        (module or Network()).eval(), (torch.zeros(2, 16),), dynamic_shapes=dynamic
    )
    torch.export.save(program, path)
    return path


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    return save_program(tmp_path_factory.mktemp("program") / "qat.pt2")


def load(path: Path):
    return source_from_text(str(path)).load(WeightsRequest())


def change(source: Path, target: Path, edit) -> Path:
    """`source` with each file replaced by what `edit(name, content)` returns; left out if that is None."""
    with zipfile.ZipFile(source) as read, zipfile.ZipFile(target, "w") as written:
        for each in read.infolist():
            content = edit(each.filename.partition("/")[2], read.read(each))
            if content is not None:
                written.writestr(each.filename, content)
    return target


def edit_description(edit):
    def edit_file(name, content):
        if name != "models/model.json":
            return content
        described = json.loads(content)
        edit(described)
        return json.dumps(described)

    return edit_file


def test_a_program_has_its_inputs_and_its_precision(program) -> None:
    loaded = load(program)
    (taken,) = loaded.card.inputs
    assert (taken.name, taken.min, taken.max, taken.batch) == ("x", (1, 16), (64, 16), 0)
    assert loaded.quantization is Precision.INT8
    given = torch.randn(3, 16)
    (computed,) = loaded.module(given)
    assert torch.equal(computed, Network()(given))


@pytest.mark.slow
def test_the_ranges_of_a_build_are_the_programs(tmp_path, program) -> None:
    model = op.Model(str(program), workspace=tmp_path / "work")
    build = model.build("int8", backend="onnxruntime", device="cpu")["int8"]
    assert build.precision.share.counted["int8"] == 1
    (exported,) = (tmp_path / "work").rglob("model-*/model.onnx")
    graph = onnx.load(exported).graph
    held = {each.name: onnx.numpy_helper.to_array(each) for each in graph.initializer}
    quantizers = [node for node in graph.node if node.op_type == "QuantizeLinear"]
    assert len(quantizers) == 2
    for node in quantizers:
        assert held[node.input[1]].reshape(()) == np.float32(SCALE)
        assert held[node.input[2]].reshape(()) == ZERO
    assert any(np.array_equal(each, Network().scales.numpy()) for each in held.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    "pair", [{"scale": 0.0}, {"scale": float("nan")}, {"back": 0.05}], ids=["zero", "nan", "two"]
)
def test_ranges_that_no_value_fits_are_refused(tmp_path, pair) -> None:
    network = Network(lambda x: make_pair(x, **pair))
    model = op.Model(str(save_program(tmp_path / "q.pt2", network)), workspace=tmp_path / "work")
    with pytest.raises(BadInputError, match="scale"):
        model.build("int8", backend="onnxruntime", device="cpu")


def group_weights(x):
    grouped = torch.ops.quantized_decomposed.dequantize_per_channel_group(
        torch.ones(16, 16, dtype=torch.int8), torch.ones(16, 2), torch.zeros(16, 2), -8, 7, torch.int8, 8, torch.float32
    )  # fmt: skip
    return x @ grouped


def compute_ranges(x):
    operators = torch.ops.quantized_decomposed
    grid = operators.choose_qparams.tensor(x, -128, 127, 1e-5, torch.int8)
    integers = operators.quantize_per_tensor.tensor(x, *grid, -128, 127, torch.int8)
    return operators.dequantize_per_tensor.tensor(integers, *grid, -128, 127, torch.int8)


@pytest.mark.parametrize(
    "quantize", [group_weights, compute_ranges, lambda x: make_pair(x, low=-8, high=7)]
)
def test_quantization_that_pairs_cannot_state_is_refused_with_its_node(tmp_path, quantize) -> None:
    with pytest.raises(BadInputError, match="node '"):
        load(save_program(tmp_path / "q.pt2", Network(quantize)))


def test_weights_alone_are_no_int8(tmp_path) -> None:
    assert load(save_program(tmp_path / "w.pt2", Weights())).quantization is None


class Weights(Network):
    def forward(self, x):
        return x @ torch.ops.quantized_decomposed.dequantize_per_channel(
            self.weight, self.scales, self.zeros, 0, -128, 127, torch.int8
        ).transpose(0, 1)


class Touch:
    """An object whose unpickling makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


def pickle_samples(run: Path):
    buffer = io.BytesIO()
    torch.save(((Touch(run),), {}), buffer)
    return lambda name, content: buffer.getvalue() if "sample_inputs" in name else content


def touch_as_size(run: Path):
    def edit(described) -> None:
        for value in described["graph_module"]["graph"]["tensor_values"].values():
            for size in value["sizes"]:
                if "as_expr" in size:
                    size["as_expr"]["expr_str"] = f"__import__('pathlib').Path('{run}').touch()"

    return edit_description(edit)


def call_system(run: Path):
    del run

    def edit(described) -> None:
        described["graph_module"]["graph"]["nodes"][0]["target"] = "torch.os.system"

    return edit_description(edit)


@pytest.mark.parametrize("hostile", [pickle_samples, touch_as_size, call_system])
def test_nothing_in_a_file_runs(tmp_path, program, hostile) -> None:
    run = tmp_path / "ran"
    with pytest.raises(BadInputError, match=r"code|operator"):
        load(change(program, tmp_path / "hostile.pt2", hostile(run)))
    assert not run.exists()


def test_guards_of_a_file_are_not_run(tmp_path, program) -> None:
    run = tmp_path / "ran"
    guard = f"__import__('pathlib').Path('{run}').touch() is None"
    edited = edit_description(lambda described: described.update(guards_code=[guard]))
    load(change(program, tmp_path / "guarded.pt2", edited)).module(torch.zeros(2, 16))
    assert not run.exists()


def declare_huge(described) -> None:
    for value in described["graph_module"]["graph"]["tensor_values"].values():
        value["sizes"] = [{"as_int": 1 << 40}]


def make_huge(described) -> None:
    """States what is small, and computes what is not."""
    node = described["graph_module"]["graph"]["nodes"][0]
    node["target"] = "torch.ops.aten.zeros.default"
    node["inputs"] = [{"name": "size", "arg": {"as_ints": [1 << 20, 1 << 20]}, "kind": 1}]


OTHERS = {
    "other schema": edit_description(lambda each: each["schema_version"].update(major=7)),
    "huge tensor": edit_description(declare_huge),
    "huge argument": edit_description(make_huge),
    "deep": lambda name, content: "[" * 100_000 if name == "models/model.json" else content,
    "no program": lambda name, content: None if name.startswith("models/") else content,
    "no samples": lambda name, content: None if "sample_inputs" in name else content,
}


@pytest.mark.parametrize("case", OTHERS)
def test_another_content_is_refused(tmp_path, program, case) -> None:
    with pytest.raises(BadInputError, match="other\\.pt2"):
        load(change(program, tmp_path / "other.pt2", OTHERS[case]))


@pytest.mark.parametrize("powers", ["9**9**9**9", "Pow(9, Pow(9, 9))", "(s0)<<999999999", "s0**99"])
def test_sizes_that_never_end_are_refused(tmp_path, program, powers) -> None:
    edited = edit_description(lambda each: each.update(held={"expr_str": powers}))
    with pytest.raises(BadInputError, match="expr_str"):
        read_plain_program(change(program, tmp_path / "powers.pt2", edited))


def test_a_packed_archive_and_compiled_code_are_refused(tmp_path, program) -> None:
    packed, compiled = tmp_path / "packed.pt2", tmp_path / "compiled.pt2"
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("q/models/model.json", bytes(10**6))
    change(program, compiled, lambda _, content: content)
    with zipfile.ZipFile(compiled, "a") as archive:
        archive.writestr("qat/data/aotinductor/model/wrapper.so", b"")
    for path, said in ((packed, "expands"), (compiled, "AOTInductor")):
        with pytest.raises(BadInputError, match=said):
            load(path)


@pytest.mark.parametrize("kept", [0, 100, 3000])
def test_a_truncated_file_is_refused(tmp_path, program, kept) -> None:
    cut = tmp_path / "cut.pt2"
    cut.write_bytes(program.read_bytes()[:kept])
    with pytest.raises(OptpipeError):
        load(cut)
