"""The file of `run --hosts`: a host on each line, the one that leads first."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING

from elasticflow.errors import HostsError

if TYPE_CHECKING:
    from pathlib import Path

_KEYS = ("dir", "python")
_HOST = re.compile(r"([A-Za-z0-9._-]+@)?[A-Za-z0-9._:-]+")


@dataclass(frozen=True)
class Host:
    """One host.

    Attributes:
        target: Destination for ssh: `name`, `user@name`, or an alias of ssh's configuration.
        place: Place in the file: `hosts.txt:3`.
        folder: The project's folder there; None: the same as here.
        python: The Python there that has elasticflow; None: the same path as here.
    """

    target: str
    place: str
    folder: str | None = None
    python: str | None = None

    @property
    def name(self) -> str:
        """The host's name, without the user's."""
        return self.target.rpartition("@")[2]


def read_hosts(path: Path) -> tuple[Host, ...]:
    """Return the hosts of a file, in its order; blank lines and what follows # are left out.

    Raises:
        HostsError: the file cannot be read, a line is no host, a host stands twice, or there is no host.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise HostsError(f"{path} cannot be read: {error}", "write a host on each line") from error
    hosts: list[Host] = []
    for number, line in enumerate(lines, 1):
        if (host := _host(line, f"{path}:{number}")) is None:
            continue
        if same := next((other for other in hosts if other.target == host.target), None):
            message = f"{host.place}: {host.target} stands in {same.place} already"
            raise HostsError(message, "a host has one node: write each host once")
        hosts.append(host)
    if not hosts:
        raise HostsError(f"{path} names no host", "write a host on each line, the one that leads first")
    return tuple(hosts)


def _host(line: str, place: str) -> Host | None:
    try:
        words = shlex.split(line, comments=True)
    except ValueError as error:
        raise HostsError(f"{place}: {error}", "close the quotation mark") from error
    if not words:
        return None
    target, *options = words
    if not _HOST.fullmatch(target) or target.startswith("-"):
        message = f"{place}: {target!r} is no host"
        raise HostsError(message, "write it as ssh takes it: name, user@name, or an alias of ~/.ssh/config")
    given: dict[str, str] = {}
    for option in options:
        key, equals, value = option.partition("=")
        if key not in _KEYS or not equals or not value.startswith("/"):
            message = f"{place}: {option!r} is not understood"
            raise HostsError(message, "after the host: dir=/the/projects/folder and python=/bin/python there")
        given[key] = value
    return Host(target, place, given.get("dir"), given.get("python"))
