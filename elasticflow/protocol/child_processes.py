"""Records between a process and its children: a script's program, the number of standbys, a model to save, findings about devices."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
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
        silence_s: Seconds without output of any worker that count as a hang; None: before the first beat nothing does.
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


ANSWER_S = 60.0
"""Seconds that the check of devices has for each device, and for its start: torch is imported, each context is opened."""


def longest_check_s(devices: int) -> float:
    """Return the seconds that a check of so many *devices* may take."""
    return (devices + 2) * ANSWER_S


@dataclass(frozen=True)
class Finding:
    """A line in which the check of a node's devices tells the agent about one device.

    Attributes:
        device: Name that torch or the driver gives it, or both names.
        text: The error; empty if the device is well.
        is_fault: The device is not to be used before it is reset or replaced. False: an error that a device outlives.
        is_begun: The device is about to compute; its result follows, unless it never answers.
    """

    device: str
    text: str = ""
    is_fault: bool = False
    is_begun: bool = False

    def __str__(self) -> str:
        return f"{self.device}: {self.text}"

    def to_json(self) -> str:
        """Return the line."""
        return json.dumps(asdict(self))

    @classmethod
    def of_line(cls, line: str) -> Finding | None:
        """Return the finding in *line*; None if the line is something else, such as a library's own output."""
        try:
            return cls(**json.loads(line))
        except (ValueError, TypeError):
            return None
