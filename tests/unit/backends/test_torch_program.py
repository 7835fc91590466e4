"""torch's refusals have torch's reason and a way out; a session's buffers are its own."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.fakes.entries import artifact_info
from torch import nn

from optpipe.backends.base import BuildRequest
from optpipe.backends.torch_program import TorchSession, export_program
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
    return BuildRequest(card, Precision.FP32, Path("unused"), lambda: module, "cpu", {}, Path("unused"))


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
    with pytest.raises(StageError, match=r"could not export net: .*data-dependent .*\ntry another backend") as refused:
        export_program(make_request(Counts(), replace(SPEC, max=SPEC.min)))
    assert len(str(refused.value).splitlines()) == 2


@pytest.mark.parametrize("precision", [Precision.FP16, Precision.BF16])
def test_a_program_that_does_not_run_is_no_build(precision: Precision) -> None:
    request = make_request(MixesTypes())
    assert export_program(request).module()(torch.ones(2, 3))[0].shape == (2, 2)
    with pytest.raises(StageError) as refused:
        export_program(replace(request, precision=precision))
    assert str(refused.value).startswith(f"torch cannot run net in {precision}: mat1 and mat2 must have the same dtype")
    assert str(refused.value).endswith("\ntry --precision fp32, or on a GPU --backend onnxruntime")


def test_what_optpipe_refuses_itself_passes() -> None:
    def refuse() -> nn.Module:
        raise BadInputError("no such file")

    with pytest.raises(BadInputError, match="no such file"):
        export_program(replace(make_request(Counts()), module=refuse))


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
        (RuntimeError("Runtime assertion failed for expression u5 >= 2 on node 'ge_5'\nmore"), StageError),
        (AssertionError("Guard failed: x.size()[0] <= 3"), StageError),
        (torch.OutOfMemoryError("CUDA out of memory"), torch.OutOfMemoryError),  # whoever measures tells it apart
    ],
)
def test_what_torch_refuses_to_run_is_a_stage_that_failed(error: Exception, expected: type[Exception]) -> None:
    def refuse(_: torch.Tensor) -> torch.Tensor:
        raise error

    with pytest.raises(expected, match=re.escape(str(error).splitlines()[0])) as found:
        TorchSession(refuse, INFO, {}).run({"x": np.ones((2, 3), np.float32)})
    assert "more" not in str(found.value)
