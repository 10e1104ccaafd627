"""Facts about a launch that only workers know, for environment.json in its folder."""

from __future__ import annotations

import json
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from elasticflow.compiler.provenance.environment import versions_of_modules
from elasticflow.compiler.provenance.origins import ENVIRONMENT_JSON
from elasticflow.system import atomic_files

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


class EnvironmentRecord:
    """Writes the imports, the device and the data of rank 0 of the first group that trains."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / ENVIRONMENT_JSON
        self._facts: dict[str, Any] = {"format": 1, "datasets": {}}
        self._writing: threading.Thread | None = None

    def data(self, line: Mapping[str, Any]) -> None:
        """Take in a `dataset.opened`."""
        keys = ("samples", "shards", "values", "fingerprint", "source")
        facts = {key: line[key] for key in keys if key in line}
        self._facts["datasets"][line["name"]] = facts

    def found(self, line: Mapping[str, Any]) -> None:
        """Take in an `environment.found`; a thread writes the file, once in a launch.

        Looking up the modules' packages takes a tenth of a second, which a run that restarts does not have.
        """
        if self._writing is None:
            self._facts |= {key: line[key] for key in ("node", "generation", "device", "files")}
            self._writing = threading.Thread(target=self._write, args=(line["modules"],), daemon=True)
            self._writing.start()

    def close(self) -> None:
        """Wait until the file is written, if anything is."""
        if self._writing is not None:
            self._writing.join(timeout=10)

    def _write(self, modules: list[str]) -> None:
        facts = {**self._facts, "versions": versions_of_modules(modules)}
        with suppress(OSError):  # a run folder that cannot be written ends the launch, which says so
            atomic_files.write(self._path, [json.dumps(facts, indent=2).encode(), b"\n"])
