"""Loops of a script over one dataset, epoch after epoch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from elasticflow.runtime.loop.stages import Stages


def test_a_dataset_that_the_script_changes_between_epochs_is_read_anew() -> None:
    """Loader processes have the dataset as it was when they began: mosaics would go on after the script has switched them off."""
    dataset = SimpleNamespace(whole=SimpleNamespace(mosaic=True), names=["a"])
    began: list[Any] = []

    def batches(position: Any) -> Any:
        began.append(position)
        return iter(())

    stages, source = Stages(), SimpleNamespace(batches=batches)
    stages.begin_epochs(3)
    assert stages.epochs is not None
    stages.epochs.dataset = dataset
    for position in ("first", "second", "third"):
        dataset.whole.mosaic = position != "third"
        stages.reading(source, position)  # type: ignore[arg-type]
    assert began == ["first", "third"]
