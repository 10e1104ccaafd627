"""Each name of torch_private.py, tried: a version of torch that behaves differently fails here."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import signal
import time
from multiprocessing import connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, get_worker_info

import elasticflow
from elasticflow.errors import COLLECTIVE_MISMATCH, TorchChangedError
from elasticflow.runtime.process import failure, random_streams, torch_private

if TYPE_CHECKING:
    from tests.forked import ForkedPrograms

PACKAGE = Path(elasticflow.__file__).parent
PROGRAM = Path(__file__).parents[1] / "programs" / "torch_words.py"


def test_a_name_that_is_gone_is_told_with_what_it_is_for() -> None:
    """In one line, with the versions that have it."""
    expected = (
        f"torch {torch.__version__} has no torch._gone, which elasticflow needs to try this\n"
        "  help: pip install 'torch>=2.13,<2.16'"
    )
    with pytest.raises(TorchChangedError) as refused:
        torch_private._required("torch:_gone", "to try this")
    assert expected == str(refused.value)
    with pytest.raises(TorchChangedError, match=r"has no Linear\._gone, which"):
        torch_private._require_attributes(nn.Linear(1, 1), ["weight", "_gone"], "to try this")


def test_no_other_module_leans_on_what_is_private() -> None:
    """Neither by import nor by attribute of torch; ruff sees to attributes of other objects (SLF001)."""
    found = []
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if path.name == "torch_private.py" or "torch" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Attribute) and node.attr.startswith("_"):
                names = [ast.unparse(node)]
            found += [f"{path.name}: {name}" for name in names if re.match(r"torch(\.\w+)*\._[a-z]", name)]
    assert [] == found


def test_collectives_are_counted(tmp_path: Path) -> None:
    """Each kind of them, by one; none where there is no group."""
    assert torch_private.collectives_so_far() == 0
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        before, ones = torch_private.collectives_so_far(), torch.ones(2)
        dist.all_reduce(ones)
        dist.all_gather([ones], ones.clone())
        dist.broadcast(ones, 0)
        assert torch_private.collectives_so_far() == before + 3
    finally:
        dist.destroy_process_group()


def test_a_scalers_numbers_are_tensors_once_it_is_used() -> None:
    """The tensors of its state, which `state_dict` turns into numbers."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    assert torch_private.scale_of(scaler) == (None, None)
    scaler.scale(torch.ones(1))
    scale, growth_tracker = torch_private.scale_of(scaler)
    assert scale is not None
    assert growth_tracker is not None
    state = scaler.state_dict()
    assert (scale.item(), growth_tracker.item()) == (state["scale"], state["_growth_tracker"])
    assert {*state} == {"scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"}


def test_many_tensors_at_once() -> None:
    """Copied and divided in place, whatever their shapes."""
    targets = [torch.zeros(2, 3), torch.zeros(()), torch.zeros(4)[::2]]
    sources = [torch.arange(6.0).view(2, 3), torch.tensor(7.0), torch.tensor([8.0, 9.0])]
    addresses = [target.data_ptr() for target in targets]
    torch_private.foreach_copy_(targets, sources)
    assert all(map(torch.equal, targets, sources))
    torch_private.foreach_div_(targets, 2.0)
    assert all(torch.equal(target, source / 2) for target, source in zip(targets, sources, strict=True))
    assert addresses == [target.data_ptr() for target in targets]


def _of_two_ranks(forked: ForkedPrograms, folder: Path, case: str) -> list[Any]:
    """Return what two ranks say of a case: what they print, or what they write to standard error as they are aborted."""
    ranks = [
        forked.start(PROGRAM, str(rank), str(folder / "store"), case, environment={}) for rank in range(2)
    ]
    codes = [rank.wait(60) for rank in ranks]
    errors = [rank.stderr.read_text() for rank in ranks]
    assert set(codes) <= {0, -signal.SIGABRT}, errors
    return [
        json.loads(rank.stdout.read_text() or json.dumps(e)) for rank, e in zip(ranks, errors, strict=True)
    ]


def test_buffers_are_sent(forked: ForkedPrograms, tmp_path: Path) -> None:
    """Of all kinds, in messages smaller than all of them: both ranks have rank 0's."""
    expected = [[1.0, 1.0, 1.0], [5, 5], [0.0, 0.0, 0.0]]
    assert [expected, expected] == _of_two_ranks(forked, tmp_path, "broadcast")


def test_what_is_written_in_place_has_another_version() -> None:
    """Of a buffer that a module's forward moves; reading changes nothing."""
    buffer = torch.ones(2)
    before = torch_private.version_of(buffer)
    buffer.sum()
    assert before == torch_private.version_of(buffer)
    with torch.no_grad():
        buffer.mul_(0.9)
        once = torch_private.version_of(buffer)
        buffer[0] = 3
    assert before < once < torch_private.version_of(buffer)


