"""`shapes-segmenter`: a small encoder and decoder that tells the pixels of circles, squares and triangles from the background.

python models/shapes/segmenter.py   # segmenter.safetensors and segmenter.json beside this file
"""

import hashlib
import json
from pathlib import Path

import torch
from shapes import SIDE, draw, read_drawings
from torch import Tensor, nn

HERE = Path(__file__).resolve().parent
SEED = 0


def _make_block(channels_in: int, channels_out: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, 3, stride, 1, bias=False), nn.BatchNorm2d(channels_out), nn.ReLU()
    )


class Segmenter(nn.Module):
    """Three strides down, three up with shortcuts; 72 thousand parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = _make_block(3, 16, 2), _make_block(16, 32, 2)
        self.down3 = nn.Sequential(_make_block(32, 48, 2), _make_block(48, 48))
        self.side2, self.side1 = nn.Conv2d(32, 32, 1), nn.Conv2d(16, 16, 1)
        self.up2, self.up1 = _make_block(48 + 32, 32), _make_block(32 + 16, 16)
        self.head = nn.Conv2d(16, 4, 1)

    def forward(self, image: Tensor) -> Tensor:
        """(n, 3, 64, 64) in [0, 1] to (n, 4, 32, 32) logits; the first class is the background."""
        one = self.down1(image)
        two = self.down2(one)
        three = nn.functional.interpolate(self.down3(two), scale_factor=2.0, mode="nearest")
        two = nn.functional.interpolate(
            self.up2(torch.cat([three, self.side2(two)], 1)), scale_factor=2.0, mode="nearest"
        )
        return self.head(self.up1(torch.cat([two, self.side1(one)], 1)))


def segmenter() -> nn.Module:
    """The architecture with fresh weights; the trained ones are in segmenter.safetensors."""
    return Segmenter()


def _to_tensors(image: object, mask: object) -> tuple[Tensor, Tensor]:
    """The card's preprocessing of one image, and its mask at the network's output."""
    import numpy as np
    from PIL import Image

    assert isinstance(image, Image.Image)
    assert isinstance(mask, Image.Image)
    pixels = np.asarray(image.resize((SIDE, SIDE), Image.Resampling.BILINEAR), np.float32) / 255
    classes = np.asarray(mask.resize((SIDE // 2, SIDE // 2), Image.Resampling.NEAREST), np.int64)
    return torch.from_numpy(pixels).permute(2, 0, 1), torch.from_numpy(classes)


def train(drawn: int = 3000, epochs: int = 12, batch_size: int = 32) -> None:
    """Trains from SEED on images drawn anew and writes the weights."""
    import numpy as np
    from safetensors.torch import save_file

    torch.manual_seed(SEED)
    rng = np.random.default_rng([SEED, 100])
    made = [_to_tensors(one.image, one.mask) for one in (draw(rng) for _ in range(drawn))]
    images, masks = torch.stack([each for each, _ in made]), torch.stack([each for _, each in made])
    model, loss_of = segmenter(), nn.CrossEntropyLoss(torch.tensor([0.6, 1.0, 1.0, 1.0]))
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, total_steps=epochs * -(-drawn // batch_size))
    for epoch in range(epochs):
        model.train()
        for batch in torch.randperm(drawn).split(batch_size):
            optimizer.zero_grad()
            axes = [axis for axis in (2, 3) if torch.rand(()) < 0.5]
            loss = loss_of(model(images[batch].flip(axes)), masks[batch].flip([axis - 1 for axis in axes]))
            loss.backward()
            optimizer.step()
            schedule.step()
        print(epoch, float(loss.detach()), flush=True)
    model.eval()
    save_file({name: value.contiguous() for name, value in model.state_dict().items()}, HERE / "segmenter.safetensors")
    report = {
        "seed": SEED,
        "images": drawn,
        "epochs": epochs,
        "torch": torch.__version__,
        "validation_mean_iou_at_output": _compute_mean_iou(model),
        "weights_sha256": hashlib.sha256((HERE / "segmenter.safetensors").read_bytes()).hexdigest(),
    }
    (HERE / "segmenter.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(report, indent=2))


@torch.inference_mode()
def _compute_mean_iou(model: nn.Module) -> float:
    made = [_to_tensors(image, mask) for image, mask in read_drawings("validation")]
    found = model(torch.stack([each for each, _ in made])).argmax(1)
    truth = torch.stack([each for _, each in made])
    table = torch.bincount(4 * truth.flatten() + found.flatten(), minlength=16).reshape(4, 4).double()
    return float((table.diag() / (table.sum(0) + table.sum(1) - table.diag())).mean())


if __name__ == "__main__":
    train()
