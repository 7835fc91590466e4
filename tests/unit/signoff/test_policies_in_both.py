"""Both verifiers read the same policies, with the same limits, and refuse the same: no key, unit, or number is read by one alone."""

import random
import runpy
import tomllib

import pytest
from tests.fakes.dossiers import VERIFIER

from optpipe.core.errors import BadInputError
from optpipe.signoff.policy import policy_from_toml

THEIRS = runpy.run_path(str(VERIFIER))
SIZE = '[size]\nmaximum = "1 B"\n'
VALUES = (
    *('"50 ms"', '"50ms"', '"5e1 ms"', '"+50 ms"', '".5 ms"', '"5. ms"', '"1,000 ms"', '"1 000 ms"', '"0x10 ms"', '"nan ms"'),
    *('"inf ms"', '"50 MS"', '"50 µs"', '"50 μs"', '"50\\u00a0ms"', '" 50 ms "', "50", "50.0", "true", '"50"', '"-5 ms"', '"0 ms"'),
    *('"1e400 ms"', '"5_0 ms"', '"\u0665 ms"', '"50 ms ms"', '"50 %"', '""', "[1]", '"5, ms"', '"50\\tms"', '"½ ms"', '"1e-400 ms"'),
    *('"0 %"', '"101 %"', '"100 %"', '"1 points"', '"101 points"', '"0.5 AP"', '"1 RMSE"', '"5 %"', '"95 %"', '"40.4 %"', "-1", "0"),
    *('"0 queries/s"', '"500 queries/s"', "1", "1000000", "1000001", '"a\\u200b"', '"\\u0000"', '"\\u3000"', "{a=1}", "1979-05-27"),
    *('"5 samples/s"', '"5 J/sample"', '"1 GiB"', '"1 KB"', '"2 x"', '"2x"', "1.5", '"server"', '"offline"', '"int8"', "inf", "nan"),
)  # fmt: skip
PLACES = (
    *(f"[{section}]\n{key} = {{}}" for section, limits in THEIRS["SECTIONS"].items() for key in limits if section != "speedup"),
    *(f'[speedup]\nover = "fp32"\n{key} = {{}}' for key in ("minimum", "batch_size", "scenario")),
    *(f"[metrics.x]\n{key} = {{}}" for key in ("maximum", "minimum")),
    *(f"[scores.x]\n{key} = {{}}" for key in ("maximum", "minimum", "maximum_drop")),
    *(f'[latency]\np50 = "5 ms"\n{key} = {{}}' for key in ("batch_size", "length", "scenario", "mode", "streams", "rate", "over")),
    '[latency]\np50 = "5 ms"\nscenario = "server"\nrate = {}',
    '[latency]\np50 = "5 ms"\nscenario = {}\nstreams = 2',
    '[accuracy]\nmaximum_f1_drop = "1 points"\nat_threshold = {}',
    *(f'[outputs]\nminimum_snr = "3 dB"\n{key} = {{}}' for key in ("steps", "output")),
    *(f"{key} = {{}}\n{SIZE}" for key in ("name", "model", "confidence", "other")),
    *(f"{SIZE}[build]\n{key} = {{}}" for key in ("artifact", "backend", "precision", "options")),
    f"{SIZE}[build.options]\nx = {{}}",
    f"{SIZE}[evidence]\npreregistered = {{}}",
    *(f"[environment]\n{key} = {{}}" for key in ("gpu", "driver", "cpu", "python", "packages")),
    "[environment.packages]\ntorch = {}",
    *(f"{key} = {{}}" for key in ("latency", "metrics", "scores", "build", "evidence")),
)  # fmt: skip
OWN = ("p50", "mean_p90", "throughput", "cv", "memory", "efficiency", "tokens", "top1", "x-y", "A")
OF_A_GPU = (
    '[energy]\nmaximum = "1 J/image"',
    'driver = "1"',
    '[tensor_cores]\nminimum_share = "1 %"',
    '[memory]\nmaximum = "1 B"',
)
PAIRS = ("p50", "p99"), ("p50", "mean_p99"), ("mean_p90", "mean_p99")
OTHERS = (
    *(f"[metrics.{name}]\nmaximum = 5" for name in OWN),
    *(f'[scores.{name}]\nminimum = "5 %"' for name in ("drop", "top1", "EM", "agreement", "score", "x", "X", "a-b", "1a")),
    '[precision]\nfp16 = "60 %"\nint8 = "50 %"',
    *(f'[build]\nprecision = "int8"\n[precision]\nfp16 = "{share} %"' for share in (50, 60)),
    *(f'[environment]\ngpu = "none"\n{more}' for more in OF_A_GPU),
    *(f'[latency]\n{one} = "5 ms"\n{other} = "4 ms"' for one, other in PAIRS),
    *(f'[[{name}]]\n{key} = "1 B"\n[[{name}]]\n{key} = "2 B"' for name, key in (("size", "maximum"), ("metrics.x", "maximum"))),
    '[[latency]]\np50 = "5 ms"\nbatch_size = 1\n[[latency]]\np99 = "4 ms"',
    f"[[build]]\n{SIZE}",
    f"{SIZE}{'.'.join('a' * 70)} = 1",
    *("", "[latency]", '[latency]\nx = "1 ms"', f'{SIZE}[build]\nx = "1"', '[LATENCY]\np50 = "1 ms"', "[speedup]\nminimum = 2"),
    '[latency]\np50 = "5 ms"\nscenario = "offline"\nrate = "5 queries/s"',
    '[latency]\np50 = "5 ms"\nscenario = "multi-stream"',
    '[accuracy]\nat_threshold = "40 %"\nminimum_score = "3 points"',
    '[outputs]\nminimum_snr = "20 dB"\noutput = "a.b"\nsteps = 3',
    '[metrics.x]\nmode = "compute"',
)  # fmt: skip
EVERY = [f"schema = 1\n{place.format(value)}" for place in PLACES for value in VALUES]
EVERY += [f"schema = 1\n{other}" for other in OTHERS]
EVERY += [f"schema = {version}\n{SIZE}" for version in ("2", "1.0", '"1"', "true")]


def read_by_optpipe(text):
    try:
        criteria = policy_from_toml(text.encode()).criteria
    except BadInputError:
        return None
    return [(one.name, one.threshold, str(one.dimension or "")) for one in criteria]


def read_by_verifier(text):
    try:
        document = {"confidence": "95%", "name": "unnamed policy"} | tomllib.loads(text)
        THEIRS["require_policy"](document)
    except (LookupError, ValueError, TypeError, AttributeError):
        return None
    found = THEIRS["read_policy"](document)
    return [(one.name, one.limit, str(one.unit or "")) for one in found]


@pytest.mark.parametrize("count", [400, pytest.param(None, marks=pytest.mark.slow)])
def test_a_policy_is_read_alike_or_refused_by_both(count):
    chosen = EVERY if count is None else random.Random(53).sample(EVERY, count)
    wrong, read = [], 0
    for text in chosen:
        mine, theirs = read_by_optpipe(text), read_by_verifier(text)
        read += mine is not None
        same = mine == theirs or (
            mine and theirs and all(map(is_same_limit, mine, theirs)) and len(mine) == len(theirs)
        )
        wrong += [] if same else [f"{text!r}: optpipe {mine}, the verifier {theirs}"]
    assert not wrong, "\n".join(wrong)
    assert read > len(chosen) / 10


def is_same_limit(one, other):
    return one[::2] == other[::2] and one[1] == pytest.approx(other[1], rel=1e-9)
