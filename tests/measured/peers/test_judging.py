"""A run with a sample that is lost, or repeated, or a step made again, is found out, and a right one is not."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

import pytest

from tests.measured.peers import judging
from tests.measured.peers.judging import Samples, Step

if TYPE_CHECKING:
    from pathlib import Path

SAMPLES, BATCH, EPOCHS = 12, 4, 2
RIGHT = Samples(lost=0, repeated=0, short=0, is_whole=True)


def run(*, epochs: int = EPOCHS, rank: str = "0", pid: int = 1, began: float = 0.0) -> list[Step]:
    """Return the steps of a run that uses each sample once in each epoch."""
    steps = []
    for number in range(epochs * SAMPLES // BATCH):
        first = number * BATCH % SAMPLES
        ids = tuple(range(first, first + BATCH))
        steps.append(Step(began + number, pid, rank, number + 1, f"d{number}", f"d{number + 1}", ids))
    return steps


def judge(steps: list[Step], last: str = "d6") -> Samples:
    """Return the verdict on the weights whose counts have the digest *last*."""
    return judging.judge_samples(judging.lineage(steps, last), SAMPLES, EPOCHS, BATCH)


def test_a_right_run_is_right() -> None:
    """All ranks write each step; the lineage has it once."""
    assert judge(run()) == RIGHT
    assert judge(run() + run(rank="1", pid=2, began=0.5)) == RIGHT


@pytest.mark.parametrize(
    ("ids", "parts", "verdict"),
    [
        ((8, 9, 10), (), Samples(lost=1, repeated=0, short=1, is_whole=True)),
        ((8, 9, 10, 0), (), Samples(lost=1, repeated=1, short=0, is_whole=True)),
        # A sampler that pads: the same sample by two workers in one step.
        ((8, 9, 10), (1.0, 1.0, 2.0), Samples(lost=1, repeated=1, short=0, is_whole=True)),
        # A replica is away, and the others' mean counts them twice.
        ((8, 9), (2.0, 2.0), Samples(lost=2, repeated=0, short=1, is_whole=True)),
    ],
)
def test_a_lost_or_repeated_sample_is_found(
    ids: tuple[int, ...], parts: tuple[float, ...], verdict: Samples
) -> None:
    """In the third step, by what the weights have learned there."""
    steps = run()
    steps[2] = replace(steps[2], ids=ids, parts=parts)
    assert judge(steps) == verdict


def test_steps_outside_the_lineage_count_for_nothing() -> None:
    """After a restart from step 2 other samples follow: what the dead workers did after it is in no weights."""
    steps = run()
    dead = [
        Step(2.1, 9, "0", 3, "d2", "dead3", (4, 5, 6, 7)),
        Step(2.2, 9, "0", 4, "dead3", "dead4", (4, 5, 6, 7)),
    ]
    assert judge([*steps[:2], *dead, *steps[2:]]) == RIGHT
    assert judging.redone([*steps[:2], *dead, *steps[2:]]) == 2
    wrong = judge([*steps[:2], *dead, *steps[2:]], "dead4")
    assert wrong == Samples(lost=12, repeated=4, short=0, is_whole=True)


def test_a_lineage_with_a_hole_says_so() -> None:
    """No process has written the second step."""
    steps = run()
    assert not judge([steps[0], *steps[2:]]).is_whole
    assert not judge([]).is_whole


def test_steps_made_again_are_those_of_a_rank() -> None:
    """Two ranks that make a step together make it once."""
    both = run() + run(rank="1", pid=2)
    assert judging.redone(both) == 0
    assert judging.redone([*both, replace(both[3], t=20.0, pid=3), replace(both[3], t=30.0, pid=4)]) == 2


def test_the_pause_is_the_longest_after_the_fault() -> None:
    """A survivor's last step after the kill does not end it."""
    steps = run()[:4]  # at 0, 1, 2, 3
    again = [replace(step, t=10.0 + step.step, pid=2) for step in run()[2:]]
    found = judging.pause([*steps, *again], fault=2.5)
    assert found is not None
    assert (found.seconds, found.caught_up_s, found.resumed_from, found.reached) == (10.0, 12.5, 2, 4)
    assert judging.pause(steps, fault=3.0) is None


def test_a_replica_that_trains_on_after_the_end_is_left_out() -> None:
    """The first step of the last number ends the run."""
    late = [replace(step, t=100.0 + step.t, pid=2) for step in run()]
    assert judging.until_end([*run(), *late], 6) == run()


def test_speed_and_stall_are_those_of_one_process() -> None:
    """Steps of 1 s, and 3 s where a checkpoint is saved."""
    t, steps = 0.0, []
    for step in run(epochs=4):
        steps.append(replace(step, t=t))
        t += 3.0 if step.step % 5 == 0 else 1.0
    found = judging.speed(steps, save_every=5, skipped=2)
    assert found == judging.Speed(steps_per_s=round(9 / 13, 1), stall_ms=2000.0)


def test_a_line_that_a_kill_has_cut_is_left_out(tmp_path: Path) -> None:
    """The others are read, of all processes, in the order of time."""
    one, other = run()[0], replace(run()[1], pid=2)
    (tmp_path / "steps-1.jsonl").write_text(json.dumps(asdict(one)) + "\n" + '{"t": 1.0, "pi')
    (tmp_path / "steps-2.jsonl").write_text(json.dumps(asdict(other)) + "\n")
    assert judging.read_steps(tmp_path) == [one, other]
