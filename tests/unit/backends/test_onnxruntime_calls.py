"""The order of a call and its caller's work on a GPU, on streams that only note what they have waited for."""

import ctypes
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from optpipe.backends import cuda_streams, onnxruntime_calls
from optpipe.backends.onnxruntime_calls import TensorCalls
from optpipe.core.card import TensorSpec

DEFAULT, TORCHS = 0, 55
GPU = torch.device("cuda:0")
INPUT, OUTPUT = TensorSpec("x", "float32", ("batch", 3)), TensorSpec("y", "float32", ("batch", 5))


class Driver:
    """What each stream has done or waited for; the default stream and those of `cudaStreamCreate` see each other's work."""

    def __init__(self) -> None:
        self.current, self.host = DEFAULT, set()
        self.done = {DEFAULT: set()}
        self.blocking = {DEFAULT}
        self.streams = cuda_streams.Streams()

    def cudaStreamCreate(self, place) -> int:
        handle = 100 + len(self.blocking)
        ctypes.c_void_p.from_address(place).value = handle
        self.blocking.add(handle)
        return 0

    def add(self, handle, work) -> set:
        """Submits work, and gives what is done before it."""
        seen = self.done.setdefault(handle, set())
        if handle == DEFAULT:
            seen |= set().union(*(self.done.get(each, set()) for each in self.blocking))
        elif handle in self.blocking:
            seen |= self.done[DEFAULT]
        before = set(seen)
        seen.add(work)
        return before


@pytest.fixture
def driver(monkeypatch):
    driver = Driver()

    class Stream:
        def __init__(self, handle, device=0) -> None:
            self.cuda_stream, self.device_index = handle, device

        def wait_event(self, event) -> None:
            driver.done.setdefault(self.cuda_stream, set()).update(event.seen)

        def synchronize(self) -> None:
            driver.host |= driver.done[self.cuda_stream]

    class Event:
        def record(self, stream) -> None:
            self.seen = set(driver.done.setdefault(stream.cuda_stream, set()))

    for name, value in {
        "ExternalStream": Stream,
        "Event": Event,
        "Stream": lambda device: Stream(TORCHS + 1, device),
        "device": lambda _: nullcontext(),
        "cudart": lambda: driver,
        "current_stream": lambda _=0: Stream(driver.current),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(
        torch._C, "_cuda_getCurrentRawStream", lambda _: driver.current, raising=False
    )
    monkeypatch.setattr(onnxruntime_calls, "STREAMS", driver.streams)
    allocate = torch.empty
    monkeypatch.setattr(torch, "empty", lambda shape, **_: Tensor(allocate(shape)))
    return driver


class Tensor:
    device, dtype = GPU, torch.float32

    def __init__(self, memory) -> None:
        self.memory, self.shape = memory, memory.shape

    def contiguous(self):
        return self

    def data_ptr(self) -> int:
        return int(self.memory.data_ptr())


class Session:
    def __init__(self, driver, handle) -> None:
        self.driver, self.handle, self.before = driver, handle, set()

    def io_binding(self):
        return SimpleNamespace(bind_input=lambda *_: None, bind_output=lambda *_: None)

    def run_with_iobinding(self, *_) -> None:
        self.before = self.driver.add(self.handle, "call") | self.driver.host

    def get_input_memory_infos(self):
        return [SimpleNamespace(name="Cuda")]


@pytest.mark.parametrize("caller", [DEFAULT, TORCHS, "the session's"])
@pytest.mark.parametrize("refused", [False, True])
def test_a_call_runs_after_the_work_before_it_and_before_the_work_after_it(
    driver, caller, refused
) -> None:
    if refused:  # the session then has a stream of torch's own, which the driver does not order
        driver.cudaStreamCreate = lambda _: 2
    handle = driver.streams.take(0).cuda_stream
    session = Session(driver, handle)
    calls = TensorCalls(session, [INPUT], [OUTPUT], handle, cuda_graph=True)
    driver.current = handle if caller == "the session's" else caller
    for number in range(3):
        driver.add(driver.current, f"before {number}")
        outputs = calls.run({"x": Tensor(torch.zeros(2, 3).add(number))})
        assert outputs["y"].shape == (2, 5)
        assert f"before {number}" in session.before
        assert "call" in driver.add(driver.current, "after")


def test_a_stream_that_only_the_runtime_knows_is_waited_for(driver) -> None:
    session = Session(driver, 77)
    calls = TensorCalls(session, [INPUT], [OUTPUT], 0, cuda_graph=False)
    driver.add(DEFAULT, "before")
    calls.run({"x": Tensor(torch.zeros(2, 3))})
    assert "before" in session.before


def test_a_stream_is_lent_to_one_session_at_a_time(driver) -> None:
    first, second = driver.streams.take(0), driver.streams.take(0)
    assert first.cuda_stream != second.cuda_stream
    driver.streams.give_back(first)
    assert driver.streams.take(0).cuda_stream == first.cuda_stream
