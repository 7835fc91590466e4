"""Which options win on a simulated runtime, and that what is tried is what the backends take."""

from dataclasses import replace

import numpy as np
import pytest
from tests.fakes.entries import artifact_info
from tests.fakes.measurements import planted

from optpipe.backends.registry import BACKENDS, resolve_effective_options
from optpipe.core.bench_record import TuningRecord
from optpipe.core.measurement import Reason, Subject
from optpipe.measure.race import list_alternatives, list_choices, tune_options

DEFAULTS: dict[str, bool | int | str] = {
    "nhwc": True,
    "cuda_graph": True,
    "cudnn_search": "EXHAUSTIVE",
    "fuse_conv_bias": False,
    "threads": 0,
    "unknown": 1,
}
PLACES = [(name, device) for name, backend in BACKENDS.items() for device in backend.devices()]


SIZES = (1, 64)


def tuned(latency, reasons=lambda _options: (), fixed=(), noise=0.0, seed=0):
    generator = np.random.default_rng(seed)

    def measured(options):
        invalid = [Reason(code, code, "remedy", invalidates=True) for code in reasons(options)]
        subject = Subject("a", "fake", "fp32", "cpu", options=options)
        level = np.exp(noise * generator.standard_normal())
        return tuple(planted(subject, size, level * latency(options, size), reasons=invalid) for size in SIZES)

    return tune_options(measured, TuningRecord("a", "a", seed), DEFAULTS, SIZES, 4, fixed)


def test_tuning_finds_the_fastest_and_nothing_outside_the_choices():
    joint = tuned(lambda options, size: size * (1 - 0.2 * (not options["nhwc"]) - 0.3 * (options["threads"] == 2)))
    assert all(trial.options["unknown"] == 1 for trial in joint.trials)
    for size in SIZES:
        assert joint.chosen[size]["nhwc"] is False
        assert joint.chosen[size]["threads"] == 2
        assert joint.final[size].value == pytest.approx(0.5)


def test_what_is_faster_at_one_size_only_is_chosen_there():
    found = tuned(lambda options, size: size * (0.8 if not options["nhwc"] and size == 64 else 1.0))
    assert found.chosen[64]["nhwc"] is False
    assert found.chosen[1] == DEFAULTS


def test_every_trial_has_its_own_options_and_what_was_asked_for_stays():
    found = tuned(lambda options, size: size * (1 - 0.2 * (not options["nhwc"])), fixed={"threads": 0, "nhwc": True})
    options = [tuple(trial.options.items()) for trial in found.trials]
    assert len(options) == len(set(options))
    assert {(trial.options["threads"], trial.options["nhwc"]) for trial in found.trials} == {(0, True)}


def test_what_lags_behind_is_not_started_again():
    found = tuned(lambda options, size: size * (2.0 if options["threads"] else 1.0))
    tried = {trial.options["threads"]: len(trial.verdicts[1]) for trial in found.trials}
    assert [tried[threads] for threads in (1, 2, 4)] == [1, 1, 1]


@pytest.mark.parametrize("noise", [0.005, 0.02])
@pytest.mark.slow
def test_noise_does_not_move_the_defaults(noise):
    found = [tuned(lambda _options, size: size, noise=noise, seed=seed) for seed in range(60)]
    assert sum(any(each.chosen[size] != DEFAULTS for size in SIZES) for each in found) <= 6


def test_a_wrong_answer_never_wins():
    found = tuned(
        lambda options, size: size * (1.0 if options["nhwc"] else 0.1),
        reasons=lambda options: () if options["nhwc"] else ("wrong-output",),
    )
    assert found.chosen[1]["nhwc"] is True


def test_nothing_is_chosen_of_an_interrupted_tuning():
    def measured(options):
        stopped = replace(planted(Subject("a", "fake", "fp32", "cpu"), 1, 1.0), interrupted=True)
        return (stopped,)

    assert tune_options(measured, TuningRecord("a", "a", 0), DEFAULTS, (1,), 4).chosen == {}


def test_without_anything_to_try_the_defaults_are_used():
    found = tuned(lambda _options, size: size, fixed=DEFAULTS)
    assert found.chosen == {1: DEFAULTS, 64: DEFAULTS}
    assert len(found.trials) == 1


def tunable_options(name, device):
    """The options of a session but for files, which change where something lies and not how fast it runs."""
    return {option: value for option, value in BACKENDS[name].runtime_options(device).items() if value != ""}


def test_what_is_tried_are_the_options_of_the_backends_and_all_of_them():
    assert set(list_choices(4)) == {option for name, device in PLACES for option in tunable_options(name, device)}


@pytest.mark.parametrize(("name", "device"), PLACES)
def test_every_alternative_is_another_value_that_the_backend_takes(name, device):
    defaults = BACKENDS[name].runtime_options(device)
    tunable = tunable_options(name, device)
    assert list_alternatives(defaults, 4).keys() == tunable.keys(), "an option without an alternative cannot be tuned"
    for option, values in list_alternatives(defaults, 4).items():
        for value in values:
            found = resolve_effective_options(artifact_info(backend=name, device=device), {option: str(value)})
            assert found == {**defaults, option: value}
            assert value != defaults[option]
            assert type(value) is type(defaults[option])
