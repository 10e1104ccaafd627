"""Who leads a launch in a store that several processes see."""

from __future__ import annotations

import socket
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from elasticflow import errors
from elasticflow.compiler.plan.launch_plan import plan_job
from elasticflow.launcher.rendezvous import leadership, liveness
from elasticflow.launcher.rendezvous.leadership import connect, newest_launch, open_store, store_address_of
from elasticflow.launcher.rendezvous.liveness import SupervisorWatch
from elasticflow.launcher.rendezvous.store_keys import EXIT_CODE, ORDERS, SUPERVISOR_BEAT
from elasticflow.launcher.rendezvous.store_server import StoreServer
from elasticflow.protocol import control_store
from elasticflow.protocol.store_address import StoreAddress, StoreLostError
from tests.compiler.jobs import make_job

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from elasticflow.compiler.plan.launch_plan import LaunchPlan


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leadership, "_CLAIM_S", 0.1)
    monkeypatch.setattr(leadership, "_LOOK_S", 0.02)
    monkeypatch.setattr(liveness, "BEAT_S", 0.02)
    monkeypatch.setattr(liveness, "_SILENT_S", 0.3)


@pytest.fixture
def served() -> Iterator[StoreAddress]:
    """Yield a store that this process serves, as `elasticflow rendezvous serve` does."""
    listener = socket.create_server(("127.0.0.1", 0))
    address = StoreAddress("127.0.0.1", listener.getsockname()[1])
    server = StoreServer(listener)
    yield address
    server.close()


def plan_for(address: StoreAddress, tmp_path: Path, **changes: Any) -> LaunchPlan:
    """Return the plan of a job that meets at *address*."""
    changes = {"torchrun__rdzv_conf": {"is_host": False}, "nodes__max": 2, **changes}
    job = make_job(nodes__endpoint=address.endpoint, **changes)
    return plan_job(job, project_root=tmp_path, job_files=[tmp_path / "job.toml"])


@pytest.mark.parametrize(
    "address",
    [
        StoreAddress("head", 29400),
        StoreAddress("Head_1", 1, "elasticflow/a.b-c/7"),
        StoreAddress("fe80::1", 2379, "elasticflow", "etcd-v2", {"protocol": "https", "ca_cert": "/a b&c"}),
    ],
    ids=["plain", "capitals", "etcd"],
)
def test_address_comes_back_from_its_url(address: StoreAddress) -> None:
    """Workers read from their environment what the agent wrote there."""
    assert address == StoreAddress.parse(address.url)


def test_free_port_is_chosen_and_told_to_others(tmp_path: Path) -> None:
    """Without an endpoint, nodes on this machine find the store at a port that nobody named."""
    job = make_job(nodes__max=2)
    found = open_store(plan_job(job, project_root=tmp_path, job_files=[tmp_path / "job.toml"]))
    try:
        assert found.server is not None
        assert found.endpoint == found.address.endpoint
        found.connect().set("a", "1")
        assert b"1" == control_store.connect(found.address).get("a")
    finally:
        found.close()


