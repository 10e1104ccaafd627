"""What the workers of a launch run that is a script of its own: the file or module, its arguments, where it runs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Program:
    """A script as an agent and its fork server know it.

    Attributes:
        entry: Absolute path of its file; empty: it is a module.
        name: The file as it is called, which it sees in `sys.argv`.
        module: The module, where it is no file.
        args: Its arguments.
        folder: Absolute path of the folder that it runs in.
        path: Folders that end `sys.path`: where else its own code lies.
        silence_s: Seconds without a line from any worker that count as a hang; None: nothing does, until it beats.
    """

    entry: str
    name: str
    module: str
    args: tuple[str, ...]
    folder: str
    path: tuple[str, ...] = ()
    silence_s: float | None = None
