"""`elasticflow verify --faults`: a run with faults on cue is the undisturbed one, bit for bit."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.end_to_end.harness import Project

PLAN = """
[[faults]]
step = 3
what = "kill"

[[faults]]
step = 6
what = "flip"
rank = 1

[[faults]]
step = 9  # replicas are compared behind a step: sooner, the kill would come before that
what = "corrupt-snapshot"
"""


def test_faults_change_no_bit(project: Project) -> None:
    """A killed worker, a flipped bit and a damaged snapshot: each is told with its class and what it cost."""
    project.write("plan.toml", PLAN)
    exact = ("--set=train.consistency=exact", "--set=train.virtual_shards=2")
    asked = (
        "verify",
        "jobs/mnist.toml",
        "--faults",
        "plan.toml",
        "--steps",
        "12",
        *exact,
        "--format",
        "json",
    )
    running = project.start(*asked, run_id="none")

    assert 0 == running.end(), running.told()

    told = json.loads(running.output.read_text())
    assert (True, 12, 0, None) == (told["same"], told["steps"], told["undone"], told["run"])
    kill, flip, damage = told["faults"]
    assert ["crash"] == kill["restarts"]
    assert ["diverged"] == flip["restarts"]
    assert ["crash"] == damage["restarts"]
    assert all(each["seconds"] > 0 for each in told["faults"])
    assert told["comparison"]["redone"] == sum(each["redone"] for each in told["faults"])
    assert not (project.root / "runs").exists()
