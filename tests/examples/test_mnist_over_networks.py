"""The digits over real servers on loopback: HTTP and S3."""

from __future__ import annotations

import functools
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from examples.mnist import digits

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples" / "mnist"
MNIST5K = ROOT.parent / "shared" / "data" / "mnist5k"


class QuietHandler(SimpleHTTPRequestHandler):
    """Serves files and says nothing."""

    def log_message(self, *_: object) -> None:
        """Keep the test's output clean."""


@pytest.fixture
def http_url() -> Iterator[str]:
    """A real HTTP server on loopback that serves the repository's parent of the digits."""
    handler = functools.partial(QuietHandler, directory=str(FOLDER.parent))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_digits_over_http(http_url: str) -> None:
    """The same digits come over HTTP, and the source says from where."""
    for split in ("train", "test"):
        data = digits(split, f"{http_url}/mnist")
        assert data.fingerprint == digits(split).fingerprint
        assert data.source == f"{http_url}/mnist"


def test_missing_files_over_http(http_url: str) -> None:
    """A server that answers 404 gives the error that a folder gives."""
    with pytest.raises(
        FileNotFoundError, match=r"^neither t10k-images.* is in http://127\.0\.0\.1:\d+/nothing$"
    ):
        digits("test", f"{http_url}/nothing")


def test_digits_over_s3(s3_bucket: str) -> None:
    """The same digits come from a bucket, with the endpoint and the keys taken from the environment."""
    import s3fs

    files = s3fs.S3FileSystem(skip_instance_cache=True)
    for path in FOLDER.glob("*.gz"):
        files.pipe_file(f"{s3_bucket}/data/mnist/{path.name}", path.read_bytes())
    for split in ("train", "test"):
        data = digits(split, f"s3://{s3_bucket}/data/mnist/")
        assert data.fingerprint == digits(split).fingerprint
        assert data.source == f"s3://{s3_bucket}/data/mnist"
    with pytest.raises(FileNotFoundError, match=f"^neither .* is in s3://{s3_bucket}/nothing$"):
        digits("test", f"s3://{s3_bucket}/nothing")


def test_mnist5k_is_read_by_the_same_code(http_url: str) -> None:
    """MNIST's own files, 28 x 28 pixels, from a folder."""
    if not MNIST5K.is_dir():
        pytest.skip("needs MNIST's digits in ../shared/data/mnist5k")
    assert digits("train", str(MNIST5K)).images.shape == (4000, 1, 28, 28)
    assert len(digits("test", str(MNIST5K))) == 1000
