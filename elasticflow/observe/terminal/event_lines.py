"""Lines for a person: their form, and the lines of events that need no context."""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from elasticflow import events
from elasticflow.observe.terminal.formats import number, plural, span
from elasticflow.system.records import Record, float_of, int_of, texts_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from elasticflow.events import Symbol, Tone

LONGEST_QUOTE = 40

# Frames outside of the user's code: in this package, torch and all other installed or frozen modules.
_NOT_THEIRS = re.compile(
    r'^\s*File "(?:[^"]*/(?:elasticflow/(?:runtime|launcher)|site-packages|lib/python3[^/]*)/|<)'
)
_FRAME = re.compile(r'^  File "')


@dataclass(frozen=True)
class Line:
    """A line about an event, ready for layout; the fields of `events.Template` mean the same here.

    Attributes:
        quote: Quoted text, such as a traceback, shown unchanged.
        seconds: Seconds since the launch began, or None.
    """

    label: str
    text: str
    more: tuple[str, ...] = ()
    symbol: Symbol = "warning"
    tone: Tone = "notice"
    quote: tuple[str, ...] = ()
    seconds: float | None = None


def line_of(record: Record) -> Line | None:
    """Return the line of an event that needs only its record; None for other events."""
    name = str(record.get("event"))
    if (function := _LINES.get(name)) is not None:
        return function(record)
    template = events.EVENTS[name].line if name in events.EVENTS else None
    if template is None:
        return None
    text, *more = (_FORMATTER.vformat(each, (), record) for each in (template.text, *template.more))
    return Line(template.label, text, tuple(more), template.symbol, template.tone)


