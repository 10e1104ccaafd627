"""The agent's side of the check of devices: real processes that do as the check would on a machine with devices."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

import pytest

from elasticflow.launcher.agent.device_health import DeviceHealth

if TYPE_CHECKING:
    from elasticflow.protocol.messages import DevicesChecked

pytestmark = pytest.mark.usefixtures("real_processes")

LIMIT_S = 20.0
SAY = """
import os, signal, sys, time
def say(device, text="", is_fault="false", is_begun="false"):
    print('{"device": "%s", "text": "%s", "is_fault": %s, "is_begun": %s}' % (device, text, is_fault, is_begun), flush=True)
"""


def checked(code: str, limit_s: float = LIMIT_S) -> DevicesChecked:
    """Return the result of a check that runs *code*."""
    told: list[DevicesChecked] = []
    health = DeviceHealth("n0", told.append, program=(sys.executable, "-c", SAY + code), limit_s=limit_s)
    health.begin(3, 0.0)
    (pid,) = health.pids()
    deadline = time.monotonic() + 2 * LIMIT_S
    while not told and time.monotonic() < deadline:
        health.look(time.monotonic())
        time.sleep(0.01)
    [result] = told
    assert (3, "n0", set()) == (result.generation, result.node, health.pids())
    assert pid not in health.pids()
    return result


def test_result_of_a_check_is_told() -> None:
    """Devices that computed right are counted, faults and notes are told apart, a library's own lines are left out."""
    result = checked(
        "say('cuda:0', is_begun='true'); say('cuda:0')\n"
        "print('Warning: a library of its own')\n"
        "say('GPU-bb', 'rows wait', 'false'); say('cuda:1', is_begun='true'); say('cuda:1', 'wrong', 'true')\n"
    )
    assert (1, ("cuda:1: wrong",), ("GPU-bb: rows wait",)) == (result.devices, result.faults, result.notes)


@pytest.mark.parametrize(
    ("code", "limit_s", "fault"),
    [
        (
            "say('cuda:1', is_begun='true'); time.sleep(60)",
            0.5,
            "cuda:1: its check got no answer within 0.5 s",
        ),
        (
            "say('cuda:1', is_begun='true'); os.kill(os.getpid(), signal.SIGSEGV)",
            LIMIT_S,
            "cuda:1: its check got killed by SIGSEGV",
        ),
    ],
)
def test_device_that_never_answers_is_faulty(code: str, limit_s: float, fault: str) -> None:
    """The last device that was begun is named, and the process is killed."""
    assert (fault,) == checked(code, limit_s).faults


def test_check_that_cannot_begin_blames_no_device() -> None:
    """Torch that cannot be imported, or takes too long, says nothing about devices."""
    for code, limit_s in (("sys.exit(3)", LIMIT_S), ("time.sleep(60)", 0.5)):
        result = checked(code, limit_s)
        assert ((), 0, 1) == (result.faults, result.devices, len(result.notes))
        assert result.notes[0].startswith("the check ended without a result: ")
