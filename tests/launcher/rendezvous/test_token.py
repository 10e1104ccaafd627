"""The token of a run: where it comes from, and that nobody without it speaks to a store or holds it up."""

from __future__ import annotations

import socket
import threading
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticflow.compiler.plan.launch_plan import plan_job
from elasticflow.errors import TokenError, TokenRefusedError
from elasticflow.launcher.rendezvous import store_server
from elasticflow.launcher.rendezvous.connections import Refused
from elasticflow.launcher.rendezvous.leadership import open_store
from elasticflow.launcher.rendezvous.store_server import StoreServer
from elasticflow.launcher.rendezvous.token import given_token, open_port_warning
from elasticflow.protocol.handshake import HELLO, ServerSide, StrangerError, greet
from elasticflow.protocol.store_address import StoreAddress
from elasticflow.protocol.tcp_store import Request, TcpControlStore, frame
from tests.compiler.jobs import make_job
from tests.launcher.conftest import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from elasticflow.compiler.plan.launch_plan import LaunchPlan

TOKEN = "a-token-of-these-tests"


@pytest.fixture(name="served")
def _served() -> Iterator[tuple[StoreServer, StoreAddress]]:
    """Yield a server that asks for a token, and where it is, with the token."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = StoreServer(listener, TOKEN)
    yield server, StoreAddress("127.0.0.1", listener.getsockname()[1], "own", token=TOKEN)
    server.close()


def without(address: StoreAddress, token: str) -> StoreAddress:
    """Return the address with another token."""
    return StoreAddress(address.host, address.port, address.prefix, token=token)


def test_token_lets_in_and_is_never_sent(served: tuple[StoreServer, StoreAddress]) -> None:
    """What goes over the wire, in both directions, does not hold it, and is another each time."""
    _, address = served
    TcpControlStore(address, looks_at="orders").set("orders/a", "1")
    heard = []
    for _ in range(2):
        with socket.create_connection((address.host, address.port), timeout=30) as connection:
            recorder = Recorder(connection)
            greet(recorder, TOKEN, address.endpoint)  # type: ignore[arg-type]
            heard.append(recorder.heard)

    assert b"1" == TcpControlStore(address).get("orders/a")
    assert TOKEN.encode() not in b"".join(heard)
    assert heard[0] != heard[1]


class Recorder:
    """A connection that keeps all that goes over it."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self.heard = b""

    def sendall(self, data: bytes) -> None:
        """Send *data*."""
        self.heard += data
        self._connection.sendall(data)

    def recv(self, most: int) -> bytes:
        """Return what has come."""
        data = self._connection.recv(most)
        self.heard += data
        return data


@pytest.mark.parametrize(
    ("token", "says"),
    [
        ("", "asks for a token, and this machine has none"),
        (TOKEN + "x", "has another token than this machine"),
    ],
    ids=["none", "wrong"],
)
def test_machine_without_the_token_is_told_what_to_do(
    served: tuple[StoreServer, StoreAddress], token: str, says: str
) -> None:
    """The serving side counts those that said something wrong; others continue."""
    server, address = served
    with pytest.raises(TokenRefusedError, match=says) as refused:
        TcpControlStore(without(address, token))
    assert "ELASTICFLOW_TOKEN" in str(refused.value.remedy)
    assert TOKEN not in str(refused.value)
    if token:
        wait_until(lambda: server.refusals.take() == Refused(1, "127.0.0.1", "it does not know the token"))
    TcpControlStore(address).set("a", "1")


