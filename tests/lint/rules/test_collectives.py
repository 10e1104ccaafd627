"""Collectives that a part of the ranks reaches: forms of conditions, helpers, early exits, and what only looks alike."""

from __future__ import annotations

import pytest

from tests.lint.scripts import codes, found

# Conditions that only rank 0 meets; each with what stands before it.
ONLY_MAIN = [
    ("rank = dist.get_rank()", "rank == 0"),
    ("rank = int(os.environ['RANK'])", "0 == rank"),
    ("", "dist.get_rank() == 0"),
    ("", "not dist.get_rank()"),
    ("", "int(os.environ['LOCAL_RANK']) == 0"),
    ("here = int(os.environ.get('LOCAL_RANK', 0))", "here < 1"),
    ("local_rank = args.local_rank", "local_rank in [-1, 0]"),
    ("", "args.rank == 0"),
    ("", "dist.is_initialized() and dist.get_rank() == 0"),
    ("", "not dist.is_initialized() or dist.get_rank() == 0"),
    ("", "args.rank == 0 and epoch % 10 == 0"),
    ("is_main = dist.get_rank() == 0", "is_main"),
    ("is_main = dist.get_rank() == 0", "is_main and save"),
    ("main = True\nif ddp:\n    main = int(os.environ['RANK']) == 0", "main"),
    ("def first():\n    return dist.get_rank() == 0", "first()"),
    (
        "def first():\n    if not dist.is_available():\n        return True\n    return dist.get_rank() == 0",
        "first()",
    ),
    ("from tools import is_main_process", "is_main_process()"),
    ("who = dist.get_rank", "who() == 0"),
]


@pytest.mark.parametrize(("before", "condition"), ONLY_MAIN)
def test_a_collective_for_rank_0_is_found(before: str, condition: str) -> None:
    """Whatever way the condition is written."""
    body = f"{before}\nif {condition}:\n    dist.barrier()\n"
    line = body.count("\n")
    assert found(body) == [("EF631", line)]


@pytest.mark.parametrize(("before", "condition"), ONLY_MAIN)
def test_a_collective_behind_an_exit_is_found(before: str, condition: str) -> None:
    """Whoever meets the condition, continues alone."""
    body = f"{before}\ndef save(x):\n    if {condition}:\n        pass\n    else:\n        return\n    dist.barrier()\n"
    assert codes(body) == ["EF633"]


@pytest.mark.parametrize(
    "condition",
    [
        "epoch == 0",
        "world_size > 1",
        "dist.is_initialized()",
        "args.distributed",
        "rank % 8 == 0",
        "rank < 4",
        "args.tp_rank == 0",
        "mesh.get_rank(0) == 0",
        "matrix.rank == size",
        "is_main or epoch == 3",
        "dist.get_rank(group) == 0",
        "__name__ == '__main__'",
        "step == 0 and args.distributed",
    ],
)
def test_other_conditions_are_left_alone(condition: str) -> None:
    """Of what all ranks meet, of groups of ranks, and of what cannot be told."""
    body = f"""
    is_main = dist.get_rank() == 0
    def go(epoch, rank, world_size, mesh, matrix):
        if {condition}:
            dist.barrier()
    """
    assert codes(body) == []