def test_one_launch_after_another_meets_at_the_same_port(tmp_path: Path) -> None:
    """As the cases of `run --all` do: the port is given back, and nothing of the launch before is there."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = StoreAddress("127.0.0.1", free.getsockname()[1])
    plan = plan_for(address, tmp_path, torchrun__rdzv_conf={})
    for _ in range(2):
        found = open_store(plan)
        keys = found.connect()
        assert not keys.check(["a"])
        assert not found.is_led_anew()
        keys.set("a", "1")
        found.close()
        with pytest.raises(StoreLostError):
            keys.check(["a"])


def test_second_leader_is_refused_while_the_first_lives(served: StoreAddress, tmp_path: Path) -> None:
    """One of a job at a time; once the first is over or silent the next launch has the next number, and the first can see that."""
    plan = plan_for(served, tmp_path)
    first = open_store(plan)
    with pytest.raises(errors.LedElsewhereError, match="led by another process"):
        open_store(plan)
    first.close()
    assert not first.is_led_anew()
    second = open_store(plan)
    assert [True, False] == [first.is_led_anew(), second.is_led_anew()]
    second.close()
    second.connect().set(EXIT_CODE, "0")
    third = open_store(plan)
    third.close()

    assert ["1", "2", "3"] == [m.address.prefix.rpartition("/")[2] for m in (first, second, third)]


def test_keys_of_launches_long_over_are_forgotten(served: StoreAddress, tmp_path: Path) -> None:
    """The store outlives all runs; the launch before is still read by who takes over."""
    plan = plan_for(served, tmp_path)
    launches = []
    for _ in range(3):
        launches.append(open_store(plan))
        launches[-1].connect().set(EXIT_CODE, "0")
        launches[-1].close()

    kept = [control_store.connect(launch.address).check([EXIT_CODE]) for launch in launches]
    assert [False, True, True] == kept
    assert control_store.connect(store_address_of(plan, served.host, served.port)).check(["newest"])


def test_runs_of_other_jobs_use_the_same_store(served: StoreAddress, tmp_path: Path) -> None:
    """Their keys are apart."""
    found = [open_store(plan_for(served, tmp_path, job__name=name)) for name in ("one", "two")]
    for each in found:
        each.close()

    assert ["elasticflow/one/1", "elasticflow/two/1"] == [each.address.prefix for each in found]


def test_claim_of_a_process_that_died_is_passed_over(served: StoreAddress, tmp_path: Path) -> None:
    """It had claimed the next launch and never led it."""
    plan = plan_for(served, tmp_path)
    keys = control_store.connect(store_address_of(plan, served.host, served.port), ORDERS)
    keys.add("claim/1", 1)
    found = open_store(plan)
    found.close()

    assert 2 == newest_launch(keys)


def test_leader_that_died_before_its_first_sign_of_life_is_passed_over(
    served: StoreAddress, tmp_path: Path
) -> None:
    """It had claimed the launch and told its number: no one would ever lead the job again if that counted as life."""
    plan = plan_for(served, tmp_path)
    keys = control_store.connect(store_address_of(plan, served.host, served.port), ORDERS)
    keys.add("claim/1", 1)
    keys.set("newest", "1")
    found = open_store(plan)
    found.close()

    assert 2 == newest_launch(keys)


def test_claim_that_was_passed_over_is_given_up(
    served: StoreAddress, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that was stopped right after its claim must not take the newest launch back from who leads meanwhile."""
    plan = plan_for(served, tmp_path)
    keys = control_store.connect(store_address_of(plan, served.host, served.port), ORDERS)
    add = type(keys).add

    def add_and_stop(store: Any, key: str, number: int) -> int:
        total: int = add(store, key, number)
        if key == "claim/1":
            keys.add("claim/2", 1)
            keys.set("newest", "2")
        return total

    monkeypatch.setattr(type(keys), "add", add_and_stop)
    with pytest.raises(errors.LedElsewhereError):
        open_store(plan)
    assert 2 == newest_launch(keys)


@pytest.mark.parametrize("died", [0, 1], ids=["alone", "another one died after its claim"])
def test_claim_that_was_passed_over_in_its_last_moment_sets_nothing_back(
    served: StoreAddress, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, died: int
) -> None:
    """The process was stopped after it had looked: what it writes once it continues is older than what stands there."""
    plan = plan_for(served, tmp_path)
    keys = control_store.connect(store_address_of(plan, served.host, served.port), ORDERS)
    write, is_first, later = type(keys).set, iter([True]), list[Any]()

    def stop_and_write(store: Any, key: str, value: str) -> None:
        if key in {"led/1", "newest"} and next(is_first, False):
            if died:
                keys.add("claim/2", 1)
            later.append(open_store(plan))
        write(store, key, value)

    monkeypatch.setattr(type(keys), "set", stop_and_write)
    with pytest.raises(errors.LedElsewhereError):
        open_store(plan)
    assert 2 + died == newest_launch(keys)
    assert [False] == [each.is_led_anew() for each in later]
    later[0].close()


