"""The table that says how Slurm runs a job: what `elasticflow submit slurm` writes; the options of sbatch it may add."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, model_validator

from elasticflow.jobfile.diagnostics import codes
from elasticflow.jobfile.diagnostics.suggestions import nearest
from elasticflow.jobfile.diagnostics.toml_literals import show
from elasticflow.jobfile.tables.types import Description, DurationText, SizeText, Table, bad_key, optional

# Options that the renderer writes, each with the key to use instead.
_OURS = {
    "account": "slurm.account says it",
    "array": 'slurm.form = "array" and nodes.max say it',
    "chdir": "the script runs in the project's folder",
    "cpus-per-task": "slurm.cpus_per_task says it",
    "error": "slurm.output has both streams",
    "exclusive": "slurm.exclusive = true says it",
    "gpus-per-node": "slurm.gpus says it",
    "gres": "slurm.gres says it",
    "job-name": "job.name says it",
    "mem": "slurm.mem says it",
    "no-kill": "the script has it: a lost node does not end the job",
    "nodes": "nodes.min and nodes.max say it",
    "open-mode": "the script has it: each start appends",
    "output": "slurm.output says it",
    "partition": "slurm.partition says it",
    "qos": "slurm.qos says it",
    "requeue": "the script has it",
    "signal": "slurm.notice says it",
    "time": "slurm.time says it",
}
# Options that a job cannot have that is submitted, restarted and followed, each with the reason.
_BREAKING = {
    **dict.fromkeys(
        (
            "container-image",
            "container-mounts",
            "container-workdir",
            "container-name",
            "container-writable",
            "container-mount-home",
            "container-remap-root",
            "container-entrypoint",
            "container-env",
        ),
        "the script itself would run in the container, without Slurm's commands: slurm.srun has the nodes run in it",
    ),
    "gpus": "it counts GPUs of the whole job, whose nodes come and go: slurm.gpus is of each node",
    "gpus-per-task": "slurm.gpus is of each node, which has one task",
    "help": "it submits nothing",
    "hold": "hold the job once it is queued: scontrol hold JOB",
    "input": "the script reads nothing",
    "no-requeue": "slurm.requeues = 0 says it",
    "ntasks": "each node has one task, and Slurm would size the job by it",
    "ntasks-per-core": "each node has one task",
    "ntasks-per-gpu": "each node has one task",
    "ntasks-per-node": "each node has one task, and Slurm would take nodes.min nodes only",
    "ntasks-per-socket": "each node has one task",
    "overcommit": "each node has one task",
    "parsable": "`elasticflow submit slurm` reads the job's id itself",
    "quiet": "`elasticflow submit slurm` reads what sbatch says",
    "test-only": "it submits nothing: pipe `elasticflow submit slurm JOB --print` into sbatch --test-only",
    "usage": "it submits nothing",
    "verbose": "`elasticflow submit slurm` reads what sbatch says",
    "version": "it submits nothing",
    "wait": "`elasticflow submit slurm JOB --wait` waits",
    "wrap": "the script is what is run",
}
_WITH_VALUE = frozenset((
    "acctg-freq", "batch", "bb", "bbf", "begin", "cluster-constraint", "clusters", "comment", "constraint",
    "container", "container-id", "core-spec", "cores-per-socket", "cpu-freq", "cpus-per-gpu", "deadline",
    "delay-boot", "dependency", "distribution", "exclude", "export-file", "extra", "extra-node-info",
    "gid", "gpu-bind", "gpu-freq", "gpus-per-socket", "gres-flags", "hint", "licenses", "mail-type",
    "mail-user", "mcs-label", "mem-bind", "mem-per-cpu", "mem-per-gpu", "mincpus", "network", "nodefile",
    "nodelist", "power", "prefer", "priority", "profile", "reservation", "resv-ports", "segment",
    "sockets-per-node", "switches", "thread-spec", "threads-per-core", "time-min", "tmp", "tres-bind",
    "tres-per-task", "uid", "wait-all-nodes", "wckey",
))  # fmt: skip
_ALONE = frozenset((
    "contiguous", "ignore-pbs", "reboot", "spread-job", "stepmgr", "use-min-nodes",
))  # fmt: skip
_EITHER = frozenset((
    "export", "get-user-env", "kill-on-invalid-dep", "nice", "oversubscribe", "propagate", "oom-kill-step",
))  # fmt: skip
_SHORT = {
    "A": "account", "a": "array", "B": "extra-node-info", "b": "begin", "C": "constraint", "c": "cpus-per-task",
    "D": "chdir", "d": "dependency", "e": "error", "F": "nodefile", "G": "gpus", "H": "hold", "h": "help",
    "i": "input", "J": "job-name", "k": "no-kill", "L": "licenses", "M": "clusters", "m": "distribution",
    "N": "nodes", "n": "ntasks", "O": "overcommit", "o": "output", "p": "partition", "Q": "quiet", "q": "qos",
    "S": "core-spec", "s": "oversubscribe", "t": "time", "V": "version", "v": "verbose", "W": "wait",
    "w": "nodelist", "x": "exclude",
}  # fmt: skip
_KNOWN = frozenset({*_OURS, *_BREAKING, *_WITH_VALUE, *_ALONE, *_EITHER})


# Options of srun on which the script relies.
_OURS_OF_SRUN = frozenset((
    "chdir", "cpus-per-task", "error", "export", "input", "jobid", "kill-on-bad-exit", "multi-prog", "no-kill", "nodes",
    "ntasks", "ntasks-per-node", "output", "pty", "unbuffered", "wait",
))  # fmt: skip


def why_refused_by_srun(line: str) -> tuple[str, str] | None:
    """Return the problem of *line* as one more option of the script's srun, and the remedy; None if it may have the line."""
    match = re.fullmatch(r"--([a-z][a-z-]*)(=.+)?", line)
    if match is None:
        return "is no option of srun", 'write one option in its long form, such as "--container-image=IMAGE"'
    if match[1] in _OURS_OF_SRUN:
        return "is what the script has already, or relies on", "take it out of slurm.srun"
    return None


