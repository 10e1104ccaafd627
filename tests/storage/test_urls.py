from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from elasticflow.errors import StorageError
from elasticflow.storage import urls
from elasticflow.storage.objects import HttpStore, ObjectStore
from elasticflow.storage.sftp import SftpStore
from elasticflow.storage.storage import Storage

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("uri", "protocol"),
    [
        ("/a/b", "file"),
        ("a/b", "file"),
        ("file:///a", "file"),
        ("S3://bucket/x", "s3"),
        ("abfs://c@account.dfs.core.windows.net/x", "abfs"),
        ("simplecache::s3://bucket/x", "simplecache"),
    ],
)
def test_protocol(uri: str, protocol: str) -> None:
    """Paths are files; a URL says its protocol."""
    assert urls.protocol_of(uri) == protocol


@pytest.mark.parametrize(
    ("uri", "kind"),
    [
        ("s3://bucket/x", ObjectStore),
        pytest.param("gs://bucket/x", ObjectStore, marks=pytest.mark.nightly),
        ("memory://x", ObjectStore),
        ("http://host/x", HttpStore),
        ("https://host/x", HttpStore),
        ("sftp://host/x", SftpStore),
        ("ssh://host/x", SftpStore),
    ],
)
def test_every_protocol_has_its_store(uri: str, kind: type) -> None:
    """A store is made without asking the server; sftp is always asyncssh's, whatever else is installed."""
    options = {"token": "anon"} if uri.startswith("gs") else {}
    assert type(urls.open_store(uri, options, uri)) is kind


def test_users_options_go_before_our_limits() -> None:
    """Limits that the user does not set stay, also within a table that he sets."""
    mine = {"config_kwargs": {"read_timeout": 5}, "anon": True}
    fs: Any = urls.open_store("s3://bucket/x", mine, "shown").__dict__["_fs"]
    assert fs.anon is True
    assert fs.config_kwargs == {
        "read_timeout": 5,
        "connect_timeout": 10,
        "retries": {"mode": "standard", "max_attempts": 4},
    }
    assert fs.retries == 1
    assert fs.dircache.use_listings_cache is False


@pytest.mark.parametrize("name", ["key_filename", "pkey", "look_for_keys"])
def test_options_of_another_ssh_library_are_refused(name: str) -> None:
    """Paramiko's option names are refused with asyncssh's."""
    with pytest.raises(StorageError) as caught:
        Storage("sftp://host/x", {name: "id"}).check_writable()
    assert f"snapshots.options.{name} is no option of asyncssh" in caught.value.message
    assert caught.value.remedy == "write client_keys instead"


@pytest.mark.parametrize(
    ("uri", "options", "expected"),
    [
        ("sftp://me:p%40ss@host:2222/a/b/", {}, ("me", "p@ss", 2222, "/a/b")),
        ("sftp://host/a", {"username": "you", "port": 22}, ("you", None, 22, "/a")),
        ("sftp://host/~/a", {}, (None, None, None, "a")),
        ("sftp://host", {}, (None, None, None, "/")),
    ],
)
def test_sftp_address(uri: str, options: dict[str, Any], expected: tuple[Any, ...]) -> None:
    """User, password, port and folder come from the URL, or from options; `/~/` is the user's home."""
    store = SftpStore(uri, options)
    named = [store._options.get(name) for name in ("username", "password", "port")]
    assert (*named, store._root) == expected


@pytest.mark.parametrize(
    ("protocol", "package"),
    [
        ("s3", '"elasticflow[s3]"'),
        ("gs", '"elasticflow[gcs]"'),
        ("abfs", '"elasticflow[azure]"'),
        ("sftp", '"elasticflow[sftp]"'),
        ("https", '"elasticflow[http]"'),
        ("nosuch", None),
    ],
)
def test_packages(protocol: str, package: str | None) -> None:
    """Each protocol has an extra of this project."""
    assert urls.package_for(protocol) == package


def test_packages_are_extras_of_the_project(request: pytest.FixtureRequest) -> None:
    """What messages tell to install exists."""
    import tomli

    root: Path = request.config.rootpath
    extras = tomli.loads((root / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(urls.EXTRAS.values()) <= set(extras)
