"""A machine that takes part in a launch which another one leads."""

from __future__ import annotations

import os
import signal
import socket
import time
from typing import TYPE_CHECKING, cast

import pytest

from elasticflow.errors import ANSWER_IS_NO, INTERRUPTED
from elasticflow.launcher import join
from elasticflow.launcher.join import JoinedNode, Node
from elasticflow.launcher.rendezvous.store_keys import CANCELLED, EXIT_CODE
from elasticflow.launcher.rendezvous.store_server import StoreServer
from elasticflow.protocol.store_address import StoreAddress, StoreLostError
from elasticflow.run_folder import RunFolder

if TYPE_CHECKING:
    from pathlib import Path

    from elasticflow.launcher.agent.agent_process import AgentProcess
    from elasticflow.protocol.control_store import ControlStore


class _Store:
    """Keys of a launch that continues."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def add(self, _: str, number: int) -> int:
        return number

    def set(self, _: str, value: str) -> None:
        self.told.append(value)

    def check(self, _: list[str]) -> bool:
        return False


class _Agent:
    """It ends as soon as it is started."""

    def __init__(self, code: int = 1, *, is_killed_for_memory: bool = False) -> None:
        self.starts = 0
        self._code, self._is_killed_for_memory = code, is_killed_for_memory

    def start(self) -> None:
        self.starts += 1

    def exit_code(self) -> int:
        return self._code

    def is_killed_for_memory(self) -> bool:
        return self._is_killed_for_memory

    def last_words(self) -> str:
        return "ModuleNotFoundError: No module named 'torch'"

    def end_if_stopped(self) -> None:
        pass

    def end(self) -> None:
        pass


@pytest.mark.parametrize("is_killed_for_memory", [False, True])
def test_agent_that_keeps_ending_is_given_up(
    monkeypatch: pytest.MonkeyPatch, *, is_killed_for_memory: bool
) -> None:
    """Its last words say why; the machine that leads has heard of each end."""
    monkeypatch.setattr(join, "_POLL_S", 0.001)
    agent = _Agent(-9, is_killed_for_memory=True) if is_killed_for_memory else _Agent()
    store, said = _Store(), list[str]()
    code = JoinedNode("n", cast("AgentProcess", agent), cast("ControlStore", store), said.append).take_part()

    assert ANSWER_IS_NO == code
    assert (5, 5) == (agent.starts, len(store.told))
    assert ('"oom"' in store.told[-1]) is is_killed_for_memory
    assert agent.last_words() == said[-1]


class _Cut(_Store):
    """A connection that was cut: nothing comes through."""

    def set(self, _: str, value: str) -> None:
        raise StoreLostError(f"no way for {value}")

    def check(self, _: list[str]) -> bool:
        raise StoreLostError("no way")


@pytest.mark.parametrize("comes_back", [True, False], ids=["comes back", "is gone"])
def test_node_that_was_cut_off_tries_other_connections(
    monkeypatch: pytest.MonkeyPatch, *, comes_back: bool
) -> None:
    """Its agent has ended meanwhile: once the launch is reached again, that is told there, and another one is started."""
    for name in ("_POLL_S", "_AGAIN_S"):
        monkeypatch.setattr(join, name, 0.001)
    agent, said, back = _Agent(), list[str](), _Store()
    answers = iter([None, None, back]) if comes_back else iter([None, None])

    def reconnect() -> ControlStore | None:
        if (store := next(answers, back if comes_back else None)) is None and comes_back:
            raise StoreLostError("not yet")
        return cast("ControlStore | None", store)

    node = JoinedNode("n", cast("AgentProcess", agent), cast("ControlStore", _Cut()), said.append, reconnect)
    code = node.take_part()

    assert code == (ANSWER_IS_NO if comes_back else INTERRUPTED)
    assert (5 if comes_back else 0) == len(back.told)
    assert ("the launch is gone: no way" in "\n".join(said)) != comes_back


class _Importing(_Agent):
    """It takes no signal until it is ready, and exits once it was asked."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0
        self._ready_at = time.monotonic() + 0.1

    def start(self) -> None:
        super().start()
        os.kill(os.getpid(), signal.SIGTERM)

    def send(self, _: signal.Signals) -> None:
        self.asked += time.monotonic() >= self._ready_at

    def exit_code(self) -> int | None:  # type: ignore[override]
        return 0 if self.asked else None


def test_agent_that_still_imports_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ignores the signal until then: this machine would join, and take part for ever."""
    monkeypatch.setattr(join, "_ASK_S", 0.01)
    agent, said = _Importing(), list[str]()
    code = JoinedNode(
        "n", cast("AgentProcess", agent), cast("ControlStore", _Store()), said.append
    ).take_part()

    assert (INTERRUPTED, 1) == (code, agent.starts)
    assert ["asked to leave: the workers leave after their step"] == said


def test_machine_that_was_asked_does_not_wait_for_a_supervisor_that_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The store lives on, and nobody is left who would let this node go."""
    monkeypatch.setattr("elasticflow.launcher.rendezvous.liveness._SILENT_S", 0.3)
    monkeypatch.setattr("elasticflow.launcher.rendezvous.liveness.BEAT_S", 0.01)
    agent = _Importing()
    agent._ready_at = float("inf")
    node = JoinedNode("n", cast("AgentProcess", agent), cast("ControlStore", _Store()), lambda _: None)

    assert INTERRUPTED == node.take_part()
    assert node.was_asked


class _Over(_Store):
    """A launch that is over: its supervisor has told the exit code, and gives no sign of life any more."""

    def check(self, keys: list[str]) -> bool:
        return keys == [EXIT_CODE]

    def get(self, _: str) -> bytes:
        return b"0"


