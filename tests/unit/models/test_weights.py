"""Whose weights a model has: a library's random ones, or those that a factory sets or draws."""

import random

import numpy as np
import pytest
import torch

from optpipe.core.entries import WeightsRequest
from optpipe.core.errors import BadInputError
from optpipe.models.sources.weights import (
    draw_neutral_layers,
    hash_module_weights,
    hash_tensors,
    make_with_factory_weights,
    make_with_weights,
    remake_module,
    state_dict_from_file,
)

DEFAULT, RANDOM = WeightsRequest(), WeightsRequest("random", 3)


def network() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Linear(4, 2))


def trained() -> torch.nn.Module:
    """Statistics as training leaves them."""
    module = network()
    with torch.no_grad():
        for value, tensor in enumerate([*module.parameters(), *module.buffers()]):
            tensor.fill_(value)
    return module


def test_weights_that_a_factory_sets_are_left_alone() -> None:
    module, record = make_with_factory_weights(trained, DEFAULT, "net.py:make")
    assert record.source == "default:net.py:make"
    assert record.trained
    assert record.sha256 == hash_module_weights(module) == hash_module_weights(trained())
    assert not module.training


def test_random_ones_are_found_out_and_the_same_each_time() -> None:
    module, record = make_with_factory_weights(network, DEFAULT, "net.py:make")
    assert (record.source, record.seed) == ("random", 0)
    assert record.drawn == "4 of 9 tensors, first 0.bias"
    assert hash_module_weights(remake_module(network, DEFAULT, record, "net.py:make")) == record.sha256
    assert float(module[1].running_mean.abs().max()) > 0
    assert make_with_weights(network, WeightsRequest("random", 0))[1].sha256 == record.sha256


def test_trained_normalization_below_a_fresh_head_is_kept() -> None:
    backbone = trained()
    statistics = hash_tensors(backbone[1])
    module, record = make_with_factory_weights(
        lambda: torch.nn.Sequential(backbone[1], torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2)), DEFAULT, "net.py:make"
    )
    assert not record.trained
    assert hash_tensors(module[0]) == statistics
    assert float(module[1].running_mean.abs().max()) > 0


@pytest.mark.parametrize(
    "changed", [{"weight": 0.5}, {"bias": 0.1}, {"running_mean": 1.0}, {"running_var": 2.0}, {"weight": 0.0}, {}]
)
def test_only_fresh_normalization_is_drawn(changed: dict[str, float]) -> None:
    norm = torch.nn.BatchNorm2d(4)
    for name, value in changed.items():
        getattr(norm, name).data[-1 if value else slice(None)] = value
    before = hash_tensors(norm)
    drawn = hash_tensors(draw_neutral_layers(norm)) != before
    assert drawn == (changed in ({}, {"weight": 0.0}))  # a residual branch that begins closed is fresh too


def test_a_layer_of_zeros_is_drawn_and_any_other_is_left() -> None:
    closed, learned = torch.nn.Linear(4, 3), torch.nn.Conv1d(4, 3, 1)
    torch.nn.init.zeros_(closed.weight)
    before = learned.weight.clone()
    draw_neutral_layers(torch.nn.ModuleList([closed, learned]))
    assert closed.weight.any()
    assert torch.equal(learned.weight, before)


def test_random_weights_of_a_factory_that_has_none_are_refused() -> None:
    with pytest.raises(BadInputError, match=r"no weight of net.py:make depends on the seed.*\n.*--weights default"):
        make_with_factory_weights(trained, RANDOM, "net.py:make")


def test_weights_that_no_seed_decides_are_refused() -> None:
    def make() -> torch.nn.Module:
        return torch.nn.ParameterList([torch.from_numpy(np.random.default_rng().normal(size=3))])

    with pytest.raises(BadInputError, match="different weights on every call"):
        make_with_factory_weights(make, DEFAULT, "net.py:make")


def test_numpys_and_pythons_generators_are_seeded_and_left_as_they_were() -> None:
    def make() -> torch.nn.Module:
        return torch.nn.ParameterList([torch.tensor([random.random(), np.random.rand()])])

    random.seed(5)
    np.random.seed(5)
    expected = (random.random(), np.random.rand(), float(torch.rand(1, generator=torch.manual_seed(5))))
    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)
    assert make_with_factory_weights(make, DEFAULT, "net.py:make")[1].source == "random"
    assert (random.random(), np.random.rand(), float(torch.rand(1))) == expected


@pytest.mark.parametrize("suffix", ["pt", "pth", "safetensors"])
@pytest.mark.parametrize("content", [b"", b"elephants", b"\x80\x02garbage", b"PK\x03\x04" + b"x" * 99, b"\xff" * 64])
def test_what_is_no_weights_file_is_one_line(tmp_path, suffix, content) -> None:
    path = tmp_path / f"net.{suffix}"
    path.write_bytes(content)
    with pytest.raises(BadInputError, match=rf"net.{suffix} (cannot be read as weights|is not a state dict)"):
        state_dict_from_file(path)
