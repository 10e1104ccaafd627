"""What a machine looks at before it takes part in a launch."""

from __future__ import annotations

import itertools
import socket
import threading
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from elasticflow.compiler.provenance.job_json import job_to_json
from elasticflow.errors import (
    ANSWER_IS_NO,
    BUDGET_SPENT,
    FINISHED,
    INTERRUPTED,
    LaunchNotFoundError,
    LedElsewhereError,
    NodeRefusedError,
    RunLockedError,
)
from elasticflow.launcher import join
from elasticflow.launcher.join import await_server, check_shared
from elasticflow.launcher.rendezvous import liveness
from elasticflow.launcher.rendezvous.invitation import Invitation, versions
from elasticflow.launcher.rendezvous.leadership import connect
from elasticflow.launcher.rendezvous.store_keys import CANCELLED, EXIT_CODE, SUPERVISOR_BEAT
from elasticflow.launcher.rendezvous.store_keys import INVITATION as INVITATION_KEY
from elasticflow.launcher.rendezvous.store_server import StoreServer
from elasticflow.launcher.supervisor.launch_record import Request
from elasticflow.protocol.store_address import StoreAddress
from elasticflow.run_folder import RunFolder
from elasticflow.snapshots.store.catalog import Catalog
from elasticflow.storage.storage import Storage
from tests.compiler.jobs import make_job

if TYPE_CHECKING:
    from pathlib import Path

INVITATION = Invitation("run", job_to_json(make_job()), "", versions(), "this launch")


@pytest.fixture(name="catalog")
def _catalog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Catalog:
    """Return a run's place, of which nobody waits long to see something."""
    for name in ("_SEEN_S", "_SEEN_ANEW_S", "_AGAIN_S"):
        monkeypatch.setattr(join, name, 0.01)
    return Catalog(Storage(str(tmp_path)), "run/")


@pytest.mark.parametrize(
    ("host", "what", "remedy"),
    [
        ("head.invalid", "--join: head.invalid does not resolve: ", "getent hosts"),
        ("127.0.0.1", "nobody serves a launch at 127.0.0.1:1: ", "start the run on that machine first"),
    ],
    ids=["no such host", "nobody there"],
)
def test_address_at_which_nobody_is_found_is_named(
    monkeypatch: pytest.MonkeyPatch, host: str, what: str, remedy: str
) -> None:
    """What is waited for is said at once, and what to do in the end."""
    monkeypatch.setattr(join, "_CONNECT_S", 0.0)
    said: list[str] = []
    with pytest.raises(LaunchNotFoundError) as refused:
        await_server(StoreAddress(host, 1), said.append)
    assert refused.value.message.startswith(what)
    assert remedy in str(refused.value.remedy)
    assert said[0].startswith(f"waiting for {host}:1: ")


def test_place_that_the_head_has_written_to_is_shared(catalog: Catalog) -> None:
    """Its own mark counts; nothing is said, and nothing waited for. JOB.json may be that of a process that was stopped before."""
    catalog.mark_launch("this launch")
    catalog.write_job_record({"run_id": "run", "launch_id": "the one before"})
    said: list[str] = []
    check_shared(catalog, INVITATION, said.append)
    assert [] == said


@pytest.mark.parametrize(
    ("record", "what"),
    [
        (None, "nothing of it lies in "),
        ({"run_id": "another", "launch_id": "this launch too"}, "nothing of it lies in "),
        ({"run_id": "run", "launch_id": "the one before"}, "as in a copy that this machine has for itself"),
    ],
    ids=["empty", "another run", "a copy"],
)
def test_place_of_this_machine_alone_is_refused(
    catalog: Catalog, record: dict[str, str] | None, what: str
) -> None:
    """The place is named, and what to do; also where the files of the run were once copied there."""
    if record is not None:
        catalog.write_job_record(record)
    with pytest.raises(NodeRefusedError, match=what) as refused:
        check_shared(catalog, INVITATION, print)
    assert catalog.storage.uri in refused.value.message
    assert "snapshots.uri" in str(refused.value.remedy)


