"""A worker's own script, run in this process as `python train.py` or `python -m pkg.train` runs it in a new one."""

from __future__ import annotations

import atexit
import builtins
import contextlib
import functools
import importlib.util
import os
import random
import signal
import sys
import threading
import time
from importlib.machinery import SourceFileLoader
from types import CodeType, ModuleType, TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, cast

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec

    from elasticflow.protocol.child_processes import Program

_NAME = "__main__"
# A thread that waits for the interpreter's lock gets it at once.
_LET_GO_S = 0.05


def run_script(program: Program) -> NoReturn:
    """Run *program* as the main program and end this process as Python would; never returns.

    The script gets its own arguments, folder, `sys.path[0]` and `__main__` (spawned processes import from there),
    and random numbers of its own unless it seeds them. At its end its threads are waited for and its
    exit handlers are called; destructors are not (torch 2.13, gloo: `~ProcessGroupGloo` can wait for ever).
    """
    code = 1
    try:
        code = _exit_code(program)
        # `elasticflow.join` has put this there. The function itself may be the script's own, which Python would not call here.
        getattr(sys.exit, "note_status", lambda _: None)(code)
        code = _finish() or code
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _exit_code(program: Program) -> int:
    """Run the script; return the exit code, once what it raised is shown by its own `sys.excepthook`."""
    try:
        _run(program)
    except SystemExit as leaving:
        return _code_of(leaving)
    except BaseException as error:  # noqa: BLE001  the last frame of a program: everything is shown, then it ends
        error.__traceback__ = _of_script(error, error.__traceback__)
        sys.excepthook(type(error), error, error.__traceback__)
        if isinstance(error, KeyboardInterrupt):  # Python ends as if the signal had ended it
            _end_by(signal.SIGINT)
        return 1
    return 0


def _code_of(leaving: SystemExit) -> int:
    """Return the code of `sys.exit`, as Python has it: None is 0, a text is shown and is 1."""
    if leaving.code is None:
        return 0
    if isinstance(leaving.code, int):
        return leaving.code & 0xFF
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.write(f"{leaving.code}\n")
    return 1


def _run(program: Program) -> None:
    os.chdir(program.folder)
    for name in program.path:
        if name not in sys.path:
            sys.path.append(name)
    _draw_anew()
    # Blocked since before the fork, so that no drain is lost before there is someone to take it; the script has
    # Python's own handlers until it sets others.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGINT})
    _let_go_after_groups()
    code, main = _of_module(program) if program.module else _of_file(program)
    sys.modules[_NAME] = main
    exec(code, main.__dict__)  # noqa: S102  # the program itself


def _of_file(program: Program) -> tuple[CodeType, ModuleType]:
    sys.argv = [program.name, *program.args]
    loader = SourceFileLoader(_NAME, program.entry)
    main = ModuleType(_NAME)
    main.__file__, main.__loader__, main.__spec__ = program.entry, loader, None
    vars(main).update(
        {"__builtins__": builtins, "__cached__": None, "__package__": None, "__annotations__": {}}
    )
    data = loader.get_data(program.entry)
    return compile(data, program.entry, "exec", dont_inherit=True), main


def _of_module(program: Program) -> tuple[CodeType, ModuleType]:
    """Return the module's code and its `__main__`, whose spec says how processes that it spawns find it."""
    sys.argv = ["-m", *program.args]  # what packages see that are imported on the way
    spec = _spec_of(program.module)
    if spec.submodule_search_locations is not None:
        spec = _spec_of(f"{program.module}.{_NAME}")
    loader = spec.loader
    code = None if loader is None else cast("SourceFileLoader", loader).get_code(spec.name)
    if code is None:
        raise ImportError(f"{program.module} has no code that can be run")
    sys.argv[0] = spec.origin or program.module
    main = ModuleType(_NAME)
    main.__file__, main.__loader__, main.__spec__ = spec.origin, loader, spec
    main.__package__ = spec.parent
    vars(main).update({"__builtins__": builtins, "__cached__": spec.cached})
    return code, main


def _spec_of(name: str) -> ModuleSpec:
    spec = importlib.util.find_spec(name)
    if spec is None:
        raise ImportError(f"No module named {name}", name=name)
    return spec


def _draw_anew() -> None:
    """Give this process random numbers of its own, as a new one has: the fork server's are every worker's."""
    random.seed()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()


def _let_go_after_groups() -> None:
    """Have `destroy_process_group` give the threads of process groups a moment in which they may use Python.

    The work of a gloo thread holds a Python object of its backward pass (torch 2.13, autograd/graph.py `_engine_run_backward`),
    and takes the interpreter's lock to drop it. A script that ends at once holds that lock until DDP's destructor waits for the
    thread: both wait for ever. In a new process the imports at the end let go of the lock; here all is imported.
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is None:
        return
    destroy = distributed.destroy_process_group

    @functools.wraps(destroy)
    def destroy_and_let_go(*args: Any, **kwargs: Any) -> Any:
        try:
            return destroy(*args, **kwargs)
        finally:
            time.sleep(_LET_GO_S)

    for module in (distributed, sys.modules.get("torch.distributed.distributed_c10d")):
        if module is not None:
            module.destroy_process_group = destroy_and_let_go  # type: ignore[attr-defined]


def _of_script(error: BaseException, trace: TracebackType | None) -> TracebackType | None:
    """Return the part of a traceback that begins in the script, which Python would show; else all of it."""
    inner = trace
    while inner is not None and inner.tb_frame.f_code.co_filename == __file__:
        inner = inner.tb_next
    is_of_text = inner is None and isinstance(error, SyntaxError)  # it names the place itself
    return None if is_of_text else inner or trace


def _finish() -> int:
    """Wait for the script's threads and call its exit handlers, as Python does at its end; return 120 if output was lost.

    Both have no public name; `multiprocessing` ends its processes by the first (CPython, Lib/multiprocessing/process.py).
    """
    threading._shutdown()  # type: ignore[attr-defined]  # noqa: SLF001
    atexit._run_exitfuncs()  # noqa: SLF001
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        return 120
    return 0


def _end_by(number: signal.Signals) -> None:
    with contextlib.suppress(Exception):
        _finish()
        sys.stderr.flush()
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
