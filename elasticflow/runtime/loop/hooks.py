"""Calls the job's hooks isolated from training, which continues as if no hook had been called.

A hook's random draws follow from the seed, its name, step and rank; the generators and the modes of the model's modules are
restored afterwards. A hook that still changes trained state is an error.
"""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from elasticflow.errors import HookError, StopTraining
from elasticflow.runtime.loop.context import HookContext, PointWriter
from elasticflow.runtime.measuring.marks import mark
from elasticflow.runtime.process import checksums, random_streams, stopping
from elasticflow.runtime.process.sharded_tensors import local_of, reshard, sharded_modules
from elasticflow.runtime.process.torch_private import version_of
from elasticflow.runtime.training.modes import evaluating
from elasticflow.runtime.training.precision import autocast

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch.optim.swa_utils import AveragedModel

    from elasticflow.runtime.process.context import Worker
    from elasticflow.runtime.process.position import Position

ON_START, ON_STEP, ON_EVALUATION, ON_SNAPSHOT, ON_FINISH = NAMES = (
    "on_start",
    "on_step",
    "on_evaluation",
    "on_snapshot",
    "on_finish",
)
_REMEDY = "a hook looks at training: work on copy.deepcopy(context.model), or change it in model.step or the optimizer"


class Hook(NamedTuple):
    """A function of the job, and when and where it is called.

    Attributes:
        entry: Entry point, as the job file gives it.
        every: Interval of `on_step` in steps.
        all_ranks: Every rank calls the hook, not rank 0 alone.
    """

    call: Callable[[HookContext], object]
    entry: str
    every: int = 1
    all_ranks: bool = False


class Hooks:
    """The hooks of a job. Every rank makes one, and calls it at the same steps.

    Args:
        precision: fp32, bf16 or fp16: hooks run under its autocast, as evaluations do.
        is_exact: Compare every bit of the model after each call, not only after the first call of each hook.
    """

    def __init__(
        self,
        worker: Worker,
        model: nn.Module,
        *,
        precision: str = "fp32",
        is_exact: bool = False,
        average: AveragedModel | None = None,
        **hooks: Hook,
    ) -> None:
        self._worker, self._model, self._precision = worker, model, precision
        self._average: nn.Module | None = None if average is None else average.module
        watched = [model] if average is None else [model, average]
        self._unchanged, self._is_exact = Unchanged(watched), is_exact
        self._called: set[str] = set()
        self._hooks = {name: hook for name, hook in hooks.items() if hook.all_ranks or worker.rank == 0}
        self._writer = PointWriter(worker.run_folder.path, worker.generation, worker.rank)
        self._measured: Mapping[str, Any] | None = None
        self._is_sharded = bool(sharded_modules(model))
        worker.moments.evaluation.append(self._after_evaluation)
        worker.moments.snapshot.append(self._before_snapshot)
        worker.moments.finish.append(partial(self._call, ON_FINISH))

    def start(self, position: Position) -> None:
        """Call `on_start`: training begins, or continues, at *position*. Every rank."""
        if self._hooks:
            self._writer.begin(position.step)
        self._call(ON_START, position)

    def after_step(self, position: Position) -> None:
        """Call `on_step` if it is due after this step. Every rank, after each step."""
        hook = self._hooks.get(ON_STEP)
        if hook is not None and position.step % hook.every == 0:
            with mark("hook"):
                self._call(ON_STEP, position)

    def _after_evaluation(self, position: Position, metrics: Mapping[str, Any]) -> None:
        self._measured = metrics
        self._call(ON_EVALUATION, position)

    def _before_snapshot(self, position: Position, name: str) -> None:
        self._call(ON_SNAPSHOT, position, name)
        self._writer.sync()

    def _call(self, name: str, position: Position, snapshot: str | None = None) -> None:
        hook = self._hooks.get(name)
        if hook is None:
            return
        worker = self._worker
        # Lines of the steps before stand before what the hook prints.
        worker.progress.flush()
        before = worker.heartbeat.phase("hook")
        context = HookContext(
            name,
            position,
            rank=worker.rank,
            world_size=worker.world_size,
            device=worker.device,
            model=self._model,
            ema=self._average,
            dataset=worker.dataset,
            metrics=self._metrics(),
            snapshot=snapshot,
            writer=self._writer,
            is_part=self._is_sharded and not hook.all_ranks,
        )
        key = random_streams.hook_key(worker.seed, position.step, worker.rank, name)
        self._apart(hook, context, key)
        worker.heartbeat.phase(before)
        if hook.all_ranks:
            worker.share_request()
        worker.progress.go_on()

    def _apart(self, hook: Hook, context: HookContext, key: int) -> None:
        self._unchanged.begin(is_thorough=self._is_exact or context.hook not in self._called)
        self._called.add(context.hook)
        try:
            with (
                apart(self._model, self._average, context.device, key),
                autocast(self._precision, context.device),
            ):
                hook.call(context)
        except StopTraining as stop:
            stopping.request_stop(self._worker.vote, stop)
        except Exception as error:
            error.add_note(f'raised in hooks.{context.hook} = "{hook.entry}", after step {context.step}')
            raise
        finally:
            self._worker.listen()  # the hook's code may have taken the signals for itself
        self._unchanged.require(f'hooks.{context.hook} = "{hook.entry}"')

    def _metrics(self) -> dict[str, Any]:
        progress = self._worker.progress
        metrics: dict[str, Any] = (
            {} if progress.loss is None else {"loss": float(progress.loss), **progress.scalars}
        )
        return metrics if self._measured is None else {**metrics, "eval": dict(self._measured)}


