"""A script's text, with the newlines it has, or what is wrong with it."""

from __future__ import annotations

import ast
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

from elasticflow.errors import ScriptError

if TYPE_CHECKING:
    from pathlib import Path

_BOM = "\ufeff"
_MENTIONS = ("torch", "accelerate", "lightning", "transformers", "deepspeed")


@dataclass(frozen=True)
class Source:
    """A script.

    Attributes:
        text: With line feeds as newlines, and without a byte order mark.
        newline: What stands at the end of its lines.
        mark: The byte order mark, or nothing.
    """

    text: str
    newline: str
    mark: str

    def as_written(self, text: str) -> str:
        """Return a changed text with this file's newlines and mark."""
        return self.mark + text.replace("\n", self.newline)


def read(path: Path, name: str) -> Source:
    """Return a training script.

    Args:
        path: The file.
        name: As the user called it.

    Raises:
        ScriptError: there is no such file, or it is no Python script that trains with torch.
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
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise ScriptError(
            f"{name}:{line}: this is no UTF-8", "save it as UTF-8, or name the script"
        ) from error
    mark = _BOM if text.startswith(_BOM) else ""
    newline = "\r\n" if "\r\n" in text else "\n"
    plain = text.removeprefix(_BOM).replace("\r\n", "\n")
    source = Source(plain, newline, mark)
    if "\r" in plain or source.as_written(plain) != text:
        raise ScriptError(
            f"{name} has lines that end in different ways", "have an editor write it with one kind of newline"
        )
    _check(plain, name)
    return source


def _check(text: str, name: str) -> None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ast.parse(text)
    except (SyntaxError, ValueError, RecursionError) as error:
        place = f":{error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        what = error.msg if isinstance(error, SyntaxError) else str(error)
        raise ScriptError(
            f"{name}{place}: no Python of this version: {what}", "python -m py_compile says it, too"
        ) from error
    if not any(word in text for word in _MENTIONS):
        raise ScriptError(
            f"{name} imports neither torch nor accelerate, lightning or transformers: it shows no training",
            "name the file that has the training loop; any script runs as it is by [script]: `elasticflow guide adopting`",
        )
