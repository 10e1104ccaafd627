"""Logs of a node with a run folder of its own come to the machine that leads, through a real store in this process."""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

from elasticflow.launcher.rendezvous import requests
from elasticflow.launcher.rendezvous.requests import FileSender, put_request
from elasticflow.launcher.rendezvous.store_server import StoreServer
from elasticflow.launcher.rendezvous.supervisor_channel import Outbox
from elasticflow.launcher.supervisor import remote_files
from elasticflow.launcher.supervisor.agent_channel import AgentChannel
from elasticflow.launcher.supervisor.remote_files import RemoteFiles
from elasticflow.protocol.messages import FilePiece, FilesSent, FilesWanted, NodeReady
from elasticflow.run_folder import RunFolder

if TYPE_CHECKING:
    from pathlib import Path

    from elasticflow.protocol.control_store import ControlStore

LOG = "logs/g0002/rank1.stdout"


@dataclass
class Pair:
    """A supervisor's side, and a node's, with a run folder each."""

    head: RunFolder
    other: RunFolder
    store: ControlStore
    channel: AgentChannel = field(init=False)
    files: RemoteFiles = field(init=False)
    sender: FileSender = field(init=False)

    def __post_init__(self) -> None:
        self.channel, self.files = AgentChannel(self.store), RemoteFiles(self.head)
        self.start_node()

    def start_node(self) -> None:
        """Start the node's agent, or another one in its place."""
        outbox = Outbox(self.store)
        outbox.post(NodeReady("b-1", "b", 1, has_own_folder=True))
        self.sender = FileSender(self.store, outbox.post, "b-1", self.other)
        self.hear()

    def hear(self) -> None:
        """Take in what the node has sent."""
        for message in self.channel.take():
            assert isinstance(message, NodeReady | FilePiece | FilesSent)
            self.files.hear(message)

    def fetch(self, request: FilesWanted = FilesWanted(2), *, dies: bool = False) -> None:  # noqa: B008  it is frozen
        """Have a command ask, and both sides do their part until it has its answer; a node that *dies* does none."""
        path = put_request(self.head, request)
        deadline = time.monotonic() + 60
        while path.exists():
            assert time.monotonic() < deadline
            self.files.turn(self.channel, time.monotonic())
            if not dies:
                self.sender.look()
                self.hear()

    def write(self, name: str, text: str | bytes) -> Path:
        """Write a file of the node's."""
        path = self.other.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    def read(self, name: str) -> str:
        """Return what the head has of a file."""
        return (self.head.path / name).read_text()


@pytest.fixture(name="pair")
def _pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pair:
    monkeypatch.setattr(remote_files, "_LOOK_S", 0.0)
    listener = socket.create_server(("127.0.0.1", 0))
    return Pair(
        RunFolder(tmp_path / "head"), RunFolder(tmp_path / "other"), StoreServer(listener).store("here")
    )


def test_logs_come_as_they_grow(pair: Pair) -> None:
    """Each byte once, also of an agent that was started again; of the wanted generation alone, and the agent's own log."""
    path = pair.write(LOG, "one\n")
    pair.write("logs/g0001/rank1.stdout", "older\n")
    pair.write("logs/g0002/rank1.stderr", "")
    pair.write("logs/agent-b-1.log", "started\n")
    pair.write("logs/g0002/secret.txt", "no log\n")
    pair.fetch()
    with path.open("a") as file:
        file.write("two\n")
    pair.fetch()
    assert "one\ntwo\n" == pair.read(LOG)
    pair.start_node()
    with path.open("a") as file:
        file.write("three\n")
    pair.fetch()
    assert "one\ntwo\nthree\n" == pair.read(LOG)
    assert "started\n" == pair.read("logs/agent-b-1.log")
    there = {p.relative_to(pair.head.path).as_posix() for p in pair.head.path.rglob("*") if p.is_file()}
    assert {LOG, "logs/g0002/rank1.stderr", "logs/agent-b-1.log", "logs/copies.json"} == there


