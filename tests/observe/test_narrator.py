from __future__ import annotations

import json
from string import Formatter
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from elasticflow import events
from elasticflow.observe.history import RunHistory
from elasticflow.observe.narrator import RunNarrator
from elasticflow.observe.terminal.event_lines import (
    LONGEST_QUOTE,
    Line,
    epoch_of,
    line_of,
    rates_of,
    user_frames,
)
from elasticflow.observe.terminal.formats import took
from tests.observe.hand_made import DURATIONS, RUN_ID, evaluation, event, step, story_of_a_kill

if TYPE_CHECKING:
    from collections.abc import Iterable

    from elasticflow.system.records import Record


def told(records: Iterable[dict[str, Any]], folder: str | None = None) -> list[Line]:
    """Return the lines a story makes of *records*."""
    narrator = Told(folder)
    lines = [narrator.event(r) if "event" in r else narrator.metrics(r) for r in records]
    return [line for line in lines if line is not None]


class Told(RunNarrator):
    """A narrator with a history of its own, which takes each event once it was told."""

    def __init__(self, folder: str | None = None) -> None:
        super().__init__(RunHistory(), folder)

    def event(self, record: Record) -> Line | None:
        """Tell an event."""
        line = super().event(record)
        self._history.take(record)
        return line


def test_a_killed_worker_reads_as_a_story() -> None:
    """Label and text of every line of a run that loses a worker and continues."""
    lines = told(story_of_a_kill(), "runs/mnist/x")
    assert [(line.label, line.text) for line in lines] == [
        ("run", "mnist 20261120-100000-4f2a, torch 2.13.0"),
        ("workers", "2 workers on 1 node"),
        ("data", "train: 1,437 samples of examples/mnist, fingerprint 4be1a09c"),
        ("training", "from the beginning, 60 steps on cpu, 23,466 parameters"),
        ("evaluation", "epoch 1, step 20: accuracy 0.9000, loss 0.1000 (best)"),
        ("snapshot", "step 20, 291.2 kB in 4 ms"),
        ("worker killed", "rank 1 (pid 4711) by SIGKILL, after step 47"),
        ("restart", "2 workers on 1 node, generation 2; 4 restarts left"),
        ("restored", "from the snapshot of step 40, 7 steps to do again"),
        ("resuming", "step 41 done 0.27 s after the failure"),
        ("evaluation", "epoch 3, step 60: accuracy 0.9800, loss 0.1000"),
        ("snapshot", "step 60, 291.2 kB in 4 ms"),
        ("finished", "accuracy 0.9800, loss 0.1000 (best 0.9850), 60 steps, 1 restart"),
    ]
    assert lines[6].more == ("1 other rank: connection closed by peer",)
    assert lines[-1].more == (f"took {took(DURATIONS)}", "runs/mnist/x")


def test_the_command_that_goes_on_is_the_one_that_the_launch_was_told() -> None:
    """After an interruption, and once a failure is mended."""
    narrator = Told()
    again = "elasticflow run jobs/mnist.toml --hosts hosts.txt --run-id nightly"
    narrator.event(event(0, "run.started", resume_command=again))
    left = narrator.event(event(9, "run.interrupted", reason="SIGTERM", step=4))
    failed = narrator.event(event(9, "run.failed", error="no"))
    assert left is not None
    assert failed is not None
    assert (f"continue with: {again}", True) == (
        left.more[0],
        failed.more[0].endswith(f"; once mended: {again}"),
    )


def test_time_runs_from_the_start_of_the_launch() -> None:
    """Seconds count from `run.started`, whatever was shown before it."""
    narrator = Told()
    narrator.event(event(0, "node.joined", node="n0"))
    narrator.event(event(100, "run.started", launch=2, resumed=True))
    line = narrator.event(event(105, "drain.completed", seconds=1.0))
    assert line is not None
    assert line.seconds == pytest.approx(5.0)


