"""`model.py` of a model on Triton's Python backend: passes every batch to optpipe's session in another process.

The server's interpreter and optpipe's are two environments (Triton's Python stub needs NumPy 1, ONNX Runtime and torch need
NumPy 2), so this file imports only Triton's utilities and a copy of `frames.py`; `optpipe.deploy.session_process` is the other
end.
"""

import json
import os
import subprocess
from typing import Any

import triton_python_backend_utils as pb_utils
from optpipe_frames import SharedMemory, read_frame, write_frame


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        """Starts the session's process and waits until it is ready."""
        config = json.loads(args["model_config"])
        parameters = {
            name: parameter["string_value"]
            for name, parameter in config.get("parameters", {}).items()
        }
        here = os.path.join(args["model_repository"], args["model_version"])
        folder = parameters["folder"].replace("$$TRITON_MODEL_DIRECTORY/1", here)
        python = parameters.get("python") or os.environ.get("OPTPIPE_PYTHON", "python3")
        kept = {
            name: value
            for name, value in os.environ.items()
            if name not in ("LD_LIBRARY_PATH", "PYTHONHOME")
        }
        if "path" in parameters:
            kept["PYTHONPATH"] = parameters["path"]
        self.outputs = [output["name"] for output in config["output"]]
        descriptors = [os.memfd_create("optpipe") for _ in range(2)]
        self.sent, self.received = map(SharedMemory, descriptors)
        words = [
            parameters["kind"],
            folder,
            parameters.get("options", "{}"),
            config.get("max_batch_size", 0),
        ]
        self.process: Any = subprocess.Popen(
            [
                python,
                "-P",
                "-m",
                "optpipe.deploy.session_process",
                *map(str, (*words, *descriptors)),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=kept,
            pass_fds=descriptors,
        )
        self._receive()

    def execute(self, requests: list[Any]) -> list[Any]:
        self.sent.rewind()
        for request in requests:
            arrays = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
            write_frame(
                self.process.stdin, {"more": request is not requests[-1]}, arrays, self.sent
            )
        answers = []
        for _ in requests:
            header, results = self._receive()
            outputs = [pb_utils.Tensor(name, array) for name, array in zip(self.outputs, results)]  # noqa: B905
            error = pb_utils.TritonError(header["error"]) if "error" in header else None
            answers.append(pb_utils.InferenceResponse(outputs, error))
        return answers

    def finalize(self) -> None:
        self.process.stdin.close()
        self.process.wait(10)

    def _receive(self) -> tuple[dict[str, Any], list[Any]]:
        frame = read_frame(self.process.stdout, self.received)
        if frame is None:
            raise pb_utils.TritonModelException(
                f"the session's process ended with status {self.process.wait(10)}"
            )
        header, arrays = frame
        if "fatal" in header:
            raise pb_utils.TritonModelException(header["fatal"])
        return header, [
            array.copy() for array in arrays.values()
        ]  # the next batch overwrites these outputs
