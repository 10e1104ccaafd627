"""Answers a shell that asks for completions of the word at the cursor.

A shell's script (see `cli/more/completion.py`) calls the command itself with `_ELASTICFLOW_COMPLETE=<shell>` and the words
before the cursor. The answer has one candidate a line, `<word>` or `<word><tab><description>`. On any error the answer is
empty: a traceback would tear the line that is being typed.

A shell waits for the answer, so only folders and the schema's file are read: neither pydantic nor anything that reads
a job is imported, and no store on a network is asked. The functions that yield candidates are named by the types of
parameters (`cli/parameters.py`): each takes click's context and the word so far.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem, ShellComplete

from elasticflow.cli.output import cut
from elasticflow.jobfile.project import current_project_root
from elasticflow.run_folder import RUN_ID, RUNS, SNAPSHOT_NAME, RunFolder, recorded_place

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

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
    return cut((about or "").partition("\n")[0], _MOST_LETTERS)


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


Candidate = tuple[str, str]
"""What completes the word, and a few words about it."""
Node = dict[str, Any]
"""A node of the JSON Schema of the job file, as it was parsed."""

_NO_JOBS = frozenset({"pyproject.toml", "tombi.toml", "taplo.toml", "ruff.toml", "Cargo.toml"})
# Keys of a file, not of a job.
_NO_KEYS = frozenset({"extends", "matrix"})
# A longer menu is of no use, and takes time.
_MOST_RUNS = 200


def _paths(word: str, ending: str = "", *, has_files: bool = True) -> Iterator[Candidate]:
    """Yield folders that begin with *word*, and files with *ending*; hidden names only if *word* begins with a dot."""
    parent, slash, stem = word.rpartition("/")
    folder = Path(os.path.expanduser(parent) if parent else slash or ".")  # noqa: PTH111  # "~ba" is no error here
    for entry in sorted(os.scandir(folder), key=lambda item: item.name):
        if not entry.name.startswith(stem) or (entry.name.startswith(".") and not stem.startswith(".")):
            continue
        if entry.is_dir():
            if entry.name != "__pycache__":
                yield f"{parent}{slash}{entry.name}/", "folder"
        elif has_files and entry.name.endswith(ending) and entry.name not in _NO_JOBS:
            yield f"{parent}{slash}{entry.name}", ""


def files(context: click.Context, word: str) -> Iterator[Candidate]:
    """Yield files, and the folders on the way to them."""
    return _paths(word)


def folders(context: click.Context, word: str) -> Iterator[Candidate]:
    """Yield folders."""
    return _paths(word, has_files=False)


def model_files(context: click.Context, word: str) -> Iterator[Candidate]:
    """Yield files of Python, and folders."""
    return _paths(word, ".py")


def job_files(context: click.Context, word: str) -> Iterator[Candidate]:
    """Yield TOML files and folders; before anything is typed, files in `jobs/` come first."""
    if not word and Path("jobs").is_dir():
        yield from (candidate for candidate in _paths("jobs/", ".toml") if candidate[0].endswith(".toml"))
    yield from _paths(word, ".toml")


def job_names(context: click.Context, word: str) -> Iterator[Candidate]:
    """Yield the names of the jobs that have runs."""
    return ((name, "") for name in sorted({folder.parent.name for folder in _run_folders()}))


def _is_snapshot(word: str) -> bool:
    """Return whether a word of `snapshots` commands names a snapshot, not a run."""
    return word in {"latest", "best"} or word.startswith("step:") or bool(SNAPSHOT_NAME.fullmatch(word))


def runs(context: click.Context, word: str) -> Iterator[Candidate]:
    """Yield job names and run ids of the project, newest ids first; folders and job files when a path is typed."""
    if "/" in word:
        yield from job_files(context, word)
        return
    yield from ((job, "its newest run") for job, _ in job_names(context, word))
    yield from run_ids(context, word)


def runs_and_job_files(context: click.Context, word: str) -> Iterator[Candidate]:
    """Yield runs, then job files."""
    yield from runs(context, word)
    yield from job_files(context, word)


def one_run(context: click.Context, word: str) -> Iterator[Candidate]:
    """Yield runs, if no earlier word names one."""
    return iter(()) if context.params.get("words") else runs(context, word)


def one_run_and_snapshots(context: click.Context, word: str) -> Iterator[Candidate]:
    """Yield the snapshots of the run that was typed; without one, the newest run's snapshots, and runs."""
    given = [typed for typed in context.params.get("words") or () if not _is_snapshot(typed)]
    yield from _snapshots(given[0] if given else None)
    if not given:
        yield from runs(context, word)


def run_ids(context: click.Context, word: str) -> Iterator[Candidate]:
    """Yield the ids of the project's runs, the newest first."""
    newest_first = sorted(_run_folders(), key=lambda folder: folder.name, reverse=True)
    return ((folder.name, f"run of {folder.parent.name}") for folder in newest_first[:_MOST_RUNS])


