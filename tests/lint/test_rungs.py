"""The form of a script: the lines that the next rung changes, and the example to follow."""

from __future__ import annotations

import itertools
import re
import textwrap
from pathlib import Path

import pytest

from elasticflow.guide.pages import text_of
from elasticflow.lint.rungs import TEMPLATES, next_changes, template_of
from elasticflow.lint.script.forms import form_of
from elasticflow.python_source.script import Script
from elasticflow.scaffold.gallery import text_of_file
from tests.lint.loops import ACCELERATE, FABRIC, FUNCTIONS, PLAIN, TRAINER

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
DDP = [
    ("dist.init_process_group", "run = elasticflow.join()"),
    ("DDP(", "replicas = run.wrap(model)"),
    ("for epoch in range(", "run.epochs(...)"),
    (" in ", "run.batches(dataset, size=...)"),
    ("", "run.step(loss=loss)"),
]
ALONE = "import torch\nfor epoch in range(3):\n    for x in data:\n        model(x).backward()\n        optimizer.step()\n"
BACKWARD = ("backward()", "(loss * batch.share).backward()")
END = ("dist.destroy_process_group()", "run.finish()")


@pytest.mark.parametrize(
    ("text", "template", "places"),
    [
        (PLAIN, "function", [*DDP, BACKWARD, END]),
        (FUNCTIONS, "function", [*DDP, BACKWARD]),
        (TRAINER, "class", [*DDP, BACKWARD, END]),
        (ALONE, "function", [("for epoch", "run = elasticflow.join(), run.keep("), ("for epoch", "after it run.finish()"), *DDP[3:], BACKWARD]),
        (ACCELERATE, "accelerate", [("Accelerator(cpu=True)", "before it"), ("accelerator.prepare(", "run.keep("), *DDP[2:]]),
        (FABRIC, "fabric", [("Fabric(", "before it"), ("fabric.setup(", "run.keep("), *DDP[2:]]),
        ("import transformers\nt = transformers.Trainer(model)\nt.train()\n", "transformers", []),
        ("import lightning\nt = lightning.Trainer()\nt.fit(model)\n", None, []),
        ("import deepspeed\ne = deepspeed.initialize(model)\nfor x in data:\n    e.backward(x)\n", None, []),
    ],
)  # fmt: skip
def test_each_form_has_its_lines_and_its_example(
    text: str, template: str | None, places: list[tuple[str, str]]
) -> None:
    """Every place once, at a line that holds what is quoted."""
    script = Script(text)
    form = form_of(script)
    changes = next_changes(script, form)
    assert template_of(script, form) == template
    assert len(changes) == len({before for before, _ in places})
    for before, after in places:
        assert any(before in change.before and after in change.after for change in changes), (before, after)
    assert all(change.before == script.lines[change.line - 1].strip() for change in changes)
    assert changes == sorted(changes)


@pytest.mark.parametrize(
    "loop",
    [
        "for e in range(3):\n    for x in data:\n        for part in range(4):\n            model(x).backward()\n",
        "for i, parts in enumerate(grouped(data)):\n    for x in parts:\n        model(x).backward()\n",
        "while True:\n    model(x).backward()\n",
        "def a():\n    for x in data:\n        model(x).backward()\ndef b():\n    for x in data:\n        model(x).backward()\n",
    ],
)
def test_a_loop_that_is_not_certain_is_not_named(loop: str) -> None:
    """Parts of a batch, a loop without an end, gradients in two functions."""
    script = Script(f"import torch\n{loop}")
    assert next_changes(script, form_of(script)) == []


@pytest.mark.parametrize("template", TEMPLATES)
def test_an_example_is_on_rung_1(template: str) -> None:
    """It makes the calls, and the guide names it with the command that prints it."""
    text = text_of_file(TEMPLATES[template])
    assert form_of(Script(text)).rung == 1
    for call in ("ef.join(", "run.batches(", "run.finish("):
        assert call in text
    assert f"[`{template}`](../../examples/{TEMPLATES[template]})" in text_of("own-loop")


def test_the_guide_s_diff_is_that_of_the_examples() -> None:
    """What goes stands in the script of rung 0 alone, what comes in that of rung 1 alone; blanks aside, as long lines are cut."""
    block = re.search(r"```text\n(-.*?)```", text_of("own-loop"), re.DOTALL)
    assert block is not None
    old, new = ("".join((EXAMPLES / f"rungs/tutorial_{rung}.py").read_text().split()) for rung in (0, 1))
    for sign, lines in itertools.groupby(block[1].splitlines(), key=lambda line: line[0]):
        mine, other = (old, new) if sign == "-" else (new, old)
        statements = re.split(r"\n(?=\w)", textwrap.dedent("\n".join(line[1:] for line in lines)))
        for statement in statements:
            text = "".join(statement.split())
            assert text in mine, statement
            assert text not in other, statement