def test_batches_that_a_loader_has_given_are_counted() -> None:
    """By its iterator; the loader itself gives none."""
    loader: DataLoader[Any] = DataLoader(TensorDataset(torch.arange(3)))
    batches = iter(loader)
    assert torch_private.batches_given(loader) is None
    assert torch_private.batches_given(batches) == 0
    next(batches)
    assert torch_private.batches_given(batches) == 1


def test_what_a_module_holds_shows_in_its_tables() -> None:
    """The same dicts from first to last; parameters, buffers, modules and hooks come and go in them."""
    module = nn.Module()
    tables = torch_private.tables_of(module)
    parameters, buffers, modules, hooks, pre_hooks = tables
    assert buffers is torch_private.buffers_of(module)
    module.weight = nn.Parameter(torch.ones(1))
    module.register_buffer("mean", None)
    module.inner = nn.Linear(1, 1)
    handles = [
        module.register_state_dict_post_hook(lambda *_: None),  # type: ignore[no-untyped-call]
        module.register_state_dict_pre_hook(lambda *_: None),  # type: ignore[no-untyped-call]
    ]
    assert [module.weight] == list(parameters.values())
    assert {"mean": None} == buffers
    assert [module.inner] == list(modules.values())
    assert [1, 1] == [len(hooks), len(pre_hooks)]
    module.mean = mean = torch.zeros(1)
    assert mean is buffers["mean"]
    for handle in handles:
        handle.remove()
    assert [0, 0] == [len(hooks), len(pre_hooks)]
    assert all(a is b for a, b in zip(tables, torch_private.tables_of(module), strict=True))


class _WithExtra(nn.Linear):
    def get_extra_state(self) -> Any:
        return {"level": 1}


class _WithOwnSaving(nn.Linear):
    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}own"] = self.weight.sum()


class _WithOwnState(nn.Linear):
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {"own": self.weight.sum()}


def test_a_state_that_is_more_than_parameters_and_buffers_is_seen() -> None:
    """However the module adds to it."""
    hooked, patched = nn.Linear(1, 1), nn.Linear(1, 1)
    hooked.register_state_dict_post_hook(lambda *_: None)  # type: ignore[no-untyped-call]
    patched.state_dict = dict  # type: ignore[method-assign, assignment]
    assert torch_private.has_plain_state(nn.Linear(1, 1))
    for module in (hooked, patched, _WithExtra(1, 1), _WithOwnSaving(1, 1), _WithOwnState(1, 1)):
        assert not torch_private.has_plain_state(module)
    assert f"0.{torch_private.EXTRA_STATE}" in nn.Sequential(_WithExtra(1, 1)).state_dict()


def test_the_hook_of_fully_shard_adds_nothing_to_a_state_and_other_hooks_are_seen() -> None:
    """Torch registers its hook at the first forward; a function of a user's that is called so is not taken for it."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("gloo", store=torch_private.HashStore(), rank=0, world_size=1)
    try:
        module = nn.Linear(2, 2)
        fully_shard(module, mesh=DeviceMesh("cpu", [0]))
        module(torch.ones(1, 2))
        assert len(module._state_dict_pre_hooks) == 1
        assert torch_private.has_plain_state(module)

        def to_sharded_hook(*_: Any) -> None: ...

        handle = module.register_state_dict_pre_hook(to_sharded_hook)  # type: ignore[no-untyped-call]
        assert not torch_private.has_plain_state(module)
        handle.remove()
        assert torch_private.has_plain_state(module)
    finally:
        torch.distributed.destroy_process_group()


def test_hooks_of_an_optimizers_state_are_seen() -> None:
    """Those before and those after, each as it was registered."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    assert ({}, {}) == tuple(map(dict, torch_private.state_hooks_of(optimizer)))

    def before(_: Any) -> None: ...

    def after(_: Any, state: Any) -> Any:
        return state

    optimizer.register_state_dict_pre_hook(before)
    optimizer.register_state_dict_post_hook(after)
    assert [[before], [after]] == [list(each.values()) for each in torch_private.state_hooks_of(optimizer)]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_tensors_that_share_memory_are_told(device: str) -> None:
    """Views and parameters of one tensor share; two tensors do not, without memory either."""
    one, other = torch.empty(4, device=device), torch.empty(4, device=device)
    assert torch_private.storage_id(one) == torch_private.storage_id(one[2:].view(2, 1))
    assert torch_private.storage_id(one) == torch_private.storage_id(nn.Parameter(one))
    assert torch_private.storage_id(one) != torch_private.storage_id(other)


def test_draws_from_torchs_generator_are_seen_in_memory() -> None:
    """Where they are not, seeding costs more at every step."""
    assert torch_private.address_of(torch.default_generator)
    assert random_streams._words_that_move() is not None


