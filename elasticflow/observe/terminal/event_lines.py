"""Lines for a person: their form, and those of events that need no context."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from elasticflow import events
from elasticflow.observe.records import Record, float_of, int_of
from elasticflow.observe.terminal.formats import number, plural, span

Tone = Literal["begin", "good", "bad", "notice", "plain", "quiet"]
Symbol = Literal["start", "done", "wrong", "again", "stop", "note", "warning"]

LONGEST_QUOTE = 40

# Frames that are not in the user's code: this package, torch and everything else that is installed or frozen.
_NOT_THEIRS = re.compile(
    r'^\s*File "(?:[^"]*/(?:elasticflow/(?:runtime|launcher)|site-packages|lib/python3[^/]*)/|<)'
)
_FRAME = re.compile(r'^  File "')


@dataclass(frozen=True)
class Line:
    """One thing that happened, ready to be laid out.

    Attributes:
        symbol: What kind of thing it is.
        tone: How it is coloured.
        label: One or two words.
        text: The rest of the line.
        more: Lines that follow it, under the text.
        quote: Somebody else's text (a traceback), shown as it is.
        seconds: Seconds since the launch began, or None.
    """

    symbol: Symbol
    tone: Tone
    label: str
    text: str
    more: tuple[str, ...] = ()
    quote: tuple[str, ...] = ()
    seconds: float | None = None


def values(metrics: Mapping[str, Any]) -> str:
    """Return `accuracy 0.9806, loss 0.0712`, of several sets `train: loss 0.0712; val: loss 0.1`; the loss comes last."""
    by_set = metrics_by_set(metrics)
    return "; ".join(
        f"{name}: {_values_of_set(each)}" if name else _values_of_set(each) for name, each in by_set.items()
    )


def metrics_by_set(metrics: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the metrics of each evaluation set by its name, which is empty where there is one without a name."""
    by_set: dict[str, dict[str, Any]] = {}
    for name, value in metrics.items():
        of_set, _, metric = str(name).rpartition(".")
        by_set.setdefault(of_set, {})[metric] = value
    return by_set


def _values_of_set(metrics: Mapping[str, Any]) -> str:
    names = sorted(metrics, key=lambda name: (name == "loss", name))
    return ", ".join(f"{name} {number(metrics[name])}" for name in names)


def of_weights(metrics: object, weights: object) -> str:
    """Return `accuracy 0.9806`, or `ema: accuracy 0.9806` where they are of the averaged weights, of all sets or of some."""
    if not isinstance(metrics, Mapping):
        return ""
    if isinstance(weights, Mapping):
        averaged = {name for name, whose in weights.items() if whose == "ema"}
        parts = {
            f"{name} (ema)" if name in averaged else name: each
            for name, each in metrics_by_set(metrics).items()
        }
        return "; ".join(f"{name}: {_values_of_set(each)}" for name, each in parts.items())
    words = values(metrics)
    return f"ema: {words}" if weights == "ema" and words else words


def epoch_of(record: Record) -> int | None:
    """Return the number of the pass over the data that the record's step belongs to, from 1; None if not known."""
    if record.get("in_epoch") is not None:
        return int_of(record, "in_epoch")
    if record.get("epoch") is None:
        return None
    # Earlier versions wrote finished passes, and mostly evaluated at the end of one.
    return max(1, int_of(record, "epoch") + ("eval" not in record))


def rates_of(record: Record) -> str:
    """Return `1.0e-03`, or `decay 1.0e-03, bias 2.0e-03` of several parameter groups; at most three of them."""
    rates = record.get("lr")
    if not isinstance(rates, Mapping):
        one = float_of(record, "lr")
        return "" if one is None else f"{one:.1e}"
    texts = [f"{name} {float_of(rates, name) or 0:.1e}" for name in rates]
    if len({text.rpartition(" ")[2] for text in texts}) == 1:
        return texts[0].rpartition(" ")[2]
    return ", ".join(texts[:3]) + (f" and {len(texts) - 3} more" if len(texts) > 3 else "")


