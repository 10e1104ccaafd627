"""All that continues a job, captured as tensors and JSON and applied to live objects (floor R)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from elasticflow import faults
from elasticflow.errors import StateError
from elasticflow.runtime import tree

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.amp import GradScaler
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler
    from torch.optim.swa_utils import AveragedModel

    from elasticflow.runtime.evaluate import Evaluation


@dataclass(frozen=True)
class Captured:
    """State at one position; the tensors are the live ones.

    Attributes:
        tree: JSON, with references to tensors.
        tensors: By key, sorted; the same keys and shapes on every rank.
        aliases: Tied tensors: key to the key that is stored.
        memory_formats: How tensors that are not contiguous lie in memory.
    """

    tree: dict[str, Any]
    tensors: dict[str, Tensor]
    aliases: dict[str, str]
    memory_formats: dict[str, str]


class State:
    """What a snapshot holds besides the position: any of a training job's stateful objects.

    Args:
        model: The bare model.
        optimizer: The optimizer.
        scheduler: The learning-rate schedule.
        scaler: The gradient scaler of fp16.
        ema: The averaged model.
        evaluation: Keeps the best metric.
    """

    def __init__(
        self,
        *,
        model: nn.Module,
        optimizer: Optimizer,
        scheduler: LRScheduler | None = None,
        scaler: GradScaler | None = None,
        ema: AveragedModel | None = None,
        evaluation: Evaluation | None = None,
    ) -> None:
        self.model, self.ema, self.evaluation = model, ema, evaluation
        parts: dict[str, Any] = {
            "model": model,
            "optimizer": optimizer,
            "scheduler": scheduler,
            "scaler": scaler,
            "ema": ema,
            "evaluation": evaluation,
        }
        self._parts = {name: part for name, part in parts.items() if part is not None}

    def capture(self) -> Captured:
        """Return the state now; nothing is copied, so read it before the next step.

        Raises:
            StateError: a part holds something that neither JSON nor safetensors can express; named.
        """
        faults.reach("snapshot.before_capture")
        encoder = tree.Encoder()
        content = {name: encoder.encode(part.state_dict(), name) for name, part in self._parts.items()}
        encoder.finish()
        faults.reach("snapshot.after_capture")
        tensors = {key: encoder.tensors[key] for key in sorted(encoder.tensors)}
        return Captured(content, tensors, encoder.aliases, encoder.memory_formats)

    def apply(
        self, content: Mapping[str, Any], tensors: Mapping[str, Tensor], memory_formats: Mapping[str, str]
    ) -> None:
        """Make the live objects what was captured; existing tensors keep their places in memory.

        Raises:
            StateError: the snapshot is of another model, optimizer or set of parts; named. Nothing was changed then,
                unless the optimizer is what differs.
        """
        faults.reach("restore.before_apply")
        different = sorted(set(self._parts) ^ set(content))
        if different:
            where = "only in the job" if different[0] in self._parts else "only in the snapshot"
            raise StateError(f"the snapshot does not fit the job: `{different[0]}` is {where}")
        # Loading a module copies into its own tensors; an optimizer keeps those it is given.
        view, own = (tree.Decoder(tensors, memory_formats, copies=copies) for copies in (False, True))
        decoded = {
            name: (view if name in ("model", "ema") else own).decode(content[name]) for name in self._parts
        }
        for name in ("model", "ema"):
            if name in self._parts:
                check_fit(self._parts[name], decoded[name], name)
        for name, part in self._parts.items():
            faults.reach("restore.mid_apply")
            try:
                part.load_state_dict(decoded[name])
            except (RuntimeError, ValueError, KeyError) as error:
                raise StateError(f"the snapshot does not fit the job's {name}: {error}") from error


def check_fit(model: nn.Module, found: Mapping[str, Any], name: str) -> None:
    """Check names, shapes and dtypes of *found* against the model's.

    Raises:
        StateError: the first difference.
    """
    own = model.state_dict()
    for key in sorted(own.keys() | found.keys()):
        if key not in found:
            raise StateError(f"the snapshot does not fit the job's {name}: it has no {key}")
        if key not in own:
            raise StateError(f"the snapshot does not fit the job's {name}: the {name} has no {key}")
        mine, its = own[key], found[key]
        if isinstance(mine, Tensor) and isinstance(its, Tensor):
            if mine.shape != its.shape:
                shapes = f"{tuple(its.shape)} in the snapshot, {tuple(mine.shape)} in the job"
                raise StateError(f"the snapshot does not fit the job's {name}: {key} has shape {shapes}")
            if mine.dtype != its.dtype:
                dtypes = f"{its.dtype} in the snapshot, {mine.dtype} in the job"
                raise StateError(f"the snapshot does not fit the job's {name}: {key} is {dtypes}")
