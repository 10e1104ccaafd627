"""A text of another format that was given as a job file, and how it begins in TOML."""

from __future__ import annotations

import json
import re

from elasticflow.jobfile.diagnostics.excerpt import mask_secrets
from elasticflow.jobfile.diagnostics.toml_literals import dotted, to_toml
from elasticflow.jobfile.text.slips import Mended, is_toml_up_to, mended

_SHOWN = 10


def other_format(text: str) -> tuple[str, str] | None:
    """Return that a text is of another format, and how it begins in TOML; None where it seems to be meant as TOML."""
    lines = [each for each in text.split("\n") if each.strip() and not each.lstrip().startswith("#")]
    if text.lstrip().startswith("{"):
        return "this is JSON, and a job file is TOML", _begins(_of_json(text))
    is_toml = any(re.match(r"\s*\[[\w.\-\" ]+\]", each) for each in lines)
    if (
        not is_toml
        and sum(
            bool(re.match(r"\s*(from \w[\w.]* import |import \w|def \w+\(|class \w+[(:])", each))
            for each in lines
        )
        > 1
    ):
        return (
            "this is Python, and a job file is TOML",
            "name the job file that trains with it: `elasticflow init FILE.py` writes one",
        )
    of_yaml = [each for each in lines if re.match(r"\s*(-\s+)?[\w.\-\"']+:(\s|$)|\s*-\s|---\s*$", each)]
    if not is_toml and of_yaml and 2 * len(of_yaml) > len(lines):
        return "this is YAML, and a job file is TOML", _begins(_of_yaml(lines))
    return None


def _begins(lines: list[str]) -> str:
    if not lines:
        return "tables have their names in brackets, keys are written key = value: `elasticflow init` writes such a file"
    return "\n".join(
        ["the same in TOML begins:" if len(lines) >= _SHOWN else "the same in TOML:", *lines[:_SHOWN]]
    )


def _of_json(text: str) -> list[str]:
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError):
        return []
    lines: list[str] = []
    tables = {key: value for key, value in raw.items() if isinstance(value, dict)}
    lines += _pairs({key: value for key, value in raw.items() if key not in tables})
    for name, table in tables.items():
        lines += [f"[{dotted((name,))}]", *_pairs(table)]
    return lines


def _pairs(table: dict[str, object]) -> list[str]:
    given = {key: value for key, value in table.items() if value is not None}
    return [mask_secrets(f"{dotted((key,))} = {to_toml(value)}") for key, value in given.items()]


def _of_yaml(lines: list[str]) -> list[str]:
    """Return the beginning of two levels of YAML, as far as it is that simple."""
    toml: list[str] = []
    inner = ""
    for line in lines:
        pair = re.match(r"^(\s*)([\w.\-]+):\s*(.*?)\s*(?:\s#.*)?$", line)
        if line.strip() == "---":
            continue
        if pair is None:
            break
        indent, key, value = pair.groups()
        if indent and inner and indent != inner:
            break
        inner = indent or ""
        if not value and not indent:
            toml.append(f"[{key}]")
        elif value:
            pair_of_toml = f"{key} = {value}"
            right = (
                Mended(pair_of_toml, "")
                if is_toml_up_to(pair_of_toml, len(pair_of_toml))
                else mended(pair_of_toml, len(key))
            )
            if right is None:
                break
            toml += [mask_secrets(right.line)] * bool(right.line)
        else:
            break
    return toml
