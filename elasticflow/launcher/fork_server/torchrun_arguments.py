"""A launch's arguments as torchrun's own parser reads them: it alone says what they mean."""

from __future__ import annotations

import contextlib
import io
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class TorchrunOptions:
    """The launch's arguments that an agent needs.

    Attributes:
        nproc: Workers of this node; `auto`, `gpu` and `cpu` are numbers by now.
        shown_stdouts: Local ranks whose standard output is shown beside being kept.
        shown_stderrs: Local ranks whose standard error is shown beside being kept.
        numa: How torch binds a worker to the cores near its GPU; empty if it does not.
    """

    nproc: int
    role: str = "default"
    shown_stdouts: tuple[int, ...] = ()
    shown_stderrs: tuple[int, ...] = ()
    numa: str = ""


class TorchrunRefusedError(RuntimeError):
    """torchrun does not take the launch's arguments; the message says why."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"torchrun refuses the launch's arguments: {reason}")
        self.reason = reason


def read(arguments: Sequence[str]) -> TorchrunOptions:
    """Return *arguments* as torchrun's own parser reads them; imports torch, and may touch the GPUs to count them.

    Raises:
        TorchrunRefusedError: torchrun refuses them.
    """
    from torch.distributed.elastic.multiprocessing import Std
    from torch.distributed.elastic.multiprocessing.api import to_map
    from torch.distributed.run import config_from_args, get_args_parser

    parser = get_args_parser()
    parser.prog = "torchrun"
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            parsed = parser.parse_args(arguments)
    except SystemExit:
        last = errors.getvalue().strip().rpartition("\n")[2]
        raise TorchrunRefusedError(last.removeprefix("torchrun: error: ")) from None
    # Logs go to the run folder; without a folder torch makes one for each agent and leaves it there (2.13).
    parsed.log_dir = os.devnull
    try:
        launch, _, _ = config_from_args(parsed)
    except Exception as error:
        raise TorchrunRefusedError(f"{type(error).__name__}: {error}") from error
    nproc, ranks = launch.nproc_per_node, parsed.local_ranks_filter
    filtered = {int(rank) for rank in ranks.split(",")} if ranks else set(range(nproc))
    tees = to_map(Std.from_str(parsed.tee), nproc)
    return TorchrunOptions(
        nproc=nproc,
        role=launch.role,
        shown_stdouts=tuple(rank for rank, tee in tees.items() if tee & Std.OUT and rank in filtered),
        shown_stderrs=tuple(rank for rank, tee in tees.items() if tee & Std.ERR and rank in filtered),
        numa="" if launch.numa_options is None else launch.numa_options.affinity_mode.value,
    )
