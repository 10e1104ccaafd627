"""The control store: keys that all processes of a launch see, the operations on them, and the way to reach them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from elasticflow.protocol.store_address import StoreAddress

ANSWER_S = 60.0


class ControlStore(Protocol):
    """A store of keys that all processes of a launch see: the supervisor's, or etcd's.

    Raises `StoreLostError` from any of its methods once the store does not answer.
    """

    def set(self, key: str, value: str, /) -> None:
        """Give *key* a value."""

    def get(self, key: str, /) -> bytes:
        """Return the value of *key*, once it has one; a client waits for five minutes at most."""

    def add(self, key: str, number: int, /) -> int:
        """Add *number* to the value of *key*, 0 at first; return the sum."""

    def check(self, keys: list[str], /) -> bool:
        """Return whether all *keys* have values."""

    def changed(self, folder: str, /) -> list[str] | None:
        """Return the keys below *folder*, which this process looks at all the time, that got a value since the last call.

        None: any of them may have, as at the first call.
        """

    def delete_key(self, key: str, /) -> bool:
        """Remove *key*; return whether it was there."""


class RemoteControlStore(ControlStore, Protocol):
    """A control store that another process serves."""

    @property
    def patience_s(self) -> float:
        """Seconds that a request may take, while the server is away, beyond those that an answer takes."""

    def forget(self) -> None:
        """Remove all keys below the address's prefix."""

    @property
    def own_address(self) -> str:
        """Address of this machine towards the store."""

    def get(self, key: str, /, limit_s: float = ...) -> bytes:
        """Return the value of *key*, once it has one, within *limit_s*: five minutes by default."""


def connect(address: StoreAddress, looks_at: str = "", answer_s: float = ANSWER_S) -> RemoteControlStore:
    """Return a client of the store at *address*.

    Args:
        address: Where it is served, and below which prefix its keys lie.
        looks_at: First word of the keys that this process looks at all the time: the store sends their changes. Empty: none.
        answer_s: Seconds within which a server other than etcd has to answer.

    Raises:
        StoreLostError: it does not answer.
    """
    if address.backend == "etcd-v2":
        from elasticflow.protocol.etcd_store import EtcdControlStore

        return EtcdControlStore(address, looks_at)
    from elasticflow.protocol.tcp_store import TcpControlStore

    return TcpControlStore(address, looks_at, answer_s)
