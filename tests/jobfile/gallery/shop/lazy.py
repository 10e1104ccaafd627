"""A module whose names are imported when they are asked for, as in large packages."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shop import Net as Nett
    from shop.losses import weighted as weightless


def __getattr__(name: str) -> object:
    return getattr(import_module("shop"), name)
