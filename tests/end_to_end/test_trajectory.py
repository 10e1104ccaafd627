"""One trajectory whatever happens: the bits of `exact`, and every sample once; tests/measured/campaign has the long form."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elasticflow import events
from elasticflow.system import fault_injection
from tests.end_to_end.disturbed import Outcome, Series
from tests.end_to_end.trajectory_jobs import count, write_jobs

if TYPE_CHECKING:
    from tests.end_to_end.harness import Project

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
    faults = "training.step=kill@7 rank=2 generation=1, training.step=stop@7 rank=0 generation=2"
    three = ("nodes.nproc_per_node=3", loaders, *mixed)
    series = Series(project, "disturbed", *three, job="transformer", **{fault_injection.VARIABLE: faults})
    series.running.leave_from_halt(0, generation=2)
    again = ("nodes.nproc_per_node=2", loaders, *mixed)
    series.resume(*(f"--set={text}" for text in again), "--accept-drift")
    series.finish(expected, outcome)
    assert [] == outcome.problems
    assert ["mixed"] == list({event["kind"] for event in series.named(events.ORDER_DECLARED)})


def test_every_sample_once_whatever_a_launch_changes(project: Project) -> None:
    """Two workers, all killed; one with another batch size, drained; three with loader processes, one killed.

    The parameter that counts, the schedule and the ledger agree at every snapshot.
    """
    write_jobs(project)
    faults = (
        "training.step=stop@8 rank=0 generation=1, training.step=stop@6 rank=0 generation=2, "
        "training.step=kill@3 rank=2 generation=3"
    )
    micro, outcome = "dataset.micro_batch_size=3", Outcome("", "")
    series = Series(project, "counted", micro, job="counting", **{fault_injection.VARIABLE: faults})
    series.running.halted(0, generation=1)
    series.kill("everything")
    series.resume("--set=nodes.nproc_per_node=1", "--set=dataset.global_batch_size=10", "--accept-drift")
    series.running.leave_from_halt(0, generation=2)
    three = ("nodes.nproc_per_node=3", "dataset.global_batch_size=21", "dataset.num_workers=2")
    series.resume(*(f"--set={text}" for text in three), "--accept-drift")
    series.finish(None, outcome)
    assert ["crash"] == [each["class"] for each in series.named(events.BUDGET_CHARGED)]
    assert 600 == count(series, "spill", [16, 10, 21], outcome)
    assert [] == outcome.problems
