"""A text of another format that was given as a job file, and how it begins in TOML."""

from __future__ import annotations

import json
import re

import tomli

from elasticflow.jobfile.diagnostics.excerpt import mask_secrets
from elasticflow.jobfile.diagnostics.toml_literals import dotted, to_toml

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
        return "this is YAML, and a job file is TOML", _begins(_of_yaml(text))
    return None


def _begins(lines: list[str]) -> str:
    if not lines:
        return "tables have their names in brackets, keys are written key = value: `elasticflow init` writes such a file"
    return "\n".join(
        ["the same in TOML begins:" if len(lines) >= _SHOWN else "the same in TOML:", *lines[:_SHOWN]]
    )


def _of_json(text: str) -> list[str]:
    try:
        return _in_toml(json.loads(text))
    except (ValueError, RecursionError):
        return []


def _of_yaml(text: str) -> list[str]:
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError
    from ruamel.yaml.events import AliasEvent

    yaml = YAML(typ="safe", pure=True)
    try:
        # An alias may stand for itself, or for more than fits into memory.
        if any(isinstance(event, AliasEvent) for event in yaml.parse(text)):
            return []
        return _in_toml(yaml.load(text))
    except (YAMLError, ValueError, RecursionError):
        return []


def _in_toml(raw: object) -> list[str]:
    if not isinstance(raw, dict):
        return []
    # Keys after a table's header would be that table's.
    tables = {key: value for key, value in raw.items() if isinstance(value, dict)}
    lines = _pairs({key: value for key, value in raw.items() if key not in tables})
    for name, table in tables.items():
        lines += [f"[{dotted((str(name),))}]", *_pairs(table)]
    # A value that TOML has not, such as null in a list, is a ValueError here.
    tomli.loads("\n".join(lines))
    return lines


def _pairs(table: dict[object, object]) -> list[str]:
    return [
        mask_secrets(f"{dotted((str(key),))} = {to_toml(value)}")
        for key, value in table.items()
        if value is not None
    ]
