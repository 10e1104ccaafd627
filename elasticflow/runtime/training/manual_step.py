"""Training steps that move the optimizers themselves, as a GAN's do, with one replica per rank.

The job's step is called once per rank with all of its samples, and calls `backward` and `optimizer.step` as it likes.
Before an optimizer moves, the gradients of its parameters become those of the global batch: the ranks meet, agree on which
optimizer it is, and add up their gradients, weighted by their numbers of samples. A rank without samples follows the others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from elasticflow.errors import NonFiniteLossError, StateError, StopTraining
from elasticflow.runtime.measuring.marks import mark
from elasticflow.runtime.process import host_copies, stopping
from elasticflow.runtime.process.host_copies import HostCopy
from elasticflow.runtime.training import model_buffers, several_optimizers
from elasticflow.runtime.training.replicated_step import micro_batches, require_whole
from elasticflow.runtime.training.scalars import Scalars
from elasticflow.runtime.training.step_row import StepRow

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.optim import Optimizer

    from elasticflow.runtime.data.index_loader import Batch
    from elasticflow.runtime.process.context import Worker


class _Abandoned(BaseException):  # passes through the job's step, which may catch what is an Exception
    """All ranks abandon the step, which has changed nothing."""


class _Met(NamedTuple):
    """The result of a meeting: which optimizer moves now, None at the step's end; and the row of the global batch."""

    optimizer: int | None
    row: StepRow


