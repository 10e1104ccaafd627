"""Detection: one to four digits of several sizes on a canvas, each with a box and a label.

As in torchvision, the model takes images and targets and returns losses; in evaluation mode it returns boxes.
Shapes: B images of 32 x 32 pixels, G = 8 x 8 cells that boxes are told for, N boxes of an image.
"""

from __future__ import annotations

import gzip
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

FOLDER = Path(__file__).parent
SIDE, STRIDE, CLASSES = 32, 4, 10
GRID = SIDE // STRIDE
# boxes (N, 4): left, top, right, bottom in pixels; labels (N); of boxes that were found scores (N), too
Target = dict[str, Tensor]
Batch = tuple[Tensor, list[Target]]


class Detector(nn.Module):
    """Tells for each cell of a grid if a digit's centre is in it, which digit, and how far its edges are (as FCOS does)."""

    centres: Tensor  # (G, 2) of the cells

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *(nn.Conv2d(1, width, 3, padding=1), nn.GroupNorm(4, width), nn.ReLU()),
            *(nn.Conv2d(width, 2 * width, 3, 2, padding=1), nn.GroupNorm(4, 2 * width), nn.ReLU()),
            *(nn.Conv2d(2 * width, 4 * width, 3, 2, padding=1), nn.GroupNorm(4, 4 * width), nn.ReLU()),
            *(nn.Conv2d(4 * width, 4 * width, 3, padding=1), nn.GroupNorm(4, 4 * width), nn.ReLU()),
            *(nn.Conv2d(4 * width, 4 * width, 3, padding=1), nn.ReLU()),
        )
        self.head = nn.Conv2d(4 * width, 1 + CLASSES + 4, 1)
        cells = STRIDE * (torch.arange(GRID) + 0.5)
        self.register_buffer("centres", torch.cartesian_prod(cells, cells).flip(1), persistent=False)

    def forward(
        self, images: Tensor, targets: list[Target] | None = None
    ) -> dict[str, Tensor] | list[Target]:
        """Return losses in training, and in evaluation mode what is found in each image (B, 1, 32, 32)."""
        maps = self.head(self.features(images)).flatten(2).transpose(1, 2)  # (B, G, 15)
        found, classes, edges = maps.split((1, CLASSES, 4), dim=2)
        edges = STRIDE * F.softplus(edges)
        boxes = torch.cat((self.centres - edges[..., :2], self.centres + edges[..., 2:]), dim=2)
        if self.training:
            return losses(found[..., 0], classes, boxes, targets or [])
        scores = found.sigmoid().view(-1, 1, GRID, GRID)
        peaks = (scores == F.max_pool2d(scores, 3, 1, 1)) & (scores > 0.05)  # better than all cells around
        each = zip(peaks.flatten(1), boxes, classes.argmax(dim=2), scores.flatten(1), strict=True)
        return [
            {"boxes": box[at], "labels": label[at], "scores": score[at]} for at, box, label, score in each
        ]


def losses(found: Tensor, classes: Tensor, boxes: Tensor, targets: list[Target]) -> dict[str, Tensor]:
    """Return the losses of where digits are, of which they are, and of their boxes: sums over an image, means over images."""
    image = torch.cat([torch.full_like(each["labels"], i) for i, each in enumerate(targets)])
    truth, labels = (torch.cat([each[name] for each in targets]) for name in ("boxes", "labels"))
    column, row = ((truth[:, :2] + truth[:, 2:]) / 2 / STRIDE).long().unbind(dim=1)
    at = image, row * GRID + column  # the cell of each box's centre
    there = torch.zeros_like(found).index_put(at, found.new_ones(()))
    return {
        "where": F.binary_cross_entropy_with_logits(found, there, reduction="sum") / len(targets),
        "which": F.cross_entropy(classes[at], labels, reduction="sum") / len(targets),
        "box": 0.2 * F.l1_loss(boxes[at], truth, reduction="sum") / len(targets),
    }


