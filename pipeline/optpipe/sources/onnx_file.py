"""An ONNX file from anyone: fixed or open shapes, several inputs, opset 9 and up, external data."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from optpipe.core.card import ModelCard, Task
from optpipe.core.hashing import hash_file
from optpipe.core.tensors import DTYPES, InputSpec, Shape
from optpipe.core.weights import WeightsRecord, WeightsRequest
from optpipe.errors import BadInputError, first_line
from optpipe.sources.base import DEFAULT_BATCH_PROFILE, LoadedModel

OLDEST_OPSET = 9
_RUNTIME_DOMAINS = ("com.microsoft", "ai.onnx.contrib")


@dataclass(frozen=True, slots=True)
class OnnxFileSource:
    """A file on disk, with the external data beside it."""

    path: Path
    card: ModelCard | None = None
    shapes: Mapping[str, tuple[Shape, Shape, Shape]] | None = None
    """From `--shape`: needed for open dimensions other than the first."""

    @property
    def name(self) -> str:
        """The file's path."""
        return str(self.path)

    @property
    def has_module(self) -> bool:
        """Whether it loads as a torch module."""
        return False

    @property
    def runs_code(self) -> bool:
        """Whether a user's code makes it."""
        return False

    def collect_identity(self) -> Mapping[str, Any]:
        """Hashes of the file and of its external data."""
        self._check_file()
        identity: dict[str, Any] = {"onnx": hash_file(self.path)}
        if external := find_external_files(self.path):
            identity["external"] = {path.name: hash_file(path) for path in external}
        return identity

    def _check_file(self) -> None:
        if not self.path.is_file():
            raise BadInputError(f"{self.path}: no such file")
        if self.path.stat().st_size == 0:
            raise BadInputError(f"{self.path} is empty")

    def load(self, weights: WeightsRequest) -> LoadedModel:
        """Parses and checks the file; raises `BadInputError` for anything that is no complete ONNX model."""
        if weights.kind != "default":
            raise BadInputError(
                f"{self.path}: an ONNX file contains its own weights; --weights {weights.kind} does not apply"
            )
        self._check_file()
        model = onnx_from_file(self.path)
        record = WeightsRecord("embedded", hash_file(self.path))
        if self.card is not None:
            return LoadedModel(self.card, record, onnx=self.path)
        inputs = _input_specs(model, self.shapes or {}, self.path)
        card = ModelCard(self.path.stem, self.name, Task.OTHER, inputs)
        return LoadedModel(replace(card, task=_guess_task(model, inputs)), record, onnx=self.path)


def onnx_from_file(path: Path) -> Any:
    """Loads and checks a model; raises `BadInputError` that says what is wrong with it."""
    import onnx
    from google.protobuf.message import DecodeError

    try:
        model = onnx.load(path)
    except (DecodeError, onnx.checker.ValidationError, OSError, ValueError, RuntimeError) as error:
        raise BadInputError(
            f"{path} is not a complete ONNX file: {first_line(error)}\n"
            "it may be truncated, in another format, or missing its external data"
        ) from error
    if not model.graph.node:
        raise BadInputError(f"{path} contains no ONNX graph: it may be truncated or in another format")
    opset = next((each.version for each in model.opset_import if each.domain in ("", "ai.onnx")), 0)
    if opset < OLDEST_OPSET:
        raise BadInputError(
            f"{path} is opset {opset}; opset {OLDEST_OPSET} or later is required (convert it with onnx.version_converter)"
        )
    if unknown := _find_unknown_operators(model):
        raise BadInputError(
            f"{path} has operators that neither ONNX nor ONNX Runtime defines: {', '.join(unknown[:5])}; use standard ones"
        )
    try:
        onnx.checker.check_model(str(path))
    except (onnx.checker.ValidationError, ValueError) as error:
        raise BadInputError(f"{path} is not valid ONNX: {first_line(error)}") from error
    return model


def _find_unknown_operators(model: Any) -> list[str]:
    """Operators outside the standard domains, those of ONNX Runtime, and the model's own functions."""
    import onnx

    versions = {each.domain: each.version for each in model.opset_import}
    own = {(function.domain, function.name) for function in model.functions}
    unknown: dict[str, None] = {}
    for node in model.graph.node:
        if node.domain in _RUNTIME_DOMAINS or (node.domain, node.op_type) in own:
            continue
        if not onnx.defs.has(node.op_type, versions.get(node.domain, 1), node.domain):
            unknown[f"{node.domain}::{node.op_type}" if node.domain else node.op_type] = None
    return list(unknown)


def find_external_files(path: Path) -> tuple[Path, ...]:
    """The files of external data that a model names; raises `BadInputError` where one lies outside its folder."""
    import onnx
    from google.protobuf.message import DecodeError

    try:
        model = onnx.load(path, load_external_data=False)
    except (DecodeError, OSError, ValueError):
        return ()  # load() says what is wrong with it
    folder = path.resolve().parent
    names = {
        entry.value for tensor in model.graph.initializer for entry in tensor.external_data if entry.key == "location"
    }
    found = tuple(sorted((folder / name).resolve() for name in names))
    for file in found:
        if not file.is_relative_to(folder):
            raise BadInputError(f"{path} refers to external data outside its folder: {file.name}")
        if not file.is_file():
            raise BadInputError(f"{path}: its external data {file.name} is missing")
    return found


def _input_specs(model: Any, shapes: Mapping[str, tuple[Shape, Shape, Shape]], path: Path) -> tuple[InputSpec, ...]:
    initialized = {tensor.name for tensor in model.graph.initializer}
    return tuple(_input_spec(value, shapes, path) for value in model.graph.input if value.name not in initialized)


def _input_spec(value: Any, shapes: Mapping[str, tuple[Shape, Shape, Shape]], path: Path) -> InputSpec:
    import onnx

    tensor = value.type.tensor_type
    name: str = onnx.TensorProto.DataType.Name(tensor.elem_type).lower()
    dtype = "float32" if name == "float" else name
    if dtype not in DTYPES:
        raise BadInputError(
            f"{path}: input '{value.name}' is {dtype or 'not a tensor'}; optpipe supports {', '.join(DTYPES)}"
        )
    if value.name in shapes:
        return InputSpec(value.name, dtype, *shapes[value.name])
    sizes = [each.dim_value if each.HasField("dim_value") and each.dim_value > 0 else None for each in tensor.shape.dim]
    if any(size is None for size in sizes[1:]):
        shown = "x".join("?" if size is None else str(size) for size in sizes)
        raise BadInputError(
            f"{path}: input '{value.name}' is {shown}; set its dynamic dimensions with --shape {value.name}=MIN:OPT:MAX"
        )
    known: Shape = tuple(size for size in sizes if size is not None)
    if sizes[:1] == [None]:
        return InputSpec(value.name, dtype, *((batch, *known) for batch in DEFAULT_BATCH_PROFILE))
    return InputSpec(value.name, dtype, known, known, known)


def _guess_task(model: Any, inputs: tuple[InputSpec, ...]) -> Task:
    """One image in and one row of scores out is a classifier; everything else is compared by tensors alone."""
    image = len(inputs) == 1 and len(inputs[0].opt) == 4 and inputs[0].opt[1] in (1, 3)
    outputs = model.graph.output
    scores = len(outputs) == 1 and len(outputs[0].type.tensor_type.shape.dim) == 2
    return Task.CLASSIFICATION if image and scores else Task.OTHER
