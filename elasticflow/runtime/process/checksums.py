"""Sums over the bits of tensors, and a check that all ranks have loaded the same tensors."""

from __future__ import annotations

import zlib
from collections import defaultdict
from hashlib import blake2b
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from elasticflow.errors import RanksDifferError
from elasticflow.runtime.process.host_copies import HostCopy, to_device

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from elasticflow.runtime.process.context import Worker


_PARTS = 64
# Words of a large tensor: each of its parts has as many words as there are parts, or more.
_LARGE = _PARTS * _PARTS
# Words from which on a tensor is summed by itself; smaller tensors are laid one behind the other.
_MEDIUM = 512


def require_same(worker: Worker, tensors: Mapping[str, Tensor], holders: Sequence[int] | None = None) -> None:
    """Make sure that *tensors* are the same on all ranks, or on the ranks *holders* that this rank is among. Collective: every rank.

    Raises:
        RanksDifferError: the sums over a tensor differ, which is a fault of the code that loaded it; the message names the
            tensor, on every rank.
    """
    if worker.world_size == 1:
        return
    sums = sums_of(tensors)
    group = range(worker.world_size) if holders is None else holders
    texts = worker.gather_text(f"{group[0]} {blake2b(repr(sums).encode()).hexdigest()}")
    by_group = {text.partition(" ")[0]: text for text in reversed(texts)}
    differing = [rank for rank, text in enumerate(texts) if text != by_group[text.partition(" ")[0]]]
    if not differing:
        return
    lines = [text.split("\n") for text in worker.gather_text("\n".join(f"{k} {v}" for k, v in sums.items()))]
    rank, first = differing[0], int(texts[differing[0]].partition(" ")[0])
    other = next((line for line in lines[rank] if line not in lines[first]), "a tensor ")
    raise RanksDifferError(
        f"all ranks loaded the same snapshot, and now rank {rank} has another {other.rpartition(' ')[0]} than rank {first}",
        "some load_state_dict or hook of the model or optimizer does not do the same on every rank",
    )


