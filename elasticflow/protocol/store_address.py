"""Where a launch's control store is, and which of its keys are the launch's."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field, replace
from urllib.parse import parse_qsl, urlencode, urlsplit

PREFIX = "elasticflow"


class StoreLostError(RuntimeError):
    """The store does not answer any more; a RuntimeError, as torch raises for its own store."""


@dataclass(frozen=True)
class StoreAddress:
    """The address of a control store.

    Attributes:
        host: Host that serves it.
        port: Its port.
        prefix: What all keys begin with.
        backend: `c10d`, as torchrun calls what a launch serves itself (`protocol/tcp_store.py`), or `etcd-v2`.
        options: How to talk to it; etcd's are `protocol`, `ca_cert`, `ssl_cert` and `ssl_cert_key`.
        token: What both sides have to know; empty: nothing. It stands in no text that this object gives.
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
        """Its address for people."""
        return f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        """The whole address but the token in one word, for an environment variable."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        query = urlencode(self.options)
        return f"{self.backend}://{host}:{self.port}/{self.prefix}" + (f"?{query}" if query else "")

    @classmethod
    def parse(cls, url: str, token: str = "") -> StoreAddress:
        """Return the address that *url*, made by `url`, stands for, with *token*."""
        parts = urlsplit(url)
        assert parts.hostname is not None
        assert parts.port is not None
        # Not `parts.hostname` alone: it is in lower case, which a name in /etc/hosts may not be.
        host = parts.netloc.rpartition(":")[0].removeprefix("[").removesuffix("]")
        return cls(host, parts.port, parts.path[1:], parts.scheme, dict(parse_qsl(parts.query)), token)


def is_here(host: str) -> bool:
    """Return whether *host* is an address of this machine."""
    try:
        with socket.create_server((host, 0)):
            return True
    except OSError:
        return False
