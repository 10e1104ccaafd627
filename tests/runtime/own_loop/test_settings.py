"""What a loop is told by the job file, and by the script's own arguments."""

from __future__ import annotations

import pytest

from elasticflow.protocol import worker_environment
from elasticflow.protocol.loop_settings import KeptSnapshots, LoopSettings, LoopSnapshots
from elasticflow.runtime.own_loop import settings
from elasticflow.system.units import parse_size


def test_the_job_file_is_read_from_the_environment() -> None:
    """As our agent wrote it; without our agent there is nothing."""
    snapshots = LoopSnapshots(
        "s3://bucket/x", ("5 steps",), KeptSnapshots(2, 1), "sha256", "1 step", 3_000_000
    )
    given = LoopSettings("job", "digest", 7, snapshots, 10, "warning", 2)

    assert settings.told({worker_environment.LOOP: given.to_json()}) == given
    assert settings.told({}) is None
    with pytest.raises(ValueError, match="not the settings that this version"):
        settings.told({worker_environment.LOOP: "{}"})


def test_a_policy_has_all_that_the_settings_have() -> None:
    """Units and all."""
    kept = KeptSnapshots(2, 1, "1 epoch", "2 h")
    given = LoopSnapshots(
        "s3://b/x", ("5 steps",), kept, "sha256", "1 step", 3_000_000, {"anon": True}, ("optimizer.x",)
    )
    policy = settings.policy_of(LoopSettings("job", "", 1, given))

    assert (policy.uri, policy.every, policy.integrity, policy.memory) == (
        "s3://b/x",
        ("5 steps",),
        "sha256",
        "1 step",
    )
    assert vars(policy.keep) == {**vars(kept), "best_mode": None}
    assert policy.staging_limit is not None
    assert parse_size(policy.staging_limit) == 3_000_000
    assert (policy.options, policy.ignore) == ({"anon": True}, ("optimizer.x",))


def test_arguments_of_the_script() -> None:
    """One interval or several; snapshots in the run folder."""
    one = settings.of_arguments("train", 3, None, "5 steps", 2, (), 1, None)
    several = settings.of_arguments("train", 3, "s3://b/x", ["5 steps", "1 epoch"], 2, ["self.x"], 1, 4)

    assert (one.snapshots.every, one.snapshots.uri, one.snapshots.keep.last) == (("5 steps",), None, 2)
    assert (several.snapshots.every, several.snapshots.uri, several.threads) == (
        ("5 steps", "1 epoch"),
        "s3://b/x",
        4,
    )
