"""Which interface a job's workers talk over, and the addresses of several kinds."""

from __future__ import annotations

import socket

import pytest

from elasticflow.errors import InterfaceError, PortTakenError
from elasticflow.launcher.rendezvous import network
from elasticflow.launcher.rendezvous.network import Interface
from elasticflow.protocol import store_address
from elasticflow.protocol.store_address import StoreAddress, is_here, joined, split
from elasticflow.protocol.worker_environment import ADDRESS

# Linux: a socket may be bound to an address that this machine does not have.
_IP_FREEBIND = 15
HERE = [
    Interface("lo", "127.0.0.1"),
    Interface("eth0", "fe80::5%eth0"),
    Interface("eth0", "192.168.9.4"),
    Interface("eth1", "fe80::7%eth1"),
    Interface("eth1", "fd00::7"),
    Interface("eth1", "10.3.0.7"),
    Interface("ib0", "fe80::9%ib0"),
    Interface("ib0", "fd01::9"),
]


@pytest.mark.parametrize(
    ("asked", "name", "address"),
    [
        ("eth1", "eth1", "10.3.0.7"),
        ("ib0", "ib0", "fd01::9"),
        ("10.3.0.7", "eth1", "10.3.0.7"),
        ("10.0.0.0/8", "eth1", "10.3.0.7"),
        ("10.3.0.99/16", "eth1", "10.3.0.7"),
        ("fd00::/16", "eth1", "fd00::7"),
        ("fd01::9", "ib0", "fd01::9"),
        ("fe80::7", "eth1", "fe80::7%eth1"),
    ],
)
def test_interface_is_found_by_name_address_or_network(
    monkeypatch: pytest.MonkeyPatch, asked: str, name: str, address: str
) -> None:
    """Workers are told its name, and the address that others are told."""
    monkeypatch.setattr(network, "_interfaces", lambda: HERE)
    assert network.variables("head", 1, asked) == {
        "GLOO_SOCKET_IFNAME": name,
        "NCCL_SOCKET_IFNAME": name,
        ADDRESS: address,
    }


@pytest.mark.parametrize("asked", ["eth7", "10.4.0.0/16", "fd02::/16", "192.168.9.5"])
def test_interface_that_is_not_there_is_refused_with_those_that_are(
    monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    """Before anything starts."""
    monkeypatch.setattr(network, "_interfaces", lambda: HERE)
    with pytest.raises(InterfaceError, match=asked) as refused:
        network.check(asked)
    assert "eth1 (10.3.0.7)" in str(refused.value.remedy)


def test_no_interface_asked_for_is_none_to_check() -> None:
    """As in most jobs."""
    network.check(None)


@pytest.mark.parametrize(
    ("host", "port", "text"),
    [("head", 1, "head:1"), ("10.0.0.1", 29400, "10.0.0.1:29400"), ("fd00::1", 29400, "[fd00::1]:29400")],
)
def test_endpoint_is_split_and_joined(host: str, port: int, text: str) -> None:
    """An IPv6 address stands in brackets."""
    assert text == joined(host, port)
    assert (host, port) == split(text)
    assert text == StoreAddress(host, port).endpoint


@pytest.mark.parametrize("text", ["head", ":1", "head:", "head:x", "fd00::1:29400", "[fd00::1]"])
def test_text_that_is_no_endpoint_is_refused(text: str) -> None:
    """Also an IPv6 address without brackets, which may be read in two ways."""
    with pytest.raises(ValueError, match=r"head:29400|brackets"):
        split(text)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_port_is_served_for_addresses_of_both_kinds(host: str) -> None:
    """By one socket; the port is taken then for both."""
    if not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6 here")
    with network.listen("", 0) as listener:
        port = listener.getsockname()[1]
        socket.create_connection((host, port), timeout=30).close()
        with pytest.raises(PortTakenError, match=rf"cannot listen on \*:{port}: Address already in use"):
            network.listen("", port)
    assert is_here(host)


def test_address_of_another_machine_is_not_here() -> None:
    """Nor a name that stands for nothing."""
    assert not is_here("192.0.2.1")
    assert not is_here("nowhere.invalid")


def test_address_of_another_machine_that_can_be_bound_is_not_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """`net.ipv4.ip_nonlocal_bind = 1` lets it be bound, as a socket's own option does."""

    def bound(address: tuple[str, int], family: int) -> socket.socket:
        server = socket.socket(family)
        server.setsockopt(socket.IPPROTO_IP, _IP_FREEBIND, 1)
        server.bind(address)
        server.listen()
        return server

    monkeypatch.setattr(socket, "create_server", bound)
    monkeypatch.setattr(store_address, "_CONNECT_S", 0.05)
    assert not is_here("192.0.2.1")
    assert is_here("127.0.0.1")
