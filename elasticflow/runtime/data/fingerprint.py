"""A look at some samples of a dataset: its fingerprint, and whether a sample is the same when it is read again."""

from __future__ import annotations

import time
from collections.abc import Mapping
from hashlib import sha256
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import TensorDataset

from elasticflow.runtime.data import held_generators, notes
from elasticflow.runtime.data.walk import Content, digest_of
from elasticflow.runtime.process import random_streams

if TYPE_CHECKING:
    from collections.abc import Sequence

_PROBES = 16  # samples whose content goes into a fingerprint
_PROBES_IN_MEMORY = 256  # of a list, which gives a sample in no time
_ARRAY_ROWS, _ARRAY_BYTES = 1 << 16, 4 << 20  # of an array: most rows, and most of their bytes
# For a dataset with a fingerprint of its own: samples read twice, and the time after which no more are read.
_PROBES_BESIDE, _BESIDE_S = 4, 1.0
_DIGITS = 16
_PARTS_SHOWN, _GENERATORS_SHOWN = 3, 3


class Varying(NamedTuple):
    """A sample that is not the same when it is read twice under one seed.

    Attributes:
        parts: Where the two readings differ, as far as it can be told: `[0]: float32 (3, 64, 64)`.
        generators: Random generators that the dataset holds for itself: `dataset.rng`.
        is_plain: It differs outside of objects, too.
    """

    sample: int
    kind: str
    parts: tuple[str, ...] = ()
    generators: tuple[str, ...] = ()
    is_plain: bool = True


class Look(NamedTuple):
    """Result of a look at a dataset.

    Attributes:
        by_content: Fingerprint of the dataset; empty for a mixture.
        by_plain: Fingerprint that is the same at each opening, though objects in samples vary; empty for a mixture.
        by_length: Fingerprint that is the same at each opening, however samples vary; empty for a mixture.
        unseen: Classes of objects in its samples that cannot be looked into.
        varying: A sample that is not the same when it is read twice, the first one found.
        sets: For a mixture, size and look of each set.
    """

    by_content: str
    by_plain: str
    by_length: str
    unseen: tuple[str, ...] = ()
    varying: Varying | None = None
    sets: tuple[tuple[int, Look], ...] = ()

    def fingerprint(self, varying: Sequence[Varying] = ()) -> str:
        """Return the data's fingerprint, given the *varying* samples that other ranks have seen."""
        if not self.sets:
            seen = [*varying, *([] if self.varying is None else [self.varying])]
            if any(each.is_plain for each in seen):
                return self.by_length
            return self.by_plain if seen else self.by_content
        of_sets, before = [], 0
        for size, look in self.sets:
            inside = [each for each in varying if before <= each.sample < before + size]
            of_sets.append(f"{size} {look.fingerprint(inside)}")
            before += size
        return _short("\n".join(of_sets).encode())


def fingerprint_of(dataset: Any) -> str:
    """Return the fingerprint of the data; see `look_at`.

    Raises:
        Exception: an exception of the dataset, with a note that names the sample.
    """
    return look_at(dataset).fingerprint()


def look_at(dataset: Any) -> Look:
    """Return the fingerprints of the data, and a sample that varies between two reads, if any.

    The fingerprint is the dataset's own `fingerprint`, else a digest of its length and of some content. That are, spread
    evenly, 16 samples; 256 of a list; of arrays, tensors and TensorDatasets at most 65,536 rows or 4 MiB. So a change of
    few samples can go unnoticed: a dataset that knows better says so by an attribute or method `fingerprint`. The same
    content has the same one on every machine. (What Hugging Face datasets call `_fingerprint` has not: it counts paths,
    times and code, and can be random.)

    Samples are read twice, each under one seed; 4 of a dataset with a fingerprint of its own. Samples that differ
    identify nothing: of the data its length alone counts then.

    Raises:
        Exception: what the dataset raises, with a note that names the sample.
    """
    known = getattr(dataset, "look", None)  # a mixture has looked at each of its sets
    if isinstance(known, Look):
        return known
    own = getattr(dataset, "fingerprint", None)
    columns = dataset.tensors if isinstance(dataset, TensorDataset) else (dataset,)
    if own is not None:
        text = str(own() if callable(own) else own)
        look = _of_samples(dataset, _PROBES_BESIDE, _BESIDE_S)
        return look._replace(by_content=text, by_plain=text, by_length=text)
    if not all(map(_has_rows, columns)):
        return _of_samples(dataset, _PROBES_IN_MEMORY if isinstance(dataset, list) else _PROBES)
    mark = _short(_of_rows(dataset, columns))
    if isinstance(dataset, TensorDataset) and type(dataset).__getitem__ is not TensorDataset.__getitem__:
        return _of_samples(dataset, _PROBES)._replace(by_content=mark, by_plain=mark, by_length=mark)
    return Look(mark, mark, mark)


