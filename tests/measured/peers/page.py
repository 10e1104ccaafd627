"""The page `elasticflow/guide/compared.md` and its two pictures, made from the trials alone; pure but for `write_page`."""

from __future__ import annotations

import json
import math
import statistics
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from tests.measured.peers.peers import LEFT_OUT, PEERS, SCRIPTS, Peer

Record = Mapping[str, Any]
GUIDE = Path(__file__).parents[3] / "elasticflow" / "guide"
BARS, GRID = "compared_kill.svg", "compared_faults.svg"
FAULTS = tuple(fault for fault in tomllib.loads(Path(__file__).with_name("plan.toml").read_text())["faults"])[
    1:
]
SHORT = dict(
    zip(
        FAULTS,
        ("kill", "node lost", "SIGTERM", "SIGSTOP", "half file", "bit flip", "full disk", "join", "leave"),
        strict=True,
    )
)
SAVE_EVERY = 50
DAMAGES = {"half", "bit"}
RESIZES = {"node", "join", "leave"}  # another number of workers sums in another order
BUSY = 3.0  # load of two cores at the begin of a trial
OTHERS_PERCENT = (
    20.0  # of the cores that others used in the second before it: the load still has the trial before in it
)
ROUNDING = 1e-3  # sums of one worker and of two differ in their last bits, and training makes more of it


def is_busy(record: Record) -> bool:
    """Return whether others worked on the machine as a trial began, or as all of several did."""
    if tries := record.get("tries"):
        return all(is_busy(each) for each in tries)
    return bool(record["load"] >= BUSY and record.get("others_percent", 100.0) > OTHERS_PERCENT)


class Outcome(NamedTuple):
    """What became of a trial.

    Attributes:
        kind: Class of the outcome, which the pictures colour.
        words: The outcome in the table.
    """

    kind: str
    words: str


KINDS = {
    "same": "all samples once, the same bits",
    "close": "all samples once, weights differ by rounding",
    "samples": "samples lost or repeated",
    "weights": "other weights, without a word",
    "stopped": "stopped, or 120 s without a step",
    "unpromised": "less than that, as it does not promise more",
    "none": "not measured",
}


def outcome(record: Record | None) -> Outcome:
    """Return what became of a trial, or of several: the worst, and how many had each; None: there was none."""
    if record is None:
        return Outcome("none", "-")
    if tries := record.get("tries"):
        found = [outcome(each) for each in tries]
        worst = max(found, key=lambda each: list(KINDS).index(each.kind)).kind
        counts = Counter(each.words for each in found)
        words = "; ".join(f"{count} of {len(found)} {words}" for words, count in counts.most_common())
        return Outcome(worst, words if len(counts) > 1 else found[0].words)
    found_one = _outcome(record)
    peer = next(peer for peer in PEERS if (peer.name, peer.variant) == (record["peer"], record["variant"]))
    is_open = record["fault"] in peer.not_promised or (
        peer.lossy and found_one.kind in {"samples", "weights"}
    )
    if is_open and found_one.kind not in {"same", "close", "none"}:
        return Outcome("unpromised", f"{found_one.words} (not promised)")
    return found_one


def _outcome(record: Record) -> Outcome:
    if record.get("note"):
        return Outcome("none", "never had all workers")
    if "lost" not in record:
        resumed = record.get("resumed_from")
        if record["ended"]:
            return Outcome(
                "stopped", "stopped" if resumed is None else f"stopped at step {record['reached']}"
            )
        is_still = resumed is None or record.get("reached_before", -1) == record.get("reached")
        return Outcome("stopped", "no further step" if is_still else "too slow")
    if record["lost"] or record["repeated"] or not record["is_whole"]:
        return Outcome("samples", f"{record['lost']} lost, {record['repeated']} repeated")
    if not record["replicas_agree"]:
        return Outcome("weights", "replicas differ")
    if record["fault"] != "none" and "same_bits" not in record:
        return Outcome("none", "all samples once, bits not compared")
    if record.get("same_bits", True):
        return Outcome("same", "same bits")
    if (record.get("difference") or 0.0) < ROUNDING or record["fault"] in RESIZES:
        return Outcome("close", f"differs by {record['difference']:.0e}")
    return Outcome("weights", f"differs by {record['difference']:.1g}")


