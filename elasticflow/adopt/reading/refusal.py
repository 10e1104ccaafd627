"""Why a script is not patched: each reason with its line and what to do by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import ast


class Reason(NamedTuple):
    """What stands in the way.

    Attributes:
        line: Of the script; None: of the whole.
        message: What there is.
        remedy: What to do by hand.
    """

    line: int | None
    message: str
    remedy: str


class RefusalError(Exception):
    """A script that no patch fits; nobody but this package sees it."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason.message)
        self.reason = reason


def refuse(node: ast.AST | None, message: str, remedy: str) -> RefusalError:
    """Return the error to raise about a node."""
    return RefusalError(Reason(getattr(node, "lineno", None), message, remedy))
