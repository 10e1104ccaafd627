"""Things that a run needs, made scarce or wrong for real: memory, disks, buckets, versions; mostly for root."""

from __future__ import annotations

import os
import subprocess
import time
import uuid
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from tests import servers

if TYPE_CHECKING:
    from collections.abc import Iterator

_GROUPS = Path("/sys/fs/cgroup")
_KEYS = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "testing",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_CONFIG_FILE": "/dev/null",
    "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
}


class MemoryGroup:
    """A memory cgroup of either version, below that of this process.

    Attributes:
        prefix: Of a command that is to run in it.
    """

    def __init__(self) -> None:
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
        own = {names: path for _, names, path in (line.split(":", 2) for line in lines)}
        self._is_first = "memory" in own
        root = _GROUPS / "memory" if self._is_first else _GROUPS
        self._path = root / own["memory" if self._is_first else ""].lstrip("/") / f"elasticflow-{os.getpid()}"
        self._path.mkdir()
        self.prefix = ("sh", "-c", f'echo $$ > {self._path}/cgroup.procs && exec "$@"', "sh")

    def leave_room(self, size_bytes: int) -> None:
        """Let its processes take *size_bytes* more than they have."""
        used, limit = (
            ("memory.usage_in_bytes", "memory.limit_in_bytes")
            if self._is_first
            else ("memory.current", "memory.max")
        )
        now = int((self._path / used).read_text())
        (self._path / limit).write_text(str(now + size_bytes))

    def remove(self) -> None:
        """Remove it; its processes have ended."""
        for _ in range(100):
            with suppress(OSError):
                self._path.rmdir()
                return
            time.sleep(0.05)


@contextmanager
def memory_group() -> Iterator[MemoryGroup]:
    """Give a memory cgroup."""
    group = MemoryGroup()
    try:
        yield group
    finally:
        group.remove()


@contextmanager
def small_disk(place: Path, size: str) -> Iterator[Path]:
    """Mount a file system of *size* at *place*."""
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


def fill(path: Path) -> None:
    """Write *path* until there is no room."""
    with suppress(OSError), path.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


@contextmanager
def bucket() -> Iterator[tuple[str, str, dict[str, str]]]:
    """Give the address of an S3 server, the URI of a bucket, and the variables by which it is reached."""
    import s3fs

    with servers.s3() as url:
        name = f"bucket-{uuid.uuid4().hex[:8]}"
        s3fs.S3FileSystem(
            key=_KEYS["AWS_ACCESS_KEY_ID"],
            secret=_KEYS["AWS_SECRET_ACCESS_KEY"],
            endpoint_url=url,
            skip_instance_cache=True,
        ).mkdir(name)
        yield url, f"s3://{name}/runs", _KEYS


def other_version(folder: Path, name: str, version: str) -> Path:
    """Return *folder*: first on the path, it has package *name* installed in *version*, as far as that is asked for."""
    metadata = folder / f"{name}-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return folder
