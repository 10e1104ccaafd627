"""Files of nodes that have run folders of their own, as the machine that leads has them sent: logs, what hooks logged.

    a command, on the machine that leads   puts a `FilesWanted` into `wanted/` of the run folder
    the supervisor                         asks all such nodes with `FilesWanted`, and writes the `FilePiece`s it gets
                                           to the same paths in its own run folder
    a node                                 says `FilesSent` once it has sent what there was
    the supervisor                         removes the request: the answer is there

What a node has sent is not sent again; of what is more than `MOST_OF_A_FILE` bytes long, the end is.
"""

from __future__ import annotations

import base64
import json
import os
import re
import secrets
from typing import TYPE_CHECKING

from elasticflow.launcher.rendezvous.store_keys import FILES_WANTED
from elasticflow.protocol import points
from elasticflow.protocol.json_codec import from_json, to_json
from elasticflow.protocol.messages import FilePiece, FilesSent, FilesWanted
from elasticflow.system import atomic_files

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from elasticflow.protocol.control_store import ControlStore
    from elasticflow.protocol.messages import Message
    from elasticflow.run_folder import RunFolder


MOST_OF_A_FILE = 1 << 20
MOST_AT_ONCE = 16 << 20
"""Bytes of all files of a node that answer one request."""
PIECE = 1 << 18
"""Bytes of one message."""
WANTED, COPIES = "wanted", "copies.json"
_TEXT = re.compile(
    r"logs/g\d{4,}/rank\d+\.(jsonl|stdout|stderr)|logs/agent-[^/]+\.log|logged/g\d{4,}-rank\d+\.jsonl"
)
_IMAGE = re.compile(r"logged/images/[^/.][^/]*\.png")


def may_be_sent(path: str) -> bool:
    """Return whether a node sends the file at *path* in its run folder; what is another path is no node's to write."""
    return _TEXT.fullmatch(path) is not None or is_image(path)


def is_image(path: str) -> bool:
    """Return whether the file is sent whole, or not at all."""
    return _IMAGE.fullmatch(path) is not None


def put_request(folder: RunFolder, wanted: FilesWanted) -> Path:
    """Leave the request *wanted* for the run's supervisor, which removes the file that is returned once the answer is there."""
    path = folder.path / WANTED / f"{secrets.token_hex(8)}.json"
    atomic_files.write(path, (to_json(wanted).encode(),))
    return path


def requests_in(folder: RunFolder) -> dict[Path, FilesWanted]:
    """Return the requests that commands have left, by their files; a file that holds no request is removed."""
    found = {}
    try:
        paths = sorted((folder.path / WANTED).glob("*.json"))
    except OSError:
        return {}
    for path in paths:
        try:
            found[path] = from_json(FilesWanted, json.loads(path.read_bytes()))
        except FileNotFoundError:
            continue
        except (OSError, ValueError):
            path.unlink(missing_ok=True)
    return found


def images_folder(folder: RunFolder) -> Path:
    """Return where images of hooks lie."""
    return folder.path / points.FOLDER / points.IMAGES


def copies_in(folder: RunFolder) -> set[str]:
    """Return the paths of files that other nodes have sent here."""
    try:
        return set(json.loads((folder.path / "logs" / COPIES).read_bytes()))
    except (OSError, ValueError, TypeError):
        return set()


def note_copies(folder: RunFolder, paths: set[str]) -> None:
    """Note which files other nodes have sent here."""
    path = folder.path / "logs" / COPIES
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_files.replace(path, (json.dumps(sorted(paths)).encode(),), sync=False)


# The line from which on a file is sent begins within so many bytes.
_LONGEST_LINE = 1 << 16


