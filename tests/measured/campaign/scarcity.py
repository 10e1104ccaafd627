"""Things that a run needs, made scarce or wrong for real: memory, disks, buckets, versions; mostly for root."""

from __future__ import annotations

import subprocess
import uuid
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from tests import servers

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_KEYS = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "testing",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_CONFIG_FILE": "/dev/null",
    "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
}


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
