"""Which of AOTInductor's packages for single batch sizes stay; packages and times are made up here, tests/gpu has real ones."""

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optpipe.backends import inductor
from optpipe.backends.base import BuildRequest
from optpipe.backends.inductor_packages import GENERAL, name_static_package
from optpipe.backends.torch_int8 import tuning
from optpipe.core.card import InputSpec, ModelCard, Task
from optpipe.core.precision import Precision

CARD = ModelCard("small", "small", Task.OTHER, (InputSpec("x", "float32", (1, 3), (1, 3), (8, 3), batch=0),))
times = st.integers(1, 5)


@given(st.dictionaries(st.integers(1, 8), st.tuples(times | st.none(), times | st.none()), min_size=1), times)
def test_a_size_keeps_the_fastest_of_its_codes_where_it_compiles_and_beats_the_code_for_all_sizes(by_size, general):
    with TemporaryDirectory() as scratch, pytest.MonkeyPatch.context() as patch:
        folder = Path(scratch)
        made = {GENERAL: general}
        made |= {name_static_package(size, at): each for size, pair in by_size.items() for at, each in enumerate(pair)}
        failures = {name: "no" for name, each in made.items() if each is None}
        for name, each in made.items():
            if each is not None:
                (folder / name).write_text(str(each), encoding="utf-8")
        patch.setattr(inductor, "load_package", lambda package, _: int(package.read_text(encoding="utf-8")))
        patch.setattr(tuning, "compare_calls", lambda low, half, _: {1: half / low})
        patch.setattr(tuning, "is_faster", lambda speed: speed > 1)
        patch.setattr(tuning, "draw_inputs", lambda _: ())
        request = BuildRequest(CARD, Precision.FP16, folder, None, "cuda", {}, folder)
        kept, said = inductor._keep_fastest(request, sorted(by_size), failures)
        fastest = {size: min(filter(None, pair), default=general) for size, pair in by_size.items()}
        assert kept == [size for size in sorted(by_size) if fastest[size] < general]
        assert {each.name: int(each.read_text()) for each in folder.glob("*.pt2")} == {
            GENERAL: general,
            **{name_static_package(size): fastest[size] for size in kept},
        }
        assert len(said) == len(by_size) - len(kept)
        assert sum("could not be compiled: no" in each for each in said) == sum(
            set(pair) == {None} for pair in by_size.values()
        )
