"""Loads the engine and the preprocessing of this folder. `python predict.py IMAGE…` prints the class and score of each image.

Copy it into your own service: it needs numpy, onnxruntime and, for images, nvidia-dali. See README.md for the versions.
"""

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

HERE = Path(__file__).parent
SETTINGS = json.loads((HERE / "loader.json").read_text())


class Model:
    """One session, and one pipeline from encoded images to its input."""

    def __init__(self) -> None:
        """Refuses a file that is not the signed-off one: loading an engine runs code."""
        for name, digest in SETTINGS["sha256"].items():
            if hashlib.sha256((HERE / name).read_bytes()).hexdigest() != digest:
                sys.exit(f"{name} is not the signed-off file")
        options = ort.SessionOptions()
        options.intra_op_num_threads = SETTINGS["threads"]
        for name, value in SETTINGS["session_config"].items():
            options.add_session_config_entry(name, value)
        if SETTINGS["provider"] != "CPUExecutionProvider":
            ort.preload_dlls()
        providers = [(SETTINGS["provider"], SETTINGS["provider_options"])]
        self.session = ort.InferenceSession(str(HERE / SETTINGS["engine"]), options, providers=providers)
        self.pipeline: Any = open_pipeline(HERE / SETTINGS["pipeline"]) if SETTINGS["pipeline"] else None

    def run(self, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Tensors in, tensors out."""
        names = [each.name for each in self.session.get_outputs()]
        return dict(zip(names, self.session.run(names, inputs)))  # noqa: B905 - plain on purpose

    def preprocess(self, images: list[bytes]) -> np.ndarray:
        """Encoded images to the model's tensor, in batches of the pipeline's size."""
        size, rows = SETTINGS["pipeline_batch_size"], []
        for start in range(0, len(images), size):
            self.pipeline.feed_input(
                "DALI_INPUT_0", [np.frombuffer(each, np.uint8) for each in images[start : start + size]]
            )
            rows += [np.array(each) for each in self.pipeline.run()[0].as_cpu()]
        return np.stack(rows)

    def predict(self, images: list[bytes]) -> list[tuple[str, float]]:
        """The best class of each encoded image with its score."""
        scores = next(iter(self.run({SETTINGS["input"]: self.preprocess(images)}).values()))
        labels = SETTINGS["labels"] or [str(index) for index in range(scores.shape[1])]
        return [(labels[row.argmax()], float(row.max())) for row in scores]


def open_pipeline(path: Path) -> Any:
    """The serialized DALI pipeline."""
    from nvidia.dali.pipeline import Pipeline

    size, threads = SETTINGS["pipeline_batch_size"], SETTINGS["pipeline_threads"]
    return Pipeline.deserialize(
        filename=str(path),
        batch_size=size,
        num_threads=threads,
        device_id=SETTINGS["pipeline_device"],
        prefetch_queue_depth=1,
    )


if __name__ == "__main__":
    found = Model().predict([Path(each).read_bytes() for each in sys.argv[1:]])
    print("\n".join(f"{path}  {label}  {score:.4f}" for path, (label, score) in zip(sys.argv[1:], found)))  # noqa: B905