def _snapshots(run: str | None) -> Iterator[Candidate]:
    """Yield the committed snapshots of a run, the newest first; None means the newest run."""
    yield "latest", "the newest"
    yield "best", "by evaluation.best"
    folders = sorted(_run_folders(), key=lambda folder: folder.name)
    named = [folder for folder in folders if run is None or run in {folder.name, folder.parent.name}]
    if run is not None and not named and Path(run).is_dir():
        named = [Path(run).absolute()]
    if not named:
        return
    uri, prefix = recorded_place(RunFolder(named[-1]))
    snapshots_folder = Path(uri.removeprefix("file://")) / prefix / "snapshots"
    names = sorted(filter(SNAPSHOT_NAME.fullmatch, _names(snapshots_folder)), reverse=True)
    for name in names[:_MOST_RUNS]:
        if (snapshots_folder / name / "MANIFEST.json").exists():
            step = int(name.partition("-")[0])
            yield name, f"step {step}"
            yield f"step:{step}", "its newest snapshot"


def examples(context: click.Context, word: str) -> Iterator[Candidate]:
    """Yield the examples that `init` can write, with their descriptions."""
    from elasticflow.scaffold import gallery

    yield from gallery.examples().items()


def topics_and_codes(context: click.Context, word: str) -> Iterator[Candidate]:
    """Yield the topics of the guide with the subjects of their pages; once a code is begun, codes with their titles."""
    from elasticflow.guide import pages
    from elasticflow.jobfile.diagnostics.codes import titles

    yield from (titles() if word.startswith("E") else pages.topics() | {"codes": "every code"}).items()


def assignments(context: click.Context, word: str) -> Iterator[Candidate]:
    """Yield values of `--set`: `table.`, then `table.key=`, then the key's choices and examples."""
    key, equals, _ = word.partition("=")
    schema = _schema()
    if equals:
        yield from ((f"{key}={value}", about) for value, about in _values(schema, key.split(".")))
        return
    if "." not in word:
        tables = ((name, node) for name, node in schema["properties"].items() if name not in _NO_KEYS)
        yield from ((f"{name}.", node.get("description", "")) for name, node in tables)
        return
    yield from _keys(schema, schema["properties"], "")
    yield from _free_keys(schema, _job_file_typed(context))


def cases(context: click.Context, word: str) -> Iterator[Candidate]:
    """Yield the names of the cases of a file with [matrix], its own or a base's."""
    from elasticflow.jobfile.checks.matrix import expand
    from elasticflow.jobfile.text.source import load_source

    source = load_source(Path(_job_file_typed(context) or ""))
    return (
        (case.name, "") for case in (expand(source, checks_keys=False)[0] if "matrix" in source.raw else ())
    )


def _job_file_typed(context: click.Context) -> str | None:
    """Return the job file among the words before the cursor, which `complete` puts into the context."""
    return next((typed for typed in context.obj or () if typed.endswith(".toml")), None)


def _run_folders() -> Iterator[Path]:
    folder = current_project_root() / RUNS
    for job in _names(folder):
        yield from (folder / job / run for run in _names(folder / job) if RUN_ID.fullmatch(run))


def _names(folder: Path) -> list[str]:
    try:
        return [entry.name for entry in os.scandir(folder) if entry.is_dir()]
    except OSError:
        return []


def _schema() -> Node:
    from elasticflow.jobfile.tables.json_schema import SCHEMA_FILE

    schema: Node = json.loads(SCHEMA_FILE.read_text("utf-8"))
    return schema


def _resolved(schema: Node, node: Node) -> Node:
    name = str(node.get("$ref", "")).rpartition("/")[2]
    return {**schema["$defs"][name], **node} if name else node


def _keys(schema: Node, properties: Node, prefix: str) -> Iterator[Candidate]:
    for name, node in properties.items():
        inner = _resolved(schema, node)
        if "properties" in inner:
            yield from _keys(schema, inner["properties"], f"{prefix}{name}.")
        elif prefix and inner.get("type") != "object":
            yield f"{prefix}{name}=", inner.get("description", "")


def _free_keys(schema: Node, job_file: str | None) -> Iterator[Candidate]:
    """Yield the keys that the job file has in free tables: `optimizer.args.lr=`."""
    for table, content in _read(job_file).items():
        properties = _resolved(schema, schema["properties"].get(table, {})).get("properties", {})
        for key, value in content.items() if isinstance(content, dict) else ():
            if properties.get(key, {}).get("type") == "object" and isinstance(value, dict):
                yield from ((f"{table}.{key}.{name}=", f"now {old}") for name, old in value.items())


def _values(schema: Node, names: list[str]) -> Iterable[Candidate]:
    node: Node = {"properties": schema["properties"]}
    for name in names:
        node = _resolved(schema, node.get("properties", {}).get(name, {}))
    default, values = node.get("default"), dict[str, str]()
    for alternative in (node, *node.get("anyOf", ())):
        choices = [*alternative.get("enum", ()), *([alternative["const"]] if "const" in alternative else ())]
        choices += ["true", "false"] if alternative.get("type") == "boolean" else []
        values |= {_shown(choice): "" for choice in choices}
        values |= {
            _shown(v): "for example" for v in alternative.get("examples", ()) if _shown(v) not in values
        }
    if default is not None:
        values |= {_shown(default): "the default"}
    return ((value, about) for value, about in values.items() if value)


def _shown(value: object) -> str:
    """Return a value as `--set` takes it without quotes; empty for lists and tables, which need quotes."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return "" if isinstance(value, list | dict) else str(value)


def _read(job_file: str | None) -> dict[str, Any]:
    import tomli

    try:
        return tomli.loads(Path(job_file or "").read_text("utf-8"))
    except (OSError, ValueError):
        return {}
