"""A workspace with a built, verified and measured model whose samples are drawn, not timed: statistics without a clock."""

import importlib.util
import json
import sys
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import cache, partial
from io import BytesIO
from itertools import islice, product
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import polars as pl
import pytest
from tests.fakes.entries import artifact_info, proof, put
from tests.fakes.preprocess import preprocess_record
from tests.golden import phenomena

from optpipe.core.card import InputSpec, ModelCard, Task, TensorSpec
from optpipe.core.entries import ModelInfo, VerificationInfo, WeightsRecord
from optpipe.core.events import SilentListener
from optpipe.core.files import Files, hash_text
from optpipe.core.load import LoadSpec, Mode, Scenario
from optpipe.core.measurement import (
    MACHINE_COLUMNS,
    SAMPLE_COLUMNS,
    Measurement,
    Phase,
    Reason,
    Subject,
    Validity,
)
from optpipe.core.metrics.measured import LOAD_TIME, PairMetric
from optpipe.core.metrics.registry import figure_from_witness
from optpipe.core.records import json_from_record
from optpipe.core.wording import Message
from optpipe.evaluate.recompute import recompute_evaluation
from optpipe.evaluate.result import Dataset, EvaluatedModel, Evaluation, SampledFigure
from optpipe.evaluate.sampled_scores import columns_from_parts
from optpipe.measure import figures
from optpipe.measure.figures import recompute_measurement
from optpipe.measure.measure import write_measurements
from optpipe.measure.pair import comparison_from_measurements, draw_names
from optpipe.measure.turns import TurnsRecord, summarize_round
from optpipe.measure.validity import LIMITS
from optpipe.models.artifacts.engine_files import hash_model
from optpipe.preprocess.proof import proof_from_rows, rows_from_outputs
from optpipe.signoff.collect import SignoffRequest, collect_evidence
from optpipe.signoff.dossier import finish_dossier, read_dossier
from optpipe.signoff.judge import judge_dossier
from optpipe.signoff.policy import policy_from_toml
from optpipe.signoff.release import sign_off
from optpipe.trace.analysis import analysis_from_trace, select_measured_part
from optpipe.trace.read import trace_from_folder, trace_from_sqlite, write_trace
from optpipe.trace.report import (
    ProfileRecord,
    StageProfile,
    StageSubject,
    make_stage_views,
    profile_from_trace,
)
from optpipe.trace.rules import StageFacts
from optpipe.workspace.entry import get_utc_time
from optpipe.workspace.file_names import CARD, ONNX
from optpipe.workspace.runs import begin_run, finish_run
from optpipe.workspace.seal import store_baseline
from optpipe.workspace.store import Store

NOT_STEADY = Reason(
    "not-steady", "latency was not stable after warm-up", "increase max-warm-up (--set)", True
)


def write_network(folder, width):
    weight = onnx.helper.make_tensor("w", onnx.TensorProto.FLOAT, (8, width), [0.0] * 8 * width)
    onnx.save(
        onnx.helper.make_model(onnx.helper.make_graph([], "g", [], [], [weight])), folder / ONNX
    )
    inputs, outputs = (
        (InputSpec("x", "float32", *[(1, 8)] * 3),),
        (TensorSpec("y", "float32", ("n", 10)),),
    )
    (folder / CARD).write_text(
        json.dumps(ModelCard("digits", "digits", Task.OTHER, inputs, outputs).to_dict())
    )


