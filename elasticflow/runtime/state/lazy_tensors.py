"""Tensors of a verified snapshot, read when they are asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from elasticflow.runtime.state import tensors

if TYPE_CHECKING:
    from collections.abc import Iterator

    from elasticflow.snapshots.read.load import LoadedSnapshot


class Fresh(Mapping[str, Tensor]):
    """Each look reads the tensor anew, contiguous, into memory of its own: whoever looked may keep it.

    Raises:
        SnapshotError: at a look, if the tensor's file changed since it was verified, or cannot be read.
    """

    def __init__(self, loaded: LoadedSnapshot) -> None:
        self._loaded = loaded
        self._places = loaded.manifest.tensors

    def __getitem__(self, key: str) -> Tensor:
        """Read the tensor."""
        place = self._places[key]
        # Torch's own memory: with large pages (MADV_HUGEPAGE) a load of 0.6 GB once took 4 s, not 0.6: they must be found.
        tensor = torch.empty(place.shape, dtype=tensors.BY_NAME[place.dtype])
        if place.nbytes:
            self._loaded.read_into(key, tensor.view(-1).view(torch.uint8).numpy().data)
        return tensor

    def __iter__(self) -> Iterator[str]:
        """Go through the keys."""
        return iter(self._places)

    def __len__(self) -> int:
        """Count the tensors."""
        return len(self._places)
