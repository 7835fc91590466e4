"""Sessions with planted faults, loaded by a real worker process: `fakes/` is on PYTHONPATH there."""

from time import perf_counter_ns, sleep

import numpy as np

from optpipe.core.card import TensorSpec

FAULTS = ("none", "drift", "bimodal", "cached", "wrong", "stale", "out-of-memory", "dies", "noisy")


class PlantedSession:
    """Takes a set time per call, computes a checksum per row, and has one fault."""

    device = "cpu"
    inputs = (TensorSpec("x", "float32", ("batch", 64)),)
    outputs = (TensorSpec("y", "float32", ("batch", 2)),)

    def __init__(self, milliseconds, fault, memory_limit=None, loads_in_s=0.0):
        sleep(loads_in_s)
        self.nanoseconds, self.fault, self.memory_limit = milliseconds * 1e6, fault, memory_limit
        self.calls, self.answers = 0, {}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def right(self, inputs):
        x = inputs["x"]
        return {"y": np.stack([x.sum(axis=1), x[:, 0]], axis=1).astype(np.float32)}

    def run(self, inputs):
        if self.memory_limit and len(inputs["x"]) > self.memory_limit:
            msg = "Failed to allocate memory for requested buffer"
            raise MemoryError(msg)
        return self.right(inputs)

    def bind(self, inputs):
        return PlantedBinding(self, {name: array.copy() for name, array in inputs.items()})


class PlantedBinding:
    def __init__(self, session, inputs):
        self.session, self.inputs = session, inputs
        self.outputs = {name: array.copy() for name, array in session.run(inputs).items()}

    def launch(self):
        session, end = self.session, perf_counter_ns()
        session.calls += 1
        end += session.nanoseconds * self.slowness()
        answer = self.answer()
        for name, array in answer.items():
            self.outputs[name][...] = array
        while perf_counter_ns() < end:
            pass

    def slowness(self):
        session = self.session
        if session.fault == "drift":
            return 1 + session.calls / 1500
        if session.fault == "bimodal":
            return (
                2.0 if session.calls // 7 % 2 else 1.0
            )  # far enough apart that a neighbour's noise leaves the valley
        if session.fault == "noisy":
            return 1 + 0.2 * np.random.default_rng(session.calls).random()
        if session.fault == "cached" and self.inputs["x"].tobytes() in session.answers:
            return 0.1
        return 1.0

    def answer(self):
        session = self.session
        if session.fault == "dies" and session.calls > 200:
            import os

            os.abort()
        right = session.right(self.inputs)
        if session.fault == "cached":
            return session.answers.setdefault(self.inputs["x"].tobytes(), right)
        if session.fault == "wrong" and session.calls > 100:
            return {"y": right["y"] * 1.5}
        if session.fault == "stale":
            return session.answers.setdefault(len(self.inputs["x"]), right)
        return right


def planted(milliseconds=1.0, fault="none", **planted):
    return PlantedSession(milliseconds, fault, **planted)
