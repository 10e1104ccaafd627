"""The former names of commands: each still works in this version, and says on standard error how it is called now."""

from __future__ import annotations

_RENAMED = {"compile": "plan", "verify-elastic": "verify", "explain": "guide", "render": "submit"}


def now_called(words: list[str]) -> list[str]:
    """Return the words of a command line with a command's present name; other words as they are."""
    match words:
        case ["explain"]:
            return ["guide", "codes"]
        case ["render", "slurm" | "kubernetes" as place, *rest]:
            return ["submit", place, "--print", *rest]
        case [name, *rest] if name in _RENAMED:
            return [_RENAMED[name], *rest]
        case ["adopt", *rest]:
            return ["lint", *(word for word in rest if word != "--diff")]
        case ["schema", *rest]:
            kind = "events" if "--events" in rest else "job"
            return ["guide", "--schema", kind, *(word for word in rest if word != "--events")]
        case ["chaos", *rest]:
            return ["verify", *_with_faults(rest)]
        case ["sinks", *rest]:
            return _sinks(rest)
        case _:
            return words


def _sinks(words: list[str]) -> list[str]:
    if words[:1] != ["test"]:
        return ["runs", *(words or ["--help"])]
    way = "show" if "--dry-run" in words else "send"
    return ["doctor", "--notify", way, *(word for word in words[1:] if word != "--dry-run")]


def _with_faults(words: list[str]) -> list[str]:
    """Return the words of `chaos`, whose fault plan had an option of its own, and whose number of faults a default."""
    words = [
        f"--faults{word.removeprefix('--plan')}" if word.startswith("--plan") else word for word in words
    ]
    has_faults = any(word.startswith("--faults") for word in words)
    return words if has_faults else ["--faults", "5", *words]
