"""The engine and the preprocessing of this folder. `python predict.py IMAGE…` prints the class and score of each image.

Import it in your own service: it needs numpy, onnxruntime and, for images, nvidia-dali; README.md names the versions.
"""

import hashlib
import json
import sys
import threading
from pathlib import Path

if __name__ == "__main__" and {"-h", "--help"} & {*sys.argv[1:]}:
    print(f"usage: {sys.argv[0]} IMAGE…\n\n{__doc__}")
    sys.exit()

import numpy as np
import onnxruntime as ort

HERE = Path(__file__).parent
SETTINGS = json.loads((HERE / "loader.json").read_text())
for name, digest in SETTINGS["sha256"].items():  # loading an engine runs code
    if hashlib.sha256((HERE / name).read_bytes()).hexdigest() != digest:
        raise RuntimeError(f"{HERE / name} is not the signed-off file")
runtime = SETTINGS["runtime"]
if runtime["provider"] != "CPUExecutionProvider":
    ort.preload_dlls()
options = ort.SessionOptions()
options.intra_op_num_threads = runtime["threads"]
options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, runtime["optimization"])
for name, value in runtime["session_config"].items():
    options.add_session_config_entry(name, value)
providers = [(runtime["provider"], runtime["provider_options"])]
session = ort.InferenceSession(str(HERE / SETTINGS["engine"]), options, providers=providers)
if SETTINGS["pipeline"]:
    from nvidia.dali.pipeline import Pipeline

    pipeline = Pipeline.deserialize(
        filename=str(HERE / SETTINGS["pipeline"]), **SETTINGS["pipeline_options"]
    )
    one_at_a_time = (
        threading.Lock()
    )  # a server calls from several threads, and the pipeline is for one


def preprocess(images: list[bytes]) -> np.ndarray:
    """Encoded images to the model's tensor, in batches of the pipeline's size."""
    if not SETTINGS["pipeline"]:
        raise ValueError("this folder has no preprocessing: call infer() with tensors")
    if not images:
        raise ValueError("no images were given")
    size, rows = SETTINGS["pipeline_options"]["batch_size"], []
    for start in range(0, len(images), size):
        batch = [np.frombuffer(image, np.uint8) for image in images[start : start + size]]
        with one_at_a_time:
            pipeline.feed_input("DALI_INPUT_0", batch)
            rows += [np.array(array) for array in pipeline.run()[0].as_cpu()]
    return np.stack(rows)


def require_fitting(inputs: dict[str, np.ndarray]) -> None:
    """Raises ValueError for inputs that the engine was not built for: a name, a data type, a shape or a batch size."""
    wanted = SETTINGS["inputs"]
    if set(inputs) != set(wanted):
        raise ValueError(f"the inputs are {sorted(inputs)}; the model takes {sorted(wanted)}")
    batches = {}
    for name, spec in wanted.items():
        array, low, high = np.asarray(inputs[name]), spec["min"], spec["max"]
        if str(array.dtype) != spec["dtype"]:
            raise ValueError(f"input '{name}' is {array.dtype}; the model takes {spec['dtype']}")
        sizes = zip(low, array.shape, high)  # noqa: B905
        if array.ndim != len(low) or not all(least <= size <= most for least, size, most in sizes):
            raise ValueError(
                f"input '{name}' has the shape {list(array.shape)}; the engine takes {low} to {high}"
            )
        if spec["batch"] is not None:
            batches[name] = array.shape[spec["batch"]]
    if len(set(batches.values())) > 1:
        raise ValueError(f"the inputs have different batch sizes: {batches}")


def infer(inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The engine's outputs by name, first axis the samples, as in `requests/tensors.npz`. Raises ValueError as `require_fitting`."""
    require_fitting(inputs)
    return dict(zip([output.name for output in session.get_outputs()], session.run(None, inputs)))  # noqa: B905


def predict(images: list[bytes]) -> list[tuple[str, float]]:
    """The best class of each encoded image with its score, for a classifier: the first output has a score per class."""
    if not SETTINGS["classifies"]:
        raise ValueError(
            "predict() names classes of images, which this model does not: call infer() with tensors"
        )
    scores = next(iter(infer({SETTINGS["input"]: preprocess(images)}).values()))
    labels = SETTINGS["labels"] or [str(index) for index in range(scores.shape[1])]
    return [(labels[row.argmax()], float(row.max())) for row in scores]


if __name__ == "__main__":
    try:
        predictions = predict([Path(path).read_bytes() for path in sys.argv[1:]])
    except (OSError, ValueError) as error:
        sys.exit(f"{sys.argv[0]}: {error}")
    for path, (label, score) in zip(sys.argv[1:], predictions):  # noqa: B905
        print(f"{path}  {label}  {score:.4f}")
