"""environment.json: what only workers know, written once in a launch."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from elasticflow.compiler.provenance.origins import WorkerEnvironment, environment_of
from elasticflow.launcher.supervisor.ingest import EnvironmentRecord

if TYPE_CHECKING:
    from pathlib import Path


def test_what_rank_0_found_is_written_once(tmp_path: Path) -> None:
    """Modules become distributions with versions, data is told by name; a later group adds nothing."""
    record = EnvironmentRecord(tmp_path)
    record.data({"event": "dataset.opened", "name": "train", "samples": 9, "fingerprint": "f", "source": "s"})
    found = {
        "node": "n0",
        "generation": 1,
        "device": {"cpu": "x"},
        "files": {"a.py": "0"},
        "modules": ["click"],
    }
    record.found(found)
    record.close()
    written = environment_of(tmp_path)
    assert {"samples": 9, "fingerprint": "f", "source": "s"} == written.datasets["train"]
    assert {"a.py": "0"} == written.files
    assert {"click", "python"} <= written.versions.keys()

    record.found({**found, "generation": 2})
    record.close()
    assert 1 == json.loads((tmp_path / "environment.json").read_text())["generation"]


def test_nothing_is_written_where_nobody_trained(tmp_path: Path) -> None:
    """A launch whose workers never took a step leaves no file."""
    EnvironmentRecord(tmp_path).close()
    assert WorkerEnvironment() == environment_of(tmp_path)
    assert [] == list(tmp_path.iterdir())
