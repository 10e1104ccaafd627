"""From a Python file to diagnostics: is it a training script, what the rules find, what its comments suppress."""

from __future__ import annotations

import importlib.util
import io
import re
import tokenize
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from elasticflow.errors import ScriptError
from elasticflow.jobfile.diagnostics import codes
from elasticflow.jobfile.diagnostics.diagnostic import Diagnostic
from elasticflow.lint.rules import (
    checkpoints,
    collectives,
    launching,
    replicas,
    resizing,
    resuming,
    samplers,
)
from elasticflow.lint.rules.finding import Finding, View
from elasticflow.lint.script.collectives import Collectives
from elasticflow.lint.script.ranks import Ranks
from elasticflow.python_source.script import Script

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

MENTIONS = ("torch", "accelerate", "lightning", "transformers", "deepspeed")
"""Libraries, one of which every training script imports."""


def read(path: Path, name: str) -> Script:
    """Return a training script.

    Args:
        name: The path as the user typed it, for messages.

    Raises:
        ScriptError: the file does not exist, or is no Python script that trains with torch.
    """
    if path.is_dir():
        raise ScriptError(f"{name} is a folder", "name the script that torchrun starts, as train.py")
    if path.suffix == ".ipynb":
        raise ScriptError(
            f"{name} is a notebook: several processes cannot run one",
            "make a script of it: jupyter nbconvert --to script NOTEBOOK",
        )
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ScriptError(f"{name} cannot be read: {error.strerror}", "name a Python file") from error
    try:
        script = Script(importlib.util.decode_source(content))
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise ScriptError(
            f"{name}:{line}: this is no UTF-8", "save it as UTF-8, or name the script"
        ) from error
    except SyntaxError as error:
        place = f":{error.lineno}" if error.lineno else ""
        raise ScriptError(
            f"{name}{place}: no Python of this version: {error.msg}", "python -m py_compile says it, too"
        ) from error
    if not any(word in script.text for word in MENTIONS):
        raise ScriptError(
            f"{name} imports neither torch nor accelerate, lightning or transformers: it shows no training",
            "name the file that has the training loop; any script runs as it is by [script]: `elasticflow guide adopting`",
        )
    return script


_LINE = re.compile(
    r"#\s*noqa\b(?P<codes>\s*:\s*[A-Z]+[0-9]+(?:[,\s]+[A-Z]+[0-9]+)*)?(?P<more>\s*:)?", re.IGNORECASE
)
_FILE = re.compile(
    r"#\s*elasticflow\s*:\s*noqa\b(?P<codes>\s*:\s*[A-Z]+[0-9]+(?:[,\s]+[A-Z]+[0-9]+)*)?", re.IGNORECASE
)
_CODE = re.compile(r"[A-Z]+[0-9]+")
_ALL = frozenset({"all"})


@dataclass
class Suppressions:
    """The suppressed codes of a file.

    Attributes:
        lines: The suppressed codes of each line, from 1; `all` for every code.
        file: The codes that are suppressed in the whole file.
    """

    lines: dict[int, frozenset[str]] = field(default_factory=dict)
    file: frozenset[str] = frozenset()

    def covers(self, code: str, first: int, last: int) -> bool:
        """Return whether a finding from line *first* to line *last* is suppressed."""
        wanted = {code, *_ALL}
        return bool(wanted & self.file) or any(
            wanted & self.lines.get(line, frozenset()) for line in range(first, last + 1)
        )


def suppressions_in(text: str) -> Suppressions:
    """Return the suppressions in the comments of a valid Python file; strings that look like comments do not count."""
    found = Suppressions()
    if "noqa" not in text.lower():
        return found
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.COMMENT:
            continue
        if match := _FILE.search(token.string):
            found.file |= _codes(match)
        elif (match := _LINE.search(token.string)) and (match["codes"] or not match["more"]):
            found.lines[token.start[0]] = _codes(match)
    return found


def _codes(match: re.Match[str]) -> frozenset[str]:
    return frozenset(_CODE.findall(match["codes"].upper())) if match["codes"] else _ALL


