"""Reads training scripts, and says why a file is not a training script."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from elasticflow.errors import ScriptError
from elasticflow.python_source.script import Script

if TYPE_CHECKING:
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
