"""Figures of builds, with their intervals and verdicts; and times for trying things out."""

import os
from collections.abc import Collection, Mapping
from enum import EnumType
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from optpipe.api.arguments import check_arguments, require_type
from optpipe.api.calling import arrays_from
from optpipe.api.door import speak
from optpipe.core import np, pl
from optpipe.core.errors import BadInputError
from optpipe.core.files import Files
from optpipe.core.load import LoadSpec
from optpipe.core.measurement_group import MeasurementGroup
from optpipe.core.metrics.registry import find_metric
from optpipe.core.params import list_fields
from optpipe.core.parquet import read_parquet
from optpipe.core.suggestions import suggest_names

if TYPE_CHECKING:
    import altair as alt

    from optpipe.api.build import Build
    from optpipe.api.builds import Builds
    from optpipe.api.workspace import Workspace
    from optpipe.measure.pair import BenchRecord


class Bench:
    """One bench run: every try of each build and load, in fresh processes.

    `frame()` has a row for each build and load; `samples()` has every query. A measurement that was disturbed is INVALID, with its
    reasons, and has no figures. The run lies in the workspace, and counts in every later verdict.

    >>> import torch, optpipe as op
    >>> model = op.Model(torch.nn.Linear(8, 4), example=torch.randn(2, 8), workspace="work")
    >>> builds = model.build("fp32", backend="onnxruntime", device="cpu")
    >>> bench = builds.bench(batch=[1, 4], processes=1, min_time=0.05, keep_going=True)
    >>> bench.frame().select("build", "batch_size").rows()
    [('onnxruntime fp32', 1), ('onnxruntime fp32', 4)]
    >>> bool((bench.samples()["latency_ns"] > 0).all())
    True
    """

    def __init__(self, workspace: "Workspace", record: "BenchRecord") -> None:
        self.workspace, self.record = workspace, speak(record)

    @property
    def run(self) -> str:
        """Name of the run, as `optpipe compare` takes it."""
        return self.record.run_id

    @property
    def path(self) -> Path:
        return Path(self.record.run_dir)

    @property
    def valid(self) -> bool:
        """Whether every build has VALID processes under every load."""
        return bool(self.record.groups) and all(group.processes for group in self.record.groups)

    @property
    def warnings(self) -> tuple[str, ...]:
        return self.record.warnings

    def frame(self) -> "pl.DataFrame":
        """A row for each build and load.

        `build`, `artifact`, `backend`, `precision`, `device`; the load: `batch_size`, `length`, `scenario`, `mode`, `streams`,
        `rate_per_s`; `verdict` (VALID or INVALID), `reasons` (a list of texts), `processes` (VALID ones), `left_out`; and each
        figure with the bounds of its 95% interval: `p50_ns`, `p50_ns_low`, `p50_ns_high`, …, `throughput_per_s`, `memory_bytes`.
        A figure of an INVALID measurement is null, and so are bounds that fewer than three processes cannot give.
        """
        rows = [self._list_cells(group) for group in self.record.groups]
        names = list(dict.fromkeys(name for row in rows for name in row))
        figures = [
            name.removesuffix("_low") + suffix
            for name in names
            if name.endswith("_low")
            for suffix in ("", "_low", "_high")
        ]
        return pl.DataFrame(
            {name: [row.get(name) for row in rows] for name in names},
            schema_overrides={
                **dict.fromkeys(figures, pl.Float64),
                "reasons": pl.List(pl.String),
                "length": pl.Int64,
                "rate_per_s": pl.Float64,
            },
        )

    def _list_cells(self, group: MeasurementGroup) -> dict[str, Any]:
        load, subject = group.load, group.subject
        tries = [
            measurement
            for measurement in self.record.measurements
            if measurement.subject.artifact == subject.artifact and measurement.load.key == load.key
        ]
        reasons = dict.fromkeys(
            f"{reason.code}: {reason.message}"
            for measurement in tries
            for reason in measurement.invalid_reasons
        )
        cells: dict[str, Any] = {
            "build": f"{subject.backend} {subject.precision}",
            "artifact": subject.artifact,
            "backend": subject.backend,
            "precision": str(subject.precision),
            "device": subject.device,
            "batch_size": load.batch_size,
            "length": load.length,
            "scenario": str(load.scenario),
            "mode": str(load.mode),
            "streams": load.streams,
            "rate_per_s": load.rate_per_s,
            "verdict": "VALID" if group.processes else "INVALID",
            "reasons": list(reasons),
            "processes": group.processes,
            "left_out": len(group.left_out),
        }
        for name, figure in group.figures.items():
            column, estimate = find_metric(name).column or name, figure.estimate
            counts = group.processes > 0
            cells[column] = float(estimate.value) if counts else None
            cells[f"{column}_low"] = estimate.low if counts else None
            cells[f"{column}_high"] = estimate.high if counts else None
        return cells

    def samples(self) -> "pl.DataFrame":
        """Every query of every process, warm-up included: `build`, `artifact`, `measurement`, `process`, `batch_size`, `valid`,
        `latency_ns`, and the raw columns of the run's Parquet files (times in ns, `phase` 0 for warm-up and 1 for measured)."""
        frames = [
            read_parquet(Files(self.path), measured.samples_file).select(
                pl.lit(f"{measured.subject.backend} {measured.subject.precision}").alias("build"),
                pl.lit(measured.subject.artifact).alias("artifact"),
                pl.lit(measured.id).alias("measurement"),
                pl.lit(measured.process).alias("process"),
                pl.lit(measured.load.batch_size).alias("batch_size"),
                pl.lit(measured.is_valid).alias("valid"),
                (pl.col("end_ns") - pl.col("scheduled_ns")).alias("latency_ns"),
                pl.all(),
            )
            for measured in self.record.measurements
            if measured.samples_file is not None
        ]
        return pl.concat(frames) if frames else pl.DataFrame()

    @check_arguments
    def plot(self, figure: str = "p50_ns") -> "alt.Chart":
        """An Altair chart of a column of `frame()` by batch size, with its intervals; INVALID measurements are left out.

        Raises BadInputError for a column that is no figure, or without VALID measurements.
        """
        import altair as alt

        frame = self.frame()
        if f"{figure}_low" not in frame.columns:
            known = [name for name in frame.columns if f"{name}_low" in frame.columns]
            raise BadInputError(f"figure {figure!r}: choose from {', '.join(known)}")
        rows = frame.filter(pl.col(figure).is_not_null()).to_dicts()
        if not rows:
            raise BadInputError(
                "no measurement is VALID, so there is nothing to draw: see frame()['reasons']"
            )
        base = alt.Chart(alt.InlineData(rows)).encode(
            x=alt.X("batch_size:O", title="batch size"), color=alt.Color("build:N", title=None)
        )
        points = base.mark_line(point=True).encode(
            y=alt.Y(f"{figure}:Q", title=figure), tooltip=["build:N", "batch_size:O", f"{figure}:Q"]
        )
        bars = base.mark_rule(strokeWidth=2).encode(y=f"{figure}_low:Q", y2=f"{figure}_high:Q")
        return points + bars

    def _document(self) -> Any:
        from optpipe.measure.document import document_from_bench

        return speak(document_from_bench(self.record))

    def __str__(self) -> str:
        from optpipe.report.terminal import text_from_document

        return text_from_document(self._document())

    def __repr__(self) -> str:
        valid = sum(group.processes > 0 for group in self.record.groups)
        return f"Bench({self.run}, {valid} of {len(self.record.groups)} loads VALID)"

    def _repr_html_(self) -> str:
        from optpipe.report.notebook import html_from_document

        return html_from_document(self._document())