@pytest.mark.parametrize("token", ["another launch's", ""])
def test_launch_whose_port_another_one_has_by_now_is_gone(token: str) -> None:
    """This machine was cut off meanwhile; it looks for its run again, and is not refused for the token of a stranger."""
    listener = socket.create_server(("127.0.0.1", 0))
    address = StoreAddress("127.0.0.1", listener.getsockname()[1], token="this launch's")
    server = StoreServer(listener, token)
    try:
        assert join._reached_again(address.under("1"), "this launch") is None
    finally:
        server.close()


def test_record_that_is_seen_late_is_waited_for(catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    """A network's file system may show the record of the launch before for a while."""
    catalog.write_job_record({"run_id": "run", "launch_id": "the one before"})
    monkeypatch.setattr(join, "_SEEN_ANEW_S", 60.0)
    check_shared(catalog, INVITATION, lambda _: catalog.mark_launch("this launch"))


def test_launch_that_is_new_is_looked_for(catalog: Catalog) -> None:
    """What the launch before has written does not do for the next one."""
    catalog.mark_launch("this launch")
    with pytest.raises(NodeRefusedError):
        check_shared(catalog, replace(INVITATION, launch_id="the next one"), print)


LOCKED = RunLockedError("run run is running (process 1 on head)")


@pytest.mark.parametrize(
    ("tries", "refusal"),
    [(1, LOCKED), (4, LOCKED), (99, LOCKED), (2, LedElsewhereError("a run of this job is led"))],
    ids=["free", "free in the end", "never free", "the next leader is lost, too"],
)
def test_lock_that_outlives_its_machine_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tries: int, refusal: Exception
) -> None:
    """A network's file system keeps the lock of a machine that was lost: whoever joined leads once it is free.

    So it does if another machine took over and was lost before it invited anyone.
    """
    folders: list[RunFolder] = []

    class Node:
        """The launch whose leader is lost."""

        folder = RunFolder(tmp_path / "job" / "run")

        def __init__(self, *_: object) -> None:
            pass

        def take_part(self) -> None:
            return None

    def await_launch(_keys: object, _address: object, last: int, _say: object, **_: object) -> int:
        if last:
            raise LaunchNotFoundError("nobody leads a run of this job")
        return 1

    def lead(request: Request) -> int:
        folders.append(request.folder)
        if len(folders) < tries:
            raise refusal
        return 7

    for name, stand_in in (("await_server", print), ("connect", repr), ("await_launch", await_launch)):
        monkeypatch.setattr(join, name, stand_in)
    monkeypatch.setattr(join, "Node", Node)
    request = Request(make_job(), (), (), tmp_path, RunFolder(tmp_path / "job" / "unknown"))
    arguments = request, StoreAddress("head", 1), lambda _: None, lambda _: None, lead
    if tries < 99:
        assert 7 == join.join(*arguments)
    else:
        with pytest.raises(RunLockedError, match="process 1 on head"):
            join.join(*arguments)
    assert {Node.folder} == set(folders)


def test_leader_that_was_cut_off_for_a_while_is_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was silent in the store for longer than others wait, and leads on: there will be no newer launch."""
    monkeypatch.setattr(join, "_CONNECT_S", 30.0)
    listener = socket.create_server(("127.0.0.1", 0))
    address = StoreAddress("127.0.0.1", listener.getsockname()[1])
    server = StoreServer(listener)
    keys = server.store(address.prefix)
    for key, value in (("newest", "3"), (f"3/{INVITATION_KEY}", "{}"), (f"3/{SUPERVISOR_BEAT}", "7")):
        keys.set(key, value)
    is_found = threading.Event()

    def live() -> None:
        for number in itertools.count(8):
            keys.set(f"3/{SUPERVISOR_BEAT}", str(number))
            if is_found.wait(0.05):
                return

    leader = threading.Thread(target=live)
    try:
        assert 3 == join.await_launch(connect(address), address, 3, lambda _: leader.start())
    finally:
        is_found.set()
        leader.join()
        server.close()


def test_machine_that_may_lead_does_not_wait_for_one_that_died_before_its_invitation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It had claimed the launch."""
    for name, seconds in (("_SILENT_S", 0.4), ("BEAT_S", 0.01)):
        monkeypatch.setattr(liveness, name, seconds)
    monkeypatch.setattr(join, "_AGAIN_S", 0.02)
    listener = socket.create_server(("127.0.0.1", 0))
    address = StoreAddress("127.0.0.1", listener.getsockname()[1])
    server = StoreServer(listener)
    keys, looks = server.store(address.prefix), itertools.count()

    def newest(_: object) -> int:
        if next(looks) == 1000:
            keys.set(f"2/{INVITATION_KEY}", "{}")
        return 2

    monkeypatch.setattr(join, "newest_launch", newest)
    try:
        with pytest.raises(LaunchNotFoundError):
            join.await_launch(connect(address), address, 1, lambda _: None, is_patient=False)
    finally:
        server.close()


