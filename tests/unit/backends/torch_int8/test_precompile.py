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


@pytest.fixture(autouse=True)
def hopper_s_multiprocessors(monkeypatch):
    monkeypatch.setattr(launches, "_count_multiprocessors", lambda _: 132)


def collect():
    with precompile.collect_kernels() as kernels:
        for step, given in STEPS:
            tuning._launch_all(step, given)
    return kernels


@pytest.mark.slow
def test_what_other_processes_compiled_is_not_compiled_again_where_it_is_launched(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    with pretend_hopper():
        precompile.compile_side_by_side([*collect()])
        compiled = {path.name for path in tmp_path.rglob("*.cubin")}
        names = ("fp16_depthwise", "fp16_wgmma_stem", "int8_wgmma_product", "int8_wgmma_product_at_once")
        assert {f"{name}.cubin" for name in names} <= compiled
        folders = set(tmp_path.iterdir())
        for step, given in STEPS:
            launch_in_vain(step, given)
    assert {each for each in set(tmp_path.iterdir()) - folders if [*each.glob("*.cubin")]} == set()


def launch_in_vain(step, given):
    """Has its kernels compiled, without a GPU to run them on."""
    for tactic in list_tactics(step, given.data):
        with suppress(Exception):
            launch_step(step, given, tactic)


def test_each_kernel_is_collected_once_and_none_after_the_block():
    from triton import knobs

    with pretend_hopper():
        kernels = {**collect(), **collect()}
    assert knobs.runtime.jit_cache_hook is None
    assert len(kernels) == len({json.dumps(json.loads(each), sort_keys=True) for each in kernels}) > 5
