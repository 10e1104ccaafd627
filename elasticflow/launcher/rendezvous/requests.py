"""Files of nodes that have run folders of their own, as the machine that leads has them sent: logs, what hooks logged.

    a command, on the machine that leads   puts a `Request` into `wanted/` of the run folder
    the supervisor                         asks all such nodes with `FilesWanted`, and writes the `FilePiece`s it gets
                                           to the same paths in its own run folder
    a node                                 says `FilesSent` once it has sent what there was
    the supervisor                         removes the request: the answer is there

What a node has sent is not sent again; of what is more than `MOST_OF_A_FILE` bytes long, the end is.
"""

from __future__ import annotations

import json
import re
import secrets
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from elasticflow.protocol import points
from elasticflow.system import atomic_files

if TYPE_CHECKING:
    from pathlib import Path

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


@dataclass(frozen=True)
class Request:
    """A request of a command.

    Attributes:
        logged: Include the points that hooks logged, of all generations.
    """

    generation: int
    logged: bool = False


def put_request(folder: RunFolder, request: Request) -> Path:
    """Leave *request* for the run's supervisor, which removes the file that is returned once the answer is there."""
    path = folder.path / WANTED / f"{secrets.token_hex(8)}.json"
    atomic_files.write(path, (json.dumps(asdict(request)).encode(),))
    return path


def requests_in(folder: RunFolder) -> dict[Path, Request]:
    """Return the requests that commands have left, by their files; a file that holds no request is removed."""
    found = {}
    try:
        paths = sorted((folder.path / WANTED).glob("*.json"))
    except OSError:
        return {}
    for path in paths:
        try:
            found[path] = Request(**json.loads(path.read_bytes()))
        except FileNotFoundError:
            continue
        except (OSError, ValueError, TypeError):
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
