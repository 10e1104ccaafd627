"""The network of this machine: a port to listen on, the interface that leads to the others."""

from __future__ import annotations

import fcntl
import os
import socket
import struct

from elasticflow.errors import PortTakenError

_SIOCGIFADDR = 0x8915  # linux/sockios.h
# gloo and NCCL read them; without them gloo takes the address that the host name stands for, often 127.0.1.1.
_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket for the store; port 0 takes a free one.

    Raises:
        PortTakenError: the port is in use or may not be bound.
    """
    try:
        return socket.create_server((host, port), backlog=512)
    except OSError as error:
        raise PortTakenError(
            # Not `error.strerror`: Python adds the address to it, which stands here already.
            f"nodes.endpoint: cannot listen on {host or '*'}:{port}: {os.strerror(error.errno or 0)}",
            "end the process that uses the port, or name another one in nodes.endpoint",
        ) from error


def variables(host: str, port: int) -> dict[str, str]:
    """Return variables that have workers talk over the interface towards *host*:*port*; none if the environment has one."""
    if any(name in os.environ for name in _VARIABLES):
        return {}
    interface = towards(host, port)
    return {} if interface is None else dict.fromkeys(_VARIABLES, interface)


def towards(host: str, port: int) -> str | None:
    """Return the name of the interface that leads to *host*:*port*, where somebody listens.

    None if that is the loopback, which all nodes share then, or if no interface has the IPv4 address that this machine has
    towards *host*.
    """
    with socket.create_connection((host, port), timeout=10) as connection:
        address = connection.getsockname()[0]
    if address.startswith("127.") or address == "::1":
        return None
    return next((name for _, name in socket.if_nameindex() if _address_of(name) == address), None)


def _address_of(interface: str) -> str | None:
    request = struct.pack("256s", interface.encode())
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            answer = fcntl.ioctl(any_socket.fileno(), _SIOCGIFADDR, request)
        except OSError:  # the interface has no IPv4 address
            return None
    return socket.inet_ntoa(answer[20:24])
