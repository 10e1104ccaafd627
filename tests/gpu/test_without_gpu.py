"""The table that is made under the pretended driver, out of outcomes that were made up."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from elasticflow import events
from tests.gpu.without_gpu import Launched, Seen, earlier, table

if TYPE_CHECKING:
    from pathlib import Path


def test_column_before_is_read_back_from_a_table(tmp_path: Path) -> None:
    """A table that is made anew keeps it, whatever signs its cells have."""
    now = {"plain": Seen("exit code 0", is_right=True), "ecc": Seen("classes a | b", is_right=False)}
    before = {"plain": "exit code 1: a | b", "ecc": "does not end"}
    path = tmp_path / "table.md"
    assert earlier(path) == {}
    path.write_text(table({"commit": "abc"}, before, now))
    assert "1 of 2 rows are as they should be." in path.read_text()
    assert "WRONG" in path.read_text()
    assert earlier(path) == before


def test_words_say_where_the_device_was_opened_first() -> None:
    """A standby that the fork server has forked bears its command, and is not the fork server."""
    server, worker = "elasticflow/launcher/fork_server/server.py", "runs/small/a/launches/0001/train.py"
    standby = {"command": [server], "by": ["_lazy_init", "zeros", "_open_device", "stand_by"]}
    itself = {"command": [server], "by": ["_lazy_init", "_lazy_init", "get_rng_state", "<module>", "main"]}
    first = {"command": [worker], "by": ["_lazy_init", "set_device", "set_device", "choose_device", "join"]}
    trained: list[dict[str, Any]] = [{"event": str(events.TRAINING_STARTED), "device": "cuda:0"}]
    assert Launched(0, trained, "", [first, standby]).in_fork_server() == 0
    assert Launched(0, trained, "", [first, standby]).words() == (
        "exit code 0; trained on cuda:0; first initialisation in train.py: set_device < choose_device < join"
    )
    failed = Launched(1, [], "  ✗ worker failed  rank 0 (pid 7): no\n", [itself])
    assert failed.in_fork_server() == 1
    assert failed.words() == (
        "exit code 1: rank 0: no; first initialisation in the fork server: get_rng_state < main"
    )
