"""Calls of a build on GPU tensors: ordered with the caller's work on any stream, without a wait of the host."""

import pytest
import torch

import optpipe

WIDTH, LAYERS, ROWS = 2048, 8, 512
SLOW = 400_000_000
"""Cycles that the GPU sleeps: some 0.2 s, in which an unordered call would be over."""


@pytest.fixture(scope="module")
def module():
    torch.manual_seed(0)
    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
    for layer in layers:
        torch.nn.init.normal_(layer.weight, std=WIDTH**-0.5)  # outputs as large as inputs
    return torch.nn.Sequential(*layers).eval()


@pytest.fixture(scope="module")
def build(module, tmp_path_factory):
    folder = tmp_path_factory.mktemp("work")
    example = torch.randn(2, WIDTH)
    model = optpipe.Model(module, example, batch=(1, 8, ROWS), workspace=folder)
    return model.build("fp32", backend="onnxruntime", device="cuda")["fp32"]


@pytest.fixture(scope="module")
def reference(module):
    on_gpu = module.cuda()

    def compute(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return on_gpu(x)

    return compute


@pytest.fixture(params=["default", "other"])
def stream(request):
    return torch.cuda.default_stream() if request.param == "default" else torch.cuda.Stream()


def require_near(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def test_work_before_and_after_a_call_is_in_order(build, reference, stream) -> None:
    x = torch.zeros(ROWS, WIDTH, device="cuda")
    build(x)
    values = torch.randn(ROWS, WIDTH, device="cuda")
    expected = reference(values) + 1
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for _ in range(3):
            x.zero_()
            torch.cuda._sleep(SLOW)
            x.copy_(values)
            y = build(x)
            after = y + 1
            x.fill_(float("nan"))  # after the call has read it
            y.fill_(float("nan"))
    torch.cuda.synchronize()
    require_near(after, expected)


def test_waiting_for_the_callers_stream_waits_for_the_call(build, reference, stream) -> None:
    values = torch.randn(ROWS, WIDTH, device="cuda")
    expected = reference(values).cpu()
    pinned = torch.zeros_like(expected).pin_memory()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SLOW)
        y = build(values)
        torch.cuda.current_stream().synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):  # not ordered with either
        pinned.copy_(y, non_blocking=True)
        torch.cuda.current_stream().synchronize()
    require_near(pinned, expected)


def test_freed_memory_is_used_again_after_the_call(build, reference, stream) -> None:
    with torch.cuda.stream(stream):
        values = [torch.randn(ROWS, WIDTH, device="cuda") for _ in range(4)]
        expected = [reference(each) for each in values]
        found = []
        for value in values * 3:
            x = value.clone()
            found.append(build(x))
            del x
            torch.full((ROWS, WIDTH), float("nan"), device="cuda")  # the memory of x
    torch.cuda.synchronize()
    for index, each in enumerate(found):
        require_near(each, expected[index % 4])


def test_a_call_waits_for_nothing(build, stream) -> None:
    x = torch.randn(ROWS, WIDTH, device="cuda")
    build(x)
    torch.cuda.synchronize()
    done = torch.cuda.Event()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SLOW)
        build(x)
        done.record()
    assert not done.query()
    torch.cuda.synchronize()


def test_a_bound_call_is_in_order_and_waits_for_nothing(build, reference, stream) -> None:
    x = torch.zeros(ROWS, WIDTH, device="cuda")
    bound = build.bind(x)
    bound()
    values = torch.randn(ROWS, WIDTH, device="cuda")
    expected = reference(values) + 1
    torch.cuda.synchronize()
    done = torch.cuda.Event()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SLOW)
        x.copy_(values)
        after = bound() + 1
        x.fill_(float("nan"))  # after the call has read it
        done.record()
    assert not done.query()
    torch.cuda.synchronize()
    require_near(after, expected)


def test_a_bound_call_keeps_its_memory_while_others_run(build, reference) -> None:
    x, other = (torch.randn(ROWS, WIDTH, device="cuda") for _ in range(2))
    expected = reference(x)
    bound = build.bind(x)
    y = bound()
    for _ in range(20):
        build(other).fill_(float("nan"))
    torch.cuda.synchronize()
    require_near(y, expected)
    build.close()
    with pytest.raises(optpipe.BadInputError, match="closed"):
        bound()


def test_another_session_takes_the_stream_of_one_that_was_closed(build) -> None:
    x = torch.randn(2, WIDTH, device="cuda")
    before = build(x)
    handle = build._stream.cuda_stream
    build.close()
    assert torch.equal(build(x), before)
    assert build._stream.cuda_stream == handle
