"""Every event of a run: the log schema, frozen by a test.

Every line has `timestamp, level, event, job, run_id, generation`; lines written by workers add
`node, rank, world_size, step`. `events.jsonl` has one line for each event of the run.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal, NamedTuple, Self

Level = Literal["debug", "info", "warning", "error"]
Emitter = Literal["supervisor", "worker"]
Symbol = Literal["start", "done", "wrong", "again", "stop", "note", "warning"]
Tone = Literal["begin", "good", "bad", "notice", "plain", "quiet"]
EventRecord = dict[str, Any]
"""One line of a log or of events.jsonl, parsed from JSON: the fields of every line and those of its event."""

OURS = "elasticflow"
"""`origin` of the workers' lines that programs follow; a job's own lines may have the same event names."""
COMMON_FIELDS = ("timestamp", "level", "event", "job", "run_id", "generation")
WORKER_FIELDS = ("node", "rank", "world_size", "step")


class Template(NamedTuple):
    """A line for a person that needs only the event's fields.

    A field stands in braces: `{node}`. A word after it gives its form: `{seconds:span}`, `{loss:number}`,
    `{attempt:count}`, `{keys:list}`; any other word is a noun to count: `{steps:step}` is `1 step` or `1,437 steps`.

    Attributes:
        label: One or two words.
        text: The rest of the line.
        more: Further lines under the text.
        symbol: Sign for the kind of event.
        tone: Colour of the line.
    """

    label: str
    text: str
    more: tuple[str, ...] = ()
    symbol: Symbol = "warning"
    tone: Tone = "notice"


class Event(str):
    """The name of an event together with its schema; this object is used wherever the name is needed.

    Attributes:
        fields: The event's own fields, beside those of every line; `FIELDS` describes them.
        optional: Own fields of the event that a line may lack; they have a `?` in the table below.
        emitter: Process that writes the event. The supervisor reads events of workers in their logs.
        is_kept: True: the event is in events.jsonl; by convention only one of several workers writes it.
        may_be_supervisors: True: the supervisor writes the event, too, about its own acts or a snapshot writer's,
            without a worker's fields.
        line: Line for a person; None: there is no line, or it needs more than the fields.
    """

    __slots__ = ("emitter", "fields", "is_kept", "level", "line", "may_be_supervisors", "meaning", "optional")
    meaning: str
    fields: tuple[str, ...]
    optional: frozenset[str]
    level: Level
    emitter: Emitter
    is_kept: bool
    may_be_supervisors: bool
    line: Template | None

    def __new__(
        cls,
        name: str,
        meaning: str,
        fields: tuple[str, ...],
        *,
        level: Level = "info",
        emitter: Emitter = "supervisor",
        is_kept: bool = True,
        may_be_supervisors: bool = False,
        line: Template | None = None,
    ) -> Self:
        """Return the event called *name*."""
        event = super().__new__(cls, name)
        event.meaning, event.level, event.emitter = meaning, level, emitter
        event.fields = tuple(name.removesuffix("?") for name in fields)
        event.optional = frozenset(name[:-1] for name in fields if name.endswith("?"))
        event.is_kept, event.may_be_supervisors, event.line = is_kept, may_be_supervisors, line
        return event

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        """Reduce the event to its plain name, which copies and other processes get."""
        return str, (str(self),)


_warning = partial(Event, level="warning")
_of_worker = partial(Event, emitter="worker")
_warning_of_worker = partial(_of_worker, level="warning")

RUN_STARTED = Event(
    "run.started",
    "a launch began",
    ("launch", "resumed", "pid", "torch", "uri", "endpoint", "resume_command", "schema"),
)
RUN_FINISHED = Event(
    "run.finished",
    "training reached its end, or the job's code stopped it, and the last snapshot is committed",
    ("step", "seconds", "durations", "run_durations", "restarts", "stopped"),
)
RUN_FAILED = Event(
    "run.failed",
    "the run ended with an error",
    ("class", "error", "why", "rank", "exit_code", "step", "seconds", "durations", "run_durations"),
    level="error",
)
RUN_INTERRUPTED = Event(
    "run.interrupted",
    "the launch ended before training did; the same command resumes from the snapshot of step `goes_on_from`",
    ("reason", "step", "goes_on_from", "seconds", "durations", "run_durations"),
)
SUPERVISOR_LOST = _warning(
    "supervisor.lost",
    "the supervisor of an earlier launch had ended without a word; with the known facts and the likely cause",
    ("launch", "step", "kind", "known", "likely", "last_seen", "in_generation"),
)
GENERATION_STARTED = Event(
    "generation.started", "a worker group was formed", ("world_size", "nodes", "members", "reason")
)
GENERATION_ENDED = Event(
    "generation.ended",
    "a worker group ended; with the use of the time since the previous group ended",
    ("class", "reason", "step", "seconds_since_failure", "durations"),
)
START_FAILED = _warning(
    "start.failed",
    "no worker group could begin: an agent died that the group needs, or its generation could not be claimed",
    ("class", "error", "node", "step"),
)
WORKER_FAILED = Event(
    "worker.failed",
    "the first worker that failed in a generation",
    ("rank", "node", "pid", "exit_code", "class", "error", "traceback", "exception", "others", "stderr"),
    level="error",
)
WORKER_RAISED = _of_worker(
    "worker.raised",
    "an exception left a worker's train.py; final: another try would end in the same way",
    ("class", "error", "traceback", "final", "exception"),
    level="error",
    is_kept=False,
)
WORKER_WARNED = _warning(
    "worker.warned",
    "the job's code or a library gave a warning; told at the first of its category and place in a launch, each time that it has become "
    "ten times as many, and at the end of the launch: times is since it was told before, by all workers",
    ("node", "rank", "in_generation", "category", "place", "text", "times"),
)
WORKER_LINGERED = _warning(
    "worker.lingered",
    "a worker did not end although its peers had ended well, and showed no sign of life: it was ended, and counts as one that ended well",
    ("node", "rank", "seconds", "reason", "frames", "stacks"),
    line=Template(
        "lingered",
        "rank {rank} did not end after its peers, without a sign of life for {seconds:span}, and was ended: {reason}",
        ("stacks: {stacks}",),
    ),
)
PROCESS_LEFT_BEHIND = _warning(
    "process.left_behind",
    "a process that outlived the worker which started it was ended; without a node it was no living agent's",
    ("node", "pid", "command", "was_killed"),
)
STANDBYS_READY = Event(
    "standbys.ready",
    "each worker of a node has a process that is ready to take its place",
    ("node", "pids", "seconds", "memory", "without_device"),
)
STANDBYS_OFF = _warning(
    "standbys.off",
    "a node keeps no standby workers any more",
    ("node", "reason"),
    line=Template("no standby", "{node}: {reason}"),
)
COMPILER_CACHE = Event(
    "compiler.cache",
    "a node saved torch.compile's cache beside the snapshots, or loaded it from there",
    ("node", "action", "files", "bytes", "seconds"),
)
COMPILER_CACHE_FAILED = _warning(
    "compiler.cache_failed",
    "a node could not keep, save or load torch.compile's cache: training continues",
    ("node", "action", "reason"),
)
NODE_JOINED = Event("node.joined", "a node's agent is ready", ("node", "host", "nproc"))
NODE_LEFT = Event(
    "node.left",
    "a node asked to leave and was let go",
    ("node",),
    line=Template("node left", "{node} asked to leave and was let go", symbol="note", tone="plain"),
)
NODE_LOST = _warning(
    "node.lost",
    "a node's agent is gone",
    ("node", "reason"),
    line=Template("node lost", "{node}: {reason}", symbol="wrong", tone="bad"),
)
NODE_EXCLUDED = _warning(
    "node.excluded",
    "a node takes no part any more: it failed twice in a row while others did not, or one of its devices is faulty",
    ("node", "reason"),
    line=Template("node excluded", "{node} takes no part any more: {reason}", symbol="wrong", tone="bad"),
)
DEVICES_CHECKED = Event(
    "devices.checked",
    "the devices of a node were checked, after a failure that one of them may have caused",
    ("node", "devices", "faults", "notes", "reason", "seconds"),
    line=Template("devices", "{node}: {reason}", symbol="note", tone="plain"),
)
WORKER_STUCK = _warning(
    "worker.stuck",
    "a worker did not end although it was killed, as a process does in a driver's call: its device may still be in use",
    ("rank", "node", "pid", "state"),
    line=Template(
        "worker stuck",
        "rank {rank} of {node} (pid {pid}) does not end, though it was killed: the kernel has it in state {state}",
        ("its GPU, if it has one, may still be in use: it is checked before the next worker starts",),
        tone="bad",
    ),
)
NODE_AWAITED = _warning(
    "node.awaited",
    "fewer nodes are ready than the job needs",
    ("present", "least"),
    line=Template("waiting", "{present:count} of at least {least:node} ready"),
)
RANK_SLOW = _warning(
    "rank.slow",
    "for a while, this rank's own part of a step, divided by its share of the samples, took `factor` times as long as the median of "
    "the others, which wait for it",
    ("rank", "node", "device", "factor", "own_s", "others_s", "step_s"),
    line=Template(
        "slow rank",
        "rank {rank} ({node}, {device}) takes {own_s:span} of its own for a step, {factor} times as long as the others: "
        "they wait for it",
    ),
)
SCRIPT_STARTED = Event(
    "script.started", "all workers of a group run the job's own script", ("script", "seconds_since_failure")
)
SCRIPT_BEGAN_ANEW = _warning(
    "script.began_anew",
    "the job's own script was started again, and has reported no step since the run began: it is at "
    "its beginning, unless it loads a checkpoint of its own",
    ("script",),
    line=Template(
        "no steps told",
        "{script} was started again: it trains on if it loads a checkpoint of its own, else it began anew",
        (
            "help: elasticflow.join tells steps, and resumes in the middle of an epoch: elasticflow guide own-loop",
        ),
    ),
)
TRAINING_STARTED = _of_worker(
    "training.started",
    "all ranks are about to train",
    ("restored_from", "from_memory", "restore_s", "epoch", "samples", "steps", "device", "parameters"),
)
TRAINING_FIRST_STEP = _of_worker(
    "training.first_step",
    "the first step of a generation is finished",
    ("seconds_since_failure",),
)
TRAINING_COMPILED = _of_worker(
    "training.compiled",
    "torch.compile's share of a generation's first step, with the graphs from its cache and the "
    "compiled graphs",
    ("seconds", "from_cache", "compiled"),
)
TRAINING_STOPPED = _of_worker(
    "training.stopped",
    "the job's own code raised StopTraining, or train.stop_when came true (by_rank is null): all ranks end here",
    ("reason", "by_rank"),
)
TRAINING_LEFT = _of_worker(
    "training.left",
    "all ranks leave before the last step, as one of them was asked to: the run is not finished",
    (),
)
TRAINING_FINISHED = _of_worker("training.finished", "the last step is finished", ("epoch", "samples", "best"))
SNAPSHOT_STAGED = _of_worker(
    "snapshot.staged",
    "the writer has the bytes, and training continues",
    ("name", "bytes", "stall_s", "trigger"),
)
STAGING_SINGLE = _warning_of_worker(
    "staging.single",
    "memory is short: a snapshot waits until the previous one is written",
    ("reason",),
    line=Template("short of memory", "each snapshot waits until the one before is written: {reason}"),
)
STAGING_OVERTAKEN = _warning_of_worker(
    "staging.overtaken",
    "a tensor was written while it was copied to the memory tier, and not by its optimizer's step: this step is not held",
    ("name",),
    line=Template("not in memory", "step {step}: {name} was written while it was copied"),
)
HELD_OFF = _of_worker(
    "held.off",
    'with `memory = "auto"`: states are not held in memory, so that a death costs the steps since the last snapshot',
    ("reason",),
    line=Template("not in memory", "a death costs the steps since the last snapshot: {reason}"),
)
HELD_PAUSES = _of_worker(
    "held.pauses",
    'with `memory = "auto"`: there is no memory for a third state, so that none is held while a snapshot is being written from another',
    ("reason",),
    line=Template("not in memory", "nothing is held while a snapshot is being written: {reason}"),
)
HELD_DAMAGED = _warning_of_worker(
    "held.damaged",
    "the shard of a rank, counted on its node, has changed in memory since it was held: training resumes from another node's copy, an older state or a snapshot",
    ("of_rank",),
    line=Template("not from memory", "step {step}: the part of rank {of_rank} has changed since it was held"),
)
HELD_RECEIVED = _of_worker(
    "held.received",
    "a node that lacked the newest held state has received it from another node's memory",
    ("from_node", "bytes", "seconds"),
    line=Template(
        "from memory",
        "step {step}: {bytes} bytes came from the memory of node {from_node}",
        symbol="note",
        tone="plain",
    ),
)
HELD_LOST = _warning_of_worker(
    "held.lost",
    "a node cannot receive the newest held state: training resumes from a snapshot",
    ("reason",),
    line=Template("not from memory", "step {step}: {reason}"),
)
SNAPSHOT_COMMITTED = _of_worker(
    "snapshot.committed",
    "the snapshot exists",
    ("name", "bytes", "seconds", "trigger"),
    may_be_supervisors=True,
)
SNAPSHOT_CHOSEN = _of_worker(
    "snapshot.chosen",
    "every rank has read and verified the snapshot that the generation resumes from",
    ("name",),
)
OPTIONS_CHANGED = _of_worker(
    "options.changed",
    "optimizer or scheduler options changed since the snapshot; the job file's apply from here",
    ("options",),
)
JOB_CHANGED = _warning_of_worker(
    "job.changed",
    "the snapshot that a generation resumes from was taken under another job: digests of both",
    ("snapshot", "was", "now"),
    is_kept=False,
)
SNAPSHOT_REJECTED = _warning_of_worker(
    "snapshot.rejected",
    "a snapshot was not loaded, or starts from it failed: it is set aside",
    ("name", "reason"),
    may_be_supervisors=True,
    line=Template("set aside", "snapshot {name}: {reason}"),
)
SNAPSHOT_CLEARED = Event(
    "snapshot.cleared",
    "a snapshot set aside was not to blame for failed starts and is good again",
    ("name", "reason"),
    line=Template("good again", "snapshot {name}: {reason}", symbol="note", tone="quiet"),
)
SNAPSHOT_FAILED = _warning_of_worker(
    "snapshot.failed",
    "a snapshot could not be written; older ones are untouched",
    ("name", "reason"),
    may_be_supervisors=True,
    line=Template(
        "no snapshot",
        "of step {step}: {reason}",
        ("older snapshots are untouched; training continues",),
        tone="bad",
    ),
)
SNAPSHOT_REMOVED = _of_worker(
    "snapshot.removed", "retention removed a snapshot", ("name",), may_be_supervisors=True
)
STORE_TROUBLE = _warning_of_worker(
    "store.trouble",
    "a snapshot store failed for a transient reason and is asked again; reported at most every 10 s",
    ("operation", "class", "error", "attempt", "pause_s"),
    may_be_supervisors=True,
    line=Template(
        "store",
        "{operation}: {error}",
        ("try {attempt:count}; the next in {pause_s:span}; training continues",),
    ),
)
DRAIN_REQUESTED = Event("drain.requested", "workers are asked to leave after a step", ("reason", "grace_s"))
DRAIN_COMPLETED = Event(
    "drain.completed",
    "all workers left after the same step",
    ("step", "seconds"),
    line=Template("drained", "all workers left after {seconds:span}", symbol="done", tone="plain"),
)
BUDGET_CHARGED = Event("budget.charged", "a failure was counted", ("class", "left"))
BUDGET_SPENT = Event(
    "budget.spent",
    "no restart is left",
    ("class", "budget"),
    level="error",
    line=Template("no restart", "restarts.budget = {budget} is spent", symbol="wrong", tone="bad"),
)
BUDGET_REFILLED = Event(
    "budget.refilled",
    "the budget is full again",
    ("budget",),
    line=Template("budget", "full again: {budget:restart}", symbol="note", tone="quiet"),
)
DATASET_OPENED = _of_worker(
    "dataset.opened",
    "which data is trained or evaluated on",
    ("name", "samples?", "shards?", "values?", "fingerprint", "source"),
)
ORDER_DECLARED = _of_worker(
    "order.declared",
    "the order of samples, if the job sets it: its kind, the samples of an epoch, further facts that "
    "identify it",
    ("kind", "samples", "facts", "seconds"),
)
PARAMETERS_GROUPED = _of_worker(
    "parameters.grouped",
    "which parameters each of [[optimizer.groups]] took: its tensors, the numbers in them, the options of its own",
    ("groups",),
)
DATASET_PASSED = _of_worker(
    "dataset.passed",
    "a data shard without `skip` is read again up to the position of the run; reported every ten seconds",
    ("shard", "samples"),
    line=Template("data", "shard {shard}: {samples:sample} read again", symbol="note", tone="quiet"),
)
DATASET_SMALLER_THAN_BATCH = _warning_of_worker(
    "dataset.smaller_than_batch",
    "one batch is more than the whole training data: a pass over it is not even one step",
    ("samples", "batch", "steps"),
)
DATASET_VARIES = _warning_of_worker(
    "dataset.varies",
    "a sample varies when it is read twice under one seed: a restart reads other samples",
    ("name", "sample", "type", "parts", "generators"),
)
DATASET_UNSEEN = _warning_of_worker(
    "dataset.unseen",
    "content of samples that was not looked at: objects of these classes cannot be looked into",
    ("name", "types"),
)
SCALE_NOT_REACHED = Event(
    "scale.not_reached",
    "training ended before nodes were to come or go on cue",
    ("changes", "seconds"),
    line=Template("scale", "{changes:list}: not reached, training ended after {seconds:span}", symbol="note"),
)
KIND_CHANGED = _warning_of_worker(
    "kind.changed",
    "an exact run resumes with other machines or libraries than its snapshot: bits may differ",
    ("changed",),
)
REPLICAS_NOT_COMPARED = _of_worker(
    "replicas.not_compared",
    "replica comparison is off: workers may round differently",
    ("reason",),
    line=Template("not compared", "replica comparison is off: {reason}", symbol="note", tone="quiet"),
)
OFFLOAD_LEFT_OUT = _of_worker(
    "offload.left_out",
    "offload is left out: the workers train on CPUs, whose memory holds the model anyway",
    (),
    line=Template(
        "offload",
        "left out: the workers train on CPUs, whose memory holds the model",
        symbol="note",
        tone="quiet",
    ),
)
STATE_LEFT_OUT = _warning_of_worker(
    "state.left_out",
    "an object has state of its own that no snapshot holds",
    ("name", "type", "help?"),
)
PRELOAD_REFUSED = _warning(
    "preload.refused",
    "a module is imported in each worker instead of once per node",
    ("module", "reason"),
    line=Template("preload", "{module} is imported in each worker: {reason}", symbol="note", tone="quiet"),
)
ENTRY_POINT_EDITED = _warning(
    "entry_point.edited",
    "train.py was edited by hand and runs as edited",
    ("path",),
    line=Template("edited", "{path} was edited by hand and runs as edited"),
)
AGENT_RESTARTED = Event("agent.restarted", "a dead agent was started again", ("node", "exit_code", "error"))
HANG_DETECTED = _warning(
    "hang.detected",
    "no rank makes progress; with the rank that the others wait for, and its position",
    ("rank", "node", "phase", "step", "seconds", "limit_s", "reason", "frames", "stacks", "dumps"),
)
LOSS_SKIPPED = _warning_of_worker(
    "loss.skipped",
    "a step with a non-finite loss left the weights alone",
    ("loss",),
    line=Template("skipped", "step {step}: loss {loss:number}; the weights are left alone"),
)
RECORD_DAMAGED = _warning(
    "record.damaged",
    "a file of the run is damaged, and the run continues without its content",
    ("path", "reason"),
    line=Template("damaged", "{path} {reason}"),
)
LOSS_UNWEIGHED = _warning_of_worker(
    "loss.unweighed",
    "the loss depends on how a batch is cut, so on the number of workers: it is a mean over uncounted items",
    ("reason", "help"),
    line=Template(
        "loss",
        "the loss depends on how a batch is cut, so on the number of workers",
        ("{reason}", "help: {help}"),
    ),
)
DATA_OWN = _of_worker(
    "data.own",
    "the script reads its own data: elasticflow does not restore its position",
    ("kept",),
)
STAGE_STARTED = _of_worker(
    "stage.started",
    "a loop of the script's own begins its next stage: other data, or more epochs; `steps` is the run's last step as far as it is known",
    ("stage", "steps", "samples"),
)
STATE_PUT_BACK = _warning_of_worker(
    "state.put_back",
    "the script changed kept state between run.keep and its loop; a resumed run has the snapshot's state",
    ("names", "snapshot"),
)
LOOP_CHANGED = _warning_of_worker(
    "loop.changed",
    "the arguments of a script's loop differ from the snapshot's, and the run continues with them",
    ("changes",),
)
LOSS_UNUSED = _of_worker(
    "loss.unused",
    "the dict that the training step returns holds keys that nobody reads",
    ("keys",),
    line=Template(
        "loss", "the step's dict also holds {keys:list}, which nobody reads", symbol="note", tone="quiet"
    ),
)
MFU_UNKNOWN = _warning_of_worker(
    "mfu.unknown",
    "model.flops_per_sample is given, and the peak of the device is not known: no MFU is measured",
    ("device",),
    line=Template(
        "speed",
        "no MFU: the peak of {device} is not known",
        ("help: give it in logging.peak_flops, in FLOP/s of one device",),
        symbol="note",
    ),
)
DRIFT_FOUND = Event(
    "drift.found",
    "the run resumes with changes since its last launch: job, own code, libraries, machine",
    ("launch", "differences"),
)
SINK_FAILED = _warning(
    "sink.failed",
    "nothing gets through to a sink, which is tried again and again; training and other sinks continue",
    ("sink", "error"),
    line=Template(
        "sink", "{sink}: {error}", ("training continues; it is tried again and continues where it was",)
    ),
)
SINK_RECOVERED = Event(
    "sink.recovered",
    "a sink accepts points again, from the point of its failure",
    ("sink", "seconds"),
    line=Template(
        "sink", "{sink} takes what is sent again, after {seconds:span}", symbol="done", tone="plain"
    ),
)
SINK_SENDING = Event(
    "sink.sending",
    "the launch has ended and waits for a sink's remaining points, for at most so many more seconds",
    ("sink", "points", "seconds"),
)
SINK_UNSENT = _warning(
    "sink.unsent",
    "the launch ended before a sink had everything; the next launch or `elasticflow runs send` "
    "sends the rest",
    ("sink", "points", "error"),
)
FOLLOWER_LOST = _warning(
    "follower.lost",
    "the process that sends metrics and events to sinks has ended; another process continues after a pause",
    ("reason", "log", "pause_s"),
    line=Template("sinks", "the process that serves sinks {reason}; see {log}"),
)
PROFILE_REQUESTED = Event(
    "profile.requested",
    "`elasticflow profile` has asked for traces of the next steps",
    ("profile", "steps", "ranks"),
    line=Template(
        "profile", "a trace of {steps:step} of rank {ranks:list} was asked for", symbol="note", tone="plain"
    ),
)
PROFILE_STARTED = _of_worker(
    "profile.started",
    "a rank traces its next steps, after a warm-up step",
    ("profile", "step", "steps"),
)
PROFILE_FINISHED = _of_worker(
    "profile.finished",
    "a rank has written the trace of some steps",
    ("profile", "path", "first_step", "last_step", "bytes", "seconds"),
    line=Template(
        "profile",
        "rank {rank} has traced steps {first_step:count} to {last_step:count}",
        ("{path}",),
        symbol="done",
        tone="plain",
    ),
)
PROFILE_FAILED = _warning_of_worker(
    "profile.failed",
    "there will be no trace of a rank; training continues",
    ("profile", "reason"),
    may_be_supervisors=True,
    line=Template("profile", "no trace of rank {rank}: {reason}"),
)
# The level is low since the line is long and meant for programs.
ENVIRONMENT_FOUND = _of_worker(
    "environment.found",
    "what rank 0 has imported and runs on; kept in environment.json, not in events.jsonl",
    ("modules", "files", "device"),
    level="debug",
    is_kept=False,
)
LOG_LEFT_OUT = _warning_of_worker(
    "log.left_out",
    "a worker wrote more than its log may hold: how many lines and bytes of one of its streams were left out so far",
    ("node", "rank", "stream", "lines", "bytes"),
    may_be_supervisors=True,
)
CONNECTION_REFUSED = _warning(
    "connection.refused",
    "the launch refused a connection: wrong or no token, not elasticflow, or too many open files; "
    "reported once a minute at most",
    ("connections", "address", "reason"),
)
STEP = _of_worker(
    "step",
    "one finished optimizer step, in_epoch counted from 1; lr has names where there are several parameter groups; beside these "
    "count, ..._per_s, mfu and grad_norm where they are known, every few seconds memory_... and utilization of an accelerator, "
    "and the scalars that the job's own step returned",
    ("epoch", "in_epoch", "samples", "loss", "lr", "time", "seconds"),
    is_kept=False,
)
BEST_RESET = _of_worker(
    "best.reset",
    "the best value so far was measured by another evaluation: it is looked for anew",
    ("best", "measured_by", "now"),
)
OVERLAP_FOUND = _warning_of_worker(
    "overlap.found",
    "samples of the evaluation are in the training data: found of looked_up ones, compared with so many of samples",
    ("found", "looked_up", "compared", "samples", "pair"),
)
EVALUATION = _of_worker(
    "evaluation",
    "metrics over the evaluation set, of the weights named (ema, raw), and of the raw ones beside the average's",
    ("epoch", "in_epoch", "eval", "weights", "eval_raw?", "best", "best_of?", "time", "seconds"),
    is_kept=False,
)

EVENTS: dict[str, Event] = {event: event for event in list(globals().values()) if isinstance(event, Event)}
"""All events by name."""

SCHEMA_VERSION = 2
"""Version of the schema of events and lines, which `run.started` records. It grows when a field or an event is renamed or removed, or changes its type.