@pytest.mark.parametrize(
    "body",
    [
        # Both branches take part, or may.
        "if rank == 0:\n    dist.broadcast(x, 0)\nelse:\n    dist.broadcast(x, 0)",
        "if rank == 0:\n    dist.broadcast(x, 0)\nelse:\n    follow(x)",
        "if rank == 0:\n    dist.broadcast(x, 0)\nelse:\n    queue.recv_all()",
        # The others wait, rank 0 goes ahead.
        "if rank != 0:\n    dist.barrier()\nload()\nif rank == 0:\n    dist.barrier()",
        "def f(rank):\n    if rank == 0:\n        dist.broadcast(x, 0)\n        return\n    dist.broadcast(x, 0)",
        "def f(rank):\n    if rank != 0:\n        follow()\n        return\n    dist.broadcast(x, 0)",
        (
            "class First:\n    def __enter__(self):\n        if self.rank != 0:\n            dist.barrier()\n"
            "    def __exit__(self, *a):\n        if self.rank == 0:\n            dist.barrier()"
        ),
        # A group of its own, point to point, another library's name.
        "if rank == 0:\n    dist.barrier(group=leaders)",
        "if rank == 0:\n    dist.all_reduce(x, dist.ReduceOp.SUM, leaders)",
        "if rank == 0:\n    dist.send(x, 1)",
        "from redis import barrier\nif rank == 0:\n    barrier()",
        "if rank == 0:\n    threading.Barrier(2).wait()",
        # Not called there.
        "if rank == 0:\n    def later():\n        dist.barrier()",
        "if rank == 0:\n    hook = lambda: dist.barrier()",
        # In a function that may not come to it.
        "def f(sync):\n    if sync:\n        dist.barrier()\nif rank == 0:\n    f(False)",
        "def f(x):\n    if x is None:\n        return\n    dist.barrier()\nif rank == 0:\n    f(None)",
        # Errors end the run for all.
        "def f(rank):\n    if rank == 0 and broken:\n        raise ValueError\n    dist.barrier()",
        # It is known to be one process.
        "if world_size == 1:\n    if rank == 0:\n        dist.barrier()",
        # Another `dist`.
        "def f(dist):\n    if rank == 0:\n        dist.barrier()",
    ],
)
def test_near_misses(body: str) -> None:
    """What looks alike and is right, or cannot be told."""
    assert codes(f"rank = dist.get_rank()\n{body}\n") == []


def test_a_helper_and_a_method_are_followed() -> None:
    """The call under the condition is told, with the collective behind it."""
    body = """
    def reduced(x):
        if not dist.is_initialized():
            return x
        dist.all_reduce(x)
        return x

    class Trainer:
        def __init__(self):
            self.gpu = int(os.environ["LOCAL_RANK"])

        def evaluate(self, loss):
            return reduced(loss)

        def train(self, loss):
            if self.gpu == 0:
                self.evaluate(loss)
    """
    assert found(body) == [("EF631", 17)]


def test_exits_of_loops_and_functions() -> None:
    """`continue` and `break` end the loop's body, `return` and exit the function, also from within `with`."""
    body = """
    def train(loader, rank):
        for batch in loader:
            if rank != 0:
                continue
            dist.all_reduce(batch)
        dist.barrier()

    def leave(rank):
        with open("x"):
            if rank > 0:
                sys.exit(0)
        dist.barrier()
    """
    assert found(body) == [("EF633", 6), ("EF633", 13)]


@pytest.mark.parametrize(
    ("handler", "expected"),
    [
        ("def leave(n, f):\n    dist.barrier()\nsignal.signal(signal.SIGTERM, leave)", ["EF632"]),
        ("def sync():\n    dist.barrier()\ndef leave(n, f):\n    sync()\nsignal.signal(signal.SIGTERM, leave)", ["EF632"]),
        ("signal.signal(signal.SIGTERM, lambda n, f: dist.barrier())", ["EF632"]),
        ("class T:\n    def on(self, n, f):\n        if n:\n            dist.barrier()\n    def go(self):\n        signal.signal(15, self.on)", ["EF632"]),
        ("def leave(n, f):\n    global asked\n    asked = True\nsignal.signal(signal.SIGTERM, leave)\ndist.barrier()", []),
        ("def leave(n, f):\n    sys.exit(0)\nsignal.signal(signal.SIGTERM, leave)", []),
        ("signal.signal(signal.SIGTERM, signal.SIG_DFL)\ndist.barrier()", []),
    ],
)  # fmt: skip
def test_signal_handlers(handler: str, expected: list[str]) -> None:
    """A function, what it calls, a lambda, a method; not one that sets a flag."""
    assert codes(handler + "\n") == expected


def test_accelerate_waits_for_everyone() -> None:
    """Its own names for the same."""
    head = "from accelerate import Accelerator\naccelerator = Accelerator()\n"
    assert codes("if accelerator.is_main_process:\n    accelerator.wait_for_everyone()\n", head=head) == [
        "EF631"
    ]
    assert (
        codes("accelerator.wait_for_everyone()\nif accelerator.is_main_process:\n    save()\n", head=head)
        == []
    )
