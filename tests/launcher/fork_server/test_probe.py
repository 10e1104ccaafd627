"""Devices are counted, and models traced, without opening their driver in the process that forks workers."""

from __future__ import annotations

import json
import os
import textwrap
from typing import TYPE_CHECKING, Any

import pytest

from elasticflow.launcher.fork_server.probe import Probe, ProbeAnswer
from elasticflow.launcher.fork_server.protocol import TorchrunOptions
from elasticflow.protocol.worker_environment import COMPILER_CACHE

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.forked import ForkedPrograms

pytestmark = pytest.mark.usefixtures("real_processes")

NODES = ("--nnodes=1:2", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0")


PROGRAM = """
import json
import torch
from elasticflow.launcher.fork_server import preload
from tests.launcher.fork_server.pretended_driver import pretend
driver = pretend(by_nvml={by_nvml})
{code}
print(json.dumps(said))
"""


@pytest.fixture
def with_driver(forked: ForkedPrograms, tmp_path: Path) -> Callable[..., Any]:
    """Return a call that runs code in a process that is warm and has one pretended GPU; it returns the code's `said`."""

    def run(code: str, *, by_nvml: bool = True) -> Any:
        program = tmp_path / "program.py"
        program.write_text(PROGRAM.format(by_nvml=by_nvml, code=textwrap.dedent(code)))
        variables = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1", COMPILER_CACHE: str(tmp_path)}
        done = forked.start(program, environment={**os.environ, **variables})
        assert done.wait(100) == 0, done.stderr.read_text()
        assert "Traceback" not in done.stderr.read_text()
        return json.loads(done.stdout.read_text().splitlines()[-1])

    return run


@pytest.mark.parametrize("refusal", ["", "ValueError: Unsupported nproc_per_node value: many"])
def test_a_child_of_the_server_reads_the_arguments(refusal: str) -> None:
    """It is gone once it has answered."""
    probe = Probe([*NODES, f"--nproc-per-node={'many' if refusal else 2}", "train.py"])
    answer = probe.answer()

    assert (None if refusal else TorchrunOptions(nproc=2)) == answer.options
    assert answer.refusal.startswith(refusal)
    with pytest.raises(ProcessLookupError):
        os.kill(probe._pid, 0)


def test_a_probe_that_was_killed_counts_as_a_machine_with_gpus() -> None:
    """A driver may end the process that asks it; the server then takes every precaution."""
    for arguments, refusal in (((), ""), (("train.py",), "their reader was killed")):
        probe = Probe.__new__(Probe)
        read, write = os.pipe()
        os.close(write)
        probe._has_arguments, probe._answer, probe._pid = bool(arguments), read, os.fork() or os._exit(9)
        assert ProbeAnswer(has_gpu=True, refusal=refusal) == probe.answer()


@pytest.mark.parametrize("by_nvml", [True, False])
def test_devices_that_only_the_driver_counts_are_counted_in_the_child(
    with_driver: Callable[..., Any], *, by_nvml: bool
) -> None:
    """MIG devices, AMD's without amdsmi, no libnvidia-ml: the server stays fit to fork."""
    said = with_driver(
        """
        from elasticflow.launcher.fork_server.probe import Probe
        answer = Probe(["--nnodes=1", "--nproc-per-node=gpu", "train.py"]).answer()
        said = [answer.has_gpu, answer.options.nproc, driver.calls, preload.unsafe_to_fork(has_gpu=True)]
        """,
        by_nvml=by_nvml,
    )
    assert [True, 1, [], None] == said


@pytest.mark.parametrize("by_nvml", [True, False])
def test_the_compiler_is_warmed_up_without_a_call_to_the_driver(
    with_driver: Callable[..., Any], *, by_nvml: bool
) -> None:
    """A trace asks for the GPU's random state and for what Triton can do there; and no answer is remembered."""
    said = with_driver(
        """
        from torch._dynamo import device_interface
        from torch._dynamo.utils import counters
        from torch.utils import _triton
        preload.warm_up_compiler(has_gpu=True)
        calls = list(driver.calls)
        import torch._dynamo.trace_rules as rules
        from torch._dynamo.variables.torch import TorchInGraphFunctionVariable
        traced = TorchInGraphFunctionVariable._get_handlers.cache_info().currsize
        asked = [name for name, f in vars(_triton).items() if name != "has_triton_package"
                 and hasattr(f, "cache_info") and f.cache_info().currsize]
        devices = [name for name, _ in device_interface.get_registered_device_interfaces()]
        said = [calls, traced, asked, "cuda:0" in devices, torch.cuda.is_available(), torch.cuda.device_count()]
        """,
        by_nvml=by_nvml,
    )
    assert [[], 1, [], True, True, 1] == said


def test_a_module_that_torch_imports_while_gpus_are_hidden_is_told_the_truth(
    with_driver: Callable[..., Any],
) -> None:
    """Modules of torch choose at import what they offer for a device (`torch/_inductor/lowering.py`, 2.14)."""
    said = with_driver(
        """
        from elasticflow.runtime.process import torch_private
        code = compile("ANSWER = torch.cuda._is_compiled()", "lowering.py", "exec")
        said = []
        for name in ("torch._inductor.new", "mine"):
            module = {"__name__": name, "torch": torch}
            with torch_private._accelerators_hidden():
                exec(code, module)
            said.append(module["ANSWER"])
        """
    )
    assert [True, False] == said


def test_a_look_for_gpus_costs_the_fork_only_where_the_driver_was_opened(
    with_driver: Callable[..., Any], tmp_path: Path
) -> None:
    """`torch.cuda.is_available()` at import is the most usual first line of a training script."""
    (tmp_path / "looks.py").write_text(
        "import torch\nDEVICE = 'cuda' if torch.cuda.is_available() else 'cpu'\n"
    )
    (tmp_path / "uses.py").write_text("import torch\ntorch.cuda._lazy_init()\n")
    code = f"""
        import sys
        sys.path.insert(0, {str(tmp_path)!r})
        said = [dict(preload.preload([name], [{str(tmp_path)!r}], has_gpu=has_gpu))
                for name, has_gpu in (("looks", has_gpu), ("uses", True))]
    """
    refused = "touches the accelerator at import: every worker is started anew instead of forked"
    looks, uses = with_driver("has_gpu = True\n" + textwrap.dedent(code))
    assert ({}, {"uses": refused}) == (looks, uses)
    looks, _ = with_driver("has_gpu = True\n" + textwrap.dedent(code), by_nvml=False)
    assert {"looks": refused} == looks
    # A CUDA build without any driver marks its children too, which have no GPU to miss.
    looks, _ = with_driver("has_gpu = False\n" + textwrap.dedent(code), by_nvml=False)
    assert {} == looks


@pytest.mark.parametrize(
    ("device", "is_open"),
    [("/dev/nvidiactl", False), ("/dev/nvidia0", False), ("/dev/nvidia-uvm", True), ("/dev/kfd", True)],
)
def test_a_driver_that_another_library_opened_costs_the_fork(
    monkeypatch: pytest.MonkeyPatch, device: str, *, is_open: bool
) -> None:
    """NVML opens the first two of NVIDIA's, and children work; CUDA opens the third, whoever calls it."""
    from elasticflow.launcher.fork_server import preload

    monkeypatch.setattr(preload, "_open_files", lambda: ["/dev/null", device])
    assert is_open == (preload.open_accelerator(has_gpu=False) is not None)
