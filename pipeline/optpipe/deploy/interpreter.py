"""Another Python environment that runs optpipe's own worker on its own runtime: what an upgrade would bring."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

import optpipe
from optpipe.core.card import ModelCard
from optpipe.core.errors import BadInputError, MissingError, StageError, escape
from optpipe.deploy.frames import read_frame, write_frame
from optpipe.deploy.records import OutputChange
from optpipe.models.inputs.rows import join_batches, rows_from_outputs, split_batches
from optpipe.stats.agreement import compute_output_error

if TYPE_CHECKING:
    import numpy as np


NEEDED = ("numpy", "msgspec", "typing_extensions")
"""What the worker imports beside the runtime."""


@dataclass(frozen=True, slots=True)
class Interpreter:
    """A Python that can run the worker."""

    program: str
    environment: Mapping[str, str]
    versions: Mapping[str, str]
    """Of the packages that decide outputs and latency, those it has."""


_PROBE = """
import importlib.util, json, sys
from importlib import metadata
needed, asked = json.loads(sys.argv[1]), json.loads(sys.argv[2])
found = {}
for name in asked:
    try:
        found[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        pass
print(json.dumps({"missing": [each for each in needed if importlib.util.find_spec(each) is None], "versions":
  {"python": "%d.%d.%d" % sys.version_info[:3], **found}}))
"""


def open_interpreter(path: Path | None, packages: Sequence[str], scratch: Path) -> Interpreter:
    """The interpreter of an environment, or this one; `packages` are those whose versions matter.

    Raises BadInputError where `path` is not an environment, MissingError with the command where the worker lacks a package.
    """
    program = sys.executable if path is None else str(_find_program(path))
    source = scratch / "source"
    source.mkdir(exist_ok=True)
    if not (source / "optpipe").exists():  # alone: its site-packages would bring this environment's runtime along
        (source / "optpipe").symlink_to(Path(optpipe.__file__).parent)
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONHOME", "VIRTUAL_ENV")}
    inherited = [kept["PYTHONPATH"]] if path is None and "PYTHONPATH" in kept else []
    environment = {
        **kept,
        "PYTHONPATH": os.pathsep.join([str(source), *inherited]),
    }
    told = subprocess.run(
        [program, "-c", _PROBE, json.dumps(NEEDED), json.dumps(list(packages))],
        capture_output=True, text=True, env=environment, check=False,
    )  # fmt: skip
    if told.returncode != 0:
        raise BadInputError(f"--python {path}: the interpreter does not start: {escape(told.stderr.strip()[-200:])}")
    facts = json.loads(told.stdout)
    if facts["missing"]:
        names = " ".join(each.replace("_", "-") for each in NEEDED)
        raise MissingError(
            f"--python {path} lacks {', '.join(facts['missing'])}, which the worker needs: uv pip install -p {path} {names}"
        )
    return Interpreter(program, environment, facts["versions"])


def _find_program(path: Path) -> Path:
    for each in (path / "bin" / "python", path):
        if each.is_file() and os.access(each, os.X_OK):
            return each.absolute()
    raise BadInputError(f"--python {path}: neither an interpreter nor a Python environment")


def outputs_of_interpreter(
    interpreter: Interpreter,
    folder: Path,
    card: ModelCard,
    inputs: "Mapping[str, np.ndarray]",
    options: Mapping[str, bool | int | str],
) -> "dict[str, np.ndarray]":
    """The outputs by name, first axis the samples. Raises StageError with the interpreter's own reason."""
    command = [
        interpreter.program,
        "-m",
        "optpipe.deploy.session_process",
        "artifact",
        str(folder),
        json.dumps(dict(options)),
    ]
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=dict(interpreter.environment),
    )
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        _receive(process, process.stdout)
        runs = []
        for batch, count in split_batches(card, inputs):
            write_frame(process.stdin, {"more": False}, batch)
            runs.append(rows_from_outputs(card.outputs, _receive(process, process.stdout), count))
    finally:
        process.kill()
        process.communicate()
    return {each.name: join_batches(each.name, [run[each.name] for run in runs]) for each in card.outputs}


def _receive(process: "subprocess.Popen[bytes]", pipe: IO[bytes]) -> "dict[str, np.ndarray]":
    frame = read_frame(pipe)
    header, arrays = frame if frame is not None else ({"fatal": _read_last_words(process)}, {})
    if problem := header.get("fatal") or header.get("error"):
        raise StageError(f"the artifact does not run in this environment: {problem}")
    return arrays


def _read_last_words(process: "subprocess.Popen[bytes]") -> str:
    _, said = process.communicate()
    lines = said.decode(errors="replace").strip().splitlines()
    return lines[-1][:240] if lines else f"it ended with status {process.returncode}"


def list_output_changes(
    old: "Mapping[str, np.ndarray]", new: "Mapping[str, np.ndarray]", *, classifies: bool
) -> Iterator[OutputChange]:
    """Every output to the last bit; of a classifier's first one also how many predictions changed."""
    import numpy as np

    for at, (name, before) in enumerate(old.items()):
        after = new[name]
        if before.shape != after.shape or before.dtype != after.dtype:
            yield OutputChange(name, before.size, before.size, None, float("inf"), None)
            continue
        bits = [each.view(np.uint8).reshape(*each.shape, -1) for each in (before, after)]
        changed = (bits[0] != bits[1]).any(axis=-1)
        first = tuple(int(each[0]) for each in np.nonzero(changed)) if changed.any() else None
        predictions = None
        if classifies and at == 0:
            best = [each.reshape(len(each), -1).argmax(axis=1) for each in (before, after)]
            predictions = int((best[0] != best[1]).sum())
        error = compute_output_error(name, before, after)
        yield OutputChange(name, before.size, int(changed.sum()), first, error.relative, predictions)
