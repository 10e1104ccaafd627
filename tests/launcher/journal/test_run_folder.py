"""A run folder that cannot be written while a launch is under way."""

from __future__ import annotations

import signal
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from elasticflow.errors import INTERRUPTED, RunFolderError
from elasticflow.launcher.supervisor.scale_schedule import ALONE
from elasticflow.launcher.supervisor.supervisor import Supervisor
from elasticflow.protocol.snapshot_settings import SnapshotSettings
from elasticflow.run_folder import RunFolder

if TYPE_CHECKING:
    from elasticflow.launcher.supervisor.launch_record import Launch

FULL = Path("/dev/full")


@pytest.mark.skipif(not FULL.exists(), reason="no /dev/full here")
def test_full_disk_interrupts_the_launch_and_says_so(tmp_path: Path) -> None:
    """The next launch continues once there is room; signals are given back."""
    folder = RunFolder(tmp_path / "runs" / "job" / "run")
    folder.path.mkdir(parents=True)
    folder.events.symlink_to(FULL)
    storage = SimpleNamespace(uri="file:///snapshots")
    launch = SimpleNamespace(
        plan=SimpleNamespace(
            script=None,
            nodes_min=1,
            shard=1,
            nodes_max=1,
            env={},
            env_secrets=(),
            snapshots=SnapshotSettings(memory=None),
            restarts=SimpleNamespace(grace_s=30.0),
        ),
        request=SimpleNamespace(
            folder=folder,
            job=SimpleNamespace(
                script=None, train=SimpleNamespace(time_limit=None), notify=None, parallel=None
            ),
            follower=(),
            scale=ALONE,
        ),
        launch_folder=folder.launch(1),
        number=1,
        catalog=SimpleNamespace(storage=storage),
        store=SimpleNamespace(endpoint=None, address=SimpleNamespace(token="")),
        lock=SimpleNamespace(require_held=lambda: None),
        ledger=SimpleNamespace(entries=[]),
        is_resumed=False,
    )
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(RunFolderError, match="No space left on device") as ended:
        Supervisor(cast("Launch", launch), lambda _: None).run()

    assert INTERRUPTED == ended.value.exit_code
    assert str(folder.path) in ended.value.message
    assert before == signal.getsignal(signal.SIGTERM)
