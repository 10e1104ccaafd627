"""What sbatch says, and the key of the job file that it is about."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from elasticflow.clusters.slurm.refusals import cause_of, never_starts, refusal
from elasticflow.jobfile.tables.slurm import SlurmTable
from elasticflow.jobfile.text.source import load_source

if TYPE_CHECKING:
    from pathlib import Path

WHOLE = SlurmTable(
    partition="gpu", account="vision", qos="long", time="4 h", gpus=4, mem="64 GiB", cpus_per_task=16,
    extra=["--mail-type=END", "--constraint=a100"],
)  # fmt: skip
FAILED = "Batch job submission failed: "


@pytest.mark.parametrize(
    ("said", "key"),
    [
        ("invalid partition specified: gpu; " + FAILED + "Invalid partition name specified", "partition"),
        (FAILED + "User's group not permitted to use this partition", "partition"),
        (FAILED + "Invalid account or account/partition combination specified", "account"),
        (FAILED + "Invalid qos specification", "qos"),
        (FAILED + "Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)", "qos"),
        ("Invalid generic resource (gres) specification", "gpus"),
        (FAILED + "Requested time limit is invalid (missing or exceeds some limit)", "time"),
        (FAILED + "Memory required by task is not available", "mem"),
        ("CPU count per node can not be satisfied", "cpus_per_task"),
        (FAILED + "Invalid feature specification", "extra"),
    ],
)  # fmt: skip
def test_a_refusal_is_about_the_key_that_asks_for_it(said: str, key: str) -> None:
    """With what lists what there is."""
    cause = cause_of(said, WHOLE)
    assert ("slurm", key) == cause.path
    assert "`s" in cause.remedy


def test_a_refusal_that_no_key_or_several_ask_for_is_about_the_table() -> None:
    """A job without a partition on a site without a default one; too much of something; words never heard."""
    assert ("slurm",) == cause_of("No partition specified or system default partition", SlurmTable()).path
    assert ("slurm",) == cause_of("Requested node configuration is not available", WHOLE).path
    assert ("slurm",) == cause_of("the site's own plugin says no", WHOLE).path
    assert ("nodes", "min") == cause_of("Node count specification invalid", WHOLE).path


def test_a_refusal_shows_the_place(tmp_path: Path) -> None:
    """In the file, of an option of slurm.extra that option alone."""
    (job := tmp_path / "job.toml").write_text('[slurm]\nextra = ["--mail-type=END", "--constraint=a100"]\n')
    shown = refusal("Invalid feature specification", WHOLE, load_source(job))
    assert (2, 30) == (shown.line, shown.column)
    assert "features of nodes" in (shown.help or "")


@pytest.mark.parametrize(
    ("reason", "key"),
    [
        ("PartitionTimeLimit", ("slurm", "time")),
        ("QOSMaxWallDurationPerJobLimit", ("slurm", "time")),
        ("AssocMaxWallDurationPerJobLimit", ("slurm", "time")),
        ("PartitionNodeLimit", ("nodes", "max")),
        ("QOSMaxNodePerJobLimit", ("nodes", "max")),
        ("AssocMaxCpuPerJobLimit", ("slurm", "cpus_per_task")),
        ("QOSMaxMemoryPerJob", ("slurm", "mem")),
        ("QOSMaxGRESPerJob", ("slurm", "gpus")),
        ("InvalidAccount", ("slurm", "account")),
        ("InvalidQOS", ("slurm", "qos")),
        ("BadConstraints", ("slurm", "extra")),
    ],
)
def test_reason_for_which_a_job_never_starts_is_about_a_key(
    tmp_path: Path, reason: str, key: tuple[str, str]
) -> None:
    """A warning at the key, with the reason in Slurm's word, what lists the limit, and how to take the job back."""
    lines = {
        "slurm": 'partition = "gpu"\naccount = "vision"\nqos = "long"\ntime = "4 h"\ngpus = 4\nmem = "64 GiB"\n'
        'cpus_per_task = 16\nextra = ["--constraint=a100"]',
        "nodes": "min = 2\nmax = 3",
    }
    (job := tmp_path / "job.toml").write_text("\n".join(f"[{name}]\n{text}" for name, text in lines.items()))
    problem = never_starts(7, reason, WHOLE, load_source(job))
    assert problem is not None
    assert problem.line is not None
    assert "warning" == problem.severity
    assert problem.message == f"Slurm job 7 stays queued and does not start: {reason}"
    assert job.read_text().splitlines()[problem.line - 1].startswith(key[1])
    assert (problem.help or "").endswith("then scancel 7, and submit again")


@pytest.mark.parametrize(
    "reason",
    [
        "Priority",
        "Resources",
        "None",
        "Dependency",
        "ReqNodeNotAvail",
        "PartitionDown",
        "QOSMaxJobsPerUserLimit",
        "",
    ],
)
def test_job_that_waits_its_turn_is_told_nothing(tmp_path: Path, reason: str) -> None:
    """It starts once others end, or a node is back."""
    (job := tmp_path / "job.toml").touch()
    assert never_starts(7, reason, WHOLE, load_source(job)) is None
