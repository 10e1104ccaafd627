"""A child of the fork server that asks torch what the server must not ask itself: which devices there are."""

from __future__ import annotations

import json
import os
import sys
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from elasticflow.launcher.fork_server.torchrun_arguments import TorchrunOptions, TorchrunRefusedError, read
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
            options = read(arguments) if arguments else None
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