def said_on_stderr(failed: Record) -> tuple[str, ...]:
    """Return a worker's last lines on standard error, under a heading; nothing if there were none."""
    lines = failed.get("stderr")
    if not isinstance(lines, list) or not lines:
        return ()
    return ("standard error ended with:", *(f"  {line}" for line in lines))


def user_frames(traceback: str) -> tuple[str, ...]:
    """Return the lines of *traceback* without frames of torch, elasticflow and the standard library.

    A traceback without frames of the user's stays whole. A very long one keeps its end, where the error is.
    """
    kept: list[str] = []
    left_out, has_own, skipping = 0, False, False
    lines = traceback.rstrip().splitlines()
    for line in lines:
        if _FRAME.match(line):
            skipping = _NOT_THEIRS.match(line) is not None
            left_out += skipping
            has_own = has_own or not skipping
        elif not line.startswith("    "):
            skipping = False
        if not skipping:
            kept.append(line)
    if not has_own:
        kept, left_out = lines, 0
    if len(kept) > LONGEST_QUOTE:
        kept = [kept[0], "  ...", *kept[-(LONGEST_QUOTE - 2) :]]
    if left_out:
        kept.append(f"({plural(left_out, 'frame')} of installed packages left out)")
    return tuple(kept)


def _supervisor_lost(record: Record) -> Line:
    text = f"launch {int_of(record, 'launch')}: the supervisor ended without a word after step {int_of(record, 'step')}"
    more = [str(record["known"])] if record.get("known") else []
    more += [f"likely {record['likely']}"] if record.get("likely") else []
    return Line("warning", "notice", "lost", text, tuple(more))


def _process_left_behind(record: Record) -> Line:
    how = "did not end when asked and was killed" if record.get("was_killed") else "was ended"
    text = f"process {record.get('pid')} ({record.get('command')}) outlived its worker and {how}"
    return Line("warning", "notice", "left behind", text)


def _standbys_off(record: Record) -> Line:
    return Line("warning", "notice", "no standby", f"{record.get('node')}: {record.get('reason')}")


def _compiler_cache_failed(record: Record) -> Line:
    acts = {"save": "cannot be saved beside the snapshots", "load": "cannot be loaded: this node compiles"}
    act = acts.get(str(record.get("action")), "is not kept")
    text = f"{record.get('node')}: the compiler's cache {act}: {record.get('reason')}"
    return Line("warning", "notice", "no cache", text)


def _snapshot_rejected(record: Record) -> Line:
    return Line("warning", "notice", "set aside", f"snapshot {record.get('name')}: {record.get('reason')}")


def _snapshot_cleared(record: Record) -> Line:
    return Line("note", "quiet", "good again", f"snapshot {record.get('name')}: {record.get('reason')}")


def _snapshot_failed(record: Record) -> Line:
    more = ("older snapshots are untouched; training goes on",)
    return Line(
        "warning", "bad", "no snapshot", f"of step {record.get('step')}: {record.get('reason')}", more
    )


def _store_trouble(record: Record) -> Line:
    text = f"{record.get('operation')}: {record.get('error')}"
    more = (
        f"try {int_of(record, 'attempt')}; the next in {span(float_of(record, 'pause_s') or 0)}; training goes on",
    )
    return Line("warning", "notice", "store", text, more)


def _drain_requested(record: Record) -> Line:
    grace = float_of(record, "grace_s")
    within = "" if grace is None else f", within {span(grace)}"
    text = f"{record.get('reason')}: workers leave after the same step{within}"
    more = ("Ctrl-C again ends the run at once",) if record.get("reason") == "SIGINT" else ()
    return Line("stop", "notice", "drain", text, more)


def _drain_completed(record: Record) -> Line:
    return Line(
        "done", "plain", "drained", f"all workers left after {span(float_of(record, 'seconds') or 0)}"
    )


def _budget_spent(record: Record) -> Line:
    return Line("wrong", "bad", "no restart", f"restarts.budget = {record.get('budget')} is spent")


