"""Finds the entry point of torch or elasticflow that a name without its module stands for."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from elasticflow.jobfile.diagnostics.suggestions import nearest
from elasticflow.python_source.definitions import Definition, NoAttributeError
from elasticflow.python_source.modules import (
    CannotTellError,
    Finder,
    NotInstalledError,
    UnresolvedError,
    installed_folders,
)
from elasticflow.python_source.resolve import Resolver

if TYPE_CHECKING:
    from elasticflow.jobfile.diagnostics.positions import KeyPath

_HOMES = {
    ("optimizer", "entry"): "torch.optim",
    ("lr_scheduler", "entry"): "torch.optim.lr_scheduler",
    ("model", "loss"): "torch.nn.functional",
    ("optimizer", "module"): "torch.nn",  # of a group of parameters
}
_OURS = "elasticflow.schedules"
# Names of schedules in other libraries, and schedules that torch does not have.
_NAMES = {
    "cosine": "CosineAnnealingLR",
    "linear": "LinearLR",
    "constant": "ConstantLR",
    "onecycle": "OneCycleLR",
    "warmup_cosine": f"{_OURS}:warmup_cosine",
    "cosine_with_warmup": f"{_OURS}:warmup_cosine",
    "warmup_linear": f"{_OURS}:warmup_linear",
    "linear_with_warmup": f"{_OURS}:warmup_linear",
    "warmup_stable_decay": f"{_OURS}:warmup_stable_decay",
    "wsd": f"{_OURS}:warmup_stable_decay",
}


def with_module(path: KeyPath, name: str, *, is_exact: bool = False) -> str | None:
    """Return `module:name` for a bare name; None if torch has nothing like it.

    Args:
        path: The key.
        name: The bare name; for the class of a loss the equivalent function is found, too.
        is_exact: The spelling is right.
    """
    home = _HOMES.get((str(path[0]), str(path[-1])))
    name = re.sub(r"\s*\(.*\)$", "", name, flags=re.DOTALL)
    name = re.sub(r"[\s-]+", "_", name)
    if home is None or not re.fullmatch(r"\w+", name):
        return None
    resolver = Resolver(Finder((), installed_folders()))
    wishes = [_NAMES.get(name.lower(), name), *(_as_function(name) if path[-1] == "loss" else [])]
    for entry in (wish if ":" in wish else f"{home}:{wish}" for wish in wishes):
        try:
            if isinstance(resolver.entry(entry), Definition):
                return entry
        except NotInstalledError:
            return entry
        except CannotTellError:
            if path[-1] == "loss":  # torch makes some of its functions by calls
                return entry
        except UnresolvedError:
            continue
    if is_exact:
        return None
    names = _names_in(resolver, home)
    if path[-1] == "loss":
        names = [name for name in names if "loss" in name or "entropy" in name]
    small = {name.lower(): name for name in names}
    near = nearest(wishes[0].lower().replace("_torch", "").replace("_", ""), small)
    return f"{home}:{small[near[0]]}" if near else None


def _names_in(resolver: Resolver, home: str) -> list[str]:
    try:
        resolver.entry(f"{home}:__no_such_name__")
    except NoAttributeError as error:
        return error.beside
    except UnresolvedError:
        pass
    return []


def _as_function(name: str) -> list[str]:
    """Return possible names of a loss's function: cross_entropy for CrossEntropyLoss, mse_loss for MSELoss."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()
    return [words.removesuffix("_loss"), words, f"{words}_loss"]