def sums_of(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the sum modulo 2**64 over the bytes of each tensor, taken as words in the order of its elements.

    A tensor of 32 KiB or more is cut into 64 parts, and each part has a weight of its own. The sums are signed, and the same
    on every device.
    """
    return Sums(tensors).start().result()


def crc_of(tensor: Tensor) -> int:
    """Return the CRC-32 of the bytes of a tensor in the order of its elements; for small ones, since it runs on the host."""
    return zlib.crc32(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)


class Sums:
    """Computes `sums_of` of the same tensors, as often as asked.

    A device runs a kernel for each tensor of 4 KiB or more, another if it is not contiguous, and a few for all smaller tensors
    together.

    Args:
        tensors: Tensors by key, which stay where they are in memory.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        by_device: dict[torch.device, dict[str, Tensor]] = defaultdict(dict)
        for key, tensor in tensors.items():
            by_device[tensor.device][key] = tensor.detach()
        self._tensors = dict(tensors)
        self._of_devices = [_DeviceSums(device, group) for device, group in by_device.items()]

    def fits(self, tensors: Mapping[str, Tensor]) -> bool:
        """Return True if *tensors* are the same objects under the same keys."""
        return tensors.keys() == self._tensors.keys() and all(
            tensor is self._tensors[key] for key, tensor in tensors.items()
        )

    def start(self) -> StartedSums:
        """Start to compute the sums of the current values; does not wait for devices other than the CPU."""
        with torch.no_grad():
            return StartedSums(list(self._tensors), [(sums.keys, sums.pieces()) for sums in self._of_devices])


class StartedSums:
    """Sums that a device may still be computing.

    Args:
        pieces: For each device, a vector with the sums over pieces of tensors, and the key that each element belongs to.
    """

    def __init__(self, order: list[str], pieces: list[tuple[list[str], Tensor]]) -> None:
        self._order, self._pieces = order, pieces
        self._late: list[Tensor | HostCopy] | None = None

    def fetch(self) -> None:
        """Have the sums moved to main memory as soon as each device's current stream comes to it; does not wait."""
        # The sums on the device stay: another stream may have made them, and could use their memory again.
        self._late = [sums if sums.device.type == "cpu" else HostCopy(sums) for _, sums in self._pieces]

    def result(self) -> dict[str, int]:
        """Return the sums by key; waits until they are moved to main memory."""
        if self._late is None:
            self.fetch()
        assert self._late is not None
        totals = dict.fromkeys(self._order, 0)
        for (keys, _), sums in zip(self._pieces, self._late, strict=True):
            for key, number in zip(keys, sums.tolist(), strict=True):
                totals[key] += number
        return {key: (total + 2**63) % 2**64 - 2**63 for key, total in totals.items()}


class _Cut(NamedTuple):
    """A tensor's bytes in pieces."""

    parts: Tensor | None
    medium: Tensor | None
    short: Tensor
    end: Tensor


class _DeviceSums:
    """Computes the sums over the pieces of one device's tensors.

    Attributes:
        keys: Key of the tensor that each element of `pieces` belongs to.
    """

    def __init__(self, device: torch.device, tensors: Mapping[str, Tensor]) -> None:
        self._device, self._tensors = device, list(tensors.values())
        # Pieces of tensors that lie in memory as their sums need them, and tensors that are put in order each time.
        self._known = [_cut(_bytes_of(t)) if _lies_in_order(t) else None for t in self._tensors]
        sizes = {key: tensor.numel() * tensor.element_size() for key, tensor in tensors.items()}
        large = [key for key, size in sizes.items() if size // 8 >= _LARGE]
        medium = [key for key, size in sizes.items() if _MEDIUM <= size // 8 < _LARGE]
        short = [size // 8 if size // 8 < _MEDIUM else 0 for size in sizes.values()]
        for number, size in enumerate(sizes.values()):
            if size // 8 >= _LARGE:
                short[number] = size // 8 % _PARTS
        borders = [0, *accumulate((*short, *(size % 8 for size in sizes.values())))]
        self.keys = [*large, *medium, *tensors, *tensors]
        self._borders = to_device(borders, device)
        self._weights = torch.arange(1, 2 * _PARTS, 2, device=device)

    def pieces(self) -> Tensor:
        """Return the sums: of the parts of large tensors with their weights, of medium tensors, of other words, of ends."""
        cuts = [
            _cut(_bytes_of(tensor)) if known is None else known
            for tensor, known in zip(self._tensors, self._known, strict=True)
        ]
        # Not `torch.hash_tensor`: in an XOR an even number of equal elements cancels out, be they ones or zeros; and the
        # sum is faster, too (torch 2.13, one core: 18 and 12 GB/s).
        parts = [cut.parts for cut in cuts if cut.parts is not None]
        of_parts = torch.empty(len(parts), _PARTS, dtype=torch.int64, device=self._device)
        for row, part in zip(of_parts.unbind(), parts, strict=True):
            torch.sum(part, 1, out=row)
        medium = [cut.medium for cut in cuts if cut.medium is not None]
        of_medium = torch.empty(len(medium), dtype=torch.int64, device=self._device)
        for number, words in zip(of_medium.unbind(), medium, strict=True):
            torch.sum(words, 0, out=number)
        ends = [cut.end for cut in cuts if len(cut.end)]
        short = torch.cat([*(cut.short for cut in cuts), *([torch.cat(ends).long()] if ends else [])])
        # A sum over some elements is a difference of running sums, which wrap around as the sums do.
        running = torch.zeros(len(short) + 1, dtype=torch.int64, device=self._device)
        torch.cumsum(short, 0, out=running[1:])
        # Each part of a large tensor has its own weight, so that two parts that changed places are noticed.
        return torch.cat([(of_parts * self._weights).sum(1), of_medium, running[self._borders].diff()])


def _lies_in_order(tensor: Tensor) -> bool:
    """True if the bytes of *tensor* can be read as words in the order of its elements, where they are."""
    return (
        tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
        and tensor.storage_offset() * tensor.element_size() % 8 == 0
    )


def _bytes_of(tensor: Tensor) -> Tensor:
    """Return the bytes in the order of the elements, from a whole word on: the tensor's own memory if it lies so, else a copy."""
    data = tensor.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
    return data.clone() if data.storage_offset() % 8 else data


def _cut(data: Tensor) -> _Cut:
    count = len(data) // 8
    words, end = data[: 8 * count].view(torch.int64), data[8 * count :]
    if count >= _LARGE:
        length = count // _PARTS
        return _Cut(words[: length * _PARTS].view(_PARTS, length), None, words[length * _PARTS :], end)
    if count >= _MEDIUM:
        return _Cut(None, words, words[:0], end)
    return _Cut(None, None, words, end)