def test_a_user_error_shows_its_traceback_once() -> None:
    """The root cause comes with the user's own frames; the same error again does not repeat them."""
    traceback = (
        "Traceback (most recent call last):\n"
        '  File "/v/lib/python3.11/site-packages/torch/nn/modules/module.py", line 9, in _call_impl\n'
        "    return forward_call()\n"
        '  File "/p/examples/mnist/net.py", line 4, in forward\n'
        "    raise ValueError\n"
        "ValueError: bad label"
    )
    failed = event(1, "worker.failed", rank=0, class_="user_error", error="ValueError: bad label")
    first, second, verdict = told(
        [
            {**failed, "traceback": traceback, "others": "1 other rank: the same"},
            {**failed, "traceback": traceback},
            event(
                2,
                "run.failed",
                error="ValueError: bad label",
                why="the same error came again without progress",
            ),
        ]
    )
    assert first.text == "rank 0: ValueError: bad label"
    assert first.quote == (
        "Traceback (most recent call last):",
        '  File "/p/examples/mnist/net.py", line 4, in forward',
        "    raise ValueError",
        "ValueError: bad label",
        "(1 frame of installed packages left out)",
    )
    assert (second.quote, second.more) == ((), ("with the same traceback as before",))
    assert verdict.text == "the same error came again without progress"


def test_early_stop_names_rank_and_reason() -> None:
    """Whoever looks at the console sees why training ended before its length."""
    (line,) = told([event(2, "training.stopped", step=9, reason="good enough", by_rank=1)])
    assert (line.label, line.text) == ("stopped", "after step 9 by rank 1: good enough")


def test_a_verdict_without_a_worker_says_its_error() -> None:
    """An error that no earlier line told is told in full."""
    (line,) = told([event(2, "run.failed", error="the agent ended with code 1", why=None)])
    assert line.text == "the agent ended with code 1"
    (line,) = told([event(2, "run.failed", error="no disk", why="2 failures, restarts.budget is 1", step=9)])
    assert line.text == "2 failures, restarts.budget is 1: no disk, after step 9"


def test_a_drain_says_how_to_go_on() -> None:
    """Who presses Ctrl-C learns what a second one does, and which command continues."""
    drain, drained, interrupted = told(
        [
            event(1, "drain.requested", reason="SIGINT", grace_s=30.0),
            event(2, "drain.completed", step=61, seconds=0.4),
            event(2, "run.interrupted", reason="SIGINT", step=61, seconds=2.0),
        ],
        "runs/mnist/x",
    )
    assert (drain.text, drain.more) == (
        "SIGINT: workers leave after the same step, within 30.0 s",
        ("Ctrl-C again ends the run at once",),
    )
    assert drained.text == "all workers left after 0.40 s"
    assert interrupted.text == "after step 61 (SIGINT)"
    assert interrupted.more == ("continue with: elasticflow resume 20261120-100000-4f2a", "runs/mnist/x")


def test_routine_snapshots_do_not_bury_the_rest() -> None:
    """Of snapshots taken every second one in ten gets a line; the one at the end always does."""
    records = [event(i, "snapshot.committed", step=i, trigger="steps") for i in range(25)]
    lines = told([*records, event(25, "snapshot.committed", step=25, trigger="drain")])
    assert [line.text for line in lines] == ["step 0", "step 10", "step 20", "step 25"]


def test_a_resumed_run_says_where_it_goes_on() -> None:
    """A second launch is named, and its first training line is no restart."""
    lines = told(
        [
            event(0, "run.started", launch=2, resumed=True, torch="2.13.0", uri="s3://bucket/mnist"),
            event(1, "generation.started", 3, world_size=3, nodes=1, reason="resume"),
            event(2, "training.started", 3, step=61, restored_from="s", steps=230, device="cpu"),
        ]
    )
    assert [(line.label, line.text) for line in lines] == [
        ("resume", "mnist 20261120-100000-4f2a, launch 2, torch 2.13.0, snapshots in s3://bucket/mnist"),
        ("workers", "3 workers on 1 node"),
        ("training", "from the snapshot of step 61, 230 steps in all on cpu"),
    ]


