from __future__ import annotations

from typing import Any, get_args

import pytest

from elasticflow.compiler.provenance.drift import Difference, compare
from elasticflow.jobfile.tables.job import Job
from elasticflow.protocol.key_weights import _WEIGHTS, Weight
from tests.compiler.jobs import make_job


def mixed(**changes: Any) -> dict[str, Any]:
    """Return a mixture of two sets, the second one with these keys."""
    sets = [{"entry": "pieces:a", "weight": 1.0}, {"entry": "pieces:b", "weight": 1.0, **changes}]
    return {"dataset__entry": None, "dataset__mix": sets}


MIXED = mixed()


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ({}, {"job__seed": 1}, ("job.seed", 0, 1, "corrupting")),
        ({}, {"model__args": {"width": 8}}, ("model.args.width", None, 8, "corrupting")),
        ({}, {"model__entry": "pieces:Other"}, ("model.entry", "pieces:Net", "pieces:Other", "corrupting")),
        ({}, {"optimizer__args": {"lr": 0.2}}, ("optimizer.args.lr", 0.1, 0.2, "trajectory")),
        (
            {},
            {"optimizer__entry": "torch.optim:Adam"},
            ("optimizer.entry", "torch.optim:SGD", "torch.optim:Adam", "corrupting"),
        ),
        (
            {"optimizer__groups": [{"ndim": 1, "args": {"lr": 0.2}}]},
            {"optimizer__groups": [{"ndim": 1, "args": {"lr": 0.3}}]},
            ("optimizer.groups.0.args.lr", 0.2, 0.3, "trajectory"),
        ),
        (
            {"optimizer__groups": [{"ndim": 1}]},
            {"optimizer__groups": [{"ndim": 2}]},
            ("optimizer.groups.0.ndim", 1, 2, "corrupting"),
        ),
        ({}, {"optimizer__groups": [{"match": "*"}]}, ("optimizer.groups.0.match", None, "*", "corrupting")),
        (
            {"optimizer__groups": [{"ndim": 1, "name": "a"}]},
            {"optimizer__groups": [{"ndim": 1, "name": "b"}]},
            ("optimizer.groups.0.name", "a", "b", "harmless"),
        ),
        ({}, {"env__A": "1"}, ("env.A", None, "1", "harmless")),
        (
            {"train__consistency": "exact", "env__A": "1"},
            {"train__consistency": "exact", "env__A": "2"},
            ("env.A", "1", "2", "trajectory"),
        ),
        ({}, {"dataset__global_batch_size": 32}, ("dataset.global_batch_size", 64, 32, "trajectory")),
        ({}, {"dataset__args": {"root": "b"}}, ("dataset.args.root", None, "b", "trajectory")),
        (
            {"dataset__sampler": {"balance_by": "a"}},
            {"dataset__sampler": {"balance_by": "b"}},
            ("dataset.sampler.balance_by", "a", "b", "corrupting"),
        ),
        (
            {"dataset__sampler": {"bucket_by": "a"}},
            {"dataset__sampler": {"bucket_by": "a"}, "dataset__global_batch_size": 32},
            ("dataset.global_batch_size", 64, 32, "corrupting"),
        ),
        (
            {"dataset__collate": {"entry": "pieces:Padded", "args": {"padding": 0}}},
            {"dataset__collate": {"entry": "pieces:Padded", "args": {"padding": 1}}},
            ("dataset.collate.args.padding", 0, 1, "trajectory"),
        ),
        (
            {"evaluation__entry": "pieces:digits"},
            {"evaluation__entry": "pieces:digits", "evaluation__collate": "pieces:padded"},
            ("evaluation.collate", None, "pieces:padded", "harmless"),
        ),
        (MIXED, mixed(weight=2.0), ("dataset.mix.1.weight", 1.0, 2.0, "corrupting")),
        (MIXED, mixed(args={"n": 1}), ("dataset.mix.1.args.n", None, 1, "trajectory")),
        ({"dataset__shards": 4}, {"dataset__shards": 8}, ("dataset.shards", 4, 8, "corrupting")),
        ({}, {"dataset__micro_batch_size": 8}, ("dataset.micro_batch_size", None, 8, "harmless")),
        ({}, {"train__epochs": 3}, ("train.epochs", 2, 3, "harmless")),
        ({}, {"train__time_limit": "2 h"}, ("train.time_limit", None, "2 h", "harmless")),
        ({}, {"model__flops_per_sample": 1e9}, ("model.flops_per_sample", None, 1e9, "harmless")),
        ({}, {"hooks__on_step": "m:f"}, ("hooks.on_step", None, "m:f", "harmless")),
        ({}, {"logging__grad_norm": True}, ("logging.grad_norm", None, True, "harmless")),
        ({}, {"train__ema": 0.9}, ("train.ema", None, 0.9, "corrupting")),
        ({"train__ema": 0.9}, {"train__ema": 0.8}, ("train.ema", 0.9, 0.8, "trajectory")),
        (
            {"evaluation__entry": "pieces:digits", "train__ema": 0.9},
            {"evaluation__entry": "pieces:digits", "train__ema": 0.9, "evaluation__weights": "raw"},
            ("evaluation.weights", None, "raw", "harmless"),
        ),
        ({}, {"train__precision": "bf16"}, ("train.precision", "fp32", "bf16", "trajectory")),
        ({}, {"train__precision": "fp16"}, ("train.precision", "fp32", "fp16", "corrupting")),
        ({}, {"nodes__max": 9}, ("nodes.max", 1, 9, "harmless")),
        ({"parallel__shard": 2}, {"parallel__shard": 4}, ("parallel.shard", 2, 4, "harmless")),
        ({}, {"restarts__budget": 9}, ("restarts.budget", 3, 9, "harmless")),
        ({}, {"snapshots__every": "5 min"}, ("snapshots.every", ["10 min", "1 epoch"], "5 min", "harmless")),
        ({}, {"snapshots__uri": "s3://b/x"}, ("snapshots.uri", None, "s3://b/x", "trajectory")),
        (
            {},
            {"snapshots__include": {"queue": "pieces:queue"}},
            ("snapshots.include.queue", None, "pieces:queue", "corrupting"),
        ),
        (
            {"snapshots__include": {"queue": "pieces:queue"}},
            {},
            ("snapshots.include.queue", "pieces:queue", None, "corrupting"),
        ),
        ({}, {"logging__level": "debug"}, ("logging.level", "info", "debug", "harmless")),
        ({}, {"torchrun__monitor_interval": 1.0}, ("torchrun.monitor_interval", 0.1, 1.0, "harmless")),
    ],
)
def test_one_change(
    before: dict[str, Any], after: dict[str, Any], expected: tuple[str, Any, Any, Weight]
) -> None:
    """Each kind of change has the weight that its effect on a run deserves."""
    (found,) = compare(make_job(**before), make_job(**after))
    assert (found.key, found.old, found.new, found.weight) == expected
    assert found.reason


