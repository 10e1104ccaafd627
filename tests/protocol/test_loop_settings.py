"""What a loop is told by the job file, and by the script's own arguments."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from elasticflow.protocol import worker_environment
from elasticflow.protocol.loop_settings import LoopSettings
from elasticflow.protocol.snapshot_settings import Keep, SnapshotSettings

if TYPE_CHECKING:
    from pathlib import Path


def test_the_job_file_is_read_from_the_environment() -> None:
    """As our agent wrote it; without our agent there is nothing."""
    kept = Keep(2, 1, "1 epoch", "2 h")
    snapshots = SnapshotSettings(
        "s3://b/x", ("5 steps",), "1 step", kept, "sha256", "3 MB", {"anon": True}, ("optimizer.x",)
    )
    given = LoopSettings("job", "digest", 7, snapshots, 10, "warning", 2)

    assert LoopSettings.told({worker_environment.LOOP: given.to_json()}) == given
    assert LoopSettings.told({}) is None
    with pytest.raises(ValueError, match="not the settings that this version"):
        LoopSettings.told({worker_environment.LOOP: "{}"})


def test_arguments_of_the_script() -> None:
    """One interval or several; snapshots in the run folder."""
    one = LoopSettings.of_arguments("train", 3, None, "5 steps", 2, "self.x", 1, None)
    several = LoopSettings.of_arguments("train", 3, "s3://b/x", ["5 steps", "1 epoch"], 2, ["self.x"], 1, 4)

    assert (one.snapshots.every, one.snapshots.uri, one.snapshots.keep.last) == (("5 steps",), None, 2)
    assert (several.snapshots.every, several.snapshots.uri, several.threads) == (
        ("5 steps", "1 epoch"),
        "s3://b/x",
        4,
    )


def test_a_folder_of_the_script_is_that_where_it_joined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script that went on to a folder of its own for each start wrote its snapshots there, and never found them again."""
    monkeypatch.chdir(tmp_path)
    told = LoopSettings.of_arguments("train", 3, "kept", "5 steps", 2, (), 1, None)
    assert told.snapshots.uri == f"{tmp_path}/kept"
