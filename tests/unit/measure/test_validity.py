"""Validity on a simulated clock: samples are made, nothing is timed."""

import importlib
from math import sqrt
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from optpipe.core.load import LoadSpec, Mode, Scenario
from optpipe.core.measurement import (
    MACHINE_COLUMNS,
    SAMPLE_COLUMNS,
    Measurement,
    OutputCheck,
    Subject,
    Validity,
)
from optpipe.measure.pair import PAIR_LIMITS
from optpipe.measure.validity import LIMITS, ValidityEvidence, find_reasons
from optpipe.measure.worker.checks import draw_rotation, probe_cache
from optpipe.measure.worker.messages import CacheProbe
from optpipe.stats.stability import compute_trend_p_value, remove_input_costs

GENERATOR = np.random.default_rng(5)
VERIFIER = importlib.import_module("verifier.verify_dossier")
RIGHT = OutputCheck(16, passed=True, reference="r", relative_error=0.0, tells_inputs_apart=True)


def samples(durations_ms, enqueue_ms=None, compute_ms=None, copies_ms=None, waited_ms=0.0):
    durations = (np.asarray(durations_ms) * 1e6).astype(np.int64)
    starts = np.concatenate([[0], np.cumsum(durations)[:-1]])
    count = len(durations)

    def column(value):
        return (
            [None] * count
            if value is None
            else (np.broadcast_to(np.asarray(value), count) * 1e6).astype(np.int64)
        )

    waited = (np.broadcast_to(np.asarray(waited_ms), count) * 1e6).astype(np.int64)
    values = {
        "phase": [1] * count,
        "stream": [0] * count,
        "input": [0] * count,
        "images": [4] * count,
        "scheduled_ns": starts - waited,
        "start_ns": starts,
        "end_ns": starts + durations,
        "enqueue_ns": durations if enqueue_ms is None else column(enqueue_ms),
        "h2d_ns": column(copies_ms),
        "compute_ns": column(compute_ms),
        "d2h_ns": column(copies_ms),
    }
    return pl.DataFrame(
        values, schema={name: getattr(pl, kind) for name, kind in SAMPLE_COLUMNS.items()}
    )


def machine(**columns):
    count = max((len(values) for values in columns.values()), default=0)
    empty = {name: columns.get(name, [None] * count) for name in MACHINE_COLUMNS}
    return pl.DataFrame(
        empty, schema={name: getattr(pl, kind) for name, kind in MACHINE_COLUMNS.items()}
    )


def codes(
    frame=None, *, on_gpu=False, output_check=RIGHT, interrupted=False, limits=None, **changes
):
    calm = machine(time_ns=[0, 1, 2], other_cpu_cores=[0.0] * 3, worker_waited_cores=[0.0] * 3)
    load = LoadSpec(
        4,
        **{
            name: changes.pop(name)
            for name in ("scenario", "mode", "rate_per_s")
            if name in changes
        },
    )
    subject = Subject("a", "fake", "fp32", "cuda:0" if on_gpu else "cpu", affinity=(0, 1))
    found = Measurement(
        "m",
        subject,
        load,
        Validity.VALID,
        (),
        output_check=output_check,
        interrupted=interrupted,
        limits=limits or {},
        machine_file="m.parquet",
    )
    given = {
        "samples": samples(level()) if frame is None else frame,
        "machine": calm,
        "wanted_samples": 100,
    }
    evidence = ValidityEvidence(found, **{**given, "cache_probe": probe(1.0), **changes})
    return {reason.code: reason.invalidates for reason in find_reasons(evidence)}


def probe(ratio, spread=0.02, stale=False):
    """Twelve inputs seen before in `ratio` times the time of as many new ones."""
    noise = np.random.default_rng(0).standard_normal(12)
    known = (1e6 * ratio * np.exp(spread * noise)).astype(int)
    return CacheProbe(known_ns=tuple(known.tolist()), new_ns=(10**6,) * 12, stale=stale)


def level(count=1000, spread=0.01, base=1.0):
    return base * np.exp(spread * GENERATOR.standard_normal(count))


