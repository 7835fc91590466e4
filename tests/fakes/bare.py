"""A user's file in plain ONNX Runtime, as a script of three lines runs it."""

import numpy as np
import onnxruntime as ort


def run_bare(graph, feeds):
    """The outputs by name of a file or of a `ModelProto`, without any optimization."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    source = str(graph) if hasattr(graph, "exists") else graph.SerializeToString()
    session = ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_outputs()]
    return dict(zip(names, session.run(None, dict(feeds)), strict=True))


def measure_snr(expected, found):
    """In dB; infinite if equal."""
    expected, found = np.asarray(expected, np.float64), np.asarray(found, np.float64)
    assert expected.shape == found.shape
    power, noise = np.square(expected).sum(), np.square(found - expected).sum()
    return np.inf if noise == 0 else 10 * np.log10(power / noise)