class _RecordFormatter(string.Formatter):
    """Puts fields of a record into a template; a missing field is None."""

    def get_value(self, key: int | str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return kwargs.get(str(key))

    def format_field(self, value: Any, format_spec: str) -> str:
        amount = float_of({"value": value}, "value") or 0
        match format_spec:
            case "":
                return str(value)
            case "span":
                return span(amount)
            case "number":
                return number(value)
            case "count":
                return str(int(amount))
            case "list":
                return ", ".join(map(str, value)) if isinstance(value, list) else "-"
            case word:
                return plural(int(amount), word)


_FORMATTER = _RecordFormatter()


def values(metrics: Mapping[str, Any]) -> str:
    """Return `accuracy 0.9806, loss 0.0712`, or for several sets `train: loss 0.0712; val: loss 0.1`; the loss is last."""
    by_set = metrics_by_set(metrics)
    return "; ".join(
        f"{name}: {_values_of_set(each)}" if name else _values_of_set(each) for name, each in by_set.items()
    )


def metrics_by_set(metrics: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the metrics of each evaluation set by its name; a set without a name has the empty name."""
    by_set: dict[str, dict[str, Any]] = {}
    for name, value in metrics.items():
        of_set, _, metric = str(name).rpartition(".")
        by_set.setdefault(of_set, {})[metric] = value
    return by_set


def _values_of_set(metrics: Mapping[str, Any]) -> str:
    names = sorted(metrics, key=lambda name: (name == "loss", name))
    return ", ".join(f"{name} {number(metrics[name])}" for name in names)


def of_weights(metrics: object, weights: object) -> str:
    """Return `accuracy 0.9806`, or `ema: accuracy 0.9806` if they are of the averaged weights, for all or some sets."""
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
    """Return the number, from 1, of the pass over the data to which the record's step belongs; None if unknown."""
    return None if record.get("in_epoch") is None else int_of(record, "in_epoch")


def rates_of(record: Record) -> str:
    """Return `1.0e-03`, or `decay 1.0e-03, bias 2.0e-03` for several parameter groups; at most three of them."""
    rates = record.get("lr")
    if not isinstance(rates, Mapping):
        one = float_of(record, "lr")
        return "" if one is None else f"{one:.1e}"
    texts = [f"{name} {float_of(rates, name) or 0:.1e}" for name in rates]
    if len({text.rpartition(" ")[2] for text in texts}) == 1:
        return texts[0].rpartition(" ")[2]
    return ", ".join(texts[:3]) + (f" and {len(texts) - 3} more" if len(texts) > 3 else "")


def said_on_stderr(failed: Record) -> tuple[str, ...]:
    """Return a worker's last lines on standard error, under a heading; empty if there were none."""
    lines = failed.get("stderr")
    if not isinstance(lines, list) or not lines:
        return ()
    return ("standard error ended with:", *(f"  {line}" for line in lines))


def stack_of(exception: Record) -> list[str]:
    """Return the frames in a record's field `exception`, the innermost last, and the exception, as lines of a traceback."""
    frames = exception.get("frames")
    lines = []
    for frame in frames if isinstance(frames, list) else ():
        lines.append(f'  File "{frame.get("path")}", line {frame.get("line")}, in {frame.get("function")}')
        lines += [f"    {frame['code']}"] if frame.get("code") else []
    return [*lines, f"{exception.get('type')}: {exception.get('message')}"]


def user_frames(traceback: str) -> tuple[str, ...]:
    """Return the lines of *traceback* without frames of torch, elasticflow and the standard library.

    A traceback without frames of the user's code stays whole. A very long traceback keeps its end, which has the error.
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
    return Line("lost", text, tuple(more))


def _process_left_behind(record: Record) -> Line:
    how = "did not end when asked and was killed" if record.get("was_killed") else "was ended"
    text = f"process {record.get('pid')} ({record.get('command')}) outlived its worker and {how}"
    return Line("left behind", text)


def _compiler_cache_failed(record: Record) -> Line:
    acts = {"save": "cannot be saved beside the snapshots", "load": "cannot be loaded: this node compiles"}
    act = acts.get(str(record.get("action")), "is not kept")
    text = f"{record.get('node')}: the compiler's cache {act}: {record.get('reason')}"
    return Line("no cache", text)


def _drain_requested(record: Record) -> Line:
    grace = float_of(record, "grace_s")
    within = "" if grace is None else f", within {span(grace)}"
    text = f"{record.get('reason')}: workers leave after the same step{within}"
    more = ("Ctrl-C again ends the run at once",) if record.get("reason") == "SIGINT" else ()
    return Line("drain", text, more, symbol="stop")


def _objects_in(record: Record, name: str) -> list[dict[str, Any]]:
    """Return the objects in a list of a record; none if the field is anything else."""
    field = record.get(name)
    return [each for each in field if isinstance(each, dict)] if isinstance(field, list) else []


def _drift_found(record: Record) -> Line:
    differences = _objects_in(record, "differences")
    weighty = [each for each in differences if each.get("weight") != "harmless"]
    if not weighty:
        return Line(
            "changed",
            f"{plural(len(differences), 'harmless difference')} to the launch before",
            symbol="note",
            tone="quiet",
        )
    changes = ", ".join(f"{each.get('key')} {each.get('old')} -> {each.get('new')}" for each in weighty)
    return Line("changed", f"{changes}: accepted")


def _options_changed(record: Record) -> Line:
    changes = _objects_in(record, "options")
    # The rate implies these options.
    rated = {
        (str(each.get("part")), str(each.get("group"))) for each in changes if each.get("option") == "lr"
    }
    shown = []
    for each in changes:
        part, group, option = each.get("part"), each.get("group"), str(each.get("option"))
        if (
            option.startswith("_")
            or option == "base_lrs"
            or (option == "initial_lr" and (str(part), str(group)) in rated)
        ):
            continue
        place = str(part) if group is None else f"{part} group {group}"
        shown.append(f"{place}: {option} {each.get('was') or '-'} -> {each.get('now') or '-'}")
    text = f"{', '.join(shown)}; counts from here on, instead of what the snapshot says"
    return Line("options", text, symbol="note", tone="plain")


def _hang_detected(record: Record) -> Line:
    text = f"rank {record.get('rank')} made no progress for {span(float_of(record, 'seconds') or 0)}"
    if record.get("phase"):
        text += f" in phase {record['phase']}"
    if (limit_s := float_of(record, "limit_s")) is not None:
        text += f", where {span(limit_s)} is the most"
    more = [str(record["reason"])] if record.get("reason") else []
    more.append(f"stacks: {record.get('stacks')}")
    if dumps := texts_of(record, "dumps"):
        more.append(f"collectives: torchfrtrace {PurePath(dumps[0]).parent}")
    return Line("hang", text, tuple(more), symbol="wrong", tone="bad")


def _training_stopped(record: Record) -> Line:
    by = "" if record.get("by_rank") is None else f" by rank {record.get('by_rank')}"
    text = f"after step {record.get('step')}{by}: {record.get('reason')}"
    return Line("stopped", text, symbol="stop")


def _data_own(record: Record) -> Line:
    text = "the script reads its own data: elasticflow does not restore its position"
    names = record.get("kept")
    if isinstance(names, list) and names:
        return Line(
            "data", text, (f"with the state of {', '.join(map(str, names))}",), symbol="note", tone="plain"
        )
    more = "nothing of it is kept: run.keep(loader=loader), or run.batches, which brings each sample once"
    return Line("data", text, (more,))


def _stage_started(record: Record) -> Line:
    steps = int_of(record, "steps")
    text = f"stage {record.get('stage')}" + (f", to step {steps:,}" if steps else "")
    samples = int_of(record, "samples")
    return Line("stage", text + (f": {samples:,} samples" if samples else ""), symbol="note", tone="plain")


def _state_put_back(record: Record) -> Line:
    field = record.get("names")
    names = [str(name) for name in field] if isinstance(field, list) else []
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    text = f"the script changed {names[0] if names else 'its state'}{more} after run.keep"
    return Line("state", text, (f"put back as {record.get('snapshot')} has it",))


def _loop_changed(record: Record) -> Line:
    changes = _objects_in(record, "changes")
    lines = tuple(
        f"{each.get('key')} is {each.get('now')}, was {each.get('was')}: {each.get('reason')}"
        for each in changes
    )
    return Line("changed", "the script's loop is made with something else than before", lines)


def _state_left_out(record: Record) -> Line:
    name = record.get("name")
    text = f"the {name} ({record.get('type')}) has a state_dict, which snapshots do not hold: they keep its order and position"
    if name != "dataset":
        text = (
            f"{name} changes with the steps, and no snapshot holds it: `validate --deep-step` tells whether a step "
            f'depends on it; snapshots.ignore = ["{name}"] says that none does'
        )
    return Line("left out", text)


def _dataset_smaller_than_batch(record: Record) -> Line:
    samples, batch = plural(int_of(record, "samples"), "sample"), int_of(record, "batch")
    text = f"one batch of {batch:,} is more than the whole dataset, which has {samples}"
    if record.get("steps") is not None:
        text += f": training is {plural(int_of(record, 'steps'), 'step')} in all"
    return Line("batch", text)


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
    return Line("overlap", text, (more,))


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
    return Line("data varies", text, (more,))


def _dataset_unseen(record: Record) -> Line:
    name, types = record.get("name"), record.get("types")
    shown = ", ".join(map(str, types)) if isinstance(types, list) else "-"
    text = (
        f"{name}: its samples hold {shown}, which cannot be looked into: other data in there is not noticed"
    )
    more = "an attribute `fingerprint` of the dataset says what identifies it"
    return Line("not looked at", text, (more,))


def _kind_changed(record: Record) -> Line:
    changed = record.get("changed")
    facts = [f"{name} is {text}" for name, text in changed.items()] if isinstance(changed, dict) else []
    text = "results may differ in the last bits from here on: " + "; ".join(facts)
    return Line("other kind", text)


def _connection_refused(record: Record) -> Line:
    count = int_of(record, "connections")
    knocked = "a connection" if count == 1 else f"{count} connections, the last"
    text = f"{knocked} from {record.get('address')}: {record.get('reason')}"
    return Line("refused", text)


def _points_of_sink(record: Record) -> str:
    # `notify.url` and `notify.command` receive messages.
    unit = "message" if str(record.get("sink")).startswith("notify.") else "point"
    return plural(int_of(record, "points"), unit)


def _sink_sending(record: Record) -> Line:
    what = f"the last {_points_of_sink(record)}" if int_of(record, "points") else "what is left"
    text = f"{record.get('sink')}: sending {what}, for at most {span(int_of(record, 'seconds'))}"
    return Line(
        "sink", text, ("Ctrl-C does not wait: the next launch continues there",), symbol="note", tone="quiet"
    )


def _sink_unsent(record: Record) -> Line:
    text = f"{record.get('sink')} has not got {_points_of_sink(record)}: {record.get('error')}"
    more = (f"elasticflow runs send {record.get('run_id')}, or the next launch, continues there",)
    return Line("sink", text, more)


_LINES: dict[str, Callable[[Record], Line]] = {
    events.SUPERVISOR_LOST: _supervisor_lost,
    events.PROCESS_LEFT_BEHIND: _process_left_behind,
    events.COMPILER_CACHE_FAILED: _compiler_cache_failed,
    events.DRAIN_REQUESTED: _drain_requested,
    events.DRIFT_FOUND: _drift_found,
    events.OPTIONS_CHANGED: _options_changed,
    events.HANG_DETECTED: _hang_detected,
    events.TRAINING_STOPPED: _training_stopped,
    events.DATA_OWN: _data_own,
    events.STAGE_STARTED: _stage_started,
    events.STATE_PUT_BACK: _state_put_back,
    events.LOOP_CHANGED: _loop_changed,
    events.STATE_LEFT_OUT: _state_left_out,
    events.DATASET_SMALLER_THAN_BATCH: _dataset_smaller_than_batch,
    events.OVERLAP_FOUND: evaluation_overlaps,
    events.DATASET_VARIES: _dataset_varies,
    events.DATASET_UNSEEN: _dataset_unseen,
    events.KIND_CHANGED: _kind_changed,
    events.CONNECTION_REFUSED: _connection_refused,
    events.SINK_SENDING: _sink_sending,
    events.SINK_UNSENT: _sink_unsent,
}
