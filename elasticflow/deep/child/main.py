"""Main program of the child process of `--deep`: tries out a job's own code.

`python -m elasticflow.deep.child.main PARENT_PID PIPE`, with the job on standard input. The functions of the
generated train.py call everything that the job names, as they do in a run. The code may print, hang or end
the process: every finding up to then has been reported (`deep/child/report.py`), and the parent
(`deep/check.py`) does the rest.
"""

from __future__ import annotations

import contextlib
import json
import operator
import os
import resource
import sys
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from elasticflow.deep.child import after_step, restart
from elasticflow.deep.child.data import Data
from elasticflow.deep.child.entry_point import EntryPoint
from elasticflow.deep.child.report import BrokenError, Report
from elasticflow.deep.child.run import CPU, DeepRun
from elasticflow.deep.child.state import build, count, materialize, require_held, step_without_data
from elasticflow.deep.messages import DeepRequest, Facts
from elasticflow.errors import StateError, StopTraining
from elasticflow.protocol.json_codec import from_json
from elasticflow.runtime.process import random_streams
from elasticflow.runtime.process.torch_private import HashStore
from elasticflow.runtime.training import loss_weights, several_optimizers
from elasticflow.runtime.training.precision import AUTOCAST, autocast
from elasticflow.runtime.training.shard_model import (
    block_bytes,
    blocks_of,
    fully_shard_blocks,
    require_elementwise,
)
from elasticflow.system import free_memory
from elasticflow.system.processes import die_with_parent

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

    from elasticflow.deep.child.state import Trained
    from elasticflow.runtime.process.shard_layout import Sharding

# Samples in a batch: BatchNorm needs more than one.
_BATCH = 2
_BATCH_OF_STEP = 8


