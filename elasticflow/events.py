"""Every event name and its fields: the log schema, frozen by a test.

Every line has `timestamp, level, event, job, run_id, generation`; lines written by workers add
`node, rank, world_size, step`. `events.jsonl` holds one line per thing that happened to the run.
"""

from __future__ import annotations

from typing import Any

EventRecord = dict[str, Any]
"""One line of a log or of events.jsonl, as JSON has it: the fields of every line and those of its event."""

RUN_STARTED = "run.started"
RUN_FINISHED = "run.finished"
RUN_FAILED = "run.failed"
RUN_INTERRUPTED = "run.interrupted"
SUPERVISOR_LOST = "supervisor.lost"
GENERATION_STARTED = "generation.started"
GENERATION_ENDED = "generation.ended"
WORKER_FAILED = "worker.failed"
WORKER_RAISED = "worker.raised"
PROCESS_LEFT_BEHIND = "process.left_behind"
NODE_JOINED = "node.joined"
NODE_LEFT = "node.left"
NODE_LOST = "node.lost"
NODE_EXCLUDED = "node.excluded"
NODE_AWAITED = "node.awaited"
TRAINING_STARTED = "training.started"
TRAINING_FIRST_STEP = "training.first_step"
TRAINING_STOPPED = "training.stopped"
TRAINING_FINISHED = "training.finished"
SNAPSHOT_STAGED = "snapshot.staged"
STAGING_SINGLE = "staging.single"
SNAPSHOT_COMMITTED = "snapshot.committed"
SNAPSHOT_CHOSEN = "snapshot.chosen"
SNAPSHOT_REJECTED = "snapshot.rejected"
SNAPSHOT_CLEARED = "snapshot.cleared"
SNAPSHOT_FAILED = "snapshot.failed"
SNAPSHOT_REMOVED = "snapshot.removed"
STORE_TROUBLE = "store.trouble"
DRAIN_REQUESTED = "drain.requested"
DRAIN_COMPLETED = "drain.completed"
BUDGET_CHARGED = "budget.charged"
BUDGET_SPENT = "budget.spent"
BUDGET_REFILLED = "budget.refilled"
DATASET_OPENED = "dataset.opened"
DATASET_PASSED = "dataset.passed"
DATASET_SMALLER_THAN_BATCH = "dataset.smaller_than_batch"
SCALE_NOT_REACHED = "scale.not_reached"
STATE_LEFT_OUT = "state.left_out"
BEST_RESET = "best.reset"
KIND_CHANGED = "kind.changed"
REPLICAS_NOT_COMPARED = "replicas.not_compared"
PRELOAD_REFUSED = "preload.refused"
ENTRY_POINT_EDITED = "entry_point.edited"
AGENT_RESTARTED = "agent.restarted"
HANG_DETECTED = "hang.detected"
LOSS_SKIPPED = "loss.skipped"
RECORD_DAMAGED = "record.damaged"
LOSS_UNWEIGHED = "loss.unweighed"
LOSS_UNUSED = "loss.unused"
DRIFT_FOUND = "drift.found"
OVERLAP_FOUND = "overlap.found"
ENVIRONMENT_FOUND = "environment.found"

STEP = "step"
EVALUATION = "evaluation"

COMMON_FIELDS = ("timestamp", "level", "event", "job", "run_id", "generation")
WORKER_FIELDS = ("node", "rank", "world_size", "step")

