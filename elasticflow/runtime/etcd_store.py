"""A launch's keys in etcd as a store of torch's, for process groups (floor R)."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from torch._C._distributed_c10d import Store

from elasticflow.etcd_keys import EtcdKeys

if TYPE_CHECKING:
    from datetime import timedelta

    from elasticflow.rendezvous_place import RendezvousPlace

_alive: list[EtcdStore] = []


class EtcdStore(Store):
    """The keys at *place*; `get` and `wait` wait for *timeout* unless they are told otherwise."""

    def __init__(self, place: RendezvousPlace, timeout: timedelta) -> None:
        super().__init__()
        self._keys = EtcdKeys(place)
        self._timeout = timeout
        # torch holds the C++ half of this object only: without this one its methods would be gone.
        _alive.append(self)

    def set(self, key: str, value: str | bytes) -> None:
        """Give *key* a value."""
        self._keys.set(key, value)

    def get(self, key: str) -> bytes:
        """Return the value of *key*, once it has one."""
        return self._keys.get(key, self._timeout.total_seconds())

    def add(self, key: str, value: int) -> int:
        """Add *value* to the value of *key*, 0 at first; return the sum."""
        return self._keys.add(key, value)

    def check(self, keys: list[str]) -> bool:
        """Return whether all *keys* have values."""
        return self._keys.check(keys)

    def delete_key(self, key: str) -> bool:
        """Remove *key*; return whether it was there."""
        return self._keys.delete_key(key)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Return once all *keys* have values."""
        deadline = time.monotonic() + (timeout or self._timeout).total_seconds()
        for key in keys:
            self._keys.get(key, max(0.0, deadline - time.monotonic()))

    def set_timeout(self, timeout: timedelta) -> None:
        """Have `get` and `wait` wait for *timeout*."""
        self._timeout = timeout