def test_the_best_is_told_where_the_last_evaluation_measured_nothing() -> None:
    """A set with a step of its own need not have metrics; the set with the best value was measured before."""
    lines = told(
        [
            {**evaluation(1, 3, 0.5, 0.5), "eval": {"val.accuracy": 0.5}, "best_of": "val.accuracy"},
            {**evaluation(2, 4, 0.5, 0.5), "eval": {}, "best_of": "val.accuracy"},
            event(3, "run.finished", step=4, restarts=0, durations=DURATIONS),
        ]
    )
    assert lines[-1].text == "(best val.accuracy 0.5000), 4 steps, 0 restarts"


def test_going_on_from_memory_is_said() -> None:
    """After a failure with the memory tier: from memory, at which step, and what is lost."""
    lines = told(
        [
            event(1, "training.started", 1, step=0, restored_from=None, from_memory=False, steps=230),
            event(2, "worker.failed", 1, rank=1, error="killed by SIGKILL", **{"class": "crash"}),
            event(3, "training.started", 2, step=61, restored_from="s", from_memory=True, steps=230),
        ]
    )
    assert (lines[-1].label, lines[-1].text) == ("restored", "from memory at step 61, no step is lost")


def test_state_that_is_left_out_is_told() -> None:
    """A dataset with state of its own is named, with what snapshots do hold of it."""
    (line,) = told([event(1, "state.left_out", name="dataset", type="own.Stream")])
    assert (line.label, line.text) == (
        "left out",
        "the dataset (own.Stream) has a state_dict, which snapshots do not hold: they keep its order and position",
    )


def test_what_a_loop_of_a_script_left_out_or_reads_itself_is_told_in_its_words() -> None:
    """There is no --deep-step for scripts: `keep` is what helps."""
    lines = told(
        [
            event(1, "script.started", script="train.py", seconds_since_failure=None),
            event(2, "state.left_out", name="loader", type="own.Loader", help="run.keep(loader=loader)"),
            event(2, "state.left_out", name="dataset", type="own.Stream"),
            event(3, "data.own", kept=[]),
            event(4, "data.own", kept=["loader"]),
            event(5, "state.left_out", name="model.seen", type="a number"),
        ]
    )
    assert "snapshots.ignore" in lines[5].text
    assert "--deep-step" not in lines[5].text
    assert lines[1].text == "no snapshot holds loader, a own.Loader: run.keep(loader=loader)"
    assert "None" not in lines[2].text
    assert ["warning", "note"] == [line.symbol for line in lines[3:5]]
    assert ("with the state of loader",) == lines[4].more


def test_a_script_that_runs_again_is_not_said_to_go_on() -> None:
    """Only a step of it tells that; one that tells none began anew, as far as is known."""
    began = {"script": "train.py"}
    failed = event(2, "worker.failed", rank=0, error="killed by SIGKILL", exit_code=-9)
    again = event(3, "script.started", **began, seconds_since_failure=0.5)
    anew = told([event(1, "script.started", **began), failed, again, event(3, "script.began_anew", **began)])
    assert ["script", "worker killed", "started again", "no steps told"] == [line.label for line in anew]
    assert anew[2].text == "train.py, 0.50 s after the failure"
    assert "it trains on if it loads a checkpoint of its own, else it began anew" in anew[3].text
    assert "good" not in {line.tone for line in anew}
    stepped = told([failed, again, event(4, "training.first_step", 2, step=5, seconds_since_failure=1.5)])
    assert (stepped[-1].label, stepped[-1].text) == ("resuming", "step 5 done 1.5 s after the failure")


