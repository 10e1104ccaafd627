"""Texts that are not TOML: the place, the reason and the rule; nothing is offered that could mean something else."""

from __future__ import annotations

import pytest
import tomli
from hypothesis import given
from hypothesis import strategies as st

from elasticflow.jobfile.text import syntax_errors
from elasticflow.jobfile.text.syntax_errors import explain_syntax_error, other_format

RULES = {
    "size = 4 * 32": "TOML does not calculate",
    "clip = 1/2": "TOML does not calculate",
    "compile = True": "TOML writes true and false",
    "args = { flip = False, on = TRUE }": "TOML writes true and false",
    "compile = yes": "TOML writes true and false",
    "precision = None": "TOML has no null",
    "precision = null": "TOML has no null",
    "name = my job": 'a text needs quotes: name = "my job"',
    "uri = s3://bucket/x": 'a text needs quotes: uri = "s3://bucket/x"',
    r"uri = C:\data": r"a text needs quotes: uri = 'C:\data'",
    "every = 10 min": 'a text needs quotes: every = "10 min"',
    "every = [steps, min]": "a text needs quotes",
    "every = [10 min, 1 epoch]": "a comma stands between values, and a text needs quotes",
    "every = [1,\nname = x": "a text needs quotes, and a list ends with ]",
    "args = { lr = 1e-3 wd = 0.1 }": "a comma stands between the keys",
    'every = ["10 min"': "end the list with ]",
    "args = { lr = 1e-3": "end the table with }",
    'name = "mnist': "end the text with the quotes",
    'name = """mnist': 'end the text with """',
    "epochs: 5": "TOML writes key = value",
    "epochs => 5": "TOML writes key = value",
    "--epochs 5": "TOML writes key = value",
    "global batch size = 64": "TOML writes key = value; a key has no blanks",
    "epochs = 5;": "nothing but a comment stands after a value",
    "epochs = 5 // passes": "a comment begins with #",
    "; passes": "a comment begins with #",
    "epochs = 5, precision = 'bf16'": "each key, and each header, stands on a line",
    "[train] epochs = 5": "each key, and each header, stands on a line",
    "train]": "a table's name stands in brackets",
    "[lr scheduler]": "a table's name stands in brackets",
    "betas = (0.9, 0.99)": "a list stands in brackets",
    "args = dict(lr=1e-3)": "an inline table is { key = value, ... }",
    "clip = .5": "a number begins with a digit",
    "clip = 1.": "digits stand on both sides of the point",
    'name = f"x"': "no letter stands before the quotes",
    "name = \u201cmnist\u201d": "write straight quotes",
    r'uri = "C:\data"': "a backslash stands for itself in single quotes",
    "epo\u0441hs = 5": "CYRILLIC SMALL LETTER ES cannot stand here",
    "name\u00a0= 'x'": "NO-BREAK SPACE cannot stand here",
    "epochs =": "the value is missing",
    "lr = 0,001": "TOML writes 0.5 with a point",
    "steps = 10,000": "TOML writes 0.5 with a point",
}


def explained(line: str) -> tuple[str, int, str | None]:
    """Return what is said of a line amid others, on which line, and the help."""
    text = f"[a]\nb = 1\n{line}\n[c]\nd = 2\n"
    with pytest.raises(tomli.TOMLDecodeError) as error:
        tomli.loads(text)
    message, span, remedy = explain_syntax_error(error.value.msg, text, min(error.value.pos, len(text)))
    return message, text.count("\n", 0, span.start) - 2, remedy


@pytest.mark.parametrize("line", RULES)
def test_the_rule_that_is_broken_is_named(line: str) -> None:
    """At its line, whatever stands around it."""
    message, number, remedy = explained(line)
    assert message.startswith("not valid TOML")
    assert number == line.count("\n")
    assert remedy is not None
    assert remedy.startswith(RULES[line])


@pytest.mark.parametrize(
    "line",
    ["mode = 0755", "clip = 10**-1", "steps = 1_000__0", "lr = 1e-3f", "=", 'name = "x" + "y"'],
)  # fmt: skip
def test_nothing_is_worked_out(line: str) -> None:
    """Place and reason stand alone where several things can be meant."""
    message, number, remedy = explained(line)
    assert (message.startswith("not valid TOML"), number, remedy) == (True, 0, None)


@pytest.mark.parametrize("line", ["<<<<<<< HEAD", "=======", ">>>>>>> ours", "||||||| base"])
def test_a_merge_conflict_is_called_one(line: str) -> None:
    """Git's markers are no keys that somebody misspelt."""
    message, number, remedy = explained(line)
    assert (message, number) == ("a merge conflict was not settled", 0)
    assert remedy is not None
    assert remedy.startswith("keep the lines of one side")


def test_no_secret_is_offered() -> None:
    """The line in quotes is shown with stars where the line itself is."""
    assert explained("password = hunter2")[2] == 'a text needs quotes: password = "*******"'


def test_the_text_is_parsed_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason is explained by its line: the file is not read again, however long it is."""

    def refuse(*_: object) -> None:
        raise AssertionError("the text was parsed again")

    monkeypatch.setattr(tomli, "loads", refuse)
    assert not hasattr(syntax_errors, "tomli")
    text = "[a]\n" + "b = 1\n" * 1000 + "name = my job\n"
    assert explain_syntax_error("Invalid value", text, text.index("my job"))[2] is not None


@given(st.text(st.sampled_from("ab=[]{}\"'0.,:;#()-\\ \n<\u0441"), max_size=40))
def test_any_text_has_an_answer(text: str) -> None:
    """A reason, and a place within the text."""
    try:
        tomli.loads(text)
    except tomli.TOMLDecodeError as error:
        message, span, _ = explain_syntax_error(error.msg, text, min(error.pos, len(text)))
        assert message
        assert 0 <= span.start <= len(text)
        assert span.start < span.end


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"train": {"epochs": 3, "ema": null}}', "this is JSON"),
        ('{ "train": {', "this is JSON"),
        ("train:\n  epochs: 3  # passes\n  name: my job\n", "this is YAML"),
        ("---\nepochs: 3\n", "this is YAML"),
        ("- a\n- b\n", "this is YAML"),
        ("a: &a [*a]\nb: 1\n", "this is YAML"),
        ("from torch import nn\nimport torch\n", "this is Python"),
    ],
)
def test_another_format_is_named(text: str, message: str) -> None:
    """Nothing of the text is repeated."""
    found = other_format(text)
    assert found is not None
    assert found[0].startswith(message)
    assert "`elasticflow init" in found[1]


@pytest.mark.parametrize("text", ["[train]\nepochs: 3\n", "epochs = \n", "a = 1\nb: 2\nc = 3\n", ""])
def test_toml_with_a_slip_is_no_other_format(text: str) -> None:
    """One line of YAML in a job file is a slip."""
    assert other_format(text) is None
