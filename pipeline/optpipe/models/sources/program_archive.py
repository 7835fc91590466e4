"""What a file of `torch.export.save` (`.pt2`) must be before torch reads it: bounded, of this schema, and without code.

torch evaluates the symbolic sizes of such a file as Python, unpickles what its weights-only reader refuses, and loads compiled code
that lies beside a program. So the file is read here first, as the zip archive of JSON and tensors that it is, and what could run, or
take more memory than there is, is refused.
"""

import ast
import io
import json
import math
import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from optpipe.core import torch
from optpipe.core.errors import BadInputError, escape, read_as_user_file
from optpipe.core.files import get_memory_bytes, open_user_file

MOST_JSON_BYTES = 2**28
"""Of one description; that of a network with 10,000 operators takes 20 MB."""
_SAVE_AGAIN = "save it again with torch.export.save(torch.export.export(module, example), FILE)"
_PROGRAM = "models/model.json"
_OPERATOR = re.compile(
    r"torch\.ops\.(?P<namespace>\w+)\.(?P<name>\w+)(\.\w+)?|torch\.sym_\w+"
    r"|math\.(ceil|floor|trunc|sqrt|pow)"
    r"|_operator\.(getitem|add|sub|mul|floordiv|truediv|mod|pow|neg|pos|eq|ne|lt|le|gt|ge|and_|or_|not_)"
)
_NAMESPACES = ("aten", "prims", "quantized_decomposed", "torchvision", "higher_order", "torchao")
"""Of operators that may be in a program; those that have no ONNX are named later."""
_WRITES_FILES = ("from_file", "save")
_HIGHER_ORDER = ("cond", "while_loop", "scan", "wrap_with_set_grad_enabled", "wrap_with_autocast")
_SYMBOL = re.compile(r"(s|u|z|zf|zuf)\d+")
_FUNCTIONS = (
    "FloorDiv", "ModularIndexing", "Where", "PythonMod", "Mod", "CleanDiv", "CeilToInt", "FloorToInt", "CeilDiv", "FloatTrueDiv",
    "IntTrueDiv", "TruncToFloat", "TruncToInt", "RoundToInt", "ToFloat", "Identity", "Max", "Min", "Eq", "Ne", "Abs", "And", "Or",
    "Not", "floor", "ceiling", "Add", "Mul", "Pow", "Integer", "Float", "Rational", "StrictLessThan", "LessThan",
    "StrictGreaterThan", "GreaterThan", "Equality",
)  # fmt: skip
"""What sympy prints for sizes. Shifts are not among them: their result may have any length."""
_CONSTANTS = ("oo", "int_oo", "true", "false")
_LONGEST_EXPRESSION = 1000
_MOST_POWERS = 3
_PLAIN = re.compile(r"(?!__|.*\.__)[\w.+\-: ]*", re.ASCII)
"""Names, also of attributes of attributes, but not of those that every object has."""
_CONTAINERS = ("builtins.tuple", "builtins.list", "builtins.dict", "collections.OrderedDict")
_SIZES = ("sizes", "as_ints", "as_sym_ints")
"""Fields with the sizes of a tensor: those that it states for its values, and those that operators such as zeros and expand take."""
_FREE = ("metadata", "as_string", "as_strings", "guards_code")
"""Fields whose strings torch neither evaluates nor makes a part of code; guards are not used."""


