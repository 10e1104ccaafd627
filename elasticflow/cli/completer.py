"""The answer to a shell that asks what can stand where the cursor is.

A shell's script (see `cli/more/completion.py`) calls the command itself with `_ELASTICFLOW_COMPLETE=<shell>` and the words
before the cursor. The answer is one candidate a line, `<word>` or `<word><tab><what it is>`. Whatever goes wrong, the
answer is none: a traceback would tear the line that is being typed.
"""

from __future__ import annotations

import contextlib
import re
import shlex
from functools import partial
from typing import TYPE_CHECKING

import click
from click.shell_completion import CompletionItem, ShellComplete

from elasticflow.cli import completion_candidates

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from elasticflow.cli.completion_candidates import Candidate

# Words of a metavar, such as "[RUN] [SNAPSHOT]..." or "RUN|JOB", say what can stand there.
_WORD = re.compile(r"[A-Z_]+")
_MOST_LETTERS = 70
# What bash would not take as part of a word.
_UNSAFE, _ESCAPED = re.compile(r"[^\w@%+=:,./~-]"), r"\\\g<0>"


def answer(shell: str, arguments: Sequence[str], group: click.Group) -> str:
    """Return the lines for a shell; none if anything goes wrong.

    Args:
        shell: bash, zsh or fish.
        arguments: For bash the line after the command's name and COMP_WORDBREAKS; for the others the words, the last
            one up to the cursor.
        group: The commands.
    """
    with contextlib.suppress(Exception):
        if shell == "bash":
            line, breaks = arguments
            return _for_bash(line, breaks, group)
        if shell in {"zsh", "fish"}:
            *before, word = arguments
            word = re.sub(r"\\(.)", r"\1", word.lstrip("\"'"))
            return "".join(f"{each.value}\t{_short(each.help)}\n" for each in complete(before, word, group))
    return ""


def complete(before: list[str], word: str, group: click.Group) -> list[CompletionItem]:
    """Return what can stand at *word* after the words *before* it."""
    head = ""
    if word.startswith("--") and "=" in word:  # --set=KEY: click gives what follows the sign
        head = word[: word.index("=") + 1]
    if not _teach(group, before):
        return []
    found = ShellComplete(group, {}, "elasticflow", "").get_completions(before, word)
    return [CompletionItem(f"{head}{each.value}", each.type, each.help) for each in found]


def _teach(group: click.Group, before: Sequence[str]) -> bool:
    """Have the parameters of the command that *before* leads to know their candidates; False if it leads to none."""
    command: click.Command | None = group
    context = click.Context(group, info_name="elasticflow")
    for each in before:
        if isinstance(command, click.Group) and not each.startswith("-"):
            command = command.get_command(context, each)
    if command is None:
        return False
    for parameter in command.params:
        parameter.shell_complete = partial(_offer, parameter, before)  # type: ignore[method-assign]  # in this process only
    return True


def _offer(
    parameter: click.Parameter, before: Sequence[str], context: click.Context, word: str
) -> list[CompletionItem]:
    found = _known(parameter, before, context, word)
    if found is None:
        return parameter.type.shell_complete(context, parameter, word)
    given = context.params.get(parameter.name or "")
    gone = set(map(str, given)) if isinstance(given, tuple) else set()  # a file, a snapshot: once is enough
    return [
        CompletionItem(value, help=about)
        for value, about in dict(found).items()
        if value.startswith(word) and value not in gone
    ]


def _known(
    parameter: click.Parameter, before: Sequence[str], context: click.Context, word: str
) -> Iterable[Candidate] | None:
    """Return what can stand at a parameter, read off its name and metavar; None where click knows."""
    name = max(parameter.opts, key=len)
    is_argument = isinstance(parameter, click.Argument)
    metavar = _WORD.findall(parameter.metavar or (name.upper() if is_argument else ""))
    job_file = next((each for each in before if each.endswith(".toml")), None)
    if name == "--set":
        return completion_candidates.assignments(word, job_file)
    if name == "--case":
        return completion_candidates.cases(job_file)
    if name == "--run-id":
        return completion_candidates.run_ids()
    if "CODE" in metavar:
        return completion_candidates.codes()
    if "RUN" in metavar:
        return _runs_and_snapshots(metavar, context, word)
    if not isinstance(parameter.type, click.Path):
        return completion_candidates.job_names() if "JOB" in metavar else None
    if "JOB" in metavar or "FILE" in metavar:
        return completion_candidates.job_files(word)
    if "MODEL_FILE" in metavar:
        return completion_candidates.paths(word, ".py")
    return completion_candidates.paths(word, files=parameter.type.file_okay and "DIR" not in metavar)


def _runs_and_snapshots(metavar: Sequence[str], context: click.Context, word: str) -> Iterable[Candidate]:
    given = [
        each for each in context.params.get("words") or () if not completion_candidates.is_snapshot(each)
    ]
    if "SNAPSHOT" in metavar:
        yield from completion_candidates.snapshots(given[0] if given else None)
    if not given:
        yield from completion_candidates.runs(word)
    if "JOB" in metavar:
        yield from completion_candidates.job_files(word)


def _short(about: str | None) -> str:
    """Return the first line of what is said about a candidate, short enough for a menu."""
    text = (about or "").partition("\n")[0]
    return text if len(text) <= _MOST_LETTERS else f"{text[: _MOST_LETTERS - 3]}..."


def _for_bash(line: str, breaks: str, group: click.Group) -> str:
    """Return the replies for bash, which replaces only what follows the last of its own word breaks."""
    words, quote = _split(line)
    *before, word = words
    cut = 0 if quote else 1 + max(word.rfind(each) if each in breaks else -1 for each in "=:")
    found = [each.value[cut:] for each in complete(before, word, group)]
    return "".join(f"{each if quote else _UNSAFE.sub(_ESCAPED, each)}\n" for each in found)


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
