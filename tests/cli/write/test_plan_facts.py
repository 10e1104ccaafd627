"""How samples are drawn, as `plan` says it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from elasticflow.cli.write.deep_options import report_text
from elasticflow.cli.write.plan_facts import drawn_in_words, facts
from elasticflow.cli.write.plan_view import figures_table
from elasticflow.compiler.plan.batch_split import worlds
from elasticflow.compiler.plan.forecast import Knowledge, Known, KnownSets, forecast
from elasticflow.compiler.plan.launch_plan import plan_job
from elasticflow.deep.check import DeepReport
from elasticflow.deep.messages import Facts
from elasticflow.observe.terminal.formats import order_in_words
from tests.compiler.jobs import make_job


def mixture(*weights: float | None, **changes: Any) -> Any:
    """Return a job with so many sets."""
    sets = [
        {"entry": f"pieces:set{number}", **({} if weight is None else {"weight": weight})}
        for number, weight in enumerate(weights)
    ]
    return make_job(dataset__entry=None, dataset__mix=sets, **changes)


def test_nothing_is_said_of_the_order_of_every_job() -> None:
    """Each sample once per epoch, shuffled."""
    assert drawn_in_words(make_job(), None) is None


@pytest.mark.parametrize(
    ("sampler", "words"),
    [
        ({"weights": "m:w"}, "as often as m:w says; an epoch is as many draws as there are samples"),
        (
            {"balance_by": "label", "draws": 1000},
            "each class of label equally often; an epoch is 1,000 draws",
        ),
        ({"bucket_by": "n"}, "in batches of similar length (n), shuffled; each sample once per epoch"),
    ],
)
def test_samplers_are_told(sampler: dict[str, Any], words: str) -> None:
    """What is drawn, and what an epoch is."""
    assert words in (drawn_in_words(make_job(dataset__sampler=sampler), None) or "")


def test_mixtures_are_told_with_their_shares() -> None:
    """From the weights; by size once the sizes are known, with how often a sample comes."""
    assert (drawn_in_words(mixture(1.0, 3.0), None) or "").startswith(
        "25.0% pieces:set0, 75.0% pieces:set1; an epoch"
    )
    by_size = mixture(None, None, dataset__sampler={"temperature": 2.0})
    assert "by their sizes at temperature 2: shares are known with --deep" in (
        drawn_in_words(by_size, None) or ""
    )
    known = KnownSets((100, 300), (0.5, 0.5), "--deep")
    assert (drawn_in_words(by_size, known) or "").startswith(
        "50.0% pieces:set0 (100 samples, each 2 times an epoch), 50.0% pieces:set1 (300 samples, each 0.667 times an epoch) (--deep)"
    )


def test_draws_make_the_steps_of_an_epoch() -> None:
    """Also where nobody knows the length of the data."""
    job = make_job(
        dataset__sampler={"balance_by": "label", "draws": 640}, dataset__global_batch_size=64, train__epochs=3
    )
    assert forecast(job, Knowledge()).steps == 30


def test_a_run_tells_its_order() -> None:
    """In the words of the terminal."""
    facts = {"sets": [30, 10], "shares": [1, 3]}
    assert order_in_words({"kind": "mixed", "samples": 40, "facts": facts}) == (
        "mixture of 25.0% of 30 / 75.0% of 10 samples, 40 samples an epoch"
    )
    assert (
        order_in_words({"kind": "weighted", "samples": 9})
        == "drawn by weights, with replacement, 9 samples an epoch"
    )


BLOCKS = "gathered block by block (the elements of its longest ModuleList)"


def sharded(shard: int | str, low: int, high: int, per_node: int | str, **more: Any) -> Any:
    """Return a job whose model is sharded."""
    nodes = {"nodes__min": low, "nodes__max": high, "nodes__nproc_per_node": per_node}
    return make_job(
        **nodes, parallel__shard=shard, **{f"parallel__{key}": value for key, value in more.items()}
    )


@pytest.mark.parametrize(
    ("job", "words"),
    [
        (
            sharded(2, 1, 1, 4),
            f"a copy of the model on 2 workers, {BLOCKS}",
        ),
        (
            sharded(4, 1, 5, 2, wrap=["gpt:Block"]),
            "a copy of the model on 4 workers, gathered block by block (gpt:Block); trains on 2 or 4 nodes; with other numbers the rest wait as spares",
        ),
        (
            sharded("node", 1, 2, "auto"),
            f"a copy of the model on the workers of each node, {BLOCKS}",
        ),
        (
            sharded(2, 1, 2, "auto"),
            f"a copy of the model on 2 workers, {BLOCKS}; trains on numbers of nodes whose workers it divides; with others the rest wait as spares",
        ),
        (
            sharded(2, 1, 1, 4, offload="cpu"),
            f"a copy of the model on 2 workers, {BLOCKS}; its parts are in the CPU's memory, the optimizer moves there; workers without an accelerator leave that out",
        ),
    ],
)
def test_shards_are_told_with_the_nodes_that_can_train(job: Any, words: str) -> None:
    """A copy that spans two nodes leaves odd numbers of nodes a spare."""
    plan = plan_job(job, project_root=Path("/p"), job_files=[])
    told = dict[str, str]()
    name = ""
    for key, text in facts(plan, job, Knowledge(), None):
        name = key or name
        told[name] = f"{told[name]}; {text}" if name in told else text
    assert told["sharded"] == words


def test_worlds_are_those_that_can_train() -> None:
    """The table of `plan` has no row for a number of nodes that never trains."""
    assert [row.nodes for row in worlds(sharded(4, 1, 5, 2))] == [2, 4]


def test_memory_of_a_worker_is_told_at_each_degree() -> None:
    """Four numbers for each parameter: itself, its gradient and two of the optimizer."""
    job = sharded(2, 1, 1, 4)
    known = Knowledge(parameters=Known(10**6, "--deep"), snapshot_bytes=Known(12 * 10**6, "--deep"))
    lines = [" ".join(line.split()) for line in figures_table(job, known, forecast(job, known), None)]
    assert lines[-4:] == [
        "a worker at 1 16.0 MB 4.0 MB parameters, 4.0 MB gradients, 8.0 MB the optimizer's and other state",
        "a worker at 2 8.0 MB 2.0 MB parameters, 2.0 MB gradients, 4.0 MB the optimizer's and other state",
        "a worker at 4 4.0 MB 1.0 MB parameters, 1.0 MB gradients, 2.0 MB the optimizer's and other state",
        "staging 3.0 MB of each of 4 workers, for a snapshot",
    ]
    block = known._replace(block_bytes=Known(10**5, "--deep"))
    lines = [" ".join(line.split()) for line in figures_table(job, block, forecast(job, block), None)]
    assert lines[-4].startswith("a worker at 1 16.0 MB 4.0 MB parameters")
    assert lines[-2] == (
        "a worker at 4 4.5 MB 1.0 MB parameters, 1.0 MB gradients, 2.0 MB the optimizer's and other state, 500.0 kB 5 blocks whole"
    )


def test_memory_of_an_offloaded_worker_is_told_for_its_device_and_for_the_cpu() -> None:
    """Blocks are gathered with one worker to a copy, too."""
    job = sharded(1, 1, 1, 1, offload="cpu")
    known = Knowledge(
        parameters=Known(10**6, ""), snapshot_bytes=Known(12 * 10**6, ""), block_bytes=Known(10**5, "")
    )
    lines = [" ".join(line.split()) for line in figures_table(job, known, forecast(job, known), None)]
    assert lines[-3:] == [
        "a worker's device at 1 4.5 MB 4.0 MB sums of gradients, 500.0 kB 5 blocks whole",
        "in the CPU's memory 16.0 MB 4.0 MB parameters, 4.0 MB gradients, 8.0 MB the optimizer's and other state",
        "staging 12.0 MB of each of 1 worker, for a snapshot",
    ]


def test_the_size_of_a_snapshot_is_about_what_a_run_writes() -> None:
    """The tensors' bytes are counted; names and offsets in the files come on top."""
    report = DeepReport((), Facts(samples=2000, snapshot_bytes=65_568), ())
    assert "2,000 samples; a snapshot is about 65.6 kB" == report_text(report)