def read_plain_program(path: Path) -> bytes:
    """The content of a `.pt2` file that holds one program, and nothing that could run or exceed this machine's memory.

    Raises BadInputError with what it holds instead.
    """
    with open_user_file(path, get_memory_bytes() // 2) as file:
        content = file.read()
    if not content:
        raise BadInputError("it is empty", place=path)
    with read_as_user_file(path, "a program of torch.export", "it may be truncated"):
        _require_plain_content(content, path)
    return content


def _require_plain_content(content: bytes, path: Path) -> None:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        files = _require_stored(archive, len(content), path)
        _require_kind(files, path)
        described = _read_json(archive, files[_PROGRAM], path)
        _require_version(described, path)
        _require_no_code(described, path)
        _require_bounded_values(described, path)
        for name, info in files.items():
            if name.endswith("_config.json"):
                _require_plain_payload(archive, files, info, path)
            elif name.startswith("data/sample_inputs/") or name.endswith(".pt"):
                _require_plain_pickle(archive.read(info), name, path)


def _require_stored(
    archive: zipfile.ZipFile, size_bytes: int, path: Path
) -> dict[str, zipfile.ZipInfo]:
    """The files by their names below the archive's folder. Raises BadInputError for those that are larger than they look."""
    entries = archive.infolist()
    names = [entry.filename for entry in entries]
    repeated = len(set(names)) < len(names)
    packed = any(entry.compress_type != zipfile.ZIP_STORED for entry in entries)
    if repeated or packed or sum(entry.file_size for entry in entries) > size_bytes:
        what = "has two files of one name" if repeated else "expands to more than its size"
        raise BadInputError(f"its archive {what}, as torch writes none", place=path)
    return {entry.filename.partition("/")[2]: entry for entry in entries}


def _require_kind(files: Mapping[str, Any], path: Path) -> None:
    """Raises BadInputError if the archive is no program, or several, or has compiled code beside it."""
    if any(name.startswith("data/aotinductor/") for name in files):
        raise BadInputError(
            "it is AOTInductor's package, which holds compiled code and no graph",
            place=path,
            remedy="give the program that it was compiled from: torch.export.save(program, FILE)",
        )
    programs = [name for name in files if name.startswith("models/")]
    if programs == [_PROGRAM]:
        return
    if programs:
        shown = ", ".join(escape(program.removeprefix("models/"))[:80] for program in programs[:3])
        raise BadInputError(
            f"it holds {len(programs)} programs ({shown}), and none or more than one is called model",
            place=path,
            remedy=_SAVE_AGAIN,
        )
    raise BadInputError(
        "it holds no program of torch.export as torch 2.8 and later write it",
        place=path,
        remedy="load it with the torch that wrote it, and save it with this one; weights alone need FILE.py:FACTORY",
    )


def _read_json(archive: zipfile.ZipFile, info: zipfile.ZipInfo, path: Path) -> Any:
    if info.file_size > MOST_JSON_BYTES:
        problem = f"{escape(info.filename)[:80]} has {info.file_size} bytes; {MOST_JSON_BYTES} are the most"
        raise BadInputError(problem, place=path)
    return json.loads(archive.read(info))


def _require_version(described: Mapping[str, Any], path: Path) -> None:
    from torch._export.serde.schema import SCHEMA_VERSION

    major = described["schema_version"]["major"]
    if major != SCHEMA_VERSION[0]:
        by = escape(str(described.get("torch_version", "another torch")))[:40]
        problem = f"torch {by} wrote it, in schema {escape(str(major))[:20]}, and torch {torch.__version__} reads {SCHEMA_VERSION[0]}"
        raise BadInputError(problem, place=path, remedy=f"with this torch, {_SAVE_AGAIN}")


def _walk(value: Any, field: str = "") -> Iterator[tuple[str, Any]]:
    """Each string, number, and key with the field that it is in; what is in a free field is left out."""
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield "", key
            if key not in _FREE:
                yield from _walk(part, key)
    elif isinstance(value, list):
        for part in value:
            yield from _walk(part, field)
    else:
        yield field, value


def _require_no_code(described: Mapping[str, Any], path: Path) -> None:
    """Raises BadInputError for a string that torch would evaluate, import, or write into code, and that is more than it should be."""
    for field, value in _walk(described):
        if not isinstance(value, str):
            continue
        if field == "target":
            _require_operator(value, path)
            continue
        if field == "expr_str":
            fits = _is_size(value)
        elif field in ("in_spec", "out_spec"):
            fits = _is_plain_nesting(json.loads(value))
        else:
            fits = _PLAIN.fullmatch(value) is not None
        if not fits and field in ("in_spec", "out_spec"):
            raise BadInputError(
                "its inputs or outputs are of a class, which loading would import",
                place=path,
                remedy="export a module whose forward takes and returns tensors in tuples, lists, or dictionaries",
            )
        if not fits:
            what = f"{escape(field or 'a name')[:40]} '{escape(value)[:80]}'"
            raise BadInputError(
                f"{what} is not what torch.export writes, and could run as code", place=path
            )


def _require_operator(target: str, path: Path) -> None:
    known = _OPERATOR.fullmatch(target)
    namespace, name = (known["namespace"], known["name"]) if known else (None, None)
    custom = namespace is not None and namespace not in _NAMESPACES
    if known is None or custom or name in _WRITES_FILES:
        raise BadInputError(
            f"it calls {escape(target)[:80]}, which is no operator of a network that ONNX has",
            place=path,
            remedy="export a module of torch's own operators",
        )
    if namespace == "higher_order" and name not in _HIGHER_ORDER:
        raise BadInputError(f"it calls {escape(target)[:80]}, which runs other code", place=path)


def _is_size(text: str) -> bool:
    """Whether a string is arithmetic of sizes, and short: `2*s0 + 1`, `Add(Symbol('s77', integer=True), Integer(1))`."""
    if len(text) > _LONGEST_EXPRESSION:
        return False
    try:
        parsed = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    powers = sum(map(_is_power, ast.walk(parsed)))
    return powers <= _MOST_POWERS and _is_arithmetic(parsed.body)


def _is_power(node: ast.AST) -> bool:
    named = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Pow"
    return named or (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow))


