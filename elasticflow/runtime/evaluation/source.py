"""Identifies the job's own code of a metric, to notice a change."""

from __future__ import annotations

import ast
import hashlib
import inspect
import operator
import textwrap
from importlib import import_module


def source_of(entry: str | None) -> str | None:
    """Return a digest of the code of a function of the job, without comments and layout; None if it cannot be read.

    What it calls is not looked at, and a package that is installed has a version.
    """
    module, _, attribute = (entry or "").partition(":")
    try:
        measure = inspect.unwrap(operator.attrgetter(attribute)(import_module(module)))
        if "site-packages" in inspect.getfile(measure):
            return None
        code = ast.unparse(ast.parse(textwrap.dedent(inspect.getsource(measure))))
    except Exception:  # noqa: BLE001  # importing the job's code may raise anything; measuring raises it again
        return None
    return hashlib.sha256(code.encode()).hexdigest()[:16]
