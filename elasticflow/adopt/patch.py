"""From a script to the lines that bring it to `elasticflow.join`."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import TYPE_CHECKING

from elasticflow.adopt import beginning, ending, epochs, steps
from elasticflow.adopt.edits import Editor
from elasticflow.adopt.names import Chosen
from elasticflow.adopt.reading import hazards
from elasticflow.adopt.reading.kept import kept_by
from elasticflow.adopt.reading.loader import loader_of
from elasticflow.adopt.reading.loops import loops_in
from elasticflow.adopt.reading.refusal import Reason, RefusalError, refuse
from elasticflow.lint.check import EVERYTHING, lint_source
from elasticflow.lint.script.forms import form_of
from elasticflow.lint.script.script import Script

if TYPE_CHECKING:
    from elasticflow.lint.script.forms import Form

_BY_LIBRARY = "`elasticflow guide own-loop` has the calls; until then the script runs as it is, by [script]"
# By form: what there is, and what to do.
_REFUSED = {
    "trainer": (
        "the loop is that of the library's trainer",
        "it calls elasticflow in a callback: `elasticflow guide own-loop`",
    ),
    "sharded": (
        "a model or an optimizer is sharded over the ranks",
        "elasticflow.join keeps what is whole on every rank; run the script as it is, by [script]",
    ),
    "wrapped": (
        "another library wraps the model or its optimizer",
        "torch's own DistributedDataParallel first",
    ),
    "spawned": (
        "the script starts processes itself",
        "have torchrun do it: take the spawn away, and read RANK, LOCAL_RANK and WORLD_SIZE of the environment",
    ),
    "elsewhere": (
        "gradients are made here; how ranks exchange them this file does not show",
        "name the file that has it all, or write the five calls by hand",
    ),
    "alone": (
        "gradients are made in one process",
        "DistributedDataParallel around the model and a DistributedSampler for the DataLoader first, or the five calls by hand",
    ),
    "none": ("no call of backward() is in this file", "name the file that has the loop"),
}


@dataclass(frozen=True)
class Patch:
    """What a script is to become.

    Attributes:
        text: All of it afterwards.
        notes: What is different from now on, or what no patch can say.
    """

    text: str
    notes: tuple[str, ...]


def patched(text: str) -> Patch:
    """Return a script on `elasticflow.join`: its model, optimizer and loop as they were.

    Args:
        text: The script, with line feeds as newlines, valid Python.

    Raises:
        RefusalError: it has no form that is known for certain.
    """
    script = Script(text)
    form = form_of(script)
    _check_form(form)
    loops = loops_in(script)
    kept = kept_by(loops, form.kind)
    loader = loader_of(script, loops.loader, form.kind)
    hazards.check(loops, loader)
    editor = Editor(text)
    chosen = Chosen.of(loops)
    notes = [*hazards.notes(loops, form, kept)]
    steps.in_batches(loops, editor, chosen, loader, form.kind)
    epochs.in_epochs(loops, editor, chosen, loader, kept, form.kind, notes)
    last = ending.finish(loops, form, editor, chosen)
    beginning.join(
        script,
        form,
        editor,
        chosen,
        {script.function_of(each) for each in (loops.epochs, loops.batches, last)},
    )
    return Patch(_checked(script, editor), tuple(notes))


def _check_form(form: Form) -> None:
    if form.kind in _REFUSED:
        raise refuse(form.node, *_REFUSED[form.kind])


def _checked(script: Script, editor: Editor) -> str:
    """Return the changed text.

    Raises:
        RefusalError: it is no Python, or has something that lint tells and the script had not.
    """
    try:
        text = editor.result()
        ast.parse(text)
    except (ValueError, SyntaxError) as error:
        raise RefusalError(Reason(None, f"the changes do not fit together: {error}", _BY_LIBRARY)) from error
    before = [each.code for each in lint_source(script.text.encode(), "", EVERYTHING)]
    for each in lint_source(text.encode(), "", EVERYTHING):
        if each.code in before:
            before.remove(each.code)
        else:
            raise RefusalError(
                Reason(None, f"the changed script would have {each.code}: {each.message}", _BY_LIBRARY)
            )
    return text
