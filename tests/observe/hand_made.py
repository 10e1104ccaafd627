"""A hand-made run: what the supervisor would write about one that loses a worker and continues."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

START = 1795168800.0  # 2026-11-20 10:00:00 UTC
RUN_ID = "20261120-100000-4f2a"
SIGKILLED = "killed by SIGKILL"
DURATIONS = {"starting": 2.4, "training": 3.34, "evaluating": 0.51, "restarting": 0.2, "ending": 0.15}


def at(seconds: float) -> str:
    """Return the RFC 3339 text of that many seconds after the start."""
    return (
        datetime.fromtimestamp(START + seconds, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
    )


def event(when: float, what: str, number: int = 1, /, **fields: Any) -> dict[str, Any]:
    """Return an event record of generation *number*; `class_` is the field `class`."""
    common = {"timestamp": at(when), "level": "info", "event": what, "job": "mnist", "run_id": RUN_ID}
    own = {name.removesuffix("_"): value for name, value in fields.items()}
    return {**common, "generation": number, **own}


def step(seconds: float, number: int, generation: int = 1) -> dict[str, Any]:
    """Return a step record."""
    return {
        "step": number,
        "epoch": number // 20,
        "in_epoch": -(-number // 20),
        "samples": number * 64,
        "loss": 2.0 / number,
        "lr": 3e-3,
        "time": START + seconds,
        "seconds": 0.05,
        "generation": generation,
    }


def evaluation(seconds: float, number: int, accuracy: float, best: float) -> dict[str, Any]:
    """Return an evaluation record."""
    metrics = {"loss": 0.1, "accuracy": accuracy}
    return {
        "step": number,
        "epoch": number // 20,
        "in_epoch": -(-number // 20),
        "eval": metrics,
        "weights": "raw",
        "best": best,
        "time": START + seconds,
        "seconds": 0.25,
    }


def story_of_a_kill() -> list[dict[str, Any]]:
    """Return the records of a run that loses rank 1 after step 47 and finishes."""
    data: dict[str, Any] = {"samples": 1437, "fingerprint": "4be1a09c22f0aa", "source": "examples/mnist"}
    return [
        event(0, "run.started", launch=1, resumed=False, pid=1, torch="2.13.0", uri="/p/runs/mnist/x"),
        event(0.1, "node.joined", node="n0", host="h", nproc=2),
        event(0.2, "generation.started", world_size=2, nodes=1, reason="start"),
        event(2.3, "dataset.opened", name="train", **data),
        event(
            2.4,
            "training.started",
            step=0,
            restored_from=None,
            epoch=0,
            samples=0,
            steps=60,
            device="cpu",
            parameters=23466,
        ),
        event(2.5, "training.first_step", step=1, seconds_since_failure=None),
        *[step(2.5 + n / 20, n) for n in range(1, 21)],
        evaluation(3.5, 20, 0.9, 0.9),
        event(3.6, "snapshot.committed", step=20, bytes=291_234, seconds=0.0042, trigger="steps", name="s"),
        *[step(2.6 + n / 20, n) for n in range(21, 41)],
        event(4.6, "snapshot.committed", step=40, bytes=291_234, seconds=0.0042, trigger="steps", name="s"),
        *[step(2.6 + n / 20, n) for n in range(41, 48)],
        event(
            5.0,
            "worker.failed",
            rank=1,
            node="n0",
            pid=4711,
            exit_code=-9,
            class_="crash",
            error=SIGKILLED,
            traceback=None,
            others="1 other rank: connection closed by peer",
        ),
        event(5.0, "generation.ended", class_="crash", reason=SIGKILLED, step=47),
        event(5.0, "budget.charged", class_="crash", left=4),
        event(5.1, "generation.started", 2, world_size=2, nodes=1, reason="crash"),
        event(5.2, "dataset.opened", 2, name="train", **data),
        event(5.2, "training.started", 2, step=40, restored_from="s", epoch=2, samples=2560, steps=60),
        event(5.3, "training.first_step", 2, step=41, seconds_since_failure=0.27),
        *[step(3.3 + n / 20, n, 2) for n in range(41, 61)],
        evaluation(6.4, 60, 0.98, 0.985),
        event(6.4, "snapshot.committed", 2, step=60, bytes=291_234, seconds=0.0042, trigger="end", name="s"),
        event(6.5, "training.finished", 2, step=60, epoch=3, samples=3840, best=0.985),
        event(
            6.6,
            "run.finished",
            2,
            step=60,
            seconds=6.6,
            durations=DURATIONS,
            run_durations=DURATIONS,
            restarts=1,
        ),
    ]


def make_run(root: Path) -> Path:
    """Return the folder, under a project's root, of a run interrupted at step 47, with two generations of logs."""
    folder = root / "runs" / "mnist" / RUN_ID
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