def test_an_evaluation_of_training_data_is_told() -> None:
    """How many samples, of how many that were looked at, one of them, and what to do if it is meant."""
    facts = {"found": 9, "looked_up": 10, "compared": 500, "samples": 60000, "pair": [3, 71]}
    (line,) = told([event(1, "overlap.found", **facts)])
    assert (line.symbol, line.label, line.text) == (
        "warning",
        "overlap",
        "9 of 10 evaluation samples looked up are in the training data (500 of its 60,000 looked at): number 3 is training sample 71",
    )
    assert "metrics are partly of what was trained on; if that is meant: evaluation.overlap" in line.more[0]
    (line,) = told([event(1, "overlap.found", found=10, looked_up=10, compared=50, samples=50, pair=None)])
    assert "metrics are of what was trained on" in line.more[0]
    (line,) = told([event(1, "overlap.found", found=9, looked_up=10, compared=50, samples=50, pair=None)])
    assert line.text == "9 of 10 evaluation samples looked up are in the training data"


def test_samples_that_vary_or_were_not_looked_into_are_told() -> None:
    """Which sample, where in it, and what it is drawn with."""
    facts = {"name": "train", "sample": 3, "type": "shop.Pictures"}
    (line,) = told(
        [event(1, "dataset.varies", **facts, parts=["[0]: float32 (3,)"], generators=["dataset.rng"])]
    )
    assert (line.symbol, line.label) == ("warning", "data varies")
    assert (
        "train: sample 3 of shop.Pictures is not the same when it is read twice under one seed" in line.text
    )
    assert "(in [0]: float32 (3,))" in line.text
    assert "(dataset.rng)" in line.more[0]
    (line,) = told([event(1, "dataset.unseen", name="train", types=["function"])])
    assert line.text.startswith("train: its samples hold function, which cannot be looked into")


def test_a_store_in_trouble_is_said() -> None:
    """What failed and how, that it is tried again, and that nothing is lost by it."""
    error = "ConnectionResetError: reset by peer"
    about = {"operation": "write snapshots/x", "error": error, "attempt": 3, "pause_s": 1.5}
    (line,) = told([event(1, "store.trouble", **about)])
    assert (line.label, line.text, line.more) == (
        "store",
        "write snapshots/x: ConnectionResetError: reset by peer",
        ("try 3; the next in 1.5 s; training continues",),
    )


def test_short_memory_is_said() -> None:
    """One staging buffer instead of two: what that means, and why."""
    (line,) = told([event(1, "staging.single", reason="the limit of 9 bytes allows no more")])
    assert (line.label, line.text) == (
        "short of memory",
        "each snapshot waits until the one before is written: the limit of 9 bytes allows no more",
    )


def test_a_new_world_size_without_a_failure_is_no_restart() -> None:
    """A group formed after a drain or a join is called a new group and says nothing of restarts."""
    lines = told(
        [
            event(1, "generation.started", 1, world_size=1, nodes=1),
            event(2, "generation.started", 2, world_size=2, nodes=2),
        ]
    )
    assert (lines[1].label, lines[1].text) == ("new group", "2 workers on 2 nodes, generation 2")


def test_other_data_is_said_again() -> None:
    """Each generation opens the data; only the first time, or other data, is news."""
    opened = [event(i, "dataset.opened", name="train", samples=5, fingerprint=f) for i, f in enumerate("aab")]
    lines = told(opened)
    assert [line.text for line in lines] == [
        "train: 5 samples, fingerprint a",
        "train: 5 samples, fingerprint b",
    ]


def test_groups_of_parameters_are_told_once() -> None:
    """With their sizes and options; each generation makes them anew, and only others are news."""
    norms = {"name": "norms", "tensors": 2, "parameters": 16, "args": {"weight_decay": 0.0}}
    groups = [norms, {"name": "rest", "tensors": 1, "parameters": 1200, "args": {}}]
    lines = told([event(number, "parameters.grouped", groups=groups) for number in range(2)])
    assert [line.text for line in lines] == [
        "norms: 2 tensors, 16 numbers, weight_decay 0.0 / rest: 1 tensor, 1,200 numbers"
    ]