def test_server_without_the_token_is_refused_by_who_has_one() -> None:
    """Somebody else may have taken the port: what it says is not believed."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = StoreServer(listener)
    with pytest.raises(TokenRefusedError, match="has no token, and this machine has one"):
        TcpControlStore(StoreAddress("127.0.0.1", listener.getsockname()[1], token=TOKEN))
    server.close()


def test_server_that_only_claims_to_know_the_token_is_refused() -> None:
    """It says yes to any proof, and has none."""
    with socket.create_server(("127.0.0.1", 0)) as liar:

        def answer() -> None:
            connection, _ = liar.accept()
            with connection:
                connection.sendall(HELLO + b"t" + bytes(32) + b"+" + bytes(32))
                while connection.recv(1024):
                    pass

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(TokenRefusedError, match="does not know this machine's token"):
            TcpControlStore(StoreAddress("127.0.0.1", liar.getsockname()[1], token=TOKEN))


@given(
    chunks=st.lists(st.binary(max_size=80), max_size=6),
    begins=st.booleans(),
    token=st.sampled_from(["", TOKEN]),
)
def test_no_bytes_but_the_proof_open_a_door(chunks: list[bytes], token: str, *, begins: bool) -> None:
    """Any bytes, in any pieces: refused, or waited for; with a token never let in, and nothing piles up."""
    side, opened = ServerSide(token), False
    for chunk in [HELLO, *chunks] if begins else chunks:
        try:
            _, rest = side.take(chunk)
        except StrangerError:
            break
        opened = opened or side.is_done
        assert rest == b"" or side.is_done
        assert len(side._heard) <= len(HELLO) + 32
    assert not (token and opened)


@given(said=st.lists(st.binary(min_size=1, max_size=120), max_size=4), begins=st.booleans())
def test_served_store_stands_whatever_strangers_say(
    fuzzed: tuple[StoreServer, StoreAddress], said: list[bytes], *, begins: bool
) -> None:
    """Over real sockets: no key is changed, and who knows the token is answered."""
    server, address = fuzzed
    with socket.create_connection((address.host, address.port), timeout=30) as stranger:
        for data in [HELLO + bytes(32), *said] if begins else said:
            try:
                stranger.sendall(data + frame(Request.SET, b"own/stranger", b"1"))
            except OSError:
                break
    store = TcpControlStore(address)
    assert not store.check(["stranger"])
    store.close()
    assert server.is_serving


@pytest.fixture(name="fuzzed", scope="module")
def _fuzzed() -> Iterator[tuple[StoreServer, StoreAddress]]:
    listener = socket.create_server(("127.0.0.1", 0))
    server = StoreServer(listener, TOKEN)
    yield server, StoreAddress("127.0.0.1", listener.getsockname()[1], "own", token=TOKEN)
    server.close()


def test_silent_stranger_is_let_go(
    served: tuple[StoreServer, StoreAddress], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that sends its line and no proof; nobody who has proved who he is loses his connection."""
    server, address = served
    client = TcpControlStore(address)
    monkeypatch.setattr(store_server, "_GREETING_S", 0.05)
    for said in (b"", HELLO[:5], HELLO + bytes(32)):
        with socket.create_connection((address.host, address.port), timeout=30) as stranger:
            stranger.sendall(said)
            while stranger.recv(1024):
                pass
    client.set("a", "1")
    assert 1 == len(server._clients)


def test_crowd_of_strangers_leaves_room(
    served: tuple[StoreServer, StoreAddress], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever has waited longest goes; a machine with the token gets in."""
    server, address = served
    monkeypatch.setattr(store_server, "_MOST_GREETING", 5)
    crowd = [socket.create_connection((address.host, address.port), timeout=30) for _ in range(20)]
    TcpControlStore(address).set("a", "1")
    assert len(server._greeting) <= 5
    for stranger in crowd:
        stranger.close()


def test_token_comes_from_the_environment_before_the_file(tmp_path: Path) -> None:
    """Spaces and newlines around it do not count; without either there is none."""
    (tmp_path / "token").write_text("of-a-file-0123456789\n")
    assert "of-a-file-0123456789" == given_token("token", tmp_path, {})
    assert TOKEN == given_token("token", tmp_path, {"ELASTICFLOW_TOKEN": f" {TOKEN}\n"})
    assert "" == given_token(None, tmp_path, {})


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "cannot be read: .*No such file"),
        (b"\xff\xfe", "it is no text"),
        (b"\n", "is empty"),
        (b"short", "is no word of 16 characters"),
        (b"two words that are long enough", "is no word of 16 characters"),
    ],
    ids=["missing", "bytes", "empty", "short", "words"],
)
def test_file_that_holds_no_token_is_named(tmp_path: Path, content: bytes | None, says: str) -> None:
    """With how to make one; what it holds is not said."""
    if content is not None:
        (tmp_path / "token").write_bytes(content)
    with pytest.raises(TokenError, match=says) as refused:
        given_token("token", tmp_path, {})
    assert "openssl rand -hex 32" in str(refused.value.remedy)
    assert "two words" not in str(refused.value)


def plan_of(tmp_path: Path, **changes: Any) -> LaunchPlan:
    """Return the plan of a job."""
    return plan_job(make_job(**changes), project_root=tmp_path, job_files=[tmp_path / "job.toml"])


def test_launch_that_nobody_may_join_makes_a_token(tmp_path: Path) -> None:
    """Another user of the machine finds its port, and nothing behind it."""
    store = open_store(plan_of(tmp_path))
    store.connect().set("a", "1")
    assert len(store.address.token) == 64
    assert store.address.token not in repr(store.address) + store.address.url
    with pytest.raises(TokenRefusedError):
        TcpControlStore(without(store.address, ""))
    store.close()


@pytest.mark.parametrize(
    ("endpoint", "token", "warns"),
    [
        ("head:29400", "", True),
        ("head:29400", TOKEN, False),
        ("127.0.0.1:29400", "", False),
        ("localhost:29400", "", False),
        ("0.0.0.0:29400", "", True),
    ],
)
def test_port_that_is_open_to_others_is_warned_of(
    tmp_path: Path, endpoint: str, token: str, *, warns: bool
) -> None:
    """Without a token, where other machines may join."""
    sentence = open_port_warning(plan_of(tmp_path, nodes__endpoint=endpoint, nodes__max=2), token)
    assert warns == (sentence is not None)
    assert open_port_warning(plan_of(tmp_path, nodes__endpoint=endpoint), "") is None