def test_a_steady_level_has_no_reason():
    assert codes() == {}


@pytest.mark.parametrize(
    ("frame", "code"),
    [
        (samples(level() * np.linspace(1, 1.08, 1000)), "drift"),
        (samples(np.where(GENERATOR.random(1000) < 0.3, level(base=1.4), level())), "bimodal"),
        (samples(level(spread=0.04)), "dispersion"),
        (samples(level(count=99)), "too-few-samples"),
        (
            samples(np.append(level(count=999), 2.0)),
            "dispersion",
        ),  # one outlier in a thousand: never trimmed
    ],
)
def test_faults_in_the_samples(frame, code):
    assert codes(frame).get(code) is True


@pytest.mark.parametrize(
    ("columns", "code"),
    [
        ({"other_cpu_cores": [0.9, 0.9, 1.0]}, "loaded-host"),
        ({"gpu_other_processes": [0, 1, 1]}, "busy-gpu"),
        ({"gpu_throttle_reasons": [0, 0x08, 0]}, "throttled"),
        ({"gpu_throttle_reasons": [0, 0x40, 0]}, "throttled"),
        ({"gpu_sm_mhz": [300, 1980, 1980, 1500, 1980, 300]}, "clocks-moved"),
        ({"gpu_temperature_c": [60, 88, 70]}, "hot"),
    ],
)
def test_faults_of_the_machine(columns, code):
    assert codes(
        machine=machine(time_ns=list(range(len(next(iter(columns.values()))))), **columns)
    ) == {code: True}


@pytest.mark.parametrize(
    "columns",
    [
        {"gpu_throttle_reasons": [0x01, 0x02, 0x00]},  # idle and clocks set by a person
        {"gpu_sm_mhz": [300, 1980, 1980, 1965, 300]},  # idle ends
        {"other_cpu_cores": [0.1, 0.1, 0.1]},
    ],
)
def test_what_a_calm_machine_shows_is_no_fault(columns):
    assert codes(machine=machine(**columns)) == {}


def test_load_of_5_percent_of_the_cores_is_flagged_where_as_small_a_difference_is_looked_for():
    loaded = machine(other_cpu_cores=[0.1, 0.1, 0.1])
    assert codes(machine=loaded, limits=PAIR_LIMITS) == {"loaded-host": True}
    calm = machine(other_cpu_cores=[0.04, 0.04, 0.04])
    assert codes(machine=calm, limits=PAIR_LIMITS) == {}


CAPPED, FREE = 0x04, 0


@pytest.mark.parametrize(
    ("masks", "moved"),
    [
        ([CAPPED] * 20, False),
        ([CAPPED, FREE] * 10, False),  # a card close to its cap
        ([FREE] * 5 + [CAPPED] * 15, True),  # the cap came later
        ([CAPPED] * 15 + [FREE] * 5, True),
        ([CAPPED] + [FREE] * 19, True),
        ([CAPPED] * 7, True),  # too few readings to tell
    ],
)
def test_clocks_that_move_at_the_power_cap_throughout_are_its_steady_state(masks, moved):
    clocks = [1980, 1740, 1755, 1890] * 5
    capped = machine(
        gpu_throttle_reasons=[0, *masks, 0], gpu_sm_mhz=[300, *clocks[: len(masks)], 300]
    )
    assert codes(machine=capped, limits=LIMITS) == {
        "power-capped": False,
        **({"clocks-moved": True} if moved else {}),
    }
    memory = machine(gpu_throttle_reasons=[CAPPED] * 22, gpu_mem_mhz=[300, *clocks, 300])
    assert "clocks-moved" in codes(machine=memory, limits=LIMITS)


def test_a_record_from_before_the_rule_of_the_power_cap_keeps_its_verdict():
    capped = machine(gpu_throttle_reasons=[CAPPED] * 22, gpu_sm_mhz=[1980, 1740] * 11)
    assert "clocks-moved" in codes(machine=capped)
    assert "clocks-moved" not in codes(machine=capped, limits=LIMITS)


