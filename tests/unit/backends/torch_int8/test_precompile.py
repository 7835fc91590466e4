"""Kernels compiled by other processes, for a GPU that is not here: a fake driver says that there is one."""

import json
from contextlib import suppress

import pytest
from tests.fakes.hopper_driver import pretend_hopper
from tests.fakes.int8_network import random_convolution, random_depthwise, random_stem

from optpipe.backends.torch_int8 import launches, precompile, tuning
from optpipe.backends.torch_int8.operators import launch_step
from optpipe.backends.torch_int8.tactics import list_tactics

STEPS = (
    random_convolution(64, 64, 1, half=True),
    random_depthwise(activation="hardswish"),
    random_stem(activation="silu"),
)


@pytest.mark.slow
def test_what_other_processes_compiled_is_not_compiled_again_where_it_is_launched(tmp_path, monkeypatch):
    from triton import knobs

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(launches, "_count_multiprocessors", lambda _: 132)
    with pretend_hopper():
        with precompile.collect_kernels() as kernels:
            for step, given in (*STEPS, *STEPS):
                tuning._launch_all(step, given)
        assert knobs.runtime.jit_cache_hook is None
        assert len(kernels) == len({json.dumps(json.loads(each), sort_keys=True) for each in kernels}) > 5
        precompile.compile_side_by_side([*kernels])
        compiled = {path.name for path in tmp_path.rglob("*.cubin")}
        names = ("fp16_depthwise", "fp16_wgmma_stem", "int8_wgmma_product", "int8_wgmma_product_at_once")
        assert {f"{name}.cubin" for name in names} <= compiled
        folders = set(tmp_path.iterdir())
        for step, given in STEPS:
            for tactic in list_tactics(step, given.data):
                with suppress(Exception):  # compiled, and then no GPU runs it
                    launch_step(step, given, tactic)
    assert {each for each in set(tmp_path.iterdir()) - folders if [*each.glob("*.cubin")]} == set()
