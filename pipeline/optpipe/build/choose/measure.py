"""Times candidates as the race asks for them: a fresh process each, short loads, raw samples in the run's folder."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from optpipe.core.events import ProgressStep
from optpipe.core.measurement import LoadSpec, Measurement
from optpipe.measure.measure import measure_load
from optpipe.measure.process import WorkerPool, WorkerProcess
from optpipe.measure.session_plan import BenchPlan, prepare_session, subject_from_artifact
from optpipe.measure.validity import WRONG_OUTPUTS
from optpipe.models.artifacts.lookup import StoredArtifact
from optpipe.workspace.runs import OpenRun
from optpipe.workspace.store import Store

SHORT_LOAD = LoadSpec(
    1, min_seconds=0.5, max_seconds=5.0, percentile=50.0, warm_up_seconds=0.3, max_warm_up_seconds=3.0,
    output_checks=4, cache_probes=2,
)  # fmt: skip
START_S = {"cpu": 4.0, "cuda": 10.0}
"""About what a process takes until it measures: imports, loading, on a GPU the capture of a CUDA graph."""
LOAD_S = 1.5
"""About what one short load takes."""


def estimate_seconds(processes: int, sizes: int, device: str) -> float:
    """Rough duration of `processes` processes that each measure `sizes` batch sizes."""
    return processes * (START_S[device] + sizes * LOAD_S)


class CandidateTimer:
    """Starts a process for an artifact and gives its p50 latency in ns by batch size; keeps every measurement."""

    def __init__(
        self,
        artifacts: Mapping[str, StoredArtifact],
        run: OpenRun,
        store: Store,
        pool: WorkerPool,
        scratch: Path,
        step: ProgressStep,
    ) -> None:
        self._artifacts, self._pool, self._step = artifacts, pool, step
        self._options = {name: each.resolve_effective_options({}) for name, each in artifacts.items()}
        plan = BenchPlan(SHORT_LOAD)
        self._prepared = {
            name: prepare_session(each, plan, store, scratch / name, run.path) for name, each in artifacts.items()
        }
        self.measurements: list[Measurement] = []
        self.failures: dict[str, str] = {}
        """Why an artifact has no time, by id."""
        self._processes = 0

    def expect(self, name: str, processes: int) -> None:
        """Lets workers stand by."""
        self._pool.expect(self._artifacts[name].label, processes)

    def measure(self, name: str, sizes: Sequence[int]) -> dict[int, float]:
        """One fresh process. A size at which it fails, or gives wrong outputs, is missing."""
        session, frame = self._prepared[name]
        session = replace(session, arguments={**session.arguments, "options": self._options[name]})
        subject = subject_from_artifact(self._artifacts[name], self._options[name])
        found = {}
        with WorkerProcess(session, self._pool, self._artifacts[name].label) as worker:
            for size in sizes:
                load = replace(SHORT_LOAD, batch_size=size)
                one, _ = measure_load(worker, subject, load, f"m{len(self.measurements):03}", frame)
                if one.interrupted:
                    raise KeyboardInterrupt
                self.measurements.append(replace(one, process=self._processes))
                median = one.latency_ns.median if one.latency_ns else None  # needs no interval: that is over processes
                wrong = [each.message for each in one.reasons if each.code in WRONG_OUTPUTS]
                if median is not None and not wrong:  # noise counts: the order of processes is drawn
                    found[size] = median
                else:
                    reasons = wrong or [each.message for each in one.reasons if each.invalidates]
                    self.failures[name] = f"batch {size}: {reasons[0]}"
                if not worker.alive:
                    break
        self._processes += 1
        self._step.advance()
        return found
