"""Renders a job file as a batch script for sbatch."""

from __future__ import annotations

import math
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from elasticflow.clusters.slurm.commands import LEADING_NODE
from elasticflow.errors import EXIT_CODES, RenderError
from elasticflow.protocol.run_files import RESUME_COMMAND
from elasticflow.run_folder import RUNS
from elasticflow.system.units import parse_duration, parse_size

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from elasticflow.jobfile.load import LoadedJob
    from elasticflow.jobfile.tables.job import Job
    from elasticflow.jobfile.tables.slurm import SlurmTable

_MIB = 1024**2


@dataclass(frozen=True, kw_only=True)
class BatchScript:
    """Facts from which the script of one job is made.

    Attributes:
        root: The project's folder, which has the same path on every node.
        words: The words after `elasticflow run`: the job file, relative to the root, its case and `--set` values.
        again: The words after `elasticflow submit slurm`: `words`, and the `--set` values that affect only the script.
        case: Case of the file's [matrix]; its name ends the run's id.
        run_id: Id of the run; None: the run is named after Slurm's job.
        program: The `elasticflow` command that the nodes call.
    """

    job: Job
    table: SlurmTable
    root: Path
    words: tuple[str, ...]
    again: tuple[str, ...]
    case: str | None
    run_id: str | None
    program: str

    @property
    def is_array(self) -> bool:
        """True if each node is a separate Slurm job."""
        return self.table.form == "array"

    @property
    def _own_id(self) -> str:
        """Slurm's id of the script's job; of an array with the element, since the number may mean the whole array."""
        return "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID" if self.is_array else "$SLURM_JOB_ID"

    @property
    def may_shrink(self) -> bool:
        """True if the run continues without a lost node; else Slurm must restart the job on as many nodes as before."""
        return not self.is_array and self.job.nodes.min < self.job.nodes.max

    @property
    def notice_s(self) -> int:
        """Seconds before the time limit at which the nodes are asked to exit."""
        grace_s = parse_duration(self.job.snapshots.grace)
        # Slurm may send the signal up to a minute early, never late.
        return math.ceil(grace_s + 60 if self.table.notice is None else parse_duration(self.table.notice))

    def text(self) -> str:
        """Return the text of the script."""
        parts = (self._head(), self._options(), self._names(), self._nodes(), self._verdict())
        return "\n".join("\n".join(part) + "\n" for part in parts)

    def _head(self) -> Iterator[str]:
        nodes = self.job.nodes
        span = f"{nodes.max}" if nodes.min == nodes.max else f"{nodes.min} to {nodes.max}"
        many = "node" if nodes.max == 1 else "nodes"
        what = (
            f"{nodes.max} jobs of one node each; the run continues with those that are there"
            if self.is_array
            else f"one job of {span} {many}"
        )
        yield "#!/bin/bash"
        yield f"# {shlex.join(self.words)} under Slurm: {what}."
        yield "# Made by `elasticflow submit slurm`; what it does: `elasticflow guide slurm`."

    def _options(self) -> Iterator[str]:
        table, nodes = self.table, self.job.nodes
        yield f"#SBATCH --job-name={self.job.job.name}"
        yield f"#SBATCH --chdir={shlex.quote(str(self.root))}"
        output = table.output.replace("%j", "%A_%a") if self.is_array else table.output
        yield f"#SBATCH --output={output}"
        yield "#SBATCH --open-mode=append"
        if self.is_array:
            yield f"#SBATCH --array=0-{nodes.max - 1}"
            yield "#SBATCH --nodes=1"
        else:
            yield f"#SBATCH --nodes={nodes.max if nodes.min == nodes.max else f'{nodes.min}-{nodes.max}'}"
            if self.may_shrink:
                yield "# The job outlives the loss of a node."
                yield "#SBATCH --no-kill"
        yield "# It may be queued again: after the loss of the node that this script runs on, and when it is preempted."
        yield "#SBATCH --requeue"
        yield f"# This script is sent USR1 {self.notice_s} s before the time limit."
        yield f"#SBATCH --signal=B:USR1@{self.notice_s}"
        yield from (f"#SBATCH {option}" for option in self._asked_for())

    def _asked_for(self) -> Iterator[str]:
        table = self.table
        for name in ("partition", "account", "qos", "gres", "cpus_per_task"):
            if (value := getattr(table, name)) is not None:
                yield f"--{name.replace('_', '-')}={value}"
        if table.time is not None:
            yield f"--time={slurm_time(parse_duration(table.time))}"
        if table.gpus is not None:
            yield f"--gpus-per-node={table.gpus}"
        if table.mem is not None:
            yield f"--mem={math.ceil(parse_size(table.mem) / _MIB)}M"
        if table.exclusive:
            yield "--exclusive"
        yield from table.extra

    def _names(self) -> Iterator[str]:
        of_slurm = "$SLURM_ARRAY_JOB_ID" if self.is_array else "$SLURM_JOB_ID"
        yield "# The run: the same one each time that this job is started again."
        case = f"-{self.case}" if self.case else ""
        yield f"run_id={self.run_id or f'slurm-{of_slurm}{case}'}"
        yield f"folder={shlex.quote(f'{RUNS}/{self.job.job.name}')}/$run_id"
        yield f"elasticflow={shlex.quote(self.program)}"
        yield from self.table.setup
        again = shlex.quote(f"elasticflow submit slurm {shlex.join(self.again)} --run-id ")
        yield "# The command that resumes it, for people."
        yield f'export {RESUME_COMMAND}={again}"$run_id"'
        yield 'if [ -e "$folder/cancel" ]; then'
        yield '  echo "$run_id was ended by elasticflow cancel, and is not resumed unless $folder/cancel is removed" >&2'
        yield f"  exit {self.table.exit_codes.get('75', 75)}"
        yield "fi"

    def _nodes(self) -> Iterator[str]:
        yield from self._start()
        yield "nodes=$!"
        yield "# Asked to leave, all nodes do so after the same step, with a snapshot. TERM has no trap: `scancel` ends the job."
        yield "# (srun itself would kill them at once.)"
        yield f"trap 'scancel --signal=TERM \"{self._own_id}\"' USR1"
        yield "# The signal ends `wait`, not the nodes."
        yield 'while wait "$nodes"; ended=$?; kill -0 "$nodes" 2>/dev/null; do :; done'

    def _start(self) -> Iterator[str]:
        job, table = self.job, self.table
        # Where the job was submitted with --export=NONE, srun would hand nothing on.
        options = ["--export=ALL", *(shlex.quote(option) for option in table.srun)]
        if table.cpus_per_task is not None:
            options.append(f"--cpus-per-task={table.cpus_per_task}")
        given = " ".join(options)
        run = f'run {shlex.join(self.words)} --run-id "$run_id"'
        if self.is_array or job.nodes.max == 1:
            join = "" if job.nodes.max == 1 else f" --join {_in_shell(job.nodes.endpoint or '')}"
            yield f'srun --nodes=1 --ntasks=1 {given} "$elasticflow" {run}{join} &'
            return
        shrinking = "--no-kill " if self.may_shrink else ""
        yield from self._each_node()
        if job.torchrun.is_store_outside:
            join = f" --join {_in_shell(job.nodes.endpoint or '')}"
        else:
            yield "# This script runs on the first node, which leads: the others find it here."
            yield "export head"
            yield "head=$(hostname):$((20000 + SLURM_JOB_ID % 10000))"
            if job.nodes.token_file is None:
                yield "# Nobody takes part without this; srun hands it to the nodes."
                yield "token=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')"
                yield 'export ELASTICFLOW_TOKEN="${ELASTICFLOW_TOKEN:-$token}"'
            join = ""
        yield f"""srun {shrinking}--nodes="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --kill-on-bad-exit=0 --wait=0 \\
  {given} bash -c "$node" "$elasticflow" \\
  {run}{join} &"""

    def _each_node(self) -> Iterator[str]:
        """Yield the lines for each node of a gang: the command, and the script's own part in case the first node is lost."""
        again = f'[ ! -e "$folder/cancel" ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt {self.table.requeues} ]'
        yield "# What each node does. Slurm may signal this shell, too: it waits for what it has started, whose code counts."
        yield "# Its lines begin with its name; once srun is gone, with the first node, they go nowhere. A command that was killed is"
        yield "# started again, three times at most."
        yield "# If the first node is lost, this script is lost with it: then each node that is left sees to the end of the job, and the"
        yield "# last one that ends its command ends the job in any case."
        if not self.job.torchrun.is_store_outside:
            yield "# As soon as nobody leads and Slurm has lost the node that did, the next one leads, if enough are left."
        yield "export folder first=$SLURMD_NODENAME"
        yield "# shellcheck disable=SC2016  # each node's own"
        yield f"""node='trap "asked=yes" TERM
exec > >(trap "" TERM PIPE; sed -u "s/^/$SLURMD_NODENAME | /"; exec cat >/dev/null) 2>&1
lines=$! tries=0
left() {{ scontrol show hostnames "$(squeue -h -t RUNNING -j "$SLURM_JOB_ID" -o %N)"; }}
{self._attempts()}
ended=$folder/slurm/$SLURM_JOB_ID.${{SLURM_RESTART_COUNT:-0}}
if [ -d "$folder" ]; then mkdir -p "$ended" && : >"$ended/$SLURMD_NODENAME"; fi
names=$(left)
if [ -n "$names" ] && ! grep -qx "$first" <<<"$names"; then
  if [ "$code" -eq 75 ] && {again}; then
    scontrol requeue "$SLURM_JOB_ID"
  else
    "$0" status "$folder" --exit-code
    if [ "$?" -ne 75 ] || [ "$code" -eq 75 ] || ! grep -qvxFf <(ls "$ended") <<<"$names"; then scancel "$SLURM_JOB_ID"; fi
  fi
fi
exec >&- 2>&-
(sleep 5; kill -9 "$lines") & wait "$lines"
exit "$code"'"""

    def _attempts(self) -> str:
        """Return the lines in which a node of a gang runs its command, again if it was killed or another node has to lead."""
        killed = '[ "$code" -ge 128 ] && [ -z "${asked:-}" ] && [ $((tries += 1)) -le 3 ]'
        if self.job.torchrun.is_store_outside:
            return f'while "$0" "$@"; code=$?; {killed}; do :; done'
        return f"""export {LEADING_NODE}=$first
while :; do
  [ "$SLURMD_NODENAME" = "${LEADING_NODE}" ]
  "$0" "$@" --node-rank $? --join "$head" --set nodes.endpoint="$head"
  code=$?
  if {killed}; then continue; fi
  if [ "$code" -ne 75 ] || [ -n "${{asked:-}}" ] || [ -e "$folder/cancel" ]; then break; fi
  names=$(left)
  if [ -z "$names" ] || grep -qx "${LEADING_NODE}" <<<"$names" || [ "$(wc -l <<<"$names")" -lt {self.job.nodes.min} ]; then break; fi
  {LEADING_NODE}=$(head -n 1 <<<"$names")
  head=$(scontrol show node "${LEADING_NODE}" | sed -n "s/.*NodeHostName=\\([^ ]*\\).*/\\1/p"):${{head##*:}}
done"""

    def _verdict(self) -> Iterator[str]:
        yield "# How it went stands in the run folder. What srun ends with says less: a node that was lost, or one that was refused."
        yield '"$elasticflow" status "$folder" --exit-code'
        yield "code=$?"
        if not self.is_array and self.job.nodes.max > 1:
            yield 'rm -rf "$folder/slurm"'
        yield "# 75: not over. Where no node was interrupted either, the job was refused, and would be again."
        yield 'if [ "$code" -eq 75 ] && [ "$ended" -gt 0 ] && [ "$ended" -lt 75 ]; then code=$ended; fi'
        if self.table.requeues:
            limit = f'"${{SLURM_RESTART_COUNT:-0}}" -lt {self.table.requeues}'
            yield "# Queued again, unless it was cancelled. Slurm starts it about two minutes later, and ends this script."
            yield f'if [ "$code" -eq 75 ] && [ ! -e "$folder/cancel" ] && [ {limit} ]; then'
            yield f'  scontrol requeue "{self._own_id}" && sleep 300'
            yield "fi"
        if self.table.exit_codes:
            yield 'case "$code" in'
            for ours, theirs in sorted(self.table.exit_codes.items(), key=lambda pair: int(pair[0])):
                yield f"  {ours}) code={theirs} ;;  # {EXIT_CODES[int(ours)]}"
            yield "esac"
        yield 'exit "$code"'