def test_data_shards_are_told_by_their_number() -> None:
    """Nobody knows their length; where one is read again, the line says how far that is."""
    opened = event(1, "dataset.opened", name="train", samples=None, shards=16, fingerprint="ab", source="x")
    passed = event(2, "dataset.passed", shard=3, samples=120000)
    assert [line.text for line in told([opened, passed])] == [
        "train: 16 data shards of x, fingerprint ab",
        "shard 3: 120,000 samples read again",
    ]


@pytest.mark.parametrize("name", [name for name in events.EVENTS if line_of({"event": name}) is not None])
def test_every_warning_and_note_has_a_line(name: str) -> None:
    """Events that need no context give a line even when fields are missing."""
    (line,) = told([event(1, name)])
    assert line.label
    assert line.text


def test_the_fields_of_a_template_are_those_of_its_event() -> None:
    """Else the line would say `None`."""
    templates = [(kind, kind.line) for kind in events.EVENTS.values() if kind.line is not None]
    for kind, template in templates:
        of_line = {*kind.fields, *events.COMMON_FIELDS, *events.WORKER_FIELDS}
        parsed = [part for text in (template.text, *template.more) for part in Formatter().parse(text)]
        assert {name for _, name, _, _ in parsed if name is not None} <= of_line, event


def test_a_template_says_how_its_fields_are_shown() -> None:
    """As a span of time, a number, a count, a list, so many of something; braces in a field are a field's own."""
    lines = [
        line_of({"event": "store.trouble", "operation": "{x}", "error": "e", "attempt": 2, "pause_s": 0.5}),
        line_of({"event": "loss.unused", "keys": ["a", "b"]}),
        line_of({"event": "node.awaited", "present": 1, "least": 2}),
        line_of({"event": "loss.skipped", "step": 3, "loss": "nan"}),
    ]
    assert [(line.text, line.more) for line in lines if line is not None] == [
        ("{x}: e", ("try 2; the next in 0.50 s; training continues",)),
        ("the step's dict also holds a, b, which nobody reads", ()),
        ("1 of at least 2 nodes ready", ()),
        ("step 3: loss nan; the weights are left alone", ()),
    ]


def test_a_long_traceback_keeps_its_end() -> None:
    """The error itself is never cut off, and a traceback without own frames stays whole."""
    long = "Traceback:\n" + '  File "/p/a.py", line 1, in f\n    f()\n' * 100 + "RecursionError: deep"
    assert len(user_frames(long)) == LONGEST_QUOTE
    assert user_frames(long)[-1] == "RecursionError: deep"
    theirs = 'Traceback:\n  File "/v/site-packages/x.py", line 1, in f\n    f()\nValueError: x'
    assert user_frames(theirs) == tuple(theirs.splitlines())


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
RECORDS = {
    name: st.fixed_dictionaries(
        {"event": st.just(name)},
        optional=dict.fromkeys([*event.fields, "timestamp", "step", "generation"], JSON),
    )
    for name, event in events.EVENTS.items()
}


@settings(max_examples=30, deadline=None)
@example([{"event": "loop.changed", "changes": True}, {"event": "state.put_back", "names": 1}])
@example([{"event": "options.changed", "options": [{"option": "lr", "part": []}]}])
@given(st.lists(st.sampled_from(sorted(RECORDS)).flatmap(RECORDS.__getitem__), max_size=6))
def test_no_record_whatsoever_breaks_the_story(records: list[dict[str, Any]]) -> None:
    """The console must never take a run down, so any JSON in any field gives a line or none."""
    narrator = Told()
    for record in records:
        line = narrator.event(json.loads(json.dumps(record)))
        assert line is None or line.label
        narrator.metrics(record)


def test_steps_are_remembered_and_get_no_line() -> None:
    """A step is progress, not news."""
    narrator = Told()
    assert narrator.metrics(step(1, 7)) is None
    line = narrator.event(event(2, "worker.failed", rank=1, error="killed by SIGKILL"))
    assert line is not None
    assert line.text == "rank 1 by SIGKILL, after step 7"
    assert narrator.metrics(evaluation(1, 7, 0.5, 0.5)) is not None


