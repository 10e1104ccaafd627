"""Short form of the campaign of starts: kills while a launch begins, for real, the end as if there had been none."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.campaign import starts, tiny_job

if TYPE_CHECKING:
    from tests.campaign.tiny_job import Reference
    from tests.end_to_end.harness import Project


def test_no_kill_while_a_launch_starts_ends_the_run(project: Project, tiny_reference: Reference) -> None:
    """Agent, writer and fork server, one each at start, restart and resumption: the run goes on, and no bit changes.

    Three other pairs of victim and moment are part of the story in test_kills.py; all nine, of the campaign of starts.
    """
    tiny_job.write_standard(project)
    (kills,) = starts.plan(1, tiny_reference.start_s)
    starts.strike(project, kills, tiny_reference.found)

    assert [("agent", "start"), ("writer", "restart"), ("fork server", "resume")] == [
        (kill.victim, kill.moment) for kill in kills
    ]
    assert [] == [problem for kill in kills for problem in kill.problems]
