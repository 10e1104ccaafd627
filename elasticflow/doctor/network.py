"""Checks ports, names and interfaces, by which the processes and machines of a run find each other."""

from __future__ import annotations

import importlib.util
import os
import socket
import threading
from typing import TYPE_CHECKING, TypeVar

from elasticflow.doctor.check import Topic
from elasticflow.errors import InterfaceError, PortTakenError
from elasticflow.launcher.rendezvous.network import find, listen
from elasticflow.protocol.store_address import is_here, split

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from elasticflow.doctor.check import CheckResult, Needs

T = TypeVar("T")

_TOPIC = Topic("network")
_LIMIT_S = 2.0


def network(needs: Needs) -> Iterator[CheckResult]:
    """Yield the results of binding, resolving and connecting; each question takes two seconds at most."""
    yield _loopback()
    yield _own_name(needs)
    if needs.job is None:
        return
    interface = needs.job.nodes.interface
    if interface is not None:
        yield _interface(interface)
    endpoint = needs.job.nodes.endpoint
    if endpoint is not None:
        host, port = split(endpoint)
        torchrun = needs.job.torchrun
        if torchrun.rdzv_backend == "etcd-v2":
            yield from _etcd()
        yield _endpoint(host, port, endpoint, is_served=torchrun.is_store_outside)
    elif needs.is_for_several_machines:
        meaning = "other machines cannot join the run; nodes on this one can be simulated"
        yield _TOPIC.warning("endpoint", "none", meaning, 'set nodes.endpoint = "HOST:PORT"')


def _loopback() -> CheckResult:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=_LIMIT_S).close()
    except OSError as error:
        meaning = "the processes of a run talk over 127.0.0.1, also on one machine"
        return _TOPIC.problem("ports", f"127.0.0.1: {error}", meaning, "allow TCP on the loopback")
    return _TOPIC.ok("ports", "can listen and connect on 127.0.0.1")


def _own_name(needs: Needs) -> CheckResult:
    name = socket.gethostname()
    resolved = _within(lambda: socket.getaddrinfo(name, None))
    if isinstance(resolved, list):
        addresses = sorted({str(socket_address[0]) for *_, socket_address in resolved})
        return _TOPIC.ok("host name", f"{name} is {', '.join(addresses)}")
    meaning = "libraries that ask for this machine's address get none; gloo then takes the loopback"
    remedy = f"add a line to /etc/hosts: ADDRESS {name}"
    found = _TOPIC.problem if needs.is_for_several_machines else _TOPIC.warning
    return found("host name", f"{name} is no address: {_reason(resolved)}", meaning, remedy)


def _interface(name: str) -> CheckResult:
    try:
        found = find(name)
    except InterfaceError as error:
        meaning = "workers could not talk to each other"
        return _TOPIC.problem("interface", error.message, meaning, error.remedy or "")
    return _TOPIC.ok("interface", f"{found.name}, {found.address}")


def _endpoint(host: str, port: int, endpoint: str, *, is_served: bool) -> CheckResult:
    name = "endpoint"
    resolved = _within(lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
    if not isinstance(resolved, list):
        meaning = "machines that are to join look for the run under this name"
        return _TOPIC.problem(
            name, f"{host} is no address: {_reason(resolved)}", meaning, "check nodes.endpoint"
        )
    if is_here(host) and not is_served:
        return _own_endpoint(host, port, endpoint)
    answer = _within(lambda: socket.create_connection((host, port), timeout=_LIMIT_S).close())
    if answer is None:
        return _TOPIC.ok(name, f"{endpoint} answers: a run, or a store, is there")
    if isinstance(answer, ConnectionRefusedError) and not is_served:
        return _TOPIC.ok(
            name, f"{host} is reached; nobody listens on {port} yet, as before the run starts there"
        )
    meaning = "this machine could not take part in the run"
    remedy = f"start what serves there; else check the address, and that firewalls let TCP {port} through"
    return _TOPIC.problem(name, f"{endpoint}: {_reason(answer)}", meaning, remedy)


def _etcd() -> Iterator[CheckResult]:
    if importlib.util.find_spec("etcd") is None:
        meaning = "the rendezvous of this job is kept in etcd"
        remedy = 'pip install "elasticflow[etcd]"'
        yield _TOPIC.problem("etcd", "python-etcd is not installed", meaning, remedy)


def _own_endpoint(host: str, port: int, endpoint: str) -> CheckResult:
    try:
        listen(host, port).close()
    except PortTakenError as error:
        reason = os.strerror(error.__cause__.errno or 0) if isinstance(error.__cause__, OSError) else ""
        fact = f"{endpoint} is this machine; the port cannot be had: {reason}"
        meaning = (
            "a run from here is refused, unless it is a run or `elasticflow rendezvous serve` that listens"
        )
        remedy = "end what listens there (ss -ltnp), or name another port in nodes.endpoint"
        return _TOPIC.warning("endpoint", fact, meaning, remedy)
    return _TOPIC.ok("endpoint", f"{endpoint} is this machine, and the port is free")


def _reason(error: object) -> str:
    return str(getattr(error, "strerror", None) or error)


def _within(question: Callable[[], T]) -> T | Exception:
    """Return the answer, or the error in its place; a resolver may take half a minute."""
    answers: list[T | Exception] = []

    def ask() -> None:
        try:
            answers.append(question())
        except OSError as error:
            answers.append(error)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_LIMIT_S)
    return answers[0] if answers else TimeoutError(f"no answer within {_LIMIT_S:g} s")
