"""The optimizers of a loop whose gradients `Run.gradients` makes: each moves the kept model, as it is now."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn
from torch.optim import SGD

from elasticflow.errors import StateError
from elasticflow.runtime.loop.gradients import Gradients, LoopStep
from elasticflow.runtime.loop.kept import parts_of
from elasticflow.runtime.process.shard_layout import Sharding


@pytest.mark.parametrize("ways", [{"world_size": 2}, {"sharding": Sharding(1)}], ids=["two ranks", "sharded"])
def test_a_module_beside_the_model_is_refused_before_its_gradients_are_lost(
    me: Any, ways: dict[str, Any]
) -> None:
    """They would be each rank's own: those of a projection, or of a learned temperature."""
    vars(me).update(ways)
    model, beside = nn.Linear(2, 2), nn.Linear(3, 1)
    optimizer = SGD([*model.parameters(), *beside.parameters()], lr=0.1)
    parts = parts_of({"model": model, "optimizer": optimizer, "beside": beside})
    with pytest.raises(
        StateError, match=r"optimizer moves a parameter of shape \(1, 3\) that is not of"
    ) as no:
        LoopStep(me, Gradients(), parts)
    assert "one module of all that is trained" in str(no.value.remedy)
