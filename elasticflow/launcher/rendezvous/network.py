"""The network of this machine: a port to listen on, the interface that leads to the others, or that the job names."""

from __future__ import annotations

import ipaddress
import os
import socket
from typing import NamedTuple

from elasticflow.errors import InterfaceError, PortTakenError
from elasticflow.protocol.store_address import joined
from elasticflow.protocol.worker_environment import ADDRESS

# Connections that wait to be accepted: all nodes may come at a time. The kernel allows `net.core.somaxconn`, 4096 as a rule.
_BACKLOG = 4096
# gloo and NCCL read them; without them gloo takes the address that the host name stands for, often 127.0.1.1.
_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


class Interface(NamedTuple):
    """An address of this machine, and the name of the interface that has it."""

    name: str
    address: str


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket for the store.

    Args:
        host: An address of this machine; empty: all of them, IPv4 and IPv6.
        port: 0 takes a free one.

    Raises:
        PortTakenError: the port is in use or may not be bound.
    """
    try:
        if not host and socket.has_dualstack_ipv6():
            return socket.create_server(
                ("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=_BACKLOG
            )
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise PortTakenError(
            # Not `error.strerror`: Python adds the address to it, which stands here already.
            f"nodes.endpoint: cannot listen on {joined(host or '*', port)}: {os.strerror(error.errno or 0)}",
            "end the process that uses the port, or name another one in nodes.endpoint; "
            "to take part in a run that is led there: --join",
        ) from error


def variables(host: str, port: int, interface: str | None = None) -> dict[str, str]:
    """Return variables that have workers talk over *interface*, or the interface towards *host*:*port*, where a server listens.

    Empty if the job names no interface and the environment sets such a variable, or if the server is on this machine.

    Raises:
        InterfaceError: this machine has no such interface.
    """
    if interface is not None:
        chosen = find(interface)
        return {**dict.fromkeys(_VARIABLES, chosen.name), ADDRESS: chosen.address}
    if any(name in os.environ for name in _VARIABLES):
        return {}
    name = towards(host, port)
    return {} if name is None else dict.fromkeys(_VARIABLES, name)


def towards(host: str, port: int) -> str | None:
    """Return the name of the interface that leads to *host*:*port*, where a server listens.

    None if that is the loopback, which all nodes share then.
    """
    with socket.create_connection((host, port), timeout=10) as connection:
        address = connection.getsockname()[0]
    if ipaddress.ip_address(address).is_loopback:
        return None
    return next((found.name for found in _interfaces() if found.address == address), None)


def check(interface: str | None) -> None:
    """Check that this machine has the interface that a job names.

    Raises:
        InterfaceError: this machine does not have the interface.
    """
    if interface is not None:
        find(interface)


def find(interface: str) -> Interface:
    """Return the interface that *interface* means: a name, an address, or a network of which it has an address.

    Of several addresses: an IPv4 one first, and link-local ones last.

    Raises:
        InterfaceError: this machine has no such interface.
    """
    try:
        network = ipaddress.ip_network(interface, strict=False)
    except ValueError:
        network = None
    all_here = sorted(_interfaces(), key=_rank)
    for found in all_here:
        is_meant = found.name == interface if network is None else _plain(found.address) in network
        if is_meant:
            return found
    names = ", ".join(f"{found.name} ({found.address})" for found in all_here)
    what = f"no interface {interface}" if network is None else f"no interface with an address of {interface}"
    raise InterfaceError(
        f"nodes.interface: this machine has {what}, or it has no address",
        f"it has {names or 'none'}; a network, like 10.0.0.0/8, names the right one on each machine",
    )


def _rank(found: Interface) -> tuple[bool, bool]:
    address = _plain(found.address)
    return address.is_link_local, address.version == 6


def _plain(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Return the address without the interface that may follow a link-local one."""
    return ipaddress.ip_address(address.partition("%")[0])


def _interfaces() -> list[Interface]:
    import psutil  # most launches are on one machine, and do not ask

    return [
        Interface(name, each.address)
        for name, addresses in psutil.net_if_addrs().items()
        for each in addresses
        if each.family in (socket.AF_INET, socket.AF_INET6)
    ]
