"""Whether all ranks have the same state to store: a snapshot holds one."""

from __future__ import annotations

import json
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from elasticflow.errors import RanksDifferError
from elasticflow.runtime.replica_checks.checksums import sums_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from elasticflow.runtime.process.context import Worker
    from elasticflow.runtime.state.state import Captured

_OWN = "include."
_NO_ANSWER = -(2**60)  # less than any digest, and than any negative one
_SHORT = 100  # characters of a value that a message shows


class Alike:
    """Compares what the ranks would store: all JSON, names and forms of all tensors, contents of the job's own.

    A question is asked at one step and settled at a later one, so that no rank waits for another.

    Args:
        me: This worker.
    """

    def __init__(self, me: Worker) -> None:
        self._me = me
        self._question: tuple[torch.Tensor, dist.Work | None] | None = None
        self._known: dict[str, tuple[Any, str]] = {}

    @property
    def is_asking(self) -> bool:
        """True between `ask` and `settle`."""
        return self._question is not None

    def ask(self, captured: Captured) -> None:
        """Tell the others a digest of *captured*; does not wait. Every rank.

        A rank whose schedule was cut short by StopTraining has none that counts: it will train no more.
        """
        if self._me.world_size == 1:
            return
        if self._me.vote.stop_wanted is None:
            number = self._number(captured)
            digest = torch.tensor([number, -number])
        else:
            digest = torch.tensor([_NO_ANSWER, _NO_ANSWER])
        self._question = digest, dist.all_reduce(digest, dist.ReduceOp.MAX, async_op=True)

    def settle(self, capture: Callable[[], Captured]) -> None:
        """Return if the digests last told were the same. Every rank.

        Args:
            capture: Reads the state now, to find out what differs.

        Raises:
            RanksDifferError: they were not; names the first difference, on every rank.
        """
        if self._question is None:
            return
        digest, work = self._question
        self._question = None
        if work is not None:
            work.wait()
        most, least = digest.tolist()
        if most not in (-least, _NO_ANSWER):
            raise self._difference(capture())

    def _number(self, captured: Captured) -> int:
        texts = [
            self._digest("", captured.tree, depth=2),
            self._once("forms", captured.tensors, lambda: sorted(_forms(captured).items())),
            json.dumps(_sums(captured)),
        ]
        return int(_hash(" ".join(texts)), 16)

    def _digest(self, path: str, value: Any, depth: int) -> str:
        if depth and isinstance(value, dict):
            texts = [f"{k}: {self._digest(f'{path}/{k}', v, depth - 1)}" for k, v in value.items()]
            return _hash("\n".join(texts))
        return self._once(path, value, lambda: value)

    def _once(self, path: str, value: Any, content: Callable[[], Any]) -> str:
        """Return a digest; of what is the same object as before (most of a state is) without reading it."""
        known = self._known.get(path)
        if known is None or known[0] is not value:
            known = self._known[path] = value, _hash(json.dumps(content()))
        return known[1]

    def _difference(self, captured: Captured) -> RanksDifferError:
        mine = {**dict(_leaves(captured.tree, "")), **_forms(captured)}
        mine |= {key: f"{mine[key]}, its bits together {bits}" for key, bits in _sums(captured).items()}
        ranks = [json.loads(text) for text in self._me.gather_text(json.dumps(mine))]
        for path in sorted({path for leaves in ranks for path in leaves}):
            for rank, leaves in enumerate(ranks):
                if leaves.get(path) != ranks[0].get(path):
                    return RanksDifferError(
                        f"a snapshot holds one state, and rank {rank}'s {path} is {_shown(leaves.get(path))}, "
                        f"rank 0's {_shown(ranks[0].get(path))}",
                        "derive it from what every rank sees, or send every rank the same (torch.distributed)",
                    )
        return RanksDifferError("a snapshot holds one state, and the ranks had different ones a step ago")


def _forms(captured: Captured) -> dict[str, str]:
    """Return what tensors are besides their values."""
    found = {
        key: f"a tensor of {tensor.dtype}, {tuple(tensor.shape)}" for key, tensor in captured.tensors.items()
    }
    for name, facts in (("tied to", captured.aliases), ("laid out as", captured.memory_formats)):
        for key, fact in facts.items():
            found[key] = f"{found.get(key, 'a tensor')}, {name} {fact}"
    return found


def _sums(captured: Captured) -> dict[str, str]:
    """Return what the bits of the tensors of the job's own objects give together."""
    own = {key: tensor for key, tensor in captured.tensors.items() if key.startswith(_OWN)}
    return {key: f"{number & (2**64 - 1):x}" for key, number in sums_of(own).items()}


def _hash(text: str) -> str:
    return blake2b(text.encode(), digest_size=7).hexdigest()


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
