"""Has torch's compiler imported when something compiles, instead of by the first optimizer.

`torch._dynamo` takes nearly as long to import as the rest of torch. Optimizers and DistributedDataParallel import it also in
programs that compile nothing, to keep themselves out of a trace. After `defer` a module stands in its place that gives five
modules of torch the answers of a compiler that compiles nothing; any other use imports the compiler.

Source: torch/_compile.py (`_disable_dynamo`), torch/optim/optimizer.py (`_use_grad_for_differentiable`),
torch/nn/parallel/distributed.py (`DistributedDataParallel.__init__`), torch/distributed/distributed_c10d.py
(`init_process_group`), torch/utils/checkpoint.py (`_checkpoint_without_reentrant_generator`, `_recomputation_hook`); 2.13, 2.14.
A version that asks for more imports the compiler earlier, as it does without this module.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import threading
import time
from collections import deque
from importlib.abc import Loader
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec

_COMPILER = "torch._dynamo"
_OF_IMPORTS = "<frozen importlib._bootstrap>"
_LONGEST_WAIT_S = 60  # the import takes 1 to 10 s


def defer() -> None:
    """Have torch's compiler imported at its first use from here on; nothing changes if it has been imported already.

    Call it after `import torch`, before the first optimizer is made.
    """
    if _COMPILER in sys.modules or (spec := importlib.util.find_spec(_COMPILER)) is None:
        return
    deferred = _Deferred(spec)
    forks = deferred.forks
    os.register_at_fork(
        before=forks.begin, after_in_parent=forks.end_in_parent, after_in_child=forks.end_in_child
    )
    sys.modules[_COMPILER] = deferred
    vars(sys.modules["torch"])["_dynamo"] = deferred
    sys.meta_path.insert(0, _Finder(deferred))


def once_imported(act: Callable[[], None]) -> None:
    """Call *act* as soon as the compiler is imported, which is deferred: now, later, or never if nothing compiles."""
    defer()
    module = sys.modules.get(_COMPILER)
    if isinstance(module, _Deferred):
        module.waiting.append(act)
    elif module is not None:
        act()


def _nothing() -> None:
    """Do what the compiler does for a program that compiles nothing."""


class _Deferred(ModuleType):
    """Stands for the compiler until something compiles."""

    def __init__(self, spec: ModuleSpec) -> None:
        super().__init__(_COMPILER)
        vars(self).update(
            # Code that walks through all modules asks for these, and must not import the compiler.
            __file__=spec.origin,
            __package__=_COMPILER,
            __path__=spec.submodule_search_locations,
            __spec__=spec,
            waiting=deque(),
            lock=threading.Lock(),
            forks=_Forks(),
            answers={
                ("torch._compile", "disable"): self._keep_out,
                ("torch.optim.optimizer", "graph_break"): _nothing,
                ("torch.nn.parallel.distributed", "utils"): _Part(
                    self, "utils", get_optimize_ddp_mode=lambda: "ddp_optimizer"
                ),
                ("torch.distributed.distributed_c10d", "trace_rules"): _Part(
                    self, "trace_rules", clear_lru_cache=_nothing
                ),
                # A hook for one backward pass, whose forward pass would have imported the compiler if it compiled anything.
                ("torch.utils.checkpoint", "disable"): lambda hook: hook,
                ("torch.utils.checkpoint", "config"): _Part(self, "config", error_on_nested_fx_trace=True),
            },
        )

    def __getattr__(self, name: str) -> Any:
        if sys.modules.get(_COMPILER) is self:
            asking = sys._getframe(1).f_globals.get("__name__")  # noqa: SLF001  public, in spite of its name
            if (answer := self.answers.get((asking, name))) is not None:
                return answer
        return getattr(self.imported(), name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self.imported(), name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self.imported(), name)

    def __dir__(self) -> list[str]:
        return dir(self.imported())

    def _keep_out(self, fn: Any, recursive: bool, *, wrapping: bool) -> Any:
        """Return *fn* for the wrapper that torch has put around it, which asks the compiler as soon as there is one."""

        def keep_out() -> None:
            setattr(fn, "__dynamo_disable", self.imported().disable(fn, recursive, wrapping=wrapping))

        self.waiting.append(keep_out)
        return fn

    def imported(self) -> Any:
        """Return the compiler, imported; what waits for that is done before."""
        self.forks.wait_for_end()
        with self.lock:  # not held while importing: imports have locks of their own, which notice when threads wait in a circle
            if sys.modules.get(_COMPILER) is self:
                self.forks.importing = threading.get_ident()
                del sys.modules[_COMPILER]
        compiler = importlib.import_module(_COMPILER)
        if not compiler.__spec__._initializing:  # type: ignore[union-attr]  # noqa: SLF001  asked for by itself, or all there
            for act in iter(self._next_waiting, None):
                act()
        return compiler

    def _next_waiting(self) -> Callable[[], None] | None:
        with self.lock:
            return self.waiting.popleft() if self.waiting else None


class _Forks:
    """Has forks wait while another thread imports the compiler.

    A child could import nothing more of it. And both would wait for ever: a fork takes the lock of `logging`, then that of
    imports, while a thread that imports a module of the compiler takes them the other way round (CPython, PyOS_BeforeFork,
    Lib/importlib/_bootstrap.py `_find_spec`). So `begin` is registered after, and called before, what `logging` has registered.
    """

    def __init__(self) -> None:
        self.importing: int | None = None  # the thread
        self._forking: set[int] = set()  # threads

    @property
    def has_begun(self) -> bool:
        """True while another thread forks."""
        return bool(self._forking - {threading.get_ident()})

    def begin(self) -> None:
        """Wait until no other thread imports the compiler; that thread may wait for this one, so not for ever."""
        deadline = time.monotonic() + _LONGEST_WAIT_S
        while self._is_imported_elsewhere() and time.monotonic() < deadline:
            time.sleep(0.001)
        self._forking.add(threading.get_ident())

    def _is_imported_elsewhere(self) -> bool:
        """Return whether the thread that began to import the compiler, another one, still imports: it then holds locks of imports."""
        if self.importing in (None, threading.get_ident()):
            return False
        frame = sys._current_frames().get(self.importing)  # noqa: SLF001  public, in spite of its name
        while frame is not None and frame.f_code.co_filename != _OF_IMPORTS:
            frame = frame.f_back
        if frame is None:
            self.importing = None  # what it imports later is no concern of forks
        return frame is not None

    def end_in_parent(self) -> None:
        """Have other threads import the compiler again."""
        self._forking.discard(threading.get_ident())

    def end_in_child(self) -> None:
        """Know of the only thread that the child has."""
        self._forking = set()

    def wait_for_end(self) -> None:
        """Wait while another thread forks: milliseconds."""
        deadline = time.monotonic() + _LONGEST_WAIT_S
        while self.has_begun and time.monotonic() < deadline:
            time.sleep(0.001)


class _Part:
    """Stands for a module of the compiler, with the answers to what torch asks of it."""

    def __init__(self, deferred: _Deferred, name: str, **answers: object) -> None:
        vars(self).update(answers)
        self._deferred, self._name = deferred, name

    def __getattr__(self, name: str) -> Any:
        return getattr(getattr(self._deferred.imported(), self._name), name)


class _Finder:
    """Imports the compiler before the first of its modules, by which that may be imported as well."""

    def __init__(self, deferred: _Deferred) -> None:
        self._deferred = deferred

    def find_spec(self, name: str, path: Sequence[str] | None, target: object = None) -> ModuleSpec | None:
        """Return how to import a module of the compiler, if it is imported by now; else the next finder knows."""
        is_asked = name.startswith(f"{_COMPILER}.") and sys.modules.get(_COMPILER) is self._deferred
        if not is_asked or self._deferred.forks.has_begun:
            # A thread that forks waits for the lock that is held here; the module is imported alone, and the compiler after that.
            return None
        self._deferred.imported()
        module = sys.modules.get(name)
        return None if module is None else importlib.util.spec_from_loader(name, _Imported(module))


class _Imported(Loader):
    """Loads a module that is imported already, and leaves it as it is."""

    def __init__(self, module: ModuleType) -> None:
        self._module, self._spec = module, module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the module."""
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        """Give the module its own spec back."""
        module.__spec__ = self._spec