class Probe:
    """One look at a job.

    Args:
        request: The job's train.py and what to try of it.
    """

    def __init__(self, report: Report, request: DeepRequest) -> None:
        self._report, self._request = report, request
        # Batches by the key of the table of their data.
        self._batches: dict[str, Any] = {}
        # Number of samples in the batch of `dataset`.
        self._num_samples = 0

    def run(self) -> None:
        """Look at everything, except for parts that depend on something broken."""
        sys.path[:0] = self._request.own
        if not self._import_all():
            return
        code = EntryPoint(self._request)
        random_streams.seed_all(code.seed)
        self._look_at_data(code)
        if code.lacks_values:
            return
        with self._part():
            self._look_at_state(code)

    def _look_at_data(self, code: EntryPoint) -> None:
        training = Data(self._report, code, code.training, most=self._most_samples(code))
        with self._part():
            self._batches["dataset"], self._num_samples = training.batch(), training.num_samples
        if code.lacks_values:
            return
        for table in code.evaluations:
            is_training_data = code.entries[f"{table.key}.entry"] == code.entries.get("dataset.entry")
            if "dataset" not in self._batches and is_training_data:
                continue
            evaluation = Data(self._report, code, table)
            with self._part():
                self._batches[table.key] = evaluation.batch()
            if table.is_to_be_apart and {"dataset", table.key} <= self._batches.keys():
                with self._part():
                    evaluation.require_apart_from(training)

    def _most_samples(self, code: EntryPoint) -> int:
        """Return the number of samples in a batch: for a step, enough to tell the loss of a part from that of the whole."""
        at_once = code.get("MICRO_BATCH_SIZE") or code["GLOBAL_BATCH_SIZE"]
        return max(_BATCH, min(at_once, _BATCH_OF_STEP)) if self._request.takes_step else _BATCH

    @contextlib.contextmanager
    def _part(self) -> Iterator[None]:
        try:
            yield
        except BrokenError:
            pass
        except StopTraining as stop:
            self._report.note(f"the job's own code stopped training: {stop}")

    def _import_all(self) -> bool:
        broken: set[str] = set()
        is_whole = True
        for key, entry in self._request.entries.items():
            module, _, attribute = entry.partition(":")
            if module in broken:
                continue
            try:
                self._report.call("import", key, f"importing {module}", partial(import_module, module))
            except BrokenError:
                broken.add(module)
                continue
            try:
                look_up = partial(operator.attrgetter(attribute), sys.modules[module])
                value = self._report.call("import", key, f"looking up {entry}", look_up)
                if not callable(value) and not key.startswith("snapshots.include."):
                    what = f"{entry} is a {type(value).__name__}, which cannot be called"
                    self._report.refuse("result", key, StateError(what))
            except BrokenError:
                is_whole = False
        return is_whole and not broken

    def _look_at_state(self, code: EntryPoint) -> None:
        report = self._report
        if self._request.takes_step and self._has_room(code):
            trained = build(report, code)
            sharding = self._look_at_sharding(code, trained)
            if "dataset" in self._batches:
                self._take_step(code, trained)
                if sharding is not None:
                    self._take_sharded_step(code, sharding)
            else:
                step_without_data(report, trained)
            # The steps have reported the state that a snapshot would leave out.
            count(report, code, trained)
            return
        try:
            trained = self._on_meta(code)
        except (BrokenError, RuntimeError):  # the code is broken, or needs real tensors
            trained = build(report, code)
            report.note("model and optimizer were built on the CPU: the meta device does not do for them")
            step_without_data(report, trained)
        if self._look_at_sharding(code, trained) is not None:
            report.note("the model was looked at as a whole: [parallel] cuts it when workers train")
        require_held(report, code, count(report, code, trained))

    def _has_room(self, code: EntryPoint) -> bool:
        """Return whether a model that no worker ever holds whole fits into this machine's memory, with what a step makes."""
        if code.get("DeferredBuild") is None:
            return True
        try:
            parameters = self._on_meta(code).model.parameters()
        except (BrokenError, RuntimeError):
            return True
        # As for AdamW: a gradient and two numbers for each element.
        needed, free = 4 * sum(p.nbytes for p in parameters), free_memory.available()
        if needed > free:
            self._report.note(
                f"no step was tried: it would need {needed / 1e9:,.0f} GB for the whole model, and this machine has "
                f"{free / 1e9:,.0f} GB free"
            )
        return needed <= free

    def _look_at_sharding(self, code: EntryPoint, trained: Trained) -> Sharding | None:
        """Refuse what workers refuse before they share a model; return how they do, if nothing is in their way."""
        sharding: Sharding | None = code.get("SHARDING")
        if sharding is None or (sharding.shard == 1 and sharding.offload is None):
            return None
        blocks = None
        try:
            blocks = blocks_of(trained.model, sharding)
        except StateError as error:
            self._report.problem("result", f"parallel.{'wrap' if sharding.wrap else 'shard'}", error)
        try:
            require_elementwise(several_optimizers.optimizers(trained.optimizer).items())
        except StateError as error:
            self._report.problem("result", "optimizer.entry", error)
            return None
        if blocks is None:
            return None
        self._report.facts(Facts(block_bytes=block_bytes(trained.model, blocks)))
        return sharding

    def _on_meta(self, code: EntryPoint) -> Trained:
        """Return the trained objects, however large, in memory that is never touched; problems are not reported."""
        quiet = self._report.quietly()
        with torch.device("meta"):
            trained = build(quiet, code)
        step_without_data(quiet, trained)
        materialize(trained)
        return trained

    def _take_step(self, code: EntryPoint, trained: Trained) -> None:
        """Have train.py make a step, try a restart after it, then measure the evaluations and call the hooks."""
        report, batch = self._report, self._batches["dataset"]
        run = DeepRun(report, code, trained, looks=True)
        report.call("step", code.key_of("training_step"), "a training step", partial(run.train, batch))
        restart.check(report, code, trained, batch)
        if not code.moves_optimizers:
            self._look_at_weights(code, trained.model, batch)
        measured: list[str] = []
        for table in code.evaluations:
            if table.key in self._batches:
                with self._part():
                    names = after_step.measure(report, code, trained.model, table, self._batches[table.key])
                    always = [] if code.moves_optimizers or table.step in code else ["loss"]
                    measured += [f"{table.end[1:]}.{name}".lstrip(".") for name in [*always, *names]]
        after_step.call_hooks(report, code, trained, run, measured)

    def _take_sharded_step(self, code: EntryPoint, sharding: Sharding) -> None:
        """Have train.py make two steps of a model that is sharded as workers do it, with a single worker to hold all rows.

        Code that computes with a part of the model that is not gathered fails here as it would there: the number of workers changes
        the rows that each holds, and no call of the job's code. The second step meets what the first leaves behind: parameters that
        are gathered no longer, an optimizer's state of rows.
        """
        with self._part():
            if not dist.is_initialized():
                dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
            random_streams.seed_all(code.seed)
            group = dist.new_group([0])

            def shard(model: nn.Module) -> None:
                fully_shard_blocks(model, blocks_of(model, sharding), group, "cpu", sharding)

            run = DeepRun(self._report, code, build(self._report.quietly(), code, shard))
            step = partial(run.train, self._batches["dataset"])
            for _ in range(2):
                key = code.key_of("training_step")
                self._report.call("step", key, "a training step of the sharded model", step)
            self._report.note(
                "two steps of the sharded model were tried, with one worker that holds all rows"
            )

    def _look_at_weights(self, code: EntryPoint, model: nn.Module, batch: Any) -> None:
        """Warn if the loss depends on how a batch is cut; after a step, since a last layer of zeros hides it."""
        model.eval()
        with torch.no_grad(), autocast(code.precision, CPU):
            dtype, step = AUTOCAST.get(code.precision), code["training_step"]
            difference = loss_weights.difference(None, model, step, batch, self._num_samples, dtype)
        model.train()
        if difference is not None and code.is_exact:
            self._report.note(
                f"{difference}: it depends on train.virtual_shards, and on no number of workers"
            )
        elif difference is not None:
            message = f"{difference}: it depends on the number of workers"
            self._report.warn("weights", code.key_of("training_step"), message, loss_weights.REMEDY)


def main() -> None:
    """Look at one job and exit; the parent ends the processes that the job's code left running."""
    die_with_parent(int(sys.argv[1]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash is reported and leaves no core file
    request = from_json(DeepRequest, json.load(sys.stdin))
    with open(os.devnull, "rb") as nothing:  # noqa: PTH123  # a descriptor is wanted
        os.dup2(nothing.fileno(), 0)
    report = Report(int(sys.argv[2]), request.own)
    Probe(report, request).run()
    report.end()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
