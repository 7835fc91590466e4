"""`deploy --tune`: searches instances, queue delay, and preferred batch sizes of the engine on a running Triton server.

All candidates of a step are models of one server and take turns under the policy's load, so that they meet the same
disturbances. The search moves to the fastest candidate that is shown to be faster and within the policy's strictest limit,
and ends when none is. Triton's own Model Analyzer measures each configuration once, one after the other.
"""

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, count, takewhile
from pathlib import Path
from secrets import randbits
from statistics import fmean
from time import perf_counter_ns
from typing import Any

import numpy as np

from optpipe.core.errors import MissingError, StageError
from optpipe.core.events import Listener
from optpipe.core.metrics.sections import LATENCY
from optpipe.core.percentile_names import percent_from_name
from optpipe.core.records import json_from_record
from optpipe.core.wording import Argument
from optpipe.deploy.check import CheckedDeployment
from optpipe.deploy.proof import (
    CONNECTIONS,
    arrange_models,
    fill_load,
    loads_from_policy,
    name_inputs,
    open_client,
    send_requests,
)
from optpipe.deploy.records import DEPLOYMENT, MODELS, Choice
from optpipe.deploy.requests import list_expected
from optpipe.deploy.server import ServerProgram, run_server
from optpipe.deploy.triton_config import CONFIG, read_config, write_config
from optpipe.measure.trials import iterate_arrivals
from optpipe.signoff.policy import Criterion, policy_from_toml
from optpipe.stats.percentiles import summary_from_ns
from optpipe.stats.ratio import Ratio, alternate, compute_exchange_p_value, ratio_from_rounds
from optpipe.workspace.file_names import POLICY
from optpipe.workspace.files import delete_tree, write_bytes, write_json
from optpipe.workspace.seal import seal_folder
from optpipe.workspace.store import Store

TUNING = "tuning.json"
"""In a deployment: the figures of every round of every candidate."""
ROUNDS = 10
"""With fewer rounds the exchange test of one among five candidates has no outcome that is rare enough."""
ERROR_RATE = 0.05
"""Probability that a step moves although all candidates are equal."""
MOST_INSTANCES = 8
FIRST_DELAY_US = 100
DELAY, PREFERRED = (
    "dynamic_batching.max_queue_delay_microseconds",
    "dynamic_batching.preferred_batch_size",
)
IN_FLIGHT = 8
"""Requests in flight if the policy names no rate."""
Setting = tuple[int, int, tuple[int, ...]]
"""Instances, the largest queue delay in µs, and preferred batch sizes."""


@dataclass(frozen=True, slots=True)
class _Load:
    """The load that every candidate receives, and the strictest latency limit of the policy."""

    inputs: Mapping[str, np.ndarray]
    rate_per_s: float | None
    about: str
    limit: Criterion | None

    def allows(self, latency_ns: Iterable[int]) -> bool:
        """Whether the latencies are shown to be within the limit."""
        if self.limit is None:
            return True
        percent = percent_from_name(self.limit.metric)
        summary = summary_from_ns(np.fromiter(latency_ns, np.int64), (percent,))
        shown = summary.percentile(percent)
        return shown is not None and shown.is_at_most(float(self.limit.threshold))


