"""The page of all keys of a job file is up to date; run as a program, this makes it again."""

from __future__ import annotations

import json
import re
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from elasticflow.guide.pages import GUIDE
from elasticflow.jobfile.tables.job import Job
from elasticflow.jobfile.tables.types import ENTRY
from elasticflow.system import units
from tests.jobfile.tools.made_schema import job_schema

if TYPE_CHECKING:
    from collections.abc import Iterator

PAGE = GUIDE / "job-reference.md"
Node = dict[str, Any]
SCHEMA: Node = job_schema()
REQUIRED = {name: set(table.get("required", ())) for name, table in Job.model_json_schema()["$defs"].items()}
# Texts that have a notation of their own.
NOTATIONS = {
    ENTRY: "entry point",
    units.INTERVAL: "interval",
    units.PROGRESS: "interval",
    units.DURATION: "time",
    units.SIZE: "size",
    r"^[1-9][0-9]{0,8} steps?$": "steps",
}
BESIDES = {
    "EvaluationTable": "Or `[evaluation.NAME]`, several of them: sets by name, each with these keys.",
    "EnvTable": 'Keys are the names of variables: `NAME = "value"`, or a table:',
}
HEAD = """\
# Job reference: every table and key

Made from the models that check job files (`python -m tests.guide.test_job_reference`), so it cannot differ from them. Writing, checking and
composing job files: [job files](job-files.md).

- An *entry point* is `"package.module:name"`: a function or a class of yours, of torch, or of any other package.
- A *time* is a number and a unit, such as `"30 s"`, `"10 min"`, `"2.5 h"` or `"7 d"`. An *interval* is a time or a count: `"500 steps"`,
  `"1 epoch"`, `"100000 samples"`. A *size* is `"4 GiB"` or `"500 MB"`.
- A *required* key may come from another file that the job file `extends`.
"""


class Table(NamedTuple):
    """One table of the file: how its heading is written, and its schema's name."""

    heading: str
    name: str


def name_of(node: Node) -> str:
    """Return which table a node is, empty if none."""
    return str(node.get("$ref", "")).rpartition("/")[2]


def tables(node: Node, path: str = "") -> Iterator[Table]:
    """Yield the tables of the file, those inside others right after them, each schema once."""
    seen: set[str] = set()
    for key, value in node.get("properties", {}).items():
        for name, heading in inner_tables(value, f"{path}{key}"):
            if name not in seen:
                seen.add(name)
                several = [each for each in node["properties"] if each.startswith("on_")]
                yield Table(f"[{path}on_...]" if key in several else heading, name)
                yield from tables(SCHEMA["$defs"][name], f"{heading.strip('[]')}.")
    for name, heading in inner_tables(
        {"patternProperties": node.get("patternProperties", {})}, path.rstrip(".")
    ):
        yield Table(heading, name)


def inner_tables(node: Node, path: str) -> Iterator[tuple[str, str]]:
    """Yield the names of tables that a key may hold, and how their heads are written."""
    if name := name_of(node):
        yield name, f"[{path}]"
    for alternative in node.get("anyOf", ()):
        yield from inner_tables(alternative, path)
    if "items" in node:
        for name, _ in inner_tables(node["items"], path):
            yield name, f"[[{path}]]"
    for alternative in node.get("patternProperties", {}).values():
        for name, _ in inner_tables(alternative, path):
            yield name, f"[{path}.NAME]"


def kind(node: Node) -> str:
    """Return what a value is, in words."""
    if name_of(node):
        return "table"
    if "const" in node:
        return f"`{toml(node['const'])}`"
    if "enum" in node:
        return " or ".join(f"`{toml(value)}`" for value in node["enum"])
    if "anyOf" in node:
        return ", or ".join(dict.fromkeys(map(kind, node["anyOf"])))
    match node["type"]:
        case "string":
            return NOTATIONS.get(node.get("pattern", ""), "text")
        case "integer":
            return f"whole number{bounds(node)}"
        case "number":
            return f"number{bounds(node)}"
        case "boolean":
            return "`true` or `false`"
        case "array":
            return f"list of: {kind(node['items'])}" if "items" in node else "list"
        case _:
            values = [kind(value) for value in node.get("patternProperties", {}).values()]
            return f"table of names, each: {', '.join(values)}" if values else "table"


def bounds(node: Node) -> str:
    """Return the least and the greatest value, in words."""
    words = []
    for key, word in (
        ("minimum", "at least"),
        ("exclusiveMinimum", "above"),
        ("maximum", "at most"),
        ("exclusiveMaximum", "below"),
    ):
        # Huge bounds keep absurd numbers out and tell nobody anything.
        if key in node and abs(node[key]) < 10**6:
            words.append(f"{word} {node[key]:,}")
    return f" ({', '.join(words)})" if words else ""


def toml(value: object) -> str:
    """Return a value as it is written in a job file."""
    if isinstance(value, dict):
        inner = ", ".join(f"{key} = {toml(each)}" for key, each in value.items())
        return f"{{ {inner} }}" if inner else "{}"
    if isinstance(value, list):
        return f"[{', '.join(map(toml, value))}]"
    if isinstance(value, float) and value >= 10**6:
        return f"{value:.6g}".replace("e+", "e").replace("e0", "e")
    return json.dumps(value, ensure_ascii=False)


def prose(text: str) -> str:
    """Return a hover text on one line, as Markdown."""
    # What stands between backticks is shown as it is.
    return re.sub(r"(`[^`]*`)|([<*])", lambda found: found[1] or f"\\{found[2]}", " ".join(text.split()))


def line_of(table: str, key: str, node: Node) -> str:
    """Return a key's entry: its type, default or need, its hover text, an example."""
    facts = [kind(node)]
    if key in REQUIRED.get(table, ()):
        facts.append("required")
    if "default" in node and node["default"] not in ({}, []):
        facts.append(f"default `{toml(node['default'])}`")
    examples = [toml(value) for value in node.get("examples", ()) if value != node.get("default")]
    example = f" Example: `{examples[0]}`" if examples else ""
    return f"- **`{key}`**: {'; '.join(facts)}\\\n  {prose(node['description'])}{example}"


def page() -> str:
    """Return the page as the models have it now."""
    lines = [HEAD]
    extends = SCHEMA["properties"]["extends"]
    lines += ["## At the top of the file\n", line_of("", "extends", extends), ""]
    needed = Job.model_json_schema()["required"]
    for heading, name in tables(SCHEMA):
        table = SCHEMA["$defs"][name]
        about = "\n\n".join(map(prose, table["description"].split("\n\n")))
        word = " Required." if heading.strip("[]") in needed else ""
        lines += [f"## `{heading}`\n", f"{about}{word}\n"]
        lines += [f"{BESIDES[name]}\n"] if name in BESIDES else []
        lines += [line_of(name, key, node) for key, node in table["properties"].items()]
        lines += [""] if table["properties"] else []
    return "\n".join(lines).rstrip() + "\n"


def test_the_page_says_what_the_models_say() -> None:
    """The file is up to date; if not: `python -m tests.guide.test_job_reference`."""
    assert page() == PAGE.read_text("utf-8")


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
    sys.stdout.write(f"{PAGE} made: read it\n")
