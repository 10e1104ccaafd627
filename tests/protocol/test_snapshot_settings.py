"""[snapshots] goes to JSON and back, as plan.json, the writer and a script's loop have it."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Literal

import pytest

from elasticflow.jobfile.tables.launching import KeepTable, SnapshotsTable
from elasticflow.protocol.snapshot_settings import Keep, SnapshotSettings

WHOLE = SnapshotSettings(
    "s3://b/x", ("5 steps",), "1 step", Keep(2, 1, "1 epoch", "2 h", "max"), "sha256", "3 MB", {"anon": True}, ("optimizer.x",)
)  # fmt: skip


@pytest.mark.parametrize("settings", [SnapshotSettings(), WHOLE])
def test_settings_go_to_json_and_back(settings: SnapshotSettings) -> None:
    """Whatever is set."""
    assert SnapshotSettings.from_json(json.loads(json.dumps(settings.to_json()))) == settings


def test_keys_that_json_lacks_have_their_defaults() -> None:
    """An unknown key is refused."""
    read = SnapshotSettings.from_json({"keep_last": 5, "staging_limit": "1.5 GiB"})
    assert (read.keep, read.staging_bytes, read.every) == (Keep(5), 3 << 29, ("10 min", "1 epoch"))
    with pytest.raises(TypeError, match="no_such_key"):
        SnapshotSettings.from_json({"no_such_key": 1})


_OFF: tuple[Literal["off", False], ...] = ("off", False)


def test_the_table_yields_every_setting_that_it_has() -> None:
    """A table without keys means the record's defaults: they are stated twice, and equal."""
    assert SnapshotsTable().settings() == SnapshotSettings()
    assert WHOLE.memory is not None
    table = SnapshotsTable(
        uri=WHOLE.uri,
        every=list(WHOLE.every),
        memory=WHOLE.memory,
        staging_limit=WHOLE.staging_limit,
        keep=KeepTable(last=2, best=1, every="1 epoch", within="2 h"),
        ignore=list(WHOLE.ignore),
        integrity=WHOLE.integrity,
        options=WHOLE.options,
    )
    assert table.settings("max") == WHOLE
    assert {None} == {SnapshotsTable(memory=off).settings().memory for off in _OFF}
    assert {each.name for each in fields(SnapshotSettings)} <= SnapshotsTable.model_fields.keys()