# name -> (what it means, its own fields)
SCHEMA: dict[str, tuple[str, tuple[str, ...]]] = {
    RUN_STARTED: ("a launch began", ("launch", "resumed", "pid", "torch", "uri", "endpoint")),
    RUN_FINISHED: (
        "training reached its end, or the job's code stopped it, and the last snapshot is committed",
        ("step", "seconds", "durations", "run_durations", "restarts", "stopped"),
    ),
    RUN_FAILED: (
        "the run ended with an error",
        ("class", "error", "why", "rank", "exit_code", "step", "seconds", "durations", "run_durations"),
    ),
    RUN_INTERRUPTED: (
        "the launch ended before training did; the same command goes on, from the snapshot of step `goes_on_from`",
        ("reason", "step", "goes_on_from", "seconds", "durations", "run_durations"),
    ),
    SUPERVISOR_LOST: (
        "the supervisor of an earlier launch had ended without a word: what is known of it, and what is likely",
        ("launch", "step", "kind", "known", "likely"),
    ),
    GENERATION_STARTED: ("a worker group was formed", ("world_size", "nodes", "reason")),
    GENERATION_ENDED: ("a worker group ended", ("class", "reason", "step")),
    WORKER_FAILED: (
        "the first worker that failed in a generation",
        ("rank", "node", "pid", "exit_code", "class", "error", "traceback", "others", "stderr"),
    ),
    WORKER_RAISED: (
        "an exception left a worker's train.py; final: another try would end in the same way",
        ("class", "error", "traceback", "final"),
    ),
    PROCESS_LEFT_BEHIND: (
        "a process that outlived the worker which started it was ended; without a node it was no living agent's",
        ("node", "pid", "command", "was_killed"),
    ),
    NODE_JOINED: ("a node's agent is ready", ("node", "host", "nproc")),
    NODE_LEFT: ("a node asked to leave and was let go", ("node",)),
    NODE_LOST: ("a node's agent is gone", ("node", "reason")),
    NODE_EXCLUDED: (
        "a node failed twice in a row while others did not: it takes no part",
        ("node", "reason"),
    ),
    NODE_AWAITED: ("fewer nodes are ready than the job needs", ("present", "least")),
    TRAINING_STARTED: (
        "all ranks are about to train",
        ("restored_from", "from_memory", "epoch", "samples", "steps", "device", "parameters"),
    ),
    TRAINING_FIRST_STEP: ("the first step of a generation is finished", ("seconds_since_failure",)),
    TRAINING_STOPPED: ("the job's own code raised StopTraining: all ranks end here", ("reason", "by_rank")),
    TRAINING_FINISHED: ("the last step is finished", ("epoch", "samples", "best")),
    SNAPSHOT_STAGED: ("training goes on; the writer has the bytes", ("name", "bytes", "stall_s", "trigger")),
    STAGING_SINGLE: ("memory is short: a snapshot waits until the one before is written", ("reason",)),
    SNAPSHOT_COMMITTED: ("the snapshot exists", ("name", "bytes", "seconds", "trigger")),
    SNAPSHOT_CHOSEN: (
        "every rank has read and verified the snapshot that the generation goes on from",
        ("name",),
    ),
    SNAPSHOT_REJECTED: (
        "a snapshot was not loaded, or starts from it failed: it is set aside",
        ("name", "reason"),
    ),
    SNAPSHOT_CLEARED: (
        "a snapshot set aside was not to blame for failed starts and is good again",
        ("name", "reason"),
    ),
    SNAPSHOT_FAILED: ("a snapshot could not be written; older ones are untouched", ("name", "reason")),
    SNAPSHOT_REMOVED: ("retention removed a snapshot", ("name",)),
    STORE_TROUBLE: (
        "a snapshot store failed for a reason that may pass and is asked again; told at most every 10 s",
        ("operation", "class", "error", "attempt", "pause_s"),
    ),
    DRAIN_REQUESTED: ("workers are asked to leave after a step", ("reason", "grace_s")),
    DRAIN_COMPLETED: ("all workers left after the same step", ("step", "seconds")),
    BUDGET_CHARGED: ("a failure was counted", ("class", "left")),
    BUDGET_SPENT: ("no restart is left", ("class", "budget")),
    BUDGET_REFILLED: ("the budget is full again", ("budget",)),
    DATASET_OPENED: (
        "which data is trained or evaluated on",
        ("name", "samples", "shards", "fingerprint", "source"),
    ),
    DATASET_PASSED: (
        "a data shard without `skip` is read again up to where the run goes on; said every ten seconds",
        ("shard", "samples"),
    ),
    DATASET_SMALLER_THAN_BATCH: (
        "one batch is more than the whole training data: a pass over it is not even one step",
        ("samples", "batch", "steps"),
    ),
    SCALE_NOT_REACHED: ("training ended before nodes were to come or go on cue", ("changes", "seconds")),
    KIND_CHANGED: (
        "exact consistency goes on with other machines or libraries than its snapshot was taken on: bits may differ",
        ("changed",),
    ),
    REPLICAS_NOT_COMPARED: (
        "workers may round otherwise than each other, so that a rank that goes astray is not found",
        ("reason",),
    ),
    STATE_LEFT_OUT: ("an object has state of its own that no snapshot holds", ("name", "type")),
    PRELOAD_REFUSED: ("a module is imported in each worker instead of once per node", ("module", "reason")),
    ENTRY_POINT_EDITED: ("train.py was edited by hand and runs as edited", ("path",)),
    AGENT_RESTARTED: ("a dead agent was started again", ("node", "exit_code", "error")),
    HANG_DETECTED: (
        "no rank makes progress; which one the others wait for, and where it is",
        ("rank", "node", "phase", "step", "seconds", "limit_s", "reason", "frames", "stacks"),
    ),
    LOSS_SKIPPED: ("a step with a non-finite loss left the weights alone", ("loss",)),
    RECORD_DAMAGED: (
        "a file of the run is damaged, and the run goes on without what was in it",
        ("path", "reason"),
    ),
    LOSS_UNWEIGHED: (
        "the loss depends on how a batch is cut, so on the number of workers: it is a mean over uncounted items",
        ("reason", "help"),
    ),
    LOSS_UNUSED: ("the dict that the training step returns holds keys that nobody reads", ("keys",)),
    DRIFT_FOUND: (
        "the run goes on with what changed since its last launch: job, own code, libraries, machine",
        ("launch", "differences"),
    ),
    ENVIRONMENT_FOUND: (
        "what rank 0 has imported and runs on; kept in environment.json, not in events.jsonl",
        ("modules", "files", "device"),
    ),
    STEP: (
        "one finished optimizer step, in_epoch counted from 1; lr has names where there are several parameter groups",
        ("epoch", "in_epoch", "samples", "loss", "lr", "time", "seconds"),
    ),
    BEST_RESET: (
        "the best value so far was measured by another evaluation: it is looked for anew",
        ("best", "measured_by", "now"),
    ),
    OVERLAP_FOUND: (
        "samples of the evaluation are in the training data: found of looked_up ones, compared with so many of samples",
        ("found", "looked_up", "compared", "samples", "pair"),
    ),
    EVALUATION: (
        "metrics over the evaluation set, of the weights named (ema, raw), and of the raw ones beside the average's",
        ("epoch", "in_epoch", "eval", "weights", "eval_raw", "best", "time", "seconds"),
    ),
}

# Lines of a worker's log that the supervisor copies into events.jsonl; by convention one rank writes each.
FROM_WORKERS = frozenset(
    {
        TRAINING_STARTED,
        TRAINING_FIRST_STEP,
        TRAINING_STOPPED,
        TRAINING_FINISHED,
        SNAPSHOT_STAGED,
        STAGING_SINGLE,
        SNAPSHOT_COMMITTED,
        SNAPSHOT_CHOSEN,
        SNAPSHOT_REJECTED,
        SNAPSHOT_FAILED,
        SNAPSHOT_REMOVED,
        STORE_TROUBLE,
        DATASET_OPENED,
        DATASET_PASSED,
        DATASET_SMALLER_THAN_BATCH,
        STATE_LEFT_OUT,
        OVERLAP_FOUND,
        BEST_RESET,
        KIND_CHANGED,
        REPLICAS_NOT_COMPARED,
        LOSS_SKIPPED,
        LOSS_UNWEIGHED,
        LOSS_UNUSED,
    }
)
