"""The log schema, frozen: a change of a name or field breaks somebody's dashboard."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from elasticflow import events
from elasticflow.events import FIELDS
from elasticflow.protocol import run_files
from elasticflow.system import fault_injection

PACKAGE = Path(events.__file__).parent
# Dotted literals of other kinds: files, a call in train.py. `dataset.` and `job.` begin keys of the job file and are left out.
NOT_EVENTS = (
    ".py",
    ".json",
    ".jsonl",
    ".log",
    ".load_weights",
    ".start_training",
    ".log_grad_norm",
    ".batches",
    ".keep",
    ".schedule",
    ".gradients",
    ".evaluate",
    ".step",
)

# "run.call": a call in a generated train.py.
NAMES_ELSEWHERE = {"run.call", *(str(field.otel) for field in FIELDS.values())}

FROZEN = {
    "script.started": {"script", "seconds_since_failure"},
    "script.began_anew": {"script"},
    "run.started": {"endpoint", "launch", "pid", "resume_command", "resumed", "schema", "torch", "uri"},
    "run.finished": {"durations", "restarts", "run_durations", "seconds", "step", "stopped"},
    "run.failed": {
        "class",
        "durations",
        "error",
        "exit_code",
        "rank",
        "run_durations",
        "seconds",
        "step",
        "why",
    },
    "run.interrupted": {"durations", "goes_on_from", "reason", "run_durations", "seconds", "step"},
    "supervisor.lost": {"in_generation", "kind", "known", "last_seen", "launch", "likely", "step"},
    "generation.started": {"members", "nodes", "reason", "world_size"},
    "generation.ended": {"class", "durations", "reason", "seconds_since_failure", "step"},
    "start.failed": {"class", "error", "node", "step"},
    "worker.failed": {
        "class",
        "error",
        "exception",
        "exit_code",
        "node",
        "others",
        "pid",
        "rank",
        "stderr",
        "traceback",
    },
    "worker.raised": {"class", "error", "exception", "final", "traceback"},
    "worker.lingered": {"frames", "node", "rank", "reason", "seconds", "stacks"},
    "process.left_behind": {"command", "node", "pid", "was_killed"},
    "standbys.ready": {"memory", "node", "pids", "seconds", "without_device"},
    "standbys.off": {"node", "reason"},
    "compiler.cache": {"action", "bytes", "files", "node", "seconds"},
    "compiler.cache_failed": {"action", "node", "reason"},
    "rank.slow": {"device", "factor", "node", "others_s", "own_s", "rank", "step_s"},
    "node.joined": {"host", "node", "nproc"},
    "node.left": {"node"},
    "node.lost": {"node", "reason"},
    "node.excluded": {"node", "reason"},
    "devices.checked": {"devices", "faults", "node", "notes", "reason", "seconds"},
    "worker.stuck": {"node", "pid", "rank", "state"},
    "node.awaited": {"least", "present"},
    "training.started": {
        "device",
        "epoch",
        "from_memory",
        "parameters",
        "restore_s",
        "restored_from",
        "samples",
        "steps",
    },
    "training.first_step": {"seconds_since_failure"},
    "training.compiled": {"compiled", "from_cache", "seconds"},
    "training.stopped": {"by_rank", "reason"},
    "training.left": set(),
    "training.finished": {"best", "epoch", "samples"},
    "snapshot.staged": {"bytes", "name", "stall_s", "trigger"},
    "staging.single": {"reason"},
    "staging.overtaken": {"name"},
    "held.off": {"reason"},
    "held.pauses": {"reason"},
    "held.damaged": {"of_rank"},
    "held.received": {"bytes", "from_node", "seconds"},
    "held.lost": {"reason"},
    "snapshot.committed": {"bytes", "name", "seconds", "trigger"},
    "snapshot.chosen": {"name"},
    "options.changed": {"options"},
    "job.changed": {"now", "snapshot", "was"},
    "snapshot.rejected": {"name", "reason"},
    "snapshot.cleared": {"name", "reason"},
    "snapshot.failed": {"name", "reason"},
    "snapshot.removed": {"name"},
    "store.trouble": {"attempt", "class", "error", "operation", "pause_s"},
    "drain.requested": {"grace_s", "reason"},
    "drain.completed": {"seconds", "step"},
    "budget.charged": {"class", "left"},
    "budget.spent": {"budget", "class"},
    "budget.refilled": {"budget"},
    "dataset.opened": {"fingerprint", "name", "samples", "shards", "source", "values"},
    "parameters.grouped": {"groups"},
    "order.declared": {"facts", "kind", "samples", "seconds"},
    "dataset.passed": {"samples", "shard"},
    "dataset.smaller_than_batch": {"batch", "samples", "steps"},
    "scale.not_reached": {"changes", "seconds"},
    "state.left_out": {"name", "type", "help"},
    "best.reset": {"best", "measured_by", "now"},
    "kind.changed": {"changed"},
    "replicas.not_compared": {"reason"},
    "offload.left_out": set(),
    "preload.refused": {"module", "reason"},
    "entry_point.edited": {"path"},
    "drift.found": {"differences", "launch"},
    "dataset.varies": {"generators", "name", "parts", "sample", "type"},
    "dataset.unseen": {"name", "types"},
    "overlap.found": {"compared", "found", "looked_up", "pair", "samples"},
    "record.damaged": {"path", "reason"},
    "connection.refused": {"address", "connections", "reason"},
    "sink.failed": {"error", "sink"},
    "sink.recovered": {"seconds", "sink"},
    "sink.sending": {"points", "seconds", "sink"},
    "sink.unsent": {"error", "points", "sink"},
    "follower.lost": {"log", "pause_s", "reason"},
    "profile.requested": {"profile", "ranks", "steps"},
    "profile.started": {"profile", "step", "steps"},
    "profile.finished": {"bytes", "first_step", "last_step", "path", "profile", "seconds"},
    "profile.failed": {"profile", "reason"},
    "environment.found": {"device", "files", "modules"},
    "agent.restarted": {"error", "exit_code", "node"},
    "hang.detected": {
        "dumps",
        "frames",
        "limit_s",
        "node",
        "phase",
        "rank",
        "reason",
        "seconds",
        "stacks",
        "step",
    },
    "log.left_out": {"bytes", "lines", "node", "rank", "stream"},
    "worker.warned": {"category", "in_generation", "node", "place", "rank", "text", "times"},
    "loss.skipped": {"loss"},
    "loss.unweighed": {"help", "reason"},
    "data.own": {"kept"},
    "stage.started": {"stage", "steps", "samples"},
    "state.put_back": {"names", "snapshot"},
    "loop.changed": {"changes"},
    "loss.unused": {"keys"},
    "mfu.unknown": {"device"},
    "step": {"epoch", "in_epoch", "loss", "lr", "samples", "seconds", "time"},
    "evaluation": {"best", "best_of", "epoch", "eval", "eval_raw", "in_epoch", "seconds", "time", "weights"},
}
FROZEN_FROM_WORKERS = {
    "training.compiled",
    "best.reset",
    "data.own",
    "stage.started",
    "state.put_back",
    "loop.changed",
    "dataset.opened",
    "dataset.passed",
    "dataset.smaller_than_batch",
    "dataset.unseen",
    "dataset.varies",
    "log.left_out",
    "loss.skipped",
    "loss.unused",
    "loss.unweighed",
    "mfu.unknown",
    "snapshot.chosen",
    "snapshot.committed",
    "snapshot.failed",
    "snapshot.rejected",
    "snapshot.removed",
    "snapshot.staged",
    "held.damaged",
    "held.lost",
    "held.off",
    "held.pauses",
    "held.received",
    "staging.overtaken",
    "staging.single",
    "state.left_out",
    "options.changed",
    "offload.left_out",
    "overlap.found",
    "parameters.grouped",
    "order.declared",
    "kind.changed",
    "replicas.not_compared",
    "store.trouble",
    "training.finished",
    "training.first_step",
    "training.left",
    "training.started",
    "training.stopped",
    "profile.started",
    "profile.finished",
    "profile.failed",
}


def test_event_names_and_fields_are_frozen() -> None:
    """Adding an event or a field is a line here; renaming or removing one is a break that needs a changelog."""
    assert {name: set(event.fields) for name, event in events.EVENTS.items()} == FROZEN


def test_common_fields_are_frozen() -> None:
    """Every line has these; lines of workers have the second set too."""
    assert events.COMMON_FIELDS == ("timestamp", "level", "event", "job", "run_id", "generation")
    assert events.WORKER_FIELDS == ("node", "rank", "world_size", "step")


def test_what_is_copied_from_workers_is_frozen() -> None:
    """These lines of rank logs are part of the run's truth."""
    copied = {event for event in events.EVENTS.values() if event.emitter == "worker" and event.is_kept}
    assert copied == FROZEN_FROM_WORKERS


