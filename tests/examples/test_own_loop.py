"""Parts of examples/own_loop that a restart depends on."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.mark.campaign  # the import takes seconds
def test_an_early_stopping_of_the_trainer_goes_on_counting_after_a_restart() -> None:
    """The best metric and the counts of its callbacks come back; the rest of its record does not."""
    transformers = pytest.importorskip("transformers")
    from examples.own_loop.train_hf_trainer import Progress

    def made() -> tuple[Any, Any, Progress]:
        state, stopping = transformers.TrainerState(), transformers.EarlyStoppingCallback(3)
        return state, stopping, Progress(state, [transformers.TrainerCallback(), stopping])

    state, stopping, progress = made()
    state.best_metric, state.global_step, stopping.early_stopping_patience_counter = 0.6, 20, 2
    again, counting, restored = made()
    restored.load_state_dict(progress.state_dict())
    assert (again.best_metric, again.global_step) == (0.6, 0)
    assert counting.early_stopping_patience_counter == 2
