"""Which runtime options are fastest for this artifact and batch here. One option at a time from the defaults.

What failed or answers wrongly cannot win, and the winner must beat the defaults by more than noise: a choice that flips
from run to run would be worse than the defaults. A short look that is INVALID for noise counts all the same, for the
winner is then measured in full and judged. Options that change the arithmetic (TF32) are never touched.
"""

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from math import log2
from typing import Any

from optpipe.core.measurement import Measurement
from optpipe.measuring.slo import has_figures, is_valid
from optpipe.measuring.validity import WRONG_OUTPUTS

MIN_TUNING_GAIN = 0.02
"""An option is changed only for at least this much more throughput."""


@dataclass(frozen=True, slots=True)
class Trial:
    """Options that were tried, with what they gave at each batch size."""

    options: Mapping[str, Any]
    measurements: tuple[Measurement, ...]


def list_choices(cpus: int) -> dict[str, tuple[Any, ...]]:
    """The values worth trying, by option; a test holds the names against what the backends' sessions take.

    Of `threads`, powers of two up to all processors; its default 0 leaves the number and their places to the runtime.
    """
    threads = sorted({1 << power for power in range(cpus.bit_length()) if 1 << power <= cpus} | {cpus})
    return {
        "nhwc": (True, False),
        "fuse": (True, False),
        "cuda_graph": (True, False),
        "fuse_conv_bias": (False, True),
        "cudnn_search": ("EXHAUSTIVE", "HEURISTIC", "DEFAULT"),
        "threads": tuple(threads),
        "spinning": (True, False),
    }


def list_alternatives(defaults: Mapping[str, Any], cpus: int, fixed: Container[str] = ()) -> dict[str, tuple[Any, ...]]:
    """The values to try beside `defaults`, by option; none of an option that is `fixed`."""
    found = {
        name: tuple(value for value in values if value != defaults[name])
        for name, values in list_choices(cpus).items()
        if name in defaults and name not in fixed
    }
    return {name: values for name, values in found.items() if values}


def tune_options(
    measure: Callable[[Mapping[str, Any]], tuple[Measurement, ...]],
    defaults: Mapping[str, Any],
    cpus: int,
    fixed: Container[str] = (),
) -> tuple[Trial, ...]:
    """Tries the defaults, then each other value of each option with the best so far in the others; at every batch size.

    `measure_load` loads the artifact with some options and measures all batch sizes. What is `fixed` was asked for and stays.
    """
    trials = [Trial(dict(defaults), measure(defaults))]
    best = dict(defaults)
    for name, values in list_alternatives(defaults, cpus, fixed).items():
        for value in values:
            if any(each.interrupted for each in trials[-1].measurements):
                return tuple(trials)
            options = best | {name: value}
            trials.append(Trial(options, measure(options)))
        best = dict(_find_best_overall(trials).options)
    return tuple(trials)


def choose_options(trials: Sequence[Trial], batch_size: int) -> Mapping[str, Any]:
    """The options to use at `batch_size`: the first trial's (the defaults) unless another is clearly faster and valid."""
    rates = [(trial.options, _get_rate(trial, batch_size)) for trial in trials]
    default_options, default_rate = rates[0]
    options, rate = max(rates, key=lambda each: each[1])
    return options if rate > default_rate * (1 + MIN_TUNING_GAIN) else default_options


def _get_rate(trial: Trial, batch_size: int) -> float:
    """Throughput at a batch size; zero for what failed or is not `is_usable`."""
    for each in trial.measurements:
        if each.batch_size == batch_size and has_figures(each) and each.throughput_images_per_s and is_usable(each):
            return each.throughput_images_per_s.value
    return 0.0


def is_usable(measurement: Measurement) -> bool:
    """Valid, or invalid only for noise: options are compared on a short look, and the winner is measured in full."""
    noise = {
        "dispersion",
        "too-few-samples",
        "loaded-host",
        "drift",
        "not-steady",
        "bimodal",
        "clocks-moved",
        "throttled",
    }
    return is_valid(measurement) or all(reason.code in noise for reason in measurement.reasons if reason.invalidates)


def _find_best_overall(trials: Sequence[Trial]) -> Trial:
    """The trial with the largest product of throughputs over the batch sizes; the first of equals."""
    sizes = [each.batch_size for each in trials[0].measurements]

    def product(trial: Trial) -> float:
        value = 1.0
        for size in sizes:
            value *= _get_rate(trial, size) / max(_get_rate(trials[0], size), 1e-9)
        return value

    best = trials[0]
    for trial in trials[1:]:
        if product(trial) > product(best) * (1 + MIN_TUNING_GAIN):
            best = trial
    return best


def choose_tuning_sizes(sizes: Sequence[int]) -> tuple[int, ...]:
    """The sizes at which options are tried: both ends and the middle; the others take the nearest one's choice."""
    return tuple(dict.fromkeys((sizes[0], sizes[len(sizes) // 2], sizes[-1])))


def record_from_trials(
    artifact: str, label: str, trials: Sequence[Trial], options: Mapping[int, Mapping[str, Any]]
) -> dict[str, Any]:
    """What was tried and chosen, for `tuning.json`."""
    return {
        "artifact": artifact,
        "label": label,
        "chosen": {str(size): dict(each) for size, each in options.items()},
        "trials": [
            {
                "options": dict(trial.options),
                "throughput_images_per_s": {
                    str(each.batch_size): each.throughput_images_per_s.value if each.throughput_images_per_s else None
                    for each in trial.measurements
                },
                "verdicts": {str(each.batch_size): str(each.verdict) for each in trial.measurements},
                "reasons": {
                    str(each.batch_size): [reason.code for reason in each.reasons] for each in trial.measurements
                },
                "wrong_answers": [
                    each.batch_size
                    for each in trial.measurements
                    if any(reason.code in WRONG_OUTPUTS for reason in each.reasons)
                ],
            }
            for trial in trials
        ],
    }


def find_nearest_options(options: Mapping[int, Mapping[str, Any]], size: int) -> Mapping[str, Any]:
    """What was chosen at the tuned size closest to `size`, on a scale of powers of two."""
    return options[min(options, key=lambda known: abs(log2(known / size)))]
