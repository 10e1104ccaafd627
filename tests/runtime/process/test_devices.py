"""The device that a worker trains on, without any accelerator: torch's answers are replaced."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import torch

from elasticflow.errors import DeviceError
from elasticflow.runtime.process import devices, process_group
from elasticflow.runtime.process.identity import Identity
from elasticflow.runtime.process.torch_private import HashStore

if TYPE_CHECKING:
    from pathlib import Path

CUDA = torch.device("cuda", 0)
CPU = torch.device("cpu")


class Machine:
    """What torch says of a machine with *count* devices of type *kind*, and the devices that were selected."""

    def __init__(self, kind: str, count: int) -> None:
        self.kind, self.count = kind, count
        self.selected: list[torch.device] = []
        self.is_hidden_late = False

    def current_accelerator(self, check_available: bool = False) -> torch.device | None:
        """Return the type, unless the devices are hidden, or there are none."""
        is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES") == "" and not self.is_hidden_late
        return None if check_available and (self.count == 0 or is_hidden) else torch.device(self.kind)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A machine with two GPUs."""
    fake = Machine("cuda", 2)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", fake.current_accelerator)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: fake.count)
    monkeypatch.setattr(torch.accelerator, "set_device_index", fake.selected.append)
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "0,1")
    return fake


def _identity(folder: Path, *, local: int = 0, workers: int = 1, **variables: str) -> Identity:
    given = {"RANK": local, "LOCAL_RANK": local, "WORLD_SIZE": workers, "LOCAL_WORLD_SIZE": workers}
    environ = {
        "ELASTICFLOW_GENERATION": "1",
        "ELASTICFLOW_NODE": "n7",
        **{k: str(v) for k, v in given.items()},
    }
    return Identity.read({**environ, **variables}, folder)


def test_each_worker_takes_the_device_of_its_local_rank(machine: Machine, tmp_path: Path) -> None:
    """Torch has selected it, so that `torch.zeros(1, device="cuda")` of the job's code is there, too."""
    chosen = [devices.choose_device(_identity(tmp_path, local=rank, workers=2)) for rank in range(2)]
    assert chosen == [torch.device("cuda", 0), torch.device("cuda", 1)] == machine.selected


def test_a_machine_without_accelerators_trains_on_the_cpu(machine: Machine, tmp_path: Path) -> None:
    """Nothing is selected or hidden."""
    machine.count = 0
    assert devices.choose_device(_identity(tmp_path, workers=8)) == CPU
    assert machine.selected == []
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1"


@pytest.mark.parametrize("wanted", ["auto", "cuda"])
def test_fewer_devices_than_workers_are_refused(machine: Machine, tmp_path: Path, wanted: str) -> None:
    """A GPU that fell off the bus must not turn a run into one on the CPU; the message names node, both numbers and the key."""
    identity = _identity(tmp_path, local=0, workers=8)
    with pytest.raises(
        DeviceError, match=r'node n7: 8 workers, and torch sees 2 devices of type "cuda"'
    ) as refused:
        devices.choose_device(identity, wanted)
    assert "--set nodes.nproc_per_node=NUMBER" in str(refused.value.remedy)
    assert "--set nodes.device=cpu" in str(refused.value.remedy)
    assert machine.selected == []


def test_a_slurm_task_with_a_device_of_its_own(machine: Machine, tmp_path: Path) -> None:
    """`srun --gpus-per-task=1` gives the device number 0 in each task; under torchrun's agent all workers see the same one."""
    machine.count = 1
    task = {"RANK": "3", "LOCAL_RANK": "3", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "SLURM_LOCALID": "3"}
    assert devices.choose_device(Identity.read(task, tmp_path)) == CUDA
    with pytest.raises(DeviceError, match="4 workers, and torch sees 1 device "):
        devices.choose_device(Identity.read({**task, "TORCHELASTIC_RUN_ID": "x"}, tmp_path))
    with pytest.raises(DeviceError, match="4 workers"):
        devices.choose_device(Identity.read({**task, "SLURM_LOCALID": "0"}, tmp_path))


def test_shared_device(machine: Machine, tmp_path: Path) -> None:
    """For tests: all workers have device 0, and gloo exchanges its tensors."""
    machine.count = 1
    identity = _identity(tmp_path, local=1, workers=2, ELASTICFLOW_SHARE_DEVICE="1")
    assert devices.choose_device(identity) == CUDA
    assert process_group._backend(identity, CUDA) == "cpu:gloo,cuda:gloo"


@pytest.mark.parametrize(
    ("device", "backend"), [("cpu", "gloo"), ("cuda:0", "cpu:gloo,cuda:nccl"), ("xpu:0", "cpu:gloo,xpu:xccl")]
)
def test_backend_of_a_device(tmp_path: Path, device: str, backend: str) -> None:
    """Votes and texts travel as CPU tensors, gradients by the backend that torch has for the device."""
    assert process_group._backend(_identity(tmp_path), torch.device(device)) == backend


@pytest.mark.parametrize("way", ["argument", "variable"])
def test_the_cpu_by_name_hides_the_accelerators(machine: Machine, tmp_path: Path, way: str) -> None:
    """Else each worker's `Optimizer.step` would open a context on GPU 0, which takes its memory."""
    asked = "cpu" if way == "variable" else ""
    identity = _identity(tmp_path, workers=2, ELASTICFLOW_DEVICE=asked)
    assert devices.choose_device(identity, "auto" if asked else "cpu") == CPU
    assert torch.accelerator.current_accelerator(check_available=True) is None
    assert machine.selected == []


