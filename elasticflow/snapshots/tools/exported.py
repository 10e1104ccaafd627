"""The exported part of a snapshot: its value, and the names of its parameters."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from elasticflow.errors import ExportError
from elasticflow.snapshots.format.manifest import DamagedSnapshotError
from elasticflow.snapshots.format.state_json import PARAMETERS, decode
from elasticflow.snapshots.read import verify

if TYPE_CHECKING:
    from collections.abc import Callable

    from elasticflow.snapshots.format.manifest import Manifest
    from elasticflow.snapshots.store.catalog import Catalog

Part = Literal["model", "ema", "optimizer", "all"]

_ONE_OF_SEVERAL = "optimizer."
# torch.optim.swa_utils.AveragedModel puts this before each name.
_AVERAGED = "module."


@dataclass(eq=False)
class Export:
    """A choice of what to export.

    Attributes:
        progress: Called with the bytes read so far.
    """

    catalog: Catalog
    manifest: Manifest
    part: Part
    progress: Callable[[int], None] | None = None

    def value(self) -> Any:
        """Return the part as its `state_dict()` was, each tensor a Ref: model and EMA under the model's own names.

        Raises:
            ExportError: the snapshot has no such part.
        """
        state = self._state
        if self.part == "all":
            parts = {name: decode(value) for name, value in state["state"].items() if name != PARAMETERS}
            return {**parts, "position": state["position"]}
        if self.part == "optimizer" and (several := self._optimizers(state["state"])):
            return several
        if self.part not in state["state"]:
            there = ", ".join(name for name in state["state"] if name != PARAMETERS)
            raise ExportError(f"snapshot {self.manifest.name} has no {self.part}", f"it has {there}")
        found = decode(state["state"][self.part])
        if self.part != "ema":
            return found
        return {k.removeprefix(_AVERAGED): v for k, v in found.items() if k.startswith(_AVERAGED)}

    @staticmethod
    def _optimizers(parts: dict[str, Any]) -> dict[str, Any]:
        """Return the state of each of several optimizers, by its own name; empty where there is one."""
        return {
            name.removeprefix(_ONE_OF_SEVERAL): decode(value)
            for name, value in parts.items()
            if name.startswith(_ONE_OF_SEVERAL)
        }

    def parameter_names(self) -> dict[str, list[list[str | None]]]:
        """Return, for each optimizer's part, the model's names of each group's parameters; empty if nothing tells them."""
        found = self._state["state"].get(PARAMETERS)
        if found is None:
            return {}
        by_part = found if isinstance(found, dict) else {"optimizer": found}
        return {
            part: [[None if n is None else str(n).removeprefix("model/") for n in group] for group in groups]
            for part, groups in by_part.items()
        }

    @cached_property
    def _state(self) -> dict[str, Any]:
        try:
            return verify.read_state(self.catalog, self.manifest)
        except DamagedSnapshotError as error:
            raise DamagedSnapshotError(
                f"snapshot {self.manifest.name} is damaged: {error.message}",
                "export another: elasticflow snapshots list",
            ) from None


def measured_part(catalog: Catalog, manifest: Manifest) -> Literal["model", "ema"]:
    """Return which weights of the snapshot its run's evaluations measure: their average, or the model's own.

    Raises:
        DamagedSnapshotError: the snapshot is not what was written.
        SnapshotError: it cannot be read.
    """
    parts = verify.read_state(catalog, manifest)["state"]
    evaluation = decode(parts["evaluation"]) if "evaluation" in parts else {}
    return "ema" if evaluation.get("weights") == "ema" and "ema" in parts else "model"
