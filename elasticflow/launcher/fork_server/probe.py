"""A child of the fork server that asks torch what the server must not ask itself: devices, and the launch's arguments."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from elasticflow.launcher.fork_server.protocol import TorchrunOptions, TorchrunRefusedError
from elasticflow.protocol.json_codec import from_json, to_json
from elasticflow.system.processes import die_with_parent

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class ProbeAnswer:
    """The child's findings.

    Attributes:
        has_gpu: Torch can use an accelerator here. Also true if the child was killed: the fork server then takes the
            precautions of a machine with GPUs.
        options: The launch's arguments as torchrun parses them; None if there are none, or torchrun refuses them.
        refusal: Why torchrun refuses the arguments; empty if it does not.
    """

    has_gpu: bool
    options: TorchrunOptions | None = None
    refusal: str = ""


class Probe:
    """Asks in a child of its own, which reads *arguments* and counts devices while the server imports on.

    Counting devices may open their driver, and a process that has done so must not fork workers. With
    `PYTORCH_NVML_BASED_CUDA_CHECK` torch counts NVIDIA's GPUs by NVML, which is safe, but not MIG devices, and not
    where NVML's library is missing; it counts AMD's GPUs in a safe way only where amdsmi is installed.

    Source: torch/cuda/__init__.py, `device_count`, `_device_count_nvml` and `_device_count_amdsmi` (2.13, 2.14).
    """

    def __init__(self, arguments: Sequence[str]) -> None:
        self._has_arguments = bool(arguments)
        parent = os.getpid()
        self._answer, answer = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            die_with_parent(parent)
            _answer_and_end(arguments, answer)
        os.close(answer)

    def answer(self) -> ProbeAnswer:
        """Return the answer; the child is gone then."""
        with os.fdopen(self._answer) as pipe:
            text = pipe.read()
        os.waitpid(self._pid, 0)
        if text:
            return from_json(ProbeAnswer, json.loads(text))
        return ProbeAnswer(has_gpu=True, refusal="their reader was killed" if self._has_arguments else "")


def _answer_and_end(arguments: Sequence[str], descriptor: int) -> NoReturn:
    """Write the answer to *descriptor* and exit without unwinding into the server's frames."""
    try:
        options, refusal = None, ""
        try:
            options = read_arguments(arguments) if arguments else None
        except TorchrunRefusedError as error:
            refusal = error.reason
        with os.fdopen(descriptor, "w") as pipe:
            pipe.write(to_json(ProbeAnswer(_has_accelerator(), options, refusal)))
    except BaseException:  # noqa: BLE001  the last frame of a process: everything is shown, then it ends
        traceback.print_exc()
    finally:
        os._exit(0)


def _has_accelerator() -> bool:
    """Return whether torch, if it is imported, can use an accelerator that workers train on (`runtime/process/devices.py`)."""
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator is not None and hasattr(torch.get_device_module(accelerator), "default_generators")


def read_arguments(arguments: Sequence[str]) -> TorchrunOptions:
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