class BenchOptions(TypedDict, total=False):
    """The arguments of `Builds.bench`, with the meaning and default of the options of `optpipe bench`; times in seconds."""

    batch: int | Collection[int]
    length: int | Collection[int]
    scenario: Literal["single-stream", "multi-stream", "offline", "server"]
    mode: Literal["compute", "end-to-end"]
    streams: int
    rate: float
    percentile: float
    slo: str
    processes: int
    min_time: float
    max_time: float
    warm_up: float
    max_warm_up: float
    max_cv: float | str
    energy: bool
    images: str | os.PathLike[str]
    affinity: Collection[int]
    keep_going: bool
    seed: int
    option: Mapping[str, Mapping[str, Any]]


def bench_builds(builds: "Builds", options: Mapping[str, Any]) -> Bench:
    from dataclasses import replace

    from optpipe.core.quantity import share_from_text
    from optpipe.measure.bench import bench_artifacts
    from optpipe.measure.plan import plan_bench
    from optpipe.measure.targets import keep_runnable

    given = {name: value for name, value in options.items() if value is not None}
    _require_known(given)
    for name, value in given.items():
        require_type(name, value, BenchOptions.__annotations__[name])
    workspace, stored = builds.workspace, [build.stored for build in builds.require_built()]
    loads = {
        option.flag.removeprefix("--").replace("-", "_"): option for option in list_fields(LoadSpec)
    }
    del loads["batch"], loads["length"]
    with workspace.call(
        "Builds.bench", builds=[artifact.entry.id for artifact in stored], **options
    ) as listener:
        load = {}
        for name in given.keys() & loads.keys():
            value, kind = given.pop(name), loads[name].kind
            load[loads[name].name] = kind(value) if isinstance(kind, EnumType) else value
        for name in ("batch", "length"):
            given[name] = _read_sizes(given.get(name), name)
        if isinstance(given.get("max_cv"), str):
            given["max_cv"] = share_from_text(given["max_cv"], "max_cv")
        if "affinity" in given:
            affinity = given["affinity"]
            given["affinity"] = tuple(sorted(set(affinity)))
            if not affinity or set(affinity) - (have := os.sched_getaffinity(0)):
                raise BadInputError(
                    f"affinity {[*affinity]}: expected CPUs from {sorted(have)}, such as [0]"
                )
        if "images" in given:
            given["images"] = Path(given["images"])
        plan = plan_bench(load, options=given.pop("option", None), **given)
        store = workspace.store
        able = keep_runnable(stored[0].card.name, stored, store, listener)
        record = bench_artifacts(able, plan, store, listener)
        return Bench(workspace, replace(record, warnings=tuple(listener.warnings)))


