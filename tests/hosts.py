"""Hosts for real, each in a network namespace of its own, on one switch; needs root and iproute2."""

from __future__ import annotations

import os
import subprocess


class Hosts:
    """Network namespaces, each with a cable to a switch in another one.

    Args:
        count: How many.
        is_v6: They have IPv6 addresses alone, and each host another interface before the first, which leads nowhere.

    Attributes:
        names: Of the namespaces.
        addresses: Of the hosts.
    """

    def __init__(self, count: int = 2, *, is_v6: bool = False) -> None:
        self._switch = f"ef{os.getpid()}-switch"
        numbers = range(1, count + 1)
        self.names = tuple(f"ef{os.getpid()}-{number}" for number in numbers)
        self.addresses = tuple(f"fd77::{number}" if is_v6 else f"10.77.0.{number}" for number in numbers)
        self._bits = 64 if is_v6 else 24

    def make(self) -> None:
        """Make them; all cables are plugged in."""
        ip("netns", "add", self._switch)
        ip("-n", self._switch, "link", "add", "br0", "type", "bridge")
        ip("-n", self._switch, "link", "set", "br0", "up")
        for number, (name, address) in enumerate(zip(self.names, self.addresses, strict=True)):
            ip("netns", "add", name)
            if self._bits == 64:
                _add_dead_end(name)
            link = ("-n", self._switch, "link")
            ip(*link, "add", f"port{number}", "type", "veth", "peer", "name", "link0", "netns", name)
            ip(*link, "set", f"port{number}", "master", "br0", "up")
            # Without a check for a second owner, during which an IPv6 address may not be bound.
            fresh = ("nodad",) if ":" in address else ()
            ip("-n", name, "addr", "add", f"{address}/{self._bits}", "dev", "link0", *fresh)
            for device in ("link0", "lo"):
                ip("-n", name, "link", "set", device, "up")

    def link(self, state: str, number: int = 0) -> None:
        """Cut the cable of a host at the switch (`down`), or mend it (`up`)."""
        ip("-n", self._switch, "link", "set", f"port{number}", state)

    def remove(self) -> None:
        """Remove what `make` made."""
        for name in (*self.names, self._switch):
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


def ip_pids(name: str) -> list[int]:
    """Return the processes in a network namespace."""
    listed = subprocess.run(["ip", "netns", "pids", name], check=True, capture_output=True, text=True)
    return [int(word) for word in listed.stdout.split()]
