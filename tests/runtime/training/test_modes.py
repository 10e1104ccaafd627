"""Modes of modules are put back, each."""

from __future__ import annotations

from torch import nn

from elasticflow.runtime.training.modes import evaluating


class Merging(nn.Module):
    """Merges its weights in evaluation mode, as LoRA layers do."""

    merged = False

    def train(self, mode: bool = True) -> Merging:
        """Merge, or part."""
        self.merged = not mode
        super().train(mode)
        return self


def test_modes_are_put_back_one_by_one() -> None:
    """A frozen part of a model that trains, a part that trains in a frozen one, and a module in two places."""
    shared = nn.Dropout()
    model = nn.Sequential(nn.Sequential(nn.BatchNorm1d(1), shared), nn.Sequential(nn.Linear(1, 1)), shared)
    model[0].eval()
    model[0][0].train()  # type: ignore[index]
    modes = [module.training for module in model.modules()]
    with evaluating(model):
        assert not any(module.training for module in model.modules())
    assert [module.training for module in model.modules()] == modes


def test_a_module_hears_that_it_trains_again() -> None:
    """By its own `train`: the flag alone would leave its weights merged."""
    model = nn.Sequential(Merging())
    with evaluating(model):
        assert model[0].merged
    assert not model[0].merged