def _is_arithmetic(node: ast.AST) -> bool:
    """Whether an expression is made of numbers, symbols, operators, and sympy's functions; a power is a small one."""
    if isinstance(node, ast.Constant):
        return isinstance(node.value, int | float)
    if isinstance(node, ast.Name):
        return _SYMBOL.fullmatch(node.id) is not None or node.id in _CONSTANTS
    if isinstance(node, ast.BinOp):
        parts = [node.left, node.right]
    elif isinstance(node, ast.UnaryOp):
        parts = [node.operand]
    elif isinstance(node, ast.Compare):
        parts = [node.left, *node.comparators]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        if node.func.id == "Symbol":
            return _is_symbol(node)
        if node.func.id not in _FUNCTIONS or node.keywords:
            return False
        parts = node.args
    else:
        return False
    if _is_power(node) and not (len(parts) == 2 and _is_small(parts[1])):
        return False
    return not _shifts(node) and all(map(_is_arithmetic, parts))


def _shifts(node: ast.AST) -> bool:
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.LShift)


def _is_small(node: ast.AST) -> bool:
    """Whether an exponent is a literal of one digit: the number of a tower of powers would never be computed."""
    if isinstance(node, ast.Call) and len(node.args) == 1 and not node.keywords:
        return _is_small(node.args[0])
    if isinstance(node, ast.UnaryOp):
        return _is_small(node.operand)
    return isinstance(node, ast.Constant) and isinstance(node.value, int) and node.value <= 9


def _is_symbol(node: ast.Call) -> bool:
    named = [argument.value for argument in node.args if isinstance(argument, ast.Constant)]
    flags = [keyword.value for keyword in node.keywords]
    return (
        len(named) == len(node.args) == 1
        and isinstance(named[0], str)
        and _SYMBOL.fullmatch(named[0]) is not None
        and all(isinstance(flag, ast.Constant) for flag in flags)
    )


def _is_plain_nesting(spec: Any) -> bool:
    if isinstance(spec, Mapping):
        held = spec.get("type")
        context = spec.get("context") or ""
        return (
            (held is None or held in _CONTAINERS)
            and "__" not in context
            and all(map(_is_plain_nesting, spec.get("children_spec", ())))
        )
    return not isinstance(spec, list) or all(map(_is_plain_nesting, spec))


def _require_bounded_values(described: Any, path: Path) -> None:
    """Raises BadInputError for a tensor that this machine cannot hold; an open size counts as one."""
    if isinstance(described, list):
        for part in described:
            _require_bounded_values(part, path)
        return
    if not isinstance(described, Mapping):
        return
    for field in _SIZES:
        if isinstance(sizes := described.get(field), list):
            _require_bounded_sizes(sizes, path)
    for key, part in described.items():
        if key not in _FREE:
            _require_bounded_values(part, path)


def _require_bounded_sizes(sizes: Sequence[Any], path: Path) -> None:
    known = [size.get("as_int", 1) if isinstance(size, Mapping) else size for size in sizes]
    if math.prod(max(int(size), 1) for size in known) > get_memory_bytes():
        shown = "x".join(map(str, known))
        raise BadInputError(f"a tensor of {shown} exceeds this machine's memory", place=path)


def _require_plain_payload(
    archive: zipfile.ZipFile,
    files: Mapping[str, zipfile.ZipInfo],
    info: zipfile.ZipInfo,
    path: Path,
) -> None:
    """Checks the tensors that a description of weights or constants names; refuses objects that are none."""
    described = _read_json(archive, info, path)
    _require_bounded_values(described, path)
    folder = info.filename.partition("/")[2].rpartition("/")[0]
    for name, payload in described["config"].items():
        held = str(payload["path_name"])
        shown = escape(name)[:80]
        if _PLAIN.fullmatch(name) is None or f"{folder}/{held}" not in files:
            raise BadInputError(f"its tensor '{shown}' has no data", place=path)
        if held.startswith(("custom_obj", "opaque_obj")):
            raise BadInputError(
                f"its constant '{shown}' is an object that only code can read",
                place=path,
                remedy="export a module whose constants are tensors",
            )
        if payload["use_pickle"]:
            _require_plain_pickle(archive.read(files[f"{folder}/{held}"]), name, path)


def _require_plain_pickle(content: bytes, name: str, path: Path) -> None:
    """Raises BadInputError unless torch's weights-only reader reads it, which runs nothing; torch itself would go on without."""
    if not content:
        return
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            _require_stored(archive, len(content), path)
        torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except BadInputError:
        raise
    except Exception as error:
        problem = f"{escape(name)[:80]} is a pickle that would run code, or none"
        raise BadInputError(problem, place=path, remedy=_SAVE_AGAIN) from error
