"""Numbers, times, sizes and durations by activity as a person reads them; pure."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from elasticflow.system.records import float_of

if TYPE_CHECKING:
    from collections.abc import Mapping

_MINUTE_S = 59.95


def elapsed(seconds: float) -> str:
    """Return `0:05.3`, `12:40.0`, or, from an hour on, `3:00:07`."""
    tenths = max(0, round(seconds * 10))
    minutes, rest = divmod(tenths, 600)
    if minutes >= 60:
        return f"{minutes // 60}:{minutes % 60:02d}:{rest // 10:02d}"
    return f"{minutes}:{rest // 10:02d}.{rest % 10}"


def span(seconds: float) -> str:
    """Return `4 ms`, `0.28 s`, `2.3 s`, `12.1 s`, `3 min 20 s`, `2 h 05 min` or `4 d 3 h`."""
    if seconds < 0.0995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 0.995:
        return f"{seconds:.2f} s"
    if seconds < _MINUTE_S:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 86_400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86_400} d {whole % 86_400 // 3600} h"


def size(num_bytes: float) -> str:
    """Return `812 bytes`, `64.1 kB`, `1.2 GB` (powers of 1000, as disks are sold)."""
    if num_bytes < 1000:
        return plural(int(num_bytes), "byte")
    amount = float(num_bytes)
    for unit in ("kB", "MB", "GB", "TB"):
        amount /= 1000
        if amount < 999.95:
            return f"{amount:.1f} {unit}"
    return f"{amount / 1000:,.1f} PB"


def number(value: object) -> str:
    """Return four significant digits: `0.2314`, `12.31`, `3.0e-05`; `-` for None, `nan` and `inf` as words."""
    if value is None:
        return "-"
    try:
        amount = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return str(value)
    if amount == 0 or not math.isfinite(amount):
        return f"{amount:g}"
    if 1e-3 <= abs(amount) < 10:
        return f"{amount:.4f}"
    if 10 <= abs(amount) < 10_000:
        return f"{amount:.2f}"
    return f"{amount:.2e}"


def plural(count: int, word: str) -> str:
    """Return `1 step`, `1,437 samples`."""
    return f"{count:,} {word}{'' if count == 1 else 's'}"


def groups_in_words(groups: object) -> str:
    """Return the groups of `parameters.grouped`: `norms: 2 tensors, 128 numbers, weight_decay 0.0 / rest: ...`."""
    parts = []
    for group in groups if isinstance(groups, list | tuple) else ():
        if isinstance(group, dict):
            sizes = [(group.get("tensors"), "tensor"), (group.get("parameters"), "number")]
            facts = [plural(count, word) for count, word in sizes if isinstance(count, int)]
            args = group.get("args")
            facts += [f"{key} {value}" for key, value in args.items()] if isinstance(args, dict) else []
            parts.append(f"{group.get('name')}: {', '.join(facts)}")
    return " / ".join(parts)


def order_in_words(record: Mapping[str, object]) -> str:
    """Return the order in an `order.declared` record: `drawn by weights, 1,797 samples an epoch`."""
    words = {"weighted": "drawn by weights, with replacement", "bucketed": "batches of similar length"}
    samples, facts = record.get("samples"), record.get("facts")
    if isinstance(facts, dict) and record.get("kind") == "mixed":
        sets, shares = facts.get("sets", []), facts.get("shares", [])
        parts = [f"{share / sum(shares):.1%} of {size:,}" for size, share in zip(sets, shares, strict=False)]
        words["mixed"] = f"mixture of {' / '.join(parts)} samples"
    epoch = f", {plural(samples, 'sample')} an epoch" if isinstance(samples, int) else ""
    return f"{words.get(str(record.get('kind')), str(record.get('kind')))}{epoch}"


def rfc3339(unix: float) -> str:
    """Return `2026-11-20T10:45:00.000Z`, the form of times in JSON."""
    return datetime.fromtimestamp(unix, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def local_time(unix: float | None) -> str:
    """Return `2026-11-20 10:45:00` in this machine's time zone; `-` for None."""
    if unix is None:
        return "-"
    return f"{datetime.fromtimestamp(unix, UTC).astimezone():%Y-%m-%d %H:%M:%S}"


def parts_of(value: object) -> dict[str, float]:
    """Return the parts in *value*, which is from an event or a state file; empty if it has another form."""
    if not isinstance(value, dict):
        return {}
    return {str(name): seconds for name in value if (seconds := float_of(value, name)) is not None}


def took(parts: Mapping[str, float], *, is_blind: bool = False) -> str:
    """Return `11.7 s: starting 6.4 s, training 4.3 s, ending 1.0 s`; negligible parts are left out.

    Args:
        parts: Seconds by activity.
        is_blind: The workers report no steps: their script ran, but it is unknown whether it trained.
    """
    parts = {activity_word(name, is_blind=is_blind): parts[name] for name in parts}
    total = sum(parts.values())
    least = 1.0 if total >= _MINUTE_S else 0.05
    words = [f"{name} {span(seconds)}" for name, seconds in parts.items() if seconds >= least]
    return f"{span(total)}: {', '.join(words)}" if words else span(total)


def activity_word(name: str, *, is_blind: bool) -> str:
    """Return the word for a part of the time; `training` is `script` if the run *is_blind*."""
    return "script" if is_blind and name == "training" else name


def goodput(parts: Mapping[str, float]) -> float | None:
    """Return the share (0 to 1) of the time for steps that count; None if no time is known."""
    total = sum(parts.values())
    return parts.get("training", 0.0) / total if total > 0 else None


def percent(share: float | None) -> str:
    """Return `93.4 %`, rounded down so that 100 % means everything; `-` for None."""
    return "-" if share is None else f"{math.floor(1000 * share) / 10:.1f} %"
