"""Data as a module of loaders."""

from __future__ import annotations

from torch.utils.data import DataLoader, Dataset


class Pictures(Dataset):
    """A dataset."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> object: ...


class ImagesModule:
    """Makes loaders."""

    def train_dataloader(self) -> DataLoader:
        """Make the loader of training."""
        return DataLoader(Pictures())
