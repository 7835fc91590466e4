"""The derived pipeline as a stored model of Triton's DALI backend."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from optpipe.core.card import ModelCard
from optpipe.core.errors import StageError
from optpipe.core.events import Listener
from optpipe.core.records import plain_from_record
from optpipe.core.transform import Transform
from optpipe.models.inputs.synthetic import make_edge_case_files
from optpipe.preprocess.dali_pipeline import INPUT, DaliPlan, dali_from_transform, require_dali
from optpipe.workspace.entry import Entry
from optpipe.workspace.environment import get_package_version
from optpipe.workspace.store import Store

PIPELINE = "1/model.dali"
CONFIG = "config.pbtxt"
_TRITON_TYPES = {"float32": "TYPE_FP32", "float16": "TYPE_FP16", "uint8": "TYPE_UINT8"}


@dataclass(frozen=True, slots=True)
class PreprocessingInfo:
    KIND: ClassVar[str] = "preprocessing"

    model: str
    transform_sha256: str
    plan: DaliPlan
    file: str


def build_preprocessing_artifact(
    card: ModelCard, transform: Transform, plan: DaliPlan, model: str, store: Store, listener: Listener
) -> tuple[Entry[PreprocessingInfo], bool]:
    """The serialized pipeline, Triton's configuration and the transform of the exported `model`.

    The written file is loaded and must give the same tensor as the original pipeline.
    """
    require_dali()
    recipe = {
        "revision": 4,
        "model": model,
        "transform": transform.hash,
        "plan": plain_from_record(plan),
        "dali": get_package_version("nvidia-dali-cuda130"),
    }

    def make(directory: Path) -> PreprocessingInfo:
        target = directory / PIPELINE
        target.parent.mkdir()
        dali_from_transform(transform, plan).serialize(filename=str(target))
        _require_same(target, transform, plan)
        (directory / CONFIG).write_text(make_triton_config(transform, plan), encoding="utf-8")
        (directory / "transform.json").write_text(json.dumps(transform.to_dict(), indent=1), encoding="utf-8")
        return PreprocessingInfo(card.name, transform.hash, plan, PIPELINE)

    return store.produce(PreprocessingInfo, recipe, make, parents=(model,), listener=listener)


def make_triton_config(transform: Transform, plan: DaliPlan) -> str:
    kind = "KIND_GPU" if plan.device == "gpu" else "KIND_CPU"
    # no name: Triton uses the folder's name and rejects a model whose folder has another
    return f"""backend: "dali"
max_batch_size: {plan.batch_size}
input [
  {{ name: "{INPUT}" data_type: TYPE_UINT8 dims: [ -1 ] allow_ragged_batch: true }}
]
output [
  {{ name: "DALI_OUTPUT_0" data_type: {_TRITON_TYPES[transform.pack.dtype]} dims: [ {", ".join(map(str, transform.shape))} ] }}
]
instance_group [ {{ count: 1 kind: {kind} }} ]
dynamic_batching {{ }}
parameters {{ key: "num_threads" value: {{ string_value: "{plan.threads}" }} }}
"""


def _require_same(path: Path, transform: Transform, plan: DaliPlan) -> None:
    import numpy as np
    from nvidia.dali.pipeline import Pipeline

    one = replace(plan, batch_size=1)
    device_id = 0 if plan.device == "gpu" else None
    loaded = Pipeline.deserialize(
        filename=str(path), batch_size=1, num_threads=plan.threads, device_id=device_id, prefetch_queue_depth=1
    )
    fresh = dali_from_transform(transform, one, prefetch=1)
    data = np.frombuffer(next(iter(make_edge_case_files()))[1], np.uint8)
    results = []
    for pipeline in (loaded, fresh):
        pipeline.feed_input(INPUT, [data])
        results.append(np.array(pipeline.run()[0].as_cpu()[0]))
    if not np.array_equal(results[0], results[1]):
        raise StageError(f"{path.name}: the serialized pipeline does not reproduce the original pipeline's tensor")