def _budget_refilled(record: Record) -> Line:
    return Line("note", "quiet", "budget", f"full again: {plural(int_of(record, 'budget'), 'restart')}")


def _preload_refused(record: Record) -> Line:
    text = f"{record.get('module')} is imported in each worker: {record.get('reason')}"
    return Line("note", "quiet", "preload", text)


def _entry_point_edited(record: Record) -> Line:
    return Line("warning", "notice", "edited", f"{record.get('path')} was edited by hand and runs as edited")


def _drift_found(record: Record) -> Line:
    field = record.get("differences")
    differences = [each for each in field if isinstance(each, dict)] if isinstance(field, list) else []
    weighty = [each for each in differences if each.get("weight") != "harmless"]
    if not weighty:
        return Line(
            "note",
            "quiet",
            "changed",
            f"{plural(len(differences), 'harmless difference')} to the launch before",
        )
    changes = ", ".join(f"{each.get('key')} {each.get('old')} -> {each.get('new')}" for each in weighty)
    return Line("warning", "notice", "changed", f"{changes}: accepted")


def _options_changed(record: Record) -> Line:
    field = record.get("options")
    changes = [each for each in field if isinstance(each, dict)] if isinstance(field, list) else []
    # What follows from the rate is said by the rate.
    rated = {(each.get("part"), each.get("group")) for each in changes if each.get("option") == "lr"}
    shown = []
    for each in changes:
        part, group, option = each.get("part"), each.get("group"), str(each.get("option"))
        if (
            option.startswith("_")
            or option == "base_lrs"
            or (option == "initial_lr" and (part, group) in rated)
        ):
            continue
        place = str(part) if group is None else f"{part} group {group}"
        shown.append(f"{place}: {option} {each.get('was') or '-'} -> {each.get('now') or '-'}")
    text = f"{', '.join(shown)}; counts from here on, instead of what the snapshot says"
    return Line("note", "plain", "options", text)


def _hang_detected(record: Record) -> Line:
    text = f"rank {record.get('rank')} made no progress for {span(float_of(record, 'seconds') or 0)}"
    if record.get("phase"):
        text += f" in phase {record['phase']}"
    if (limit_s := float_of(record, "limit_s")) is not None:
        text += f", where {span(limit_s)} is the most"
    more = (str(record["reason"]),) if record.get("reason") else ()
    return Line("wrong", "bad", "hang", text, (*more, f"stacks: {record.get('stacks')}"))


def _training_stopped(record: Record) -> Line:
    by = "" if record.get("by_rank") is None else f" by rank {record.get('by_rank')}"
    text = f"after step {record.get('step')}{by}: {record.get('reason')}"
    return Line("stop", "notice", "stopped", text)


def _loss_skipped(record: Record) -> Line:
    text = f"step {record.get('step')}: loss {number(record.get('loss'))}; the weights are left alone"
    return Line("warning", "notice", "skipped", text)


def _loss_unweighed(record: Record) -> Line:
    text = "the loss depends on how a batch is cut, so on the number of workers"
    more = (str(record.get("reason")), f"help: {record.get('help')}")
    return Line("warning", "notice", "loss", text, more)


def script_began_anew(record: Record) -> Line:
    """Return the line of a `script.began_anew` event."""
    text = f"{record.get('script')} was started again, and has told no step: it began anew unless it loads a checkpoint of its own"
    more = "help: have it load its newest checkpoint when it begins, or call elasticflow.join: elasticflow guide own-loop"
    return Line("warning", "notice", "began anew", text, (more,))


def _data_own(record: Record) -> Line:
    text = "the script reads its own data: elasticflow does not restore its position"
    names = record.get("kept")
    if isinstance(names, list) and names:
        return Line("note", "plain", "data", text, (f"with the state of {', '.join(map(str, names))}",))
    more = "nothing of it is kept: run.keep(loader=loader), or run.batches, which brings each sample once"
    return Line("warning", "notice", "data", text, (more,))


