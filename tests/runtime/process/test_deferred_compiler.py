"""Programs that compile nothing do without torch's compiler; those that compile have it, as if it had been there before."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.forked import Interpreter

if TYPE_CHECKING:
    from collections.abc import Iterator

BEGIN = """
import json, random, sys
import numpy as np
import torch
from elasticflow.runtime.process import deferred_compiler, torch_private
said = []
def imported(): return any(name.startswith("torch._dynamo.") for name in sys.modules)
def random_state(): return random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def train_step():
    optimizer.zero_grad()
    model(torch.ones(3, 2)).sum().backward()
    optimizer.step()
"""

pytestmark = pytest.mark.usefixtures("real_processes")


@pytest.fixture(scope="module")
def interpreter() -> Iterator[Interpreter]:
    """Yield an interpreter after BEGIN, whose forks have no compiler yet."""
    started = Interpreter(BEGIN)
    yield started
    started.close()


def test_nothing_that_trains_without_a_compiler_imports_it(interpreter: Interpreter) -> None:
    """A process group, DistributedDataParallel, optimizers, schedules, averages, clipping, checkpoints, a new group.

    `torch._dynamo` then comes with a use of its own: a module of it, which is imported once, and draws no random number.
    """
    said = interpreter.said("""
        import os
        import torch.distributed as dist
        from torch.utils.checkpoint import checkpoint
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1")
        for _ in range(2):
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            ddp = torch.nn.parallel.DistributedDataParallel(model)
            average = torch.optim.swa_utils.AveragedModel(model)
            for kind in (torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop):
                optimizer = kind(model.parameters(), lr=0.1)
                schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
                loss = checkpoint(ddp, torch.ones(3, 2, requires_grad=True), use_reentrant=False).sum()
                torch.amp.GradScaler("cpu").scale(loss).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                train_step()
                schedule.step(); average.update_parameters(model)
                optimizer.load_state_dict(optimizer.state_dict())
            dist.destroy_process_group()
        from elasticflow.runtime.training import determinism
        determinism.be_deterministic()
        determinism.require_deterministic()
        import inspect; inspect.getmodule(train_step)
        said += [imported()]
        deferred_compiler.once_imported(lambda: said.append("at the import"))
        before = random_state()
        import torch._dynamo.config as config
        import torch._dynamo.utils
        said += [before == random_state(), config is torch._dynamo.config is sys.modules["torch._dynamo.config"]]
        said += [type(config.__spec__.loader).__name__, type(sys.modules["torch._dynamo"]).__name__, "graph_break" in dir(torch._dynamo)]
        deferred_compiler.once_imported(lambda: said.append("afterwards"))
        # The compiler's own answers to what torch has asked above.
        said += [torch._dynamo.utils.get_optimize_ddp_mode(), config.error_on_nested_fx_trace]
        said += [torch._inductor.config.deterministic, torch.are_deterministic_algorithms_enabled()]
    """)
    assert [
        False,
        "at the import",
        True,
        True,
        "SourceFileLoader",
        "module",
        True,
        "afterwards",
        "ddp_optimizer",
        True,
        True,
        True,
    ] == said


@pytest.mark.nightly  # a compiled job that is killed runs at every push
def test_a_compiled_step_is_what_it_is_with_a_compiler_that_was_there_before(
    interpreter: Interpreter,
) -> None:
    """Optimizers whose methods were called before the import stay out of graphs, as torch means them to; bits are equal.

    Counted are graphs and reasons why they break, in a program that imports the compiler first and in one that does not.
    """
    program = """
        {first}
        from elasticflow.runtime.training import determinism
        from elasticflow.runtime.process.compiler import Compilation
        class Heartbeat:
            def phase(self, name): return name
        determinism.be_deterministic()
        compilation = Compilation(Heartbeat()); compilation.watch()
        train_step(); optimizer.state_dict()
        graphs = []
        def count(graph, inputs): graphs.append(len(list(graph.graph.nodes))); return graph.forward
        step = torch.compile(train_step, backend=count)
        with torch.no_grad():
            for parameter in model.parameters(): parameter.fill_(0.5)
        for _ in range(3): step()
        said += [graphs, [p.tolist() for p in model.parameters()], compilation.has_happened]
        said += [torch._dynamo.config.automatic_dynamic_shapes, torch._inductor.config.deterministic]
        said += [sorted(torch._dynamo.utils.counters["graph_break"])]
    """
    ahead = interpreter.said(program.format(first="import torch._dynamo.config"))
    deferred = interpreter.said(program.format(first="assert not imported()"))

    assert ahead == deferred
    assert [True, False, True] == deferred[2:5]


def test_a_name_of_the_compiler_is_replaced_and_put_back(interpreter: Interpreter) -> None:
    """As by `unittest.mock.patch`, which deletes the name that it has set, and sets the old value again."""
    said = interpreter.said("""
        from unittest import mock
        held = sys.modules["torch._dynamo"]
        with mock.patch.object(held, "is_compiling", lambda: 7): said += [torch._dynamo.is_compiling()]
        said += [torch._dynamo.is_compiling(), type(sys.modules["torch._dynamo"]).__name__]
    """)
    assert [7, False, "module"] == said


def test_threads_that_use_the_compiler_at_once_import_it_once(interpreter: Interpreter) -> None:
    """Whether they import a module of it, ask for a name, set a name, or import what imports it."""
    said = interpreter.said("""
        import importlib, threading
        optimizer.state_dict()
        held = sys.modules["torch._dynamo"]
        acts = [
            lambda: importlib.import_module("torch._dynamo.config"),
            lambda: held.is_compiling(),
            lambda: setattr(held, "mark", 1),
            lambda: importlib.import_module("torch.distributed.fsdp"),
            lambda: torch.compile(model, backend="eager"),
            lambda: held.disable(train_step),
        ]
        calls = []
        deferred_compiler.once_imported(lambda: calls.append(1))
        threads = [threading.Thread(target=lambda act=act: (act(), said.append(1))) for act in acts * 2]
        for thread in threads: thread.start()
        for thread in threads: thread.join(100)
        said += [len(calls), torch._dynamo.mark, sys.modules["torch._dynamo"] is torch._dynamo is not held]
        said += [held.graph_break is torch._dynamo.graph_break]
    """)
    assert [*[1] * 12, 1, 1, True, True] == said


def test_a_fork_while_a_thread_imports_the_compiler_waits_for_nothing(interpreter: Interpreter) -> None:
    """As a loader's process may be started while another thread compiles for the first time; the child can compile, too."""
    said = interpreter.said("""
        import os, threading
        optimizer.state_dict()
        thread = threading.Thread(target=__import__, args=("torch._dynamo.config",))
        thread.start()
        forks = 0
        while thread.is_alive():
            child = os.fork()
            if child == 0: os._exit(0)
            os.waitpid(child, 0)
            forks += 1
        said += [forks > 0, imported()]
        child = os.fork()
        if child == 0:
            import torch._dynamo.config
            os._exit(0)
        said += [os.waitpid(child, 0)[1]]
    """)
    assert [True, True, 0] == said


def test_a_module_that_does_not_come_along_is_found(interpreter: Interpreter) -> None:
    """One of the compiler's that it does not import itself has its own loader; one that does not exist is an error."""
    said = interpreter.said("""
        import importlib, importlib.util
        said += [importlib.util.find_spec("torch._dynamo.gone") is None]
        from pathlib import Path
        name = next(
            each.stem
            for each in sorted(Path(importlib.util.find_spec("torch._dynamo").origin).parent.glob("*.py"))
            if each.stem in ("tensorboard_utils", "test_case", "test_minifier_common", "testing", "graph_utils")
        )
        module = importlib.import_module(f"torch._dynamo.{name}")
        said += [imported(), type(module.__spec__.loader).__name__, module.__file__.endswith(f"{name}.py")]
    """)
    assert [True, True, "SourceFileLoader", True] == said
