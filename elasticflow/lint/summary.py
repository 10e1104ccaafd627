"""The end of a report: the rules, the number of findings of each, and the questions that reading leaves open."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from elasticflow.jobfile.diagnostics.explanations import titles

if TYPE_CHECKING:
    from collections.abc import Iterable

    from elasticflow.jobfile.diagnostics.diagnostic import Diagnostic
    from elasticflow.lint.check import Selection

_SUBJECTS = {
    "EF60": "samplers, batch sizes per rank, checks that a resize breaks",
    "EF61": "checkpoints: written whole, by one rank, with all state, loaded by a restart",
    "EF62": "ports, mp.spawn, --local_rank",
    "EF63": "collectives that some ranks do not reach",
    "EF64": "find_unused_parameters",
}
UNTOLD = (
    "reading cannot tell what other files do, which values a run has, or whether a restart finds its checkpoint: "
    "kill a worker of a short run to see"
)


def looked_for(findings: Iterable[Diagnostic], selection: Selection) -> list[tuple[str, str, str]]:
    """Return a row for each selected subject: its codes, the fault, and the number of findings by code."""
    findings = list(findings)
    found = Counter(each.code for each in findings)
    notes = {each.code for each in findings if each.severity == "note"}
    rows = []
    for prefix, subject in _SUBJECTS.items():
        wanted = [code for code in titles() if code.startswith(prefix) and code != "EF600" and selection.wants(code)]  # fmt: skip
        if not wanted:
            continue
        codes = wanted[0] if len(wanted) == 1 else f"{wanted[0]} to {wanted[-1]}"
        parts = [
            f"{found[code]} {code}{' (note)' if code in notes else ''}" for code in wanted if found[code]
        ]
        rows.append((codes, subject, ", ".join(parts) or "none found"))
    return rows
