"""A store whose server is killed and started again: with its state on disk, nobody who uses it notices more than a pause."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from functools import partial
from typing import TYPE_CHECKING

import pytest

from elasticflow.errors import StorageError
from elasticflow.launcher.rendezvous.kept_keys import KeptKeys
from elasticflow.launcher.rendezvous.store_server import StoreServer
from elasticflow.protocol import handshake, tcp_store
from elasticflow.protocol.store_address import StoreAddress, StoreLostError
from elasticflow.protocol.tcp_store import TcpControlStore
from tests.launcher.conftest import wait_until
from tests.servers import free_port

if TYPE_CHECKING:
    from pathlib import Path

# Serves a store until it is killed.
SERVE = """
import sys
from pathlib import Path
from elasticflow.launcher.rendezvous import serve_command
serve_command._LOOK_S = 0.1
serve_command.serve_until_asked("127.0.0.1", int(sys.argv[1]), "", lambda text: print(text, flush=True), Path(sys.argv[2]))
"""


def _serve(address: StoreAddress, folder: Path) -> StoreServer:
    """Serve the store in this process."""
    return StoreServer(socket.create_server((address.host, address.port)), "", KeptKeys(folder))


@pytest.fixture(name="address")
def _address() -> StoreAddress:
    return StoreAddress("127.0.0.1", free_port(), "own")


def test_what_was_done_is_there_for_the_next(tmp_path: Path) -> None:
    """Values, removals, and sums with the requests that they answer."""
    kept = KeptKeys(tmp_path / "state")
    kept.put("a", b"\x00\xff")
    kept.put("a", b"two")
    kept.put("gone", b"")
    kept.delete("gone")
    kept.put_sum("n", 7, b"request")
    kept.close()
    again = KeptKeys(tmp_path / "state")
    assert {"a": b"two", "n": b"7"} == again.load()
    assert [7, None] == [again.sum_of(b"request"), again.sum_of(b"another")]
    assert kept.state == again.state
    assert kept.state != KeptKeys(tmp_path / "another").state
    again.close()


def test_folder_of_another_server_or_damaged_is_refused(tmp_path: Path) -> None:
    """With its place, and what to do."""
    kept = KeptKeys(tmp_path)
    with pytest.raises(StorageError, match="is used by another server") as used:
        KeptKeys(tmp_path)
    assert "--state" in str(used.value.remedy)
    kept.close()
    (tmp_path / "keys.sqlite3").write_bytes(b"no database at all, and long enough to be looked at" * 100)
    with pytest.raises(StorageError, match=r"keys\.sqlite3 cannot be used: file is not a database"):
        KeptKeys(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="cannot be used"):
        KeptKeys(tmp_path / "file" / "below")


def test_clients_go_on_where_they_were(address: StoreAddress, tmp_path: Path) -> None:
    """Who asks, who waits for a value, and who looks at a copy, which has also lost what was removed meanwhile."""
    server = _serve(address, tmp_path)
    asking, looking, waiting = (
        TcpControlStore(address),
        TcpControlStore(address, looks_at="orders"),
        TcpControlStore(address),
    )
    for key in ("orders/one", "orders/two"):
        asking.set(key, "1")
    wait_until(lambda: looking.check(["orders/one", "orders/two"]))
    got: list[bytes] = []
    thread = threading.Thread(target=lambda: got.append(waiting.get("late")))
    thread.start()
    server.close()
    again = KeptKeys(tmp_path)
    again.delete("own/orders/two")
    again.close()
    server = _serve(address, tmp_path)
    asking.set("late", "there")
    thread.join(60)
    assert [b"there"] == got
    assert looking.check(["orders/one"])
    assert not looking.check(["orders/two"])
    asking.set("orders/three", "1")
    wait_until(lambda: looking.check(["orders/three"]))
    server.close()


def test_a_machine_that_does_not_answer_is_no_key_without_a_value(
    address: StoreAddress, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel ends such a connection while a value is waited for; the client makes another."""
    server = _serve(address, tmp_path)
    client = TcpControlStore(address)
    client.set("a", "1")
    errors = [TimeoutError(errno.ETIMEDOUT, "Connection timed out")]
    received = handshake.received

    def fails_once(connection: socket.socket) -> bytes:
        if errors:
            raise errors.pop()
        return received(connection)

    monkeypatch.setattr(tcp_store, "received", fails_once)
    assert client.get("a") == b"1"
    assert not errors
    client.close()
    server.close()


