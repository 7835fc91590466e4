"""Which options win on a simulated runtime, and that what is tried is what the backends take."""

import pytest
from tests.fakes.measurements import planted

from optpipe.backends.registry import BACKENDS, get_runtime_options, resolve_effective_options
from optpipe.core.measurement import Reason, Subject
from optpipe.measuring.tune import (
    choose_options,
    list_alternatives,
    list_choices,
    tune_options,
)

DEFAULTS = {
    "nhwc": True,
    "cuda_graph": True,
    "cudnn_search": "EXHAUSTIVE",
    "fuse_conv_bias": False,
    "threads": 0,
    "unknown": 1,
}
PLACES = [(name, device) for name, backend in BACKENDS.items() for device in backend.devices()]


def tuned(latency, reasons=lambda _options: (), fixed=()):
    def measured(options):
        invalid = [Reason(code, code, "remedy", invalidates=True) for code in reasons(options)]
        subject = Subject("a", "fake", "fp32", "cpu", options=options)
        return tuple(planted(subject, size, latency(options, size), reasons=invalid) for size in (1, 64))

    return tune_options(measured, DEFAULTS, 4, fixed)


def test_tuning_finds_the_fastest_and_nothing_outside_the_choices():
    trials = tuned(lambda options, size: size * (0.5 if not options["nhwc"] and options["threads"] == 2 else 1.0))
    assert all(trial.options["unknown"] == 1 for trial in trials)
    joint = tuned(lambda options, size: size * (1 - 0.2 * (not options["nhwc"]) - 0.3 * (options["threads"] == 2)))
    assert choose_options(joint, 64)["nhwc"] is False
    assert choose_options(joint, 64)["threads"] == 2


def test_nothing_is_tried_twice_and_what_was_asked_for_stays():
    trials = tuned(lambda options, size: size * (1 - 0.2 * (not options["nhwc"])), fixed={"threads": 0, "nhwc": True})
    options = [tuple(trial.options.items()) for trial in trials]
    assert len(options) == len(set(options))
    assert {(trial.options["threads"], trial.options["nhwc"]) for trial in trials} == {(0, True)}


def test_noise_does_not_move_the_defaults():
    trials = tuned(lambda options, size: size * (0.99 if not options["nhwc"] else 1.0))
    assert choose_options(trials, 1) == DEFAULTS


def test_a_wrong_answer_never_wins():
    trials = tuned(
        lambda options, size: size * (1.0 if options["nhwc"] else 0.1),
        reasons=lambda options: () if options["nhwc"] else ("wrong-output",),
    )
    assert choose_options(trials, 1)["nhwc"] is True


def test_what_is_tried_are_the_options_of_the_backends_and_all_of_them():
    assert set(list_choices(4)) == {option for place in PLACES for option in get_runtime_options(*place)}


@pytest.mark.parametrize(("name", "device"), PLACES)
def test_every_alternative_is_another_value_that_the_backend_takes(name, device):
    defaults = get_runtime_options(name, device)
    assert list_alternatives(defaults, 4).keys() == defaults.keys(), "an option without an alternative cannot be tuned"
    for option, values in list_alternatives(defaults, 4).items():
        for value in values:
            found = resolve_effective_options({"backend": name, "device": device}, {option: str(value)})
            assert found == {**defaults, option: value}
            assert value != defaults[option]
            assert type(value) is type(defaults[option])
