"""Builds one small graph through `tensorrt` or `tensorrt-rtx` once for each case, in a process of its own.

usage: python -m tests.fakes.tensorrt_api.build_case FOLDER BACKEND < cases.json
The cases are option sets by name; printed is, by name, what came of each.
"""

import json
import sys
from pathlib import Path

import numpy as np
from tests.fakes.graphs import onnx_model

from optpipe.backends.base import BuildRequest
from optpipe.backends.registry import BACKENDS
from optpipe.core.card import InputSpec, ModelCard, Task
from optpipe.core.errors import OptpipeError
from optpipe.core.precision import Precision, prove_precision

SPEC = InputSpec("x", "float32", (1, 3, 16, 16), (8, 3, 16, 16), (32, 3, 16, 16))


def save_graph(folder):
    """x (batch, 3, 16, 16) through two convolutions; the second one's weights are 2:4 sparse."""
    generator = np.random.default_rng(0)
    sizes = {"w": (16, 3, 3, 3), "v": (10, 16, 1, 1)}
    weights = {name: generator.normal(size=size).astype(np.float32) for name, size in sizes.items()}
    weights["v"][:, ::2] = 0
    nodes = [
        ("Conv", "x w", "a", {"name": "first", "pads": [1, 1, 1, 1]}),
        ("Relu", "a", "b", {"name": "relu"}),
        ("Conv", "b v", "y", {"name": "second"}),
    ]
    shapes = {"x": ["batch", 3, 16, 16]}, {"y": ["batch", 10, 16, 16]}
    onnx_model(nodes, *shapes, path=folder / "model.onnx", **weights)


def build(backend, folder, name, options):
    """What became of one case: its error, or the engine's size, key, details and proof."""
    directory = folder / name
    directory.mkdir()
    card = ModelCard("net", "net.onnx", Task.OTHER, (SPEC,))
    request = BuildRequest(
        card, Precision.FP32, folder / "model.onnx", None, "cuda", options, directory
    )
    try:
        key = backend.recipe("cuda", options)["options"]
        built = backend.build(request)
    except OptpipeError as error:
        return {"status": int(error.exit_status), "error": str(error)}
    return {
        "key": key,
        "bytes": (directory / built.file).stat().st_size,
        "details": dict(built.details),
        "remarks": built.remarks,
        "more_files": built.more_files,
        "proven": prove_precision(Precision.FP32, built.layers).proven,
        "files": sorted(path.name for path in directory.iterdir()),
    }


def main():
    folder, backend = Path(sys.argv[1]), BACKENDS[sys.argv[2]]
    object.__setattr__(backend, "ahead_of_time", True)
    save_graph(folder)
    print(
        json.dumps(
            {
                name: build(backend, folder, name, case)
                for name, case in json.load(sys.stdin).items()
            }
        )
    )


if __name__ == "__main__":
    main()
