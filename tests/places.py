"""A new, empty place on each kind of store, for the tests that must hold on all of them."""

from __future__ import annotations

import os
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from elasticflow.storage.storage import Storage
from tests.servers import AZURE_KEY, SshServer

if TYPE_CHECKING:
    from pathlib import Path

SERVED = ("s3", "gs", "az", "abfs", "sftp")  # by real servers
# S3 stands for them in each run of the tests: the others run before a release.
ON_SERVERS = [
    pytest.param(kind, marks=pytest.mark.integration if kind == "s3" else pytest.mark.nightly)
    for kind in SERVED
]
EVERYWHERE = ["local", "file-url", "memory", *ON_SERVERS]
BETWEEN_PROCESSES = ["local", *ON_SERVERS]
# adlfs hands aiohttp bytes, which aiohttp would rather have as a stream.
LARGE_BODY = "ignore:Sending a large body directly with raw bytes:ResourceWarning"


@dataclass(frozen=True)
class Place:
    """An empty place.

    Attributes:
        kind: One of EVERYWHERE.
        uri: Its URL.
        options: What the job file would say under `[snapshots.options]`.
        secrets: What opens it, and no file or message may tell; some of it is in the environment.
    """

    kind: str
    uri: str
    options: dict[str, Any] = field(default_factory=dict)
    secrets: tuple[str, ...] = ()

    def storage(self, **more: Any) -> Storage:
        """Return a storage that has seen nothing yet."""
        return Storage(self.uri, self.options, **more)


def make_place(kind: str, request: pytest.FixtureRequest) -> Place:
    """Return a place of *kind*; its server runs, and what children need is in the environment."""
    folder: Path = request.getfixturevalue("tmp_path")
    patch: pytest.MonkeyPatch = request.getfixturevalue("monkeypatch")
    unique = uuid.uuid4().hex[:8]
    match kind:
        case "local" | "file-url":
            return Place(kind, f"{'file://' if kind == 'file-url' else ''}{folder}/store")
        case "memory":
            return Place(kind, f"memory://{unique}-{os.getpid()}/store")
        case "s3":
            bucket = request.getfixturevalue("s3_bucket")
            return Place(kind, f"s3://{bucket}/store", secrets=(os.environ["AWS_SECRET_ACCESS_KEY"],))
        case "gs":
            return _in_google(request.getfixturevalue("gcs_server"), unique, patch)
        case "az" | "abfs":
            return _in_azure(kind, request.getfixturevalue("azure_server"), unique, patch)
        case _:
            server: SshServer = request.getfixturevalue("ssh_server")
            options = {"client_keys": str(server.client_key), "known_hosts": str(server.known_hosts)}
            return Place("sftp", f"sftp://{server.username}@127.0.0.1:{server.port}{folder}/store", options)


def _in_google(url: str, unique: str, patch: pytest.MonkeyPatch) -> Place:
    from gcsfs.core import GCSFileSystem

    patch.setenv("STORAGE_EMULATOR_HOST", url)
    GCSFileSystem(token="anon", skip_instance_cache=True).mkdir(f"bucket-{unique}")
    return Place("gs", f"gs://bucket-{unique}/store", {"token": "anon"})


def _in_azure(kind: str, connection: str, unique: str, patch: pytest.MonkeyPatch) -> Place:
    from adlfs import AzureBlobFileSystem

    patch.setenv("AZURE_STORAGE_CONNECTION_STRING", connection)
    AzureBlobFileSystem(connection_string=connection, skip_instance_cache=True).mkdir(f"container-{unique}")
    return Place(kind, f"{kind}://container-{unique}/store", secrets=(AZURE_KEY,))
