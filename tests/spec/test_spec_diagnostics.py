"""Findings in the five formats; no secret and no control character gets out."""

from __future__ import annotations

import json

import pytest

from elasticflow.spec.diagnostics import Diagnostic, at, in_order, mask_secrets, render
from elasticflow.spec.positions import Span

TEXT = '[train]\nepoch = 5  # "a", 100%\n'
ONE = at("EF101", 'unknown key "epoch" in [train]', file="jobs/a,b.toml", text=TEXT, span=Span(8, 13), remedy='did you mean "epochs"?')  # fmt: skip
WARNING = Diagnostic("EF401", "warning", "no endpoint: 100%", "jobs/b.toml", help="one\ntwo")


def test_full_shows_line_caret_and_help() -> None:
    """The format for people is laid out like a compiler's."""
    expected = (
        'error[EF101]: unknown key "epoch" in [train]\n'
        " --> jobs/a,b.toml:2:1\n"
        "  |\n"
        '2 | epoch = 5  # "a", 100%\n'
        "  | ^^^^^\n"
        '  = help: did you mean "epochs"?\n'
        "\n"
        "warning[EF401]: no endpoint: 100%\n"
        "--> jobs/b.toml\n"
        " = help: one\n"
        "         two"
    )
    assert expected == render([ONE, WARNING])


def test_full_is_coloured_only_when_asked() -> None:
    """Colours are escape codes around severity, frame and carets."""
    assert "\x1b[" not in render([ONE])
    assert "\x1b[1;31merror[EF101]\x1b[0m" in render([ONE], colour=True)


def test_concise_is_one_line_each() -> None:
    """One finding, one line: file, place, code, message, remedy."""
    expected = (
        'jobs/a,b.toml:2:1: error[EF101] unknown key "epoch" in [train] (did you mean "epochs"?)\n'
        "jobs/b.toml: warning[EF401] no endpoint: 100% (one)"
    )
    assert expected == render([ONE, WARNING], "concise")


def test_github_escapes_what_its_commands_would_read() -> None:
    """Percent signs, newlines, and commas and colons in properties are escaped."""
    first, second = render([ONE, WARNING], "github").splitlines()
    assert first == (
        "::error title=elasticflow (EF101),file=jobs/a%2Cb.toml,line=2,col=1,endLine=2,endColumn=6"
        '::jobs/a,b.toml:2:1: unknown key "epoch" in [train]%0A  help: did you mean "epochs"?'
    )
    assert second == (
        "::warning title=elasticflow (EF401),file=jobs/b.toml::jobs/b.toml: no endpoint: 100%25%0A  help: one%0Atwo"
    )


def test_json_and_sarif_hold_the_same_facts() -> None:
    """The formats for machines parse and name code, place and severity."""
    (first, second) = json.loads(render([ONE, WARNING], "json"))
    assert tuple(first[key] for key in ("code", "line", "column", "end_line", "end_column")) == (
        "EF101",
        2,
        1,
        2,
        6,
    )
    assert second["line"] is None
    sarif = json.loads(render([ONE, WARNING], "sarif"))
    results = sarif["runs"][0]["results"]
    assert sarif["version"] == "2.1.0"
    assert [each["level"] for each in results] == ["error", "warning"]
    assert results[0]["locations"][0]["physicalLocation"]["region"]["startLine"] == 2


def test_nothing_found_is_empty_text_or_an_empty_list() -> None:
    """A clean file prints nothing in the line formats, and valid JSON in the others."""
    assert "" == render([]) == render([], "concise") == render([], "github")
    assert [] == json.loads(render([], "json")) == json.loads(render([], "sarif"))["runs"][0]["results"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('secret = "hunter2"', 'secret = "*******"'),
        (
            "options = { aws_secret_access_key = 'abc', x = 1 }",
            "options = { aws_secret_access_key = '***', x = 1 }",
        ),
        ("snapshots.options.token=abc", "snapshots.options.token=***"),
        ('uri = "sftp://me:pw@host/x"', 'uri = "sftp://*****@host/x"'),
        ('tokenizer = "bpe"', 'tokenizer = "bpe"'),
        ('monkey = "x"', 'monkey = "x"'),
    ],
)
def test_secrets_are_masked(text: str, expected: str) -> None:
    """A line is shown with stars where a secret stands, at the same width."""
    assert expected == mask_secrets(text)


def test_control_characters_of_a_file_do_not_reach_the_terminal() -> None:
    """An escape code in a job file is shown as a replacement character."""
    assert "\x1b" not in render([at("EF101", "x", file="f", text="a = '\x1b[2J'", span=Span(0, 1))])


def test_a_long_line_is_cut_around_the_caret() -> None:
    """The excerpt of a line of thousands of characters shows the place that is meant."""
    text = "x" * 5000 + "HERE" + "y" * 5000
    lines = render([at("EF101", "x", file="f", text=text, span=Span(5000, 5004))]).splitlines()
    column = lines[-1].index("^")
    assert lines[3][column : column + 4] == "HERE"
    assert len(lines[3]) < 200


def test_order_is_by_file_and_place_without_repeats() -> None:
    """Findings are sorted, and said once."""
    late = at("EF101", "late", file="a", text="x\ny", span=Span(2, 3))
    early = at("EF101", "early", file="a", text="x\ny", span=Span(0, 1))
    assert [early, late] == in_order([late, early, late])
