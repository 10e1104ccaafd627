"""The page of all codes, `codes.md`, written from the explanations."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elasticflow.jobfile.diagnostics.explanations import EXPLANATIONS

if TYPE_CHECKING:
    from elasticflow.jobfile.diagnostics.explanation import Explanation

GROUPS = {
    "EF0": "Reading files and flags",
    "EF1": "Keys and values",
    "EF2": "Entry points",
    "EF3": "Between keys",
    "EF4": "Warnings",
    "EF5": "Found by `--deep`",
}
_HEAD = """# What `elasticflow validate` finds

Each finding has a code that never changes its meaning. `elasticflow explain CODE` prints what stands here.
An error refuses the job, a warning does with `--strict`, a note never.

`--output-format`, or the variable `ELASTICFLOW_OUTPUT_FORMAT`, says how findings are printed:

| format | for | what it is |
|---|---|---|
| `full` | people | the line, carets below what is meant, what to do; in colour on a terminal (`NO_COLOR`, `FORCE_COLOR`) |
| `concise` | editors | `file:line:column: severity[code] message (help)`, one line each |
| `json` | scripts | a list of objects with the keys below |
| `github` | pull requests | workflow commands, which annotate the lines |
| `sarif` | code scanning | SARIF 2.1.0 with every rule explained, paths relative to the folder the command ran in |

The keys in `json`: `code`, `severity` (`error`, `warning`, `note`), `message`, `file` (as it was named, or `--set`),
`line`, `column`, `end_line`, `end_column` (from 1, columns in code points, the end exclusive; null where the file as a
whole is meant) and `help` (null where there is none).
"""


def page() -> str:
    """Return the page: a table of all codes, then each with its reason and examples."""
    parts = [_HEAD]
    for start, title in GROUPS.items():
        parts.append(f"\n## {title}\n\n| code | meaning |\n|---|---|\n")
        parts += [f"| [{code}](#{code.lower()}) | {each.title} |\n" for code, each in _of(start)]
    for start in GROUPS:
        for code, each in _of(start):
            parts.append(f"\n### {code}\n\n**{each.title}**\n\n{each.markdown()}\n")
    return "".join(parts)


def _of(start: str) -> list[tuple[str, Explanation]]:
    return sorted((code, each) for code, each in EXPLANATIONS.items() if code.startswith(start))
