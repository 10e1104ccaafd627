"""The remedies of the gallery's wrong job files are followed to the letter: the mistake is gone, no other one takes its place."""

from __future__ import annotations

import difflib
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from elasticflow.jobfile.load import load_job
from elasticflow.jobfile.text.layers import value_at
from elasticflow.jobfile.text.source import load_source

if TYPE_CHECKING:
    from elasticflow.jobfile.diagnostics.diagnostic import Diagnostic

GALLERY = Path(__file__).parent / "gallery"
MEANT = re.compile(r'did you mean ("[^"]+"|[^"?]+)\?(?! It is given)(?: .*)?')
_VALUE = r"\"[^\"]*\"|\{[^}]*\}|\[[^\]]*\]|[\w.+-]+"
WRITTEN = re.compile(
    rf"write (?P<key>[\w.]+) = (?P<value>{_VALUE})(?: in \[(?P<table>[\w.]+)\])?(?: \([^()]*\))?"
)
ADDED = re.compile(rf"add (?P<key>[\w.]+) = (?P<value>{_VALUE}) to \[(?P<table>[\w.]+)\]")
UNQUOTED = re.compile(r"without quotes: (?P<key>[\w.]+) = (?P<value>\S+)")
LEFT_OUT = re.compile(r"(?:leave|take) it out(?:: .*)?|.*which is given already: take this out")
_PLACEHOLDER = re.compile(r"\.\.\.|\bNAME\b|FILE\.toml")
_MOST_ROUNDS = 12