@contextmanager
def apart(model: nn.Module, average: nn.Module | None, device: torch.device, key: int) -> Iterator[None]:
    """Context in which code has its own random streams, and the model is in evaluation mode, without gradients.

    Generators and modes are restored afterwards, whatever the code does.
    """
    watched = [module for module in (model, average) if module is not None]
    of_device: Any = torch.get_device_module(device) if device.type != "cpu" else None
    on_device = None if of_device is None else of_device.get_rng_state(device)
    try:
        with random_streams.put_back(), evaluating(*watched), torch.no_grad():
            random_streams.seed_all(key)
            if of_device is not None:
                of_device.manual_seed(key)
            yield
    finally:
        if of_device is not None:
            of_device.set_rng_state(on_device, device)


class _Mark(NamedTuple):
    tensor: Tensor  # held, so that its id is no other's
    version: int
    address: int
    is_trained: bool


class Unchanged:
    """Detects changes of modules' parameters and buffers.

    Every tensor that PyTorch changes counts its changes: looking at the counts takes a microsecond a tensor, so it is always
    done. What is changed behind them (through `.data`, or numpy) shows in sums over the bytes only, which read the whole model
    twice: at a hook's first call in a process, and with `train.consistency = "exact"`, which promises the bits, at each.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules, self._is_thorough = modules, False
        self._marks: dict[str, _Mark] = {}
        self._sums: dict[str, int] = {}

    def begin(self, *, is_thorough: bool) -> None:
        """Remember the current state; every bit of it if *is_thorough*."""
        self._is_thorough = is_thorough
        self._marks = self._look()
        self._sums = self._summed()

    def require(self, hook: str) -> None:
        """Make sure that nothing has changed since `begin`.

        Raises:
            HookError: a tensor has changed; the message names it.
        """
        before, after = self._marks, self._look()
        self._marks = {}
        for name in {**before, **after}:
            if name not in before or name not in after:
                raise _changed(hook, f"{'took away' if name in before else 'added'} {name}")
            was, now = before[name], after[name]
            if was.tensor is not now.tensor or was.address != now.address:
                raise _changed(hook, f"replaced {name}")
            if was.is_trained != now.is_trained:
                raise _changed(hook, f"{'thawed' if now.is_trained else 'froze'} {name}")
            if was.version != now.version:
                raise _changed(hook, f"changed {name}")
        sums, self._sums = self._sums, {}
        for name, value in self._summed().items():
            if sums.get(name) != value:
                raise _changed(hook, f"changed {name}")

    def _look(self) -> dict[str, _Mark]:
        """Return a mark of everything that a snapshot would hold of the modules."""
        return {
            name: _Mark(tensor, version_of(tensor), tensor.data_ptr(), tensor.requires_grad)
            for name, tensor in self._tensors().items()
        }

    def _summed(self) -> dict[str, int]:
        return checksums.sums_of(self._tensors()) if self._is_thorough else {}

    def _tensors(self) -> dict[str, Tensor]:
        for module in self._modules:
            reshard(module)
        words = ("", "the average's ")
        return {
            f"{word}{name}": local_of(tensor)
            for word, module in zip(words, self._modules, strict=False)
            for name, tensor in module.state_dict(keep_vars=True).items()
            if isinstance(tensor, Tensor)
        }


def _changed(hook: str, what: str) -> HookError:
    return HookError(f"{hook} {what}, which is trained, or part of a snapshot", _REMEDY)
