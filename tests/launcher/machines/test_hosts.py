"""The file of hosts, and what ssh's ends mean."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import pytest

from elasticflow.errors import INTERRUPTED, HostsError
from elasticflow.launcher.machines import run_on_hosts
from elasticflow.launcher.machines.remote import CANCELLED, Order
from elasticflow.launcher.machines.run_on_hosts import Host, HostProcess, check_resolves, read_hosts
from elasticflow.launcher.supervisor.leave_requests import LeaveRequests

if TYPE_CHECKING:
    from pathlib import Path

ORDER = Order("/project", ("run", "x.toml"), {"A": "b"}, "x/r", 30.0)


def test_file_has_a_host_on_each_line(tmp_path: Path) -> None:
    """Comments and blank lines are left out; the first host is the first."""
    path = tmp_path / "hosts.txt"
    path.write_text(
        '# all\nroot@n1\n\nn2 dir="/my project" python=/venv/bin/python  # slow\n10.0.0.3\nfe80::1\n'
    )
    one, two, three, four = read_hosts(path)
    assert ("root@n1", "n1", None) == (one.target, one.name, one.folder)
    assert ("/my project", "/venv/bin/python", f"{path}:4") == (two.folder, two.python, two.place)
    assert ("10.0.0.3", "fe80::1") == (three.target, four.target)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "hosts.txt names no host"),
        ("# n1\n", "hosts.txt names no host"),
        ("n1\nn1\n", "hosts.txt:2: n1 stands in"),
        ("-oProxyCommand=x\n", "hosts.txt:1: '-oProxyCommand=x' is no host"),
        ("n1;reboot\n", "'n1;reboot' is no host"),
        ("n1 slots=8\n", "hosts.txt:1: 'slots=8' is not understood"),
        ("n1 dir=here\n", "'dir=here' is not understood"),
        ("n1 'dir=/x\n", "hosts.txt:1: No closing quotation"),
    ],
)
def test_line_that_is_no_host_is_refused(tmp_path: Path, text: str, message: str) -> None:
    """With its place, and how it is written."""
    path = tmp_path / "hosts.txt"
    path.write_text(text)
    with pytest.raises(HostsError) as raised:
        read_hosts(path)
    assert message in raised.value.message
    assert raised.value.remedy


def test_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    """By its name."""
    with pytest.raises(HostsError, match=r"none\.txt cannot be read"):
        read_hosts(tmp_path / "none.txt")


def test_order_comes_as_it_was_sent() -> None:
    """One line, whatever it holds."""
    order = Order("/a\nb", ("run", "ü\n"), {"T": "secret"}, "x/r", 1.5)
    line = order.to_line()
    assert 1 == line.count("\n")
    assert order == Order.from_line(line)


@pytest.mark.usefixtures("real_processes")
def test_host_that_leads_nowhere_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything begins; not where ssh goes through another host, which knows the name."""
    said = tmp_path / "ssh"
    host = Host("n9", "hosts.txt:3")
    monkeypatch.setenv(run_on_hosts.SSH, str(said))

    said.write_text("#!/bin/sh\necho hostname no-such-host.invalid\necho proxycommand none\n")
    said.chmod(0o755)
    with pytest.raises(HostsError, match=r"hosts\.txt:3: n9 does not resolve"):
        check_resolves(host)
    said.write_text("#!/bin/sh\necho hostname no-such-host.invalid\necho proxyjump gate\n")
    check_resolves(host)
    said.write_text("#!/bin/sh\necho 'bad option' >&2; exit 255\n")
    with pytest.raises(HostsError, match="ssh cannot be asked about n9: bad option"):
        check_resolves(host)
    monkeypatch.setenv(run_on_hosts.SSH, str(tmp_path / "none"))
    with pytest.raises(HostsError, match="ssh cannot be asked about n9"):
        check_resolves(host)


@pytest.mark.usefixtures("real_processes")
@pytest.mark.parametrize(
    ("script", "ends_with"),
    [
        ("exit 0", 0),
        ("exit 3", 3),
        ("exit 127", 127),
        ("echo 'me@n: Permission denied (publickey).' >&2; exit 255", 2),
        ("test -e gone && exit 1; touch gone; exit 255", 1),
        ("test -e gone && exit 0; touch gone; exit 75", 0),
        (f"exit {CANCELLED}", INTERRUPTED),
        ("test -e gone && exit 0; touch gone; exit 137", 0),
    ],
)
def test_node_is_started_again_where_that_may_help(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, ends_with: int
) -> None:
    """A connection that is gone, a node that was killed or asked to leave there; not one that ended by itself."""
    program = tmp_path / "ssh"
    program.write_text(f"#!/bin/sh\ncd {tmp_path}\ncat > order &\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv(run_on_hosts.SSH, str(program))
    monkeypatch.setattr(run_on_hosts, "_FIRST_PAUSE_S", 0.01)
    said: list[str] = []
    process = HostProcess(Host("n1", "hosts.txt:1"), ORDER, lambda *_: None, said.append)
    process.start()
    process.join(60)
    assert ends_with == process.exit_code
    assert ("gone" in script) == any("it is started again in" in text for text in said)


def test_pauses_grow() -> None:
    """To a minute."""
    pauses = run_on_hosts._pauses()
    assert [1, 2, 4, 8, 16, 32, 60, 60] == [next(pauses) for _ in range(8)]


class _Waiting:
    """A node that waits for a machine to lead, until it is asked to leave."""

    def __init__(self) -> None:
        self.exit_code: int | None = None
        self.calls: list[str] = []

    def is_alive(self) -> bool:
        return self.exit_code is None

    def finish(self) -> None:
        self.calls.append("finish")

    def leave(self) -> None:
        self.calls.append("leave")
        self.exit_code = INTERRUPTED

    def kill(self) -> None:
        self.calls.append("kill")


def test_hosts_leave_with_the_one_that_has_led(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its run was cancelled, or refused: nobody will lead another launch."""
    monkeypatch.setattr(run_on_hosts, "_ENDING_S", 5.0)
    leader, other = _Waiting(), _Waiting()
    leader.exit_code = INTERRUPTED
    processes = cast("list[HostProcess]", [leader, other])
    run_on_hosts._watch(processes, LeaveRequests(), lambda _: None, first_decides=True)
    assert other.calls == ["finish", "leave"]


def test_host_that_is_asked_to_leave_before_it_is_reached_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that began then would know nothing of it, and train on alone."""
    begun = tmp_path / "begun"
    monkeypatch.setenv(run_on_hosts.SSH, f"sh -c 'touch {begun}'")
    process = HostProcess(Host("n1", "hosts.txt:1"), ORDER, lambda *_: None, lambda _: None)
    process.leave()
    process.start()
    process.join()
    assert process.exit_code == INTERRUPTED
    assert not begun.exists()
