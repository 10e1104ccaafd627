"""A run folder as the supervisor leaves it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.observe.hand_made import RUN_ID, at, evaluation, event, step, story_of_a_kill

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return the folder of a run that was interrupted at step 47, with two generations of logs."""
    folder = tmp_path / "runs" / "mnist" / RUN_ID
    state = {
        "status": "interrupted",
        "job": "mnist",
        "run_id": RUN_ID,
        "launch": 1,
        "generation": 2,
        "step": 47,
        "steps": 60,
        "epoch": 2,
        "loss": 0.0426,
        "restarts": 1,
        "workers": [{"rank": 0, "pid": 11, "node": "n0"}],
        "verdict": None,
        "snapshot": "000000000040-0002-0a1b2c3d",
        "pid": 9,
        "started": at(0),
        "updated": at(6),
    }
    (folder / "launches" / "0001").mkdir(parents=True)
    (folder / "state.json").write_text(json.dumps(state))
    lines = [step(n / 20, n) for n in range(1, 48)] + [evaluation(3, 40, 0.95, 0.96)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 4')
    story = [record for record in story_of_a_kill() if "event" in record]
    (folder / "events.jsonl").write_text("".join(json.dumps(record) + "\n" for record in story))
    for generation in (1, 2):
        logs = folder / "logs" / f"g{generation:04d}"
        logs.mkdir(parents=True)
        for rank in (0, 1):
            records = [
                event(i + rank / 10, f"e{i}.r{rank}", generation, rank=rank, level="info") for i in range(3)
            ]
            records.append(event(9, "worker.raised", generation, rank=rank, level="error", traceback="a\nb"))
            (logs / f"rank{rank}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
            (logs / f"rank{rank}.stdout").write_text(f"printed by {rank}\n")
            (logs / f"rank{rank}.stderr").write_text(f"said by {rank}\n")
    return folder
