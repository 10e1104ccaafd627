"""`elasticflow adopt`: what it changes in scripts of the common forms, and what it leaves."""

from __future__ import annotations

import ast
import difflib
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

from elasticflow.adopt.edits import unified
from elasticflow.adopt.patch import patched
from elasticflow.lint.check import lint_source
from elasticflow.lint.script.forms import form_of
from elasticflow.lint.script.script import Script
from tests.adopt.scripts import FORMS, FUNCTIONS, HEAD, PLAIN, TRAINER

if TYPE_CHECKING:
    from pathlib import Path


def _changed(text: str) -> tuple[list[str], list[str]]:
    """Return the lines that the patch of a script takes away and those that it adds, without blanks around them."""
    lines = [*difflib.ndiff(text.splitlines(), patched(text).text.splitlines())]
    return tuple([line[2:].strip() for line in lines if line[0] == sign] for sign in "-+")  # type: ignore[return-value]


@pytest.mark.parametrize("form", FORMS)
def test_a_patched_script_is_on_rung_1(form: str) -> None:
    """It is valid, lint finds nothing new in it, and there is nothing left to be done."""
    text = patched(FORMS[form]).text
    ast.parse(text)
    assert form_of(Script(FORMS[form])).rung == 0
    assert form_of(Script(text)).rung == 1
    before = [each.code for each in lint_source(FORMS[form].encode(), "")]
    assert [each.code for each in lint_source(text.encode(), "") if each.code not in before] == []


@pytest.mark.usefixtures("real_processes")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("tool", [["git", "apply"], ["patch", "-p1", "--silent"]])
def test_git_and_patch_take_the_patch(tmp_path: Path, form: str, tool: list[str]) -> None:
    """Both make of the script what the patch says, in a folder below the root, too."""
    script = tmp_path / "src" / "train.py"
    script.parent.mkdir()
    script.write_text(FORMS[form])
    text = patched(FORMS[form]).text
    diff = unified(FORMS[form], text, "src/train.py")
    if shutil.which(tool[0]) is None:
        pytest.skip(f"{tool[0]} is not installed")
    subprocess.run(tool, cwd=tmp_path, input=diff.encode(), check=True, timeout=30)
    assert script.read_text() == text


def test_a_loop_in_one_function() -> None:
    """What stands behind an epoch's batches belongs to its last step; counters go on; comments stay."""
    taken, added = _changed(PLAIN)
    assert taken == [
        'dist.init_process_group("gloo")',
        "for epoch in range(args.epochs):",
        "for i, (inputs, targets) in enumerate(loader):",
        "loss.backward()  # exchanged while it goes on",
        "dist.destroy_process_group()",
    ]
    assert added == [
        "import elasticflow",
        "run = elasticflow.join()",
        "run.keep(model=model, optimizer=optimizer, scheduler=scheduler)",
        "batches = iter(run.batches(",
        'loader.dataset, size=loader.batch_size * run.world_size, epochs=args.epochs, tail="short"',
        "))",
        "seen = run.position.step",
        "for epoch in range(run.position.epoch, args.epochs):",
        "done = run.position.offset % len(loader.dataset) // (loader.batch_size * run.world_size)",
        "for i, batch in enumerate(batches, done):",
        "inputs, targets = batch.data",
        "(loss * batch.share).backward()  # exchanged while it goes on",
        "if batch.end.is_epoch_end:  # its step ends below",
        "break",
        "run.step(loss=loss)",
        "else:",
        "break  # asked to leave",
        "run.step(loss=loss)",
        "if not run.is_finished:",
        "run.finish()  # asked to leave",
        "run.finish()",
    ]


def test_what_begins_anew_is_told() -> None:
    """A best value in a plain variable is in no snapshot."""
    assert any("best begins anew" in note for note in patched(PLAIN).notes)
    assert not any("seen begins anew" in note for note in patched(PLAIN).notes)


def test_the_way_back_from_a_checkpoint_is_taken_away() -> None:
    """The run goes on by itself: the script's own loading would begin elsewhere. What it writes, it goes on writing."""
    taken, _ = _changed(TRAINER)
    assert "self._load(path)" in taken
    assert "for epoch in range(self.epochs_run, epochs):" in taken
    text = patched(TRAINER).text
    assert "torch.save(" in text
    assert "if os.path.exists(path):" not in text


def test_a_way_back_in_the_function_of_the_loop() -> None:
    """With what is set where there is no checkpoint, which nothing else needs."""
    loads = """\
    if os.path.isfile("x.pt"):
        found = torch.load("x.pt", map_location="cpu")
        begin = found["epoch"]
        model.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
    else:
        begin = 0
    seen = 0
"""
    text = PLAIN.replace("    seen = 0\n", loads).replace("range(args.epochs)", "range(begin, args.epochs)")
    text = patched(text).text
    assert "begin" not in text.replace("beginning", "")
    assert "for epoch in range(run.position.epoch, args.epochs):" in text


