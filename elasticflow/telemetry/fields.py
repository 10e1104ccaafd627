"""Every field of an event, of metrics.jsonl and of a log line: its type, its meaning, and its name in OpenTelemetry.

A field has one type and one meaning wherever it stands. The JSON Schema, the page about events and what is sent to
OpenTelemetry are made from this table.
"""

from __future__ import annotations

from typing import NamedTuple

SCHEMA_VERSION = 2
"""Of events and lines; `run.started` tells it. It grows when a field or an event is renamed or removed, or changes its type.

New events and new fields are no new version: readers leave alone what they do not know.
"""

OURS = "elasticflow"
"""Namespace of attributes that the conventions of others have no name for."""


class Field(NamedTuple):
    """What is known of a field.

    Attributes:
        type: As in `schema.TYPES`; with `?` at its end, null where there is nothing to say.
        meaning: In a few words.
        otel: Attribute of OpenTelemetry's semantic conventions; None: `elasticflow.<name>`.
    """

    type: str
    meaning: str
    otel: str | None = None


FIELDS: dict[str, Field] = {
    # Of every line. The first three are no attributes of a log record of OpenTelemetry but parts of it.
    "timestamp": Field("time", "when it was written: UTC, RFC 3339", "Timestamp"),
    "level": Field("level", "how much it matters", "SeverityText"),
    "event": Field("text", "its name; of a log line, the message", "EventName"),
    "job": Field("text", "the job's name", "elasticflow.job.name"),
    "run_id": Field("text", "the run's id", "elasticflow.run.id"),
    "generation": Field("whole", "the worker group, numbered over the run; 0 before the first"),
    # Of the lines of workers.
    "node": Field("text?", "the node's name in its launch"),
    "rank": Field("whole?", "the worker's global rank"),
    "world_size": Field("whole", "workers of the group"),
    "step": Field("whole", "finished optimizer steps"),
    "origin": Field("text", "whose logger wrote the line: `elasticflow` for events"),
    "logger": Field("text", "name of the standard library's logger", "logger.name"),
    "process": Field("text", "which process beside the worker wrote it, as `loader 1`"),
    "exception": Field("exception?", "what was raised, and where; without values of variables"),
    "stream": Field("text", "which output of a worker: `jsonl`, `stdout`, `stderr`", "log.iostream"),
    "lines": Field("whole", "how many lines"),
    "sink": Field("text", "where measures and events are sent to"),
    "points": Field("whole", "steps, evaluations and events that are still to be sent"),
    "log": Field("text", "file with what a process printed last", "log.file.path"),
    "script": Field("text", "the file or module that [script] names"),
    # Who and where.
    "pid": Field("whole", "a process", "process.pid"),
    "pids": Field("wholes", "processes, by local rank"),
    "host": Field("text", "the machine's name", "host.name"),
    "nproc": Field("whole", "workers of a node"),
    "nodes": Field("whole", "how many nodes"),
    "members": Field("texts", "the nodes' names, in rank order"),
    "present": Field("whole", "nodes that are ready"),
    "least": Field("whole", "nodes that the job needs"),
    "device": Field("text or facts", "what is computed on"),
    "connections": Field("whole", "how many, since this was told last"),
    "address": Field("text", "where the last one came from", "client.address"),
    "command": Field("text", "a process's command line, cut short", "process.command_line"),
    "endpoint": Field("text?", "where other machines reach the launch", "server.address"),
    "resume_command": Field("text?", "what goes on with the run; none: `elasticflow resume`"),
    "torch": Field("text", "torch's version"),
    "schema": Field("whole", "version of the schema of these lines"),
    "launch": Field("whole", "start of the run, numbered from 1"),
    "resumed": Field("flag", "it goes on with what an earlier launch left"),
    # What went wrong, and why.
    "class": Field("text", "class of a failure, or how a group ended", "error.type"),
    "error": Field("text", "what went wrong, in a line or two", "exception.message"),
    "traceback": Field("text?", "traceback as text, shortened", "exception.stacktrace"),
    "exit_code": Field("integer?", "how a process ended; negative: by that signal", "process.exit.code"),
    "stderr": Field("texts", "last lines of its standard error"),
    "others": Field("text?", "what became of the other workers"),
    "final": Field("flag", "another try would end in the same way"),
    "reason": Field("text", "why"),
    "why": Field("text?", "why it is not tried again"),
    "help": Field("text", "what to do"),
    "known": Field("text", "what is certain"),
    "likely": Field("text?", "what probably happened"),
    "was_killed": Field("flag", "it did not end when it was asked to"),
    "attempt": Field("whole", "which try failed"),
    "operation": Field("text", "what a store was asked to do"),
    "phase": Field("text", "what a worker is doing"),
    "frames": Field("texts", "where it is, the user's own frames first"),
    "stacks": Field("text?", "file with the stacks of all its threads"),
    # Time.
    "seconds": Field("number", "how long it took"),
    "seconds_since_failure": Field("number?", "from the failure until here"),
    "durations": Field("durations", "seconds by what they went to, in this launch or group"),
    "run_durations": Field("durations?", "the same of all launches of the run"),
    "limit_s": Field("number", "how long it may take"),
    "grace_s": Field("number?", "how long there is for it"),
    "pause_s": Field("number?", "until the next try"),
    "stall_s": Field("number", "how long training stood still"),
    "restore_s": Field("number?", "how long restoring took"),
    "time": Field("number", "when it was over, Unix time"),
    # Snapshots and files.
    "name": Field("text", "of what the event is about"),
    "bytes": Field("whole", "size"),
    "trigger": Field("text", "why the snapshot was taken"),
    "uri": Field("text", "where snapshots lie, passwords masked", "url.full"),
    "path": Field("text", "a file", "file.path"),
    "files": Field("count or facts", "how many files, or their digests by path"),
    "action": Field("text", "what was done, or tried"),
    "goes_on_from": Field("whole", "step of the snapshot that the next launch begins at"),
    "restored_from": Field("text?", "the snapshot that was loaded"),
    "from_memory": Field("flag", "from the memory of the node"),
    # The restart budget.
    "left": Field("whole?", "restarts that are left"),
    "budget": Field("whole", "restarts in a window"),
    "restarts": Field("whole", "restarts of the run"),
    # Training.
    "epoch": Field("whole", "passes over the data that are finished"),
    "in_epoch": Field("whole", "step of its epoch, from 1"),
    "samples": Field("whole?", "how many samples"),
    "steps": Field("whole?", "how many steps"),
    "profile": Field("whole", "number of a request for traces, counted over the run"),
    "ranks": Field("wholes", "workers"),
    "first_step": Field("whole", "the first of several steps"),
    "last_step": Field("whole", "the last of several steps"),
    "batch": Field("whole", "samples of a step"),
    "parameters": Field("whole", "numbers that are trained or frozen"),
    "loss": Field("number or text?", "mean over the global batch"),
    "lr": Field("number or numbers", "learning rate, or rates by parameter group"),
    "count": Field("number", "items that the loss is a mean over"),
    "grad_norm": Field("number or numbers?", "norm of the gradient"),
    "mfu": Field("number?", "share of the devices' peak that was used"),
    "eval": Field("measured?", "metrics by name"),
    "eval_raw": Field("measured", "metrics of the weights that are no average"),
    "weights": Field("any", "which weights were measured: `raw`, `ema`"),
    "best": Field("number or text?", "the best value so far"),
    "measured_by": Field("any", "the evaluation that measured it"),
    "now": Field("any", "what holds from here on"),
    "was": Field("text", "what held before"),
    "snapshot": Field("text", "a snapshot's name"),
    "names": Field("texts", "names of what a snapshot holds"),
    "stage": Field("whole", "number of a stage of a script's loop, from 0"),
    "stopped": Field("text?", "why the job's own code ended training"),
    "by_rank": Field("whole?", "the rank that asked for it"),
    "from_cache": Field("whole", "graphs that were there"),
    "compiled": Field("whole", "graphs that were compiled"),
    "kept": Field("texts", "names of objects with a state, which snapshots hold beside model and optimizer"),
    "keys": Field("texts", "names of values"),
    "groups": Field("list", "groups of parameters: name, tensors, numbers in them, options"),
    "options": Field("list", "options that have changed: from, to"),
    # Data.
    "shards": Field("whole", "files of the data"),
    "shard": Field("text", "one of them"),
    "values": Field("facts", "values of the data that the job's arguments name"),
    "fingerprint": Field("text", "digest of what the data is"),
    "source": Field("text", "where the data comes from"),
    "kind": Field("text", "which kind of it"),
    "facts": Field("facts", "what else tells it from others"),
    "found": Field("whole", "samples of the evaluation that are trained on"),
    "looked_up": Field("whole", "samples of the evaluation that were looked up"),
    "compared": Field("whole", "training samples that were compared"),
    "pair": Field("list?", "a sample of the training data, and its equal in the evaluation"),
    # What changed, what stays behind.
    "changed": Field("any", "what is other than before"),
    "changes": Field("texts", "nodes that were to come or go"),
    "differences": Field("list", "key, old and new value, weight, reason"),
    "type": Field("text", "of an object"),
    "types": Field("texts", "classes of objects"),
    "sample": Field("whole", "number of a sample"),
    "parts": Field("texts", "parts of a sample"),
    "generators": Field("texts", "random generators that a dataset holds"),
    "module": Field("text", "a Python module"),
    "modules": Field("texts", "Python modules"),
    "memory": Field("whole", "bytes that processes hold for themselves"),
}  # fmt: skip
"""All of them, by name."""