@dataclass
class Workspace:
    path: Path
    counter: int = 0

    @property
    def store(self):
        return Store(self.path)

    def artifact(
        self,
        precision="fp16",
        backend="onnxruntime",
        *,
        trained=True,
        passed=True,
        proven=True,
        macs=0.97,
        width=None,
    ):
        """With `width`, of an exported network whose one weight has the shape (8, width)."""
        info = artifact_info(
            backend=backend,
            precision=precision,
            options={"threads": 0, "spinning": True},
            weights=WeightsRecord("file" if trained else "random", "0" * 64),
            precision_proof=proof(
                precision, macs, proven=proven, reason="as asked" if proven else "3 layers are fp32"
            ),
        )

        card = str(self.path.parent / "digits.toml")
        exported = ModelInfo(
            "digits", "card:digits", info.weights, simplified=True, own_precision=None, card=card
        )
        asked = {
            "model": {"weights": {"file": "0" * 64} if trained else {"random": 0}, "width": width}
        }

        def export(folder):
            if width is not None:
                write_network(folder, width)
            return exported

        model, _ = self.store.produce(ModelInfo, asked, export, listener=SilentListener())
        recipe = {
            "test": [precision, backend, trained, proven, macs],
            "model": model.id,
            "precision": precision,
        }
        content = f"{backend} {precision} {trained}".encode() * 100
        entry = put(self.store, info, recipe, (model,), {"model.onnx": content})
        checked = VerificationInfo("images", 8, 0.1, 61.2, None, None, None, (), 80, passed)
        put(
            self.store,
            checked,
            {"artifact": {"id": entry.id, "sha256": entry.sha256("model.onnx")}},
            (entry,),
        )
        return entry

    def bench(
        self,
        *entries,
        batches=(1,),
        mean_ms=10.0,
        noise=0.2,
        count=1000,
        seed=0,
        processes=5,
        power=None,
        peaks=0,
        load_ns=None,
        **changes,
    ):
        """A bench run of `processes` processes, whose levels scatter by half a percent; with an energy counter at `power` W.

        Each takes `peaks` bytes more than the one before, and a hundredth of `load_ns` longer to load.
        """
        run = begin_run(self.path, "bench")
        measurements, begin_ns = [], 0
        levels = mean_ms * np.exp(0.005 * np.random.default_rng(seed).standard_normal(processes))
        for process, entry, batch in product(range(processes), entries, batches):
            self.counter += 1
            mean_ms = float(levels[process])
            found = replace(
                measurement(entry, batch, f"m{self.counter}", **changes),
                started_utc=get_utc_time("milliseconds"),
            )
            found = replace(
                found, process=process, host_peak_bytes=found.host_peak_bytes + process * peaks
            )
            if load_ns is not None:
                loaded = figure_from_witness(LOAD_TIME, load_ns * (1 + process / 100), None)
                found = replace(found, figures={**found.figures, LOAD_TIME.name: loaded})
            speed = {"fp32": 1.0, "fp16": 0.8, "int8": 0.6}.get(entry.info.precision, 1.0)
            drawn = Drawn(
                mean_ms * batch**0.8 * speed, noise, count, batch, seed + self.counter, power
            )
            measurements.append(write_drawn(run, found, drawn, begin_ns))
            begin_ns += Clock.advance(measurements[-1].duration_s * 2)
        write_measurements(run.path, measurements)
        return finish_run(
            run, command="optpipe bench digits", parents=[entry.id for entry in entries]
        )

    def interrupted_bench(self, entry):
        """A bench run that ended while it warmed up: samples, and none of them measured."""
        run = begin_run(self.path, "bench")
        found = measurement(entry, 4, "m1", valid=False)
        found = replace(
            found, samples=0, interrupted=True, started_utc=get_utc_time("milliseconds")
        )
        frame = drawn_samples(10.0, 0.2, 50, 4, 0).with_columns(
            pl.lit(Phase.WARM_UP, pl.UInt8).alias("phase")
        )
        (run.path / "samples").mkdir()
        frame.write_parquet(run.path / found.samples_file)
        write_measurements(run.path, [replace(found, machine_file=None)])
        return finish_run(run, command="optpipe bench digits", parents=[entry.id])

    def pair(
        self,
        baseline,
        contender,
        *,
        ratio=1.0,
        rounds=10,
        scatter=0.01,
        seed=0,
        count=1000,
        invalid=(),
        peaks=0,
        **changes,
    ):
        """A `bench --against` run in which `contender` takes `ratio` times as long, on a machine whose rounds differ by 5 %."""
        run, generator, every = begin_run(self.path, "bench"), np.random.default_rng(seed), []
        begin_ns = 0
        hours = 10.0 * np.exp(0.05 * generator.standard_normal(rounds))
        for name in islice(draw_names(seed), 2 * rounds):
            entry, factor = (baseline, 1.0) if name[0] == "a" else (contender, ratio)
            level = hours[int(name[1:])] * factor * np.exp(scatter * generator.standard_normal())
            found = measurement(entry, 1, name, valid=name not in invalid, **changes)
            found = replace(found, started_utc=get_utc_time("milliseconds"))
            found = replace(
                found,
                process=len(every),
                host_peak_bytes=found.host_peak_bytes + len(every) * peaks,
            )
            every.append(
                write_drawn(
                    run, found, Drawn(float(level), 0.2, count, 1, seed + len(every)), begin_ns
                )
            )
            begin_ns += Clock.advance(every[-1].duration_s * 2)
        write_measurements(run.path, every)
        comparison = comparison_from_measurements(every, rounds, PairMetric.P50, seed)
        (run.path / "comparison.json").write_bytes(json_from_record(comparison))
        return finish_run(
            run, command="optpipe bench --against", parents=[baseline.id, contender.id]
        )

    def turns(
        self, over, judged, *, speedup=1.5, rounds=5, trials=8, scatter=0.02, seed=0, **changes
    ):
        """A run in which both take turns on a machine whose speed doubles and halves from trial to trial."""
        run, generator = begin_run(self.path, "turns"), np.random.default_rng(seed)
        speedups, over_ns, judged_ns, now = [], [], [], 10**9
        for turn in range(rounds):
            begun, frames = now, {"a": [], "b": []}
            factor = speedup * np.exp(scatter * generator.standard_normal())
            for _trial in range(trials):
                level = 1e7 * 2.0 ** generator.uniform(-1, 1)
                for side in "ab":
                    for _ in range(5):
                        took = int(level / (factor if side == "b" else 1))
                        frames[side].append(
                            (1, 0, 0, 1, now, now, now + took, took, None, None, None)
                        )
                        now += took
            Clock.advance((now - begun) / 1e9)
            names = {name: getattr(pl, kind) for name, kind in SAMPLE_COLUMNS.items()}
            tables = {
                side: pl.DataFrame(rows, schema=names, orient="row")
                for side, rows in frames.items()
            }
            (run.path / "samples").mkdir(exist_ok=True)
            for side, table in tables.items():
                table.write_parquet(run.path / "samples" / f"{side}{turn:03}.parquet")
            figures = summarize_round(tables)
            for column, value in zip((speedups, over_ns, judged_ns), figures, strict=True):
                column.append(value)
        old, new = (measurement(one, 1, "m1", **changes).subject for one in (over, judged))
        record = TurnsRecord(
            LoadSpec(1), old, new, seed, tuple(speedups), tuple(over_ns), tuple(judged_ns)
        )
        (run.path / "turns.json").write_bytes(json_from_record(record))
        return finish_run(
            run,
            command="optpipe bench --against fp32 --turns",
            parents=[over.id, judged.id],
            measurements=rounds,
        )

    def evaluate(
        self,
        entry,
        lost=0,
        budget=None,
        n=1000,
        *,
        sha256=None,
        dataset=None,
        task="classification",
        rows=None,
        beside=(),
        first=0,
        groups=None,
        sampled=None,
        why_not=None,
        failed=False,
    ):
        """An evaluation whose source is right everywhere and whose artifact, of the file `sha256`, lost `lost` samples.

        Builds with the IDs `beside` were evaluated with it, samples are numbered from `first` and belong to `groups`.
        `dataset` says what the samples are; the `rows` of another `task` are truths and the predictions of both.
        `sampled` has the rule, the source's parts, and the build's parts of scores of plug-ins; a text withholds a score.
        With a reason `why_not`, the build has no predictions, and `failed` says whether it was tried.
        """
        sampled = sampled or {}
        run = begin_run(self.path, "evaluate")
        classes = [index % 10 for index in range(n)]
        answers = [
            [(label + 1) % 10 if index < lost else label] for index, label in enumerate(classes)
        ]
        frame = {
            "path": [str(first + index) for index in range(n)],
            "sha256": [hash_text(str(first + index)) for index in range(n)],
            "label": [None] * n,
            "class": classes,
        }
        table = pl.DataFrame(
            frame | {"source:best": [[label] for label in classes], f"{entry.id}:best": answers}
        )
        if rows is not None:
            names, n = ("truth", "source:prediction", f"{entry.id}:prediction"), len(rows[0])
            known = {"path": [str(at) for at in range(n)]}
            known["sha256"] = [hash_text(path) for path in known["path"]]
            table = pl.DataFrame(known | dict(zip(names, rows, strict=True)))
        if groups is not None:
            table = table.with_columns(pl.Series("group", groups))
        if why_not is not None:
            table = table.drop(f"{entry.id}:best")
        figures = dict[str, SampledFigure]()
        for name, (_, *parts) in sampled.items():
            reasons = [each for each in parts if isinstance(each, str)]
            figures[name] = SampledFigure(None, None, None, None, "".join(reasons))
            for model, each in zip(("source", entry.id), parts, strict=True):
                if each not in reasons:
                    table = table.with_columns(**columns_from_parts(model, {name: each}))
        table.write_parquet(run.path / "predictions.parquet")
        lines = zip(table["sha256"], table["path"], strict=True)
        drawn = hash_text("".join(f"{known}  {path}\n" for known, path in lines))
        named: dict[str, Any] = {"name": "digits/validation", "sha256": drawn, "classes": 10}
        named |= dataset or {}
        named |= {"groups": len(set(groups))} if groups else {}
        samples = Dataset(kind="images", count=n, unreadable=(), labeled=True, **named)
        row = EvaluatedModel(
            entry.info.backend, entry.info.precision, "cpu", n, entry.id, sha256=sha256
        )
        others = (EvaluatedModel("onnxruntime", "fp32", "cpu", n, each) for each in beside)
        row = replace(row, sampled=figures, why_not=why_not, failed=failed)
        source = EvaluatedModel("source", "source", "cpu", n, sampled=figures)
        judged = source, row, *others
        model = entry.manifest.parents[0]
        found = Evaluation(
            "digits",
            "card:digits",
            model,
            entry.info.weights,
            samples,
            budget,
            judged,
            "",
            task=task,
            sampled={name: rule for name, (rule, *_) in sampled.items()},
        )
        (run.path / "evaluate.json").write_bytes(json_from_record(found))
        finish = partial(
            finish_run,
            run,
            command="optpipe evaluate digits",
            parents=[entry.id, *beside],
            model="digits",
            trained=True,
        )
        again: list[Any] = [
            each for _, stored, each in recompute_evaluation(finish()) if stored in judged
        ]
        (run.path / "evaluate.json").write_bytes(
            json_from_record(replace(found, results=tuple(again)))
        )
        return finish()

    def profile(self, entry, trace, sha256=None):
        """A profile run of a recorded trace, as `optpipe profile` writes it, of the file `sha256`."""
        run = begin_run(self.path, "profile")
        name = (
            pl.col("name").cast(pl.String).replace("iter", "optpipe.iteration").cast(pl.Categorical)
        )
        write_trace(replace(trace, ranges=trace.ranges.with_columns(name)), run.path / "stage")
        whole = analysis_from_trace(trace_from_folder(run.path / "stage"))
        measured = select_measured_part(whole, None)
        found = profile_from_trace(whole, measured=measured)
        views = make_stage_views(whole, None, measured=measured)
        subject = StageSubject("fp16 batch 8", "inference", entry.id, sha256=sha256)
        stage = StageProfile(subject, "stage", None, StageFacts(), found, *views)
        record = ProfileRecord((stage,))
        (run.path / "profile.json").write_bytes(json_from_record(record))
        return finish_run(run, command="optpipe profile digits", parents=[entry.id])

    def preprocess(self, noise=1e-3, images=800, *, trained=True, pictures=(), **changes):
        """A parity run of the newest model, whose outputs are drawn; with `pictures` of its worst images."""
        *_, exported = self.store.list_entries(ModelInfo)
        generator = np.random.default_rng(3)
        outputs = generator.normal(size=(images, 10))
        rows = rows_from_outputs(
            outputs, outputs + noise * generator.normal(size=outputs.shape), classifies=True
        )
        rows = rows.with_columns(pl.format("{}.png", pl.int_range(images)).alias("image"))
        run = begin_run(self.path, "preprocess")
        rows.write_parquet(run.path / "images.parquet")
        proof = proof_from_rows(rows, trained=trained, classifies=True, refused=0)
        record = preprocess_record(proof=proof, images=images, trained=trained)
        worst = tuple(
            replace(record.parity.worst[0], image=f"{at}.png", file=f"worst-{at}.png")
            for at in range(len(pictures))
        )
        for each, content in zip(worst, pictures, strict=True):
            (run.path / each.file).write_bytes(content)
        parity = replace(record.parity, worst=worst or record.parity.worst)
        record = replace(
            record, parity=parity, **({"model_sha256": hash_model(exported.manifest)} | changes)
        )
        (run.path / "preprocess.json").write_bytes(json_from_record(record))
        return finish_run(run, command="optpipe preprocess digits", model="digits", trained=trained)

    def sign_off(self, policy, target, **wanted):
        """The verdict by `policy`, and its dossier without reports, sealed at `target`; `wanted` of the request."""
        scratch = target.with_name(f".{target.name}")
        scratch.mkdir()
        request = SignoffRequest("digits", policy_from_toml(policy.encode()), **wanted)
        collect_evidence(request, self.store, scratch)
        found = judge_dossier(read_dossier(Files(scratch)))[0]
        (scratch / "verdict.json").write_bytes(json_from_record(found))
        return found, finish_dossier(scratch, target)

    def approve(self, policy, target):
        """Signs off and makes that the baseline; what is measured next is later."""
        self.sign_off(policy, target)
        store_baseline(Files(target), self.path)
        self.counter += 100

    def release(self, policy, target, listener=None, **wanted):
        """The dossier as `optpipe signoff` writes it, with reports that have no figures."""
        request = SignoffRequest("digits", policy_from_toml(policy), **wanted)
        return sign_off(
            request, self.store, target, None, listener or SilentListener(), figures=False
        )[1]


