"""`python -m optpipe.sweep.probe PROBE.json`: one loaded artifact, measured window by window, or kept busy."""

import os
import sys
from pathlib import Path
from statistics import median
from time import perf_counter_ns
from typing import Any

from optpipe.core.process_group import end_with_parent
from optpipe.core.records import read_record
from optpipe.measure.worker.plan import session_from_store
from optpipe.models.artifacts.lookup import find_artifacts
from optpipe.models.inputs.samples import vary_inputs
from optpipe.sweep.neighbors import Probe
from optpipe.workspace.store import Store


def main() -> None:
    """Loads, says `ready`, then gives one median in ns for each line on standard input; a busy probe runs until it is ended."""
    probe = read_record(Path(sys.argv[1]), Probe)
    end_with_parent()
    if probe.cpus:
        os.sched_setaffinity(0, probe.cpus)
    told = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever libraries print
    store = Store(Path(probe.workspace))
    (artifact,) = find_artifacts(probe.artifact, store)
    with session_from_store(workspace=probe.workspace, entry=artifact.entry.path.name, options={}) as session:
        query = _make_query(session, artifact, probe.batch_size, store)
        _run_window(query, probe.window_s)
        told.write("ready\n")
        if probe.busy:
            while True:
                query()
        for _ in sys.stdin:
            told.write(f"{median(_run_window(query, probe.window_s))}\n")


def _run_window(query: Any, seconds: float) -> list[int]:
    times: list[int] = []
    begun = perf_counter_ns()
    while not times or perf_counter_ns() - begun < seconds * 1e9:
        started = perf_counter_ns()
        query()
        times.append(perf_counter_ns() - started)
    return times


def _make_query(session: Any, artifact: Any, batch_size: int, store: Store) -> Any:
    """One inference on real inputs of the store, finished on return."""
    from optpipe.models.export.exported import reference_from_file
    from optpipe.workspace.file_names import REFERENCE

    known = reference_from_file(store.verify_entry(artifact.reference, REFERENCE).file(REFERENCE))
    real = {name: array[:256] for name, array in known.inputs.items()}
    shared = frozenset(each.name for each in artifact.card.inputs if each.batch is None and artifact.card.batched)
    pool = vary_inputs(real, batch_size, 0, shared)
    batch = {name: array if name in shared else array[:batch_size] for name, array in pool.items()}
    if session.device == "cpu":
        return session.bind(batch).launch
    import torch

    stream = torch.cuda.Stream()
    torch.cuda.set_stream(stream)
    binding = session.bind(batch)
    stream.synchronize()

    def query() -> None:
        binding.launch()
        stream.synchronize()

    return query


if __name__ == "__main__":
    main()
