"""Messages between the processes of a launch: sent as JSON, they arrive as they were."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import get_args

import pytest

from elasticflow import events
from elasticflow.protocol import messages
from elasticflow.protocol.messages import (
    Activity,
    AgentDied,
    DevicesChecked,
    EndLaunch,
    FilePiece,
    FilesSent,
    Frame,
    GenerationFormed,
    LoaderStack,
    LogLines,
    Message,
    NodeFigures,
    NodeLeaving,
    NodeReady,
    NodeReports,
    Order,
    Printed,
    PrintedLine,
    RankFigures,
    RefusedModule,
    Stacks,
    StalledWorker,
    Standstill,
    StartedWorker,
    Warned,
    WorkerEnd,
    WorkersEnded,
    WorkersStarted,
    report,
)
from elasticflow.protocol.worker_environment import DeviceUsage

FRAME = Frame("/r/examples/net.py", 12, "forward")
STALLED = StalledWorker(
    node="n0",
    rank=1,
    phase="data",
    step=7,
    seconds=61.0,
    limit_s=60.0,
    state="S",
    frames=(FRAME, FRAME),
    loaders=(LoaderStack(4711, (FRAME,)), LoaderStack(4712, ())),
    log="/r/rank1.stderr",
)
MESSAGES: tuple[Message, ...] = (
    NodeFigures(
        2,
        "n0",
        (
            RankFigures(0, 7, 0.25, 0.5, "cuda:0", DeviceUsage(1, 2, 3, 87)),
            RankFigures(1, 7, 0.25, 0.5, "cpu"),
        ),
    ),
    NodeReady("n0", "host", 2, None, (RefusedModule("net", "it starts a thread"),)),
    NodeReady("n1", "host", 2, 1),
    NodeReady("host-1", "host", 2, has_own_folder=True),
    FilePiece("host-1", "logs/g0001/rank1.stdout", 12, "cHJpbnRlZA==", is_anew=True),
    FilesSent("host-1", 3),
    NodeLeaving("n0"),
    AgentDied("host-1", "its agent ended with code 1"),
    AgentDied("host-1", "its agent was killed by SIGKILL (memory ran out)", "oom"),
    WorkersStarted(3, "n0", (StartedWorker(0, 100, "n0"), StartedWorker(1, 101, "n0"))),
    LogLines(({"event": "step", "step": 7, "loss": 0.5, "lr": {"head": 0.1}},), held=7),
    NodeReports(({"event": "snapshot.committed", "name": "step-7", "bytes": 10},)),
    NodeReports((report(events.STANDBYS_OFF, node="n0", reason="they may take 1000 MB"),)),
    Activity("n0", "import", "datasets"),
    Activity("n0", "evaluate", "", 400, 12.5),
    Printed(3, (PrintedLine("stdout", "größer"), PrintedLine("stderr", "a warning")), 1_204),
    Warned("n0", 1, 2, "UserWarning", "train.py:3", "odd", 9),
    Standstill(3, "n0", is_so=True, is_one_stopped=True),
    Stacks(3, "n0", (STALLED, replace(STALLED, dump="/r/flight_recorder/rank_1"))),
    DevicesChecked(3, "n0", 1, ("cuda:1: wrong",), ("cuda:0: rows wait",), 2.5),
    WorkersEnded(
        3,
        "n0",
        failed=True,
        workers=(
            WorkerEnd(0, 100, -9, 5.5, ended_by_us=False, oom_killed=True, stderr="x"),
            WorkerEnd(1, 101, -9, 5.5, ended_by_us=True, oom_killed=False, stderr="", remains="D"),
        ),
    ),
)
ORDERS: tuple[Order, ...] = (GenerationFormed(4, 2, 5, 1, 12.5), EndLaunch())


def test_every_message_is_tried() -> None:
    """A type that is added to the unions gets a row here."""
    assert set(get_args(Message)) == {type(message) for message in MESSAGES}
    assert set(get_args(Order)) == {type(order) for order in ORDERS}


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_message_arrives_as_it_was(message: Message) -> None:
    """It is one JSON object with a type; tuples, which JSON does not know, are tuples again."""
    text = messages.MESSAGES.encode(message)

    assert isinstance(json.loads(text)["type"], str)
    assert message == messages.MESSAGES.decode(text.encode())


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: type(order).__name__)
def test_order_arrives_as_it_was(order: Order) -> None:
    """Agents read what the supervisor published."""
    assert order == messages.ORDERS.decode(messages.ORDERS.encode(order).encode())