RULES: tuple[Callable[[View], Iterator[Finding]], ...] = (
    samplers.sampler_without_epoch,
    samplers.repeated_samples,
    samplers.batch_per_rank,
    resizing.world_sizes_asserted,
    checkpoints.saved_in_place,
    checkpoints.saved_by_all,
    checkpoints.saved_in_part,
    checkpoints.saved_without_random_state,
    checkpoints.load_without_map,
    resuming.never_loaded,
    resuming.loaded_by_argument,
    resuming.trainer_without_checkpoint,
    launching.fixed_ports,
    launching.spawns_under_torchrun,
    launching.local_rank_by_argument,
    collectives.collectives_of_some_ranks,
    collectives.collectives_in_handlers,
    replicas.unused_parameters,
)


class Selection(NamedTuple):
    """The selected codes: they begin with a text of *select* and with none of *ignore*; the longer text wins."""

    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()

    def wants(self, code: str) -> bool:
        """Return whether a code is selected."""
        chosen = max((len(each) for each in self.select if code.startswith(each)), default=-1)
        refused = max((len(each) for each in self.ignore if code.startswith(each)), default=-1)
        return (chosen >= 0 or not self.select) and (refused < 0 or refused < chosen)


EVERYTHING = Selection()
"""Every code is selected."""


def may_train(path: Path) -> bool:
    """Return whether a file mentions a library of training scripts, else it is not parsed; True if it cannot be read."""
    try:
        content = path.read_bytes()
    except OSError:
        return True
    return any(word.encode() in content for word in MENTIONS)


def lint_file(path: Path, name: str, selection: Selection = EVERYTHING) -> list[Diagnostic]:
    """Return the findings in a file.

    Args:
        name: The path as the user typed it.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        return [Diagnostic(codes.LINT_UNREADABLE, "error", f"cannot be read: {error.strerror}", name)]
    return lint_source(content, name, selection)


def lint_source(content: bytes, name: str, selection: Selection = EVERYTHING) -> list[Diagnostic]:
    """Return the findings in the source of a file, in no particular order."""
    try:
        text = importlib.util.decode_source(content)
        script = Script(text)
    except (SyntaxError, UnicodeDecodeError) as error:
        return [_unreadable(error, name)]
    try:
        ranks = Ranks(script)
        view = View(script, ranks, Collectives(script, ranks))
        findings = [each for rule in RULES for each in rule(view) if selection.wants(each.code)]
    except RecursionError:
        # An `elif` stands inside the `if` before it, an operand inside the operation behind it.
        why = "nested too deeply to be read here: an expression, or a chain of elif, is very long"
        return [Diagnostic(codes.LINT_UNREADABLE, "error", why, name)]
    suppressions = suppressions_in(text) if findings else None
    return [
        _diagnostic(each, script, name)
        for each in findings
        if suppressions is None or not suppressions.covers(each.code, *_lines(each))
    ]


def _lines(finding: Finding) -> tuple[int, int]:
    return finding.node.lineno, finding.node.end_lineno or finding.node.lineno


def _diagnostic(finding: Finding, script: Script, name: str) -> Diagnostic:
    from elasticflow.jobfile.diagnostics.excerpt import mask_secrets

    first, last = _lines(finding)
    begin = _column(script.lines[first - 1], finding.node.col_offset)
    end = _column(script.lines[last - 1], finding.node.end_col_offset or 0)
    return Diagnostic(
        finding.code, finding.severity, finding.message, name, first, begin, last, end, finding.help, mask_secrets(script.lines[first - 1])
    )  # fmt: skip


def _column(line: str, offset: int) -> int:
    """Return the column, from 1 in code points, of an offset in UTF-8 bytes."""
    return offset + 1 if line.isascii() else len(line.encode()[:offset].decode(errors="replace")) + 1


def _unreadable(error: SyntaxError | UnicodeDecodeError, name: str) -> Diagnostic:
    from elasticflow.jobfile.diagnostics.excerpt import mask_secrets

    what = "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else error.msg or str(error)
    found = Diagnostic(codes.LINT_UNREADABLE, "error", f"not Python that can be read here: {what}", name)
    if isinstance(error, UnicodeDecodeError) or error.lineno is None:
        return found
    line, column = max(error.lineno, 1), max(error.offset or 1, 1)
    excerpt = mask_secrets((error.text or "").rstrip("\n")) or None
    return found._replace(line=line, column=column, end_line=line, end_column=column + 1, excerpt=excerpt)
