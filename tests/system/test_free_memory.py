"""What is left of memory: of the machine, and of the control groups that a process is in."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from elasticflow.system.free_memory import GroupMemory, available, of_machine, tightest_group
from tests.system.memory_groups import memory_group

if TYPE_CHECKING:
    from pathlib import Path

_MB = 1 << 20


def test_what_a_group_of_version_2_has_left(tmp_path: Path) -> None:
    """Its limit less its use; file caches can be reclaimed. Without a limit it says nothing."""
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("100\n")
    assert tightest_group(tmp_path) is None
    (tmp_path / "memory.max").write_text("1000\n")
    assert GroupMemory(1000, 900) == tightest_group(tmp_path)
    (tmp_path / "memory.stat").write_text("anon 10\ninactive_file 30\nactive_file 20\nshmem 40\n")
    assert GroupMemory(1000, 950) == tightest_group(tmp_path)
    (tmp_path / "memory.current").write_text("5000\n")
    assert GroupMemory(1000, 0) == tightest_group(tmp_path)


def test_no_more_than_the_machine_has() -> None:
    """Its figures are those of /proc/meminfo."""
    assert 0 < available() <= of_machine() * 1.1


@pytest.mark.usefixtures("real_processes")
def test_process_in_a_group_sees_the_limit_of_the_group() -> None:
    """A real group of either version: what is left is what the kernel lets it have."""
    if os.geteuid() != 0:
        pytest.skip("memory groups are for root")
    code = "from elasticflow.system.free_memory import available; print(available())"
    try:
        with memory_group() as group:
            group.leave_room(200 * _MB)
            answer = subprocess.run(
                [*group.prefix, sys.executable, "-c", code], capture_output=True, check=True, text=True
            )
    except OSError as error:
        pytest.skip(f"memory groups cannot be made here: {error}")
    assert 100 * _MB < int(answer.stdout) <= 200 * _MB