New events and new fields do not change the version: readers ignore names that they do not know.
"""


class Field(NamedTuple):
    """A field of an event or a line.

    Attributes:
        type: A name in `TYPES` of the events' JSON Schema; with a `?` at its end, the value may be null.
        otel: Attribute of OpenTelemetry's semantic conventions; None: `elasticflow.<name>`.
    """

    type: str
    meaning: str
    otel: str | None = None


FIELDS: dict[str, Field] = {
    # Fields of every line. The first three are parts of a log record of OpenTelemetry, not attributes of it.
    "timestamp": Field("time", "when it was written: UTC, RFC 3339", "Timestamp"),
    "level": Field("level", "how much it matters", "SeverityText"),
    "event": Field("text", "its name; of a log line, the message", "EventName"),
    "job": Field("text", "the job's name", "elasticflow.job.name"),
    "run_id": Field("text", "the run's id", "elasticflow.run.id"),
    "generation": Field("whole", "the worker group, numbered over the run; 0 before the first"),
    # Fields of the workers' lines.
    "node": Field("text?", "the node's name in its launch"),
    "rank": Field("whole?", "the worker's global rank"),
    "world_size": Field("whole", "workers of the group"),
    "step": Field("whole", "finished optimizer steps"),
    "origin": Field("text", "whose logger wrote the line: `elasticflow` for events"),
    "logger": Field("text", "name of the standard library's logger", "logger.name"),
    "process": Field("text", "which process beside the worker wrote it, as `loader 1`"),
    "category": Field("text", "class of a warning, `torch`, or level and name of a logger"),
    "place": Field("text", "file and line; empty if unknown"),
    "text": Field("text", "message in one line"),
    "times": Field("whole", "how often, since it was told before"),
    "in_generation": Field("whole", "worker group in which it was"),
    "exception": Field("exception?", "the exception and its frames; without values of variables"),
    "stream": Field("text", "which output of a worker: `jsonl`, `stdout`, `stderr`", "log.iostream"),
    "lines": Field("whole", "how many lines"),
    "sink": Field("text", "where measures and events are sent to"),
    "points": Field("whole", "steps, evaluations and events that are still to be sent"),
    "log": Field("text", "file with the last output of a process", "log.file.path"),
    "script": Field("text", "the file or module that [script] names"),
    # Processes and places.
    "pid": Field("whole", "a process", "process.pid"),
    "pids": Field("wholes", "processes, by local rank"),
    "state": Field("text", "state of a process, as the kernel names it"),
    "host": Field("text", "the machine's name", "host.name"),
    "nproc": Field("whole", "workers of a node"),
    "nodes": Field("whole", "how many nodes"),
    "members": Field("texts", "the nodes' names, in rank order"),
    "present": Field("whole", "nodes that are ready"),
    "least": Field("whole", "nodes that the job needs"),
    "device": Field("text or facts", "the device of the training"),
    "devices": Field("whole", "devices that computed a known sum right"),
    "faults": Field("texts", "errors for which a device is not to be used"),
    "notes": Field("texts", "errors that a device outlives, and why it could not be checked"),
    "connections": Field("whole", "connections since the last report"),
    "address": Field("text", "address of the last connection", "client.address"),
    "command": Field("text", "a process's command line, cut short", "process.command_line"),
    "endpoint": Field("text?", "where other machines reach the launch", "server.address"),
    "resume_command": Field("text?", "command that resumes the run; none: `elasticflow resume`"),
    "torch": Field("text", "torch's version"),
    "schema": Field("whole", "version of the schema of these lines"),
    "launch": Field("whole", "start of the run, numbered from 1"),
    "resumed": Field("flag", "the launch resumes an earlier one"),
    # Failures and their causes.
    "class": Field("text", "class of a failure, or how a group ended", "error.type"),
    "error": Field("text", "the error, in a line or two", "exception.message"),
    "traceback": Field("text?", "traceback as text, shortened", "exception.stacktrace"),
    "exit_code": Field("integer?", "how a process ended; negative: by that signal", "process.exit.code"),
    "stderr": Field("texts", "last lines of its standard error"),
    "others": Field("text?", "end of the other workers"),
    "final": Field("flag", "another try would end in the same way"),
    "reason": Field("text", "why"),
    "of_rank": Field("whole", "the rank that the state belongs to"),
    "from_node": Field("text", "the node that had it"),
    "why": Field("text?", "why it is not tried again"),
    "help": Field("text", "what to do"),
    "known": Field("text", "certain facts"),
    "likely": Field("text?", "probable cause"),
    "last_seen": Field("number?", "its last sign of life, Unix time"),
    "was_killed": Field("flag", "it did not end when it was asked to"),
    "attempt": Field("whole", "which try failed"),
    "operation": Field("text", "operation of the store"),
    "phase": Field("text", "activity of a worker"),
    "frames": Field("texts", "stack of the worker, the user's own frames first"),
    "stacks": Field("text?", "file with the stacks of all its threads"),
    "dumps": Field("texts", "files that NCCL's flight recorder has dumped, of all ranks that have one"),
    # Time.
    "seconds": Field("number", "how long it took"),
    "seconds_since_failure": Field("number?", "from the failure until here"),
    "durations": Field("durations", "seconds by their use, in this launch or group"),
    "run_durations": Field("durations?", "the same of all launches of the run"),
    "limit_s": Field("number", "how long it may take"),
    "grace_s": Field("number?", "how long there is for it"),
    "pause_s": Field("number?", "until the next try"),
    "stall_s": Field("number", "how long training stood still"),
    "restore_s": Field("number?", "how long restoring took"),
    "time": Field("number", "when it was over, Unix time"),
    # Snapshots and files.
    "name": Field("text", "name of the event's subject"),
    "bytes": Field("whole", "size"),
    "trigger": Field("text", "why the snapshot was taken"),
    "uri": Field("text", "where snapshots lie, passwords masked", "url.full"),
    "path": Field("text", "a file", "file.path"),
    "files": Field("count or facts", "how many files, or their digests by path"),
    "action": Field("text", "action that was done, or tried"),
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
    "factor": Field("number", "how many times as long"),
    "own_s": Field("number", "seconds of a step without waiting for other ranks"),
    "others_s": Field("number", "the median of the same of the other ranks"),
    "step_s": Field("number", "seconds of a step"),
    "memory_allocated": Field("whole", "bytes in tensors on rank 0's device"),
    "memory_reserved": Field("whole", "bytes that its allocator has taken from the device"),
    "memory_peak": Field("whole", "most bytes in tensors so far"),
    "utilization": Field("whole", "percentage of time in which the device ran kernels"),
    "loss": Field("number or text?", "mean over the global batch"),
    "lr": Field("number or numbers", "learning rate, or rates by parameter group"),
    "count": Field("number", "items that the loss is a mean over"),
    "grad_norm": Field("number or numbers?", "norm of the gradient"),
    "mfu": Field("number?", "share of the devices' peak that was used"),
    "eval": Field("measured?", "metrics by name"),
    "eval_raw": Field("measured", "metrics of the weights that are no average"),
    "weights": Field("any", "which weights were measured: `raw`, `ema`"),
    "best": Field("number or text?", "the best value so far"),
    "best_of": Field("text", "name of the metric whose best value it is"),
    "measured_by": Field("any", "the evaluation that measured it"),
    "now": Field("any", "state from here on"),
    "was": Field("text", "state before"),
    "snapshot": Field("text", "a snapshot's name"),
    "names": Field("texts", "names of a snapshot's content"),
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
    "fingerprint": Field("text", "digest of the data"),
    "source": Field("text", "where the data comes from"),
    "kind": Field("text", "which kind of it"),
    "facts": Field("facts", "further facts that identify it"),
    "found": Field("whole", "samples of the evaluation that are trained on"),
    "looked_up": Field("whole", "samples of the evaluation that were looked up"),
    "compared": Field("whole", "training samples that were compared"),
    "pair": Field("list?", "a sample of the training data, and its equal in the evaluation"),
    # Changes, and processes left behind.
    "changed": Field("any", "changes"),
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
    "without_device": Field("text", "why a standby has not opened its worker's GPU; empty if it has, or there is none"),
}  # fmt: skip
"""Every field of events, of metrics.jsonl and of log lines, by name; a field has the same type and meaning everywhere.

The JSON Schema, the page about events and the records for OpenTelemetry are made from this table.
"""
