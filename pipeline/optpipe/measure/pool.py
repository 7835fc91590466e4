"""Worker processes that stand by: started and done importing before they are needed, several at once, never beside a measurement.

A process costs its start, and most of that is importing a runtime. What one worker came to import, the next of its kind import
beforehand, as many side by side as there are processors. Each is a process of its own from the start (no fork: the layout of
its memory is part of what a fresh process is measured for), and waits without using a processor until it is told what to load.
"""

import select
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from optpipe.core.errors import StageError
from optpipe.core.records import line_from_record
from optpipe.measure.worker.plan import WorkerStart
from optpipe.workspace.environment import count_cores

MAX_STANDING_BY = 8
"""Of memory: each holds the libraries' own data, some 300 MB with torch."""
STOP_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class StartedWorker:
    """A worker that waits for its session."""

    process: "subprocess.Popen[bytes]"
    log: Path

    def send(self, record: object) -> None:
        """Writes one line to its standard input; where it has died, its own words or its log say why."""
        if self.process.stdin:
            with suppress(BrokenPipeError):
                self.process.stdin.write(line_from_record(record))

    def wait_for_event(self, seconds: float | None) -> bool:
        """Whether there is something to read from it, or its end, within `seconds`."""
        if self.process.stdout is None:
            raise StageError("the worker has no output")
        return bool(select.select([self.process.stdout], [], [], seconds)[0])

    def end(self, seconds: float = STOP_SECONDS) -> None:
        """Closes its input and waits; kills it after `seconds`."""
        if self.process.stdin:
            self.process.stdin.close()
        try:
            self.process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.process.stdout:
            self.process.stdout.close()


class WorkerPool:
    """Where workers come from; a context manager that ends those that were not needed."""

    def __init__(
        self,
        directory: Path,
        affinity: Sequence[int] | None = None,
        python: str = sys.executable,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Workers run in the interpreter `python`, with these environment variables or this process's."""
        self._python, self._environment = python, environment
        self.directory, self.affinity = directory, None if affinity is None else tuple(affinity)
        self._modules: dict[str, tuple[str, ...]] = {}
        self._waiting: dict[str, list[StartedWorker]] = {}
        self._expected: dict[str, int] = {}
        self._count = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for each in (worker for group in self._waiting.values() for worker in group):
            each.process.kill()
            each.end()
        self._waiting.clear()

    def standing_by(self, kind: str) -> tuple[StartedWorker, ...]:
        """Workers of a kind that wait for their session."""
        return tuple(self._waiting.get(kind, ()))

    def expect(self, kind: str, count: int) -> None:
        """Says that `count` more workers of a kind (a runtime, a precision, a device) will be asked for."""
        self._expected[kind] = self._expected.get(kind, 0) + count

    def learn(self, kind: str, modules: Sequence[str]) -> None:
        """Keeps what a worker of this kind came to import."""
        self._modules[kind] = tuple(modules)

    def take(self, kind: str) -> StartedWorker:
        """A fresh process; where none stands by, as many are started as are expected and there are processors for."""
        waiting = self._waiting.setdefault(kind, [])
        expected = self._expected.get(kind, 0)
        if not waiting:
            many = max(1, min(expected, count_cores(), MAX_STANDING_BY)) if kind in self._modules else 1
            waiting += [self._start(kind) for _ in range(many)]
            for each in waiting if many > 1 else ():  # nothing imports while something is measured
                each.wait_for_event(None)
        self._expected[kind] = max(expected - 1, 0)
        return waiting.pop(0)

    def _start(self, kind: str) -> StartedWorker:
        self.directory.mkdir(parents=True, exist_ok=True)
        log = self.directory / f"worker-{self._count}.log"
        self._count += 1
        with log.open("ab") as errors:
            process = subprocess.Popen(
                [self._python, "-m", "optpipe.measure.worker"],
                env=self._environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,  # Ctrl-C is the parent's to handle: the worker ends its measurement in order
                bufsize=0,
            )
        started = StartedWorker(process, log)
        started.send(WorkerStart(self.affinity, self._modules.get(kind, ())))
        return started
