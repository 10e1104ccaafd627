"""The optimizers of a loop whose gradients `Run.gradients` makes: each moves the kept model, as it is now."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from elasticflow.errors import StateError
from elasticflow.runtime.data.index_loader import Batch as OwnPart
from elasticflow.runtime.loop.gradients import Gradients, LoopStep, _require_of_model
from elasticflow.runtime.loop.kept import parts_of
from elasticflow.runtime.loop.passes import Pass
from elasticflow.runtime.process.position import Position
from elasticflow.runtime.process.shard_layout import Sharding
from elasticflow.runtime.process.torch_private import HashStore
from elasticflow.runtime.state.state import State


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

    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        wrapped = DistributedDataParallel(beside)  # the script exchanges its gradients
        _require_of_model(model, {"optimizer": optimizer})
        del wrapped
    finally:
        dist.destroy_process_group()


def test_batches_whose_losses_count_their_items_add_up(me: Any) -> None:
    """Two passes without a move of the optimizer: the second batch's count divides its own gradients, and not the first one's."""
    model = nn.Linear(1, 1, bias=False)
    parts = parts_of({"model": model, "optimizer": SGD(model.parameters(), lr=0.1)})
    step, passes = LoopStep(me, Gradients(), parts), Pass()
    passes.watch(State(**parts), computes_gradients=False)
    for number in (1, 2):
        rows = torch.full((4, 1), float(number))
        end = Position(number, 4 * number, 0, 4 * number, is_epoch_end=False)
        assert step.adds_up
        with passes.adding_gradients():
            step.forward_backward(
                lambda part: (model(part.data).sum(), len(part.data)),
                OwnPart(4, end, [number], iter([(rows, 4)])),
            )
    assert model.weight.grad is not None
    assert model.weight.grad.item() == 1.0 + 2.0
