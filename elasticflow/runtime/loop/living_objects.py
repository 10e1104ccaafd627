"""Finds objects of a class wherever this process holds them: the script need not have given them to the run."""

from __future__ import annotations

import gc
from typing import TypeVar

T = TypeVar("T")


def living(kind: type[T]) -> list[T]:
    """Return the objects of a class that the collector knows; slow: looks at every object of the process."""
    # Not isinstance: it asks each object for its class, and torch's deprecated ones warn then.
    return [each for each in gc.get_objects() if issubclass(type(each), kind)]
