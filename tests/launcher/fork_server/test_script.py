"""A script in a worker does what it does under `python`: run both ways, and compared."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING, NamedTuple

import pytest

from elasticflow.launcher.agent.worker_streams import WorkerStreams
from elasticflow.launcher.agent.workers import ForkedWorkers, GroupState
from elasticflow.launcher.fork_server.client import ForkServer
from elasticflow.launcher.fork_server.protocol import Setup, TorchrunOptions
from elasticflow.protocol.child_processes import Program
from elasticflow.protocol.json_codec import to_json
from elasticflow.run_folder import RunFolder
from tests.launcher.conftest import close, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("real_processes")

ARGS = ("--lr", "0.1", "a b")

# Each prints what it finds, or ends in its own way.
SCRIPTS = {
    "arguments, folder and path": """
        import os, sys
        print(sys.argv, os.getcwd(), sys.path[0])
        import beside
        print(beside.__file__, __file__, __name__, __spec__, __package__, __builtins__.__name__)
    """,
    "argparse errors": """
        import argparse
        parser = argparse.ArgumentParser()
        parser.add_argument("--lr", type=int)
        parser.parse_args()
    """,
    "exit codes": "import sys; sys.exit(3)",
    "exit texts": "import sys; print('first'); sys.exit('no data')",
    "exit without a code": "raise SystemExit",
    "exceptions": """
        def inner():
            raise ValueError("no such layer")
        if __name__ == "__main__":
            inner()
    """,
    "syntax errors": "x = (\n",
    "its own hook of exceptions": """
        import sys
        sys.excepthook = lambda kind, error, trace: print("hooked", kind.__name__, error)
        raise KeyError("lost")
    """,
    "its own sys.exit": """
        import atexit, sys
        noted, leave = [], sys.exit
        def note(code=0):
            noted.append(code)
            leave(code)
        sys.exit = note
        atexit.register(print, "noted", noted)
    """,
    "exit handlers": """
        import atexit, sys
        atexit.register(print, "last")
        atexit.register(lambda: print("before", sys.modules["__main__"].kept))
        kept = "kept"
    """,
    "threads": """
        import threading, time
        thread = threading.Thread(target=lambda: (time.sleep(0.2), print("thread", kept)))
        thread.start()
        kept = "main is over"
        print("main")
    """,
    "carriage returns": r"""
        import sys
        for part in range(3):
            sys.stdout.write(f"\r{part} of 2")
        sys.stderr.write("\rbar\r\n")
    """,
    "classes of main": """
        import pickle
        class Point:
            def __init__(self, x): self.x = x
        if __name__ == "__main__":
            text = pickle.dumps(Point(3))
            print(b"__main__" in text, pickle.loads(text).x)
    """,
    "forked children": """
        import multiprocessing
        def double(x): return 2 * x
        if __name__ == "__main__":
            with multiprocessing.get_context("fork").Pool(2) as pool:
                print(pool.map(double, [1, 2, 3]))
    """,
    "spawned children": """
        import multiprocessing, sys
        class Box:
            def __init__(self, x): self.x = x
        def double(box): return box.x * 2, __name__, sys.argv[1:]
        print("imported as", __name__)
        if __name__ == "__main__":
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                print(pool.map(double, [Box(1), Box(2)]))
    """,
    "signals": """
        import os, signal, sys
        print(signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT).__name__)
        print(signal.pthread_sigmask(signal.SIG_BLOCK, []))
        os.kill(os.getpid(), signal.SIGTERM)
    """,
    "its own handler of SIGTERM": """
        import os, signal, sys
        signal.signal(signal.SIGTERM, lambda *_: (print("saved"), sys.exit(0)))
        os.kill(os.getpid(), signal.SIGTERM)
        signal.pause()
    """,
    "interrupts": "import os, signal; os.kill(os.getpid(), signal.SIGINT)",
}

ALSO_SPAWNED = {"arguments, folder and path", "exceptions", "spawned children", "its own handler of SIGTERM"}


class Ended(NamedTuple):
    """What a process has printed, and how it ended."""

    stdout: str
    stderr: str
    code: int


class Forked:
    """A fork server with torch, whose workers run `train.py` in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.program = Program(str(folder / "src" / "train.py"), "src/train.py", "", ARGS, str(folder))
        path = (str(folder / "src"),)
        self.server = ForkServer.start(Setup(entry_point="", path=path, script=self.program))
        self.server.wait_ready()

    def start(self, code: str, run: str, workers: int = 1) -> ForkedWorkers:
        """Start workers that run *code*, in a run folder called *run*."""
        write(self.folder, code)
        streams = WorkerStreams(
            RunFolder(self.folder / "runs" / "job" / run),
            1,
            {rank: rank for rank in range(workers)},
            TorchrunOptions(nproc=workers),
            "n0",
        )
        group = ForkedWorkers(self.server, {rank: {"RANK": str(rank)} for rank in range(workers)}, streams)
        group.start()
        self.streams = streams
        return group

    def ended(self, code: str, run: str) -> Ended:
        """Return how one worker ended that ran *code*."""
        group = self.start(code, run)
        wait_until(lambda: group.poll() is not GroupState.RUNNING)
        code_of = group.exits()[0][0]
        return Ended(
            self.streams.stdouts[0].read_text("utf-8"), self.streams.stderrs[0].read_text("utf-8"), code_of
        )


def write(folder: Path, code: str) -> None:
    """Write the script, with a module beside it."""
    (folder / "src").mkdir(exist_ok=True)
    (folder / "src" / "beside.py").write_text("")
    (folder / "src" / "train.py").write_text(textwrap.dedent(code))


@pytest.fixture(scope="module")
def forked(real_processes: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forked]:
    """Yield one server for all tests: it takes seconds to import torch."""
    forked = Forked(tmp_path_factory.mktemp("script"))
    yield forked
    close(forked.server)


