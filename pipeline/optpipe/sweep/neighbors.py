"""The neighbor effect: how much slower an artifact is on one GPU while all others of the host are busy, measured, not assumed.

One worker holds the artifact loaded on the first slot and measures window after window; the workers of all other slots run in
half of the windows and are stopped (SIGSTOP) in the other half, in an order drawn anew for each round. The pair of one round
gives one ratio, Student's t over rounds its interval. A stopped neighbor keeps its memory and its context.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from time import monotonic, sleep

from optpipe.core.bench_record import Ratio
from optpipe.core.errors import StageError
from optpipe.core.events import Listener
from optpipe.core.records import json_from_record, read_record
from optpipe.stats.ratio import ratio_from_rounds
from optpipe.sweep.slots import Slot, name_host
from optpipe.workspace.runs import write_bytes
from optpipe.workspace.store import Store

HOSTS = "hosts"
"""Folder of the workspace with what is known of each host."""
TOLERATED = 0.02
"""A larger effect makes figures taken side by side incomparable with figures taken alone."""
READY_S = 300.0


@dataclass(frozen=True, slots=True)
class NeighborEffect:
    """What the neighbors of one host do to each other: the content of `hosts/HOST-FINGERPRINT.json`."""

    host: str
    fingerprint: str
    artifact: str
    label: str
    batch_size: int
    slots: int
    ratio: Ratio
    """Time per query with busy neighbors over without."""
    alone_ns: tuple[float, ...]
    beside_ns: tuple[float, ...]
    measured_utc: str
    seed: int
    schema: str = "optpipe.neighbors"
    schema_version: int = 1

    @property
    def serializes(self) -> bool:
        """Whether timing has to be serialized: the interval does not exclude an effect over TOLERATED."""
        low, high = self.ratio.ci
        return high > 1 + TOLERATED or low < 1 - TOLERATED


def read_neighbor_effect(workspace: Path, slots: Sequence[Slot]) -> NeighborEffect | None:
    """What was measured of this host in this environment; None where nothing was."""
    if len(slots) < 2:
        return None
    path = _path(workspace, slots[0])
    return read_record(path, NeighborEffect) if path.is_file() else None


def name_neighborhood(slot: Slot) -> str:
    """What an effect holds for: this host in the slot's environment."""
    return f"{name_host()}-{slot.fingerprint}"


def list_disturbed_hosts(workspace: Path) -> tuple[str, ...]:
    """The neighborhoods that have to time one GPU after the other."""
    found = {path.stem: read_record(path, NeighborEffect) for path in sorted((workspace / HOSTS).glob("*.json"))}
    return tuple(name for name, effect in found.items() if effect.serializes)


def _path(workspace: Path, slot: Slot) -> Path:
    return workspace / HOSTS / f"{name_neighborhood(slot)}.json"


@dataclass(frozen=True, slots=True)
class Probe:
    """What a probing process is told: `python -m optpipe.sweep.probe PROBE.json`."""

    workspace: str
    artifact: str
    batch_size: int
    cpus: tuple[int, ...]
    window_s: float
    busy: bool
    """Whether it only keeps its GPU busy until it is ended."""


def measure_neighbor_effect(
    artifact: str,
    label: str,
    batch_size: int,
    slots: Sequence[Slot],
    store: Store,
    listener: Listener,
    *,
    rounds: int = 10,
    window_s: float = 1.0,
    seed: int = 0,
) -> NeighborEffect:
    """Measures it on two slots or more and stores it. Raises StageError where a probe dies."""
    probe = Probe(str(store.workspace), artifact, batch_size, (), window_s, busy=False)
    alone: list[float] = []
    beside: list[float] = []
    draw = Random(seed)  # an order, not a secret
    with store.scratch("neighbors") as scratch, ExitStack() as stack:
        with listener.step("load the artifact on every slot"):
            subject = stack.enter_context(_probing(probe, slots[0], scratch, 0))
            others = [
                stack.enter_context(_probing(replace(probe, busy=True), slot, scratch, at))
                for at, slot in enumerate(slots[1:], start=1)
            ]
            for one in (subject, *others):
                one.wait_until_ready()
        with listener.step("neighbor effect", total=rounds) as step:
            for _ in range(rounds):
                for busy in draw.sample((True, False), 2):
                    for other in others:
                        other.signal(signal.SIGCONT if busy else signal.SIGSTOP)
                    (beside if busy else alone).append(subject.measure())
                step.advance()
    now = datetime.now(UTC).isoformat(timespec="seconds")
    found = NeighborEffect(
        name_host(), slots[0].fingerprint, artifact, label, batch_size, len(slots),
        ratio_from_rounds(alone, beside), tuple(alone), tuple(beside), now, seed,
    )  # fmt: skip
    write_bytes(_path(store.workspace, slots[0]), json_from_record(found))
    return found


class _Probing:
    """A probing process."""

    def __init__(self, process: "subprocess.Popen[str]", log: Path) -> None:
        self._process, self._log = process, log

    def wait_until_ready(self) -> None:
        self._read(READY_S)

    def measure(self) -> float:
        """Median time per query of one window, in ns."""
        assert self._process.stdin is not None
        self._process.stdin.write("measure\n")
        self._process.stdin.flush()
        return float(self._read(READY_S))

    def signal(self, number: int) -> None:
        if self._process.poll() is not None:
            raise StageError(self._explain())
        self._process.send_signal(number)

    def _read(self, limit_s: float) -> str:
        import select

        assert self._process.stdout is not None
        deadline = monotonic() + limit_s
        while monotonic() < deadline:
            if select.select([self._process.stdout], [], [], 1.0)[0]:
                if line := self._process.stdout.readline():
                    return line.strip()
                sleep(0.1)
                raise StageError(self._explain())
        raise StageError(f"a probe did not respond within {limit_s:.0f} s")

    def _explain(self) -> str:
        words = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return f"the probe of the neighbor effect ended: {words[-1][:240] if words else 'no output'}"


@contextmanager
def _probing(probe: Probe, slot: Slot, scratch: Path, number: int) -> Iterator[_Probing]:
    path, log = scratch / f"probe{number}.json", scratch / f"probe{number}.log"
    write_bytes(path, json_from_record(replace(probe, cpus=slot.cpus)))
    with log.open("wb") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "optpipe.sweep.probe", str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": slot.gpu or ""},
            start_new_session=True,
        )
    try:
        yield _Probing(process, log)
    finally:
        process.kill()  # also ends one that is stopped
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream:
                stream.close()
