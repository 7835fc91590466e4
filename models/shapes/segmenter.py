"""`shapes-segmenter`: a small encoder and decoder that tells the pixels of circles, squares and triangles from the background.

python models/shapes/segmenter.py   # segmenter.safetensors and segmenter.json beside this file
"""

import torch
from networks import SEED, make_block, save_trained
from shapes import SIDE, draw, read_drawings
from torch import Tensor, nn


class Segmenter(nn.Module):
    """Three strides down, three up with shortcuts; 72 thousand parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = make_block(3, 16, 2), make_block(16, 32, 2)
        self.down3 = nn.Sequential(make_block(32, 48, 2), make_block(48, 48))
        self.side2, self.side1 = nn.Conv2d(32, 32, 1), nn.Conv2d(16, 16, 1)
        self.up2, self.up1 = make_block(48 + 32, 32), make_block(32 + 16, 16)
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

    torch.manual_seed(SEED)
    rng = np.random.default_rng([SEED, 100])
    made = [_to_tensors(one.image, one.mask) for one in (draw(rng) for _ in range(drawn))]
    images, masks = torch.stack([each for each, _ in made]), torch.stack([each for _, each in made])
    model, loss_of = segmenter(), nn.CrossEntropyLoss(torch.tensor([0.6, 1.0, 1.0, 1.0]))
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 5e-3, total_steps=epochs * -(-drawn // batch_size)
    )
    for epoch in range(epochs):
        model.train()
        for batch in torch.randperm(drawn).split(batch_size):
            optimizer.zero_grad()
            axes = [axis for axis in (2, 3) if torch.rand(()) < 0.5]
            loss = loss_of(
                model(images[batch].flip(axes)), masks[batch].flip([axis - 1 for axis in axes])
            )
            loss.backward()
            optimizer.step()
            schedule.step()
        print(epoch, float(loss.detach()), flush=True)
    model.eval()
    found = _compute_mean_iou(model)
    save_trained(
        model, "segmenter", images=drawn, epochs=epochs, validation_mean_iou_at_output=found
    )


@torch.inference_mode()
def _compute_mean_iou(model: nn.Module) -> float:
    made = [_to_tensors(image, mask) for image, mask in read_drawings("validation")]
    found = model(torch.stack([each for each, _ in made])).argmax(1)
    truth = torch.stack([each for _, each in made])
    table = (
        torch.bincount(4 * truth.flatten() + found.flatten(), minlength=16).reshape(4, 4).double()
    )
    return float((table.diag() / (table.sum(0) + table.sum(1) - table.diag())).mean())


if __name__ == "__main__":
    train()
