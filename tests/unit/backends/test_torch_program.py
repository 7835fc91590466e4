"""torch's refusals, a session's buffers, the costs of a program, and which AOTInductor packages stay."""

import re
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.entries import artifact_info
from torch import nn

from optpipe.backends import inductor
from optpipe.backends.base import BuildRequest
from optpipe.backends.inductor_packages import GENERAL, name_static_package
from optpipe.backends.torch_layers import tuning
from optpipe.backends.torch_program import export_program
from optpipe.backends.torch_session import TorchSession, list_recorded_tensors
from optpipe.core.card import InputSpec, ModelCard, Task
from optpipe.core.errors import BadInputError, StageError
from optpipe.core.precision import Precision

SPEC = InputSpec("x", "float32", (1, 3), (1, 3), (8, 3), batch=0)


class SmallBatches(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.shape[0] <= 3 else x * 3


class Counts(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.sum() > 0 else x * 3


class MixesTypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x * torch.ones(3, dtype=torch.float32))


def make_request(module: nn.Module, spec: InputSpec = SPEC) -> BuildRequest:
    card = ModelCard("net", "net.py:make", Task.OTHER, (spec,))
    return BuildRequest(
        card, Precision.FP32, Path("unused"), lambda: module, "cpu", {}, Path("unused")
    )


@pytest.mark.slow
def test_a_batch_that_the_program_limits_is_told_with_the_limit() -> None:
    with pytest.raises(StageError) as refused:
        export_program(make_request(SmallBatches()))
    assert str(refused.value) == (
        "torch.export could not export net: Constraints violated (batch); torch suggests batch = Dim('batch', max=3)\n"
        "try a fixed size (--batch 1) or another backend"
    )


def test_the_fixed_size_that_the_message_names_is_exported() -> None:
    program = export_program(make_request(SmallBatches(), replace(SPEC, max=SPEC.min)))
    assert program.module()(torch.ones(1, 3))[0].tolist() == [[2, 2, 2]]


def test_control_flow_that_depends_on_data_is_told_with_torch_s_reason() -> None:
    with pytest.raises(
        StageError, match=r"could not export net: .*data-dependent .*\ntry another backend"
    ) as refused:
        export_program(make_request(Counts(), replace(SPEC, max=SPEC.min)))
    assert len(str(refused.value).splitlines()) == 2


@pytest.mark.parametrize("precision", [Precision.FP16, Precision.BF16])
def test_a_program_that_does_not_run_is_no_build(precision: Precision) -> None:
    request = make_request(MixesTypes())
    assert export_program(request).module()(torch.ones(2, 3))[0].shape == (2, 2)
    with pytest.raises(StageError) as refused:
        export_program(replace(request, precision=precision))
    assert str(refused.value).startswith(
        f"torch cannot run net in {precision}: mat1 and mat2 must have the same dtype"
    )
    assert str(refused.value).endswith("\ntry --precision fp32, or on a GPU --backend onnxruntime")


INFO = artifact_info(
    backend="torch",
    details={
        "inputs": [{"name": "x", "dtype": "float32", "shape": ["batch", 3]}],
        "outputs": [{"name": "y", "dtype": "float32", "shape": ["batch", 3]}],
    },
)


def test_writing_into_a_bound_input_leaves_the_given_array_alone() -> None:
    given = np.ones((2, 3), np.float32)
    session = TorchSession(lambda x: x + torch.ones_like(x), INFO, {})
    binding = session.bind({"x": given})
    binding.inputs["x"][...] = 5
    binding.launch()
    assert (binding.outputs["y"] == 6).all()
    assert (given == 1).all()


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (
            RuntimeError("Runtime assertion failed for expression u5 >= 2 on node 'ge_5'\nmore"),
            StageError,
        ),
        (AssertionError("Guard failed: x.size()[0] <= 3"), StageError),
        (
            torch.OutOfMemoryError("CUDA out of memory"),
            torch.OutOfMemoryError,
        ),  # whoever measures tells it apart
    ],
)
def test_what_torch_refuses_to_run_is_a_stage_that_failed(
    error: Exception, expected: type[Exception]
) -> None:
    def refuse(_: torch.Tensor) -> torch.Tensor:
        raise error

    with pytest.raises(expected, match=re.escape(str(error).splitlines()[0])) as found:
        TorchSession(refuse, INFO, {}).run({"x": np.ones((2, 3), np.float32)})
    assert "more" not in str(found.value)


CARD = ModelCard(
    "small", "small", Task.OTHER, (InputSpec("x", "float32", (1, 3), (1, 3), (8, 3), batch=0),)
)
times = st.integers(1, 5)


@given(
    st.dictionaries(st.integers(1, 8), st.tuples(times | st.none(), times | st.none()), min_size=1),
    times,
)
def test_a_size_keeps_the_fastest_of_its_codes_where_it_compiles_and_beats_the_code_for_all_sizes(
    by_size, general
):
    with TemporaryDirectory() as scratch, pytest.MonkeyPatch.context() as patch:
        folder = Path(scratch)
        made = {GENERAL: general}
        made |= {
            name_static_package(size, at): each
            for size, pair in by_size.items()
            for at, each in enumerate(pair)
        }
        failures = {name: "no" for name, each in made.items() if each is None}
        for name, each in made.items():
            if each is not None:
                (folder / name).write_text(str(each), encoding="utf-8")
        patch.setattr(
            inductor, "load_package", lambda package, _: int(package.read_text(encoding="utf-8"))
        )
        patch.setattr(tuning, "compare_calls", lambda low, half, _: {1: half / low})
        patch.setattr(tuning, "is_faster", lambda speed: speed > 1)
        patch.setattr(tuning, "draw_inputs", lambda _: ())
        request = BuildRequest(CARD, Precision.FP16, folder, None, "cuda", {}, folder)
        kept, said = inductor._keep_fastest(request, sorted(by_size), failures, variants=2)
        fastest = {size: min(filter(None, pair), default=general) for size, pair in by_size.items()}
        assert kept == [size for size in sorted(by_size) if fastest[size] < general]
        assert {each.name: int(each.read_text()) for each in folder.glob("*.pt2")} == {
            GENERAL: general,
            **{name_static_package(size): fastest[size] for size in kept},
        }
        assert len(said) == len(by_size) - len(kept)
        assert sum("could not be compiled: no" in each for each in said) == [
            *map(set, by_size.values())
        ].count({None})


@pytest.mark.parametrize(
    "details", [{}, {"inputs": None}, {"inputs": [{"shape": [1]}]}, {"inputs": ["x"]}]
)
def test_a_record_that_does_not_name_its_tensors_is_refused(details):
    """Such as that of an entry which `store merge` took from elsewhere."""
    with pytest.raises(BadInputError, match=r"does not name its inputs .*\nbuild it again"):
        list_recorded_tensors(artifact_info(details=details), "inputs")