def slow_noise(spread, correlation, count=700, seed=0):
    noise = np.random.default_rng(seed).standard_normal(count + 9) * sqrt(1 - correlation**2)
    noise[0] /= sqrt(1 - correlation**2)
    for at in range(1, len(noise)):
        noise[at] += correlation * noise[at - 1]
    return np.exp(spread * noise[:count])


@pytest.mark.parametrize("correlation", [0.99, 0.997, 0.999])
@pytest.mark.slow
def test_slow_noise_of_a_busy_host_is_no_drift(correlation):
    found = [
        codes(samples(slow_noise(0.015, correlation, seed=seed)), limits=LIMITS)
        for seed in range(40)
    ]
    assert sum("drift" in each for each in found) <= 1
    assert any(each.get("slow-noise") is False for each in found)


@pytest.mark.parametrize("shape", [np.linspace(0, 1, 700), 2 * abs(np.linspace(-0.5, 0.5, 700))])
def test_a_drift_is_found_beside_the_noise(shape):
    drifting = samples(np.exp(0.04 * shape) * level(700))
    assert codes(drifting, limits=LIMITS).get("drift") is True


def test_a_record_from_before_the_rule_of_slow_noise_keeps_its_verdict():
    before = {name: each for name, each in LIMITS.items() if name != "drift_risk"}
    moved = next(
        frame
        for seed in range(40)
        if "slow-noise"
        in codes(frame := samples(slow_noise(0.015, 0.997, seed=seed)), limits=LIMITS)
    )
    assert codes(moved, limits=before).get("drift") is True


def measure_inputs(costs, count=700, spread=0.003):
    which = np.arange(count) % len(costs)
    frame = samples(np.asarray(costs)[which] * level(count, spread=spread))
    return frame.with_columns(input=pl.Series(which, dtype=pl.UInt32))


@pytest.mark.parametrize("costs", [[1.0] * 7 + [1.06], [1.0, 1.3], [1, 2, 3, 4, 5, 6, 7, 8]])
def test_inputs_of_different_cost_are_one_load(costs):
    frame = measure_inputs(costs)
    assert codes(frame, limits=LIMITS) == {}
    assert codes(frame) != {}  # as records from before the rule


def test_a_second_speed_is_found_among_inputs_of_different_cost():
    frame = measure_inputs([1.0, 1.5, 2.0])
    slow = np.where(GENERATOR.random(700) < 0.3, 1.2, 1.0)
    frame = samples(((frame["end_ns"] - frame["start_ns"]).to_numpy() / 1e6) * slow).with_columns(
        frame["input"]
    )
    assert codes(frame, limits=LIMITS).get("bimodal") is True


def test_an_input_that_was_measured_once_does_not_hide_a_second_speed():
    frame = samples(np.where(GENERATOR.random(700) < 0.3, level(700, base=1.4), level(700)))
    alone = frame.with_columns(input=pl.Series(range(700), dtype=pl.UInt32))
    assert codes(alone, limits={**LIMITS, "input_repeats": 1}).get("bimodal") is True


@pytest.mark.parametrize("seed", range(12))
def test_the_verifier_finds_the_same_trends_and_costs(seed):
    generator = np.random.default_rng(seed)
    values = slow_noise(0.015, (0.0, 0.9, 0.997)[seed % 3], seed=seed)
    values *= np.linspace(1, 1 + generator.uniform(0, 0.05), len(values))
    assert VERIFIER.is_slow_noise(pl.Series(values)) == (
        compute_trend_p_value(values) > LIMITS["drift_risk"]
    )
    which = generator.integers(0, 5, len(values))
    theirs = VERIFIER.remove_input_costs(pl.Series(values), pl.Series(which), 10)
    np.testing.assert_allclose(theirs.to_numpy(), remove_input_costs(values, which), rtol=1e-12)


def test_a_gpu_that_is_capped_and_hot_is_throttled():
    also_hot = machine(gpu_throttle_reasons=[0, 0x44, 0])
    assert codes(machine=also_hot) == {"power-capped": False, "throttled": True}


