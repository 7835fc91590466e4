"""Detectors and a text model with random weights for gpu_tasks.sh: what they cost, and whether outputs keep.

As a module: factories for `optpipe build benchmarks/task_models.py:detr`. As a script:

    python benchmarks/task_models.py bert FOLDER              # BERT-base's configuration, for hf:FOLDER
    python benchmarks/task_models.py compile OUT.json NAME …  # torch.compile in FP16: detr, retinanet, bert-128, …
"""

import json
import os
import sys
from statistics import median
from time import perf_counter

import torch
from torch import nn

SIDE = int(os.environ.get("SIDE", "640"))
"""Of the images, in pixels, a multiple of 32."""
INPUTS = [
    {
        "name": "pixel_values",
        "dtype": "float32",
        "min": [1, 3, SIDE, SIDE],
        "opt": [1, 3, SIDE, SIDE],
        "max": [8, 3, SIDE, SIDE],
    }
]
BATCHES = (1, 8)


def detr() -> nn.Module:
    """DETR with ResNet-50, 91 classes, 100 queries."""
    from transformers import DetrConfig, DetrForObjectDetection, ResNetConfig

    backbone = ResNetConfig(out_features=["stage4"])
    config = DetrConfig(
        use_timm_backbone=False,
        use_pretrained_backbone=False,
        backbone=None,
        backbone_config=backbone,
        num_labels=91,
    )
    return Outputs(DetrForObjectDetection(config)).eval()


def retinanet() -> nn.Module:
    """RetinaNet with ResNet-50 and FPN, 91 classes, without NMS: random weights find nothing, so with it no output would be left."""
    from torchvision.models.detection import retinanet_resnet50_fpn

    return RawHead(retinanet_resnet50_fpn(weights=None, weights_backbone=None)).eval()


class RawHead(nn.Module):
    """torchvision's backbone and heads on images that are scaled already; decoding and NMS are outside."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.backbone, self.head = model.backbone, model.head

    def forward(self, pixel_values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(n, 3, SIDE, SIDE) to logits (n, anchors, classes) and box offsets (n, anchors, 4)."""
        found = self.head(list(self.backbone(pixel_values).values()))
        return found["cls_logits"], found["bbox_regression"]


class Outputs(nn.Module):
    """Logits and boxes alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(n, 3, SIDE, SIDE) to logits (n, queries, classes) and boxes (n, queries, 4)."""
        found = self.model(pixel_values=pixel_values)
        return found.logits, found.pred_boxes


def write_bert(folder: str) -> None:
    """The configuration of BERT-base with a head for two classes; weights are drawn where it is built."""
    from transformers import BertConfig

    BertConfig(architectures=["BertForSequenceClassification"]).save_pretrained(folder)


def _make_inputs(name: str, batch: int) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    if not name.startswith("bert-"):
        return {"detr": detr, "retinanet": retinanet}[name](), (
            torch.rand(batch, 3, SIDE, SIDE, dtype=torch.float16),
        )
    from transformers import BertConfig, BertForSequenceClassification

    ids = torch.randint(1000, 20000, (batch, int(name.removeprefix("bert-"))))
    return BertForSequenceClassification(BertConfig()).eval(), (ids, torch.ones_like(ids))


def time_compiled(name: str, batch: int) -> float:
    """Median milliseconds of a call of torch.compile's module (reduce-overhead, FP16), synchronized each time."""
    model, inputs = _make_inputs(name, batch)
    torch.compiler.reset()  # else a second batch size would be compiled for all sizes
    compiled = torch.compile(model.half().cuda(), mode="reduce-overhead", dynamic=False)
    held, times = [each.cuda() for each in inputs], []
    with torch.inference_mode():
        for turn in range(2000):
            torch.cuda.synchronize()
            begun = perf_counter()
            compiled(*held)
            torch.cuda.synchronize()
            times.append(perf_counter() - begun)
            if turn > 60 and sum(times[10:]) > 2:
                break
    return 1e3 * median(times[10:])


def write_compiled(path: str, names: list[str]) -> None:
    """Writes the milliseconds of every model and batch size, or why there are none."""
    found: dict[str, float | str] = {}
    for name in names:
        for batch in BATCHES:
            try:
                found[f"{name} batch {batch}"] = time_compiled(name, batch)
            except Exception as error:  # noqa: BLE001 - one model that does not compile must not hide the others
                found[f"{name} batch {batch}"] = str(error).splitlines()[0][:200]
            with open(path, "w", encoding="utf-8") as file:  # noqa: PTH123 - after each, in case time runs out
                json.dump(found, file, indent=1)


if __name__ == "__main__":
    if sys.argv[1] == "bert":
        write_bert(sys.argv[2])
    else:
        write_compiled(sys.argv[2], sys.argv[3:])