def test_the_cpu_by_name_is_refused_where_no_variable_hides_the_devices(
    machine: Machine, tmp_path: Path
) -> None:
    """XPU's are named; no worker takes their memory in silence."""
    machine.kind, machine.is_hidden_late = "xpu", True
    with pytest.raises(DeviceError, match='torch sees devices of type "xpu", which elasticflow cannot hide'):
        devices.choose_device(_identity(tmp_path), "cpu")


def test_apple_s_gpu_does_not_count(machine: Machine, tmp_path: Path) -> None:
    """It serves no group of workers: nothing is to be hidden, and none is checked."""
    machine.kind, machine.is_hidden_late = "mps", True
    assert (None, 0) == devices.accelerators()
    assert devices.choose_device(_identity(tmp_path), "cpu") == CPU


def test_the_cpu_by_name_is_refused_where_devices_cannot_be_hidden(machine: Machine, tmp_path: Path) -> None:
    """The driver reads the variable once."""
    machine.is_hidden_late = True
    with pytest.raises(DeviceError, match="asked for GPUs before it joined") as refused:
        devices.choose_device(_identity(tmp_path), "cpu")
    assert 'CUDA_VISIBLE_DEVICES = ""' in str(refused.value.remedy)


@pytest.mark.parametrize(("wanted", "count"), [("xpu", 2), ("cuda", 0)])
def test_a_type_that_is_not_there_is_refused(
    machine: Machine, tmp_path: Path, wanted: str, count: int
) -> None:
    """`nodes.device = "cuda"` never trains on a CPU."""
    machine.count = count
    with pytest.raises(
        DeviceError,
        match=f'node n7: nodes.device .without a job file, ELASTICFLOW_DEVICE. is "{wanted}", and torch sees no such device',
    ):
        devices.choose_device(_identity(tmp_path), wanted)


def test_an_accelerator_whose_generator_cannot_be_seeded_is_not_taken(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Apple's GPU: as before, the CPU trains; asked for by name it is refused."""
    machine.kind = "mps"
    monkeypatch.setattr(torch, "get_device_module", lambda _: SimpleNamespace())
    assert devices.choose_device(_identity(tmp_path)) == CPU
    with pytest.raises(DeviceError, match=r'is "mps"'):
        devices.choose_device(_identity(tmp_path), "mps")


def _meet(tmp_path: Path, kinds: list[str]) -> list[str]:
    """Return each rank's error when ranks with devices of these types meet; "" for none."""
    store = HashStore()

    def rank(number: int) -> str:
        identity = _identity(tmp_path, local=number, workers=len(kinds), ELASTICFLOW_NODE=f"n{number}")
        try:
            devices.require_one_type(identity, store, torch.device(kinds[number]), timedelta(seconds=20))
        except DeviceError as error:
            ended.append((number, type(error)))
            return error.message
        return ""

    ended: list[tuple[int, type[DeviceError]]] = []
    with ThreadPoolExecutor(len(kinds)) as ranks:
        told = list(ranks.map(rank, range(len(kinds))))
    # The wrong nodes' ranks first: their agent is the first to tell of a failure, and that has the others killed.
    wrong = [number for number, kind in enumerate(kinds) if kind != kinds[0]]
    assert set(wrong) == {number for number, _ in ended[: len(wrong)]}
    assert all((kind is DeviceError) == (number in wrong) for number, kind in ended)
    return told


def test_nodes_of_several_types_are_refused_on_every_rank(tmp_path: Path) -> None:
    """Before a group is formed, which would have other backends on some ranks."""
    assert _meet(tmp_path, ["cuda", "cuda", "cuda"]) == ["", "", ""]
    text = 'the workers\' devices are of several types: "cuda" on rank 0 (node n0), "cpu" on rank 2 (node n2)'
    assert _meet(tmp_path, ["cuda", "cuda", "cpu", "cpu"]) == [text] * 4


def test_a_launch_keeps_the_device_type_that_it_began_on() -> None:
    """A driver that is gone after a restart, before the first snapshot; the keys are those of the whole launch."""
    keys = HashStore()
    devices.require_type_of_launch(keys, CUDA)
    devices.require_type_of_launch(keys, CUDA)
    with pytest.raises(
        DeviceError, match=r'the launch began on a device of type "cuda", .* would train on "cpu"'
    ):
        devices.require_type_of_launch(keys, CPU)


@pytest.mark.parametrize(
    ("versions", "is_refused"),
    [
        ({"torch": "2.13", "gpu": "NVIDIA H100"}, True),
        ({"device": "xpu", "gpu": "Max"}, True),
        ({"torch": "2.13"}, False),
        ({}, False),
    ],
)
def test_a_run_goes_on_with_the_device_type_of_its_snapshot(
    versions: dict[str, str], is_refused: bool
) -> None:
    """Snapshots of older versions tell a GPU by its name; asked for by name, another type is right."""
    if is_refused:
        with pytest.raises(
            DeviceError, match=r'the snapshot was taken on a device of type .* "cpu"'
        ) as refused:
            devices.require_type_of_snapshot(CPU, "auto", versions)
        assert "--set nodes.device=cpu" in str(refused.value.remedy)
    else:
        devices.require_type_of_snapshot(CPU, "auto", versions)
    devices.require_type_of_snapshot(CPU, "cpu", versions)