def by_python(folder: Path, *command: str) -> Ended:
    """Return what plain Python makes of it."""
    environ = {**os.environ, "PYTHONUNBUFFERED": "1"}
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        capture_output=True,
        text=True,
        env=environ,
        timeout=60,
        check=False,
    )
    return Ended(done.stdout, done.stderr, done.returncode)


def spawned(program: Program) -> Ended:
    """Return what becomes of a worker that is started anew instead of forked."""
    module = "elasticflow.launcher.fork_server.worker_process"
    done = subprocess.run(
        [sys.executable, "-u", "-m", module, str(os.getpid()), to_json(program)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return Ended(done.stdout, done.stderr, done.returncode)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_does_as_under_python(forked: Forked, name: str) -> None:
    """Output, traceback and exit code are the same, to the letter, in a forked worker and in one started anew."""
    write(forked.folder, SCRIPTS[name])
    expected = by_python(forked.folder, "src/train.py", *ARGS)

    absolute = expected._replace(
        stderr=expected.stderr.replace('"src/train.py"', f'"{forked.program.entry}"')
    )
    assert absolute == forked.ended(SCRIPTS[name], re.sub(r"\W", "_", name))
    if name in ALSO_SPAWNED:
        assert absolute == spawned(forked.program)


@pytest.mark.parametrize("module", ["pkg.train", "pkg"])
def test_a_module_does_as_under_python(tmp_path: Path, module: str) -> None:
    """Relative imports, `__main__.py` of a package, what children that it spawns import; arguments and folder."""
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "__init__.py").write_text("print('package')")
    (tmp_path / "pkg" / "beside.py").write_text("word = 'relative'")
    code = """
        import multiprocessing, os, sys
        from .beside import word
        def ask(_): return word, __name__, __spec__.name
        if __name__ == "__main__":
            print(sys.argv, os.getcwd(), sys.path[0], __package__, __spec__.name, __file__)
            if __spec__.name == "pkg.train":  # Python's own children cannot import a `__main__.py`
                with multiprocessing.get_context("spawn").Pool(1) as pool:
                    print(pool.map(ask, [1]))
            raise RuntimeError(word)
    """
    for name in ("train.py", "__main__.py"):
        (tmp_path / "pkg" / name).write_text(textwrap.dedent(code))
    expected = by_python(tmp_path, "-m", module, *ARGS)
    found = spawned(Program("", "", module, ARGS, str(tmp_path)))

    # Python's own two frames of `-m` are not shown.
    shown = re.sub(r'  File "<frozen runpy>".*\n', "", expected.stderr)
    assert (expected.stdout, shown, expected.code) == found


def test_a_module_that_is_not_there_says_so(tmp_path: Path) -> None:
    """As an error of the worker, with its name."""
    found = spawned(Program("", "", "nowhere.train", (), str(tmp_path)))
    assert "No module named 'nowhere'" in found.stderr
    assert found.code == 1


def test_what_notes_the_exit_code_is_told_of_it(forked: Forked) -> None:
    """`elasticflow.join` puts it there: a script that raises `SystemExit` calls no function."""
    code = """
        import sys
        def leave(status=0): raise AssertionError
        leave.note_status = lambda status: print("noted", status)
        sys.exit = leave
        raise SystemExit(3)
    """
    assert Ended("noted 3\n", "", 3) == forked.ended(code, "noted")


def test_workers_draw_numbers_of_their_own(forked: Forked) -> None:
    """As processes do that are started anew: they were forked from one, whose state would be everybody's."""
    code = "import random, numpy; print(random.random(), numpy.random.random())"
    group = forked.start(code, "draws", workers=2)
    wait_until(lambda: group.poll() is GroupState.FINISHED)
    drawn = [forked.streams.stdouts[rank].read_text().split() for rank in range(2)]

    assert len({number for of_rank in drawn for number in of_rank}) == 4


def test_loader_processes_of_torch(forked: Forked) -> None:
    """Forked and spawned ones read the script's own dataset."""
    code = """
        import torch
        from torch.utils.data import DataLoader, Dataset
        class Squares(Dataset):
            def __len__(self): return 4
            def __getitem__(self, index): return index * index
        if __name__ == "__main__":
            for way in ("fork", "spawn"):
                print([int(x) for x in DataLoader(Squares(), num_workers=1, multiprocessing_context=way)])
    """
    assert Ended("[0, 1, 4, 9]\n[0, 1, 4, 9]\n", "", 0) == forked.ended(code, "loaders")


def test_a_drain_that_comes_before_the_script_has_begun_waits_for_it(forked: Forked) -> None:
    """SIGTERM is blocked from the fork on; the script's own folder of modules comes first, `job.path` last."""
    group = forked.start("import time; time.sleep(60)", "drained")
    group.send(signal.SIGTERM)
    wait_until(lambda: group.poll(may_leave=True) is not GroupState.RUNNING)

    assert group.poll(may_leave=True) is GroupState.FINISHED
    assert group.poll() is GroupState.FAILED
    assert group.exits()[0][0] == -signal.SIGTERM


def test_a_script_that_ends_at_once_after_ddp_does_not_wait_for_ever(forked: Forked) -> None:
    """DDP's destructor waits, with Python's lock, for a thread that wants the lock: plain Python hung in each of six tries of this."""
    code = """
        import sys
        import torch
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel

        def train():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            model = DistributedDataParallel(torch.nn.Linear(4, 4))
            model(torch.ones(2, 4)).sum().backward()
            dist.destroy_process_group()

        sys.setswitchinterval(60)  # no one else has the lock by chance
        for _ in range(60):
            train()
    """
    assert Ended("", "", 0) == forked.ended(code, "let_go")