class _Finishing(_Agent):
    """Its writer takes a while for the last snapshot."""

    def __init__(self) -> None:
        super().__init__()
        self._done_at = time.monotonic() + 0.8

    def exit_code(self) -> int | None:  # type: ignore[override]
        return 0 if time.monotonic() >= self._done_at else None


def test_launch_that_is_over_is_not_led_anew_while_the_writer_finishes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its supervisor is silent by then, which is no loss."""
    monkeypatch.setattr("elasticflow.launcher.rendezvous.liveness._SILENT_S", 0.3)
    monkeypatch.setattr("elasticflow.launcher.rendezvous.liveness.BEAT_S", 0.01)
    node = JoinedNode("n", cast("AgentProcess", _Finishing()), cast("ControlStore", _Over()), lambda _: None)
    assert 0 == node.take_part()


class _Killed(_Agent):
    """Someone kills it, seven times; then it ends by itself."""

    def exit_code(self) -> int:
        return -signal.SIGKILL if self.starts <= 7 else 1


def test_agent_that_is_killed_from_outside_is_started_again_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A kill says nothing about the next agent."""
    monkeypatch.setattr(join, "_POLL_S", 0.001)
    agent = _Killed()
    JoinedNode("n", cast("AgentProcess", agent), cast("ControlStore", _Store()), lambda _: None).take_part()
    assert 7 + 5 == agent.starts


class _Ended(_Over):
    """It has ended with the keys that are given."""

    def __init__(self, *keys: str) -> None:
        super().__init__()
        self._keys = keys

    def check(self, keys: list[str]) -> bool:
        return set(keys) <= set(self._keys)

    def get(self, _: str) -> bytes:
        return str(INTERRUPTED).encode()


class _EndedCut(_Ended):
    """The connection is cut for a moment between the exit code and the mark of cancel."""

    def check(self, keys: list[str]) -> bool:
        if keys == [CANCELLED] and CANCELLED in self._keys:
            self._keys = (EXIT_CODE,)
            raise StoreLostError("no way")
        return super().check(keys)


def test_mark_of_cancel_is_read_before_the_exit_code_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a machine whose connection is cut between the two would lead the cancelled run anew."""
    monkeypatch.setattr(join, "_AGAIN_S", 0.001)
    agent, back = _Agent(0), _Ended(EXIT_CODE, CANCELLED)
    monkeypatch.setattr(agent, "exit_code", iter([None, None, None, 0]).__next__)
    node = JoinedNode(
        "n",
        cast("AgentProcess", agent),
        cast("ControlStore", _EndedCut(EXIT_CODE, CANCELLED)),
        lambda _: None,
        lambda: cast("ControlStore", back),
    )
    assert INTERRUPTED == node.take_part()
    assert node.was_asked


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_machine_of_a_cancelled_run_does_not_lead_it_anew(*, is_cancelled: bool) -> None:
    """The mark of `elasticflow cancel` lies in the folder of the machine that led, which others may not see."""
    store = _Ended(EXIT_CODE, *([CANCELLED] if is_cancelled else []))
    node = JoinedNode("n", cast("AgentProcess", _Agent(0)), cast("ControlStore", store), lambda _: None)
    assert INTERRUPTED == node.take_part()
    assert is_cancelled == node.was_asked


class _Machine(Node):
    """A machine in the launch at *address* whose agent has ended."""

    def __init__(self, address: StoreAddress, folder: RunFolder, *, sees_leader: bool = False) -> None:
        self.folder, self._address, self._sees_leader = folder, address, sees_leader
        store = join.store_of_node(address)
        JoinedNode.__init__(self, "n", cast("AgentProcess", _Finishing()), store, lambda _: None)


@pytest.mark.parametrize("newest", ["1", "2"])
def test_machine_goes_to_the_launch_that_has_taken_the_place_of_its_own(tmp_path: Path, newest: str) -> None:
    """Its leader was silent for some machines only. What it tells is no failure of the run, unless there is no later launch."""
    listener = socket.create_server(("127.0.0.1", 0))
    address = StoreAddress("127.0.0.1", listener.getsockname()[1], "job")
    server = StoreServer(listener)
    keys = server.store(address.prefix)
    keys.set("newest", newest)
    keys.set(f"1/{EXIT_CODE}", str(ANSWER_IS_NO))
    try:
        node = _Machine(address.under("1"), RunFolder(tmp_path))
        assert (ANSWER_IS_NO if newest == "1" else None) == node.take_part()
    finally:
        server.close()


@pytest.mark.parametrize("sees_leader", [False, True], ids=["of an earlier launch", "of this launch"])
def test_machine_does_not_lead_on_a_run_whose_leader_was_lost_while_it_was_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, sees_leader: bool
) -> None:
    """The mark lies in the run folder; in a folder that the leader does not see it is an older one."""
    monkeypatch.setattr("elasticflow.launcher.rendezvous.liveness._SILENT_S", 0.3)
    monkeypatch.setattr("elasticflow.launcher.rendezvous.liveness.BEAT_S", 0.01)
    listener = socket.create_server(("127.0.0.1", 0))
    server = StoreServer(listener)
    folder = RunFolder(tmp_path)
    folder.cancel.touch()
    try:
        address = StoreAddress("127.0.0.1", listener.getsockname()[1], "job/1")
        node = _Machine(address, folder, sees_leader=sees_leader)
        assert (INTERRUPTED if sees_leader else None) == node.take_part()
    finally:
        server.close()
