"""The content of a sample as bytes for a digest: arrays, texts, numbers, containers, and any object that holds such."""

from __future__ import annotations

import threading
import weakref
from collections import UserDict
from collections.abc import Mapping
from datetime import date, time, timedelta
from decimal import Decimal
from hashlib import blake2b, sha256
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from elasticflow.runtime.data import notes

if TYPE_CHECKING:
    from collections.abc import Callable

_BY_TEXT = (str, int, float, complex, np.generic, date, time, timedelta, Decimal)
_HOLD_NOTHING = (type(threading.Lock()), type(threading.RLock()))
_MOST_DEPTH = 120
# Limit for one sample, inside its objects; an array counts once for each 4 KiB. An object may refer to a whole dataset.
_MOST_PARTS = 20_000
_BYTES_OF_PART = 4096
_PICKLE_PROTOCOL = 4


class Content:
    """Digest of values that are added one after another.

    An object counts by its class and by what pickling it would keep: the fields of a dataclass, an attrs or a pydantic
    class, `__dict__` and `__slots__`, the items of a set. In the plain digest, for samples whose objects vary, it counts by
    its class alone.

    Args:
        end: Bytes after each number and text: without them, (1, 23) and (12, 3) have one digest. Fingerprints in snapshots have no such bytes.

    Attributes:
        unseen: Classes of the objects that cannot be looked into, each once.
    """

    def __init__(self, new_hash: Callable[[], Any] = sha256, end: bytes = b"") -> None:
        self._hash, self._end = new_hash(), end
        self._plain: Any = None  # from the first object on: the hash of what lies outside of objects
        self._new_hash = new_hash
        # Objects that the walk is inside of, the outermost first.
        self._inside: list[int] = []
        self._depth = 0
        self._room = _MOST_PARTS
        self.unseen: dict[str, None] = {}

    def add_text(self, text: str) -> None:
        """Add *text* that is no value of a sample, such as a length."""
        self._update(text.encode())

    def add(self, value: Any) -> None:
        """Add a sample, or rows of an array."""
        self._room = _MOST_PARTS
        self._add(value)

    def copy(self) -> Content:
        """Return a copy, to which other values can be added."""
        copied = Content(self._new_hash, self._end)
        copied._hash, copied.unseen = self._hash.copy(), dict(self.unseen)
        copied._plain = None if self._plain is None else self._plain.copy()
        return copied

    def digest(self) -> bytes:
        """Return the digest of everything added so far."""
        digest: bytes = self._hash.digest()
        return digest

    def plain_digest(self) -> bytes:
        """Return the digest of everything added so far, without what objects hold."""
        return self.digest() if self._plain is None else self._plain.digest()

    def _update(self, data: Any) -> None:
        self._hash.update(data)
        if self._plain is not None and not self._inside:
            self._plain.update(data)

    def _add(self, value: Any) -> None:
        if self._inside and not self._has_room(value):
            return
        self._depth += 1
        self._add_known(value)
        self._depth -= 1

    def _add_known(self, value: Any) -> None:
        if isinstance(value, torch.Tensor | np.ndarray):
            self._add_array(value)
            self._add_attributes(value)
        elif isinstance(value, Mapping):
            for key, item in value.items():
                self._update(str(key).encode())
                self._add(item)
            self._add_attributes(value)
        elif isinstance(value, list | tuple):
            self._update(f"{len(value)}".encode())
            for item in value:
                self._add(item)
            self._add_attributes(value)
        elif isinstance(value, bytes | bytearray):
            self._update(bytes(value))
        elif value is None or isinstance(value, _BY_TEXT):
            self._update(repr(value).encode() + self._end)
        elif hasattr(value, "tobytes") and not isinstance(value, type):  # images
            self._update(value.tobytes())
        else:
            self._add_object(value)

    def _add_attributes(self, value: Any) -> None:
        """Add what a subclass of a container or an array holds beside its items."""
        held = getattr(value, "__dict__", None)
        if isinstance(value, UserDict):
            held = {name: item for name, item in vars(value).items() if name != "data"}
        if held and id(value) not in self._inside:
            self._enter(value, "")
            self._add(held)
            self._inside.pop()

    def _add_array(self, value: Any) -> None:
        self._update(f"{value.dtype}{tuple(value.shape)}".encode())
        if isinstance(value, np.ndarray):
            if value.dtype.hasobject:
                self._add(value.tolist())  # its own bytes are addresses
            else:
                self._update(value.tobytes())
        elif value.layout == torch.strided:
            plain = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            self._update(plain.numpy().tobytes())
        else:
            self._enter(value, "")
            self._add_parts_of_tensor(value)
            self._inside.pop()

    def _add_parts_of_tensor(self, value: torch.Tensor) -> None:
        if value.layout in {torch.sparse_coo, torch.sparse_csr, torch.sparse_csc}:
            pairs = value.detach().cpu().to_sparse_coo().coalesce()  # type: ignore[no-untyped-call]
            self._add_array(pairs.indices())
            self._add_array(pairs.values())
        else:
            self.unseen[f"tensor of layout {value.layout}"] = None

    def _add_object(self, value: Any) -> None:
        """Add an object that is no plain data; the plain digest sees nothing inside of it."""
        name = notes.name_of(value)
        if id(value) in self._inside:  # it refers to itself
            self._update(f"^{len(self._inside) - self._inside.index(id(value))}".encode())
            return
        self._enter(value, name)
        if isinstance(value, type | ModuleType):
            self._update(f"{getattr(value, '__module__', '')}.{value.__name__}".encode())
        elif isinstance(value, weakref.ref):  # PyG's stores refer so to what they are of
            self._add(value())
        elif isinstance(value, set | frozenset):
            self._update(b"".join(sorted(map(self._alone, value))))
        elif not isinstance(value, _HOLD_NOTHING):
            self._add_state(value, name)
        self._inside.pop()

    def _add_state(self, value: Any, name: str) -> None:
        kept = _kept_of(value)
        if kept is None:
            self.unseen[name] = None
            # Its attributes are seen at least.
            kept = getattr(value, "__dict__", {})
        self._add(kept)

    def _enter(self, value: Any, name: str) -> None:
        if self._plain is None:
            self._plain = self._hash.copy()
        self._update(name.encode())
        self._inside.append(id(value))

    def _alone(self, item: Any) -> bytes:
        """Return the digest of an item of a set, which has no order of its own."""
        content = Content(self._new_hash, self._end)
        content._inside, content._depth = [*self._inside], self._depth
        content._room, content.unseen = self._room, self.unseen
        content._add(item)
        self._room = content._room
        return content.digest()

    def _has_room(self, value: Any) -> bool:
        self._room -= 1 + _nbytes_of(value) // _BYTES_OF_PART
        if self._room >= 0 and self._depth < _MOST_DEPTH:
            return True
        self.unseen[f"{notes.name_of(value)} (deep inside, or after {_MOST_PARTS:,} parts of a sample)"] = (
            None
        )
        return False


