"""Lines that are no TOML: the line that was meant is offered, and it is right."""

from __future__ import annotations

import pytest
import tomli
from hypothesis import given
from hypothesis import strategies as st

from elasticflow.jobfile.text.other_formats import other_format
from elasticflow.jobfile.text.slips import explain_syntax_error, mended

SLIPS = {
    "compile = True": "compile = true",
    "compile = yes": "compile = true",
    "args = { flip = False, on = TRUE }": "args = { flip = false, on = true }",
    "name = my job": 'name = "my job"',
    "epochs: 5": "epochs = 5",
    "epochs := 5": "epochs = 5",
    "epochs => 5": "epochs = 5",
    "--epochs 5": "epochs = 5",
    "export epochs=5": "epochs = 5",
    "epochs 5": "epochs = 5",
    "name = \u201cmnist\u201d": 'name = "mnist"',
    "name\u00a0= 'x'": "name = 'x'",
    "epochs = 5,": "epochs = 5",
    "epochs = 5;": "epochs = 5",
    "every = 10 min": 'every = "10 min"',
    "every = [10 min, 1 epoch]": 'every = ["10 min", "1 epoch"]',
    "every = [steps, min]": 'every = ["steps", "min"]',
    'every = ["10 min" "1 epoch"]': 'every = ["10 min", "1 epoch"]',
    "clip = .5": "clip = 0.5",
    "clip = 1.": "clip = 1.0",
    "lr = 1.e-3": "lr = 1.0e-3",
    "lr = 1e-3f": "lr = 1e-3",
    "mask = 0XFF": "mask = 0xFF",
    "betas = (0.9, 0.99)": "betas = [0.9, 0.99]",
    "args = { betas = (0.9, 0.99,) }": "args = { betas = [0.9, 0.99] }",
    'args = { "lr": 1e-3, wd: 0.1 }': 'args = { "lr" = 1e-3, wd = 0.1 }',
    "args = dict(lr=1e-3)": "args = { lr=1e-3 }",
    "args = { lr = 1e-3 wd = 0.1 }": "args = { lr = 1e-3, wd = 0.1 }",
    'name = "mnist': 'name = "mnist"',
    "name = mnist'": "name = 'mnist'",
    'every = ["10 min"': 'every = ["10 min"]',
    "args = { lr = 1e-3": "args = { lr = 1e-3 }",
    r'uri = "C:\data"': r"uri = 'C:\data'",
    "uri = s3://bucket/x": 'uri = "s3://bucket/x"',
    "uri = $HOME/x": 'uri = "$HOME/x"',
    "epochs = 5 // passes": "epochs = 5 # passes",
    "global batch size = 64": "global_batch_size = 64",
    "epochs = 5, precision = 'bf16'": "epochs = 5\nprecision = 'bf16'",
    "epochs = 5 seed = 3": "epochs = 5\nseed = 3",
    "[train": "[train]",
    "train]": "[train]",
    "[train]:": "[train]",
    "[train] epochs = 5": "[train]\nepochs = 5",
    "train:": "[train]",
    "every = 10 min, 1 epoch": 'every = ["10 min", "1 epoch"]',
    'name = f"x"': 'name = "x"',
    "args.learning rate = 1e-3": "args.learning_rate = 1e-3",
    "\u00e9pochs = 5": "epochs = 5",
    "[lr scheduler]": "[lr_scheduler]",
    "precision = None": "",
    "precision = null": "",
}


@pytest.mark.parametrize("line", SLIPS)
def test_the_line_that_was_meant_is_offered(line: str) -> None:
    """Whatever stands around it, and it is TOML."""
    text = f"[a]\nb = 1\n{line}\n[c]\nd = 2\n"
    with pytest.raises(tomli.TOMLDecodeError) as error:
        tomli.loads(text)
    message, span, remedy, _ = explain_syntax_error(error.value.msg, text, min(error.value.pos, len(text)))
    assert message.startswith("not valid TOML")
    assert text.count("\n", 0, span.start) == 2
    found = mended(text, span.start)
    assert found is not None
    assert SLIPS[line] == found.line
    assert remedy == found.remedy
    tomli.loads(found.line)


