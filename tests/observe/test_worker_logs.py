from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest

from elasticflow.errors import LogsNotFoundError
from elasticflow.observe.worker_logs import LogLine, follow, generations, read_logs
from elasticflow.run_folder import RunFolder

if TYPE_CHECKING:
    from pathlib import Path


def test_lines_of_the_newest_generation_merged_by_time(run: Path) -> None:
    """JSON lines of all ranks in order of time, then what each printed."""
    lines = list(read_logs(RunFolder(run)))
    assert {line.generation for line in lines} == {2}
    assert [line.record["event"] if line.record else f"{line.stream}: {line.text}" for line in lines] == [
        "e0.r0",
        "e0.r1",
        "e1.r0",
        "e1.r1",
        "e2.r0",
        "e2.r1",
        "worker.raised",
        "worker.raised",
        "stdout: printed by 0",
        "stdout: printed by 1",
        "stderr: said by 0",
        "stderr: said by 1",
    ]


def test_one_rank_of_one_generation(run: Path) -> None:
    """Rank and generation choose."""
    lines = list(read_logs(RunFolder(run), generation=1, rank=1))
    assert {(line.generation, line.rank) for line in lines} == {(1, 1)}
    assert len(lines) == 6


def test_a_level_drops_what_is_below(run: Path) -> None:
    """Printed lines count as info, standard error always matters."""
    kept = [line for line in read_logs(RunFolder(run), rank=0) if line.is_at_least("warning")]
    assert [(line.stream, line.text) for line in kept[1:]] == [("stderr", "said by 0")]
    assert kept[0].record is not None
    assert kept[0].record["event"] == "worker.raised"
    assert LogLine(1, 0, "jsonl", "x", {"level": "odd"}).is_at_least("error"), (
        "an unknown level is not hidden"
    )


def test_what_is_not_there_is_named(run: Path) -> None:
    """Errors say which generations and ranks there are."""
    folder = RunFolder(run)
    with pytest.raises(
        LogsNotFoundError, match="run 20261120-100000-4f2a has no logs of generation 7"
    ) as caught:
        read_logs(folder, generation=7)
    assert caught.value.remedy == "there are logs of: 1, 2"
    with pytest.raises(LogsNotFoundError, match=r"generation 2 of run .* has no logs of rank 5") as caught:
        read_logs(folder, rank=5)
    assert caught.value.remedy == "there are logs of: 0, 1"
    shutil.rmtree(run / "logs")
    with pytest.raises(LogsNotFoundError, match="run 20261120-100000-4f2a has no logs yet"):
        read_logs(folder)
    assert generations(folder) == []


def test_following_sees_new_lines_and_new_generations_and_ends(run: Path) -> None:
    """What is written while one follows comes out once, a new generation is continued to, and the end is whole."""
    folder = RunFolder(run)
    pauses = 0

    def pause(seconds: float) -> None:
        nonlocal pauses
        pauses += 1
        if pauses == 1:
            with folder.rank_log(2, 0, "stdout").open("a") as file:
                file.write("more\n")
        elif pauses == 2:
            folder.generation_logs(3).mkdir()
            folder.rank_log(3, 0, "stdout").write_text("third\nno newline")

    lines = list(follow(folder, None, None, is_live=lambda: pauses < 3, pause=pause))
    assert len(lines) == 12 + 3
    assert [(line.generation, line.text) for line in lines[-3:]] == [
        (2, "more"),
        (3, "third"),
        (3, "no newline"),
    ]


def test_following_one_generation_stays_with_it(run: Path) -> None:
    """A generation that was named is the only one shown."""
    lines = list(follow(RunFolder(run), 1, 0, is_live=lambda: False, pause=lambda _: None))
    assert {(line.generation, line.rank) for line in lines} == {(1, 0)}


def test_a_progress_bar_is_its_last_state(run: Path) -> None:
    """As on a terminal, where it is drawn over itself."""
    log = run / "logs" / "g0002" / "rank0.stderr"
    log.write_bytes(b"".join(b"\r%3d%%|###" % done for done in range(101)) + b"\nafter\r\n")
    lines = [line.text for line in read_logs(RunFolder(run), rank=0) if line.stream == "stderr"]
    assert lines == ["100%|###", "after"]
