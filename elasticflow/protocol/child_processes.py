"""Records that child processes are started with: the program of a script's workers, how many wait as standbys, a model to save."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# Values of `restarts.warm`.
Warm = Literal["auto", "fork", "standby", "off"]
MAY_STAND_BY: frozenset[Warm] = frozenset({"auto", "standby"})
"""With these there may be standbys."""
MEMORY_FACTOR = 2
"""A node makes standbys only if so many times the memory that they take is free."""


@dataclass(frozen=True)
class Program:
    """A script as an agent and its fork server know it.

    Attributes:
        entry: Absolute path of the script's file; empty if it is a module.
        name: The file's name as the user gave it, which the script sees in `sys.argv`.
        module: The module's name, if the script is no file.
        folder: Absolute path of the working folder.
        path: Further folders of the script's own code, at the end of `sys.path`.
        silence_s: Seconds without a line from any worker that count as a hang; None: no silence does before the first beat.
    """

    entry: str
    name: str
    module: str
    args: tuple[str, ...]
    folder: str
    path: tuple[str, ...] = ()
    silence_s: float | None = None


@dataclass(frozen=True)
class SaveRequest:
    """A model that a child process saves as its library does.

    Attributes:
        entry_point: Text of a module with the job's factories.
        weights: A safetensors file with all of `model.state_dict()`.
        folder: Folder to write; it does not exist yet.
        tokenizer: A folder, or a name that transformers knows, of the tokenizer to be saved beside it.
    """

    entry_point: str
    own: list[str]
    weights: str
    folder: str
    tokenizer: str | None
