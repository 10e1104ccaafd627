"""Keys and values as the job file would write them."""

from __future__ import annotations

import datetime as dt
import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from elasticflow.jobfile.diagnostics.positions import KeyPath


_MOST_BITS = 14_000  # Python refuses to write longer numbers in decimal


def show(value: object) -> str:
    """Return a value as the job file would write it, shortened."""
    if isinstance(value, str):
        text = "".join(
            c if c.isprintable() else "\N{REPLACEMENT CHARACTER}"
            for c in json.dumps(value, ensure_ascii=False)
        )
        return text if len(text) <= 60 else f'{text[:56]}..."'
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int) and value.bit_length() > 64:
        return "a number beyond 64 bits"
    if isinstance(value, dict | list):
        empty = "" if value else "n empty"
        return f"a{empty} {'table' if isinstance(value, dict) else 'list'}"
    if isinstance(value, dt.date | dt.time):
        return f"the date or time {value}"
    return str(value)


def to_toml(value: object) -> str:
    """Return a value in full, ready to be pasted into a job file."""
    if isinstance(value, dict):
        inner = ", ".join(f"{dotted((key,))} = {to_toml(each)}" for key, each in value.items())
        return f"{{ {inner} }}" if inner else "{}"
    if isinstance(value, list):
        return f"[{', '.join(to_toml(each) for each in value)}]"
    if isinstance(value, dt.date | dt.time):
        return str(value)
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        return show(value)
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str | bool) else str(value)


def dotted(path: KeyPath) -> str:
    """Return a key as people write it: `snapshots.keep.last`, `job.path[1]`."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            bare = part.replace("_", "a").replace("-", "a")
            name = part if bare.isascii() and bare.isalnum() else show(part)
            text += f".{name}" if text else name
    return text