class _Slow:
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> bool:
        if index == 1:
            __import__("time").sleep(1)
        had = get_worker_info() is not None
        torch_private.forget_loader_process()
        return had and get_worker_info() is None


@pytest.mark.usefixtures("real_processes")
def test_loader_processes() -> None:
    """They are at hand, a slow one is told in words that are known, and one can forget what it is."""
    loader: DataLoader[Any] = DataLoader(
        _Slow(),  # type: ignore[arg-type]
        num_workers=1,
        timeout=60,
        batch_size=None,
        generator=torch.Generator(),
        multiprocessing_context="fork",
    )
    before = signal.getsignal(signal.SIGCHLD)
    batches = iter(loader)
    signal.signal(signal.SIGCHLD, before)  # torch's handler raises wherever a later test is
    (process,) = torch_private.loader_processes_of(batches)
    try:
        assert process.is_alive()
        assert process.sentinel
        assert next(batches) is True
        cast("Any", batches)._timeout = 0.2  # the first batch may take as long as the machine likes
        with pytest.raises(RuntimeError, match=torch_private.LOADER_TIMED_OUT):
            next(batches)
    finally:
        process.kill()
        process.join()


def test_batches_are_shared_without_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Made in shared memory, or moved there with their bytes; nothing comes to lie in /dev/shm, and views stay views."""
    storage: Any = torch.UntypedStorage
    for name in ("_new_using_fd_cpu", "_share_fd_cpu_"):
        monkeypatch.setattr(storage, name, getattr(storage, name))  # put back afterwards
    monkeypatch.setitem(vars(connection), "arbitrary_address", vars(connection)["arbitrary_address"])
    torch_private.share_batches_without_names()
    made: Any = storage._new_shared(64)
    moved: Any = torch.arange(6.0)
    view = moved[2:]
    moved.share_memory_()
    assert made.is_shared()
    assert view.is_shared()
    assert [2.0, 3.0, 4.0, 5.0] == view.tolist()
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    for each in (made, moved.untyped_storage()):
        (mapped,) = [line for line in lines if int(line.partition("-")[0], 16) == each.data_ptr()]
        assert "/memfd:elasticflow-batch" in mapped


@pytest.mark.usefixtures("real_processes")
def test_batch_that_is_delivered_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a thread pins what processes read; one that is slow is not there, and looking takes nothing."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda _: None)
    loader: DataLoader[Any] = DataLoader(
        _Slow(),  # type: ignore[arg-type]
        num_workers=2,
        batch_size=None,
        pin_memory=True,
        generator=torch.Generator(),
        multiprocessing_context="fork",
    )
    before = signal.getsignal(signal.SIGCHLD)
    batches = iter(loader)
    signal.signal(signal.SIGCHLD, before)
    processes = torch_private.loader_processes_of(batches)
    try:
        deadline = time.monotonic() + 60
        while not torch_private.is_next_delivered(batches):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert torch_private.is_next_delivered(batches)
        assert next(batches) is True
        assert not torch_private.is_next_delivered(batches)
        assert next(batches) is True
        assert not torch_private.is_next_delivered(batches)
        assert next(batches, None) is None
        assert not torch_private.is_next_delivered(object())
    finally:
        for process in processes:
            process.kill()
            process.join()


def test_compilations_are_told() -> None:
    """Each by one call before and one after; what is compiled already is not."""
    torch._dynamo.reset()
    told: list[str] = []
    handler = torch._dynamo.callback.callback_handler
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(handler, "start_callbacks", [])
        patch.setattr(handler, "end_callbacks", [])
        torch_private.on_compile(lambda _: told.append("begin"), lambda _: told.append("end"))
        doubled = torch.compile(lambda x: x * 2, backend="eager")
        doubled(torch.ones(1))
        doubled(torch.ones(1))
    assert ["begin", "end"] == told


def test_each_size_is_compiled_for_itself() -> None:
    """By default a second size makes torch compile for any size."""
    torch._dynamo.reset()
    sizes: list[Any] = []

    def backend(graph: Any, inputs: list[Any]) -> Any:
        sizes.extend(size for each in inputs for size in (each.shape if isinstance(each, Tensor) else [each]))
        return graph.forward

    with (
        torch._dynamo.config.patch(automatic_dynamic_shapes=True),
        torch._inductor.config.patch(deterministic=False),
    ):
        torch_private.compile_deterministically()
        assert torch._inductor.config.deterministic is True
        doubled = torch.compile(lambda x: x * 2, backend=backend)
        for size in (3, 4):
            doubled(torch.ones(size))
    assert [3, 4] == sizes
    assert [int, int] == [type(size) for size in sizes]


def test_a_compiled_model_is_told() -> None:
    """In both ways of compiling one."""
    model, other = nn.Linear(1, 1), nn.Linear(1, 1)
    assert not torch_private.is_compiled(model)
    compiled: Any = torch.compile(model, backend="eager")
    assert torch_private.is_compiled(compiled)
    assert model is getattr(compiled, torch_private.COMPILED_MODEL)
    other.compile(backend="eager")
    assert torch_private.is_compiled(other)


def test_torchs_own_machinery_is_where_it_was() -> None:
    """Generators are of the first of these modules; all are there."""
    assert all(importlib.util.find_spec(name) for name in torch_private.MACHINERY)
    assert type(torch.Generator()).__module__ == "torch._C"


@pytest.mark.parametrize(
    ("case", "marks", "kind"),
    [
        ("other sizes", COLLECTIVE_MISMATCH, "user_error"),
        ("peer lost", torch_private.PEER_LOST, "peer"),
        ("no gradient", (torch_private.STILL_NO_GRADIENT,), "user_error"),
        ("gradient twice", (torch_private.GRADIENT_TWICE,), "user_error"),
        ("loader killed", (torch_private.LOADER_KILLED,), "crash"),
    ],
)
def test_what_ranks_are_met_with_is_known_by_its_words(
    forked: ForkedPrograms, tmp_path: Path, case: str, marks: tuple[str, ...], kind: str
) -> None:
    """By some rank; the budget counts it as what it is."""
    told = _of_two_ranks(forked, tmp_path, case)
    known = [each for each in told if any(mark in each for mark in marks)]
    assert known, told
    assert case != "no gradient" or all(torch_private.NO_GRADIENT in each for each in known)
    assert {kind} == {failure.classify(RuntimeError(each)) for each in known}


def test_memory_that_is_not_there_is_known_by_its_words() -> None:
    """Of the CPU; a GPU's has a class of its own."""
    with pytest.raises(RuntimeError, match=torch_private.NO_MEMORY):
        torch.empty(1 << 55)