def tune_deployment(
    checked: CheckedDeployment,
    program: ServerProgram,
    seconds: float,
    store: Store,
    listener: Listener,
) -> None:
    """Writes the best configuration with its evidence into the deployment, and seals it again.

    A candidate is loaded for `seconds` in each step. Raises MissingError if the server lacks the engine's backend, StageError with
    the server's reason if it does not load a candidate.
    """
    load = _choose_load(checked)
    config = read_config(checked.folder / MODELS / checked.record.engine / CONFIG)
    best = _setting_from_config(config)
    tried, steps, server = {best}, list[dict[str, object]](), ""
    while candidates := [
        setting for setting in dict.fromkeys(_list_neighbors(best, config)) if setting not in tried
    ]:
        tried |= set(candidates)
        seed, share = randbits(32), ERROR_RATE / len(candidates)
        text = f"{len(candidates)} candidates and {_describe(best)}, {load.about}"
        with listener.step(text):
            rounds, server = _measure_settings(
                checked, program, load, (best, *candidates), seconds, seed, store
            )
        figures = {setting: list(map(fmean, rounds[setting])) for setting in rounds}
        better = {
            setting: ratio
            for setting in candidates
            if (ratio := _compare_settings(figures[best], figures[setting], share)) is not None
            and load.allows(chain.from_iterable(rounds[setting]))
        }
        steps.append(
            {
                "load": load.about,
                "server": server,
                "seed": seed,
                "before": _describe(best),
                "confidence": 1 - share,
                "rounds_ns": {_describe(setting): figures[setting] for setting in figures},
                "shown_better": {
                    _describe(setting): [ratio.value, *ratio.ci]
                    for setting, ratio in better.items()
                },
            }
        )
        if not better:
            break
        before, best = best, min(better, key=lambda setting: better[setting].value)
        listener.inform(
            f"{_describe(best)}: latency {better[best]} times that of {_describe(before)}"
        )
    why = f"tuned on {server}, {load.about}: no better setting was found after {len(steps)} steps of {ROUNDS} rounds ({TUNING})"
    _write_best(checked, config, best, steps, why)


def _choose_load(checked: CheckedDeployment) -> _Load:
    """The policy's load with a rate, or else IN_FLIGHT requests of one sample."""
    policy = policy_from_toml(checked.files.read(POLICY), str(checked.folder / POLICY))
    limits = [criterion for criterion in policy.criteria if criterion.is_of(LATENCY)]
    limit = min(limits, key=lambda criterion: float(criterion.threshold), default=None)
    loads = loads_from_policy(policy, checked.card.batch_range[2])
    paced = next((load for load in loads if load.rate_per_s is not None), None)
    known = next(list_expected(checked.folder, checked.record, checked.card)).inputs
    wanted, rows = fill_load(checked, paced or replace(next(iter(loads)), batch_size=1), known)
    about = str(wanted) if paced else f"{IN_FLIGHT} requests of one sample in flight"
    return _Load(name_inputs(checked.serving, rows), wanted.rate_per_s, about, limit)


def _measure_settings(
    checked: CheckedDeployment,
    program: ServerProgram,
    load: _Load,
    settings: Sequence[Setting],
    seconds: float,
    seed: int,
    store: Store,
) -> tuple[dict[Setting, list[list[int]]], str]:
    """The latencies in ns of each setting in each round, as models of one server that take turns; and the server's version."""
    names = {setting: f"candidate_{number}" for number, setting in enumerate(settings)}
    with store.scratch("tune") as scratch:
        folder = scratch.resolve()
        _write_candidates(checked, program, names, folder / MODELS)
        with run_server(program, folder / MODELS, folder) as (_, url, server):
            trials = {
                name: _make_trial(url, name, load.inputs, load.rate_per_s, seconds / ROUNDS)
                for name in names.values()
            }
            for trial in trials.values():
                trial()  # warms the model and the connections up
            rounds = alternate(trials, ROUNDS, seed)
    return {setting: rounds[name] for setting, name in names.items()}, server


def _compare_settings(
    before: Sequence[float], after: Sequence[float], share: float
) -> Ratio | None:
    """The ratio of mean latencies by round if a candidate is shown to be faster, with an error of at most `share`."""
    ratio = ratio_from_rounds(before, after, 1 - share)
    chance = max(ratio.p_value, compute_exchange_p_value(before, after))
    return ratio if ratio.value < 1 and chance <= share else None


