"""Names of torch, torchrun, Lightning, Hugging Face, Accelerate and torchtitan, and their meanings in a job file.

The names are in `foreign_names.toml`, which is read only for an unknown key, value or option. Tests look up the
names in the tools themselves, and the keys in the models.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import tomli

if TYPE_CHECKING:
    from collections.abc import Mapping

TOOLS = {
    "torch": "torch's DataLoader, DistributedDataParallel and optimizers",
    "torchrun": "torchrun, and variables of the environment that it or torch reads or sets",
    "lightning": "Lightning's Trainer",
    "hf": "Hugging Face's TrainingArguments",
    "accelerate": "Accelerate's configuration file and its Accelerator",
    "titan": "torchtitan's configuration",
    "other": "scripts, papers and other tools",
}


class Meaning(NamedTuple):
    """The meaning of another tool's name in a job file.

    Attributes:
        key: The key that holds it, dotted; a table without a dot; empty where nothing holds it.
        form: The text to write at the key, with `{}` for the value.
        note: If no key holds it: the reason, or the substitute, with `{}` for the value; else the difference.
        table: The table, dotted, in which the names have this meaning; "." outside of tables; empty: anywhere.
    """

    key: str
    form: str = "{}"
    note: str = ""
    table: str = ""


class Row(NamedTuple):
    """One meaning, and its names by tool, separated by blanks."""

    meaning: Meaning
    names: Mapping[str, str]


def _row(values: Mapping[str, str]) -> Row:
    meaning = Meaning(**{"key": "", **{part: values[part] for part in Meaning._fields if part in values}})
    return Row(meaning, {tool: names for tool, names in values.items() if tool in TOOLS})


_TABLES = tomli.loads(Path(__file__).with_name("foreign_names.toml").read_text("utf-8"))
ROWS = tuple(map(_row, _TABLES["rows"]))
DECIDED_ELSEWHERE: Mapping[str, str] = _TABLES["decided_elsewhere"]
"""Options of torchrun that no key of [torchrun] sets, and what does; a test compares them with torch's own parser."""
LOCAL: Mapping[str, list[str]] = {key: names.split() for key, names in _TABLES["local"].items()}
"""Names of what makes an object, and of its arguments, in the table of the object itself."""
SAME_VALUES: Mapping[str, str] = {
    word: value for value, words in _TABLES["same_values"].items() for word in words.split()
}
"""Words of other tools for values, in small letters, and what a key may call them; which it takes, its type says."""


def plain(name: str) -> str:
    """Return the form of a name for looking it up: case, hyphens and the dashes of an option do not count."""
    return name.lower().replace("-", "_").strip("_ ")


ENTRIES: Mapping[str, Mapping[str, str]] = {
    key: {plain(name): entry for entry, names in entries.items() for name in names.split()}
    for key, entries in _TABLES["entries"].items()
}
"""By key, entry points of torch and of elasticflow by the names that people write without a module."""


@cache
def meanings() -> Mapping[tuple[str, str], Meaning]:
    """Return each meaning by its table and the plain form of the name; of two meanings of a name, the first."""
    by_name = {
        ("", option): Meaning("", note=note)
        for option, note in DECIDED_ELSEWHERE.items()
        if option != "module"
    }
    for meaning, names in ROWS:
        for name in " ".join(names.values()).split():
            by_name.setdefault((meaning.table, plain(name)), meaning)
    return by_name


def meaning_of(name: str) -> Meaning | None:
    """Return the meaning of another tool's name in any table of a job file; None for a name that no tool has."""
    by_name, wanted = meanings(), plain(name)
    # torchrun's options are variables of the environment, too.
    return by_name.get(("", wanted)) or by_name.get(("", wanted.removeprefix("pet_")))


def meaning_in(table: str, name: str) -> Meaning | None:
    """Return the meaning that another tool's name has in this table alone; *table*: dotted, "." outside of tables."""
    return meanings().get((table, plain(name)))
