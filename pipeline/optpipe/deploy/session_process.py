"""`python -m optpipe.deploy.session_process KIND FOLDER OPTIONS [LARGEST IN OUT]`: a session behind Triton's Python backend.

Requests and answers are frames on standard input and output. Requests with `more` and the one after them are one batch; each
gets one answer. KIND is `artifact` or `preprocessing`; FOLDER holds the files with the store's manifest or
`preprocessing.json`. LARGEST is the largest batch, 0 without a batch axis; IN and OUT are descriptors of files in memory for
the arrays.

On a GPU an artifact answers from CUDA graphs, one for each power of two of samples, captured at its first use. A graph has one
batch size, and a server's batches have any: a batch runs in the next larger graph, whose other rows are ignored.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any, Self

import numpy as np

from optpipe.backends.base import Session
from optpipe.backends.registry import load_verified, require_own_files
from optpipe.core import torch
from optpipe.core.entries import ArtifactInfo
from optpipe.core.errors import BadInputError, OptpipeError, StageError, escape, first_line
from optpipe.core.process import end_with_parent, start_python
from optpipe.core.records import read_record
from optpipe.deploy.frames import Arrays, SharedMemory, read_frame, write_frame
from optpipe.deploy.triton_config import list_positions
from optpipe.workspace.entry import entry_from_folder

Answer = Callable[[Sequence[Arrays]], list[dict[str, np.ndarray]]]
"""Maps the requests of a batch to their outputs, in order."""


class FrameProcess:
    """This module in a process that answers frames; it is killed at the end of the block."""

    def __init__(
        self,
        *words: str,
        program: str = "",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._log = TemporaryFile()  # noqa: SIM115 - closed with the process
        self._process = start_python(
            "optpipe.deploy.session_process",
            *words,
            program=program,
            environment=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            start_new_session=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.communicate()
        self._log.close()

    def send(self, header: Mapping[str, Any], arrays: Arrays) -> None:
        """Writes a frame; if the process has ended, `receive` raises its reason."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            write_frame(self._process.stdin, header, arrays)

    def receive(self) -> tuple[Mapping[str, Any], dict[str, np.ndarray]]:
        """The next frame. Raises StageError if it is an error, or the process has ended."""
        assert self._process.stdout is not None
        header, arrays = read_frame(self._process.stdout) or (
            {"error": self._read_last_words()},
            {},
        )
        if problem := header.get("fatal") or header.get("error"):
            raise StageError(problem)
        return header, arrays

    def _read_last_words(self) -> str:
        status = self._process.wait()
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return escape(lines[-1])[:240] if lines else f"the process ended with status {status}"


def main() -> None:
    end_with_parent()
    kind, folder, options = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    largest, *descriptors = map(int, sys.argv[4:] or ["0"])
    arriving, leaving = map(SharedMemory, descriptors) if descriptors else (None, None)
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # keep output of libraries out of the answers
    try:
        answer = (
            open_artifact(folder, options, largest)
            if kind == "artifact"
            else open_preprocessing(folder)
        )
    except OptpipeError as error:
        write_frame(out, {"fatal": str(error)}, {})
        return
    write_frame(out, {"ready": True}, {})
    for batch in _read_batches(sys.stdin.buffer, arriving):
        if leaving is not None:
            leaving.rewind()
        try:
            answers = answer(batch)
        except (OptpipeError, ValueError, RuntimeError) as error:
            for _ in batch:
                write_frame(out, {"error": first_line(error)}, {})
        else:
            for outputs in answers:
                write_frame(out, {}, outputs, leaving)


def open_artifact(folder: Path, options: Mapping[str, Any], largest: int = 0) -> Answer:
    """Checks every byte of the artifact; on a GPU it gets a CUDA graph for each batch size up to `largest`."""
    entry = entry_from_folder(folder, ArtifactInfo)

    def verify() -> None:
        if (problem := entry.find_damage()) is not None:
            raise StageError(f"{folder.parent.name}: {problem}")
        require_own_files(entry)

    session = load_verified(entry, options, verify)
    captured = CapturedSession(session, largest) if largest and can_capture(session) else None

    def answer(batch: Sequence[Arrays]) -> list[dict[str, np.ndarray]]:
        given = [
            _take_inputs(arrays, [(spec.name, spec.dtype) for spec in session.inputs])
            for arrays in batch
        ]
        if captured is not None:
            outputs = captured.run(given)
        elif len(given) == 1:
            return [session.run(given[0])]
        else:
            outputs = session.run(
                {name: np.concatenate([inputs[name] for inputs in given]) for name in given[0]}
            )
        ends = np.cumsum([len(next(iter(inputs.values()))) for inputs in given])[:-1]
        parts = {name: np.split(array, ends) for name, array in outputs.items()}
        return [{name: parts[name][at] for name in outputs} for at in range(len(given))]

    return answer


