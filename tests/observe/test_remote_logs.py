"""Which logs of a run lie on other hosts, by what the run wrote down."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from elasticflow import events
from elasticflow.launcher.rendezvous.requests import note_copies
from elasticflow.observe import remote_logs
from elasticflow.observe.remote_logs import fetch, missing
from elasticflow.run_folder import RunFolder

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def _run(tmp_path: Path, *happened: tuple[Any, dict[str, Any]]) -> RunFolder:
    folder = RunFolder.of(tmp_path, "job", "run")
    folder.path.mkdir(parents=True)
    lines = [json.dumps({"event": event, **fields}) for event, fields in happened]
    folder.events.write_text("".join(f"{line}\n" for line in lines))
    return folder


def _generation(number: int, *members: str) -> tuple[Any, dict[str, Any]]:
    return events.GENERATION_STARTED, {"generation": number, "members": members}


def _joined(node: str, host: str, nproc: int = 1) -> tuple[Any, dict[str, Any]]:
    return events.NODE_JOINED, {"node": node, "host": host, "nproc": nproc}


def test_logs_that_are_not_here_are_named_with_their_host(tmp_path: Path) -> None:
    """Whose log is here is not missing; a node's ranks follow from those of the nodes before it."""
    folder = _run(
        tmp_path,
        _joined("n0", "a"),
        _joined("b-1", "b", 2),
        _joined("c-2", "c"),
        _generation(1, "n0", "b-1", "c-2"),
    )
    logs = folder.generation_logs(1)
    logs.mkdir(parents=True)
    for rank in (0, 3):
        (logs / f"rank{rank}.jsonl").touch()
    [elsewhere] = missing(folder)
    assert elsewhere.sentence(folder) == (
        "logs of ranks 1, 2 of generation 1 are not to be had: they are on host b (node b-1), which is gone; "
        "there they lie in runs/job/run/logs/g0001 of the project"
    )


def test_only_lines_about_nodes_and_groups_are_parsed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run of weeks has hundreds of thousands of others, and while it is followed this is asked every second."""
    parsed: list[Any] = []

    def parse(line: bytes) -> Any:
        parsed.append(json.loads(line))
        return parsed[-1]

    monkeypatch.setattr(remote_logs, "parse", parse)
    snapshots = [(events.SNAPSHOT_COMMITTED, {"generation": 1, "step": step}) for step in range(9)]
    folder = _run(tmp_path, _joined("n0", "a"), _joined("b-1", "b"), _generation(1, "n0", "b-1"), *snapshots)
    assert ["b"] == [each.host for each in missing(folder)]
    assert [each["event"] for each in parsed] == ["node.joined", "node.joined", "generation.started"]


def test_logs_of_a_host_that_was_lost_may_lack_their_end(tmp_path: Path) -> None:
    """What it had sent is here; what one that left had sent is all."""
    folder = _run(
        tmp_path,
        *(_joined("n0", "a"), _joined("b-1", "b"), _joined("c-2", "c"), _generation(1, "n0", "b-1", "c-2")),
        *((events.NODE_LOST, {"node": "b-1"}), (events.NODE_LEFT, {"node": "c-2"})),
    )
    for rank in range(3):
        log = folder.rank_log(1, rank)
        log.parent.mkdir(parents=True, exist_ok=True)
        log.touch()
    note_copies(folder, {"logs/g0001/rank1.jsonl", "logs/g0001/rank2.jsonl"})
    assert ["b"] == [each.host for each in missing(folder)]
    assert missing(folder)[0].sentence(folder) == (
        "logs of rank 1 of generation 1 may lack their end: they are what host b (node b-1) had sent before it was lost"
    )


def test_names_of_nodes_count_within_a_launch(tmp_path: Path) -> None:
    """The first machine that joins the next launch may be another one."""
    folder = _run(
        tmp_path,
        (events.RUN_STARTED, {}),
        *(_joined("b-1", "b"), _generation(1, "b-1")),
        *((events.NODE_LOST, {"node": "b-1"}), _generation(2)),
        (events.RUN_STARTED, {}),
        *(_joined("b-1", "elsewhere"), _generation(3, "b-1")),
    )
    assert [["b"], [], ["elsewhere"]] == [[each.host for each in missing(folder, n)] for n in (1, 2, 3)]


def test_run_of_one_host_misses_nothing_and_nobody_is_asked(tmp_path: Path) -> None:
    """Nodes that are simulated here are no other hosts."""
    folder = _run(tmp_path, _joined("n0", "a"), _joined("n1", "a"), _generation(1, "n0", "n1"))
    assert [] == missing(folder)
    assert fetch(folder) is None
    assert not (folder.path / "wanted").exists()