def test_epochs_that_count_from_1() -> None:
    """The epoch that a restart goes on with is counted as the script counts."""
    _, added = _changed(FUNCTIONS)
    assert "for epoch in range(1 + run.position.epoch, args.epochs + 1):" in added
    assert any('epochs=args.epochs, tail="drop"' in line for line in added)


def test_no_share_where_all_ranks_have_as_many() -> None:
    """Samples that fill no batch are dropped: every part is as large as the others."""
    assert "share" not in patched(FUNCTIONS).text


def test_a_function_of_the_script_that_is_called_run() -> None:
    """What the patch adds takes no name that the script has."""
    text = patched(PLAIN.replace("main()", "run()").replace("seen", "batches")).text
    assert "own_run = elasticflow.join()" in text
    assert "own_batches = iter(own_run.batches(" in text


def test_a_bar_says_how_many_batches_there_are() -> None:
    """An iterator over batches has no length; the loader has."""
    text = PLAIN.replace("import time\n", "import time\nfrom tqdm import tqdm\n", 1)
    text = patched(text.replace("enumerate(loader)", "enumerate(tqdm(loader))")).text
    assert "enumerate(tqdm(batches, total=len(loader)), done)" in text


def test_a_scaler_is_kept_and_its_loss_weighted() -> None:
    """`scaler.scale(loss).backward()`."""
    text = PLAIN.replace("    seen = 0\n", "    scaler = torch.amp.GradScaler()\n    seen = 0\n", 1)
    text = text.replace("loss.backward()  #", "scaler.scale(loss).backward()  #")
    text = text.replace("optimizer.step()", "scaler.step(optimizer)\n            scaler.update()")
    text = patched(text).text
    assert "scaler.scale(loss * batch.share).backward()" in text
    assert "run.keep(model=model, optimizer=optimizer, scaler=scaler, scheduler=scheduler)" in text


@pytest.mark.parametrize("made", ["AveragedModel(model.module)", "deepcopy(model.module)"])
def test_what_follows_the_model_is_kept(made: str) -> None:
    """No optimizer moves an average; it is in no checkpoint of this script either."""
    text = PLAIN.replace(
        "import time\n",
        "import time\nfrom copy import deepcopy\nfrom torch.optim.swa_utils import AveragedModel\n",
        1,
    )
    text = text.replace("    seen = 0\n", f"    average = {made}\n    seen = 0\n")
    text = text.replace(
        "            seen += 1\n", "            seen += 1\n            follow(average, model)\n"
    )
    assert "scheduler=scheduler, average=average)" in patched(text).text


def test_loops_that_stand_in_no_function() -> None:
    """Under the guard of the module: counters go on, and the run needs no `global`."""
    body = PLAIN[PLAIN.index("    parser = ") : PLAIN.index("\n\nif __name__")]
    text = patched(f'{HEAD}if __name__ == "__main__":\n{body}').text
    assert "    seen = run.position.step\n" in text
    assert "global" not in text


def test_counters_of_a_trainer_class() -> None:
    """An attribute that counts batches goes on; one that holds something else is told."""
    text = TRAINER.replace(
        "        self.epochs_run = 0\n",
        "        self.epochs_run = 0\n        self.total = 0\n        self.best = None\n",
    )
    text = text.replace(
        "            time.sleep(PAUSE)\n", "            time.sleep(PAUSE)\n            self.total += 1\n"
    )
    text = text.replace(
        "            self._run_epoch(epoch)\n",
        "            self._run_epoch(epoch)\n            self.best = epoch\n",
    )
    made = patched(text)
    assert "        self.total = run.position.step\n" in made.text
    assert not any("epochs_run" in note for note in made.notes)


def test_what_is_different_from_now_on_is_told() -> None:
    """A handler of its own for SIGTERM, and what a framework keeps to itself."""
    text = PLAIN.replace(
        "import time\n", "import signal\nimport time\n\nsignal.signal(signal.SIGTERM, print)\n", 1
    )
    assert any(note.startswith("line 6: this handler of SIGTERM") for note in patched(text).notes)
    text = FORMS["accelerate"].replace("cpu=True", 'mixed_precision="fp16"')
    assert any("the scale of gradients" in note for note in patched(text).notes)
    assert any("moves a schedule once for each worker" in note for note in patched(text).notes)


def test_carriage_returns_and_a_missing_newline() -> None:
    """A patch has the newlines of the file, and says where the last one is missing."""
    before, after = "a\r\nb\r\nc", "a\r\nB\r\nc"
    assert unified(before, after, "x.py") == (
        "--- a/x.py\n+++ b/x.py\n@@ -1,3 +1,3 @@\n a\r\n-b\r\n+B\r\n c\n\\ No newline at end of file\n"
    )
