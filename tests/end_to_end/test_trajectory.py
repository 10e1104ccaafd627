"""One trajectory whatever happens: the bits of `exact`, and every sample once; tests/measured/campaign has the long form."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elasticflow import events
from tests.end_to_end.disturbed import Outcome, Series
from tests.end_to_end.trajectory_jobs import Act, count, disturb, write_jobs

if TYPE_CHECKING:
    from tests.end_to_end.harness import Project

# Steps that nobody comes too late for.
SLOW = {"TRAJECTORY_PAUSE_S": "0.03"}
SETS_OF_DATA = ", ".join(
    f"{{ entry = 'trajectory_models:{name}', weight = {weight} }}"
    for name, weight in (("Images", 0.7), ("Few", 0.3))
)


def test_killed_drained_and_resized_has_the_bits_of_one_undisturbed_worker(project: Project) -> None:
    """A transformer in bf16 on two sets, the smaller one gone through more often.

    Three workers with loader processes, one killed; drained; two to the end.
    """
    write_jobs(project)
    mixed = ("dataset.entry=", f"dataset.mix=[{SETS_OF_DATA}]")
    loaders, outcome = "dataset.num_workers=2", Outcome("", "")
    alone = Series(project, "alone", "nodes.nproc_per_node=1", *mixed, job="transformer")
    expected = alone.finish(None, outcome)
    series = Series(
        project, "disturbed", "nodes.nproc_per_node=3", loaders, *mixed, job="transformer", **SLOW
    )
    again = ("nodes.nproc_per_node=2", loaders, *mixed)
    disturb(series, [Act(7, "worker 2"), Act(14, "drain", again)], outcome)
    series.finish(expected, outcome)
    assert [] == outcome.problems
    assert ["mixed"] == list({event["kind"] for event in series.named(events.ORDER_DECLARED)})


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
