"""Loops of a script's own in real worker groups: drained, killed, resized, and told what they do wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.forked import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable
    from subprocess import CompletedProcess

PROGRAM = "own_loop.py"
# Steps that share a meeting: so many later all ranks know what one of them was asked.
MOST_LATE = 8


def weights(group: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of the newest snapshot."""
    tensors = group.newest().tensors
    return {key: tensors[key].clone() for key in tensors}


def counts(group: Any) -> list[float]:
    """Return how often each sample was seen, in global batches of 16."""
    return (weights(group)["model/seen"] * 16).tolist()


@pytest.mark.parametrize(
    "more",
    [(), ("--processes", "1"), ("--parts", "5"), ("--ddp", "--parts", "3")],
    ids=["", "processes", "parts", "gradients"],
)
def test_every_sample_once_per_epoch_through_drains_kills_and_resizes(
    groups: Callable[..., Any], more: tuple[str, ...]
) -> None:
    """Three workers drained, two killed, one to the end: 192 samples, each seen twice."""
    group = groups("run", PROGRAM)
    arguments = ("--counting", "--samples", "192", *more)
    assert group.run(3, *arguments, "--term-at", "3").codes == [0, 0, 0]
    assert 3 <= group.newest().manifest.step <= 3 + MOST_LATE
    assert -9 in group.run(2, *arguments, "--kill-at", "18", ends=False).codes
    ended = group.run(1, *arguments)

    assert ended.codes == [0]
    assert counts(group) == pytest.approx([2.0] * 192)
    assert group.lines("training.finished", generation=3)


def test_batches_that_do_not_divide_have_the_gradient_of_the_whole(groups: Callable[..., Any]) -> None:
    """Batches of 5, and a last one of a single sample, on 1 and on 4 workers: every sample counts the same."""
    arguments = ("--counting", "--samples", "96", "--size", "5", "--tail", "short", "--epochs", "1")
    seen = []
    for number in (1, 4):
        group = groups(f"on_{number}", PROGRAM)
        assert group.run(number, *arguments).codes == [0] * number
        seen.append(weights(group)["model/seen"])

    torch.testing.assert_close(*seen)
    assert sorted(set((seen[0] * 5).round().int().tolist())) == [
        1,
        5,
    ]  # the one that was alone counts five times


def test_exact_at_any_number_of_workers_through_drains_and_kills(groups: Callable[..., Any]) -> None:
    """One worker undisturbed; two drained, three killed and two to the end: the same bits, dropout included."""
    whole, parts = groups("whole", PROGRAM), groups("parts", PROGRAM)
    assert whole.run(1, "--shards", "4").codes == [0]
    assert parts.run(2, "--shards", "4", "--term-at", "3").codes == [0, 0]
    assert -9 in parts.run(3, "--shards", "4", "--kill-at", "8", ends=False).codes
    assert parts.run(2, "--shards", "4").codes == [0, 0]

    expected, got = weights(whole), weights(parts)
    assert expected.keys() == got.keys()
    assert [key for key in expected if not torch.equal(expected[key], got[key])] == []


def test_one_world_size_goes_on_as_if_it_had_not_been_drained(groups: Callable[..., Any]) -> None:
    """Without virtual shards the bits are those of an undisturbed run at that number of workers: dropout, batch norm, momentum."""
    whole, parts = groups("whole", PROGRAM), groups("parts", PROGRAM)
    assert whole.run(2).codes == [0, 0]
    assert parts.run(2, "--term-at", "6").codes == [0, 0]
    assert parts.run(2).codes == [0, 0]

    expected, got = weights(whole), weights(parts)
    assert [key for key in expected if not torch.equal(expected[key], got[key])] == []


def test_the_log_has_global_means_and_the_evaluation(groups: Callable[..., Any]) -> None:
    """Loss and scalars are means over all ranks' samples; what is not kept is named; the rates are those that were used."""
    group = groups("run", PROGRAM)
    ended = group.run(2, "--epochs", "1")

    steps = group.lines("step")
    assert [line["step"] for line in steps] == [*range(1, 8)]
    assert [line["double"] for line in steps] == pytest.approx([2 * line["loss"] for line in steps], rel=1e-5)
    assert {line["lr"]["optimizer"] for line in steps} == {0.1}
    [left_out] = group.lines("state.left_out")
    assert left_out["name"] == "forgotten"
    assert (
        "no snapshot holds forgotten, a torch.optim.swa_utils.AveragedModel: run.keep(forgotten=forgotten)"
        in ended.errors[0]
    )
    [measured] = group.lines("evaluation")
    assert measured["eval"].keys() == {"val.loss"}
    assert "finished after step 7" in ended.errors[0]