def _nbytes_of(value: Any) -> int:
    """Return the bytes of an array; 0 for what has none, and for sparse tensors, which refuse to tell."""
    if isinstance(value, torch.Tensor) and value.layout != torch.strided:
        return 0
    nbytes = getattr(value, "nbytes", 0)
    return nbytes if isinstance(nbytes, int) else 0  # the class of an array has a descriptor


def digest_of(value: Any) -> tuple[bytes, dict[str, None]]:
    """Return a digest of a sample's content, and the classes in it that cannot be looked into."""
    content = Content(_short, b",")
    content.add(value)
    return content.digest(), content.unseen


def _short() -> Any:
    return blake2b(digest_size=16)


def _kept_of(value: Any) -> Any:
    """Return the contents of *value* that pickle would keep, as plain data and further objects; None if it cannot be pickled."""
    try:
        made = value.__reduce_ex__(_PICKLE_PROTOCOL)
        if isinstance(made, str):
            return made
        make, arguments, state, items, pairs = (*made, None, None, None)[:5]
        name = f"{getattr(make, '__module__', '')}.{getattr(make, '__qualname__', '')}"
        return [name, arguments, state, list(items or ()), list(pairs or ())]
    except Exception:  # noqa: BLE001  # of the class's own code, which is said to be unseen then
        return None
