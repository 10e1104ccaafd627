"""A job's own code tried out: main of the child process of `--deep`.

`python -m elasticflow.runtime.deep.main PARENT_PID PIPE`, with the job on standard input. Everything the job names is
called by the functions of its generated train.py, so it is called as in a run. The code may print, hang or end the
process: what was found out by then has been reported (`runtime/deep/report.py`), and the parent (`deep_check/check.py`)
does the rest.
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
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from elasticflow.errors import StateError, StopTraining
from elasticflow.protocol.deep_messages import DeepRequest
from elasticflow.protocol.json_codec import from_json
from elasticflow.runtime.deep.data import Data
from elasticflow.runtime.deep.report import BrokenError, Report
from elasticflow.runtime.deep.state import build, count, materialize, require_held, step_without_data
from elasticflow.runtime.deep.step import train
from elasticflow.runtime.process import random_streams
from elasticflow.system.processes import die_with_parent

if TYPE_CHECKING:
    from collections.abc import Iterator

    from elasticflow.protocol.deep_messages import EvaluationSet
    from elasticflow.runtime.deep.state import Trained

# Samples: BatchNorm needs more than one.
_BATCH = 2
_BATCH_OF_STEP = 8


class Probe:
    """One look at a job.

    Args:
        report: Where problems, notes and facts go.
        request: What to try out.
    """

    def __init__(self, report: Report, request: DeepRequest) -> None:
        self._report, self._request, self._job = report, request, request.job
        self._batches: dict[str, Any] = {}
        # Of the batch of `dataset`.
        self._num_samples = 0
        # The training data; None of data shards.
        self._dataset: Any = None

    def run(self) -> None:
        """Look at everything; what depends on something broken is left out."""
        sys.path[:0] = self._request.own
        if not self._import_all():
            return
        code = ModuleType("train")
        code.__file__ = "train.py"
        exec(compile(self._request.entry_point, "train.py", "exec"), code.__dict__)  # noqa: S102  # ours
        random_streams.seed_all(self._job.seed)
        self._look_at_data(code)
        if self._lacks_values(code):
            return
        with self._part():
            self._look_at_state(code)

    def _lacks_values(self, code: ModuleType) -> bool:
        """Return whether arguments of the job stand for values of the training data, which could not be opened."""
        return hasattr(code, "VALUES") and code.dataset is None

    def _look_at_data(self, code: ModuleType) -> None:
        training = Data(self._report, code, self._job, "dataset", most=self._most_samples())
        with self._part():
            self._batches["dataset"], self._num_samples = training.batch(), training.num_samples
            self._dataset = training.dataset
        if self._lacks_values(code):
            return
        for each in self._job.evaluations:
            if self._is_known_broken(each):
                continue
            evaluation = Data(self._report, code, self._job, each.key, of_set=each)
            with self._part():
                self._batches[each.key] = evaluation.batch()
            if each.is_to_be_apart and {"dataset", each.key} <= self._batches.keys():
                with self._part():
                    evaluation.require_apart_from(training)

    def _most_samples(self) -> int:
        """Return of how many samples a batch is made: for a step, enough to tell the loss of a part from the whole's."""
        table = self._job.dataset
        at_once = table.micro_batch_size or table.global_batch_size
        return max(_BATCH, min(at_once, _BATCH_OF_STEP)) if self._request.takes_step else _BATCH

    def _is_known_broken(self, evaluation: EvaluationSet) -> bool:
        return evaluation.entry == self._job.dataset.entry and "dataset" not in self._batches

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

    def _look_at_state(self, code: ModuleType) -> None:
        report, job = self._report, self._job
        if self._request.takes_step:
            trained = build(report, code, job)
            if "dataset" in self._batches:
                train(report, code, job, trained, self._batches, self._num_samples, self._dataset)
            else:
                step_without_data(report, trained)
            # What a snapshot would leave out, the steps have reported.
            count(report, job, trained)
            return
        try:
            trained = self._on_meta(code)
        except (BrokenError, RuntimeError):  # either they are broken, or they cannot do without real tensors
            trained = build(report, code, job)
            report.note("model and optimizer were built on the CPU: the meta device does not do for them")
            step_without_data(report, trained)
        require_held(report, job, count(report, job, trained))

    def _on_meta(self, code: ModuleType) -> Trained:
        """Return what is trained, in memory that nobody touches, however large it is; problems are not reported."""
        quiet = self._report.quietly()
        with torch.device("meta"):
            trained = build(quiet, code, self._job)
        step_without_data(quiet, trained)
        materialize(trained)
        return trained


def main() -> None:
    """Look at one job and leave; what the job's code left running is the parent's to end."""
    die_with_parent(int(sys.argv[1]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash is reported, not kept
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