def test_own_data_is_counted_and_gone_on_with(groups: Callable[..., Any]) -> None:
    """Where the script reads its data, the position counts what all ranks say that they had."""
    group = groups("run", PROGRAM)
    assert group.run(2, "--own-data", "--samples", "40", "--term-at", "4").codes == [0, 0]
    assert group.newest().state["position"]["samples"] == 16
    ended = group.run(2, "--own-data", "--samples", "40")
    assert ended.codes == [0, 0]
    assert "a restart makes its loader anew, without what was drawn ahead" in ended.errors[0]
    assert group.newest().state["position"]["samples"] == 40
    ended = group.run(2)

    assert ended.codes == [1, 1]
    assert "how they are drawn: shuffled, not own" in ended.errors[0]


def test_stop_ends_the_run_on_all_ranks(groups: Callable[..., Any]) -> None:
    """One rank's reason counts, training has finished, and stays so when it is started again."""
    group = groups("run", PROGRAM)
    assert group.run(2, "--stop-at", "4").codes == [0, 0]

    [stopped] = group.lines("training.stopped")
    assert stopped["reason"] == "good enough"
    assert 4 <= stopped["step"] <= 4 + MOST_LATE
    assert group.lines("training.finished")


def test_plain_python_and_a_finish_that_was_forgotten(
    own_interpreter: Callable[..., CompletedProcess[str]],
    plain_python: Callable[..., CompletedProcess[str]],
) -> None:
    """The script's end is the loop's; the second start continues where the first one ended, in a folder that is named for the script."""
    command = (ROOT / "tests/runtime/programs" / PROGRAM, "--forget", "finish")
    outputs = [
        run(*command, "--epochs", epochs).stderr
        for run, epochs in ((own_interpreter, "1"), (plain_python, "2"))
    ]

    assert "finished after step 7, snapshots in runs/own_loop/by-hand" in outputs[0]
    assert "continues after step 7, from snapshot" in outputs[1]
    assert "finished after step 14" in outputs[1]


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (("--raise-at", "2"), 1, "label 9 is out of range"),
        (("--exit-at", "2"), 3, ""),
        (("--forget", "step"), 1, "run.step was not called in step 1"),
        (("--forget", "step twice"), 1, "run.step was called twice"),
    ],
    ids=["raise", "exit", "no step", "two steps"],
)
def test_what_ends_a_script_by_a_failure(
    groups: Callable[..., Any], arguments: tuple[str, ...], code: int, text: str
) -> None:
    """Its exit code is what the script or the error says, and the log has the exception."""
    group = groups("run", PROGRAM)
    ended = group.run(2, *arguments, ends=False)

    assert ended.codes[1] == code
    assert text in ended.errors[1]
    if code == 1:
        [raised] = group.lines("worker.raised", rank=1)
        assert text in raised["error"]


def test_data_that_varies_is_refused_with_virtual_shards_and_told_without(groups: Callable[..., Any]) -> None:
    """Before the first step, on every rank; a loop that promises no bits trains."""
    exact, batch = groups("exact", PROGRAM), groups("batch", PROGRAM)
    assert exact.run(2, "--own-generator", "--shards", "4").codes == [1, 1]
    (raised,) = exact.lines("worker.raised")
    assert "sample 0 of `train`, a __main__.Images, is not the same when it is read twice" in raised["error"]
    assert not exact.lines("step")
    assert batch.run(2, "--own-generator", "--epochs", "1").codes == [0, 0]
    told, of_evaluation = batch.lines("dataset.varies")
    assert (told["name"], of_evaluation["name"]) == ("train", "val")
    assert (told["generators"], told["parts"]) == (["dataset.own"], ["[0]: float32 (16,)"])