def test_a_schedule_that_comes_or_goes_changes_the_snapshots_parts() -> None:
    """One that was not there before has no state in the snapshots."""
    with_it = make_job(lr_scheduler__entry="torch.optim.lr_scheduler:ConstantLR")
    for old, new in ((make_job(), with_it), (with_it, make_job())):
        weights = {difference.key: difference.weight for difference in compare(old, new)}
        assert weights["lr_scheduler.entry"] == "corrupting"


def test_no_change_of_an_evaluation_needs_consent() -> None:
    """No weight depends on it, whether it comes, goes or measures something else on other data; `best` is told."""
    entry, accuracy = {"evaluation__entry": "pieces:digits"}, {"accuracy": "pieces:accuracy"}
    plain = make_job(**entry, evaluation__metrics=accuracy, evaluation__best="max accuracy")
    others = [
        make_job(),
        make_job(evaluation__entry="pieces:others"),
        make_job(**entry, evaluation__args={"split": "b"}, evaluation__every="3 steps"),
        make_job(**entry, evaluation__metrics={"accuracy": "pieces:other"}, evaluation__best="max accuracy"),
        make_job(**entry, evaluation__best="min loss"),
    ]
    for other in others:
        for old, new in ((plain, other), (other, plain)):
            found = compare(old, new)
            assert {"harmless"} == {difference.weight for difference in found}
            assert any("looked for anew" in difference.reason for difference in found)