def test_an_operation_that_is_not_deterministic_is_known_by_its_words() -> None:
    """The refusal names it first."""
    torch.use_deterministic_algorithms(mode=True)
    try:
        with pytest.raises(RuntimeError) as refused:
            torch.zeros(3).put_(torch.tensor([0]), torch.ones(1))
    finally:
        torch.use_deterministic_algorithms(mode=False)
    found = re.search(torch_private.NOT_DETERMINISTIC, str(refused.value))
    assert found is not None
    assert found[1].startswith("put_")


def test_the_norm_of_gradients_is_looked_up_at_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """So another one can take its place, also for who has imported `clip_grad_norm_` by name."""
    module: Any = nn.utils.clip_grad
    monkeypatch.setattr(module, "_get_total_norm", module._get_total_norm)
    monkeypatch.setattr(nn.utils, "get_total_norm", nn.utils.get_total_norm)
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([3.0, 4.0])
    assert float(torch_private.total_norm([parameter.grad])) == 5.0
    torch_private.replace_total_norm(lambda *_: torch.tensor(50.0))
    assert float(nn.utils.clip_grad_norm_([parameter], 1e9)) == 50.0
    assert float(nn.utils.get_total_norm([parameter.grad])) == 50.0


def test_hooks_on_gradients_are_seen() -> None:
    """Those of both kinds, while they are there."""
    for register in ("register_hook", "register_post_accumulate_grad_hook"):
        parameter = nn.Parameter(torch.zeros(2))
        assert not torch_private.has_gradient_hooks(parameter)
        hook = getattr(parameter, register)(lambda *_: None)
        assert torch_private.has_gradient_hooks(parameter)
        hook.remove()
        assert not torch_private.has_gradient_hooks(parameter)


def test_arguments_are_mapped_leaf_by_leaf() -> None:
    """Tuples and dicts stay what they are."""
    assert ((2, {"a": 4}), {"b": [6]}) == torch_private.tree_map(lambda x: 2 * x, ((1, {"a": 2}), {"b": [3]}))


def test_operations_can_be_seen_and_replaced() -> None:
    """Those that torch makes of a function's calls, in a context."""
    seen = []

    class Seeing(torch_private.TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Seeing():
        nn.init.ones_(torch.empty(2))
    assert [torch.ops.aten.empty.memory_format, torch.ops.aten.fill_.Scalar] == seen


def test_the_local_part_of_a_sharded_tensor_is_its_memory() -> None:
    """A DTensor itself tells no address; its part is the tensor that it was made of."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard

    torch.distributed.init_process_group("gloo", store=torch_private.HashStore(), rank=0, world_size=1)
    try:
        rows = torch.ones(3, 2)
        made = DTensor.from_local(rows, DeviceMesh("cpu", [0]), [Shard(0)], run_check=False)
        assert made.data_ptr() == 0
        assert torch_private.local_tensor_of(made).data_ptr() == rows.data_ptr()
    finally:
        torch.distributed.destroy_process_group()
