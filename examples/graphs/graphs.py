"""Graph classification without a library for graphs: digits as graphs of their inked pixels, each of another size.

The collate function joins the graphs of a batch into one: their nodes below each other, their edges shifted to match.
Shapes: B graphs, N nodes and E edges of all of them together, F features.
"""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

FOLDER = Path(__file__).parent
CLASSES = 10


class Graph(NamedTuple):
    """One graph, or several in one."""

    nodes: Tensor  # (N, 3): ink, row and column
    edges: Tensor  # (2, E): a message goes from the node in the first row to the node in the second
    graph: Tensor  # (N): the place in the batch of each node's graph
    size: int  # B


class Layer(nn.Module):
    """Each node adds the mean of its neighbours' messages to what it is."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.message = nn.Sequential(nn.Linear(2 * width, width), nn.ReLU())
        self.update = nn.Sequential(nn.LayerNorm(2 * width), nn.Linear(2 * width, width), nn.ReLU())

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        """Return (N, F) for (N, F)."""
        source, target = edges
        messages = self.message(torch.cat((x[source], x[target]), dim=1))
        return x + self.update(torch.cat((x, mean(messages, target, len(x))), dim=1))


class GraphNet(nn.Module):
    """Layers of messages between neighbours, then the mean and the largest of the nodes of each graph."""

    def __init__(self, width: int = 32, depth: int = 4) -> None:
        super().__init__()
        self.embed = nn.Linear(3, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(depth))
        self.head = nn.Sequential(nn.Linear(2 * width, 2 * width), nn.ReLU(), nn.Linear(2 * width, CLASSES))

    def forward(self, batch: Graph) -> Tensor:
        """Return class scores (B, 10)."""
        x = self.embed(batch.nodes)
        for layer in self.layers:
            x = layer(x, batch.edges)
        index = batch.graph[:, None].expand_as(x)
        largest = x.new_zeros(batch.size, x.shape[1]).scatter_reduce(0, index, x, "amax", include_self=False)
        return self.head(torch.cat((mean(x, batch.graph, batch.size), largest), dim=1))


def mean(values: Tensor, index: Tensor, size: int) -> Tensor:
    """Return (size, F): the mean of the rows of *values* (M, F) with the same number in *index* (M)."""
    total = values.new_zeros(size, values.shape[1]).index_add(0, index, values)
    count = values.new_zeros(size).index_add(0, index, values.new_ones(len(index)))
    return total / count.clamp(min=1)[:, None]


class DigitGraphs(Dataset[tuple[Tensor, Tensor, int]]):
    """A node for each pixel with ink, edges between pixels that touch; the label is the digit."""

    def __init__(self, split: str = "train") -> None:
        name = "train" if split == "train" else "t10k"
        self.images = _read(f"{name}-images-idx3-ubyte.gz", header=16).view(-1, 8, 8) / 255
        self.labels = _read(f"{name}-labels-idx1-ubyte.gz", header=8)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        image = self.images[index]
        places = (image > 0.2).nonzero()  # (N, 2)
        near = torch.cdist(places.float(), places.float()) < 1.5
        edges = near.fill_diagonal_(False).nonzero().T
        ink = image[places[:, 0], places[:, 1], None]
        return torch.cat((ink, places / 4 - 1), dim=1), edges, int(self.labels[index])


def _read(name: str, header: int) -> Tensor:
    return torch.frombuffer(bytearray(gzip.decompress((FOLDER / name).read_bytes())), dtype=torch.uint8)[
        header:
    ]


def joined(samples: list[tuple[Tensor, Tensor, int]]) -> tuple[Graph, Tensor]:
    """Return the graphs of *samples* as one, and their labels (B)."""
    nodes, edges, labels = zip(*samples, strict=True)
    sizes = torch.tensor([len(each) for each in nodes])
    starts = (sizes.cumsum(0) - sizes).tolist()
    shifted = [each + start for each, start in zip(edges, starts, strict=True)]
    graph = torch.arange(len(samples)).repeat_interleave(sizes)
    return Graph(torch.cat(nodes), torch.cat(shifted, dim=1), graph, len(samples)), torch.tensor(labels)


def accuracy(scores: Tensor, labels: Tensor) -> Tensor:
    """Return the share of graphs whose highest score is their label's."""
    return (scores.argmax(dim=1) == labels).float().mean()