def test_every_name_is_a_constant_with_a_meaning() -> None:
    """Each event has one constant, a sentence and no field twice."""
    constants = {v for k, v in vars(events).items() if k.isupper() and isinstance(v, str) and k != "OURS"}
    assert constants == set(events.EVENTS)
    assert all(e.meaning and len(set(e.fields)) == len(e.fields) for e in events.EVENTS.values())


def test_every_literal_that_names_an_event_is_in_the_schema() -> None:
    """Text like `snapshot.commited` anywhere in the package would be an event nobody documented."""
    families = "|".join(
        sorted({name.partition(".")[0] for name in events.EVENTS if "." in name} - {"dataset", "job"})
    )
    looks_like_one = re.compile(rf"({families})\.[a-z_]+")
    texts = {path: path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob("*.py"))}
    found = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}: {node.value}"
        for path, text in texts.items()
        if looks_like_one.search(text)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and looks_like_one.fullmatch(node.value)
        if node.value not in {**events.EVENTS, **fault_injection.POINTS, **dict.fromkeys(NAMES_ELSEWHERE, "")}
        and not node.value.endswith(NOT_EVENTS)
    ]
    assert found == []


def test_no_scalar_of_a_job_can_hide_a_field_of_a_metrics_line() -> None:
    """Its name is refused: metrics.jsonl would have two things under one name."""
    fields = {*events.COMMON_FIELDS, *events.WORKER_FIELDS, *events.STEP.fields, *events.EVALUATION.fields}
    assert [] == [name for name in sorted(fields) if not run_files.is_ours(name)]
