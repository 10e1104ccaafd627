"""The store of a launch's keys over real sockets: what one process sets, all see."""

from __future__ import annotations

import errno
import gc
import socket
import subprocess
import sys
import threading
import time
import warnings
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Never

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticflow.launcher.rendezvous import store_server
from elasticflow.launcher.rendezvous.store_server import StoreServer
from elasticflow.protocol import tcp_store
from elasticflow.protocol.handshake import HELLO
from elasticflow.protocol.store_address import StoreAddress, StoreLostError
from elasticflow.protocol.tcp_store import Answer, Frames, Request, TcpControlStore, frame
from tests.launcher.conftest import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator


# Of a client without a token: its line, and 32 bytes that need not be random here.
GREETING = HELLO + bytes(32)


@pytest.fixture(name="address", scope="module")
def _address() -> Iterator[StoreAddress]:
    """Yield where a store is served."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = StoreServer(listener)
    yield StoreAddress("127.0.0.1", listener.getsockname()[1])
    server.close()


@pytest.fixture(name="served")
def _served() -> Iterator[tuple[StoreServer, StoreAddress]]:
    """Yield a server of this test's own, and where it is."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = StoreServer(listener)
    yield server, StoreAddress("127.0.0.1", listener.getsockname()[1], "own")
    server.close()


NAMES = st.sampled_from(["orders/a", "orders/b", "told/a", "c"])
ACTS = st.one_of(
    st.tuples(st.just("set"), NAMES, st.text(max_size=20)),
    st.tuples(st.just("add"), st.sampled_from(["n", "orders/n"]), st.integers(-5, 5)),
    st.tuples(st.just("delete"), NAMES, st.none()),
)
number = iter(range(10**9))


@given(acts=st.lists(st.tuples(st.integers(0, 2), ACTS), max_size=12))
def test_all_see_what_any_has_done(address: StoreAddress, acts: list[tuple[int, Any]]) -> None:
    """Whoever acts, through a connection or one that mirrors, each sees what a dictionary would hold."""
    here = address.under(f"example-{next(number)}")
    clients = [
        TcpControlStore(here),
        TcpControlStore(here, looks_at="orders"),
        TcpControlStore(here, looks_at="told"),
    ]
    expected: dict[str, bytes] = {}
    for who, (act, key, value) in acts:
        if act == "set":
            clients[who].set(key, value)
            expected[key] = value.encode()
        elif act == "add":
            expected[key] = str(int(expected.get(key, b"0")) + value).encode()
            assert int(expected[key]) == clients[who].add(key, value)
        else:
            assert (expected.pop(key, None) is not None) == clients[who].delete_key(key)
    for client in clients:
        for key in ("orders/a", "orders/b", "told/a", "c", "n", "orders/n"):
            wait_until(partial(_holds, client, key, expected.get(key)))
        client.close()


def _holds(client: TcpControlStore, key: str, value: bytes | None) -> bool:
    return client.check([key]) == (value is not None) and (value is None or client.get(key) == value)


@pytest.mark.parametrize("looks_at", ["", "orders"], ids=["asked", "mirrored"])
def test_value_is_waited_for(served: tuple[StoreServer, StoreAddress], looks_at: str) -> None:
    """It comes from a client or from the serving process itself; without one the wait ends in time."""
    server, address = served
    client = TcpControlStore(address, looks_at)
    got: list[bytes] = []
    for key in ("orders/one", "orders/two"):
        thread = threading.Thread(target=lambda key=key: got.append(client.get(key)))
        thread.start()
        if key == "orders/one":
            server.store("own").set(key, "1")
        else:
            TcpControlStore(address).set(key, "2")
        thread.join(60)
    assert [b"1", b"2"] == got
    with pytest.raises(StoreLostError):
        client.get("orders/three", limit_s=0.05)