def combined(sizes: Sequence[int], looks: Sequence[Look]) -> Look:
    """Return the look at several sets, one after another."""
    unseen = dict.fromkeys(name for look in looks for name in look.unseen)
    before, varying = 0, None
    for size, look in zip(sizes, looks, strict=True):
        if look.varying is not None and varying is None:
            varying = look.varying._replace(sample=before + look.varying.sample)
        before += size
    return Look("", "", "", tuple(unseen), varying, tuple(zip(sizes, looks, strict=True)))


class _Probe:
    """Reads samples, each under a seed of its own: the same samples each time, but for what the dataset itself changes."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self.held = held_generators.of_libraries(dataset)

    def look_for_libraries(self) -> bool:
        """Return true if reading has brought a library's generators to light."""
        before, self.held = len(self.held), held_generators.of_libraries(self._dataset)
        return len(self.held) > before

    def sample(self, index: int) -> Any:
        random_streams.seed_all(index)
        for generator in self.held:
            generator.seed(index)
        try:
            return self._dataset[index]
        except Exception as error:
            notes.of_sample(error, self._dataset, index)
            raise

    def read(self, indices: Sequence[int], limit_s: float | None) -> list[Content]:
        """Return the content before the first sample, and up to each of those that the time allows."""
        contents = [Content()]
        contents[0].add_text(str(len(self._dataset)))
        until = None if limit_s is None else time.monotonic() + limit_s
        for index in indices:
            contents.append(self.after(contents[-1], index))
            if until is not None and time.monotonic() > until:
                break
        return contents

    def after(self, content: Content, index: int) -> Content:
        """Return *content* and a sample after it."""
        added = content.copy()
        added.add(self.sample(index))
        return added


@random_streams.put_back()
def _of_samples(dataset: Any, most: int, limit_s: float | None = None) -> Look:
    probe, indices = _Probe(dataset), spread(len(dataset), most)
    once = probe.read(indices, limit_s)
    if probe.look_for_libraries():  # imported, or made, for the first sample
        once = probe.read(indices, limit_s)
    # Backwards: a dataset may give the sample before once more, and would do so at the same places.
    places = range(len(once) - 1)
    again = [probe.after(once[n], indices[n]) for n in reversed(places)][::-1]
    varying = None
    changed = [n for n in places if once[n + 1].digest() != again[n].digest()]
    if changed:
        is_plain = any(once[n + 1].plain_digest() != again[n].plain_digest() for n in changed)
        varying = _varying(probe, dataset, indices[changed[0]])._replace(is_plain=is_plain)
    content = once[-1]
    return Look(
        _short(content.digest()),
        _short(content.plain_digest()),
        _short(str(len(dataset)).encode()),
        tuple(content.unseen),
        varying,
    )


def _varying(probe: _Probe, dataset: Any, index: int) -> Varying:
    """Return the description of a sample that has differed; it is read twice more to find the parts that differ."""
    parts = tuple(_differences(probe.sample(index), probe.sample(index)))[:_PARTS_SHOWN]
    own = [each.path for each in held_generators.held_by(dataset) if not each.is_of_library]
    return Varying(index, notes.name_of(dataset), parts, tuple(own[:_GENERATORS_SHOWN]))


def _differences(one: Any, other: Any) -> list[str]:
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        pairs = [(f"[{key!r}]", one[key], other[key]) for key in one if key in other]
    elif isinstance(one, list | tuple) and isinstance(other, list | tuple):
        pairs = [(f"[{n}]", *pair) for n, pair in enumerate(zip(one, other, strict=False))]
    else:
        return []
    return [
        f"{name}: {notes.form(value)}"
        for name, value, its in pairs
        if digest_of(value)[0] != digest_of(its)[0]
    ]


def _has_rows(column: Any) -> bool:
    """True if many rows can be taken out at once; out of a sparse tensor they cannot."""
    return isinstance(column, np.ndarray) or (
        isinstance(column, torch.Tensor) and column.layout == torch.strided
    )


def _of_rows(dataset: Any, columns: Sequence[Any]) -> bytes:
    content = Content()
    content.add_text(str(len(dataset)))
    for column in columns:
        rows = min(_ARRAY_ROWS, _ARRAY_BYTES * len(column) // max(1, column.nbytes))
        content.add(column[spread(len(column), max(_PROBES, rows))])
    return content.digest()


def _short(content: bytes) -> str:
    return sha256(content).hexdigest()[:_DIGITS]


def spread(length: int, most: int) -> list[int]:
    """Return up to *most* numbers below *length*, evenly spread, with the first and the last."""
    count = min(most, length)
    return [i * (length - 1) // max(1, count - 1) for i in range(count)]