def test_leader_in_whose_place_another_machine_leads_is_told_from_one_that_failed(tmp_path: Path) -> None:
    """It was cut off: it takes part in that launch, which may not have begun. Both end with the same exit code."""
    listener = socket.create_server(("127.0.0.1", 0))
    address = StoreAddress("127.0.0.1", listener.getsockname()[1])
    server = StoreServer(listener)
    keys = server.store(address.prefix)
    request = Request(make_job(), (), (), tmp_path, RunFolder(tmp_path / "job" / "run"))

    def lead(number: str, code: int, _: Request) -> int:
        keys.set("newest", number)
        keys.set(f"1/{EXIT_CODE}", str(code))
        return code

    try:
        assert 1 == join.lead_unless_led(request, partial(lead, "1", ANSWER_IS_NO), address)
        for code in (ANSWER_IS_NO, BUDGET_SPENT):
            with pytest.raises(LedElsewhereError):
                join.lead_unless_led(request, partial(lead, "2", code), address)
    finally:
        server.close()
    assert 1 == join.lead_unless_led(request, lambda _: 1, address)


def test_leader_that_was_passed_over_ends_as_the_launch_after_it() -> None:
    """It was stopped after the last step: another machine has led since, and has said how the run ended."""
    listener = socket.create_server(("127.0.0.1", 0))
    address = StoreAddress("127.0.0.1", listener.getsockname()[1])
    server = StoreServer(listener)
    keys = server.store(address.prefix)
    request: Any = None
    for number, code in (("1", ANSWER_IS_NO), ("2", FINISHED)):
        keys.set("newest", number)
        keys.set(f"{number}/{EXIT_CODE}", str(code))
    try:
        assert FINISHED == join.lead_unless_led(request, lambda _: ANSWER_IS_NO, address)
    finally:
        server.close()


@pytest.mark.parametrize(
    ("code", "cancelled", "newest", "told"),
    [
        (FINISHED, False, "3", FINISHED),
        (BUDGET_SPENT, False, "3", BUDGET_SPENT),
        (INTERRUPTED, False, "3", None),
        (INTERRUPTED, True, "3", INTERRUPTED),
        (ANSWER_IS_NO, False, "4", None),
        (None, False, "3", None),
    ],
    ids=["finished", "failed", "interrupted", "cancelled", "led anew", "continues"],
)
def test_run_whose_leader_was_silent_and_has_ended_it_is_not_led_anew(
    code: int | None, newest: str, told: int | None, *, cancelled: bool
) -> None:
    """It was stopped after the last step for as long as others wait: a launch of theirs would end the run a second time."""
    listener = socket.create_server(("127.0.0.1", 0))
    address = StoreAddress("127.0.0.1", listener.getsockname()[1])
    server = StoreServer(listener)
    keys = server.store(address.prefix)
    keys.set("newest", newest)
    if code is not None:
        keys.set(f"3/{EXIT_CODE}", str(code))
    if cancelled:
        keys.set(f"3/{CANCELLED}", "1")
    request: Any = None
    try:
        assert (7 if told is None else told) == join.lead_unless_led(request, lambda _: 7, address, 3)
    finally:
        server.close()
