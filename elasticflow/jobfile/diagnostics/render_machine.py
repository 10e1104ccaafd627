"""Diagnostics for machines: JSON, GitHub's workflow commands, SARIF."""

from __future__ import annotations

import json
from pathlib import PurePath
from typing import TYPE_CHECKING
from urllib.parse import quote

from elasticflow.jobfile.diagnostics import codes
from elasticflow.jobfile.diagnostics.codes import explanation_of
from elasticflow.system.installation import VERSION

if TYPE_CHECKING:
    from collections.abc import Sequence

    from elasticflow.jobfile.diagnostics.diagnostic import Diagnostic

_SARIF_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"


def as_json(diagnostics: Sequence[Diagnostic]) -> str:
    """Return a list of objects: code, severity, message, file, line, column, end_line, end_column, help.

    Lines and columns count from 1, columns in code points; the end is exclusive; a missing value is null.
    """
    keys = ("code", "severity", "message", "file", "line", "column", "end_line", "end_column", "help")
    return json.dumps([{key: getattr(each, key) for key in keys} for each in diagnostics], indent=2, ensure_ascii=False)  # fmt: skip


def as_github(each: Diagnostic) -> str:
    """Return the workflow command that annotates a line of a pull request; columns only within one line."""
    facts = {"title": f"elasticflow ({each.code})"}
    if not each.is_flag:
        facts["file"] = each.file
    if each.line is not None and not each.is_flag:
        facts |= {"line": str(each.line), "col": str(each.column)}
        facts |= {"endLine": str(each.end_line), "endColumn": str(each.end_column)}
        if each.line != each.end_line:  # GitHub takes columns within one line only
            del facts["col"], facts["endColumn"]
    text = f"{each.where}: {each.message}" + (f"\n  help: {each.help}" if each.help else "")
    kind = "notice" if each.severity == "note" else each.severity
    values = ",".join(
        f"{key}={_escaped(value).replace(':', '%3A').replace(',', '%2C')}" for key, value in facts.items()
    )
    return f"::{kind} {values}::{_escaped(text)}"


def _escaped(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def as_sarif(diagnostics: Sequence[Diagnostic]) -> str:
    """Return a SARIF 2.1.0 log: paths relative to the folder the command ran in, columns in code points."""
    used = sorted({each.code for each in diagnostics})
    driver = {
        "name": "elasticflow",
        "version": VERSION,
        "rules": [_rule(code) for code in used],
    }
    run = {
        "tool": {"driver": driver},
        "columnKind": "unicodeCodePoints",
        "originalUriBaseIds": {"%SRCROOT%": {"description": {"text": "The folder the command ran in."}}},
        "results": [_result(each, used.index(each.code)) for each in diagnostics],
    }
    log = {"$schema": _SARIF_SCHEMA, "version": "2.1.0", "runs": [run]}
    return json.dumps(log, indent=2, ensure_ascii=False)


def _rule(code: str) -> dict[str, object]:
    names = {value: name for name, value in vars(codes).items() if name.isupper()}
    rule: dict[str, object] = {"id": code, "name": names[code].title().replace("_", "")}
    if (explanation := explanation_of(code)) is not None:
        rule["shortDescription"] = {"text": explanation.title}
        rule["fullDescription"] = {"text": explanation.reason}
        rule["help"] = {"text": explanation.text, "markdown": explanation.markdown}
    return rule


def _result(each: Diagnostic, index: int) -> dict[str, object]:
    text = each.message + (f"\nhelp: {each.help}" if each.help else "")
    result: dict[str, object] = {"ruleId": each.code, "ruleIndex": index, "level": each.severity}
    return result | {"message": {"text": text}, "locations": [_location(each)]}


def _location(each: Diagnostic) -> dict[str, object]:
    if each.is_flag:
        return {"logicalLocations": [{"name": each.file, "kind": "parameter"}]}
    path = PurePath(each.file)
    artifact = {"uri": quote(path.as_posix()), "uriBaseId": "%SRCROOT%"}
    if path.is_absolute():
        artifact = {"uri": f"file://{quote(path.as_posix())}"}
    location: dict[str, object] = {"artifactLocation": artifact}
    if each.line is not None:
        location["region"] = {
            "startLine": each.line,
            "startColumn": each.column,
            "endLine": each.end_line,
            "endColumn": each.end_column,
        }
    return {"physicalLocation": location}
