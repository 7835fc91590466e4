"""Which of AOTInductor's packages for single batch sizes stay; packages and times are made up here, tests/gpu has real ones."""

from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optpipe.backends import inductor
from optpipe.backends.base import BuildRequest
from optpipe.backends.inductor_packages import GENERAL, name_static_package
from optpipe.core.card import ModelCard, Task
from optpipe.core.precision import Precision
from optpipe.core.tensors import InputSpec

CARD = ModelCard("small", "small", Task.OTHER, (InputSpec("x", "float32", (1, 3), (1, 3), (8, 3), batch=0),))
times = st.integers(1, 5)


@given(st.dictionaries(st.integers(1, 8), st.tuples(times, times), min_size=1), times)
def test_a_size_keeps_the_fastest_of_its_codes_where_it_beats_the_code_for_all_sizes(by_size, general):
    with TemporaryDirectory() as scratch, pytest.MonkeyPatch.context() as patch:
        folder = Path(scratch)
        made = {GENERAL: general}
        made |= {
            name_static_package(size, variant): found
            for size, pair in by_size.items()
            for variant, found in enumerate(pair)
        }
        for name, found in made.items():
            (folder / name).write_text(str(found), encoding="utf-8")
        patch.setattr(inductor, "load_package", lambda package, _: int(package.read_text(encoding="utf-8")))
        patch.setattr(
            inductor, "compare_calls", lambda low, half, _: (SimpleNamespace(pays=low < half, speed=half / low),)
        )
        patch.setattr(inductor, "draw_inputs", lambda _: ())
        request = BuildRequest(CARD, Precision.FP16, folder, None, "cuda", {}, folder)
        kept, said = inductor._keep_fastest(request, sorted(by_size))
        assert kept == [size for size, pair in sorted(by_size.items()) if min(pair) < general]
        assert {each.name: int(each.read_text()) for each in folder.glob("*.pt2")} == {
            GENERAL: general,
            **{name_static_package(size): min(by_size[size]) for size in kept},
        }
        assert len(said) == len(by_size) - len(kept)
