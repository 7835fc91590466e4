"""`model.py` of a model on Triton's Python backend: hands every batch to optpipe's own session in a process of its own.

The server's interpreter and optpipe's are two environments (Triton's Python stub needs NumPy 1, ONNX Runtime and torch need
NumPy 2), so this file imports NumPy and Triton's utilities only; `optpipe.deploy.session_process` is the other end.
"""

import json
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
        self.process: Any = subprocess.Popen(
            [
                python,
                "-m",
                "optpipe.deploy.session_process",
                parameters["kind"],
                folder,
                parameters.get("options", "{}"),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=kept,
        )
        self._receive()

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answers all requests of a batch by one call of the session."""
        for request in requests:
            arrays = [np.ascontiguousarray(each.as_numpy()) for each in request.inputs()]
            tensors = [
                {"name": each.name(), "dtype": array.dtype.name, "shape": array.shape, "bytes": array.nbytes}
                for each, array in zip(request.inputs(), arrays)  # noqa: B905 - Python 3.9 has no `strict`
            ]
            self._send({"tensors": tensors, "more": request is not requests[-1]}, arrays)
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

    def _send(self, header: dict[str, Any], arrays: list[Any]) -> None:
        line = json.dumps(header).encode() + b"\n"
        self.process.stdin.write(line)
        for each in arrays:
            self.process.stdin.write(each.tobytes())
        self.process.stdin.flush()

    def _receive(self) -> tuple[dict[str, Any], list[Any]]:
        line = self.process.stdout.readline()
        if not line:
            raise pb_utils.TritonModelException(f"the session's process ended with status {self.process.wait(10)}")
        header = json.loads(line)
        if "fatal" in header:
            raise pb_utils.TritonModelException(header["fatal"])
        arrays = []
        for each in header.get("tensors", ()):
            content = self.process.stdout.read(each["bytes"])
            arrays.append(np.frombuffer(content, each["dtype"]).reshape(each["shape"]))
        return header, arrays
