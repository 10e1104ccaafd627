"""How restarts are kept warm: what `restarts.warm` may say, and how much memory standbys may take."""

from typing import Literal

Warm = Literal["auto", "fork", "standby", "off"]
MAY_STAND_BY: frozenset[Warm] = frozenset({"auto", "standby"})
"""With these there may be standbys."""
MEMORY_FACTOR = 2
"""A node makes standbys only if so many times the memory that they take is free."""
