"""Weights and state of a snapshot in the formats of others, every byte verified on its way (floor 1).

A target is whole or absent: it is written under a hidden name beside, and renamed. Nothing is overwritten unless that
was asked for; then old and new change places in one act.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from elasticflow.errors import ExportError
from elasticflow.snapshots import placing, reader
from elasticflow.snapshots.manifest import DamagedSnapshotError
from elasticflow.snapshots.state_values import PARAMETERS, decode

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from elasticflow.snapshots.catalog import Catalog
    from elasticflow.snapshots.manifest import Manifest

Format = Literal["safetensors", "torch", "dcp"]
Part = Literal["model", "ema", "optimizer", "all"]

_DCP_MARK = ".metadata"  # what torch.distributed.checkpoint writes last
_ONE_OF_SEVERAL = "optimizer."
_AVERAGED = "module."  # torch.optim.swa_utils.AveragedModel's own prefix


@dataclass(eq=False)
class Export:
    """What is exported.

    Attributes:
        catalog: Where the snapshot is.
        manifest: The snapshot.
        part: What of it.
        progress: Called with the bytes read so far.
    """

    catalog: Catalog
    manifest: Manifest
    part: Part
    progress: Callable[[int], None] | None = None

    def write(self, form: Format, path: Path, *, replaces: bool = False) -> int:
        """Write the part to *path* and return its tensors' number.

        `safetensors` needs no torch; the others do.

        Raises:
            ExportError: something is at *path*, the part is not in the snapshot or not of that format's kind, or
                *path* cannot be written. Nothing is left behind.
            DamagedSnapshotError: the snapshot is not what was written.
            SnapshotError: it cannot be read.
        """
        _check_target(path, form, replaces=replaces)
        temporary = placing.temporary_beside(path)
        try:
            count = self._write(form, temporary)
            placing.put(temporary, path, replaces=replaces)
        except FileExistsError:
            raise _taken(path, "give another place (-o PATH), or replace it: --force") from None
        except OSError as error:
            raise ExportError(
                f"{path} cannot be written: {error.strerror or error}", "give another place: -o PATH"
            ) from error
        finally:
            placing.remove(temporary)
        return count

    def _write(self, form: Format, temporary: Path) -> int:
        if form == "safetensors":
            from elasticflow.snapshots.export_safetensors import write

            return write(self, temporary)
        from elasticflow.snapshots import export_torch

        return (
            export_torch.write(self, temporary)
            if form == "torch"
            else export_torch.write_dcp(self, temporary)
        )

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
            return reader.read_state(self.catalog, self.manifest)
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
    parts = reader.read_state(catalog, manifest)["state"]
    evaluation = decode(parts["evaluation"]) if "evaluation" in parts else {}
    return "ema" if evaluation.get("weights") == "ema" and "ema" in parts else "model"


def _check_target(path: Path, form: Format, *, replaces: bool) -> None:
    if not os.path.lexists(path):
        return
    if not replaces:
        raise _taken(path, "give another place (-o PATH), or replace it: --force")
    # Replaced is only what an export could have made: never a folder of the user's own.
    is_ours = (path / _DCP_MARK).is_file() if form == "dcp" else path.is_file()
    if not is_ours:
        kind = "DCP folder" if form == "dcp" else "file"
        raise _taken(path, f"it is no {kind}, so it is not replaced; give another place: -o PATH")


def _taken(path: Path, remedy: str) -> ExportError:
    return ExportError(f"{path} exists", remedy)
