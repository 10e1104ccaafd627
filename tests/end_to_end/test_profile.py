"""`elasticflow profile` on a run that trains: traces of its steps, and the bits of a run that nobody looked at."""

from __future__ import annotations

import json
import os
import signal
from typing import TYPE_CHECKING

from elasticflow import events
from tests.end_to_end import tiny_job
from tests.end_to_end.harness import named, tensors

if TYPE_CHECKING:
    from tests.end_to_end.harness import Project
    from tests.end_to_end.tiny_job import Reference


def test_traces_while_it_trains_and_the_same_bits(project: Project, tiny_reference: Reference) -> None:
    """Both ranks trace three steps; then one is killed while it traces; the weights are those of a run without all that."""
    tiny_job.write_standard(project)
    traced = project.run("jobs/tiny.toml", "traced", job="tiny", TINY_PAUSE_S="0.05")
    traced.wait_for_step(3)

    done = project.call("profile", "traced", "--steps", "3", "--ranks", "all", "--format", "json")
    assert done.returncode == 0, done.stderr
    first, second = json.loads(done.stdout)
    assert (0, 1) == (first["rank"], second["rank"])
    assert first["first_step"] + 2 == first["last_step"]
    assert 3 == len(first["steps_us"])
    assert {"data", "forward", "backward", "exchange", "optimizer"} <= first["parts_us"].keys()
    assert "aten::addmm" in [operator["name"] for operator in first["operators"]]

    assert project.call("profile", "traced", "--steps", "1000", "--ranks", "1", "--no-wait").returncode == 0
    traced.wait_for("the second trace", lambda: len(named(traced.events(), events.PROFILE_STARTED)) > 2)
    os.kill(traced.pid_of(1), signal.SIGKILL)
    tiny_job.hurry(project)
    assert traced.end() == 0, traced.told()
    [failed] = named(traced.events(), events.PROFILE_FAILED)
    assert (2, 1, "its generation ended") == (failed["profile"], failed["rank"], failed["reason"])
    assert ["request.json"] == [path.name for path in (traced.run.profiles / "2").iterdir()]
    assert tiny_reference.found["bits"] == tensors(traced.run)
