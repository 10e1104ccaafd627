"""Models."""

from __future__ import annotations

from torch import nn


class Net(nn.Module):
    """A model."""
