"""The state that a script has restored: what the script changes of it before training continues."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from elasticflow.errors import StateError
from elasticflow.runtime.process import checksums
from elasticflow.runtime.snapshot.metadata import frozen

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from elasticflow.runtime.state.state import State


class RestoredState:
    """Remembers the restored state until training continues. Every rank.

    A loop that begins by a call of the run has the state put back then (`Snapshots.put_back`). In other loops, the first move
    of an optimizer is refused if the script has changed the model: until the pass began, or until that move where nothing
    tells when the pass began.

    Args:
        frozen_then: Names of the parameters that were frozen in the snapshot. None: it does not say.
        resting_then: Names of the modules that were in evaluation mode in the snapshot. None: it does not say.
    """

    def __init__(
        self,
        state: State,
        name: str,
        frozen_then: Collection[str] | None,
        resting_then: Collection[str] | None,
    ) -> None:
        self._state, self._name = state, name
        self._frozen, self._resting = frozen_then, resting_then
        self._marks: tuple[dict[str, Any], dict[str, int]] | None = self._marks_now()
        self._pass: tuple[Callable[[], bool], list[str]] | None = None
        for optimizer in state.optimizers.values():
            optimizer.register_step_pre_hook(self._require_unchanged)

    @property
    def is_remembered(self) -> bool:
        """True until `forget`, or the first move of an optimizer."""
        return self._marks is not None

    def forget(self) -> None:
        """Training continues: what the script changes from now on is its own."""
        self._marks = None

    def begin_pass(self, is_running: Callable[[], bool]) -> None:
        """Training continues by the pass of a loop, unless that loop is over: what the pass changes is its own."""
        if self._marks is not None:
            self._pass = is_running, self._model_changes(self._marks[1])

    def changed(self) -> list[str]:
        """Return the keys of tensors and the names of parts that are not as restored; empty if nothing is remembered."""
        if self._marks is None:
            return []
        pairs = zip(self._marks, self._marks_now(), strict=True)
        of_parts, of_tensors = (
            [key for key in {**before, **now} if before.get(key) != now.get(key)] for before, now in pairs
        )
        return [*of_tensors, *of_parts]

    def freeze_again(self) -> list[str]:
        """Freeze and unfreeze parameters as they were in the snapshot; return a name for each change."""
        differing = self._frozen_otherwise()
        for name, parameter in self._state.model.named_parameters():
            if name in differing:
                parameter.requires_grad_(not parameter.requires_grad)
        return _names_of(differing)

    def set_modes_again(self) -> None:
        """Put the model's modules into the modes that they had in the snapshot: the script may have changed them on its way."""
        if self._resting is not None:
            for name, module in self._state.model.named_modules():
                module.training = name not in self._resting

    def _require_unchanged(self, *_: object) -> None:
        marks, self._marks = self._marks, None
        if marks is None:
            return
        begun, self._pass = self._pass, None
        names = self._model_changes(marks[1])
        if begun is not None and begun[0]():
            names = [name for name in names if name in begun[1]]
        if names:
            raise StateError(
                f"{names[0]} is not as in snapshot {self._name}, which run.keep has loaded: the script changed it before an "
                "optimizer moved, and this loop has no call that puts it back",
                "change it before run.keep, or only if run.position.step == 0; for step in run.steps(...) says where the loop begins: what "
                "a pass changes is its own then, and without a kept loader what was changed before is put back",
            )

    def _model_changes(self, sums: Mapping[str, int]) -> list[str]:
        captured = self._state.capture()
        # Optimizers around another one, such as SAM's, note weights in their state before that one moves.
        of_model = {key: captured.tensors[key] for key in captured.stepped if key.startswith("model/")}
        now = checksums.sums_of(of_model)
        names = [key for key, value in now.items() if sums.get(key, value) != value]
        return names + _names_of(self._frozen_otherwise())

    def _frozen_otherwise(self) -> set[str]:
        """Return the names of parameters that are frozen and were not in the snapshot, or the reverse."""
        return set() if self._frozen is None else {*self._frozen} ^ {*frozen(self._state.model)}

    def _marks_now(self) -> tuple[dict[str, Any], dict[str, int]]:
        captured = self._state.capture()
        return json.loads(json.dumps(captured.tree)), checksums.sums_of(captured.tensors)


def _names_of(parameters: Collection[str]) -> list[str]:
    return [f"requires_grad of {name}" for name in sorted(parameters)]
