"""Findings in the five formats; no secret and no control character gets out."""

from __future__ import annotations

import pytest

from elasticflow.jobfile.diagnostics.diagnostic import Diagnostic, diagnostic_at, in_order
from elasticflow.jobfile.diagnostics.excerpt import excerpt_and_carets, mask_secrets
from elasticflow.jobfile.diagnostics.positions import Span
from elasticflow.jobfile.diagnostics.render_text import FORMATS, render

TEXT = '[train]\nepoch = 5  # "a", 100%\n'
ONE = diagnostic_at("EF101", 'unknown key "epoch" in [train]', file="jobs/a,b.toml", text=TEXT, span=Span(8, 13), remedy='did you mean "epochs"?')  # fmt: skip
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
        ('uri = "https://host/x?sig=abc&part=1"', 'uri = "https://host/x?sig=***&part=1"'),
        (
            'url = "https://discord.com/api/webhooks/12/ab" # x',
            'url = "https://discord.com/api/webhooks/*****" # x',
        ),
        ("notify.url=https://host/a/abcdefghij0123456789", "notify.url=https://host/a/********************"),
        (
            'url = "https://host/path/of/a/data-set-2017.zip"',
            'url = "https://host/path/of/a/data-set-2017.zip"',
        ),
        ('password = """hunter2"""', 'password = """*******"""'),
        ('password = """hunter2', 'password = """*******'),
        ('"api_key" = "abc"', '"api_key" = "***"'),
        ("max_tokens = 4096", "max_tokens = 4096"),
        ('tokenizer = "bpe"', 'tokenizer = "bpe"'),
        ('monkey = "x"', 'monkey = "x"'),
    ],
)
def test_secrets_are_masked(text: str, expected: str) -> None:
    """A line is shown with stars where a secret stands, at the same width."""
    assert expected == mask_secrets(text)


def test_secrets_over_several_lines_are_masked() -> None:
    """The lines after the first, too; other texts are shown."""
    text = 'secret = """\nhunter2\nhunter3""", when = 1\n[x]\nname = """\nshop"""\n'
    shown = [
        render(
            [
                diagnostic_at(
                    "EF107", "x", file="f", text=text, span=Span(text.index(word), text.index(word) + 1)
                )
            ]
        )
        for word in ("hunter2", "when", "shop")
    ]
    assert [each.splitlines()[3] for each in shown] == [
        "2 | *******",
        '3 | *******""", when = 1',
        '6 | shop"""',
    ]


def test_control_characters_of_a_file_do_not_reach_the_terminal() -> None:
    """An escape code in a job file is shown as a replacement character."""
    assert "\x1b" not in render(
        [diagnostic_at("EF101", "x", file="f", text="a = '\x1b[2J'", span=Span(0, 1))]
    )


def test_names_that_no_encoding_can_write_are_shown() -> None:
    """A file name of stray bytes or with a newline is one line of any format, and can be printed."""
    odd = Diagnostic("EF001", "error", "no such file: a\udcff", "a\udcff\nb", help="c\x1b")
    for style in FORMATS:
        text = render([odd], style)  # type: ignore[arg-type]  # one of them
        assert "\x1b" not in text
        text.encode("utf-8")
    assert render([odd], "concise").count("\n") == 0


WIDE = [
    ("\tkey = 1", 2, 5, "    key = 1", "    ^^^"),  # a tab is four blanks
    ("a\tb = 1", 3, 4, "a    b = 1", "     ^"),
    ('"日本" = 1', 1, 5, '"日本" = 1', "^^^^^^"),  # two columns each
    ('"日本" = x', 8, 9, '"日本" = x', "         ^"),
    ("e\u0301 = x", 6, 7, "e\u0301 = x", "    ^"),  # an accent of its own takes none
    ("a\u202eb = 1", 4, 5, "a\ufffdb = 1", "   ^"),  # a text direction is shown, not obeyed
    ("x = 1", 6, 7, "x = 1", "     ^"),  # the end of the line
    ("x = [", 5, None, "x = [", "    ^"),  # continues in the next line
    ("", 1, 1, "", "^"),
]


@pytest.mark.parametrize(("line", "column", "end_column", "shown", "carets"), WIDE)
def test_carets_stand_where_the_eye_expects_them(
    line: str, column: int, end_column: int | None, shown: str, carets: str
) -> None:
    """Tabs, wide and combining characters are counted in columns of a terminal."""
    assert excerpt_and_carets(line, column, end_column) == (shown, carets)


def test_a_span_over_several_lines_is_marked_to_the_end_of_the_first() -> None:
    """The value of a text in three quotes begins where it begins."""
    text = 'a = """one\ntwo"""\nb = 1'
    found = diagnostic_at("EF103", "x", file="f", text=text, span=Span(4, 17))
    assert (found.line, found.column, found.end_line, found.end_column) == (1, 5, 2, 7)
    assert render([found]).splitlines()[3:5] == ['1 | a = """one', "  |     ^^^^^^"]


def test_a_long_line_is_cut_around_the_caret() -> None:
    """The excerpt of a line of thousands of characters shows the place that is meant, and that it is cut."""
    text = "x" * 5000 + "HERE" + "y" * 5000
    lines = render([diagnostic_at("EF101", "x", file="f", text=text, span=Span(5000, 5004))]).splitlines()
    column = lines[-1].index("^")
    assert lines[3][column : column + 4] == "HERE"
    assert lines[-1].count("^") == 4
    assert lines[3].startswith("1 | ...x")
    assert lines[3].endswith("y...")
    assert len(lines[3]) < 125


def test_a_line_of_a_million_characters_takes_no_time() -> None:
    """Masking walks over a line once; a test that never ends would be the failure."""
    text = "x" * 1_000_000 + " = 1"
    assert (
        render([diagnostic_at("EF101", "x", file="f", text=text, span=Span(0, 1_000_000))]).count("^") == 110
    )


def test_order_is_by_file_and_place_without_repeats() -> None:
    """Findings are sorted, and said once."""
    late = diagnostic_at("EF101", "late", file="a", text="x\ny", span=Span(2, 3))
    early = diagnostic_at("EF101", "early", file="a", text="x\ny", span=Span(0, 1))
    assert [early, late] == in_order([late, early, late])
