"""Checks that all ranks have the same state to store: a snapshot holds one copy."""

from __future__ import annotations

import json
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from elasticflow.errors import RanksDifferError
from elasticflow.runtime.process.checksums import sums_of
from elasticflow.runtime.process.process_group import DigestComparison

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from elasticflow.runtime.process.context import Worker
    from elasticflow.runtime.state.state import Captured

_OWN = "include."
_REMEDY = "derive it from what every rank sees, or send every rank the same (torch.distributed)"
_OF_OPTIMIZERS = "where an optimizer shares out its work among the ranks, as Muon may, let each rank update the state of all parameters"
# Characters of a value that a message shows.
_SHORT = 100


class CaptureCheck:
    """Compares the state that the ranks would store: all JSON, names and forms of all tensors, contents of the job's own tensors.

    A comparison starts at one step and is finished at a later one, so that no rank waits for another.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._pending: DigestComparison | None = None
        self._known: dict[str, tuple[Any, str]] = {}

    @property
    def is_pending(self) -> bool:
        """True between `start` and `finish`."""
        return self._pending is not None

    def start(self, captured: Captured) -> None:
        """Send the other ranks a digest of *captured*; does not wait. Every rank.

        A rank whose schedule was cut short by StopTraining sends a digest that does not count: it will train no more.
        """
        if self._worker.world_size > 1:
            counts = self._worker.vote.stop_wanted is None
            self._pending = DigestComparison(self._text(captured) if counts else None)

    def finish(self, capture: Callable[[], Captured]) -> None:
        """Make sure that all ranks sent the same digest last, if any. Every rank.

        Raises:
            RanksDifferError: the digests differ; the message names the first difference, on every rank.
        """
        pending, self._pending = self._pending, None
        if pending is not None and not pending.are_equal():
            raise self._difference(capture())

    def _text(self, captured: Captured) -> str:
        texts = [
            self._digest("", captured.tree, depth=2),
            self._once("forms", captured.tensors, lambda: sorted(_forms(captured).items())),
            json.dumps(_sums(captured)),
        ]
        return " ".join(texts)

    def _digest(self, path: str, value: Any, depth: int) -> str:
        if depth and isinstance(value, dict):
            texts = [f"{k}: {self._digest(f'{path}/{k}', v, depth - 1)}" for k, v in value.items()]
            return _hash("\n".join(texts))
        return self._once(path, value, lambda: value)

    def _once(self, path: str, value: Any, content: Callable[[], Any]) -> str:
        """Return a digest of *content*, known from before if *value* is the same object, as in most of a state."""
        known = self._known.get(path)
        if known is None or known[0] is not value:
            known = self._known[path] = value, _hash(json.dumps(content()))
        return known[1]

    def _difference(self, captured: Captured) -> RanksDifferError:
        mine = {**dict(_leaves(captured.tree, "")), **_forms(captured)}
        mine |= {key: f"{mine[key]}, its bits together {bits}" for key, bits in _sums(captured).items()}
        ranks = [json.loads(text) for text in self._worker.gather_text(json.dumps(mine))]
        for path in sorted({path for leaves in ranks for path in leaves}):
            for rank, leaves in enumerate(ranks):
                if leaves.get(path) != ranks[0].get(path):
                    return RanksDifferError(
                        f"a snapshot holds one state, and rank {rank}'s {path} is {_shown(leaves.get(path))}, "
                        f"rank 0's {_shown(ranks[0].get(path))}",
                        _OF_OPTIMIZERS if path.startswith("optimizer") else _REMEDY,
                    )
        return RanksDifferError("a snapshot holds one state, and the ranks had different ones a step ago")


def _forms(captured: Captured) -> dict[str, str]:
    """Return the form of each tensor by key: its type, shape, ties and memory format."""
    forms = {}
    for key, tensor in captured.tensors.items():
        box = captured.boxes.get(key)
        shape = tuple(tensor.shape) if box is None else f"{box.shape} in {box.shards.degree} parts"
        forms[key] = f"a tensor of {tensor.dtype}, {shape}"
    for name, facts in (("tied to", captured.aliases), ("laid out as", captured.memory_formats)):
        for key, fact in facts.items():
            forms[key] = f"{forms.get(key, 'a tensor')}, {name} {fact}"
    return forms


def _sums(captured: Captured) -> dict[str, str]:
    """Return a sum over the bits of each tensor of the job's own objects, in hexadecimal; without the buffers of modules."""
    own = {
        key: tensor
        for key, tensor in captured.tensors.items()
        if key.startswith(_OWN) and key not in captured.boxes and key not in captured.buffers
    }
    return {key: f"{number & (2**64 - 1):x}" for key, number in sums_of(own).items()}


def _hash(text: str) -> str:
    # A name of a file that is no UTF-8 may be a key.
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=7).hexdigest()


def _leaves(value: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _leaves(item, f"{path}/{key}" if path else key)
    elif isinstance(value, list) and value:
        for number, item in enumerate(value):
            yield from _leaves(item, f"{path}/{number}")
    else:
        yield path, json.dumps(value)


def _shown(value: str | None) -> str:
    if value is None:
        return "not there"
    return value if len(value) <= _SHORT else f"{value[:_SHORT]}..."