@pytest.mark.parametrize(
    "line",
    [
        "steps = 1..5",
        "steps = 10,000",
        "mode = 0755",
        "lr = 0,001",
        "args = { lr = 0,001 }",
        "clip = 10**-1",
        "size = 4 * 32",
        "clip = 1/2",
        "steps = 1_000__0",
        "loss = lambda o, t: o",
        'name = "x" + "y"',
        "epochs = 5 ''' x",
        "=",
    ],
)
def test_where_nothing_small_makes_it_right_nothing_is_offered(line: str) -> None:
    """No guess is better than a wrong one."""
    text = f"[a]\n{line}\n"
    with pytest.raises(tomli.TOMLDecodeError) as error:
        tomli.loads(text)
    found = mended(text, min(error.value.pos, len(text)))
    assert found is None


def test_no_secret_is_offered() -> None:
    """The line that was meant is shown with stars where the line itself is."""
    text = "[a]\npassword = hunter2\n"
    _, _, remedy, _ = explain_syntax_error("Invalid value", text, 15)
    assert remedy == 'write password = "*******" (text needs quotes)'


@given(st.text(st.sampled_from("ab=[]{}\"'0.,:;#()-\\ \n"), max_size=40))
def test_what_is_offered_is_toml(text: str) -> None:
    """For any text at all there is an answer, and a line that is offered is taken where the old one was not."""
    try:
        tomli.loads(text)
    except tomli.TOMLDecodeError as error:
        at = min(error.pos, len(text))
        message, span, _, _ = explain_syntax_error(error.msg, text, at)
        assert message
        assert 0 <= span.start <= len(text)
        if (found := mended(text, at)) is not None:
            begin = text.rfind("\n", 0, at) + 1
            end = text.find("\n", at)
            whole = f"{text[:begin]}{found.line}{text[len(text) if end < 0 else end :]}"
            try:
                tomli.loads(whole)
            except tomli.TOMLDecodeError as later:
                assert later.pos > begin + len(found.line)  # noqa: PT017  # the next mistake


@pytest.mark.parametrize(
    ("text", "message", "begins"),
    [
        ('{"train": {"epochs": 3, "ema": null}}', "this is JSON", ["[train]", "epochs = 3"]),
        ("train:\n  epochs: 3  # passes\n  name: my job\n", "this is YAML", ["[train]", "epochs = 3", 'name = "my job"']),
        ("---\nepochs: 3\n", "this is YAML", ["epochs = 3"]),
        ("train:\n  betas:\n  - 0.9\n  - 0.95\n  log: {every: 1e2}\n", "this is YAML", ["betas = [0.9, 0.95]", "log = { every = 100.0 }"]),
        ("from torch import nn\nimport torch\n", "this is Python", []),
        ('{ "train": {', "this is JSON", []),
    ],
)  # fmt: skip
def test_another_format_is_told_and_turned_into_toml(text: str, message: str, begins: list[str]) -> None:
    """Two levels of it, secrets masked."""
    found = other_format(text)
    assert found is not None
    assert found[0].startswith(message)
    assert all(line in found[1].split("\n") for line in begins)
    secret = other_format(text.replace("epochs", "password").replace("3", '"hunter2"'))
    assert "hunter2" not in str(secret)


def test_keys_stay_in_their_tables() -> None:
    """A key that follows a table in YAML would be that table's in TOML."""
    found = other_format("train:\n  epochs: 3\nseed: 1\n")
    assert found is not None
    assert found[1].endswith("seed = 1\n[train]\nepochs = 3")


@pytest.mark.parametrize(
    "text",
    [
        "a: &a [*a]\nb: 1\n",
        "a: &a [1, 2]\nb: *a\n",
        "a: 1\na: 2\n",
        "a: [1, null]\n",
        "a: !!binary aGVsbG8=\n",
        "a: !!python/name:os.system\n",
        "a: 1\n  b: 2\nc: 3\n",
        "- a\n- b\n",
        '{"a": {"b": [1, null]}}',
    ],
)
def test_what_toml_cannot_say_is_not_turned_into_it(text: str) -> None:
    """The format is told all the same."""
    found = other_format(text)
    assert found is not None
    assert found[1].startswith("tables have their names in brackets")


@pytest.mark.parametrize("text", ["[train]\nepochs: 3\n", "epochs = \n", "a = 1\nb: 2\nc = 3\n", ""])
def test_toml_with_a_slip_is_no_other_format(text: str) -> None:
    """One line of YAML in a job file is a slip."""
    assert other_format(text) is None