class ManualStep:
    """A model with one replica per rank, whose step moves the optimizers.

    Args:
        training_step: Called with the bare model, this rank's samples and *made*; returns the loss to report, as a number
            or a mapping with `loss`.
        clip_grad_norm: Most that the norm of the gradients of one optimizer's parameters may be when it moves.
        logs_grad_norm: A step's line says that norm, as it was before.

    Raises:
        StateError: *made* holds something that is no optimizer of torch.
    """

    is_exact = was_skipped = False

    def __init__(
        self,
        worker: Worker,
        model: nn.Module,
        training_step: Callable[[nn.Module, Any, Any], Any],
        made: Any,
        *,
        clip_grad_norm: float | None = None,
        logs_grad_norm: bool = True,
    ) -> None:
        self._worker, self._model, self._step, self._made = worker, model, training_step, made
        require_whole(model)
        self._clip, self._logs_norm = clip_grad_norm, logs_grad_norm
        self._is_here = worker.device.type == "cpu"
        named = several_optimizers.optimizers(made)
        self._names, self._optimizers = list(named), list(named.values())
        for number, optimizer in enumerate(self._optimizers):
            optimizer.register_step_pre_hook(self._before(number))
        self._trained = list(
            {
                id(p): p for p in (*model.parameters(), *several_optimizers.parameters_of(self._optimizers))
            }.values()
        )
        if worker.world_size > 1:
            model_buffers.send(worker, [t.detach() for t in (*model.parameters(), *model.buffers())])
        self._buffers = model_buffers.ModelBuffers(worker, model)
        self._weight = 0.0  # this rank's samples, as a part of the global batch
        self._scalars = Scalars(worker, worker.world_size)
        self._norms: dict[str, float] = {}  # of the gradients of each optimizer's parameters
        self._number = self._moved = 0
        self._is_open = False  # the job's step runs: an optimizer that moves is met over

    def run(self, batch: Batch) -> float:
        """Make one step of the global batch; return its mean loss. Collective: every rank.

        Where `worker.stopped` is set afterwards, nothing was changed.

        Raises:
            NonFiniteLossError: on every rank, if gradients of the global batch or the loss are not finite. That optimizer
                has not stepped; earlier ones have.
            StateError: the step moved no optimizer, other ones than on another rank, or gave it a closure.
        """
        worker = self._worker
        if len(batch.model_keys) > 1:
            raise StateError(
                f"a worker's share of step {batch.end.step} comes in {len(batch.model_keys)} parts, and a step that "
                "moves its optimizers is called once",
                "leave out dataset.micro_batch_size",
            )
        self._buffers.before_step()
        worker.generators.look()
        for parameter in self._trained:
            parameter.grad = None  # gradients that a step leaves behind are in no snapshot
        self._number, self._moved, self._weight = batch.end.step, 0, 0.0
        self._scalars.begin()
        self._norms.clear()
        data, count = next(micro_batches(batch, worker.vote), (None, 0))
        try:
            if data is None:
                return self._follow()
            worker.generators.seed_model(batch.model_keys[0])
            return self._lead(data, count / batch.samples)
        except _Abandoned:
            self._buffers.restore()
            worker.agree_to_stop()
            return math.nan

    def _lead(self, data: Any, weight: float) -> float:
        self._weight, self._is_open = weight, True
        try:
            result = self._step(self._model, data, self._made)
        except StopTraining as stop:
            self._is_open = False
            stopping.request_stop(self._worker.vote, stop)
            return self._follow()
        finally:
            self._is_open = False
        if not self._moved:
            raise StateError(
                "the training step took the optimizers, and moved none of them",
                "call step() of each optimizer in model.step; or let it take (model, batch) and return a loss",
            )
        reported = reported_loss(result)
        self._scalars.add(self._worker.rank, result, weight)
        loss, *scalars = host_copies.read_together([reported, *self._scalars.numbers(self._worker.rank)])
        return self._end(self._meet(None, loss * weight, scalars))

    def _follow(self) -> float:
        """Follow the other ranks to the end of the step, without samples."""
        while True:
            met = self._meet(None, 0.0, is_following=True)
            if met.optimizer is None:
                return self._end(met)
            self._make_global(met.optimizer, 0.0)
            move: Any = self._optimizers[met.optimizer].step
            move()

    def _before(self, number: int) -> Callable[[Optimizer, Any, Any], None]:
        def meet(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            del optimizer
            if not self._is_open:
                return
            if len(args) > 1 or kwargs.get("closure") is not None:
                raise StateError(
                    f"the training step gives {self._names[number]} a closure, which would be called after the exchange of "
                    "gradients",
                    "call backward() first, and step() without a closure",
                )
            with mark("exchange"):
                self._meet(number, 0.0)
                self._make_global(number, self._weight)

        return meet

    def _meet(
        self, number: int | None, loss: float, scalars: Sequence[float] = (), *, is_following: bool = False
    ) -> _Met:
        """Announce this rank's next action, and learn those of all ranks. Collective: every rank.

        All that travels is known on the host, so that no rank waits for its device here.
        """
        worker, vote = self._worker, self._worker.vote
        # Behind the row: the step is over, and for each optimizer the ranks that are about to move it.
        is_over = number is None and not is_following
        moves = [float(number == optimizer) for optimizer in range(len(self._optimizers))]
        row = StepRow(loss, 0.0, vote.requests(), scalars, (float(is_over), *moves))
        if worker.world_size > 1:
            sums = torch.tensor(row.to_numbers(), dtype=torch.float64)
            dist.all_reduce(sums)
            row = StepRow.from_sums(sums.tolist())
        over, *moves = row.extra
        moving = [optimizer for optimizer, ranks in enumerate(moves) if ranks]
        vote.resolve(row.requests)
        if vote.stop:
            self._abandon()
        if len(moving) + (over > 0) > 1:
            names = ", ".join(self._names[optimizer] for optimizer in moving)
            raise StateError(
                f"in step {self._number} the ranks move different optimizers: {names}{' or none' if over else ''}",
                "a step must move the same optimizers in the same order on every rank, whatever its samples are",
            )
        self._moved += bool(moving)
        return _Met(moving[0] if moving else None, row)

    def _abandon(self) -> None:
        if self._moved:
            raise StateError(
                f"StopTraining was raised in step {self._number} after an optimizer had moved: half a step would be kept",
                "raise it before the first optimizer moves",
            )
        raise _Abandoned

    def _make_global(self, number: int, weight: float) -> None:
        """Make the gradients of an optimizer's parameters those of the global batch. Collective: every rank."""
        parameters = list(several_optimizers.parameters_of([self._optimizers[number]]))
        by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
        if self._worker.world_size > 1:
            for parameter in parameters:
                by_dtype.setdefault(parameter.dtype, []).append(parameter)
        groups = list(by_dtype.values())
        norm = self._norm_of(parameters, groups, [_add_up(group, weight) for group in groups])
        if norm is None:
            return
        tensor, total = norm
        self._norms[self._names[number].removeprefix("optimizer.")] = total
        if not math.isfinite(total):
            raise NonFiniteLossError(
                f"the gradients of {self._names[number]} in step {self._number} are not finite",
                "look at the data and the learning rates",
            )
        if self._clip is not None:
            nn.utils.clip_grads_with_norm_(parameters, self._clip, tensor)

    def _norm_of(
        self, parameters: list[nn.Parameter], groups: list[list[nn.Parameter]], ranks: list[Tensor]
    ) -> tuple[Tensor, float] | None:
        """Return the norm of the gradients, on its device and here; None if there are no gradients. The host waits for the device once.

        Args:
            groups: The same parameters, those of one dtype together; empty with one worker.
            ranks: For each group, how many ranks have a gradient of each parameter. One that no rank has is removed.
        """
        if self._is_here:
            _remove_unused(groups, list(chain.from_iterable(used.tolist() for used in ranks)))
        gradients = [p.grad for p in parameters if p.grad is not None]
        if not gradients:
            return None
        norm = nn.utils.get_total_norm(gradients)
        if self._is_here:
            return norm, norm.item()
        # A gradient that no rank has is zeros until now, and adds nothing to the norm.
        numbers = torch.cat([norm.reshape(1), *(used.to(norm.dtype) for used in ranks)])
        number, *used_by = HostCopy(numbers).tolist()
        _remove_unused(groups, used_by)
        return (norm, number) if any(p.grad is not None for p in parameters) else None

    def _end(self, met: _Met) -> float:
        progress = self._worker.progress
        progress.note_step(0, self._scalars.means(met.row.scalars))
        if self._logs_norm:
            norms = dict(self._norms)
            progress.note_grad_norm(norms if len(self._optimizers) > 1 else next(iter(norms.values()), None))
        self._worker.generators.are_used |= self._worker.vote.random
        loss = float(met.row.loss)
        if not math.isfinite(loss):
            raise NonFiniteLossError(
                f"the loss of step {self._number} is {loss}", "look at the data and the learning rates"
            )
        return loss


def _add_up(parameters: list[nn.Parameter], weight: float) -> Tensor:
    """Give parameters of one dtype the sum over all ranks of gradient times weight; return how many ranks have each."""
    pieces = [_piece(parameter, weight) for parameter in parameters]
    # A rank without samples has gradients of an earlier move, which count nothing.
    is_used = [float(weight > 0 and parameter.grad is not None) for parameter in parameters]
    used = host_copies.to_device(is_used, pieces[0].device, pieces[0].dtype)
    flat = torch.cat([*pieces, used])
    dist.all_reduce(flat)
    *sums, counts = torch.split(flat, [*map(len, pieces), len(used)])
    for parameter, total in zip(parameters, sums, strict=True):
        parameter.grad = total.view(parameter.shape)
    return counts


def _remove_unused(groups: list[list[nn.Parameter]], ranks: list[float]) -> None:
    """Remove the gradients that no rank has."""
    for parameter, used in zip(chain.from_iterable(groups), ranks, strict=True):
        if not used:
            parameter.grad = None


def _piece(parameter: nn.Parameter, weight: float) -> Tensor:
    gradient = parameter.grad
    if gradient is None or weight == 0.0:
        return torch.zeros(parameter.numel(), dtype=parameter.dtype, device=parameter.device)
    dense = gradient.to_dense() if gradient.is_sparse else gradient
    return dense.reshape(-1) * weight


def reported_loss(result: Any) -> float | Tensor:
    """Return the loss that a step reports, where it lies.

    Raises:
        TypeError: it reports none.
    """
    value = result.get("loss") if isinstance(result, Mapping) else result
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.detach()
    if isinstance(value, int | float):
        return float(value)
    raise TypeError(
        f"the training step returned a {type(result).__name__}: one that moves the optimizers must return the loss to report, "
        "as a number or a dict with `loss`"
    )