def test_a_best_value_of_another_evaluation_is_told() -> None:
    """The value that counts no more is named; the next evaluation is the best one of its kind."""
    lines = told(
        [
            event(1, "best.reset", best=0.97, measured_by={}, now={}),
            event(2, "evaluation", epoch=3, eval={"loss": 0.5}, best=0.5),
        ]
    )
    assert "looked for anew (it was 0.9700): another evaluation measured it" == lines[0].text


def test_an_evaluation_says_whose_metrics_it_holds() -> None:
    """The average's have its name, and stand at the end as well; the raw weights' follow where both were measured."""
    narrator = Told()
    measured = evaluation(1, 20, 0.9, 0.9) | {"weights": "ema", "eval_raw": {"loss": 0.3, "accuracy": 0.8}}
    line = narrator.metrics(measured)
    assert line is not None
    assert line.text == (
        "epoch 1, step 20: ema: accuracy 0.9000, loss 0.1000 (best); raw: accuracy 0.8000, loss 0.3000"
    )
    finished = narrator.event(event(2, "run.finished", step=20, seconds=2.0, restarts=0))
    assert finished is not None
    assert finished.text.startswith("ema: accuracy 0.9000, loss 0.1000, ")


@pytest.mark.parametrize(("number", "epoch"), [(19, 1), (20, 1), (21, 2)])
def test_steps_and_evaluations_are_of_the_same_epoch(number: int, epoch: int) -> None:
    """A step that ends a pass is of that pass, whether it was trained or evaluated."""
    assert epoch_of(step(1, number)) == epoch_of(evaluation(1, number, 0.9, 0.9)) == epoch


@pytest.mark.parametrize(
    ("lr", "text"),
    [
        (1e-3, "1.0e-03"),
        ({"decay": 1e-3, "bias": 2e-3}, "decay 1.0e-03, bias 2.0e-03"),
        ({"decay": 1e-3, "bias": 1e-3}, "1.0e-03"),
        ({str(n): n / 10 for n in range(1, 6)}, "1 1.0e-01, 2 2.0e-01, 3 3.0e-01 and 2 more"),
        (None, ""),
        ({}, ""),
    ],
)
def test_learning_rates_have_their_groups_names(lr: Any, text: str) -> None:
    """Where they differ; one number says it all where they do not."""
    assert rates_of({"lr": lr}) == text


def test_a_run_of_several_launches_tells_the_time_of_all() -> None:
    """The steps are those of all launches, and so is the time; this launch's stands beside it."""
    own = {"starting": 2.0, "training": 3.0, "evaluating": 0.0, "restarting": 0.0, "ending": 0.5}
    of_run = {**own, "training": 70.0, "evaluating": 20.0}
    finished = {"step": 90, "seconds": 5.5, "durations": own, "restarts": 0}
    lines = told(
        [event(1, "run.started", launch=3), event(7, "run.finished", **finished, run_durations=of_run)]
    )
    assert lines[-1].more == (
        "this launch took 5.5 s: starting 2.0 s, training 3.0 s, ending 0.50 s",
        "all 3 launches took 1 min 32 s: starting 2.0 s, training 1 min 10 s, evaluating 20.0 s",
    )


def test_an_earlier_versions_end_can_be_read() -> None:
    """It knew no parts; nor does a launch whose earlier ones nobody knows tell their time."""
    (line,) = told([event(6, "run.finished", step=60, seconds=6.6, restarts=0)])
    assert (line.text, line.more) == ("60 steps, 0 restarts", ("took 6.6 s",))


def test_what_never_happened_on_cue_is_told() -> None:
    """Nodes that were to come or go after the end; and a batch that swallows the data."""
    scale, batch = told(
        [
            event(6, "scale.not_reached", changes=["2@40s", "1!@60s"], seconds=31.2),
            event(6, "dataset.smaller_than_batch", samples=400, batch=100_000, steps=1),
        ]
    )
    assert scale.text == "2@40s, 1!@60s: not reached, training ended after 31.2 s"
    assert batch.text == (
        "one batch of 100,000 is more than the whole dataset, which has 400 samples: training is 1 step in all"
    )