class FileSender:
    """Sends files of *node*'s run folder *folder*; one message for each look, so that the agent is not kept from its workers."""

    def __init__(
        self, store: ControlStore, post: Callable[[Message], None], node: str, folder: RunFolder
    ) -> None:
        self._store, self._post, self._node, self._folder = store, post, node, folder
        self._answered = 0
        self._messages: Iterator[Message] | None = None
        # Bytes that were sent of each file; of an image, its size and time.
        self._sent: dict[str, int] = {}
        self._images: dict[str, tuple[int, int]] = {}

    def look(self) -> None:
        """Send a little of what was asked for, if anything was."""
        if self._messages is None:
            if not self._store.check([FILES_WANTED]):
                return
            wanted = from_json(FilesWanted, json.loads(self._store.get(FILES_WANTED)))
            if wanted.number == self._answered:
                return
            self._answered = wanted.number
            self._messages = self._answer(wanted)
        if (message := next(self._messages, None)) is None:
            self._messages = None
        else:
            self._post(message)

    def send_last(self, generation: int) -> None:
        """Send unasked the new lines of *generation*'s logs and of hooks' points: this node exits, and cannot be asked any more.

        Raises:
            StoreLostError: the store is gone.
        """
        for message in self._answer(FilesWanted(generation, logged=True)):
            self._post(message)

    def _answer(self, wanted: FilesWanted) -> Iterator[Message]:
        paths = [
            self._folder.agent_log(self._node),
            *self._folder.generation_logs(wanted.generation).glob("rank*"),
        ]
        if wanted.logged:
            paths += [path for _, _, path in points.files_of(self._folder.path)]
            # Before the lines that name them.
            paths = [*images_folder(self._folder).glob("*.png"), *paths]
        copies = copies_in(self._folder)
        names = {path.relative_to(self._folder.path).as_posix(): path for path in sorted(paths)}
        own = {name: path for name, path in names.items() if name not in copies and may_be_sent(name)}
        texts = {name: path for name, path in own.items() if not is_image(name)}
        yield from self._of_images({name: path for name, path in own.items() if name not in texts})
        most = min(MOST_OF_A_FILE, max(PIECE // 4, MOST_AT_ONCE // max(1, len(texts))))
        for name, path in texts.items():
            yield from self._of_text(name, path, most)
        yield FilesSent(self._node, wanted.number)

    def _of_images(self, images: dict[str, Path]) -> Iterator[FilePiece]:
        left = MOST_AT_ONCE
        for name, path in images.items():
            try:
                stat = path.stat()
                mark = (stat.st_size, stat.st_mtime_ns)
                if self._images.get(name) == mark or stat.st_size > min(left, MOST_OF_A_FILE):
                    continue
                data = path.read_bytes()
            except OSError:  # it has gone, or cannot be read: the others can
                continue
            left -= len(data)
            self._images[name] = mark
            yield self._piece(name, 0, data, is_anew=True)

    def _of_text(self, name: str, path: Path, most: int) -> Iterator[FilePiece]:
        try:
            with path.open("rb") as file:
                size = file.seek(0, 2)
                sent = self._sent.get(name)
                # The middle of a stream that became too long is taken out of its file.
                is_anew = sent is not None and size < sent
                at = 0 if sent is None or is_anew else sent
                if sent is None and size == 0:
                    # That there is nothing in it is known then.
                    self._sent[name] = 0
                    yield self._piece(name, 0, b"", is_anew=False)
                if size - at > most:
                    at = _line_after(file.fileno(), size - most)
                file.seek(at)
                while at < size and (data := file.read(min(PIECE, size - at))):
                    yield self._piece(name, at, data, is_anew=is_anew)
                    is_anew = False
                    at += len(data)
                    self._sent[name] = at
        except OSError:
            return

    def _piece(self, name: str, offset: int, data: bytes, *, is_anew: bool) -> FilePiece:
        return FilePiece(self._node, name, offset, base64.b64encode(data).decode(), is_anew=is_anew)


def _line_after(descriptor: int, at: int) -> int:
    """Return where the first whole line from *at* on begins."""
    data = os.pread(descriptor, _LONGEST_LINE, at - 1)
    return at + data.find(b"\n") if b"\n" in data else at
