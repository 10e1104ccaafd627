"""The table that says how Slurm runs a job: what `elasticflow submit slurm` writes."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, model_validator

from elasticflow.jobfile.diagnostics import codes
from elasticflow.jobfile.diagnostics.toml_literals import show
from elasticflow.jobfile.tables.types import Description, DurationText, SizeText, Table, bad_key, optional

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
            from elasticflow.jobfile.tables.sbatch_options import why_refused, why_refused_by_srun

            for key, why in (("extra", why_refused), ("srun", why_refused_by_srun)):
                for line in getattr(self, key):
                    if (refusal := why(line)) is not None:
                        what, remedy = refusal
                        raise bad_key(key, codes.NOT_PASSABLE, f"slurm.{key}: {show(line)} {what}", remedy)
        return self
