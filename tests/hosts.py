"""Two hosts for real, each in a network namespace of its own, with a link between them; needs root and iproute2."""

from __future__ import annotations

import os
import subprocess


class Hosts:
    """Two network namespaces with a link between them."""

    def __init__(self) -> None:
        self.names = tuple(f"ef{os.getpid()}-{number}" for number in (1, 2))
        self.addresses = ("10.77.0.1", "10.77.0.2")

    def make(self) -> None:
        """Make them; both ends of the link are up."""
        first, second = self.names
        for name in self.names:
            ip("netns", "add", name)
        ip("-n", first, "link", "add", "link0", "type", "veth", "peer", "name", "link0", "netns", second)
        for name, address in zip(self.names, self.addresses, strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "link0")
            for device in ("link0", "lo"):
                ip("-n", name, "link", "set", device, "up")

    def link(self, state: str) -> None:
        """Cut the link (`down`) or mend it (`up`)."""
        ip("-n", self.names[0], "link", "set", "link0", state)

    def remove(self) -> None:
        """Remove what `make` made."""
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def ip(*arguments: str) -> None:
    """Run iproute2's `ip`."""
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
