"""The elasticflow that runs: its version, and the folder that Python finds it in."""

from __future__ import annotations

from pathlib import Path

VERSION = "0.1.0"

ABOVE_PACKAGE = Path(__file__).resolve().parents[2]
"""`python -m elasticflow...` finds this very package where it starts in this folder."""
