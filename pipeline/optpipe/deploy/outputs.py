"""An artifact's outputs on all reference inputs, computed by some interpreter, and how two sets of them differ."""

import json
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING

from optpipe.core.card import ModelCard
from optpipe.core.errors import StageError
from optpipe.deploy.frames import read_frame, write_frame
from optpipe.deploy.interpreter import Interpreter
from optpipe.deploy.recheck_record import OutputChange
from optpipe.models.inputs.rows import join_batches, rows_from_outputs, split_batches
from optpipe.stats.agreement import compute_output_error

if TYPE_CHECKING:
    import numpy as np


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
