"""Processes by facts that no other process shares."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from elasticflow.system.process_record import ProcessRecord

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.usefixtures("real_processes")


@pytest.fixture
def sleeping() -> Iterator[subprocess.Popen[bytes]]:
    """A process that nobody else is to signal."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield process
    process.kill()
    process.wait()


def test_only_the_very_process_is_signalled(sleeping: subprocess.Popen[bytes]) -> None:
    """Another machine's, another boot's, or an earlier one of the same id is not alive here, and gets no signal."""
    record = ProcessRecord.of(sleeping.pid)
    assert record.started is not None
    others = (
        replace(record, host="elsewhere"),
        replace(record, boot_id="another"),
        replace(record, started=record.started - 1),
        replace(record, started=None),
    )
    for other in others:
        assert (False, False) == (other.is_alive, other.send(signal.SIGKILL))
    assert sleeping.poll() is None

    assert (True, True) == (record.is_alive, record.send(signal.SIGTERM))
    assert -signal.SIGTERM == sleeping.wait(10)
    assert (False, False) == (record.is_alive, record.send(signal.SIGTERM))


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EPERM])
def test_process_is_signalled_where_the_kernel_has_no_descriptors_of_processes(
    sleeping: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """A container of a later system on a Linux before 5.3 (Rocky 8), or one that forbids the call."""

    def refuse(pid: int) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "pidfd_open", refuse)
    record = ProcessRecord.of(sleeping.pid)
    assert not replace(record, boot_id="another").send(signal.SIGKILL)
    assert record.send(signal.SIGTERM)
    assert -signal.SIGTERM == sleeping.wait(10)


def test_record_comes_as_it_was_written() -> None:
    """Among other fields; a bare process id, as earlier versions wrote, is none."""
    record = ProcessRecord.of()
    assert record == ProcessRecord.from_json({**record.to_json(), "rank": 1})
    for other in (123, None, {"pid": 123}, {"pid": "123", "host": "h"}, {"pid": True, "host": "h"}):
        assert ProcessRecord.from_json(other) is None
