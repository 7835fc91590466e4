"""Cells, slots and records of sweeps that never ran."""

import re
from dataclasses import replace

from optpipe.core.entries import Environment, Gpu
from optpipe.core.events import SilentListener
from optpipe.core.load import LoadSpec
from optpipe.core.measurement import Subject
from optpipe.core.measurement_group import GroupFigure, MeasurementGroup
from optpipe.core.quantity import Estimate
from optpipe.sweep.job import Cell, JobRecord, JobState, Recipe, compute_job_key
from optpipe.sweep.slots import Slot

H200, L4 = "NVIDIA H200", "NVIDIA L4"


def make_recipe(model="digits", precision="fp16", backend="onnxruntime", device="cuda", **changes):
    return Recipe(model, precision, backend, device, **changes)


def make_cell(kind=H200, batch=1, processes=3, **recipe):
    device = "cpu" if kind == "cpu" else "cuda"
    return Cell(make_recipe(device=device, **recipe), LoadSpec(batch), kind, processes=processes)


def make_slot(number=0, kind=H200, fingerprint="f" * 16):
    gpus = () if kind == "cpu" else (Gpu(number, kind, "9.0", 140 << 30, "580.1"),)
    environment = Environment("3.12", "Linux-x86_64", "Xeon", 32, {"numpy": "2.4"}, gpus)
    name = "cpu" if kind == "cpu" else f"GPU-{number}"
    return Slot(name, kind, (number,), fingerprint, environment)


def make_group(cell, p50_ms=(1.0, 1.01, 0.99), rate=None):
    processes = tuple(1e6 * each for each in p50_ms)
    middle = sum(processes) / len(processes)
    rate = rate or 1e9 * cell.load.batch_size / middle
    figures = {
        "p50": GroupFigure(Estimate(middle, 0.98 * middle, 1.02 * middle), processes, None, None),
        "p99": GroupFigure(
            Estimate(1.2 * middle, 1.1 * middle, 1.3 * middle), processes, None, None
        ),
        "throughput": GroupFigure(
            Estimate(rate, 0.98 * rate, 1.02 * rate), (rate,) * 3, None, None
        ),
    }
    recipe = cell.recipe
    subject = Subject("a" * 12, recipe.backend, recipe.precision, "cpu", model=recipe.model)
    return MeasurementGroup(subject, cell.load, len(processes), ("bench-1",), figures)


def make_record(
    cell,
    state=JobState.DONE,
    reason="",
    slot=None,
    run="bench-1",
    started="2026-11-22T10:00:00",
    **figures,
):
    slot = slot or make_slot(kind=cell.kind)
    measured = state is JobState.DONE
    return JobRecord(
        key=compute_job_key(cell, slot.fingerprint),
        cell=cell,
        state=state,
        reason=reason,
        environment=slot.environment,
        fingerprint=slot.fingerprint,
        host="host",
        slot=slot.name,
        artifact="a" * 12 if measured else None,
        run=run if measured else None,
        group=make_group(cell, **figures) if measured else None,
        seconds=12.0,
        started_utc=started,
    )


def other_environment(slot, fingerprint="e" * 16):
    return replace(slot, fingerprint=fingerprint)


class Watcher(SilentListener):
    """Calls `watch`, if there is one, as each job of a sweep ends."""

    def __init__(self, watch):
        super().__init__()
        self.watch = watch

    def inform(self, message):
        ended = re.match(r"\d+ of \d+: ", message)
        if ended and self.watch is not None:
            self.watch()