class Clock(datetime):
    """The dates of what is drawn: they advance with the measurements that nobody waits for."""

    ahead = timedelta()

    @classmethod
    def now(cls, tz=None):
        return datetime.now(tz) + cls.ahead

    @classmethod
    def advance(cls, seconds):
        """The time in ns by which the clock of the queries advances too."""
        cls.ahead += timedelta(seconds=seconds)
        return int(seconds * 1e9)


@contextmanager
def use_drawn_dates():
    """Dates of what is drawn, from some days ago, so that none is in the future."""
    Clock.ahead = timedelta(days=-5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("optpipe.workspace.entry.datetime", Clock)
        patch.setattr("optpipe.workspace.runs.datetime", Clock)
        yield


@pytest.fixture(scope="module", autouse=True)
def _drawn_dates():
    with use_drawn_dates():
        yield


def measurement(
    entry,
    batch,
    name,
    *,
    valid=True,
    scenario="single-stream",
    mode="compute",
    streams=1,
    rate=None,
    caveats=(),
    reasons=(),
    options=None,
    max_cv=0.5,
    figures=None,
):
    return Measurement(
        id=name,
        subject=Subject(
            artifact=entry.id,
            backend=entry.info.backend,
            precision=entry.info.precision,
            device="cpu",
            model="digits",
            sha256=entry.sha256("model.onnx"),
            options=options or {},
            packages=entry.info.packages,
        ),
        load=LoadSpec(batch, Scenario(scenario), Mode(mode), streams, rate),
        verdict=Validity.VALID if valid else Validity.INVALID,
        reasons=tuple(reasons) or (() if valid else (NOT_STEADY,)),
        limits={**LIMITS, "max_cv": max_cv, "max_clock_change": 0.1},
        host_peak_bytes=200 * 2**20 + batch * 2**20,
        caveats=tuple(caveats),
        samples_file=f"samples/{name}.parquet",
        machine_file=f"machine/{name}.parquet",
        started_utc=f"2026-11-21T07:00:00.{int(name[1:]):03d}+00:00",
        duration_s=10.0,
        figures=figures or {},
    )


@dataclass(frozen=True)
class Drawn:
    """What decides the raw files of a measurement."""

    mean_ms: float
    noise_ms: float
    count: int
    batch: int
    seed: int
    power: float | None = None


@cache
def draw_files(drawn, begin_ns):
    """Samples and readings of one process as Parquet, the clock of which is `begin_ns` at its start."""
    frame = drawn_samples(drawn.mean_ms, drawn.noise_ms, drawn.count, drawn.batch, drawn.seed)
    clock = pl.col("^(time|scheduled|start|end)_ns$") + begin_ns
    files = BytesIO(), BytesIO()
    frame.with_columns(clock).write_parquet(files[0])
    drawn_machine(frame, drawn.power).with_columns(clock).write_parquet(files[1])
    return tuple(each.getvalue() for each in files)


def write_drawn(run, found, drawn, begin_ns):
    """`found` with the figures of what was drawn; processes of one run begin one after the other."""
    for path, content in zip(
        (found.samples_file, found.machine_file), draw_files(drawn, begin_ns), strict=True
    ):
        (run.path / path).parent.mkdir(exist_ok=True)
        (run.path / path).write_bytes(content)
    return recompute_measurement(found, Files(run.path))


@pytest.fixture(scope="session", autouse=True)
def _recompute_once():
    """Thousands of equal samples are judged, in dossier after dossier: each is read and computed once, known by its content."""
    known, read = {}, {}

    def recompute(stored, measured, machine, **how):
        rows = [each.hash_rows().to_numpy().tobytes() for each in (measured, machine)]
        key = json_from_record(replace(stored, started_utc="")), *rows, *sorted(how.items())
        if key not in known:
            known[key] = recompute_from_samples(stored, measured, machine, **how)
        return replace(known[key], started_utc=stored.started_utc)

    def read_once(function, files, name, *how):
        key = function, name and files.read(name), *how
        if key not in read:
            read[key] = function(files, name, *how)
        return read[key]

    recompute_from_samples = figures.recompute_from_samples
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figures, "recompute_from_samples", recompute)
        for name in ("read_samples", "_read_machine_rows"):
            patch.setattr(figures, name, partial(read_once, getattr(figures, name)))
        yield