def test_of_a_long_log_the_end_comes(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a line's begin on; what is missing is told, and where it is."""
    monkeypatch.setattr(requests, "MOST_OF_A_FILE", 20)
    path = pair.write(LOG, "".join(f"line {number}\n" for number in range(10)))
    pair.fetch()
    assert "(56 bytes are left out here: they are in this file on b)\nline 8\nline 9\n" == pair.read(LOG)
    with path.open("a") as file:
        file.write("more\n" * 10)
    pair.fetch()
    assert pair.read(LOG).endswith(
        "line 9\n\n(30 bytes are left out here: they are in this file on b)\n" + 4 * "more\n"
    )


def test_stream_whose_middle_was_taken_out_comes_anew(pair: Pair) -> None:
    """An agent keeps the begin and the end of a stream that is too long: the file becomes shorter."""
    pair.write(LOG, "a long stream\n")
    pair.fetch()
    pair.write(LOG, "short\n")
    pair.fetch()
    assert "short\n" == pair.read(LOG)


def test_what_hooks_logged_comes_where_it_is_wanted(pair: Pair) -> None:
    """Lines of all generations, and images, which are sent whole, and again when another one takes the place of one."""
    image = "logged/images/000000007-look-mask-rank1.png"
    pair.write("logged/g0001-rank1.jsonl", "{}\n")
    pair.write(image, b"\x89PNG one")
    pair.fetch()
    assert not (pair.head.path / "logged").exists()
    pair.fetch(FilesWanted(2, logged=True))
    assert "{}\n" == pair.read("logged/g0001-rank1.jsonl")
    pair.write(image, b"\x89PNG another")
    pair.fetch(FilesWanted(2, logged=True))
    assert b"\x89PNG another" == (pair.head.path / image).read_bytes()


def test_next_launch_takes_up_what_an_earlier_one_was_sent(pair: Pair) -> None:
    """What this machine has written itself stays as it is."""
    path = pair.write(LOG, "one\n")
    own = pair.head.rank_log(2, 0, "stdout")
    own.parent.mkdir(parents=True)
    own.write_text("of the head\n")
    pair.write("logs/g0002/rank0.stdout", "a lie\n")
    pair.fetch()
    path.write_text("one\ntwo\n")
    pair.files = RemoteFiles(pair.head)
    pair.start_node()
    pair.fetch()
    assert "one\ntwo\n" == pair.read(LOG)
    assert "of the head\n" == own.read_text()


def test_machine_that_led_before_sends_what_is_its_own(pair: Pair) -> None:
    """Not the copies that it was sent."""
    pair.write(LOG, "a copy\n")
    pair.write("logs/copies.json", f'["{LOG}"]')
    pair.write("logs/g0002/rank0.stdout", "its own\n")
    pair.fetch()
    assert "its own\n" == pair.read("logs/g0002/rank0.stdout")
    assert not (pair.head.path / LOG).exists()


def test_node_that_leaves_sends_what_nobody_has_asked_for(pair: Pair) -> None:
    """What was sent before is not sent again."""
    path = pair.write(LOG, "one\n")
    pair.fetch()
    with path.open("a") as file:
        file.write("two\n")
    pair.channel.release("b-1")
    pair.sender.send_last(2)
    pair.hear()
    assert "one\ntwo\n" == pair.read(LOG)


def test_node_that_is_gone_or_silent_is_not_waited_for(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command has its answer, without those logs."""
    monkeypatch.setattr(remote_files, "PATIENCE_S", 0.1)
    pair.write(LOG, "one\n")
    pair.fetch(dies=True)
    monkeypatch.setattr(remote_files, "PATIENCE_S", 600.0)
    pair.channel.release("b-1")
    pair.fetch(dies=True)
    assert not (pair.head.path / LOG).exists()


@pytest.mark.parametrize(
    "path", ["../escaped", "logs/../../escaped", "/tmp/escaped", "events.jsonl", "logged/images/../x.png"]
)
def test_other_files_are_no_nodes_to_write(pair: Pair, tmp_path: Path, path: str) -> None:
    """Whatever a message says."""
    pair.files.hear(FilePiece("b-1", path, 0, "eA=="))
    assert [] == [file for file in tmp_path.rglob("*") if file.is_file()]