def _write_best(
    checked: CheckedDeployment,
    config: Any,
    best: Setting,
    steps: Sequence[Mapping[str, object]],
    why: str,
) -> None:
    """Writes the configuration, its evidence, and its choices into the deployment, and seals it."""
    folder, record = checked.folder, checked.record
    write_config(_configure(config, best), folder / MODELS / record.engine)
    write_json(folder / TUNING, {"schema_version": 1, "chosen": _describe(best), "steps": steps})
    instances, delay_us, preferred = best
    values: dict[str, object] = {"instance_group.count": instances}
    if config.HasField("dynamic_batching"):
        values |= {DELAY: delay_us, PREFERRED: ", ".join(map(str, preferred)) or "none"}
    choices = {choice.setting: choice for choice in record.choices}
    choices |= {name: Choice(name, str(value), why) for name, value in values.items()}
    tuned = replace(record, choices=tuple(choices.values()))
    write_bytes(folder / DEPLOYMENT, json_from_record(tuned))
    seal_folder(folder)


def _setting_from_config(config: Any) -> Setting:
    batching = config.dynamic_batching
    instances = sum(group.count for group in config.instance_group)
    return instances, batching.max_queue_delay_microseconds, tuple(batching.preferred_batch_size)


def _describe(setting: Setting) -> str:
    return f"{setting[0]} instance{'s' if setting[0] > 1 else ''}, delay {setting[1]} µs, preferred {list(setting[2])}"


def _list_neighbors(setting: Setting, config: Any) -> Iterator[Setting]:
    """Settings that differ in one value."""
    instances, delay_us, preferred = setting
    for number in (instances * 2, instances // 2):
        if 1 <= number <= MOST_INSTANCES:
            yield number, delay_us, preferred
    if config.HasField("dynamic_batching"):
        for other in (delay_us * 2 or FIRST_DELAY_US, delay_us // 2, 0):
            yield instances, other, preferred
        for sizes in ((), (config.max_batch_size,)):
            yield instances, delay_us, sizes


def _configure(config: Any, setting: Setting) -> Any:
    """A copy with one group of instances."""
    candidate = type(config)()
    candidate.CopyFrom(config)
    del candidate.instance_group[1:]
    candidate.instance_group[0].count = setting[0]
    if candidate.HasField("dynamic_batching"):
        candidate.dynamic_batching.max_queue_delay_microseconds = setting[1]
        candidate.dynamic_batching.preferred_batch_size[:] = setting[2]
    return candidate


def _write_candidates(
    checked: CheckedDeployment, program: ServerProgram, names: Mapping[Setting, str], models: Path
) -> None:
    """Links the engine under each name, with its setting."""
    engine = checked.record.engine
    proven = arrange_models(checked, program, models)[engine]
    if proven.startswith("configured"):
        raise MissingError(
            f"{engine}: the server lacks its backend; tune it with the server that will serve it"
        )
    config = read_config(models / engine / CONFIG)
    for setting, name in names.items():
        shutil.copytree(models / engine, models / name, symlinks=True)
        candidate = _configure(config, setting)
        candidate.name = name
        write_config(candidate, models / name)
    for folder in models.iterdir():
        if folder.name not in names.values():
            delete_tree(folder)


def _make_trial(
    url: str, name: str, inputs: Mapping[str, np.ndarray], rate_per_s: float | None, seconds: float
) -> Callable[[], list[int]]:
    """Loads a candidate once and returns the latencies in ns: at the arrivals of a rate, or whenever one of IN_FLIGHT ends."""
    seeds = count()

    def iterate_due() -> Iterator[int]:
        end = perf_counter_ns() + seconds * 1e9
        ever = (
            iter(perf_counter_ns, None)
            if rate_per_s is None
            else iterate_arrivals(rate_per_s, next(seeds))
        )
        yield from takewhile(lambda due: due < end, ever)  # the same arrivals for every candidate

    def run_trial() -> list[int]:
        connections = IN_FLIGHT if rate_per_s is None else CONNECTIONS
        answers, failed = send_requests(
            partial(open_client, "grpc", url), name, inputs, iterate_due(), connections
        )
        if failed or not answers:
            raise StageError(
                failed[0]
                if failed
                else "no request was answered in a trial; increase " + Argument("seconds")
            )
        return [answer.latency_ns for answer in answers]

    return run_trial
