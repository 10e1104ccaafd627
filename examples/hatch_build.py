"""Puts the examples into the wheel, where `elasticflow init --example` finds them; in a checkout they are read here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

INTO = "elasticflow/scaffold/examples"


class ExamplesHook(BuildHookInterface[Any]):
    """Adds the files of each folder with a job.toml; what runs have left in folders of their own stays out."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add them to a wheel; an editable install needs none."""
        if version == "editable":
            return
        for job in sorted(Path(self.root, "examples").glob("*/job.toml")):
            for path in sorted(job.parent.iterdir()):
                if path.is_file() and not path.name.startswith("."):
                    build_data["force_include"][str(path)] = f"{INTO}/{job.parent.name}/{path.name}"
