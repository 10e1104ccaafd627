"""The address of a launch's control store, and the prefix of the launch's keys in it."""

from __future__ import annotations

import ipaddress
import socket
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

PREFIX = "elasticflow"
_CONNECT_S = 1.0


class StoreLostError(RuntimeError):
    """The store does not answer any more; a RuntimeError, as torch raises for its own store."""


@dataclass(frozen=True)
class StoreAddress:
    """The address of a control store.

    Attributes:
        prefix: Beginning of all keys.
        backend: `c10d`, as torchrun calls what a launch serves itself (`protocol/tcp_store.py`), or `etcd-v2`.
        options: How to talk to it; etcd's are `protocol`, `ca_cert`, `ssl_cert` and `ssl_cert_key`.
        token: Secret that both sides have to know; empty: none is needed. No text of this object shows it.
    """

    host: str
    port: int
    prefix: str = PREFIX
    backend: str = "c10d"
    options: dict[str, str] = field(default_factory=dict)
    token: str = field(default="", repr=False)

    def under(self, name: str) -> StoreAddress:
        """Return the address of the keys below *name*."""
        return replace(self, prefix=f"{self.prefix}/{name}")

    @property
    def endpoint(self) -> str:
        """The address for people."""
        return joined(self.host, self.port)

    @property
    def url(self) -> str:
        """The whole address except the token in one word, for an environment variable."""
        query = urlencode(self.options)
        return f"{self.backend}://{self.endpoint}/{self.prefix}" + (f"?{query}" if query else "")

    @classmethod
    def parse(cls, url: str, token: str = "") -> StoreAddress:
        """Return the address that the property `url` wrote as *url*, with *token*."""
        parts = urlsplit(url)
        assert parts.hostname is not None
        assert parts.port is not None
        # Not `parts.hostname` alone: it is in lower case, which a name in /etc/hosts may not be.
        host, _ = split(parts.netloc)
        return cls(host, parts.port, parts.path[1:], parts.scheme, dict(parse_qsl(parts.query)), token)


def joined(host: str, port: int) -> str:
    """Return `host:port`; an IPv6 address stands in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split(endpoint: str) -> tuple[str, int]:
    """Return host and port of `host:port`; an IPv6 address loses its brackets.

    Raises:
        ValueError: it is of another form.
    """
    host, _, port = endpoint.rpartition(":")
    if host.startswith("[") and host.endswith("]") and ":" in host:
        host = host[1:-1]
    elif ":" in host:
        raise ValueError(f"an IPv6 address stands in brackets: [{host}]:{port}")
    if not host or not port.isdecimal():
        raise ValueError("host and port are written like head:29400")
    return host, int(port)


def is_here(host: str) -> bool:
    """Return whether *host* is an address of this machine, or stands for one."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return any(_leads_back(family, address) for family, _, _, _, address in found)


def address_for_others(towards_keys: str) -> str | None:
    """Return the address at which other machines reach this one, given the local address of its connection to the launch's keys.

    For the loopback it is the address to which the host's name resolves; None if that is no other address of this machine:
    other machines then use the host of the launch's keys.
    """
    if not ipaddress.ip_address(towards_keys).is_loopback:
        return towards_keys
    # A host's name may resolve to an address that this machine no longer has, or that only other machines use.
    with suppress(OSError):
        named = socket.gethostbyname(socket.gethostname())
        if is_here(named) and not ipaddress.ip_address(named).is_loopback:
            return named
    return None


def _leads_back(family: int, address: Any) -> bool:
    try:
        with socket.create_server(address, family=family) as server, socket.socket(family) as client:
            # Where `ip_nonlocal_bind` is set, another machine's address can be bound, too: a connection goes there.
            client.settimeout(_CONNECT_S)
            client.connect(server.getsockname())
            return True
    except OSError:
        return False
