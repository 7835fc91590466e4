"""`shapes-detector`: a small anchor-free detector of circles, squares and triangles with a head as YOLOv8's.

python models/shapes/detector.py   # detector.safetensors and detector.json beside this file
"""

import torch
from networks import SEED, make_block, save_trained
from shapes import SIDE, Drawing, draw
from torch import Tensor, nn

STRIDE = 4
CELLS = SIDE // STRIDE


class Detector(nn.Module):
    """Strides of 4, 8 and 16, brought back to 4, where each of 16 × 16 cells says a box and three scores."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(make_block(3, 16, 2), make_block(16, 32, 2), make_block(32, 32))
        self.down1 = nn.Sequential(make_block(32, 48, 2), make_block(48, 48))
        self.down2 = nn.Sequential(make_block(48, 64, 2), make_block(64, 64))
        self.up1, self.up0 = make_block(64 + 48, 48), make_block(48 + 32, 48)
        self.boxes = nn.Sequential(make_block(48, 32), nn.Conv2d(32, 4, 1))
        self.scores = nn.Sequential(make_block(48, 32), nn.Conv2d(32, 3, 1))
        rows, columns = torch.meshgrid(torch.arange(CELLS), torch.arange(CELLS), indexing="ij")
        centers = torch.stack([columns, rows], 0).flatten(1).float() * STRIDE + STRIDE / 2
        self.register_buffer("centers", centers, persistent=False)
        nn.init.constant_(self.scores[1].bias, -4.0)

    def locate(self, image: Tensor) -> tuple[Tensor, Tensor]:
        """(n, 3, 64, 64) to the distances of the sides from each cell's center (n, 4, 256), in pixels, and logits (n, 3, 256)."""
        zero = self.stem(image)
        one = self.down1(zero)
        two = nn.functional.interpolate(self.down2(one), scale_factor=2.0, mode="nearest")
        one = nn.functional.interpolate(
            self.up1(torch.cat([two, one], 1)), scale_factor=2.0, mode="nearest"
        )
        found = self.up0(torch.cat([one, zero], 1))
        return nn.functional.softplus(self.boxes(found).flatten(2)) * STRIDE, self.scores(
            found
        ).flatten(2)

    def forward(self, image: Tensor) -> Tensor:
        """(n, 3, 64, 64) in [0, 1] to (n, 7, 256): center x and y, width and height in pixels, and a score for each class."""
        sides, logits = self.locate(image)
        low, high = self.centers - sides[:, :2], self.centers + sides[:, 2:]
        return torch.cat([(low + high) / 2, high - low, logits.sigmoid()], 1)


def detector() -> nn.Module:
    """The architecture with fresh weights; the trained ones are in detector.safetensors."""
    return Detector()


def _to_tensors(drawing: Drawing) -> tuple[Tensor, Tensor, Tensor]:
    """The letterboxed image (3, 64, 64), the sides of each cell's box (4, 256), and its class scores (3, 256)."""
    import numpy as np
    from PIL import Image

    width, height = drawing.image.size
    long = max(width, height)
    size = (SIDE * width // long, SIDE * height // long)
    left, top = (SIDE - size[0]) // 2, (SIDE - size[1]) // 2
    canvas = np.full((SIDE, SIDE, 3), 114, np.float32)
    canvas[top : top + size[1], left : left + size[0]] = np.asarray(
        drawing.image.resize(size, Image.Resampling.BILINEAR)
    )
    rows, columns = np.meshgrid(*(np.arange(CELLS) * STRIDE + STRIDE / 2,) * 2, indexing="ij")
    sides, scores = np.zeros((4, CELLS, CELLS), np.float32), np.zeros((3, CELLS, CELLS), np.float32)
    for kind, (x, y, wide, high), _ in sorted(
        drawing.shapes, key=lambda shape: -shape[1][2] * shape[1][3]
    ):
        factors = size[0] / width, size[1] / height
        box = (
            x * factors[0] + left,
            y * factors[1] + top,
            (x + wide) * factors[0] + left,
            (y + high) * factors[1] + top,
        )
        center, reach = ((box[0] + box[2]) / 2, (box[1] + box[3]) / 2), 1.5 * STRIDE
        near = (abs(columns - center[0]) < reach) & (abs(rows - center[1]) < reach)
        near &= (columns > box[0]) & (columns < box[2]) & (rows > box[1]) & (rows < box[3])
        distances = (columns - box[0], rows - box[1], box[2] - columns, box[3] - rows)
        scores[:, near] = 0
        scores[kind][near] = 1
        for side, distance in zip(sides, distances, strict=True):
            side[near] = distance[near]
    arrays = (canvas.transpose(2, 0, 1) / 255, sides.reshape(4, -1), scores.reshape(3, -1))
    return tuple(torch.from_numpy(each) for each in arrays)


def compute_loss(sides: Tensor, logits: Tensor, wanted: Tensor, scores: Tensor) -> Tensor:
    """Focal loss of the scores and GIoU loss of the boxes at the cells that have one, each per such cell."""
    mine = scores.sum(1) > 0
    count = mine.sum().clamp(min=1)
    sure = logits.sigmoid()
    wrong = torch.where(scores > 0, 1 - sure, sure)
    focal = (
        nn.functional.binary_cross_entropy_with_logits(logits, scores, reduction="none") * wrong**2
    )
    found, truth = sides.permute(0, 2, 1)[mine], wanted.permute(0, 2, 1)[mine]
    smaller, larger = torch.minimum(found, truth), torch.maximum(found, truth)
    areas = [
        (each[:, 0] + each[:, 2]) * (each[:, 1] + each[:, 3])
        for each in (smaller, found, truth, larger)
    ]
    union = areas[1] + areas[2] - areas[0]
    overlap = areas[0] / union - (areas[3] - union) / areas[3].clamp(min=1e-6)
    return (focal.sum() + 1.5 * (1 - overlap).sum()) / count


def train(drawn: int = 4000, epochs: int = 14, batch_size: int = 32) -> None:
    """Trains from SEED on images drawn anew and writes the weights."""
    import numpy as np

    torch.manual_seed(SEED)
    rng = np.random.default_rng([SEED, 200])
    made = [_to_tensors(draw(rng)) for _ in range(drawn)]
    images, sides, scores = (torch.stack([each[place] for each in made]) for place in range(3))
    model = Detector()
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 4e-3, total_steps=epochs * -(-drawn // batch_size)
    )
    for epoch in range(epochs):
        model.train()
        for batch in torch.randperm(drawn).split(batch_size):
            optimizer.zero_grad()
            loss = compute_loss(*model.locate(images[batch]), sides[batch], scores[batch])
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 10.0)
            optimizer.step()
            schedule.step()
        print(epoch, float(loss.detach()), flush=True)
    model.eval()
    save_trained(model, "detector", images=drawn, epochs=epochs)


if __name__ == "__main__":
    train()