def _stage_started(record: Record) -> Line:
    steps = int_of(record, "steps")
    text = f"stage {record.get('stage')}" + (f", to step {steps:,}" if steps else "")
    samples = int_of(record, "samples")
    return Line("note", "plain", "stage", text + (f": {samples:,} samples" if samples else ""))


def _state_put_back(record: Record) -> Line:
    names = [str(name) for name in record.get("names") or ()]
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    text = f"the script changed {names[0] if names else 'its state'}{more} after run.keep"
    return Line("warning", "notice", "state", text, (f"put back as {record.get('snapshot')} has it",))


def _loop_changed(record: Record) -> Line:
    changes = [change for change in record.get("changes") or () if isinstance(change, dict)]
    lines = tuple(
        f"{each.get('key')} is {each.get('now')}, was {each.get('was')}: {each.get('reason')}"
        for each in changes
    )
    return Line(
        "warning", "notice", "changed", "the script's loop is made with something else than before", lines
    )


def _loss_unused(record: Record) -> Line:
    keys = record.get("keys")
    shown = ", ".join(map(str, keys)) if isinstance(keys, list) else str(keys)
    return Line("note", "quiet", "loss", f"the step's dict also holds {shown}, which nobody reads")


def _mfu_unknown(record: Record) -> Line:
    text = f"no MFU: the peak of {record.get('device')} is not known"
    return Line(
        "note", "notice", "speed", text, ("help: give it in logging.peak_flops, in FLOP/s of one device",)
    )


def _staging_single(record: Record) -> Line:
    text = f"each snapshot waits until the one before is written: {record.get('reason')}"
    return Line("warning", "notice", "short of memory", text)


def _state_left_out(record: Record) -> Line:
    name = record.get("name")
    text = f"the {name} ({record.get('type')}) has a state_dict, which snapshots do not hold: they keep its order and position"
    if name != "dataset":
        text = (
            f"{name} changes with the steps, and no snapshot holds it: `validate --deep-step` tells whether a step "
            f'depends on it; snapshots.ignore = ["{name}"] says that none does'
        )
    return Line("warning", "notice", "left out", text)


def _dataset_smaller_than_batch(record: Record) -> Line:
    samples, batch = plural(int_of(record, "samples"), "sample"), int_of(record, "batch")
    text = f"one batch of {batch:,} is more than the whole dataset, which has {samples}"
    if record.get("steps") is not None:
        text += f": training is {plural(int_of(record, 'steps'), 'step')} in all"
    return Line("warning", "notice", "batch", text)


def _scale_not_reached(record: Record) -> Line:
    changes = record.get("changes")
    missed = ", ".join(map(str, changes)) if isinstance(changes, list) else "-"
    text = f"{missed}: not reached, training ended after {span(float_of(record, 'seconds') or 0)}"
    return Line("note", "notice", "scale", text)


def evaluation_overlaps(record: Record) -> Line:
    """Return the line of an `overlap.found` event."""
    compared, samples, pair = int_of(record, "compared"), int_of(record, "samples"), record.get("pair")
    text = f"{int_of(record, 'found'):,} of {plural(int_of(record, 'looked_up'), 'evaluation sample')} looked up are in the training data"
    if compared < samples:
        text += f" ({compared:,} of its {samples:,} looked at)"
    if isinstance(pair, list | tuple) and len(pair) == 2:
        text += f": number {pair[0]} is training sample {pair[1]}"
    how_far = "partly " if int_of(record, "found") < int_of(record, "looked_up") else ""
    more = f'metrics are {how_far}of what was trained on; if that is meant: evaluation.overlap = "allowed"'
    return Line("warning", "notice", "overlap", text, more=(more,))


