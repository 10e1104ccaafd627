"""Maps a refusal of sbatch, or a reason for which a queued job never starts, to a key of the job file.

The texts are from Slurm 22.05 (`slurm_strerror`, sbatch's words before it, squeue's reasons), unchanged up to 24.11.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from elasticflow.jobfile.diagnostics import codes

if TYPE_CHECKING:
    from elasticflow.jobfile.diagnostics.diagnostic import Diagnostic
    from elasticflow.jobfile.diagnostics.positions import KeyPath
    from elasticflow.jobfile.tables.slurm import SlurmTable
    from elasticflow.jobfile.text.source import Source


class Cause(NamedTuple):
    """The subject of a refusal.

    Attributes:
        path: The key, or its table if no key is the cause.
        part: The option in slurm.extra that is the cause, if any.
    """

    path: KeyPath
    part: str | None
    remedy: str


# Parts of a refusal in small letters, keys or options that may be the cause, and advice. The first match counts.
_CAUSES: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("group not permitted to use this partition", ("partition",), "`sinfo --summarize` lists the partitions"),
    ("partition name", ("partition",), "`sinfo --summarize` lists the partitions"),
    ("partition specified", ("partition",), "`sinfo --summarize` lists the partitions: name one of them"),
    ("account or account/partition", ("account", "partition"), "`sacctmgr show associations user=$USER` lists what you may use"),
    ("default account", ("account",), "`sacctmgr show associations user=$USER` lists what you may use: name one of them"),
    ("accounting/qos policy", ("qos", "account"), "`sacctmgr show qos` lists the limits: ask for less time or fewer nodes"),
    ("usage threshold", ("qos", "account"), "`sacctmgr show qos` lists the limits"),
    ("qos", ("qos",), "`sacctmgr show associations user=$USER format=account,partition,qos` lists what you may use"),
    ("gres", ("gres", "gpus"), "`sinfo --format='%P %G %D'` lists what nodes have of it"),
    ("feature", ("--constraint", "--prefer"), "`sinfo --format='%P %f'` lists the features of nodes"),
    ("time limit", ("time",), "`sinfo --format='%P %l'` lists the limits of the partitions: ask for less"),
    ("memory", ("mem", "--mem-per-cpu", "--mem-per-gpu"), "`sinfo --format='%P %m'` lists the memory of nodes, in MiB: ask for less"),
    ("cpu count", ("cpus_per_task",), "`sinfo --format='%P %c'` lists the cores of nodes: ask for fewer"),
    ("more processors", ("cpus_per_task",), "`sinfo --format='%P %c'` lists the cores of nodes: ask for fewer"),
    ("reservation", ("--reservation",), "`scontrol show reservations` lists them"),
    ("license", ("--licenses",), "`scontrol show licenses` lists them"),
    ("wckey", ("--wckey",), "`sacctmgr show wckeys` lists them"),
    ("dependency", ("--dependency",), "`squeue --me` lists your jobs"),
    ("node name", ("--nodelist", "--exclude"), "`sinfo --Node` lists the nodes"),
    ("not in this partition", ("--nodelist", "partition"), "`sinfo --Node` lists the nodes and their partitions"),
)  # fmt: skip
# Reasons of squeue for which a job does not start unless it, or a limit, is changed; and sbatch's words for the same.
_NEVER: tuple[tuple[str, str], ...] = (
    ("PartitionTimeLimit|(Assoc|QOS)MaxWallDurationPerJob(Limit)?", "time limit"),
    ("PartitionNodeLimit|(Assoc|QOS)MaxNodes?PerJob(Limit)?", "node count"),
    ("(Assoc|QOS)MaxC[Pp][Uu]PerJob(Limit)?|QOSMaxCpuPerNode", "cpu count"),
    ("(Assoc|QOS)MaxMem(ory)?PerJob(Limit)?|QOSMaxMemoryPerNode", "memory"),
    ("(Assoc|QOS)MaxGRESPer(Job|Node)(Limit)?|QOSMinGRES", "gres"),
    ("InvalidAccount|AccountNotAllowed", "default account"),
    ("InvalidQOS|QOSNotAllowed", "qos"),
    ("BadConstraints", "feature"),
    ("DependencyNeverSatisfied", "dependency"),
)
_OF_NODES = ("node count", "invalid node count")
_TOO_MUCH = "node configuration is not available"


def cause_of(said: str, slurm: SlurmTable) -> Cause:
    """Return the cause of a refusal, as far as its words tell; else [slurm] as a whole."""
    text = said.lower()
    if any(words in text for words in _OF_NODES):
        return Cause(
            ("nodes", "min"), None, "`sinfo --summarize` tells how many nodes there are: ask for fewer"
        )
    if _TOO_MUCH in text:
        remedy = "no node of the partition has so much: `sinfo --format='%P %c %m %G'` lists their cores, memory and GPUs"
        return Cause(("slurm",), None, remedy)
    for words, keys, remedy in _CAUSES:
        if words in text:
            return _asked_by(keys, slurm, remedy)
    return Cause(
        ("slurm",), None, "`elasticflow submit slurm JOB --print` shows the script that sbatch was given"
    )


def refusal(said: str, slurm: SlurmTable, source: Source) -> Diagnostic:
    """Return sbatch's refusal as a problem of the job file, at the key that caused it."""
    cause = cause_of(said, slurm)
    return source.problem(codes.SLURM, said, cause.path, part=cause.part, remedy=cause.remedy)


def never_starts(number: int, reason: str, slurm: SlurmTable, source: Source) -> Diagnostic | None:
    """Return squeue's reason for which job *number* waits as a warning at the key that caused it; None if it may start."""
    said = next((words for pattern, words in _NEVER if re.fullmatch(pattern, reason)), None)
    if said is None:
        return None
    cause = cause_of(said, slurm)
    if said in _OF_NODES:  # unlike sbatch, the queue counts the most nodes (seen in 22.05)
        remedy = "`sinfo --format='%P %s'` lists how many nodes a job of a partition may have: ask for fewer"
        cause = Cause(("nodes", "max"), None, remedy)
    message = f"Slurm job {number} stays queued and does not start: {reason}"
    remedy = f"{cause.remedy}; then scancel {number}, and submit again"
    return source.problem(
        codes.SLURM, message, cause.path, part=cause.part, remedy=remedy, severity="warning"
    )


def _asked_by(keys: tuple[str, ...], slurm: SlurmTable, remedy: str) -> Cause:
    for key in keys:
        if key.startswith("--"):
            option = next((each for each in slurm.extra if each.startswith(f"{key}=")), None)
            if option is not None:
                return Cause(("slurm", "extra"), option, remedy)
        elif getattr(slurm, key) is not None:
            return Cause(("slurm", key), None, remedy)
    return Cause(("slurm",), None, remedy)