def iou(one: Tensor, other: Tensor) -> Tensor:
    """Return (N, M): the area that boxes (N, 4) and (M, 4) share, by the area that both cover."""
    least, most = torch.maximum(one[:, None, :2], other[:, :2]), torch.minimum(one[:, None, 2:], other[:, 2:])
    shared = (most - least).clamp(min=0).prod(dim=2)
    areas = [(each[:, 2:] - each[:, :2]).prod(dim=1) for each in (one, other)]
    return shared / (areas[0][:, None] + areas[1] - shared)


class Scenes(Dataset[tuple[Tensor, Target]]):
    """Digits scaled and placed at random: to train on anew each time that they are read, to test on always the same."""

    def __init__(self, split: str = "train") -> None:
        name = "train" if split == "train" else "t10k"
        self.images = _read(f"{name}-images-idx3-ubyte.gz", header=16).view(-1, 1, 8, 8) / 255
        self.labels = _read(f"{name}-labels-idx1-ubyte.gz", header=8).long()
        self.fixed = split != "train"

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Target]:
        random = torch.Generator().manual_seed(index) if self.fixed else None
        canvas, boxes = torch.zeros(SIDE, SIDE), torch.zeros(0, 4)
        labels: list[Tensor] = []
        for digit in (index, *torch.randint(len(self), (3,), generator=random).tolist()):
            size = int(torch.randint(8, 15, (), generator=random))
            left, top = torch.randint(SIDE - size + 1, (2,), generator=random).tolist()
            box = torch.tensor([[left, top, left + size, top + size]], dtype=torch.float32)
            if len(boxes) and iou(box, boxes).max() > 0.05:
                continue  # no room for it: there are fewer digits
            scaled = F.interpolate(self.images[digit][None], size=(size, size), mode="bilinear")[0, 0]
            canvas[top : top + size, left : left + size] += scaled
            boxes, labels = torch.cat((boxes, box)), [*labels, self.labels[digit]]
        return canvas[None], {"boxes": boxes, "labels": torch.stack(labels)}


def _read(name: str, header: int) -> Tensor:
    return torch.frombuffer(bytearray(gzip.decompress((FOLDER / name).read_bytes())), dtype=torch.uint8)[
        header:
    ]


def ragged(samples: list[tuple[Tensor, Target]]) -> Batch:
    """Return the images of *samples* as one tensor, and their targets as a list."""
    images, targets = zip(*samples, strict=True)
    return torch.stack(images), list(targets)


def training_step(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """Return the sum of the model's losses, and each of them."""
    losses = model(*batch)
    return {"loss": sum(losses.values()), **losses}


def detect(model: nn.Module, batch: Batch) -> tuple[list[Target], list[Target]]:
    """Return what the model finds, and what is there; evaluation's step."""
    return model(batch[0]), batch[1]


class AveragePrecision:
    """The mean precision at the boxes that are found, of all that are there; half of the area must be shared (AP50)."""

    def __init__(self) -> None:
        self.hits: list[tuple[float, bool]] = []  # of each box that was found: its score, and if it is right
        self.there = 0

    def update(self, found: list[Target], targets: list[Target]) -> None:
        """Match what was found, best first, with what is there."""
        for one, target in zip(found, targets, strict=True):
            fits = iou(one["boxes"], target["boxes"]) * (one["labels"][:, None] == target["labels"])
            for best in one["scores"].argsort(descending=True):
                fit = fits[best]
                self.hits.append((float(one["scores"][best]), bool(fit.max() >= 0.5)))
                fits[:, fit.argmax()] *= fit.max() < 0.5  # each is found once
            self.there += len(target["labels"])

    def compute(self) -> float:
        """Return the mean over all images."""
        right = torch.tensor(
            [hit for _, hit in sorted(self.hits, key=lambda each: -each[0])], dtype=torch.float64
        )
        precision = right.cumsum(0) / torch.arange(1, len(right) + 1)
        return float((precision * right).sum() / self.there)