def _take_inputs(arrays: Arrays, wanted: Sequence[tuple[str, str]]) -> dict[str, np.ndarray]:
    """Renames arrays that the server addresses by position. Raises BadInputError for missing inputs and other types."""
    named = dict(
        zip(list_positions("INPUT", len(wanted)), (name for name, _ in wanted), strict=True)
    )
    inputs = {named.get(name, name): array for name, array in arrays.items()}
    for name, dtype in wanted:
        if name not in inputs:
            raise BadInputError(f"input '{name}' is missing")
        if str(inputs[name].dtype) != dtype:
            raise BadInputError(f"input '{name}' is {inputs[name].dtype}, the model takes {dtype}")
    return {name: inputs[name] for name, _ in wanted}


def open_preprocessing(folder: Path) -> Answer:
    from optpipe.preprocess.dali_pipeline import INPUT, PIPELINE, PreprocessingInfo, load_pipeline

    plan = read_record(folder / "preprocessing.json", PreprocessingInfo).plan
    pipeline = load_pipeline(folder / Path(PIPELINE).name, plan)

    def answer(batch: Sequence[Arrays]) -> list[dict[str, np.ndarray]]:
        images = [row for request in batch for row in request[INPUT]]
        rows: list[np.ndarray] = []
        for start in range(0, len(images), plan.batch_size):
            pipeline.feed_input(
                INPUT,
                [np.ascontiguousarray(image) for image in images[start : start + plan.batch_size]],
            )
            rows += [np.array(tensor) for tensor in pipeline.run()[0].as_cpu()]
        left = iter(rows)
        return [
            {"DALI_OUTPUT_0": np.stack(list(islice(left, len(request[INPUT]))))}
            for request in batch
        ]

    return answer


def _read_batches(source: IO[bytes], memory: SharedMemory | None) -> Iterator[list[Arrays]]:
    batch: list[Arrays] = []
    while (frame := read_frame(source, memory)) is not None:
        header, arrays = frame
        batch.append(arrays)
        if not header["more"]:
            yield batch
            batch = []


def list_captured_sizes(largest: int) -> list[int]:
    """The powers of two below `largest`, which is 1 or more, and `largest`."""
    return [*(1 << power for power in range((largest - 1).bit_length())), largest]


def can_capture(session: Session) -> bool:
    """True for a session on a GPU whose requests differ only in the number of samples."""
    rest = [size for spec in session.inputs for size in spec.shape[1:]]
    return session.device == "cuda" and all(isinstance(size, int) and size > 0 for size in rest)


class CapturedSession:
    """Runs batches of up to `largest` samples in CUDA graphs."""

    def __init__(self, session: Session, largest: int) -> None:
        self._session, self._sizes = session, list_captured_sizes(largest)
        self._buffers: dict[int, _Buffers] = {}

    def run(self, requests: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
        """Outputs for all rows of `requests`, in order. Raises BadInputError for other shapes and larger batches."""
        for spec in self._session.inputs:
            for shape in (request[spec.name].shape for request in requests):
                if shape[1:] != spec.shape[1:]:
                    raise BadInputError(
                        f"input '{spec.name}' is {list(shape)}, the model takes {list(spec.shape)}"
                    )
        count = sum(len(next(iter(request.values()))) for request in requests)
        size = next((size for size in self._sizes if size >= count), None)
        if size is None:
            raise BadInputError(f"{count} samples exceed the largest batch, {self._sizes[-1]}")
        if size not in self._buffers:
            self._buffers[size] = _Buffers(self._session, size)
        return self._buffers[size].run(requests, count)


class _Buffers:
    """A binding for one batch size, with pinned host memory on both sides."""

    def __init__(self, session: Session, size: int) -> None:
        rows = {
            spec.name: np.zeros((size, *map(int, spec.shape[1:])), spec.dtype)
            for spec in session.inputs
        }
        self._binding = session.bind(rows)
        self._given = {name: torch.from_numpy(array).pin_memory() for name, array in rows.items()}
        self._found = {
            name: torch.empty_like(tensor, device="cpu", pin_memory=True)
            for name, tensor in self._binding.outputs.items()
        }

    def run(
        self, requests: Sequence[Mapping[str, np.ndarray]], count: int
    ) -> dict[str, np.ndarray]:
        for name, tensor in self._given.items():
            np.concatenate([request[name] for request in requests], out=tensor.numpy()[:count])
            self._binding.inputs[name].copy_(tensor, non_blocking=True)
        self._binding.launch()
        for name, tensor in self._found.items():
            tensor.copy_(self._binding.outputs[name], non_blocking=True)
        torch.cuda.synchronize()
        return {name: tensor.numpy()[:count].copy() for name, tensor in self._found.items()}


if __name__ == "__main__":
    main()
