"""What stands below the lines about a run."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from elasticflow.observe.history import RunHistory
from elasticflow.observe.run_board import RunBoard
from elasticflow.protocol.run_files import KNOWN, known_record
from tests.observe.hand_made import START, event, step

if TYPE_CHECKING:
    from elasticflow.system.records import Record

SIZE = os.terminal_size((100, 24))


class Board(RunBoard):
    """A board with a history of its own, which takes each event before."""

    def __init__(self) -> None:
        super().__init__(RunHistory())

    def event(self, record: Record) -> None:
        """Take an event."""
        self._history.take(record)
        super().event(record)


def _rows(board: RunBoard, seconds: float) -> list[str]:
    rows = board.rows(START + seconds, "0:09", "-", SIZE, pretty=False)
    return ["".join(part.text for part in row).strip() for row in rows]


def _training() -> RunBoard:
    board = Board()
    board.event(event(0, "run.started"))
    for node in ("n0", "n1"):
        board.event(event(1, "node.joined", node=node, host="h", nproc=2))
    board.event(event(2, "generation.started", world_size=4, nodes=2, members=["n0", "n1"]))
    board.event(event(2, "training.started", step=0, steps=100))
    board.event(event(3, "training.first_step", step=1))
    board.event(event(4, "snapshot.committed", step=1, bytes=2_000_000))
    board.metrics(step(5, 2))
    return board


def _known(board: RunBoard, **activities: dict[str, object]) -> None:
    board.known(known_record({"epochs": 5, "budget_left": 2, "activities": activities})[KNOWN])


def test_all_that_is_true_of_a_run_that_trains() -> None:
    """How far, who, what failures may still cost, the newest snapshot, and a lane for each node."""
    board = _training()
    _known(board, n1={"phase": "data", "step": 2, "since": START + 5})
    assert _rows(board, 9) == [
        "0:09  - training       step   2/100  ----------  loss 1.0000  epoch 1/5  lr 3.0e-03",
        "- waiting        for the data of step 3, 4 s",
        "- workers        4 workers on 2 nodes, generation 1, 2 restarts left",
        "- snapshot       step 1, 5 s ago, 2.0 MB",
        "- n0             ranks 0-1 on h",
        "- n1             ranks 2-3 on h  waiting: for the data of step 3, 4 s",
    ]


def test_node_that_is_about_to_join_disturbs_nobody() -> None:
    """What it does stands in its lane alone; if it is lost before it takes part, training continues."""
    board = _training()
    _known(board, n2={"phase": "import", "subject": "torch", "since": START + 5})
    rows = _rows(board, 9)
    assert "- n2             joins  starting: importing torch, 4 s" in rows
    assert 1 == sum("importing torch" in row for row in rows)
    board.event(event(9, "node.joined", node="n2", host="h", nproc=2))
    _known(board)
    assert "- n2             takes no part yet on h" in _rows(board, 9)
    board.event(event(10, "node.lost", node="n2", reason="killed"))
    rows = _rows(board, 12)
    assert rows[0].startswith("0:09  - training       step   2/100")
    assert "- n2             lost 2 s ago" in rows
    assert not [row for row in _rows(board, 30) if "n2" in row]


def test_end_of_a_group_takes_what_was_true_of_it_away() -> None:
    """A node of it is lost: there is no progress until the next group does a step; then the end takes all away."""
    board = _training()
    board.event(event(6, "node.lost", node="n1", reason="killed"))
    assert _rows(board, 8)[0] == "0:09  - restarting     the next group is formed, 2 s"
    board.event(event(8, "generation.started", 2, world_size=2, nodes=1, members=["n0"]))
    assert _rows(board, 9)[0] == "0:09  - starting       the workers come up, 1 s"
    board.event(event(9, "run.failed", 2))
    assert [] == _rows(board, 9)
