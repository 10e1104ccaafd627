"""Following rank logs while they grow, and where the streams of workers go."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import pytest
from torch.distributed.elastic.multiprocessing.api import Std
from torch.distributed.run import config_from_args, get_args_parser

from elasticflow import events, logs
from elasticflow.launcher.agent.rank_logs import FOLLOWED, GenerationLogs, RankLog, tail
from elasticflow.run_folder import RunFolder

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """Return a run folder."""
    return RunFolder(tmp_path / "runs" / "job" / "run")


@pytest.fixture
def log(folder: RunFolder) -> Iterator[RankLog]:
    """Yield a follower of rank 0 in generation 1; its file does not exist yet."""
    followed = RankLog(folder, 1, 0)
    yield followed
    followed.close()


def _append(folder: RunFolder, data: str | bytes) -> None:
    path = folder.rank_log(1, 0)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.write(data if isinstance(data, bytes) else data.encode())


def _line(event: str, **fields: Any) -> str:
    return json.dumps({"event": event, "origin": logs.OURS, **fields}) + "\n"


def test_each_line_comes_once_when_it_is_complete(folder: RunFolder, log: RankLog) -> None:
    """No file, no line; half a line, no line; its other half, one line; then nothing more."""
    assert [] == log.lines()
    line = _line(events.STEP, step=1)
    _append(folder, line + line[:10])
    assert [1] == [r["step"] for r in log.lines()]
    assert [] == log.lines()
    _append(folder, line[10:])
    assert [1] == [r["step"] for r in log.lines()]
    assert [] == log.lines()


def test_half_a_character_waits_for_its_other_half(folder: RunFolder, log: RankLog) -> None:
    """Lines are cut as bytes: a write that ends inside a character loses nothing."""
    data = (
        json.dumps(
            {"event": events.WORKER_RAISED, "origin": logs.OURS, "error": "größer"}, ensure_ascii=False
        )
        + "\n"
    ).encode()
    cut = data.index("ß".encode()) + 1
    _append(folder, data[:cut])
    assert [] == log.lines()
    _append(folder, data[cut:])

    assert ["größer"] == [r["error"] for r in log.lines()]


def test_only_what_the_supervisor_needs_is_followed(folder: RunFolder, log: RankLog) -> None:
    """Users' own lines, lines that are no JSON and lines that only mention an event stay in the file.

    So do those of users that are called as ours are: they lack what ours hold.
    """
    _append(folder, "".join(_line(name, origin="user") for name in sorted(FOLLOWED)))
    _append(folder, "".join(json.dumps({"event": name, "logger": "root"}) + "\n" for name in FOLLOWED))
    _append(folder, _line("my.own", text=f"after {events.STEP}"))
    _append(folder, f'not JSON but "{events.STEP}"\n')
    _append(folder, f'["{events.STEP}"]\n')
    _append(folder, b'\xff\xfe "step"\n')
    _append(folder, "".join(_line(name) for name in sorted(FOLLOWED)))

    assert sorted(FOLLOWED) == [r["event"] for r in log.lines()]


def test_streams_of_a_generation_have_a_folder_of_their_own(folder: RunFolder) -> None:
    """Torch 2.13 names the folder after its restart count, which a join does not raise, and empties it before use."""
    logs = GenerationLogs(folder)
    envs = {0: {"RANK": "2"}, 1: {"RANK": "3"}}
    logs.generation = 7
    first = logs.reify(envs)
    assert str(folder.path / "logs" / "g0007" / "rank2.stderr") == first.stderrs[0]
    folder.rank_log(7, 2, "stderr").write_text("what it said")
    logs.reify(envs)
    logs.generation = 8
    second = logs.reify(envs)

    assert "what it said" == folder.rank_log(7, 2, "stderr").read_text()
    assert not set(first.stderrs.values()) & set(second.stderrs.values())
    assert {} == first.tee_stdouts


def test_filter_leaves_out_what_is_shown_and_nothing_that_is_kept(folder: RunFolder) -> None:
    """`[torchrun] local_ranks_filter` and `tee` as torchrun reads them; each rank's files are there all the same."""
    arguments = ["--nnodes=1", "--tee=3", "--redirects=1", "--local-ranks-filter=1"]
    arguments += [f"--log-dir={os.devnull}", "train.py"]
    launch, _, _ = config_from_args(get_args_parser().parse_args(arguments))
    assert launch.logs_specs is not None
    made = GenerationLogs.like(launch.logs_specs, folder).reify({r: {"RANK": str(r)} for r in range(3)})

    assert {1} == set(made.tee_stdouts) == set(made.tee_stderrs)
    assert {0, 1, 2} == set(made.stdouts) == set(made.stderrs)


def test_tee_is_honoured_by_rank_and_stream(folder: RunFolder) -> None:
    """What `[torchrun] tee` asks for is shown beside being kept."""
    logs = GenerationLogs(folder, {0: Std.ERR, 1: Std.ALL})
    made = logs.reify({0: {"RANK": "0"}, 1: {"RANK": "1"}, 2: {"RANK": "2"}})

    assert {1} == set(made.tee_stdouts)
    assert {0, 1} == set(made.tee_stderrs)


def test_worker_that_died_before_it_opened_its_streams_has_said_nothing(tmp_path: Path) -> None:
    """Killed between the fork and that, it leaves no file: no reason for the agent to fail."""
    assert "" == tail(tmp_path / "rank0.stderr")