def test_a_large_host_may_be_busy_beside_a_gpu_as_long_as_the_worker_need_not_wait():
    busy = machine(other_cpu_cores=[40.0] * 3, worker_waited_cores=[0.0] * 3)
    assert codes(machine=busy, on_gpu=True) == {}
    waiting = machine(other_cpu_cores=[40.0] * 3, worker_waited_cores=[0.2] * 3)
    assert codes(machine=waiting, on_gpu=True) == {"loaded-host": True}


def test_properties_of_the_artifact_are_notes():
    assert codes(samples(level(), enqueue_ms=0.9, compute_ms=level())) == {"enqueue-bound": False}
    slow_copies = samples(level(), enqueue_ms=0.01, compute_ms=level(base=0.3), copies_ms=0.4)
    assert codes(slow_copies, mode=Mode.END_TO_END) == {"transfer-bound": False}


def test_answers():
    wrong = OutputCheck(16, passed=False, reference="r", relative_error=0.5, why_not="differs")
    assert codes(output_check=wrong) == {"wrong-output": True}
    alike = OutputCheck(
        16, passed=True, reference="r", relative_error=0.0, tells_inputs_apart=False
    )
    assert codes(output_check=alike) == {"inputs-alike": False}
    assert codes(cache_probe=probe(0.2)) == {"cached-answer": True}
    assert codes(cache_probe=probe(0.6, spread=0.5)) == {}  # noise is no cache
    assert codes(cache_probe=probe(1.0, stale=True)) == {"stale-answer": True}


class SmallNetwork:
    """A session and its lane that take 10 µs, and 4 µs for memory, or for content, that they were given before."""

    def __init__(self, measured, *, keeps_answers):
        self.keeps_answers, self.calls = keeps_answers, 0
        self.given: list[np.ndarray] = [measured]

    def replace(self, _index, batch):
        self.batch = batch["x"]

    def stage(self, _index):
        pass

    def query(self):
        warm = any(np.shares_memory(self.batch, each) for each in self.given)
        known = self.keeps_answers and any(np.array_equal(self.batch, each) for each in self.given)
        self.given.append(self.batch)
        self.calls += 1
        return 0, (4_000 if warm or known else 10_000) + 10 * (self.calls % 7), 0, -1, -1, -1

    def outputs(self):
        return {"y": self.batch}

    def on_host(self, kept):
        return kept

    def run(self, batch):
        return {"y": batch["x"]}


@pytest.mark.parametrize("keeps_answers", [True, False])
def test_warm_memory_is_no_cache_of_answers(keeps_answers):
    """At a few microseconds a call, memory in the processor's cache alone would look like one."""
    turns = draw_rotation({"x": np.arange(64000, dtype=np.float32).reshape(64, 1000)}, 4, seed=0)
    network: Any = SmallNetwork(turns.batches[0]["x"], keeps_answers=keeps_answers)
    found = probe_cache(network, network, turns, 12, 0, 1e-3)
    assert codes(cache_probe=found) == ({"cached-answer": True} if keeps_answers else {})


def test_a_server_that_falls_behind():
    behind = samples(level(), waited_ms=np.linspace(0, 500, 1000))
    assert codes(behind, scenario=Scenario.SERVER, rate_per_s=2000.0) == {"falling-behind": True}
    assert codes(samples(level(), waited_ms=0.2), scenario=Scenario.SERVER, rate_per_s=500.0) == {}


def test_warm_up_and_interruption():
    assert codes(steady=False) == {"not-steady": True}
    assert codes(interrupted=True) == {"interrupted": True}


@given(factor=st.floats(1.0, 10.0), seed=st.integers(0, 50))
def test_a_looser_limit_never_adds_a_reason(factor, seed):
    """A drift that is tolerated may be named as slow noise, which is a note and no reason."""
    noise = np.exp(0.04 * np.random.default_rng(seed).standard_normal(1000))
    frame = samples(noise * np.linspace(1, 1.1, 1000))
    loose = {
        **LIMITS,
        "max_cv": LIMITS["max_cv"] * factor,
        "max_drift": LIMITS["max_drift"] * factor,
    }
    assert set(codes(frame, limits=loose)) - {"slow-noise"} <= set(codes(frame))
