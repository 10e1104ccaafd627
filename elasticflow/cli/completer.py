"""Answers a shell that asks for completions of the word at the cursor.

A shell's script (see `cli/more/completion.py`) calls the command itself with `_ELASTICFLOW_COMPLETE=<shell>` and the words
before the cursor. The answer has one candidate a line, `<word>` or `<word><tab><description>`. On any error the answer is
empty: a traceback would tear the line that is being typed.
"""

from __future__ import annotations

import contextlib
import re
import shlex
from typing import TYPE_CHECKING

import click
from click.shell_completion import CompletionItem, ShellComplete

if TYPE_CHECKING:
    from collections.abc import Sequence

_MOST_LETTERS = 70
# Characters that bash does not take as part of a word.
_UNSAFE, _ESCAPED = re.compile(r"[^\w@%+=:,./~-]"), r"\\\g<0>"


def answer(shell: str, arguments: Sequence[str], group: click.Group) -> str:
    """Return the lines for a shell; empty on any error.

    Args:
        shell: bash, zsh or fish.
        arguments: For bash, the line after the command's name, and COMP_WORDBREAKS; for other shells, the words up to
            the cursor.
    """
    with contextlib.suppress(Exception):
        if shell == "bash":
            line, breaks = arguments
            return _for_bash(line, breaks, group)
        if shell in {"zsh", "fish"}:
            *before, word = arguments
            word = re.sub(r"\\(.)", r"\1", word.lstrip("\"'"))
            return "".join(f"{item.value}\t{_short(item.help)}\n" for item in complete(before, word, group))
    return ""


def complete(before: list[str], word: str, group: click.Group) -> list[CompletionItem]:
    """Return the completions of *word* after the words *before* it, from the types of parameters (`cli/parameters.py`)."""
    option = ""
    if word.startswith("--") and "=" in word:  # --set=KEY: click passes on the part after the sign
        option = word[: word.index("=") + 1]
    if not _is_command(before, group):
        return []
    # click does not parse the words before a missing value, so types get them as the context's object.
    items = ShellComplete(group, {"obj": before}, "elasticflow", "").get_completions(before, word)
    return [CompletionItem(f"{option}{item.value}", item.type, item.help) for item in items]


def _is_command(before: Sequence[str], group: click.Group) -> bool:
    """Return whether the words lead to a command or a group; after an unknown word click would offer the group's commands."""
    command: click.Command | None = group
    context = click.Context(group, info_name="elasticflow")
    for word in before:
        if isinstance(command, click.Group) and not word.startswith("-"):
            command = command.get_command(context, word)
    return command is not None


def _short(about: str | None) -> str:
    """Return the first line of a description, short enough for a menu."""
    text = (about or "").partition("\n")[0]
    return text if len(text) <= _MOST_LETTERS else f"{text[: _MOST_LETTERS - 3]}..."


def _for_bash(line: str, breaks: str, group: click.Group) -> str:
    """Return the replies for bash, which replaces only the part of the word behind its last word break."""
    words, quote = _split(line)
    *before, word = words
    cut = 0 if quote else 1 + max(word.rfind(sign) if sign in breaks else -1 for sign in "=:")
    replies = [item.value[cut:] for item in complete(before, word, group)]
    return "".join(f"{reply if quote else _UNSAFE.sub(_ESCAPED, reply)}\n" for reply in replies)


def _split(line: str) -> tuple[list[str], str]:
    """Return the words of a line up to the cursor, the last one perhaps empty, and the quote that is still open."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=False)
    lexer.whitespace_split, lexer.commenters = True, ""
    words: list[str] = []
    try:
        words += lexer
    except ValueError:  # a quote is open, or a backslash stands last
        quote = lexer.state  # type: ignore[attr-defined]  # public, but not in the stubs
        return [*words, lexer.token], quote if quote in {"'", '"'} else ""
    return (words if words and not line[-1:].isspace() else [*words, ""]), ""