@pytest.fixture(scope="module")
def gallery(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the gallery, in which files may be changed."""
    copy = tmp_path_factory.mktemp("gallery") / "gallery"
    shutil.copytree(GALLERY, copy)
    return copy


def followed(text: str, found: Diagnostic, moved: list[tuple[str, str]]) -> str | None:
    """Return the file with the remedy of one finding followed; None if it is not one that is followed without thought.

    A line that belongs into another table is put into *moved*, with the head of that table.
    """
    lines, remedy = text.splitlines(), (found.help or "").partition("\ndefined at ")[0]
    if found.line is None or found.line != found.end_line or found.line > len(lines):
        return None
    line, begin, end = lines[found.line - 1], (found.column or 1) - 1, (found.end_column or 1) - 1
    new: str | None = line
    if _PLACEHOLDER.search(remedy):
        pass
    elif (meant := MEANT.fullmatch(remedy)) is not None:
        new = _with_meant(line, begin, end, meant[1].strip('"'))
    elif (unquoted := UNQUOTED.fullmatch(remedy)) is not None:
        quoted = rf"{re.escape(unquoted['key'])}\s*=\s*(\"[^\"]*\"|'[^']*')"
        new = re.sub(quoted, f"{unquoted['key']} = {unquoted['value']}", line)
    elif (written := WRITTEN.fullmatch(remedy)) is not None and (begin == 0 or _is_all(line, begin, end)):
        new = f"{written['key']} = {written['value']}"
        if written["table"] is not None:
            moved.append((f"[{written['table']}]", new))
            new = None
    elif (added := ADDED.fullmatch(remedy)) is not None:
        moved.append((f"[{added['table']}]", f"{added['key']} = {added['value']}"))
        return text
    elif LEFT_OUT.fullmatch(remedy) is not None and (begin == 0 or _is_all(line, begin, end)):
        new = None
    lines[found.line - 1 : found.line] = [] if new is None else [new]
    return None if new == line else "\n".join(lines) + "\n"


def _is_all(line: str, begin: int, end: int) -> bool:
    """Return whether the marked value, with its key, is all that stands on a line."""
    return end == len(line) and re.fullmatch(r"[\w.]+ = ", line[:begin]) is not None


def _with_meant(line: str, begin: int, end: int, word: str) -> str:
    """Return the line with the marked word, or the one in the marked text that is most like *word*, replaced by it."""
    if word.startswith("[") and word[1:-1].isidentifier():  # a table, whose name is marked
        word = word[1:-1]
    if word.startswith("[") and line[begin] == "[":  # a list
        return f"{line[:begin]}{word}{line[end:]}"
    if " " in word:  # the whole text, of which a part is marked
        begin, end = line.rfind('"', 0, begin + 1), line.find('"', end - 1) + 1
    old = line[begin:end]
    parts = [old.strip("\"'"), *re.findall(r"[\w.-]+", old)]
    likest = max(parts, key=lambda part: difflib.SequenceMatcher(None, part, word).ratio())
    return line[:begin] + old.replace(likest, word) + line[end:]


def follow(path: Path, text: str, errors: list[Diagnostic]) -> tuple[str, list[Diagnostic]]:
    """Return the file with the remedies of its *errors* followed, and the errors whose remedies were followed."""
    done: list[Diagnostic] = []
    moved: list[tuple[str, str]] = []
    for each in reversed(errors):  # from the end, so that the places of the others stay
        is_second_table = any("[" in (each.help or "") and other.help == each.help for other in done)
        if each.file == str(path) and not is_second_table:
            new = followed(text, each, moved)
            text, done = (text, done) if new is None else (new, [*done, each])
    for head, line in moved:
        text = text if head in text.splitlines() else f"{text}\n{head}\n"
        text = text.replace(f"{head}\n", f"{head}\n{line}\n", 1)
    return text, done


def numbers(text: str) -> set[float]:
    """Return the numbers in a text, those of a time of the clock (01:30:00) left out: its remedy has units."""
    return {float(each) for each in re.findall(r"(?<![\w.:])\d+(?:\.\d+)?(?:e-?\d+)?(?![\d:])", text)}


def errors_in(path: Path) -> list[Diagnostic]:
    """Return the errors in a job file."""
    return [each for each in load_job(path).diagnostics if each.severity == "error"]


SAME_JOBS: dict[str, dict[str, object]] = {  # what the file means, by its keys, with its remedies followed
    "elsewhere_by_table": {
        "optimizer.groups": [{"match": "*.bias", "args": {"weight_decay": 0.0}}],
        "evaluation.entry": "shop:Images",
        "evaluation.batch_size": 128,
        "snapshots.uri": "s3://models/shop",
        "snapshots.every": "500 steps",
        "slurm.partition": "gpu",
        "slurm.gpus": 4,
        "slurm.mem": "64 GiB",
        "nodes.max": 4,
    },
    "override_elsewhere": {"train.epochs": 3, "dataset.global_batch_size": 128},
    "text_of_several": {"matrix.axes.optimizer.args.lr": [0.001, 0.003]},
    "notify_command_text": {"notify.command": ["true", "done"]},
    "script_args_text": {"script.args": ["--epochs", "3"]},
    "script_module_file": {"script.entry": "shop/losses.py"},
    "type_true_for_text": {"env.DEBUG": "true", "model.weights": None},
    "sink_true": {"logging.sinks": ["tensorboard"]},
    "entry_plain_class": {"model.entry": "shop:Net"},
    "entry_lazy": {"model.args.width": 32},
    "entry_torch_itself": {"optimizer.entry": "torch.optim:AdamW"},
    "entry_in_src": {"job.path": [".", "src"]},
}
BY_HAND: dict[str, str] = {"type_true_for_text": "OMP_NUM_THREADS = 4\n"}  # lines whose remedy names no line


@pytest.mark.parametrize("name", SAME_JOBS)
def test_remedies_lead_to_the_same_job(name: str, gallery: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its remedies followed, and no more, the file has no error and says what it meant."""
    monkeypatch.chdir(gallery)
    path = Path("jobs") / f"{name}.toml"
    whole = path.read_text("utf-8")
    text = whole.replace(BY_HAND.get(name, "\n\n"), "" if name in BY_HAND else "\n\n")
    path.write_text(text, "utf-8")
    for _ in range(_MOST_ROUNDS):
        text, done = follow(path, text, errors_in(path))
        path.write_text(text, "utf-8")
        if not done:
            break
    errors, raw = errors_in(path), load_source(path).raw
    path.write_text(whole, "utf-8")
    assert [each.message for each in errors] == []
    assert {key: value_at(tuple(key.split(".")), raw) for key in SAME_JOBS[name]} == SAME_JOBS[name]


def test_remedies_lead_to_files_without_the_mistake(gallery: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that say what to write are followed as they stand: the mistake is gone, the file is still TOML, each number is still there.

    A mistake that was hidden behind the other may be told now, but for one about the form of what the remedy wrote.
    """
    monkeypatch.chdir(gallery)
    count, wrong = 0, []
    for path in sorted(Path("jobs").glob("*.toml")):
        whole, errors = path.read_bytes(), errors_in(path)
        text = whole.decode("utf-8", "replace")
        told = {each.message for each in errors}
        for _ in range(_MOST_ROUNDS):
            new, done = follow(path, text, errors)
            if not done:
                break
            path.write_text(new, "utf-8")
            errors, count = errors_in(path), count + len(done)
            left = {each.message for each in errors}
            wrong += [(path.stem, each.message, each.help) for each in done if each.message in left]
            odd = [each for each in left - told if re.search('not valid TOML|must be "package', each)]
            wrong += [(path.stem, each, "after a remedy") for each in odd]
            removes = any(
                "it out" in (each.help or "") or "take this out" in (each.help or "") for each in done
            )
            if not removes and (lost := numbers(text) - numbers(new)):
                wrong.append((path.stem, f"{lost} are lost", str([each.help for each in done])))
            text = new
        else:
            wrong.append((path.stem, "new mistakes for ever", None))
        path.write_bytes(whole)  # others extend it
    assert wrong == []
    assert count >= 60
