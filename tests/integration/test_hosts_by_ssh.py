"""`run --hosts`: real sshds, each in a network namespace of its own; a host is cut off, crashes, and comes back."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from elasticflow.snapshots.store.catalog import Catalog
from elasticflow.storage.storage import Storage
from tests import servers
from tests.end_to_end import tiny_job
from tests.end_to_end.harness import ROOT, Project, Running, tensors
from tests.hosts import ip_pids
from tests.integration.test_several_hosts import hosts as hosts  # noqa: PLC0414  # a fixture

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.end_to_end.tiny_job import Reference
    from tests.hosts import Hosts

pytestmark = pytest.mark.integration


@dataclass
class Sshds:
    """An sshd on each of two hosts."""

    hosts: Hosts
    folder: Path
    processes: list[subprocess.Popen[bytes]]

    def start(self, number: int) -> None:
        """Start the sshd of a host."""
        config = self.folder / f"sshd-{number}.conf"
        settings = {
            "Port": 22, "ListenAddress": self.hosts.addresses[number], "HostKey": self.folder / "host",
            "PidFile": "none", "AuthorizedKeysFile": self.folder / "client.pub", "StrictModes": "no", "UsePAM": "no",
            "PasswordAuthentication": "no", "PermitRootLogin": "prohibit-password",
        }  # fmt: skip
        config.write_text("".join(f"{key} {value}\n" for key, value in settings.items()))
        self.processes.append(
            subprocess.Popen(
                [
                    "ip",
                    "netns",
                    "exec",
                    self.hosts.names[number],
                    "/usr/sbin/sshd",
                    "-D",
                    "-e",
                    "-f",
                    str(config),
                ],
                stderr=subprocess.DEVNULL,
                stdin=subprocess.DEVNULL,
            )
        )

    def crash(self, number: int) -> None:
        """Kill all that runs on a host."""
        for pid in ip_pids(self.hosts.names[number]):
            with contextlib.suppress(psutil.NoSuchProcess):
                psutil.Process(pid).kill()

    def command(self) -> str:
        """Return an ssh that knows the hosts' keys, and soon sees that a host is silent."""
        known = self.folder / "known_hosts"
        known.write_text(
            "".join(f"{a} {(self.folder / 'host.pub').read_text()}" for a in self.hosts.addresses)
        )
        options = {
            "IdentityFile": self.folder / "client", "UserKnownHostsFile": known, "IdentitiesOnly": "yes",
            "ServerAliveInterval": 1, "ServerAliveCountMax": 2, "ConnectTimeout": 2,
        }  # fmt: skip
        words = [word for key, value in options.items() for word in ("-o", f"{key}={value}")]
        return shlex.join(["ssh", "-F", "none", *words])


@pytest.fixture
def sshds(hosts: Hosts, tmp_path: Path) -> Iterator[Sshds]:
    """Yield a running sshd on each host; skips where there is none."""
    if not Path("/usr/sbin/sshd").exists():
        pytest.skip("OpenSSH's server is not installed: apt-get install openssh-server")
    folder = tmp_path / "ssh"
    folder.mkdir()
    servers.make_ssh_keys(folder)
    made = Sshds(hosts, folder, [])
    for number in range(2):
        made.start(number)
    yield made
    for number in range(2):
        made.crash(number)
    for process in made.processes:
        process.wait()


@dataclass
class Started:
    """A `run --hosts` of the tiny job.

    Attributes:
        command: It.
        shared: Where its snapshots lie.
        projects: Of the hosts, each a folder of its own.
    """

    command: Running
    shared: Path
    projects: tuple[Project, Project]

    def end(self, reference: Reference) -> str:
        """Have it come to its end, with the weights of *reference*; return what it printed."""
        for project in self.projects:
            tiny_job.hurry(project)
        assert 0 == self.command.end(), self.command.told()
        assert reference.found["bits"] == tensors(Catalog(Storage(str(self.shared)), "ssh/"))
        return self.command.output.read_text()


def python_at(folder: Path) -> Path:
    """Return a Python as ssh finds it on a host: one that has elasticflow."""
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} TINY_PAUSE_S=0.05 exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return python


@pytest.fixture
def started(projects: Callable[[str], Project], sshds: Sshds, tmp_path: Path) -> Started:
    """Return a run on both hosts."""
    head, other = projects("head"), projects("other")
    for project in (head, other):
        tiny_job.write_standard(project)
    head.prefix = ("ip", "netns", "exec", sshds.hosts.names[0])
    python, (first, second) = python_at(tmp_path), sshds.hosts.addresses
    head.write(
        "hosts.txt", f"{first} python={python}   # leads\n\n{second} python={python} dir={other.root}\n"
    )
    shared = tmp_path / "shared"
    sets = (f"snapshots.uri={shared}", "nodes.max=2", "nodes.nproc_per_node=1", "snapshots.keep.last=3")
    command = head.start(
        *("run", "jobs/tiny.toml", "--run-id", "ssh", "--hosts", "hosts.txt"),
        *(f"--set={text}" for text in sets),
        run_id="ssh",
        job="tiny",
        ELASTICFLOW_SSH=sshds.command(),
    )
    return Started(command, shared, (head, other))


@pytest.mark.nightly
def test_host_that_crashes_has_another_node_when_it_is_back(
    started: Started, sshds: Sshds, tiny_reference: Reference
) -> None:
    """One command starts both hosts. The weights are those of a run that nobody disturbed."""
    both = started.command.wait_for_group(2, 0)
    sshds.crash(1)
    alone = started.command.wait_for_group(1, both)
    sshds.start(1)
    started.command.wait_for_group(2, alone)
    told = started.end(tiny_reference)
    assert "no connection; it is started again in 1 s" in told
    for address in sshds.hosts.addresses:
        assert f"{address} | " in told


@pytest.mark.campaign
def test_host_that_was_cut_off_has_one_node_when_it_is_back(
    started: Started, sshds: Sshds, tiny_reference: Reference
) -> None:
    """The node that was there meanwhile is asked to leave first."""
    both = started.command.wait_for_group(2, 0)
    sshds.hosts.link("down")
    alone = started.command.wait_for_group(1, both)
    started.command.wait_for("no connection", lambda: "no connection" in started.command.output.read_text())
    sshds.hosts.link("up")
    started.command.wait_for_group(2, alone)
    told = started.end(tiny_reference)
    assert 3 == told.count("| a node on"), told


@pytest.mark.campaign
def test_signal_has_the_nodes_leave(projects: Callable[[str], Project], sshds: Sshds, tmp_path: Path) -> None:
    """Exit code 75 with a snapshot, and how to continue; nothing is left on the hosts."""
    head = projects("head")
    tiny_job.write_standard(head)
    head.prefix = ("ip", "netns", "exec", sshds.hosts.names[0])
    head.write("hosts.txt", f"{sshds.hosts.addresses[0]} python={python_at(tmp_path)}\n")
    arguments = ("run", "jobs/tiny.toml", "--run-id=ssh", "--hosts=hosts.txt", "--set=nodes.nproc_per_node=1")
    command = head.start(*arguments, run_id="ssh", job="tiny", ELASTICFLOW_SSH=sshds.command())
    command.wait_for_step(3)
    # The command itself, which `ip netns exec` has become.
    os.kill(command.process.pid, signal.SIGTERM)
    assert 75 == command.end(), command.told()
    assert "interrupted" == command.state()["status"]
    assert "continue with: elasticflow run jobs/tiny.toml --hosts hosts.txt" in command.output.read_text()
