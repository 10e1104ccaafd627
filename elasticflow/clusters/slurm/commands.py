"""Calls Slurm's commands: sbatch to submit a script, squeue for the state of its jobs."""

from __future__ import annotations

import re
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from elasticflow.clusters import programs
from elasticflow.errors import SlurmRefusedError, SubmitError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

LEADING_NODE = "ELASTICFLOW_SLURM_LEADER"
"""Variable of a gang's nodes: the name of the node that leads, as Slurm has it."""


class QueuedJob(NamedTuple):
    """A job of Slurm, or an element of an array, that has not ended.

    Attributes:
        state: State in squeue's words, such as `PENDING`.
        detail: The reason that it waits, or the nodes on which it runs.
    """

    state: str
    detail: str


def submit(script: str) -> int:
    """Submit a batch script by sbatch, and return the number of the queued job.

    Raises:
        SlurmRefusedError: sbatch refused the script.
        SubmitError: sbatch is not installed, or does not answer.
    """
    answer = _call(["sbatch", "--parsable"], "the job was not submitted", script)
    number = re.match(r"\d+", answer)
    if number is None:
        raise SubmitError(f"sbatch has not said which job it made: {answer!r}", "`squeue --me` lists yours")
    return int(number[0])


def queued(job: int) -> list[QueuedJob]:
    """Return the parts of a job that wait, run or end; empty once the job is over.

    Raises:
        SubmitError: the controller does not answer.
    """
    try:
        text = _call(
            ["squeue", "--noheader", "--jobs", str(job), "--format=%T %R"], f"job {job} cannot be followed"
        )
    except SlurmRefusedError as error:
        if "Invalid job id" in error.message:  # the job ended long ago, and Slurm has forgotten it
            return []
        raise
    parts = (line.partition(" ") for line in text.splitlines() if line.strip())
    return [QueuedJob(state, detail.strip().strip("()")) for state, _, detail in parts]


def why_leader_is_lost(environment: Mapping[str, str]) -> str | None:
    """Return the reason if Slurm has taken the leading node from this process' job; None if it has not, or does not answer."""
    job, leader = environment.get("SLURM_JOB_ID"), environment.get(LEADING_NODE)
    if job is None or leader is None:
        return None
    what = f"the nodes of job {job} are not known"
    with suppress(SubmitError, SlurmRefusedError):  # a container has no squeue
        words = ["squeue", "--noheader", "--states=RUNNING", "--jobs", job, "--format=%N"]
        if nodes := _call(words, what).strip():
            names = _call(["scontrol", "show", "hostnames", nodes], what).split()
            return None if leader in names else f"Slurm has taken {leader}, which led, from job {job}"
    return None


def _call(words: Sequence[str], what: str, given: str = "") -> str:
    done = programs.call(
        words,
        given,
        what,
        if_missing="do it on a login node of the cluster; `elasticflow submit slurm JOB -o FILE` writes the script",
        if_silent="see whether the cluster is up (sinfo) and has the job (squeue --me)",
    )
    if done.returncode != 0:
        raise SlurmRefusedError(
            f"{what}: {_words(done.stderr) or f'{words[0]} ended with {done.returncode}'}",
            "what is asked for stands in [slurm]; `sinfo` shows what there is",
        )
    return done.stdout


def _words(errors: str) -> str:
    """Return the errors of a Slurm command without the command's name before each line."""
    lines = (re.sub(r"^\w+: (?:error: |fatal: )?", "", line).strip() for line in errors.splitlines())
    return "; ".join(dict.fromkeys(filter(None, lines)))
