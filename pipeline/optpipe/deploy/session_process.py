"""`python -m optpipe.deploy.session_process KIND FOLDER OPTIONS [LARGEST IN OUT]`: a session behind Triton's Python backend.

Speaks in frames on its standard input and output. Requests with `more` and the one that follows are one batch; each gets an
answer of its own.
KIND is `artifact` or `preprocessing`; FOLDER holds the files with the store's manifest or `preprocessing.json`. LARGEST is the most
samples of a batch, 0 where there is no batch axis; IN and OUT are descriptors of files in memory for the arrays.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from optpipe.core.errors import OptpipeError, first_line
from optpipe.core.process_group import end_with_parent
from optpipe.deploy.captured_session import CapturedSession, can_capture
from optpipe.deploy.frames import Arrays, SharedMemory, read_frame, write_frame

if TYPE_CHECKING:
    import numpy as np

Answer = Callable[[Sequence[Arrays]], list[dict[str, "np.ndarray"]]]
"""From the requests of a batch to their outputs, in order."""


def main() -> None:
    """Loads the session and answers until standard input ends."""
    end_with_parent()
    kind, folder, options = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    largest, *descriptors = map(int, sys.argv[4:] or ["0"])
    arriving, leaving = map(SharedMemory, descriptors) if descriptors else (None, None)
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print must not come between the answers
    try:
        answer = open_artifact(folder, options, largest) if kind == "artifact" else open_preprocessing(folder)
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
            for each in answers:
                write_frame(out, {}, each, leaving)


def open_artifact(folder: Path, options: Mapping[str, Any], largest: int = 0) -> Answer:
    """The artifact in `folder`, after every byte of it was checked against its manifest; on a GPU with a CUDA graph for each batch
    size up to `largest`.
    """
    import numpy as np

    from optpipe.backends.registry import BACKENDS
    from optpipe.core.entries import ArtifactInfo
    from optpipe.core.errors import StageError
    from optpipe.workspace.entry import entry_from_folder

    entry = entry_from_folder(folder, ArtifactInfo)
    if (problem := entry.find_damage()) is not None:
        raise StageError(f"{folder.parent.name}: {problem}")
    session = BACKENDS[entry.info.backend].load(folder, entry.info, options)
    captured = CapturedSession(session, largest) if largest and can_capture(session) else None

    def answer(batch: Sequence[Arrays]) -> list[dict[str, np.ndarray]]:
        given = [_take_inputs(each, [(spec.name, spec.dtype) for spec in session.inputs]) for each in batch]
        if captured is not None:
            outputs = captured.run(given)
        elif len(given) == 1:
            return [session.run(given[0])]
        else:
            outputs = session.run({name: np.concatenate([each[name] for each in given]) for name in given[0]})
        ends = np.cumsum([len(next(iter(each.values()))) for each in given])[:-1]
        parts = {name: np.split(array, ends) for name, array in outputs.items()}
        return [{name: parts[name][at] for name in outputs} for at in range(len(given))]

    return answer


def _take_inputs(arrays: Arrays, wanted: Sequence[tuple[str, str]]) -> dict[str, "np.ndarray"]:
    """The arrays by the session's names, also where the server addresses them by position. Raises BadInputError."""
    from optpipe.core.errors import BadInputError
    from optpipe.deploy.triton_config import list_positions

    named = dict(zip(list_positions("INPUT", len(wanted)), (name for name, _ in wanted), strict=True))
    found = {named.get(name, name): array for name, array in arrays.items()}
    for name, dtype in wanted:
        if name not in found:
            raise BadInputError(f"input '{name}' is missing")
        if str(found[name].dtype) != dtype:
            raise BadInputError(f"input '{name}' is {found[name].dtype}, the model takes {dtype}")
    return {name: found[name] for name, _ in wanted}


def open_preprocessing(folder: Path) -> Answer:
    """The serialized DALI pipeline in `folder`."""
    import numpy as np
    from nvidia.dali.pipeline import Pipeline

    from optpipe.core.records import read_record
    from optpipe.preprocess.artifact import PIPELINE, PreprocessingInfo
    from optpipe.preprocess.dali.pipeline import INPUT

    plan = read_record(folder / "preprocessing.json", PreprocessingInfo).plan
    pipeline = Pipeline.deserialize(
        filename=str(folder / Path(PIPELINE).name),
        batch_size=plan.batch_size,
        num_threads=plan.threads,
        device_id=0 if plan.device == "gpu" else None,
        prefetch_queue_depth=1,
    )

    def answer(batch: Sequence[Arrays]) -> list[dict[str, np.ndarray]]:
        images = [row for each in batch for row in each[INPUT]]
        rows: list[np.ndarray] = []
        for start in range(0, len(images), plan.batch_size):
            pipeline.feed_input(INPUT, [np.ascontiguousarray(each) for each in images[start : start + plan.batch_size]])
            rows += [np.array(each) for each in pipeline.run()[0].as_cpu()]
        counts = np.cumsum([len(each[INPUT]) for each in batch])
        return [
            {"DALI_OUTPUT_0": np.stack(rows[end - len(each[INPUT]) : end])}
            for each, end in zip(batch, counts, strict=True)
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


if __name__ == "__main__":
    main()