def test_numbers_are_added_in_one_act(address: StoreAddress) -> None:
    """Four clients at a time: no number twice."""
    here = address.under("add")
    clients = [TcpControlStore(here) for _ in range(4)]
    seen: list[int] = []
    threads = [
        threading.Thread(target=lambda client=client: seen.extend(client.add("n", 1) for _ in range(50)))
        for client in clients
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert list(range(1, 201)) == sorted(seen)


def test_large_value_travels_whole(address: StoreAddress) -> None:
    """More than any socket's buffer, in both directions, and to those who watch."""
    here = address.under("large")
    watching, client = TcpControlStore(here, looks_at="orders"), TcpControlStore(here)
    value = bytes(range(256)) * 40_000
    client.set("orders/large", value)

    assert value == client.get("orders/large")
    assert value == watching.get("orders/large")


def test_change_costs_nothing_for_clients_that_it_does_not_concern(
    served: tuple[StoreServer, StoreAddress], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Signs of life of a thousand nodes would else cost a million looks at connections each time."""
    server, address = served
    others = [TcpControlStore(address, looks_at="orders") for _ in range(20)]
    client = TcpControlStore(address)
    send, sent = server._send, []

    def counted(to: Any, data: bytes) -> None:
        sent.append(to)
        send(to, data)

    monkeypatch.setattr(server, "_send", counted)
    for number in range(50):
        client.set("told/beat/1", str(number))
    assert 50 == len(sent)
    assert 1 == len(set(sent))
    client.set("orders/one", "1")
    for other in others:
        wait_until(partial(_holds, other, "orders/one", b"1"))
        other.close()
    wait_until(lambda: len(server._subscriptions) == 0)


def test_all_nodes_may_come_at_a_time(served: tuple[StoreServer, StoreAddress]) -> None:
    """More connections than are accepted at once, each with its handshake, all of them answered."""
    _, address = served
    clients: list[TcpControlStore] = []
    threads = [
        threading.Thread(target=lambda: clients.append(TcpControlStore(address, looks_at="orders")))
        for _ in range(150)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    clients[0].set("orders/one", "1")

    assert 150 == len(clients)
    for client in clients:
        wait_until(partial(_holds, client, "orders/one", b"1"))
        client.close()


@pytest.mark.parametrize("is_local", [True, False])
def test_keys_that_were_given_a_value_are_told_once(
    served: tuple[StoreServer, StoreAddress], is_local: bool
) -> None:
    """By folder, also those that are gone again; at first any may have been."""
    server, address = served
    store = server.store("own") if is_local else TcpControlStore(address, looks_at="told")
    client = TcpControlStore(address)
    assert None is store.changed("told/feed")
    for key in ("told/feed/1/1", "told/feed/2/1", "told/feed/1/2", "told/beat/1", "orders/a"):
        client.set(key, "1")
    client.delete_key("told/feed/2/1")
    wait_until(lambda: store.check(["told/beat/1"]) and not store.check(["told/feed/2/1"]))

    assert ["told/feed/1/1", "told/feed/2/1", "told/feed/1/2"] == store.changed("told/feed")
    assert [] == store.changed("told/feed")


def test_last_words_of_a_server_count(served: tuple[StoreServer, StoreAddress]) -> None:
    """A launch's exit code, for instance, which was sent right before the end."""
    server, address = served
    mirror = TcpControlStore(address, looks_at="launch")
    server.store("own").set("launch/exit_code", "75")
    wait_until(lambda: not server._untold)
    server.close()

    assert mirror.check(["launch/exit_code"])
    assert b"75" == mirror.get("launch/exit_code")
    with pytest.raises(StoreLostError):
        mirror.check(["launch/other"])


def test_end_of_the_server_is_seen_by_all(
    served: tuple[StoreServer, StoreAddress], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the one that waits, the one that asks next, and the one that only looks at its mirror."""
    server, address = served
    waiting, asking, looking = (
        TcpControlStore(address),
        TcpControlStore(address),
        TcpControlStore(address, looks_at="orders"),
    )
    raised: list[str] = []

    def wait() -> None:
        try:
            waiting.get("never")
        except StoreLostError as error:
            raised.append(str(error))

    thread = threading.Thread(target=wait)
    thread.start()
    server.close()
    thread.join(60)
    assert [True] == [
        text.startswith(f"the store at {address.endpoint} does not answer: ") for text in raised
    ]
    for client, key in ((asking, "a"), (looking, "orders/a")):
        with pytest.raises(StoreLostError):
            client.check([key])
    monkeypatch.setattr(tcp_store, "_CONNECT_S", 0.3)  # nobody will answer, however long it waits
    with pytest.raises(StoreLostError):
        TcpControlStore(address)


def test_connection_that_comes_while_the_server_ends_is_cut() -> None:
    """Nothing is left open in the process, in which the other end would wait for ever."""
    left: list[str] = []
    for number in range(0, 20, 3):
        listener = socket.create_server(("127.0.0.1", 0))
        server = StoreServer(listener)
        come, thread = _come_again_and_again(listener.getsockname())
        time.sleep(number / 5000)
        server.close()
        thread.join(60)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            del server
            gc.collect()
        left += [str(each.message) for each in told if each.category is ResourceWarning]
        for connection in come:
            connection.close()
    assert [] == left


def _come_again_and_again(address: tuple[str, int]) -> tuple[list[socket.socket], threading.Thread]:
    """Return the connections that a thread makes until it is refused, and the thread."""
    come: list[socket.socket] = []

    def connect() -> None:
        with suppress(OSError):
            while True:
                come.append(socket.create_connection(address, timeout=5))

    thread = threading.Thread(target=connect)
    thread.start()
    return come, thread


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x00\x85\xf7\x3c",
        GREETING + b"\xff\xff\xff\xff",
        GREETING + b"\x00\x00\x00\x00",
        GREETING + frame(Answer.YES),
        GREETING + frame(Request.SET, b"no value"),
        GREETING + frame(Request.ADD, b"key", b"no number"),
        GREETING + frame(Request.GET, b"\xff"),
        GREETING + b"\x00\x00\x00\x05\x02\xff\xff\xff\xff",
    ],
    ids=["http", "torch", "gigabytes", "empty", "answer", "parts", "number", "utf-8", "inside"],
)
def test_stranger_is_sent_away_and_harms_nobody(address: StoreAddress, said: bytes) -> None:
    """The connection ends; all others continue."""
    client = TcpControlStore(address.under("strangers"))
    with socket.create_connection((address.host, address.port), timeout=10) as stranger:
        stranger.sendall(said)
        while stranger.recv(1024):
            pass
    client.set("a", "1")

    assert b"1" == client.get("a")


def test_client_that_vanishes_while_it_waits_is_forgotten(
    served: tuple[StoreServer, StoreAddress],
) -> None:
    """Killed inside a wait, it leaves nothing that a later value would be sent to."""
    server, address = served
    with socket.create_connection((address.host, address.port)) as gone:
        gone.sendall(GREETING + frame(Request.GET, b"own/late"))
        wait_until(lambda: len(server._subscriptions) == 1)
    wait_until(lambda: len(server._subscriptions) == 0)
    server.store("own").set("late", "1")

    assert b"1" == TcpControlStore(address).get("late")


def test_server_out_of_descriptors_takes_clients_once_others_go(
    served: tuple[StoreServer, StoreAddress], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for that without spinning, and whoever stood in line is answered."""
    server, address = served
    first = TcpControlStore(address)
    noted = threading.Event()
    with monkeypatch.context() as full:
        full.setattr(socket.socket, "accept", _without_descriptors)
        full.setattr(server.refusals, "note", lambda *_: noted.set())
        thread = threading.Thread(target=lambda: TcpControlStore(address).set("late", "1"))
        # Its connection waits for the accept that is under way already: the next one fails.
        socket.create_connection((address.host, address.port)).close()
        thread.start()
        assert noted.wait(60)
        first.set("early", "1")
    thread.join(60)

    assert server.store("own").check(["early", "late"])


def _without_descriptors(*_: object) -> Never:
    raise OSError(errno.EMFILE, "too many open files")


@pytest.mark.parametrize("is_watching", [True, False], ids=["watches", "asks"])
def test_client_that_reads_nothing_holds_nobody_up_and_is_cut_off(
    served: tuple[StoreServer, StoreAddress], monkeypatch: pytest.MonkeyPatch, *, is_watching: bool
) -> None:
    """Neither others' requests nor the server's memory depend on it; one that resumes in time finds all changes."""
    monkeypatch.setattr(store_server, "_MOST_WAITING", 1 << 22)
    server, address = served
    value = b"x" * (1 << 20)
    client = TcpControlStore(address)
    client.set("orders/large", value)
    with socket.create_connection((address.host, address.port), timeout=60) as stuck:
        stuck.sendall(GREETING)
        if is_watching:
            stuck.sendall(frame(Request.WATCH, b"own/orders/"))
        wait_until(lambda: len(server._subscriptions) == is_watching)
        for _ in range(40):
            if is_watching:
                client.set("orders/large", value)
            else:
                stuck.sendall(frame(Request.GET, b"own/orders/large"))
        client.set("orders/other", "1")
        assert b"1" == client.get("orders/other")
        received = len(_all_of(stuck, is_endless=not is_watching))
        assert received < 40 << 20 if is_watching else received > 40 << 20
    wait_until(lambda: len(server._subscriptions) == 0)


def _all_of(connection: socket.socket, *, is_endless: bool) -> bytes:
    """Return what comes until the connection ends; of one that is served again, what 40 answers have."""
    data = bytearray()
    while not (is_endless and len(data) > 40 << 20):
        try:
            piece = connection.recv(1 << 20)
        except ConnectionResetError:
            break
        if not piece:
            break
        data += piece
    return bytes(data)


def test_death_of_the_serving_thread_is_seen_by_all(
    served: tuple[StoreServer, StoreAddress], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where memory is short, for instance: nobody waits for an answer that never comes."""
    server, address = served
    client, mirror = TcpControlStore(address), TcpControlStore(address, looks_at="orders")

    def short(*_: object) -> Never:
        raise MemoryError

    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    monkeypatch.setattr(server, "_answer", short)
    with pytest.raises(StoreLostError):
        client.set("a", "1")
    wait_until(lambda: not server.is_serving)
    with pytest.raises(StoreLostError):
        mirror.check(["orders/a"])
    with pytest.raises(StoreLostError, match="has ended"):
        server.store("own").get("never")


def test_place_without_a_server_that_answers_is_given_up_in_time() -> None:
    """Something accepts and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = StoreAddress("127.0.0.1", silent.getsockname()[1])
        began = time.monotonic()
        with pytest.raises(StoreLostError, match="timed out"):
            TcpControlStore(address, answer_s=0.1)

    assert time.monotonic() - began < 60


@given(parts=st.lists(st.binary(max_size=30), max_size=5), cuts=st.lists(st.integers(1, 7), min_size=1))
def test_frames_come_whole_however_they_are_cut(parts: list[bytes], cuts: list[int]) -> None:
    """A stream has no borders of its own."""
    data = frame(Request.SET, *parts) * 2
    frames, found, at = Frames(), [], 0
    for turn in range(len(data)):
        step = cuts[turn % len(cuts)]
        found += list(frames.take(data[at : at + step]))
        at += step

    assert [(Request.SET, parts)] * 2 == found


@pytest.mark.usefixtures("real_processes")
def test_neither_side_needs_torch() -> None:
    """What supervisor and agents talk by is there without torch; asyncio is imported only by who serves."""
    code = (
        "import sys; sys.modules['torch'] = sys.modules['asyncio'] = None\n"
        "import elasticflow.protocol.tcp_store, elasticflow.launcher.supervisor.supervisor, elasticflow.launcher.join\n"
        "import elasticflow.launcher.agent.main"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.usefixtures("real_processes")
def test_process_that_serves_ends_when_its_main_thread_does() -> None:
    """Nothing waits for the loop, and nothing is complained of; a child that it has forked does not serve."""
    code = """
import os, socket, sys
from elasticflow.launcher.rendezvous.store_server import StoreServer
from elasticflow.protocol.store_address import StoreAddress
from elasticflow.protocol.tcp_store import TcpControlStore

listener = socket.create_server(("127.0.0.1", 0))
server = StoreServer(listener)
store = TcpControlStore(StoreAddress("127.0.0.1", listener.getsockname()[1], "own"), looks_at="orders")
child = os.fork()
if child == 0:
    sys.exit(server.is_serving)
assert os.waitpid(child, 0)[1] == 0
server.store("own").set("orders/a", "1")
assert store.get("orders/a") == b"1"
"""
    process = subprocess.run(
        [sys.executable, "-X", "dev", "-c", code], check=True, capture_output=True, text=True, timeout=60
    )
    assert "" == process.stderr
