"""One trajectory whatever happens: the bits of `exact`, and every sample once; the campaign beside has the long form."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elasticflow import events
from tests.end_to_end.disturbed import Outcome, Series
from tests.end_to_end.trajectory_jobs import Act, count, disturb, write_jobs

if TYPE_CHECKING:
    from tests.end_to_end.harness import Project

# Steps that nobody comes too late for.
SLOW = {"TRAJECTORY_PAUSE_S": "0.03"}


def test_killed_drained_and_resized_has_the_bits_of_one_undisturbed_worker(project: Project) -> None:
    """A transformer in bf16: three workers with loader processes, one killed; drained; two to the end."""
    write_jobs(project)
    loaders, outcome = "dataset.num_workers=2", Outcome("", "")
    alone = Series(project, "alone", "nodes.nproc_per_node=1", job="transformer")
    expected = alone.finish(None, outcome)
    series = Series(project, "disturbed", "nodes.nproc_per_node=3", loaders, job="transformer", **SLOW)
    disturb(series, [Act(7, "worker 2"), Act(14, "drain", ("nodes.nproc_per_node=2", loaders))], outcome)
    series.finish(expected, outcome)
    assert [] == outcome.problems


def test_every_sample_once_whatever_a_launch_changes(project: Project) -> None:
    """Two workers, all killed; one with another batch size, drained; three with loader processes, one killed.

    The parameter that counts, the schedule and the ledger agree at every snapshot.
    """
    write_jobs(project)
    acts = [
        Act(8, "everything", ("nodes.nproc_per_node=1", "dataset.global_batch_size=10")),
        Act(14, "drain", ("nodes.nproc_per_node=3", "dataset.global_batch_size=21", "dataset.num_workers=2")),
        Act(17, "worker 2"),
    ]
    series, outcome = (
        Series(project, "counted", "dataset.micro_batch_size=3", job="counting", **SLOW),
        Outcome("", ""),
    )
    disturb(series, acts, outcome)
    series.finish(None, outcome)
    assert 600 == count(series, "spill", [16, 10, 21], outcome)
    assert [] == outcome.problems


def test_a_mixture_has_the_bits_of_one_undisturbed_worker(project: Project) -> None:
    """Two sets, the smaller one gone through more often: three workers, one killed; drained; two to the end."""
    write_jobs(project)
    sets = "dataset.mix=[{ entry = 'trajectory_models:Images', weight = 0.7 }, { entry = 'trajectory_models:Few', weight = 0.3 }]"
    options, outcome = ("dataset.entry=", sets), Outcome("", "")
    alone = Series(project, "alone", "nodes.nproc_per_node=1", *options, job="mlp")
    expected = alone.finish(None, outcome)
    series = Series(project, "disturbed", "nodes.nproc_per_node=3", *options, job="mlp", **SLOW)
    again = ("nodes.nproc_per_node=2", *options)
    disturb(series, [Act(7, "worker 2"), Act(14, "drain", again)], outcome)
    series.finish(expected, outcome)
    assert [] == outcome.problems
    assert ["mixed"] == list({event["kind"] for event in series.named(events.ORDER_DECLARED)})
