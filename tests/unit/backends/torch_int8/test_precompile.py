"""Kernels compiled by other processes, for a GPU that is not here: a fake driver says that there is one."""

import json
from contextlib import suppress

import pytest
import torch
from tests.fakes.hopper_driver import pretend_hopper
from tests.fakes.int8_network import gated_network, lower, quantize

from optpipe.backends.torch_int8 import launches, precompile, program, tuning
from optpipe.backends.torch_int8.tactics import Kerneled, list_tactics


@pytest.mark.slow
def test_what_other_processes_compiled_is_not_compiled_again_where_it_is_launched(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(launches, "_count_multiprocessors", lambda _: 132)
    monkeypatch.setattr(tuning, "Program", lambda network, chosen: program.Program(network, chosen, "cpu"))
    network, images = lower(quantize(gated_network(), keep=("deep",))), torch.zeros(1, 3, 32, 32)
    with pretend_hopper():
        tuning.compile_tactics(network, [(images,)])
        compiled = {path.name for path in tmp_path.rglob("*.cubin")}
        assert {
            "fp16_depthwise.cubin",
            "fp16_wgmma_stem.cubin",
            "int8_mean_pool.cubin",
            "int8_quantize_gated.cubin",
            "int8_wgmma_product.cubin",
            "int8_wgmma_product_at_once.cubin",
        } <= compiled
        folders, values, alone = set(tmp_path.iterdir()), {"image": images}, program.Program(network, {}, "cpu")
        with precompile.collect_kernels():
            for step in network.steps:
                values[step.output] = tuning._launch_all(alone, step, values)
        for step in network.steps:
            launch_in_vain(alone, step, values)
    assert {each for each in set(tmp_path.iterdir()) - folders if [*each.glob("*.cubin")]} == set()


def launch_in_vain(alone, step, values):
    """Has its kernels compiled, without a GPU to run them on."""
    if isinstance(step, Kerneled):
        for tactic in list_tactics(step, values[step.given]):
            with suppress(Exception):
                alone.launch(step, values, tactic)


def test_each_kernel_is_collected_once_and_none_after_the_block(monkeypatch):
    from triton import knobs

    monkeypatch.setattr(launches, "_count_multiprocessors", lambda _: 132)
    network = lower(quantize(gated_network()))
    alone, values = program.Program(network, {}, "cpu"), {"image": torch.zeros(8, 3, 32, 32)}
    with pretend_hopper(), precompile.collect_kernels() as kernels:
        for _ in range(2):
            for step in network.steps:
                values[step.output] = tuning._launch_all(alone, step, values)
    assert knobs.runtime.jit_cache_hook is None
    assert len(kernels) == len({json.dumps(json.loads(each), sort_keys=True) for each in kernels}) > 20