def newest(records: Sequence[Record], model: str, workers: int) -> dict[tuple[str, str, str], Record]:
    """Return the newest trials of each peer, choice of settings and fault: quiet ones, or busy ones where there are no others.

    Where there are several numbers, a cell has their medians.
    """
    found: dict[tuple[str, str, str, bool], dict[int, Record]] = {}
    for record in records:
        if (record["model"], record["workers"]) == (model, workers):
            key = record["peer"], record["variant"], record["fault"]
            found.setdefault((*key, is_busy(record)), {})[record["number"]] = record
    chosen = {key[:3]: by_number for key, by_number in sorted(found.items(), key=lambda entry: -entry[0][3])}
    return {key: _median(list(by_number.values())) for key, by_number in chosen.items()}


def _median(tries: Sequence[Record]) -> Record:
    if len(tries) == 1:
        return tries[0]
    medians: dict[str, Any] = {}
    for name in ("pause_s", "caught_up_s", "redone", "first_step_s", "steps_per_s", "stall_ms"):
        values = [each[name] for each in tries if each.get(name) is not None]
        medians[name] = statistics.median(values) if values else None
    return {**tries[-1], **medians, "tries": tries}


def lines_of(peer: Peer) -> int:
    """Return how many lines of code its user writes: no blank lines, comments or docstrings."""
    import ast

    text = (SCRIPTS / peer.script).read_text()
    more = _lines_of_job(peer.job) if peer.job else 0
    if peer.script.endswith(".toml"):
        return _lines_of_job(peer.script)
    tree = ast.parse(text)
    left_out: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node):
            left_out |= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return more + sum(
        bool(line.strip()) and not line.strip().startswith("#") and number not in left_out
        for number, line in enumerate(text.splitlines(), 1)
    )


def _lines_of_job(name: str) -> int:
    lines = (SCRIPTS / name).read_text().splitlines()
    return sum(bool(line.strip()) and not line.startswith("#") for line in lines)


def seconds(value: float | None) -> str:
    """Return seconds with two digits that count."""
    return "" if value is None else f"{value:.2f}" if value < 10 else f"{value:.0f}"


def cell(record: Record | None) -> str:
    """Return the table's cell of a fault: seconds without a step, steps made again, the outcome; a star says that the machine was busy."""
    found = outcome(record)
    if record is None:
        return found.words
    star = "\\*" if is_busy(record) else ""
    if (pause := pause_of(record)) is None:
        return found.words + star
    again = f", {record['redone']:g} again" if record.get("redone") else ""
    start = f", from step {record['resumed_from']}" if record["fault"] in DAMAGES else ""
    return f"{seconds(pause)} s{star}{start}{again}; {found.words}"


def pause_of(record: Record | None) -> float | None:
    """Return the longest time without a step after the fault, in seconds; None: not measured, or training never ended."""
    return record.get("pause_s") if record and "lost" in record else None


def empty(peer: Peer, fault: str) -> str:
    """Return why a cell has no trial."""
    if fault in peer.not_promised:
        return "not promised"
    return "-" if fault in peer.faults else "as tuned"


def called(peer: Peer) -> str:
    """Return the name of a peer with its choice of settings."""
    return peer.name + (", tuned" if peer.variant == "tuned" else "")