def _require_known(options: Mapping[str, Any]) -> None:
    known = sorted(BenchOptions.__annotations__)
    for name in options:
        if name not in known:
            hint = suggest_names(name, known, otherwise=f"arguments are {', '.join(known)}")
            raise BadInputError(f"bench has no argument {name!r}; {hint}")


def _read_sizes(sizes: int | Collection[int] | None, name: str) -> tuple[int, ...] | None:
    if sizes is None:
        return None
    several = tuple(sizes) if isinstance(sizes, Collection) else (sizes,)
    if not several or min(several) < 1:
        raise BadInputError(f"{name} {sizes}: expected a size, or a list of sizes, such as [1, 8]")
    return tuple(sorted(set(several)))


class Times:
    """Times of calls in one process, for trying things out: no interval, no check of the machine, never evidence.

    `median_ns`, `calls`, and `times_ns`; the folder `path` keeps them.
    """

    def __init__(self, label: str, batch: int, times_ns: list[int], path: Path) -> None:
        self.label, self.batch, self.times_ns, self.path = label, batch, times_ns, path

    @property
    def median_ns(self) -> float:
        return float(median(self.times_ns))

    @property
    def calls(self) -> int:
        return len(self.times_ns)

    def __repr__(self) -> str:
        from optpipe.core.quantity import format_duration

        time = format_duration(self.median_ns)
        return f"Times({self.label}, batch {self.batch}: about {time}, {self.calls} calls in one process; not evidence)"


def time_build(build: "Build", batch: int | None, seconds: float) -> Times:
    from optpipe.measure.trials import time_calls
    from optpipe.models.export.exported import reference_from_file
    from optpipe.models.inputs.rows import batch_from_rows, count_rows
    from optpipe.workspace.file_names import REFERENCE
    from optpipe.workspace.files import write_parquet
    from optpipe.workspace.runs import finish_run, open_run

    stored, store = build.stored, build.workspace.store
    if not 0 < seconds <= 600:
        raise BadInputError(f"seconds {seconds}: expected more than 0 and at most 600")
    low, usual, high = stored.card.batch_range
    size = usual if batch is None else batch
    if not low <= size <= high:
        raise BadInputError(f"batch {size} is outside the profile {low}…{high} of {build.label}")
    build.require_present()
    if stored.reference is None:
        raise BadInputError(
            f"{build.label} has no verification inputs in {store.workspace}; build it again"
        )
    rows = reference_from_file(store.verify_entry(stored.reference).file(REFERENCE)).inputs
    order = np.arange(size) % count_rows(rows)
    inputs = batch_from_rows(stored.card, {name: array[order] for name, array in rows.items()})
    with build.workspace.call("Build.time", build=build.id, batch=size, seconds=seconds):
        with build._lock:
            session = build._open()
            arrays = arrays_from(inputs)
            session.run(arrays)
            begun, times = perf_counter(), list[int]()
            for started, _, ended in time_calls(lambda: session.run(arrays)):
                times.append(ended - started)
                if perf_counter() - begun >= seconds:
                    break
        with open_run(store.workspace, "time") as run:
            write_parquet(run.path / "times.parquet", pl.DataFrame({"time_ns": times}))
            finish_run(run, parents=[build.id], model=stored.card.name)
            return Times(build.label, size, times, run.path)