def test_last_words_of_a_worker_that_died_by_itself_are_quoted() -> None:
    """After its stack; of one that somebody killed they say nothing and are left out."""
    said = ["terminate called", "  what():  sizes differ"]

    def quoted(code: int) -> tuple[str, ...]:
        fields = {"rank": 0, "exit_code": code, "error": "killed by a signal", "stderr": said}
        line = Told().event(event(1, "worker.failed", **fields))
        assert line is not None
        return line.quote

    assert ("standard error ended with:", "  terminate called", "    what():  sizes differ") == quoted(-6)
    assert () == quoted(-9)


@pytest.mark.parametrize(
    ("begin", "text"),
    [
        (50, "after step 64, to resume from step 50 (SIGTERM)"),
        (64, "after step 64 (SIGTERM)"),
        (0, "after step 64, to resume from the beginning (SIGTERM)"),
        (None, "after step 64 (SIGTERM)"),
    ],
)
def test_interrupted_run_says_from_where_it_will_go_on(begin: int | None, text: str) -> None:
    """The last step is told, and the snapshot's where that is another; an earlier version did not say."""
    line = Told().event(event(1, "run.interrupted", reason="SIGTERM", step=64, goes_on_from=begin))

    assert line is not None
    assert text == line.text


@pytest.mark.parametrize(("kind", "says_resume"), [("crash", True), ("taken_over", False)])
def test_a_run_that_failed_names_what_to_type_next(kind: str, *, says_resume: bool) -> None:
    """What went wrong; and how to continue, unless another launch has the run."""
    narrator = Told("runs/mnist/x")
    line = narrator.event(event(1, "run.failed", class_=kind, error="E", step=3, seconds=1.0))
    assert line is not None
    told, place = line.more
    assert told.startswith(f"elasticflow why {RUN_ID}")
    assert (f"elasticflow resume {RUN_ID}" in told) == says_resume
    assert place == "runs/mnist/x"


def test_a_warning_is_told_once_and_the_end_counts_the_kinds() -> None:
    """Its repetitions are counted, by place; the last line says where all of them stand."""

    def warned(when: float, place: str, times: int, number: int = 1) -> dict[str, Any]:
        words = {"category": "UserWarning", "place": place, "text": "odd", "times": times}
        return event(when, events.WORKER_WARNED, number, node="n0", rank=1, in_generation=number, **words)

    story = [warned(1, "a.py:1", 1), warned(2, "a.py:1", 9), warned(3, "a.py:2", 1, 2)]
    assert ["a.py:1: UserWarning: odd (rank 1)", "a.py:2: UserWarning: odd (rank 1)"] == [
        line.text for line in told(story)
    ]
    *_, finished = told(
        [*story, event(4, events.GENERATION_STARTED, 3), event(5, events.RUN_FINISHED, 3, step=1)]
    )
    assert f"2 warnings: elasticflow logs {RUN_ID} --level warning --generation 2" in finished.more
    assert ["a.py:1: UserWarning: odd (rank 1, 10 times)", "a.py:2: UserWarning: odd (rank 1)"] == [
        each.in_words for each in RunHistory.of(story).warnings.values()
    ]


def test_the_best_value_has_the_name_of_its_metric() -> None:
    """Of several metrics it is said which one is the best; and at the end, if it is another evaluation's."""
    first, second = (
        {**evaluation(at, at, value, 0.9), "best_of": "accuracy"} for at, value in ((1, 0.9), (2, 0.8))
    )
    lines = told([first, second, event(4, events.RUN_FINISHED, 1, step=2)])
    assert lines[0].text.endswith("accuracy 0.9000, loss 0.1000 (best accuracy)")
    assert lines[-1].text.startswith("accuracy 0.8000, loss 0.1000 (best accuracy 0.9000), ")