def _dataset_varies(record: Record) -> Line:
    name, sample, kind = record.get("name"), int_of(record, "sample"), record.get("type")
    parts, generators = record.get("parts"), record.get("generators")
    where = f" (in {', '.join(map(str, parts))})" if isinstance(parts, list) and parts else ""
    own = f" ({', '.join(map(str, generators))})" if isinstance(generators, list) and generators else ""
    text = (
        f"{name}: sample {sample:,} of {kind} is not the same when it is read twice under one seed{where}: "
        "what a restart reads again is other data"
    )
    more = (
        "random, numpy's global generator and torch's are seeded for each sample, and generators of the dataset's own are "
        f"not{own}"
    )
    return Line("warning", "notice", "data varies", text, more=(more,))


def _dataset_unseen(record: Record) -> Line:
    name, types, snapshot = record.get("name"), record.get("types"), record.get("snapshot")
    if snapshot is not None:
        text = (
            f"{name}: whether what its samples hold is what snapshot {snapshot} was trained on was not looked at: it was taken "
            "by a version that knew objects in samples by their class alone"
        )
        return Line("note", "notice", "not looked at", text)
    shown = ", ".join(map(str, types)) if isinstance(types, list) else "-"
    text = (
        f"{name}: its samples hold {shown}, which cannot be looked into: other data in there is not noticed"
    )
    more = "an attribute `fingerprint` of the dataset says what identifies it"
    return Line("warning", "notice", "not looked at", text, more=(more,))


def _kind_changed(record: Record) -> Line:
    changed = record.get("changed")
    facts = [f"{name} is {text}" for name, text in changed.items()] if isinstance(changed, dict) else []
    text = "results may differ in the last bits from here on: " + "; ".join(facts)
    return Line("warning", "notice", "other kind", text)


def _replicas_not_compared(record: Record) -> Line:
    text = f"replica comparison is off: {record.get('reason')}"
    return Line("note", "quiet", "not compared", text)


def _record_damaged(record: Record) -> Line:
    return Line("warning", "notice", "damaged", f"{record.get('path')} {record.get('reason')}")


def _connection_refused(record: Record) -> Line:
    count = int_of(record, "connections")
    knocked = "a connection" if count == 1 else f"{count} connections, the last"
    text = f"{knocked} from {record.get('address')}: {record.get('reason')}"
    return Line("warning", "notice", "refused", text)


def _node_left(record: Record) -> Line:
    return Line("note", "plain", "node left", f"{record.get('node')} asked to leave and was let go")


def _node_excluded(record: Record) -> Line:
    text = f"{record.get('node')} failed twice in a row while others did not, and takes no part: {record.get('reason')}"
    return Line("wrong", "bad", "node excluded", text)


def _nodes_awaited(record: Record) -> Line:
    text = f"{int_of(record, 'present')} of at least {plural(int_of(record, 'least'), 'node')} ready"
    return Line("warning", "notice", "waiting", text)


def _sink_failed(record: Record) -> Line:
    more = ("training goes on; it is tried again and goes on where it was",)
    return Line("warning", "notice", "sink", f"{record.get('sink')}: {record.get('error')}", more=more)


def _sink_recovered(record: Record) -> Line:
    seconds = span(float_of(record, "seconds") or 0)
    return Line("done", "plain", "sink", f"{record.get('sink')} takes what is sent again, after {seconds}")


def _points_of_sink(record: Record) -> str:
    # `notify.url`, `notify.command`: what they are sent are messages.
    unit = "message" if str(record.get("sink")).startswith("notify.") else "point"
    return plural(int_of(record, "points"), unit)


def _sink_sending(record: Record) -> Line:
    what = f"the last {_points_of_sink(record)}" if int_of(record, "points") else "what is left"
    text = f"{record.get('sink')}: sending {what}, for at most {span(int_of(record, 'seconds'))}"
    return Line("note", "quiet", "sink", text, ("Ctrl-C does not wait: the next launch goes on there",))


def _sink_unsent(record: Record) -> Line:
    text = f"{record.get('sink')} has not got {_points_of_sink(record)}: {record.get('error')}"
    more = (f"elasticflow sinks send {record.get('run_id')}, or the next launch, goes on there",)
    return Line("warning", "notice", "sink", text, more=more)


