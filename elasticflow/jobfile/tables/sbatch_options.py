"""The options of sbatch: all names, the options that the rendered script sets itself, and those that would break it.

From Slurm 22.05 (`sbatch --help`), with the options that the manual has gained since then, up to 24.11.
"""

from __future__ import annotations

import re

from elasticflow.jobfile.diagnostics.suggestions import nearest

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
