"""Puts the examples into the wheel, where `init --example` and `guide --template` find them; in a checkout they are read here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

INTO = "elasticflow/scaffold/examples"
TEMPLATES = ("own_loop", "rungs")


class ExamplesHook(BuildHookInterface[Any]):
    """Adds the files of each folder with a job.toml, and the scripts of two more; what runs have left in folders of their own stays out."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add them to a wheel; an editable install needs none."""
        if version == "editable":
            return
        examples = Path(self.root, "examples")
        files = [path for job in examples.glob("*/job.toml") for path in job.parent.iterdir()]
        files += [path for name in TEMPLATES for path in (examples / name).glob("*.py")]
        for path in sorted(files):
            if path.is_file() and not path.name.startswith("."):
                build_data["force_include"][str(path)] = f"{INTO}/{path.parent.name}/{path.name}"
