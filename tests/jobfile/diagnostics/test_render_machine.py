"""Findings for machines: JSON, GitHub's workflow commands, SARIF."""

from __future__ import annotations

import json
import os
import urllib.request
from pathlib import Path

import pytest

from elasticflow.jobfile.diagnostics.codes import titles
from elasticflow.jobfile.diagnostics.diagnostic import Diagnostic, diagnostic_at
from elasticflow.jobfile.diagnostics.positions import Span
from elasticflow.jobfile.diagnostics.render_text import render

TEXT = '[train]\nepoch = 5  # "a", 100%\n'
ONE = diagnostic_at("EF101", 'unknown key "epoch" in [train]', file="jobs/a,b.toml", text=TEXT, span=Span(8, 13), remedy='did you mean "epochs"?')  # fmt: skip
WARNING = Diagnostic("EF401", "warning", "no endpoint: 100%", "jobs/b.toml", help="one\ntwo")
FLAG = diagnostic_at("EF104", "too small", file="--set", text="train.epochs=0", span=Span(13, 14))
LONG = diagnostic_at("EF103", "a text", file="/big job/ä.toml", text='a = """\nb"""', span=Span(4, 12))
ALL = [ONE, WARNING, FLAG, LONG]
SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"


def test_github_escapes_what_its_commands_would_read() -> None:
    """Percent signs, newlines, and commas and colons in properties are escaped."""
    first, second, flag, long = render(ALL, "github").splitlines()
    assert first == (
        "::error title=elasticflow (EF101),file=jobs/a%2Cb.toml,line=2,col=1,endLine=2,endColumn=6"
        '::jobs/a,b.toml:2:1: unknown key "epoch" in [train]%0A  help: did you mean "epochs"?'
    )
    assert second == (
        "::warning title=elasticflow (EF401),file=jobs/b.toml::jobs/b.toml: no endpoint: 100%25%0A  help: one%0Atwo"
    )
    assert flag == "::error title=elasticflow (EF104)::--set:1:14: too small"  # a flag is no file
    assert long.startswith("::error title=elasticflow (EF103),file=/big job/ä.toml,line=1,endLine=2::")


def test_json_is_a_list_of_these_objects() -> None:
    """The shape is what scripts rely on: nine keys, null where there is nothing."""
    first, second, *_ = json.loads(render(ALL, "json"))
    assert first == {
        "code": "EF101", "severity": "error", "message": 'unknown key "epoch" in [train]', "file": "jobs/a,b.toml",
        "line": 2, "column": 1, "end_line": 2, "end_column": 6, "help": 'did you mean "epochs"?',
    }  # fmt: skip
    assert (second["line"], second["severity"]) == (None, "warning")


def test_sarif_names_rules_and_places() -> None:
    """Each rule is explained; paths are escaped and relative to where the command ran; a flag has no path."""
    run = json.loads(render(ALL, "sarif"))["runs"][0]
    assert run["columnKind"] == "unicodeCodePoints"
    rules = {each["id"]: each for each in run["tool"]["driver"]["rules"]}
    assert rules["EF101"]["name"] == "UnknownKey"
    assert rules["EF101"]["shortDescription"]["text"] == titles()["EF101"]
    assert "[train]\nepoch = 5" in rules["EF101"]["help"]["text"]
    assert not any("helpUri" in each for each in rules.values())
    places = [each["locations"][0].get("physicalLocation") for each in run["results"]]
    assert places[0]["artifactLocation"] == {"uri": "jobs/a%2Cb.toml", "uriBaseId": "%SRCROOT%"}
    assert places[0]["region"] == {"startLine": 2, "startColumn": 1, "endLine": 2, "endColumn": 6}
    assert "region" not in places[1]
    assert places[2] is None
    assert places[3]["artifactLocation"] == {"uri": "file:///big%20job/%C3%A4.toml"}
    for each in run["results"]:
        assert run["tool"]["driver"]["rules"][each["ruleIndex"]]["id"] == each["ruleId"]


def test_nothing_found_is_empty_text_or_an_empty_list() -> None:
    """A clean file prints nothing in the line formats, and valid JSON in the others."""
    assert "" == render([]) == render([], "concise") == render([], "github")
    assert [] == json.loads(render([], "json")) == json.loads(render([], "sarif"))["runs"][0]["results"]


def sarif_schema() -> object:
    """Return the schema of SARIF 2.1.0, from a file that SARIF_SCHEMA names or from the web."""
    if named := os.environ.get("SARIF_SCHEMA"):
        return json.loads(Path(named).read_text("utf-8"))
    try:
        with urllib.request.urlopen(SCHEMA, timeout=20) as answer:
            return json.loads(answer.read())
    except (OSError, ValueError) as error:
        pytest.skip(f"the schema of SARIF cannot be had: {error} (a copy can be named by SARIF_SCHEMA)")


@pytest.mark.integration  # asks the web for the schema
def test_sarif_is_valid_by_its_schema() -> None:
    """A log with every code there is, and an empty one, are what the standard's schema says."""
    jsonschema = pytest.importorskip("jsonschema")
    schema = sarif_schema()
    every = [Diagnostic(code, "note", "x", "f.toml", 1, 1, 1, 1) for code in titles()]
    for diagnostics in ([], ALL, every):
        jsonschema.validate(json.loads(render(diagnostics, "sarif")), schema)