def table(trials: Mapping[tuple[str, str, str], Record], faults: Sequence[str] = FAULTS) -> str:
    """Return the table: a row for each peer with its settings."""
    heads = ["", "lines", "start, s", "steps/s", "stall, ms", *(SHORT[fault] for fault in faults)]
    lines = ["| " + " | ".join(heads) + " |", "|---|" + "---:|" * 4 + "---|" * len(faults)]
    for peer in PEERS:
        of_peer = {fault: trials.get((peer.name, peer.variant, fault)) for fault in ("none", *faults)}
        if not any(of_peer.values()):
            continue
        alone = of_peer["none"] or {}
        star = "\\*" if alone and is_busy(alone) else ""
        values = [seconds(alone.get("first_step_s")), alone.get("steps_per_s", ""), alone.get("stall_ms", "")]
        figures = [f"{value}{star}" if value != "" else "" for value in values]
        cells = [cell(of_peer[f]) if of_peer[f] else empty(peer, f) for f in faults]
        name = called(peer)
        lines.append("| " + " | ".join([name, str(lines_of(peer)), *map(str, figures), *cells]) + " |")
    return "\n".join(lines)


class Figure(NamedTuple):
    """A figure that peers are compared by.

    Attributes:
        words: What it is.
        values: Value of each peer, by its name.
        more_is_better: Whether a large value is good.
        unit: Follows the value.
    """

    words: str
    values: Mapping[str, float]
    more_is_better: bool
    unit: str


def figures(trials: Mapping[tuple[str, str, str], Record]) -> list[Figure]:
    """Return the figures; a time after a fault counts only where every sample was used once, or the peer says that it loses some."""

    def of(fault: str, key: str) -> dict[str, float]:
        found = {}
        for peer in PEERS:
            record = trials.get((peer.name, peer.variant, fault))
            if record is None or record.get(key) is None:
                continue
            kind = outcome(record).kind
            if kind in {"same", "close"}:
                found[called(peer)] = record[key]
            elif peer.lossy and kind == "unpromised" and "lost" in record:
                found[f"{called(peer)} (loses samples)"] = record[key]
        return found

    lines = {peer.name: float(lines_of(peer)) for peer in _rows(trials)}
    return [
        Figure("lines to write", lines, more_is_better=False, unit=""),
        Figure("the command to the first step", of("none", "first_step_s"), more_is_better=False, unit=" s"),
        Figure("steps per second", of("none", "steps_per_s"), more_is_better=True, unit=""),
        Figure("stall of a checkpoint", of("none", "stall_ms"), more_is_better=False, unit=" ms"),
        *(
            Figure(
                f"time without a step, {SHORT[fault]}", of(fault, "pause_s"), more_is_better=False, unit=" s"
            )
            for fault in FAULTS
        ),
        *(
            Figure(f"steps made again, {SHORT[fault]}", of(fault, "redone"), more_is_better=False, unit="")
            for fault in FAULTS
        ),
    ]


def others_are_better(trials: Mapping[tuple[str, str, str], Record], least: float = 0.05) -> list[str]:
    """Return a line for each figure in which a peer is better than elasticflow's better form, by more than *least*."""
    lines = []
    for figure in figures(trials):
        ours = [value for name, value in figure.values.items() if name.startswith("elasticflow")]
        theirs = {name: v for name, v in figure.values.items() if not name.startswith("elasticflow")}
        if not ours or not theirs:
            continue
        sign = -1 if figure.more_is_better else 1
        best = min(ours, key=lambda value: sign * value)
        better = sorted(
            (sign * value, name)
            for name, value in theirs.items()
            if sign * (best - value) > least * max(abs(best), 1e-9)
        )
        if better:
            names = ", ".join(f"{name} {sign * value:g}{figure.unit}" for value, name in better)
            lines.append(f"- {figure.words}: {names}; elasticflow {best:g}{figure.unit}")
    return lines