def why_refused(line: str) -> tuple[str, str] | None:
    """Return the problem of *line* as an option of sbatch, and the remedy; None if the script may have the line."""
    text = line.removeprefix("#SBATCH").strip()
    short = re.match(r"-([A-Za-z])(?![A-Za-z-]*=)", text)
    if short is not None and short[1] in _SHORT and not text.startswith("--"):
        value = text[2:].strip(" =")
        return "is in its short form", f'write it as "--{_SHORT[short[1]]}{"=" if value else ""}{value}"'
    match = re.fullmatch(r"--([a-z][a-z-]*)(?:(=| +)(.*))?", text)
    if match is None:
        return "is no option of sbatch", 'write one option as sbatch has it, such as "--constraint=a100"'
    name, value = match[1], match[3]
    if name in _OURS:
        return f"is what the script has already: {_OURS[name]}", "take it out of slurm.extra"
    if name in _BREAKING:
        return f"cannot be passed on: {_BREAKING[name]}", "take it out of slurm.extra"
    if name not in _KNOWN:
        near = nearest(name, sorted(_KNOWN))
        meant = f'did you mean "--{near[0]}"? ' if near else ""
        return "is not an option of sbatch, which would refuse the job", f"{meant}`sbatch --help` lists them"
    return _wrong_value(name, value, text, line)


def _wrong_value(name: str, value: str | None, text: str, line: str) -> tuple[str, str] | None:
    if name in _WITH_VALUE and not (value or "").strip():
        return "lacks its value", f'write it as "--{name}=VALUE"'
    if name in _ALONE and value is not None:
        return "takes no value", f'write it as "--{name}"'
    if value is not None and (re.search(r"[\s#]", value) and not re.fullmatch(r"\"[^\"]*\"|'[^']*'", value)):
        return (
            "has a blank or # in its value, at which sbatch stops reading",
            f"quote the value: --{name}='...'",
        )
    if text != line or (value is not None and not text.startswith(f"--{name}=")):
        return "is not written as in a shell", f'write it as "--{name}{"" if value is None else "=" + value}"'
    return None


