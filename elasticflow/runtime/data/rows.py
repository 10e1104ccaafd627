"""The rows of a batch, one for each sample: what has rows in it, and the batch cut between them."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterator


def leaves(batch: Any) -> Iterator[Any]:
    """Yield what *batch* is made of: tensors, columns, and values of other kinds.

    A column is a list or tuple whose items are no containers and no tensors, such as texts or numbers.
    """
    if isinstance(batch, Mapping):
        for item in batch.values():
            yield from leaves(item)
    elif isinstance(batch, list | tuple) and not is_column(batch):
        for item in batch:
            yield from leaves(item)
    else:
        yield batch


def is_column(value: Any) -> bool:
    """True for a column; see `leaves`."""
    is_list = isinstance(value, list | tuple) and not hasattr(value, "_fields")
    return is_list and bool(value) and not any(isinstance(i, Tensor | Mapping | list | tuple) for i in value)


def has_rows(leaf: Any, rows: int) -> bool:
    """True if a leaf has that many rows."""
    is_long = leaf.dim() > 0 if isinstance(leaf, Tensor) else is_column(leaf)
    return is_long and len(leaf) == rows


def cut(batch: Any, rows: int, low: int, high: int) -> Any:
    """Return *batch* with the rows from *low* to *high* of each leaf that has *rows* of them; other leaves stay whole."""
    if isinstance(batch, Mapping):
        items = {key: cut(item, rows, low, high) for key, item in batch.items()}
        if not isinstance(batch, dict):
            return type(batch)(items)  # type: ignore[call-arg]
        # The class may take other arguments, as defaultdict does.
        part = copy(batch)
        for key, item in items.items():
            part[key] = item
        return part
    if isinstance(batch, Tensor) or is_column(batch):
        return batch[low:high] if has_rows(batch, rows) else batch
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(cut(item, rows, low, high) for item in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(cut(item, rows, low, high) for item in batch)
    return batch