STYLE = """
    .back { fill: #ffffff; stroke: #d0d7de } text { fill: #1f2328; font-size: 12px } .small { font-size: 11px; fill: #424a53 }
    .grid { stroke: #d0d7de } .same { fill: #aceebb } .close { fill: #dafbe1 } .samples { fill: #ffd8b5 }
    .weights { fill: #ffcecb } .stopped { fill: #d0d7de } .unpromised { fill: #e8ebef } .none { fill: #f6f8fa } .again { fill: #b6e3ff }
    @media (prefers-color-scheme: dark) {
      .back { fill: #0d1117; stroke: #30363d } text { fill: #f0f6fc } .small { fill: #d1d7e0 }
      .grid { stroke: #30363d } .same { fill: #055d20 } .close { fill: #033a16 } .samples { fill: #5a3600 }
      .weights { fill: #67060c } .stopped { fill: #3d444d } .unpromised { fill: #262c36 } .none { fill: #151b23 } .again { fill: #0c2d6b }
    }
"""
FONT = "system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"
WIDTH = 420


def _svg(title: str, text: str, height: int, parts: Sequence[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" role="img" '
        f'aria-labelledby="title text" font-family="{FONT}">\n  <title id="title">{escape(title)}</title>\n'
        f'  <desc id="text">{escape(text)}</desc>\n  <style>{STYLE}  </style>\n'
        f'  <rect class="back" x=".5" y=".5" width="{WIDTH - 1}" height="{height - 1}" rx="6"/>\n  '
        + "\n  ".join(parts)
        + "\n</svg>\n"
    )


def _rows(trials: Mapping[tuple[str, str, str], Record]) -> list[Peer]:
    return [peer for peer in PEERS if any((peer.name, peer.variant, f) in trials for f in ("none", *FAULTS))]


def bars(trials: Mapping[tuple[str, str, str], Record]) -> str:
    """Return the picture of a killed worker: seconds to the next step, and until the lost steps are made again."""
    title = "kill -9 of a worker: seconds to the next, and to a new step"
    least, most, left, width = math.log10(0.05), math.log10(60), 12, WIDTH - 84

    def length(value: float) -> float:
        return max(2.0, (math.log10(max(value, 0.05)) - least) / (most - least) * width)

    parts = [f'<text x="12" y="22" font-weight="600">{title}</text>']
    told, y = [], 40
    for peer in _rows(trials):
        record = trials.get((peer.name, peer.variant, "worker"))
        name = called(peer)
        found = outcome(record)
        parts.append(f'<text x="{left}" y="{y + 9}">{escape(name)}</text>')
        pause = pause_of(record)
        if pause is None:
            told.append(f"{name}: {found.words}")
            parts.append(f'<text class="small" x="{left}" y="{y + 26}">{escape(found.words)}</text>')
        else:
            caught = (record or {}).get("caught_up_s")
            told.append(f"{name}: {seconds(pause)} s, new step after {seconds(caught)} s, {found.words}")
            if caught is not None:
                parts.append(
                    f'<rect class="again" x="{left}" y="{y + 14}" width="{length(caught):.1f}" height="16"/>'
                )
            parts.append(
                f'<rect class="{found.kind}" x="{left}" y="{y + 14}" width="{length(pause):.1f}" height="16"/>'
            )
            label = f"{seconds(pause)} / {seconds(caught)} s" if caught is not None else f"{seconds(pause)} s"
            label += " (busy machine)" if record and is_busy(record) else ""
            x = left + length(max(pause, caught or 0)) + 4
            parts.append(f'<text class="small" x="{x:.1f}" y="{y + 26}">{label}</text>')
        y += 38
    parts.append(
        f'<text class="small" x="12" y="{y + 12}">Logarithmic. First part: no step at all, coloured by the outcome</text>'
    )
    parts.append(
        f'<text class="small" x="12" y="{y + 28}">as in the next picture; blue: steps that are made again.</text>'
    )
    return _svg(title, "; ".join(told), y + 44, parts)


def grid(trials: Mapping[tuple[str, str, str], Record]) -> str:
    """Return the picture of all faults: a row for each peer, seconds without a step, coloured by the outcome."""
    title = "seconds without a step, and the outcome, by fault"
    each = (WIDTH - 16) / len(FAULTS)
    parts = [f'<text x="12" y="22" font-weight="600">{title}</text>']
    for number, fault in enumerate(FAULTS):
        for line, word in enumerate(SHORT[fault].split(" ") if " " in SHORT[fault] else ["", SHORT[fault]]):
            x = 8 + (number + 0.5) * each
            parts.append(
                f'<text x="{x:.1f}" y="{44 + 12 * line}" text-anchor="middle" style="font-size: 9.5px">{word}</text>'
            )
    told, y = [], 66
    for peer in _rows(trials):
        name = called(peer)
        parts.append(f'<text x="9" y="{y + 9}">{escape(name)}</text>')
        for number, fault in enumerate(FAULTS):
            record = trials.get((peer.name, peer.variant, fault))
            found, x = outcome(record), 8 + number * each
            value = pause_of(record)
            label = "-" if value is None else f"{value:.1f}" if value < 10 else f"{value:.0f}"
            label += "*" if record and value is not None and is_busy(record) else ""
            told.append(f"{name}, {SHORT[fault]}: {found.words}")
            parts.append(
                f'<rect class="{found.kind}" x="{x + 1:.1f}" y="{y + 14}" width="{each - 2:.1f}" height="18" rx="2"/>'
            )
            parts.append(
                f'<text class="small" x="{x + each / 2:.1f}" y="{y + 27}" text-anchor="middle">{label}</text>'
            )
        y += 40
    for kind, words in KINDS.items():
        parts.append(f'<rect class="{kind}" x="12" y="{y + 2}" width="16" height="12" rx="2"/>')
        parts.append(f'<text class="small" x="34" y="{y + 12}">{words}</text>')
        y += 18
    return _svg(title, "; ".join(told), y + 12, parts)


def page(records: Sequence[Record], versions: Mapping[str, Mapping[str, str]]) -> str:
    """Return the Markdown of the page."""
    trials = newest(records, "mlp", 2)
    others = {size: newest(records, *size) for size in (("gpt", 2), ("mlp", 3), ("gpt", 3))}
    shown = [record for of_size in (trials, *others.values()) for record in of_size.values()]
    days = sorted({record["when"][:10] for record in shown})
    busy = [record for record in shown if is_busy(record)]
    loads = [record["load"] for record in busy]
    machine = next(iter(trials.values()))["machine"] if trials else ""
    parts = [
        TEXT_TOP.format(
            days=" to ".join(dict.fromkeys((days[0], days[-1]))),
            machine=machine,
            busy=BUSY_WORDS.format(least=min(loads), most=max(loads)) if busy else "",
        )
    ]
    parts += ["## Table", "", LEGEND, "", table(trials), ""]
    better = others_are_better(trials)
    for (model, workers), other in others.items():
        if other:
            name = f"{MODELS[model]}, {workers} workers"
            faults = [fault for fault in FAULTS if any(key[2] == fault for key in other)]
            parts += [f"## {name}", "", table(other, faults), ""]
            better += [f"{line} ({name})" for line in others_are_better(other)]
    parts += ["## Where others are better", "", WHERE, "", *(better or ["- nowhere in these tables"]), ""]
    parts += [TEXT_RULES, "", "## Settings and versions", ""]
    for peer in _rows(trials):
        of = ", ".join(f"{name} {version}" for name, version in versions.get(peer.environment, {}).items())
        name = called(peer)
        parts.append(f"- **{name}**: `{peer.settings}` ([script]({LINK}/scripts/{peer.script}); {of})")
    parts += ["", "## Not measured", "", *(f"- {name}: {why}." for name, why in LEFT_OUT.items()), ""]
    return "\n".join(parts)


LINK = "../../tests/measured/peers"
MODELS = {"mlp": "MLP", "gpt": "A small GPT (two blocks, width 128)"}
TEXT_TOP = f"""# Compared: the same faults for everybody

One command, `python -m tests.measured.peers`, gives the same work and the same faults to elasticflow and to other ways of training that survive
failures, each in an environment of its own. The faults come from one [plan]({LINK}/plan.toml). Each peer's script is written from its
documentation; it has the settings that its README shows, and `tuned` adds those that its documentation names for a faster recovery.

The figures are from {{days}}, on {{machine}}, with gloo. {{busy}}Each cell is the newest
trial, or the median of several, of those in the [raw data]({LINK}/data/trials.jsonl), which has the load of each; quiet trials go before busy ones.
An MLP of a million parameters trains for 400 steps of 48 samples on two workers, and saves every 50 steps.

![Bars for each peer: seconds from kill -9 of a worker to the next step of anybody, and to the first step that nobody had made
before.](pictures/{BARS})

![A grid with a row for each peer and a column for each fault: the longest time without a step, coloured by the outcome: every sample once and the same
bits, differences by rounding, samples lost or repeated, other weights, stopped, not promised.](pictures/{GRID})
"""
BUSY_WORDS = """A star marks a figure **of a busy machine** that has no quiet trial yet: the load was {least} to {most} as its trial
began. Read such times as orders of magnitude, and compare steps per second with care; samples, bits and outcomes do not depend on the load. """
LEGEND = """*lines*: those that a user writes, without the model, the data and the optimizer. *start*: from the command to the end of the first step.
*stall*: how much longer a step with a checkpoint takes than the median step. The other columns: the longest time without a step after the fault
(after a restart by hand: from the command), how many steps were made again, and the outcome. *Bits* are those of the peer's own undisturbed run.
*from step*: the step of the checkpoint that was loaded after the newest was damaged. `-`: not measured. *as tuned*: the fault touches nothing that the
tuned settings change. *not promised* alone: the documentation leaves it out, and no trial was made."""
WHERE = """By more than 5 %, than the better of elasticflow's two forms; times after a fault count where every sample was used once, and
those of a peer that says that it loses samples are marked."""
TEXT_RULES = f"""## How it is judged

- **In the weights.** The model holds one more parameter, a number for each sample, whose gradient is 1 for each sample of a batch. So the final weights
  say how often they have learned from each sample, however often a worker was restarted ([workload]({LINK}/scripts/workload.py)).
- **Lineage.** Each step appends a digest of these numbers before and after it to a file. From the final weights back, the digests name the steps that
  led there; all others are steps made again, or thrown away ([judging]({LINK}/judging.py), [tests]({LINK}/test_judging.py)).
- **Faults.** A fault comes at a step between 110 and 220 that is drawn from the plan's seed, the same for all. A node is a launcher with one worker.
  A trial ends with the job, or after 120 s without a step. A run that a node joins has 1,200 steps where 400 would be over before the node is in.
- **Bits.** From three workers on DistributedDataParallel adds in another order in the first step of each start, before it forms its buckets anew: after a
  restart the weights then differ, though each sample was used once. elasticflow starts with the same buckets.
- **Not promised.** torchft's documentation calls its sampler lossy, and the batch shrinks while a replica is away: its lost samples are no failure of
  it. Checkpoint files of torchrun, NVRx and torchft are the script's own, one file that is replaced; nothing older is there to fall back to.
- **Repeating it.** `python -m tests.measured.peers install` makes the environments, `... measure` appends trials, `... page` writes this page; `--peer`
  and `--fault` take some. The full disk needs the right to mount. A whole pass has some 110 trials.
- **Suites that others wrote.** Tests of torchft, torch and Ray Train, unchanged or told as scripts: [results]({LINK}/suites.md)."""


def write_page(trials: Path, versions: Path) -> None:
    """Write the page and its pictures."""
    records = read(trials)
    of_page = newest(records, "mlp", 2)
    (GUIDE / "pictures" / BARS).write_text(bars(of_page), encoding="utf-8")
    (GUIDE / "pictures" / GRID).write_text(grid(of_page), encoding="utf-8")
    (GUIDE / "compared.md").write_text(page(records, json.loads(versions.read_text())), encoding="utf-8")


def read(trials: Path) -> list[Record]:
    """Return the trials, the oldest first."""
    return [json.loads(line) for line in trials.read_text().splitlines()]
