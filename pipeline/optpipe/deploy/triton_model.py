"""`model.py` of a model on Triton's Python backend: hands every batch to optpipe's own session in a process of its own.

The server's interpreter and optpipe's are two environments (Triton's Python stub needs NumPy 1, ONNX Runtime and torch need
NumPy 2), so this file imports NumPy and Triton's utilities only; `optpipe.deploy.session_process` is the other end.
"""

import json
import mmap
import os
import subprocess
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """One session; Triton calls these three methods."""

    def initialize(self, args: dict[str, str]) -> None:
        """Starts the session's process and waits until it has loaded."""
        config = json.loads(args["model_config"])
        parameters = {name: each["string_value"] for name, each in config.get("parameters", {}).items()}
        here = os.path.join(args["model_repository"], args["model_version"])
        folder = parameters["folder"].replace("$$TRITON_MODEL_DIRECTORY/1", here)
        python = parameters.get("python") or os.environ.get("OPTPIPE_PYTHON", "python3")
        kept = {name: value for name, value in os.environ.items() if name not in ("LD_LIBRARY_PATH", "PYTHONHOME")}
        if "path" in parameters:
            kept["PYTHONPATH"] = parameters["path"]
        self.outputs = [each["name"] for each in config["output"]]
        self.sent, self.received = _Memory(), _Memory()
        self.process: Any = subprocess.Popen(
            [
                python,
                "-m",
                "optpipe.deploy.session_process",
                parameters["kind"],
                folder,
                parameters.get("options", "{}"),
                str(config.get("max_batch_size", 0)),
                str(self.sent.descriptor),
                str(self.received.descriptor),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=kept,
            pass_fds=(self.sent.descriptor, self.received.descriptor),
        )
        self._receive()

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answers all requests of a batch by one call of the session."""
        end = 0
        for request in requests:
            tensors = []
            for each in request.inputs():
                array = each.as_numpy()
                place = -(-end // 64) * 64
                end = place + array.nbytes
                self.sent.view(place, array.dtype, array.shape)[...] = array
                size = {"dtype": array.dtype.name, "shape": array.shape, "bytes": array.nbytes}
                tensors.append({"name": each.name(), "offset": place, **size})
            self._send({"tensors": tensors, "more": request is not requests[-1]})
        answers = []
        for _ in requests:
            header, arrays = self._receive()
            outputs = [pb_utils.Tensor(name, array) for name, array in zip(self.outputs, arrays)]  # noqa: B905
            error = pb_utils.TritonError(header["error"]) if "error" in header else None
            answers.append(pb_utils.InferenceResponse(outputs, error))
        return answers

    def finalize(self) -> None:
        """Ends the process."""
        self.process.stdin.close()
        self.process.wait(10)

    def _send(self, header: dict[str, Any]) -> None:
        self.process.stdin.write(json.dumps(header).encode() + b"\n")
        self.process.stdin.flush()

    def _receive(self) -> tuple[dict[str, Any], list[Any]]:
        line = self.process.stdout.readline()
        if not line:
            raise pb_utils.TritonModelException(f"the session's process ended with status {self.process.wait(10)}")
        header = json.loads(line)
        if "fatal" in header:
            raise pb_utils.TritonModelException(header["fatal"])
        found = header.get("tensors", ())  # copied: the next batch's outputs come to the same place
        return header, [self.received.view(each["offset"], each["dtype"], each["shape"]).copy() for each in found]


class _Memory:
    """A file in memory that grows, for the arrays between this process and the session's."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("optpipe")
        self._view: Any = b""

    def view(self, offset: int, dtype: Any, shape: Any) -> Any:
        """The array at `offset`, where it lies."""
        kind, count = np.dtype(dtype), int(np.prod(shape, dtype=np.int64))
        if not count:
            return np.empty(shape, kind)
        end = offset + count * kind.itemsize
        if len(self._view) < end:
            if os.fstat(self.descriptor).st_size < end:
                os.ftruncate(self.descriptor, max(2 * end, 1 << 20))
            self._view = mmap.mmap(self.descriptor, 0)
        return np.frombuffer(self._view, kind, count, offset).reshape(shape)