def test_head_is_silent_once_its_number_stands_still(served: StoreAddress) -> None:
    """So is one that never gave a sign."""
    keys = control_store.connect(served, ORDERS)
    watch = SupervisorWatch(keys)
    began = time.monotonic()
    while time.monotonic() < began + 0.5:
        keys.set("head", str(time.monotonic()))
        assert not watch.look()
        time.sleep(0.01)
    assert watch.has_changed
    time.sleep(0.1)
    while not watch.look():
        assert time.monotonic() < began + 5
        time.sleep(0.01)

    mute = SupervisorWatch(control_store.connect(served.under("1"), ORDERS))
    began = time.monotonic()
    while not mute.look():
        assert time.monotonic() < began + 5
        time.sleep(0.01)
    assert not mute.has_changed


def test_leader_whose_own_connection_is_cut_is_not_silent(served: StoreAddress) -> None:
    """Its other connections may work, and it leads on: another machine would lead the run beside it."""
    connections: list[Any] = []

    def join() -> Any:
        connections.append(control_store.connect(served))
        return connections[-1]

    beat = liveness.Beat(join, SUPERVISOR_BEAT, 60.0, when_silent=lambda: None)
    beat.start()
    keys = control_store.connect(served)
    try:
        keys.get(SUPERVISOR_BEAT)
        connections[0]._connection.socket.shutdown(socket.SHUT_RDWR)
        deadline = time.monotonic() + 10
        while len(connections) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        keys.delete_key(SUPERVISOR_BEAT)
        keys.get(SUPERVISOR_BEAT, 10)
    finally:
        beat.stop()
        beat.join()


def test_second_head_is_told_that_another_machine_leads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The endpoint is another machine's, and somebody serves a launch there: this one is to join it, not to lead."""
    with socket.create_server(("127.0.0.1", 0)) as head:
        address = StoreAddress("127.0.0.1", head.getsockname()[1])
        monkeypatch.setattr(leadership, "is_here", lambda _: False)
        with pytest.raises(errors.LedElsewhereError) as refused:
            open_store(plan_for(address, tmp_path, torchrun__rdzv_conf={}))
    assert f"nodes.endpoint: {address.endpoint} is another machine" in refused.value.message
    assert f"--join {address.endpoint}" in str(refused.value.remedy)
    # Behind an address that leads to it, and that is none of its own, a machine may lead.
    found = open_store(plan_for(address, tmp_path, torchrun__rdzv_conf={}))
    assert "127.0.0.1" == found.address.host
    found.close()


@pytest.mark.parametrize("is_outside", [False, True], ids=["own store", "store of its own"])
def test_host_that_does_not_resolve_is_named(tmp_path: Path, *, is_outside: bool) -> None:
    """By the key that names it, with what to write; the zone is one in which no name ever is (RFC 6761)."""
    conf: dict[str, object] = {"torchrun__rdzv_conf": {}} if not is_outside else {}
    with pytest.raises(
        errors.RendezvousError, match=r"nodes\.endpoint: head\.invalid does not resolve: "
    ) as refused:
        open_store(plan_for(StoreAddress("head.invalid", 29400), tmp_path, **conf))
    assert "getent hosts" in str(refused.value.remedy)


def test_store_that_speaks_otherwise_is_refused() -> None:
    """One of an earlier version, whose line is another: said to be no store that this version can use."""
    with socket.create_server(("127.0.0.1", 0)) as earlier:

        def answer() -> None:
            for _ in range(2):  # the first only looks whether anybody listens
                connection, _ = earlier.accept()
                with connection:
                    connection.recv(1024)
                    connection.sendall(b"elasticflow keys 1\n")

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(errors.RendezvousError, match="is no store that this version of elasticflow"):
            connect(StoreAddress("127.0.0.1", earlier.getsockname()[1]))


@pytest.mark.parametrize("answers", [True, False], ids=["something-else", "nobody"])
def test_place_without_a_store_is_told_by_name(monkeypatch: pytest.MonkeyPatch, *, answers: bool) -> None:
    """Nobody answers, or something that is no store: said within seconds, with what to start there."""
    monkeypatch.setattr(leadership, "_ANSWER_S", 0.4)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = StoreAddress("127.0.0.1", listener.getsockname()[1])
        if not answers:
            listener.close()
        with pytest.raises(errors.RendezvousError) as refused:
            connect(address)

    assert f"no store for the rendezvous at {address.endpoint}: " in refused.value.message
    assert f"elasticflow rendezvous serve --port {address.port}" in (refused.value.remedy or "")
