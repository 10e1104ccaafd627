"""The keys of a launch's store, and the clients to tell of a change: found without a look at all other keys."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterator

T = TypeVar("T")


class KeyTable:
    """Values by path; what lies below a folder is found without a look at all others."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        # The paths below each folder, for each folder that they lie in.
        self._below: dict[str, dict[str, None]] = {}

    def __contains__(self, path: object) -> bool:
        """Return whether *path* has a value."""
        return path in self._values

    def __getitem__(self, path: str) -> bytes:
        """Return the value of *path*, which has one."""
        return self._values[path]

    def get(self, path: str) -> bytes | None:
        """Return the value of *path*; None if it has none."""
        return self._values.get(path)

    def put(self, path: str, value: bytes) -> None:
        """Give *path* a value."""
        if path not in self._values:
            for folder in folders_of(path):
                self._below.setdefault(folder, {})[path] = None
        self._values[path] = value

    def delete(self, path: str) -> bool:
        """Remove *path*; return whether it was there."""
        if self._values.pop(path, None) is None:
            return False
        for folder in folders_of(path):
            paths = self._below[folder]
            del paths[path]
            if not paths:
                del self._below[folder]
        return True

    def below(self, folder: str) -> list[tuple[str, bytes]]:
        """Return the paths in *folder*, which ends with a slash, with their values."""
        return [(path, self._values[path]) for path in self._below.get(folder, ())]


class Subscriptions(Generic[T]):
    """The clients that wait for a value of a path, and those that watch a folder.

    A client waits for one path at a time, and watches one folder.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, dict[T, None]] = {}
        self._waits_for: dict[T, str] = {}
        self._watching: dict[str, dict[T, None]] = {}
        self._watches: dict[T, str] = {}

    def __len__(self) -> int:
        """Return how many waits and watches there are."""
        return len(self._waits_for) + len(self._watches)

    def wait(self, client: T, path: str) -> None:
        """Have *client* be told of the next value of *path*."""
        self._waits_for[client] = path
        self._waiting.setdefault(path, {})[client] = None

    def watch(self, client: T, folder: str) -> None:
        """Have *client* be told of each change of a path in *folder*, which ends with a slash."""
        self._watches[client] = folder
        self._watching.setdefault(folder, {})[client] = None

    def leave(self, client: T) -> None:
        """Have *client* be told of nothing any more."""
        if (path := self._waits_for.pop(client, None)) is not None:
            _take_out(self._waiting, path, client)
        if (folder := self._watches.pop(client, None)) is not None:
            _take_out(self._watching, folder, client)

    def take_waiting(self, path: str) -> list[T]:
        """Return the clients that wait for *path*, which wait no longer."""
        clients = list(self._waiting.pop(path, ()))
        for client in clients:
            del self._waits_for[client]
        return clients

    def watching(self, path: str) -> Iterator[T]:
        """Yield the clients that watch *path*."""
        for folder in folders_of(path):
            yield from self._watching.get(folder, ())


def _take_out(places: dict[str, dict[T, None]], place: str, client: T) -> None:
    clients = places[place]
    del clients[client]
    if not clients:
        del places[place]


def folders_of(path: str) -> list[str]:
    """Return the folders that *path* lies in, from the outermost on, each with the slash at its end."""
    folders, end = [], path.find("/")
    while end >= 0:
        folders.append(path[: end + 1])
        end = path.find("/", end + 1)
    return folders
