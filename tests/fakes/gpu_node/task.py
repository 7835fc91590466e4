"""A task of a sweep on a cluster with a node whose GPU is pretended (`pynvml.py` beside this).

Builds and verification are real, but where TensorRT-RTX would run an engine, ONNX Runtime runs the model that it was built from, on
the CPU. Measurements are empty.
"""

import json
import runpy
import sys
from pathlib import Path
from unittest.mock import patch

from optpipe.backends.onnxruntime import OnnxRuntime
from optpipe.backends.onnxruntime_session import OnnxRuntimeSession
from optpipe.backends.tensorrt import TensorRT
from optpipe.core.process import end_with_parent
from optpipe.core.records import json_from_record, read_record
from optpipe.sweep.job import Task
from optpipe.sweep.task import build_recipe
from optpipe.workspace.file_names import ONNX
from optpipe.workspace.files import write_bytes

EMPTY = Path(__file__).parents[3] / "benchmarks" / "empty_job.py"


def load(_backend, directory, _info, _options):
    parents = json.loads((directory / "manifest.json").read_text())["parents"]
    (model,) = (path for each in parents for path in directory.parent.glob(f"model-{each}/{ONNX}"))
    return OnnxRuntimeSession(model, "cpu", OnnxRuntime().runtime_options("cpu"))


if __name__ == "__main__":
    end_with_parent()
    patch.object(TensorRT, "load", load).start()
    task = read_record(Path(sys.argv[1]), Task)
    outcomes = runpy.run_path(str(EMPTY))["measure"](task) if task.timing else (build_recipe(task),)
    write_bytes(Path(sys.argv[2]), json_from_record(outcomes))