def render_slurm(
    loaded: LoadedJob,
    overrides: Sequence[str] = (),
    run_id: str | None = None,
    *,
    program: str | None = None,
) -> str:
    """Return the batch script that runs a job.

    Args:
        loaded: The job, without errors.
        run_id: The run's whole id; None: the run is named after Slurm's job.
        program: The `elasticflow` command that nodes call; None: the running command, or, with `slurm.setup`, the
            command on the PATH.

    Raises:
        RenderError: the job lacks settings for Slurm.
    """
    table = loaded.job.slurm
    if table is None:
        raise RenderError(
            "the job has no [slurm]: how Slurm runs it is not known",
            'add [slurm] with time = "4 h" and the options that sbatch needs at your site, or --set slurm.time="4 h"',
        )
    path = loaded.path.resolve()
    root = loaded.project_root.resolve()
    file = path.relative_to(root) if path.is_relative_to(root) else path
    case = () if loaded.case is None else ("--case", loaded.case)
    # The nodes need no options that affect only this script.
    told = [override for override in overrides if not override.startswith("slurm.")]
    values = [word for override in told for word in ("--set", override)]
    if program is None:
        program = "elasticflow" if table.setup else str(Path(sys.executable).parent / "elasticflow")
    script = BatchScript(
        job=loaded.job,
        table=table,
        root=root,
        words=(str(file), *case, *values),
        again=(str(file), *case, *(word for override in overrides for word in ("--set", override))),
        case=loaded.case,
        run_id=run_id,
        program=program,
    )
    return script.text()


def slurm_time(seconds: float) -> str:
    """Return a time in Slurm's form, in whole minutes: `1-12:00:00`."""
    minutes = math.ceil(seconds / 60)
    return f"{minutes // 1440}-{minutes // 60 % 24:02}:{minutes % 60:02}:00"


def _in_shell(endpoint: str) -> str:
    """Return an endpoint quoted for the shell; `${env:NAME}` becomes each node's own variable."""
    return '"' + endpoint.replace("${env:", "${") + '"'
