"""The findings of rules, and the view of a script that rules get."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import ast

    from elasticflow.jobfile.diagnostics.diagnostic import Severity
    from elasticflow.lint.script.collectives import Collectives
    from elasticflow.lint.script.ranks import Ranks
    from elasticflow.python_source.script import Script


class Finding(NamedTuple):
    """One problem.

    Attributes:
        node: The expression or statement that the carets mark.
        severity: An error loses work or hangs by itself; a warning may do so; a note is shown on request.
    """

    code: str
    node: ast.expr | ast.stmt | ast.keyword
    message: str
    help: str
    severity: Severity = "warning"


class View(NamedTuple):
    """A script with the analysis of its conditions and collectives."""

    script: Script
    ranks: Ranks
    collectives: Collectives