WORDED_FOR_A_TERMINAL = ("report/terminal.py", "core/wording.py", "cli/")
"""Where an f-string may word arguments and calls: the door of the terminal."""


@pytest.fixture(scope="session", autouse=True)
def _refuse_words_too_early():
    """An f-string words an argument for the terminal, and then Python is told of it as an option: no test may come to one."""

    def word(message, form):
        place = sys._getframe(1).f_code.co_filename.rpartition("/optpipe/")[2]
        early = message.in_python() != str(message) and place.endswith(".py")
        assert not early or place.startswith(WORDED_FOR_A_TERMINAL), (place, str(message))
        return format(str(message), form)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Message, "__format__", word)
        yield


def drawn_samples(mean_ms, noise_ms, count, batch, seed):
    generator = np.random.default_rng(seed)
    durations = (1e6 * np.maximum(generator.normal(mean_ms, noise_ms, count), 0.01)).astype(
        np.int64
    )
    durations[generator.random(count) < 0.01] *= 2
    ends = np.cumsum(durations + 1000)
    starts = ends - durations
    columns = {
        "phase": np.where(np.arange(count) < count // 20, 0, 1),
        "stream": np.zeros(count),
        "input": np.arange(count) % 16,
        "images": np.full(count, batch),
        "scheduled_ns": starts,
        "start_ns": starts,
        "end_ns": ends,
        "enqueue_ns": durations,
        "h2d_ns": [None] * count,
        "compute_ns": [None] * count,
        "d2h_ns": [None] * count,
    }
    return pl.DataFrame(columns).cast(
        {name: getattr(pl, kind) for name, kind in SAMPLE_COLUMNS.items()}
    )


def drawn_machine(frame, power=None):
    first, last = frame["start_ns"].min(), frame["end_ns"].max()
    seconds = (last - first) / 1e9
    count = int(np.clip(seconds / 0.2, 2, max(40, seconds + 2)))  # read every 0.2 s, or less often
    times = np.linspace(first, last, count).astype(np.int64)
    columns = {name: [None] * len(times) for name in MACHINE_COLUMNS} | {
        "time_ns": times,
        "other_cpu_cores": np.abs(np.sin(times / 1e9)) * 0.1,
        "worker_cpu_cores": np.full(len(times), 1.9),
        "worker_waited_cores": np.zeros(len(times)),
        "worker_rss_bytes": np.full(len(times), 200 * 2**20),
        "cpu_mhz": 2600 + 50 * np.cos(times / 1e9),
    }
    if power is not None:
        watts = power * (1 + 0.02 * np.sin(times / 3e8))
        columns["gpu_energy_mj"] = np.cumsum(watts * np.diff(times, prepend=times[0]) / 1e6)
    return pl.DataFrame(columns).cast(
        {name: getattr(pl, kind) for name, kind in MACHINE_COLUMNS.items()}
    )


@pytest.fixture(scope="session")
def small_trace(tmp_path_factory):
    """Two layers, of which one runs on Tensor Cores."""
    recording = phenomena.missed_tensor_cores(12)
    recording.range("optpipe.measure", 0, 12 * 200)
    return trace_from_sqlite(recording.write(tmp_path_factory.mktemp("trace") / "trace.sqlite"))


@pytest.fixture(scope="session")
def verifier():
    """The independent verifier, as a module."""
    path = Path(__file__).parents[2] / "verifier" / "verify_dossier.py"
    spec = importlib.util.spec_from_file_location("independent_verifier", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def workspace(tmp_path):
    return Workspace(tmp_path / "workspace")


@pytest.fixture(scope="session")
def make_workspace():
    return Workspace


@pytest.fixture(scope="session")
def measured_workspace(tmp_path_factory):
    """Three precisions at two batch sizes; shared, so only to be read."""
    found = Workspace(tmp_path_factory.mktemp("measured") / "workspace")
    entries = [found.artifact(precision) for precision in ("fp32", "fp16", "int8")]
    for entry in entries:
        found.bench(entry, batches=(1, 4), processes=3)
    return found
