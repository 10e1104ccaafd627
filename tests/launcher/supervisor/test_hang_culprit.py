"""Which of the ranks that stand still is to blame, by where they stand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import elasticflow
from elasticflow.launcher.agent.stack_dumps import parse
from elasticflow.launcher.supervisor.hangs import find_culprit, own_frames, phase_of, stack_text
from elasticflow.protocol.messages import Frame, LoaderStack, StalledWorker

RUNTIME = Path(elasticflow.__file__).parent / "runtime"
TRAIN = Frame("/r/runs/job/1/launches/0001/train.py", 90, "main")
GRADIENTS = Frame("/r/elasticflow/runtime/training/ddp.py", 130, "_backward")
BACKWARD = Frame("/v/lib/python3.11/site-packages/torch/autograd/graph.py", 869, "_engine_run_backward")
REDUCE = Frame("/v/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", 3000, "all_reduce")
IN_DDP = (BACKWARD, GRADIENTS, TRAIN)
USERS = Frame("/r/examples/net.py", 12, "forward")
ASLEEP = (Frame("/v/lib/python3.11/site-packages/requests/api.py", 1, "get"), USERS, TRAIN)


def stalled(rank: int, frames: tuple[Frame, ...], **facts: Any) -> StalledWorker:
    """Return a rank that stands still in a step."""
    usual: dict[str, Any] = {
        "node": "n0",
        "phase": "step",
        "step": 7,
        "seconds": 61.0,
        "limit_s": 60.0,
        "state": "S",
        "loaders": (),
    }
    return StalledWorker(rank=rank, frames=frames, log=f"/r/rank{rank}.stderr", **(usual | facts))


def test_rank_in_its_own_code_is_waited_for() -> None:
    """The job's own code is named, not the library that it called."""
    found = find_culprit([stalled(0, IN_DDP), stalled(1, ASLEEP), stalled(2, IN_DDP)])

    assert 1 == found.worker.rank
    assert "it is at /r/examples/net.py:12 in forward, and 2 other ranks wait for it" == found.reason
    assert (USERS, TRAIN) == own_frames(found.worker)


def test_stopped_process_goes_before_all() -> None:
    """Its stack was taken once it was woken up, and may show anything."""
    found = find_culprit([stalled(0, ASLEEP), stalled(1, IN_DDP, state="T")])

    assert (1, "its process was stopped (SIGSTOP)") == (found.worker.rank, found.reason)


def test_process_that_does_not_answer() -> None:
    """No stack: inside the kernel, or not able to take a signal."""
    found = find_culprit([stalled(0, IN_DDP), stalled(1, (), state="D")])
    assert (1, "its process is in a call of the kernel that does not return") == (
        found.worker.rank,
        found.reason,
    )
    assert "its process does not answer" == find_culprit([stalled(0, ())]).reason


def test_loader_process_is_named_where_its_rank_waits() -> None:
    """Its stack goes before the rank's, and reading data is phase data even where the rank reads itself."""
    waiting = Frame("/r/elasticflow/runtime/data/loader_processes.py", 105, "__next__")
    read = Frame("/r/examples/images.py", 33, "__getitem__")
    reader = Frame("/r/elasticflow/runtime/data/sample_reader.py", 150, "_read")
    of_loader = stalled(1, (waiting, TRAIN), phase="data", loaders=(LoaderStack(4711, (read, reader)),))
    found = find_culprit([stalled(0, IN_DDP), of_loader])

    assert "it is at /r/examples/images.py:33 in __getitem__, and the other rank waits for it" == found.reason
    assert (read, TRAIN) == own_frames(found.worker)
    assert "Loader process 4711 (most recent call last):" in stack_text(of_loader)
    assert "data" == phase_of(stalled(0, (read, reader, TRAIN)))


def test_rank_in_another_collective_is_elsewhere() -> None:
    """It skipped one: all three wait, two of them in the job's own collective."""
    own = (REDUCE, USERS, TRAIN)
    found = find_culprit([stalled(0, own), stalled(1, IN_DDP), stalled(2, own)])

    assert 1 == found.worker.rank
    assert found.reason == (
        "it waits for others at /r/elasticflow/runtime/training/ddp.py:130 in _backward, "
        "and rank 0 at /r/examples/net.py:12 in forward"
    )


def test_of_two_ranks_in_two_collectives_the_jobs_own_is_named() -> None:
    """Nobody can tell which of them is wrong; both places are said, and the one that can be mended first."""
    found = find_culprit([stalled(0, IN_DDP), stalled(1, (REDUCE, USERS, TRAIN))])

    assert 1 == found.worker.rank
    assert "and rank 0 at /r/elasticflow/runtime/training/ddp.py:130 in _backward" in found.reason


def test_all_in_the_same_place() -> None:
    """No rank is elsewhere: what is between them is."""
    assert "is the network between them cut?" in find_culprit([stalled(0, IN_DDP), stalled(1, IN_DDP)]).reason


def test_dump_of_several_threads() -> None:
    """The thread that took the signal is the main one."""
    dump = (
        "Fatal noise of others\n"
        "Thread 0x00007f0001 (most recent call first):\n"
        '  File "/a.py", line 1 in wait\n'
        "\n"
        "Current thread 0x00007f0002 [python] (most recent call first):\n"
        '  File "/b c.py", line 22 in inner\n'
        '  File "<frozen runpy>", line 3 in <module>\n'
        "\n"
        "more noise\n"
    )
    assert (Frame("/b c.py", 22, "inner"), Frame("<frozen runpy>", 3, "<module>")) == parse(dump)
    assert () == parse("nothing")


def test_stack_reads_like_a_traceback() -> None:
    """Outermost first, with source lines where there is a source."""
    text = stack_text(stalled(0, (Frame(__file__, 1, "inner"), USERS)))

    assert text.splitlines() == [
        "Stack (most recent call last):",
        '  File "/r/examples/net.py", line 12, in forward',
        f'  File "{__file__}", line 1, in inner',
        '    """Which of the ranks that stand still is to blame, by where they stand."""',
    ]


WAITING = sorted(path for path in RUNTIME.rglob("*.py") if "work.wait()" in path.read_text())


@pytest.mark.parametrize("path", WAITING, ids=lambda path: path.stem)
def test_rank_that_waits_in_our_own_code_is_not_to_blame(path: Path) -> None:
    """In exact mode ranks wait for what they send each other in our code, not in torch's."""
    waiting = (Frame(str(path), 142, "wait"), TRAIN)
    found = find_culprit([stalled(0, waiting), stalled(1, ASLEEP)])

    assert "it is at /r/examples/net.py:12 in forward, and the other rank waits for it" == found.reason
