"""The handshake of our TCP connections: both ends first prove that they know the same token.

    client   HELLO, 32 random bytes
    server   HELLO, `t` (a token is asked for) or `o` (open), 32 random bytes
    client   with `t`: HMAC-SHA256 of both random values, with the token as the key
    server   `+` and an HMAC of its own, or `-`; with `o`: nothing

The token itself is never sent, and a listener learns nothing of use for another connection. The client proves first, so
that a stranger gets nothing that a short token could be guessed from. The rest of the connection is not encrypted.
"""

from __future__ import annotations

import hmac
import os
from typing import TYPE_CHECKING

from elasticflow.errors import TokenRefusedError
from elasticflow.protocol.store_address import StoreLostError

if TYPE_CHECKING:
    import socket

TOKEN = "ELASTICFLOW_TOKEN"  # noqa: S105  a variable's name
"""Variable that holds the token; the launch's own processes get it by that, too."""
# The number is the protocol's version: another one is refused by name.
HELLO = b"elasticflow keys 4\n"
_RANDOM = 32
_OPEN, _ASKS = b"o", b"t"
_YES, _NO = b"+", b"-"
_PROOF = 32
_REMEDY = (
    f"give all machines of the run, and `elasticflow rendezvous serve`, the same token: in the variable {TOKEN}, "
    "or in a file that nodes.token_file names"
)


class StrangerError(ValueError):
    """The bytes received do not come from a client that knows the token.

    Attributes:
        answer: Bytes to send before the connection is closed.
    """

    def __init__(self, why: str, answer: bytes = b"") -> None:
        super().__init__(why)
        self.answer = answer


class ServerSide:
    """The server's side of one connection's handshake: bytes in, bytes out.

    Args:
        token: Secret that clients have to know; empty: the server is open.
    """

    def __init__(self, token: str) -> None:
        self._token = token.encode()
        self._heard = b""
        self._random = os.urandom(_RANDOM)
        self._client_random = b""
        self.is_done = False

    def take(self, data: bytes) -> tuple[bytes, bytes]:
        """Return the answer to *data*, and the part of *data* that follows the handshake.

        Raises:
            StrangerError: no client of ours, or one that does not know the token.
        """
        if self.is_done:
            return b"", data
        self._heard += data
        answer = b""
        if not self._client_random:
            if not HELLO.startswith(self._heard[: len(HELLO)]):
                raise StrangerError("it is no elasticflow of this version")
            if len(self._heard) < len(HELLO) + _RANDOM:
                return b"", b""
            self._client_random = self._take(len(HELLO) + _RANDOM)[len(HELLO) :]
            answer = HELLO + (_ASKS if self._token else _OPEN) + self._random
            self.is_done = not self._token
        if not self.is_done and len(self._heard) >= _PROOF:
            proof = self._take(_PROOF)
            if not hmac.compare_digest(proof, self._proof(b"client")):
                raise StrangerError("it does not know the token", _NO)
            answer += _YES + self._proof(b"server")
            self.is_done = True
        return answer, self._take(len(self._heard)) if self.is_done else b""

    def _take(self, count: int) -> bytes:
        taken, self._heard = self._heard[:count], self._heard[count:]
        return taken

    def _proof(self, side: bytes) -> bytes:
        return _proof(self._token, side, self._client_random, self._random)


def greet(connection: socket.socket, token: str, endpoint: str) -> None:
    """Make sure that a server of ours, which knows *token*, answers on *connection*, and prove that this process does.

    Raises:
        StoreLostError: something else answers.
        TokenRefusedError: the two sides do not have the same token.
    """
    mine = os.urandom(_RANDOM)
    connection.sendall(HELLO + mine)
    if not _says(connection, HELLO):
        raise StoreLostError(
            f"what answers at {endpoint} is no store that this version of elasticflow can use"
        )
    kind, theirs = _exactly(connection, 1), _exactly(connection, _RANDOM)
    if kind == _OPEN:
        if token:
            raise TokenRefusedError(
                f"what serves the launch at {endpoint} has no token, and this machine has one: it may be anybody's",
                _REMEDY,
            )
        return
    if not token:
        raise TokenRefusedError(
            f"the launch at {endpoint} asks for a token, and this machine has none", _REMEDY
        )
    key = token.encode()
    connection.sendall(_proof(key, b"client", mine, theirs))
    if _exactly(connection, 1) != _YES:
        raise TokenRefusedError(f"the launch at {endpoint} has another token than this machine", _REMEDY)
    if not hmac.compare_digest(_exactly(connection, _PROOF), _proof(key, b"server", mine, theirs)):
        raise TokenRefusedError(f"what answers at {endpoint} does not know this machine's token", _REMEDY)


def _proof(key: bytes, side: bytes, client_random: bytes, server_random: bytes) -> bytes:
    return hmac.digest(key, b"elasticflow " + side + client_random + server_random, "sha256")


def _says(connection: socket.socket, expected: bytes) -> bool:
    """Return whether *expected* arrives; reads no further once the bytes differ."""
    heard = b""
    while len(heard) < len(expected):
        heard += received(connection, len(expected) - len(heard))
        if not expected.startswith(heard):
            return False
    return True


def _exactly(connection: socket.socket, count: int) -> bytes:
    heard = b""
    while len(heard) < count:
        heard += received(connection, count - len(heard))
    return heard


def received(connection: socket.socket, most: int = 1 << 16) -> bytes:
    """Return the bytes that have arrived, at least one.

    Raises:
        ConnectionResetError: the other side has closed the connection.
    """
    data = connection.recv(most)
    if not data:
        raise ConnectionResetError("it has closed the connection")
    return data