def test_an_evaluation_that_the_learning_rate_goes_by_needs_consent() -> None:
    """What is measured, and when, moves the weights then; other sets, and which value is best, do not."""
    table = {"entry": "pieces:digits", "args": {"split": "a"}, "every": "5 steps"}

    def job(val: dict[str, Any], **more: Any) -> Any:
        schedule = {
            "lr_scheduler__entry": "pieces:plateau",
            "lr_scheduler__interval": "evaluation",
            "lr_scheduler__metric": "val.loss",
        }
        return make_job(**schedule, evaluation__val={**table, **val}, evaluation__other={**table, **more})

    for change in ({"every": "6 steps"}, {"args": {"split": "b"}}, {"samples": 10}):
        assert {"trajectory"} == {each.weight for each in compare(job({}), job(change))}
    for same in (job({"best": "min loss"}), job({}, every="6 steps")):
        assert {"harmless"} == {each.weight for each in compare(job({}), same)}
    by_count = make_job(lr_scheduler__entry="pieces:plateau")
    weights = {each.key: each.weight for each in compare(job({}), by_count)}
    assert weights["lr_scheduler.metric"] == "corrupting"


def test_a_schedule_and_the_evaluation_that_it_goes_by_may_come_together() -> None:
    """The job had neither before."""
    schedule = {"lr_scheduler__entry": "pieces:plateau", "lr_scheduler__interval": "evaluation"}
    new = make_job(**schedule, lr_scheduler__metric="loss", evaluation__entry="pieces:digits")
    assert "evaluation.entry" in {each.key for each in compare(make_job(), new)}


def test_the_same_job_has_no_differences() -> None:
    """Nothing differs from itself."""
    assert compare(make_job(), make_job()) == []


def test_threads_matter_where_bits_are_promised() -> None:
    """Another number of threads is rounding in batch mode, and other bits in exact mode."""
    for mode, weight in (("batch", "harmless"), ("exact", "trajectory")):
        old, new = (make_job(train__consistency=mode, train__threads=threads) for threads in (1, 2))
        assert [("train.threads", weight)] == [(d.key, d.weight) for d in compare(old, new)]


def test_the_optimizers_device_matters_where_bits_are_promised() -> None:
    """A GPU and a CPU may round differently."""
    for mode, weight in (("batch", "harmless"), ("exact", "trajectory")):
        jobs = (
            make_job(train__consistency=mode, parallel__shard=2, parallel__offload=each)
            for each in (None, "cpu")
        )
        assert [("parallel.offload", weight)] == [(d.key, d.weight) for d in compare(*jobs)]


def test_true_is_not_one() -> None:
    """A value that became another type of the same size is a difference."""
    old, new = make_job(model__args={"bias": True}), make_job(model__args={"bias": 1})
    assert [(d.key, d.old, d.new) for d in compare(old, new)] == [("model.args.bias", True, 1)]


def test_the_weights_name_keys_that_exist() -> None:
    """Every entry of the table is a key of the job file."""
    for key in _WEIGHTS:
        model: Any = Job
        for name in key.split("."):
            annotation = model.model_fields[name].annotation
            model = next(
                (a for a in (annotation, *get_args(annotation)) if hasattr(a, "model_fields")), annotation
            )


def test_a_difference_is_a_value() -> None:
    """Differences compare by value."""
    assert Difference("a", 1, 2, "harmless", "why") == Difference("a", 1, 2, "harmless", "why")