# A word that sbatch reads up to the next blank or comma, and that a shell leaves as it is.
SlurmName = Annotated[
    str,
    Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.+@/-]{0,199}(,[A-Za-z0-9][A-Za-z0-9_.+@/-]{0,199})*$"),
    Description('a name as Slurm has it, or several with commas: "gpu", "gpu,debug"'),
]
Gres = Annotated[
    str,
    Field(pattern=r"^[A-Za-z][A-Za-z0-9_.:/,+-]{0,499}$", examples=["gpu:a100:4"]),
    Description('generic resources of a node, like "gpu:a100:4"'),
]
OutputFile = Annotated[
    str,
    Field(pattern=r"^[A-Za-z0-9_./%-]{1,500}$", examples=["%x-%j.out", "logs/%x-%j.out"]),
    Description('a path of letters, digits, "_", ".", "/", "-" and Slurm\'s %x, %j'),
]
Line = Annotated[
    str,
    Field(pattern=r"^[^\x00-\x08\x0a-\x1f\x7f]{1,2000}$"),
    Description("one line that is not empty"),
]
OwnCode = Annotated[
    str, Field(pattern=r"^(1|2|3|75)$"), Description('one of our exit codes in quotes: "1", "2", "3" or "75"')
]


class SlurmTable(Table):
    """Options for `elasticflow submit slurm`: one process per node starts the workers."""

    form: Literal["gang", "array"] = Field(
        default="gang",
        description="One allocation of nodes.min to nodes.max nodes, which shrinks; or an array of nodes.max jobs of "
        "one node each, which grows and shrinks, and whose store runs elsewhere.",
    )
    partition: SlurmName | None = optional(description="sbatch --partition.", examples=["gpu"])
    account: SlurmName | None = optional(description="sbatch --account.", examples=["vision"])
    qos: SlurmName | None = optional(description="sbatch --qos.", examples=["long"])
    time: DurationText | None = optional(
        description="Time limit of each start of the job; default: the partition's. The job is queued again before it is over.",
        examples=["4 h"],
    )
    notice: DurationText | None = optional(
        description="Time before the time limit at which the nodes are asked to stop; default: snapshots.grace and a "
        "minute more.",
        examples=["2 min"],
    )
    gpus: int | None = optional(ge=1, le=1024, description="GPUs of each node.", examples=[4])
    gres: Gres | None = optional(description="sbatch --gres, of each node.")
    mem: SizeText | None = optional(description="Memory of each node.", examples=["64 GiB"])
    cpus_per_task: int | None = optional(
        ge=1, le=4096, description="Cores of each node, which has one task.", examples=[16]
    )
    exclusive: bool = Field(default=False, description="Whole nodes, shared with no other job.")
    requeues: int = Field(
        default=100,
        ge=0,
        le=10_000,
        description="Maximum number of times that the script queues the job again; 0: it ends with 75 instead.",
        examples=[100],
    )
    output: OutputFile = Field(
        default="slurm-%x-%j.out", description="File for the output of the script, in the project's folder."
    )
    exit_codes: dict[OwnCode, Annotated[int, Field(ge=0, le=255)]] = Field(
        default={},
        description="Exit codes of the job in place of ours: 1 failed, 2 refused, 3 budget spent, 75 interrupted.",
        examples=[{"75": 0, "3": 1}],
    )
    srun: list[Line] = Field(
        default=[],
        description="More options of srun, one each, for the nodes' command; a container's for instance.",
        examples=[["--container-image=registry.example.org/train:1", "--container-mounts=/data"]],
    )
    setup: list[Line] = Field(
        default=[],
        description="Lines of shell before anything is started; with any, `elasticflow` is found on the PATH they make.",
        examples=[["module load cuda", "source ~/venv/bin/activate"]],
    )
    extra: list[Line] = Field(
        default=[],
        description="More options of sbatch, one each, in their long form.",
        examples=[["--constraint=a100", "--mail-type=END"]],
    )

    @model_validator(mode="after")
    def _check(self) -> SlurmTable:
        if self.gpus is not None and self.gres is not None and self.gres.startswith("gpu"):
            message = "slurm.gpus and slurm.gres both ask for GPUs"
            raise bad_key("gres", codes.EXCLUSIVE, message, "keep one of them")
        if re.search(r"%\d*[jJAaNnst]", self.output.rpartition("/")[0]):
            message = "slurm.output: Slurm makes no folder, and the number in this one's name is not known before the job"
            raise bad_key(
                "output", codes.SLURM, message, "put the number into the name of the file: logs/%x-%j.out"
            )
        if self.extra or self.srun:
            for key, why in (("extra", why_refused), ("srun", why_refused_by_srun)):
                for line in getattr(self, key):
                    if (refusal := why(line)) is not None:
                        what, remedy = refusal
                        raise bad_key(key, codes.NOT_PASSABLE, f"slurm.{key}: {show(line)} {what}", remedy)
        return self