def _follower_lost(record: Record) -> Line:
    text = f"the process that serves sinks {record.get('reason')}; see {record.get('log')}"
    return Line("warning", "notice", "sinks", text)


def _profile_requested(record: Record) -> Line:
    ranks = record.get("ranks")
    whose = ", ".join(map(str, ranks)) if isinstance(ranks, list) else "?"
    text = f"a trace of {plural(int_of(record, 'steps'), 'step')} of rank {whose} was asked for"
    return Line("note", "plain", "profile", text)


def _profile_finished(record: Record) -> Line:
    first, last = int_of(record, "first_step"), int_of(record, "last_step")
    text = f"rank {record.get('rank')} has traced steps {first} to {last}"
    return Line("done", "plain", "profile", text, more=(str(record.get("path")),))


def _profile_failed(record: Record) -> Line:
    return Line(
        "warning", "notice", "profile", f"no trace of rank {record.get('rank')}: {record.get('reason')}"
    )


CONTEXT_FREE: dict[str, Callable[[Record], Line]] = {
    events.SUPERVISOR_LOST: _supervisor_lost,
    events.PROCESS_LEFT_BEHIND: _process_left_behind,
    events.STANDBYS_OFF: _standbys_off,
    events.COMPILER_CACHE_FAILED: _compiler_cache_failed,
    events.SNAPSHOT_REJECTED: _snapshot_rejected,
    events.SNAPSHOT_CLEARED: _snapshot_cleared,
    events.SNAPSHOT_FAILED: _snapshot_failed,
    events.STORE_TROUBLE: _store_trouble,
    events.DRAIN_REQUESTED: _drain_requested,
    events.DRAIN_COMPLETED: _drain_completed,
    events.NODE_LEFT: _node_left,
    events.NODE_EXCLUDED: _node_excluded,
    events.NODE_AWAITED: _nodes_awaited,
    events.BUDGET_SPENT: _budget_spent,
    events.BUDGET_REFILLED: _budget_refilled,
    events.PRELOAD_REFUSED: _preload_refused,
    events.ENTRY_POINT_EDITED: _entry_point_edited,
    events.DRIFT_FOUND: _drift_found,
    events.OPTIONS_CHANGED: _options_changed,
    events.HANG_DETECTED: _hang_detected,
    events.TRAINING_STOPPED: _training_stopped,
    events.LOSS_SKIPPED: _loss_skipped,
    events.LOSS_UNWEIGHED: _loss_unweighed,
    events.SCRIPT_BEGAN_ANEW: script_began_anew,
    events.DATA_OWN: _data_own,
    events.STAGE_STARTED: _stage_started,
    events.STATE_PUT_BACK: _state_put_back,
    events.LOOP_CHANGED: _loop_changed,
    events.LOSS_UNUSED: _loss_unused,
    events.MFU_UNKNOWN: _mfu_unknown,
    events.STAGING_SINGLE: _staging_single,
    events.STATE_LEFT_OUT: _state_left_out,
    events.DATASET_SMALLER_THAN_BATCH: _dataset_smaller_than_batch,
    events.SCALE_NOT_REACHED: _scale_not_reached,
    events.OVERLAP_FOUND: evaluation_overlaps,
    events.DATASET_VARIES: _dataset_varies,
    events.DATASET_UNSEEN: _dataset_unseen,
    events.KIND_CHANGED: _kind_changed,
    events.REPLICAS_NOT_COMPARED: _replicas_not_compared,
    events.RECORD_DAMAGED: _record_damaged,
    events.CONNECTION_REFUSED: _connection_refused,
    events.SINK_FAILED: _sink_failed,
    events.SINK_RECOVERED: _sink_recovered,
    events.SINK_SENDING: _sink_sending,
    events.SINK_UNSENT: _sink_unsent,
    events.FOLLOWER_LOST: _follower_lost,
    events.PROFILE_REQUESTED: _profile_requested,
    events.PROFILE_FINISHED: _profile_finished,
    events.PROFILE_FAILED: _profile_failed,
}
"""Events whose line needs nothing but the record."""
