"""What a rule finds in a script."""

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
        code: Explained by `elasticflow explain`.
        node: The expression or statement meant; the carets stand under it.
        message: What is wrong.
        help: What to do.
        severity: An error loses work or hangs by itself; a warning does under circumstances; a note is told on request.
    """

    code: str
    node: ast.expr | ast.stmt | ast.keyword
    message: str
    help: str
    severity: Severity = "warning"


class View(NamedTuple):
    """What rules look at: a script, and what is known of its conditions and collectives."""

    script: Script
    ranks: Ranks
    collectives: Collectives
