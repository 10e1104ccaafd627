"""Which threads a forked worker can do without; each library that counts as safe is used before and after a real fork."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("real_processes")

ROOT = Path(__file__).parents[3]

ARROW = """
import pyarrow, pyarrow.parquet

def use():
    table = pyarrow.table({"number": list(range(200_000)), "text": [str(i) for i in range(200_000)]})
    pyarrow.parquet.write_table(table, "numbers.parquet", row_group_size=10_000)
    read = pyarrow.parquet.read_table("numbers.parquet", use_threads=True)
    return read.group_by("number").aggregate([("text", "count")]).num_rows
"""

OPENBLAS = """
import numpy

def use():
    return int((numpy.ones((600, 600)) @ numpy.ones((600, 600))).sum())
"""

TOKENIZERS = """
from tokenizers import Tokenizer, models, pre_tokenizers

def use():
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return sum(len(encoding.ids) for encoding in tokenizer.encode_batch(["a b c"] * 1000))
"""

TORCH = """
import torch

def use():
    torch.set_num_threads(2)
    return float(torch.ones(3_000_000).exp().sum()) > 0
"""

PYTHON = """
import threading, time

def use():
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
"""


def run(folder: Path, code: str, then: str) -> list[object]:
    """Return what *then* prints as JSON, in a process that has run *code*."""
    program = textwrap.dedent(code) + textwrap.dedent(
        """
        import json, os, sys
        from elasticflow.launcher.fork_server.native_threads import missed_in_a_child
        """
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "4"}
    environment.pop("TOKENIZERS_PARALLELISM", None)
    done = subprocess.run(
        [sys.executable, "-c", program + textwrap.dedent(then)],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        cwd=folder,
        env=environment,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize(
    ("module", "code"), [("pyarrow", ARROW), ("numpy", OPENBLAS), ("tokenizers", TOKENIZERS)]
)
def test_a_forked_child_works_on_where_threads_count_as_safe(tmp_path: Path, module: str, code: str) -> None:
    """The library has made its threads, which wait; a child, and a child made later, get the same from it. Older versions are not known."""
    pytest.importorskip(module)
    then = """
        import faulthandler, threading
        expected = use()
        print(json.dumps(len(os.listdir("/proc/self/task")) > 1))
        print(json.dumps(missed_in_a_child()))
        import importlib.metadata
        known, importlib.metadata.version = importlib.metadata.version, lambda name: "11.0.0"
        print(json.dumps(missed_in_a_child()))
        importlib.metadata.version = known
        for _ in range(2):
            pid = os.fork()
            if pid == 0:
                faulthandler.dump_traceback_later(30, exit=True)
                os._exit(0 if use() == expected else 1)
            print(json.dumps(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])), flush=True)
        print(json.dumps(use() == expected), flush=True)
        os._exit(0)
    """
    has_threads, missed, missed_if_older, *others = run(tmp_path, code, then)
    assert [True, None, 0, 0, True] == [has_threads, missed, *others]
    assert str(missed_if_older).startswith("threads of libarrow.so") is (module == "pyarrow")


@pytest.mark.parametrize(
    ("code", "library"), [(TORCH, "libgomp"), (PYTHON, "threads of Python")], ids=["torch", "python"]
)
def test_whose_threads_would_be_missed_is_told(tmp_path: Path, code: str, library: str) -> None:
    """A child of libgomp's process waits for ever for the threads of a parallel region; nobody starts a Python thread again."""
    then = """
        use()
        print(json.dumps(missed_in_a_child()), flush=True)
        os._exit(0)
    """
    (missed,) = run(tmp_path, code, then)
    assert library in str(missed)


def test_a_thread_that_never_waits_is_not_safe(tmp_path: Path) -> None:
    """Its stack cannot be read while it runs: nothing is promised of it."""
    code = """
        import hashlib, pathlib, threading, time

        def use():
            busy = lambda: hashlib.pbkdf2_hmac("sha256", b"", b"", 1 << 30)
            thread = threading.Thread(target=busy, daemon=True)
            thread.start()
            runs = 0
            while runs < 3:  # at first it may wait for the interpreter
                time.sleep(0.1)
                runs = runs + 1 if "running" in pathlib.Path(f"/proc/self/task/{thread.native_id}/syscall").read_text() else 0
    """
    then = """
        use()
        print(json.dumps(missed_in_a_child()), flush=True)
        os._exit(0)
    """
    assert ["threads of unknown code"] == run(tmp_path, code, then)


def test_what_another_thread_left_on_a_stack_is_no_sign(tmp_path: Path) -> None:
    """A new thread may get the stack of one that has ended: an address in another library may still lie there."""
    then = """
        import ctypes
        from elasticflow.launcher.fork_server import native_threads
        use()
        (thread, *_) = native_threads._other_threads()
        call = []
        while len(call) < 3:  # it waits soon
            call = (native_threads._TASKS / str(thread) / "syscall").read_text().split()
        pointer = int(call[-2], 16)
        words = (ctypes.c_uint64 * 64).from_address(pointer)
        other = ctypes.cast(ctypes.pythonapi.PyLong_FromLong, ctypes.c_void_p).value
        words[next(i for i, word in enumerate(words) if i > 8 and word == 0)] = other
        print(json.dumps(missed_in_a_child()), flush=True)
        os._exit(0)
    """
    pytest.importorskip("numpy")
    assert [None] == run(tmp_path, OPENBLAS, then)
