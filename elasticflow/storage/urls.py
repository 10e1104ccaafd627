"""Opens the store of a URL: names the package that it needs, and sets time limits, so that no store hangs for ever."""

from __future__ import annotations

import importlib.util
import re
from typing import TYPE_CHECKING, Any

from elasticflow.errors import StorageError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from elasticflow.storage.store import Store

_URL = re.compile(r"(?P<protocol>[A-Za-z][A-Za-z0-9+.-]*)(::|://).*", re.DOTALL)
EXTRAS = {
    "s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "az": "azure", "abfs": "azure", "abfss": "azure",
    "sftp": "sftp", "ssh": "sftp", "http": "http", "https": "http",
}  # fmt: skip
"""Protocols that need more than fsspec, and the extra of this package that installs it."""
_WITH_FOLDERS = frozenset({"ftp", "smb", "hdfs", "webhdfs", "arrow_hdfs"})
_SFTP = frozenset({"sftp", "ssh"})
_S3, _GCS, _AZURE = frozenset({"s3", "s3a"}), frozenset({"gs", "gcs"}), frozenset({"az", "abfs", "abfss"})
_WEB = frozenset({"http", "https"})
_CONNECT_S, _SILENCE_S = 10, 60
# Options of other ssh libraries, with their names in asyncssh.
_SFTP_NAMES = {"key_filename": "client_keys", "pkey": "client_keys", "look_for_keys": "client_keys"}


def protocol_of(uri: str) -> str:
    """Return the protocol of *uri* in lower case; `file` for a path."""
    match = _URL.fullmatch(uri)
    return match["protocol"].lower() if match else "file"


def package_for(protocol: str) -> str | None:
    """Return the package to install for *protocol*; None if it is not known."""
    extra = EXTRAS.get(protocol)
    return f'"elasticflow[{extra}]"' if extra else None


def open_store(uri: str, options: Mapping[str, Any], shown: str) -> Store:
    """Return the store at *uri*, which is not local; nothing is sent to it yet.

    Args:
        uri: The URI with its secrets.
        options: The user's options; they win over our limits.
        shown: The URI as messages show it.

    Raises:
        ImportError: the package for it is missing.
        ValueError: fsspec does not know the protocol, or an option is wrong.
        StorageError: an option has the name that another library gives it.
    """
    protocol = protocol_of(uri)
    if protocol in _SFTP:
        return _open_sftp(uri, options)
    import fsspec.core

    from elasticflow.storage.objects import HttpStore, ObjectStore

    # A cached listing would hide what other processes wrote.
    extra = {"skip_instance_cache": True, "use_listings_cache": False}
    settings = _merged(_merged(_limits(protocol), options), extra)
    if protocol in _GCS:
        # The class that fsspec registers makes a gRPC request first, to learn the kind of the bucket.
        from gcsfs.core import GCSFileSystem

        return ObjectStore(GCSFileSystem(**settings), GCSFileSystem._strip_protocol(uri))  # noqa: SLF001  # fsspec's way
    fs, root = fsspec.core.url_to_fs(uri, **settings)
    if protocol in _S3:
        # botocore repeats requests for a bounded time; if s3fs repeated them as well, that would not be bounded.
        fs.retries = 1
    if protocol in _WEB:
        return HttpStore(fs, root, shown)
    # fsspec's memory shows a file as soon as it is opened, with `autocommit=False` too.
    return ObjectStore(fs, root, has_folders=protocol in _WITH_FOLDERS, has_parts=protocol != "memory")


def _open_sftp(uri: str, options: Mapping[str, Any]) -> Store:
    from elasticflow.storage.sftp import SftpStore

    if importlib.util.find_spec("asyncssh") is None:
        raise ImportError("sftp is served by asyncssh, which is not installed")
    for name, right in _SFTP_NAMES.items():
        if name in options:
            message = f"snapshots.options.{name} is no option of asyncssh, which serves sftp:// here"
            raise StorageError(message, f"write {right} instead")
    return SftpStore(uri, options)


def _limits(protocol: str) -> dict[str, Any]:
    """Return the options that give up a store which does not answer; a transfer may take any time."""
    if protocol in _S3:
        retries = {"mode": "standard", "max_attempts": 4}
        limits = {"connect_timeout": _CONNECT_S, "read_timeout": _SILENCE_S, "retries": retries}
        return {"config_kwargs": limits}
    if protocol in _AZURE:
        return {"connection_timeout": _CONNECT_S, "read_timeout": _SILENCE_S}
    if protocol in _GCS | _WEB:
        import aiohttp

        limit = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S, sock_read=_SILENCE_S)
        return {"client_kwargs" if protocol in _WEB else "session_kwargs": {"timeout": limit}}
    return {}


def _merged(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    """Return both tables as one, tables within tables too; *theirs* wins."""
    both = {**ours, **theirs}
    for name in ours.keys() & theirs.keys():
        if isinstance(ours[name], dict) and isinstance(theirs[name], dict):
            both[name] = _merged(ours[name], theirs[name])
    return both