def test_server_that_lost_its_state_is_not_taken_for_the_one_before(
    address: StoreAddress, tmp_path: Path
) -> None:
    """With another folder, or none, the launch is not known any more."""
    server = _serve(address, tmp_path / "one")
    clients = [TcpControlStore(address), TcpControlStore(address, looks_at="orders")]
    server.close()
    server = _serve(address, tmp_path / "two")
    for client, key in zip(clients, ("a", "orders/a"), strict=True):
        with pytest.raises(StoreLostError, match="was started again, and does not know this launch"):
            client.check([key])
    server.close()


def test_server_that_stays_away_is_lost(
    address: StoreAddress, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a minute, for others than tests."""
    monkeypatch.setattr(tcp_store, "AWAY_S", 0.1)
    server = _serve(address, tmp_path)
    client = TcpControlStore(address)
    assert client.patience_s == 0.1
    server.close()
    with pytest.raises(StoreLostError):
        client.set("a", "1")


def test_disk_that_is_full_ends_the_server(address: StoreAddress, tmp_path: Path) -> None:
    """Nobody is told that something was done which the next server would not know."""
    kept = KeptKeys(tmp_path)
    server = StoreServer(socket.create_server((address.host, address.port)), "", kept)
    client = TcpControlStore(address)
    kept._database.execute("pragma max_page_count = 1")
    client_thread = threading.Thread(target=lambda: client.set("large", b"x" * 1_000_000), daemon=True)
    client_thread.start()
    wait_until(lambda: not server.is_serving)
    assert "database or disk is full" in str(server.failure)
    server = _serve(address, tmp_path)
    client_thread.join(60)
    assert b"x" * 1_000_000 == client.get("large")
    server.close()


def _is_above(counts: list[int], number: int) -> bool:
    return sum(counts) > number


@pytest.mark.usefixtures("real_processes")
def test_every_sum_is_done_once_however_often_the_server_is_killed(
    address: StoreAddress, tmp_path: Path
) -> None:
    """Four clients add and set without a pause while it is killed ten times; the last one is stopped for a while, and serves on."""

    def serve() -> subprocess.Popen[str]:
        command = [sys.executable, "-c", SERVE, str(address.port), str(tmp_path)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert "serving" in process.stdout.readline()
        return process

    process = serve()
    over = threading.Event()
    counts, wrong = [0] * 4, []

    def use(number: int) -> None:
        client, seen = TcpControlStore(address), 0
        while not over.is_set():
            counts[number] += 1
            total = client.add("n", 1)
            client.set(f"last/{number}", str(total))
            if total <= seen or client.get(f"last/{number}") != str(total).encode():
                wrong.append((number, total, seen))
            seen = total

    threads = [threading.Thread(target=use, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(10):
        before = sum(counts)
        wait_until(partial(_is_above, counts, before + 100))
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
        process = serve()
    over.set()
    for thread in threads:
        thread.join(60)
    process.send_signal(signal.SIGSTOP)
    time.sleep(0.2)  # longer than it waits for a signal
    process.send_signal(signal.SIGCONT)
    total = TcpControlStore(address).add("n", 0)
    process.send_signal(signal.SIGTERM)
    assert "continues with all runs" in process.communicate()[0]
    assert 0 == process.returncode
    assert [] == wrong
    assert sum(counts) == total
