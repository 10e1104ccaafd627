from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from elasticflow.system.free_memory import OomKills
from tests.system.memory_groups import memory_group

_GLUTTON = "kept = []\nwhile True: kept.append(b'x' * (4 << 20))"


def test_no_kill_is_seen_where_there_was_none() -> None:
    """A process that lives, or one that somebody else killed, was not killed for memory."""
    assert not OomKills().includes(os.getpid())


@pytest.mark.usefixtures("real_processes")
def test_process_that_took_too_much_memory_is_told_from_one_that_was_killed() -> None:
    """The kernel ends a process at its group's limit: its log names it, or the group's count has risen."""
    if os.geteuid() != 0:
        pytest.skip("memory groups are for root")
    try:
        with memory_group() as group:
            kills = OomKills()
            group.leave_room(32 << 20)
            process = subprocess.run([*group.prefix, sys.executable, "-c", _GLUTTON], check=False)
            glutton = subprocess.Popen([*group.prefix, sys.executable, "-c", _GLUTTON])
            assert (-9, -9) == (process.returncode, glutton.wait())
    except OSError as error:
        pytest.skip(f"memory groups cannot be made here: {error}")
    if not os.access("/dev/kmsg", os.R_OK):
        pytest.skip("the kernel's log is not to be read here, and its count is of another group")
    assert kills.includes(glutton.pid)
    assert Path("/dev/kmsg").exists()
