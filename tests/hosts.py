"""Two hosts for real, each in a network namespace of its own, with a link between them; needs root and iproute2."""

from __future__ import annotations

import os
import subprocess


class Hosts:
    """Two network namespaces with a link between them.

    Args:
        is_v6: The link has IPv6 addresses alone, and each host another interface before it, which leads nowhere.
    """

    def __init__(self, *, is_v6: bool = False) -> None:
        self.names = tuple(f"ef{os.getpid()}-{number}" for number in (1, 2))
        self.addresses = ("fd77::1", "fd77::2") if is_v6 else ("10.77.0.1", "10.77.0.2")
        self._bits = 64 if is_v6 else 24

    def make(self) -> None:
        """Make them; both ends of the link are up."""
        first, second = self.names
        for name in self.names:
            ip("netns", "add", name)
            if self._bits == 64:
                _add_dead_end(name)
        ip("-n", first, "link", "add", "link0", "type", "veth", "peer", "name", "link0", "netns", second)
        for name, address in zip(self.names, self.addresses, strict=True):
            # Without a check for a second owner, during which an IPv6 address may not be bound.
            fresh = ("nodad",) if ":" in address else ()
            ip("-n", name, "addr", "add", f"{address}/{self._bits}", "dev", "link0", *fresh)
            for device in ("link0", "lo"):
                ip("-n", name, "link", "set", device, "up")

    def link(self, state: str) -> None:
        """Cut the link (`down`) or mend it (`up`)."""
        ip("-n", self.names[0], "link", "set", "link0", state)

    def remove(self) -> None:
        """Remove what `make` made."""
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def _add_dead_end(name: str) -> None:
    """Give a host an interface with an address that every host has: nobody is reached over it."""
    ip("-n", name, "link", "add", "aaa0", "type", "veth", "peer", "name", "aaa1")
    ip("-n", name, "addr", "add", "192.168.99.1/24", "dev", "aaa0")
    for device in ("aaa0", "aaa1"):
        ip("-n", name, "link", "set", device, "up")


def ip(*arguments: str) -> None:
    """Run iproute2's `ip`."""
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
