from __future__ import annotations

import math
from typing import Any

import pytest

from elasticflow import events
from elasticflow.launcher.restarts.failure_classes import CLASSES
from elasticflow.launcher.restarts.failures import Report, classify, describe, first_failure
from elasticflow.system.processes import signal_or_code

PEER = {"class": "peer", "error": "RuntimeError: Connection closed by peer [127.0.0.1]:1234"}


def raised(kind: str, error: str = "ValueError: bad label", at: str | None = None) -> dict[str, Any]:
    """Return a `worker.raised` line."""
    return {"class": kind, "error": error, "traceback": f"Traceback...\n{error}", "timestamp": at}


def ended(
    rank: int,
    exit_code: int,
    line: dict[str, Any] | None = None,
    *,
    at: float = math.inf,
    node: str = "",
    **more: Any,
) -> Report:
    """Return the report on a worker that ended."""
    facts: dict[str, Any] = {
        "pid": 77,
        "ended_by_us": False,
        "oom_killed": False,
        "stderr": "",
        "behind_s": 0.0,
        **more,
    }
    return Report(rank=rank, exit_code=exit_code, at=at, node=node, raised=line, **facts)


@pytest.mark.parametrize(
    ("exit_code", "line", "more", "expected"),
    [
        (1, raised("user_error"), {}, "user_error"),
        (1, raised("oom"), {}, "oom"),
        (1, raised("nonfinite"), {}, "nonfinite"),
        (1, raised("storage"), {}, "storage"),
        (1, raised("no such class"), {}, "user_error"),
        (-9, None, {}, "crash"),
        (-11, None, {}, "crash"),
        (3, None, {}, "user_error"),
        (-9, None, {"oom_killed": True}, "oom"),
    ],
)
def test_class_of_one_worker(
    exit_code: int, line: dict[str, Any] | None, more: dict[str, Any], expected: str
) -> None:
    """What the worker said goes before what its exit code lets one guess."""
    assert expected == classify(exit_code, line, **more)


def test_signals_have_their_names() -> None:
    """A person reads `killed by SIGKILL`, not -9; unknown signals keep their number."""
    assert [signal_or_code(code) for code in (-9, -11, 3, -99)] == [
        "killed by SIGKILL",
        "killed by SIGSEGV",
        "exit code 3",
        "killed by signal 99",
    ]


def test_a_remedy_stands_apart_in_one_line() -> None:
    """What happened and what to do about it are told on two lines by the worker, and on one by its failure."""
    report = ended(0, 1, raised("user_error", "it is lost\n  help: keep it"))
    assert describe(report) == "it is lost; help: keep it"


def test_a_killed_rank_is_the_cause_and_its_peers_are_folded() -> None:
    """The rank that was killed comes first even if its peers' errors were noticed before."""
    found = first_failure(
        [
            ended(0, 1, PEER, at=10.0),
            ended(1, -9, at=10.5, node="n0", pid=77),
            ended(2, 1, PEER, at=10.1),
        ]
    )
    assert found is not None
    assert found.fields() == {
        "rank": 1,
        "node": "n0",
        "pid": 77,
        "exit_code": -9,
        "class": "crash",
        "error": "killed by SIGKILL",
        "traceback": None,
        "exception": None,
        "others": "2 other ranks: connection closed by peer",
        "stderr": [],
    }
    assert set(events.WORKER_FAILED.fields) == set(found.fields())


def test_an_error_that_only_reads_like_a_lost_peer_is_folded_too() -> None:
    """A collective's error that the worker took for the user's own still gives way to a killed rank."""
    mine = raised("user_error", "RuntimeError: [../third_party/gloo/pair.cc:534] Connection closed by peer")
    found = first_failure([ended(0, 1, mine, at=1.0), ended(1, -9, at=2.0)])
    assert found is not None
    assert (found.rank, found.others) == (1, "1 other rank: connection closed by peer")


def test_an_own_exception_goes_before_peers_and_carries_its_traceback() -> None:
    """The user's exception is the cause, with its traceback; who only lost the connection is counted."""
    found = first_failure([ended(0, 1, PEER, at=1.0), ended(1, 1, raised("user_error"), at=2.0)])
    assert found is not None
    assert (found.rank, found.failure_class, found.error) == (1, "user_error", "ValueError: bad label")
    assert found.traceback is not None
    assert found.traceback.endswith("ValueError: bad label")


def test_the_earliest_of_two_own_failures_is_the_cause() -> None:
    """The time in the worker's own line goes before the time at which its end was noticed."""
    early = raised("user_error", "ValueError: first", "2026-11-20T10:00:00.100Z")
    late = raised("user_error", "ValueError: second", "2026-11-20T10:00:00.200Z")
    found = first_failure([ended(0, 1, late, at=5.0), ended(1, 1, early, at=9.0)])
    assert found is not None
    assert (found.error, found.others) == ("ValueError: first", "1 other rank: ValueError: second")


def test_the_same_error_on_every_rank_is_told_once() -> None:
    """A bug that every rank meets is one line, the lowest rank's."""
    at = "2026-11-20T10:00:00.100Z"
    found = first_failure([ended(rank, 1, raised("user_error", at=at)) for rank in (2, 1, 0)])
    assert found is not None
    assert (found.rank, found.others) == (0, "2 other ranks: the same")


def test_workers_that_left_or_were_ended_by_us_are_no_failures() -> None:
    """Exit code 0 and the survivors that the agent kills are not counted."""
    reports = [ended(0, 0), ended(1, -9, ended_by_us=True)]
    assert first_failure(reports) is None
    found = first_failure([*reports, ended(2, -6)])
    assert found is not None
    assert (found.error, found.others) == ("killed by SIGABRT", None)


def test_only_peers_left_is_a_crash() -> None:
    """If nothing but lost connections is known, something crashed that nobody saw."""
    found = first_failure([ended(0, 1, PEER)])
    assert found is not None
    assert found.failure_class == "crash"


def test_a_memory_kill_is_said_in_words() -> None:
    """The signal alone does not explain it."""
    assert "killed by the kernel: memory ran out" == describe(ended(0, -9, oom_killed=True))


def test_a_worker_that_ended_itself_without_a_word_is_told_so() -> None:
    """`os._exit` leaves nothing but a code."""
    assert "exit code 7, without an exception" == describe(ended(0, 7))


def test_a_worker_that_died_before_it_could_log_is_read_from_its_standard_error() -> None:
    """An import error outside `worker.run` is found in the interpreter's own traceback."""
    stderr = (
        "some noise\nTraceback (most recent call last):\n"
        '  File "train.py", line 3, in <module>\n    import nothing\n'
        "ModuleNotFoundError: No module named 'nothing'\n"
    )
    found = first_failure([ended(0, 1, stderr=stderr)])
    assert found is not None
    assert (
        found.failure_class,
        found.error,
    ) == ("user_error", "ModuleNotFoundError: No module named 'nothing'")
    assert found.traceback is not None
    assert found.traceback.startswith("Traceback (most recent call last):")


CALLS = 'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\n    step()\n'
RICH = "╭── Traceback (most recent call last) ──╮\n│ train.py:3 in <module>                │\n╰───────────────────────────────────────╯\n"
IGNORED = (
    f"Exception ignored in: <function Iter.__del__ at 0x7f>\n{CALLS}AssertionError: only a child process\n"
)


@pytest.mark.parametrize(
    ("stderr", "error", "begins"),
    [
        pytest.param(f"{CALLS}NaNLoss: at 7\n", "NaNLoss: at 7", "Traceback", id="a name of the script's own"),
        pytest.param(f"{RICH}ValueError: at 7\n", "ValueError: at 7", "╭", id="shown by rich"),
        pytest.param(f"{CALLS}StopIteration\n", "StopIteration", "Traceback", id="no message"),
        pytest.param(
            f"{CALLS}ValueError: a\nb\n\nTypeError: no exception\nsaved\n", "ValueError: a", "Traceback", id="a message of many lines"
        ),
        pytest.param(
            f"{CALLS}KeyError: 1\n\nDuring handling of the above exception, another exception occurred:\n\n{CALLS}OSError: 2\n",
            "OSError: 2",
            "Traceback",
            id="a chain",
        ),
        pytest.param(f"{CALLS}KeyError: 1\n{IGNORED}", "KeyError: 1", "Traceback", id="one that is ignored follows"),
        pytest.param(
            f'ing.py", line 1, in forward\n{CALLS.partition(chr(10))[2]}KeyError: 1\n', "KeyError: 1", "  File", id="cut off"
        ),
        pytest.param(
            '  File "train.py", line 3\n    x = (\n        ^\nSyntaxError: never closed\n', "SyntaxError: never closed", "  File", id="syntax"
        ),
    ],
)  # fmt: skip
def test_last_exception_of_a_standard_error_is_the_error(stderr: str, error: str, begins: str) -> None:
    """Of whatever name, with or without a message, a whole traceback or its end."""
    found = first_failure([ended(0, 1, stderr=f"noise\n{stderr}")])
    assert found is not None
    assert found.traceback is not None
    assert (error, begins) == (found.error, found.traceback[: len(begins)])
    assert "ignored" not in found.traceback
    assert found.stderr[0] == "noise"


BAR = "loading\n\r  0%|          | 0/100\r 20%|██        | 20/100"


@pytest.mark.parametrize(
    ("code", "ending", "error"),
    [(1, f"{CALLS}KeyError: 1\n", "KeyError: 1"), (1, "\n", "exit code 1, without an exception")],
)
def test_a_progress_bar_is_one_line(code: int, ending: str, error: str) -> None:
    """It shows how far it came; what follows it without a line break is read as elsewhere."""
    found = first_failure([ended(0, code, stderr=BAR + ending)])
    assert found is not None
    assert (error, ("loading", " 20%|██        | 20/100")) == (found.error, found.stderr)


def test_a_crash_beside_a_progress_bar_shows_the_script_s_stack() -> None:
    """Not the last lines of what faulthandler has written."""
    stack = 'Fatal Python error: Aborted\n\nCurrent thread 0x02 (most recent call first):\n  File "job.py", line 7 in step\n'
    found = first_failure([ended(0, -6, stderr=BAR + stack)])
    assert found is not None
    assert found.traceback is not None
    assert 'File "job.py", line 7 in step' in found.traceback
    assert ("loading", " 20%|██        | 20/100") == found.stderr


def test_an_exception_that_was_logged_is_not_what_a_signal_did() -> None:
    """The worker handled it, and was killed later."""
    found = first_failure([ended(0, -9, stderr=f"no cache\n{CALLS}KeyError: 1\nwithout it\n")])
    assert found is not None
    assert ("killed by SIGKILL", None) == (found.error, found.traceback)
    assert found.stderr[-2:] == ("KeyError: 1", "without it")


def test_an_ignored_exception_is_no_error() -> None:
    """A destructor raised, and the process ended by its own exit code."""
    assert "exit code 7, without an exception" == describe(ended(0, 7, stderr=IGNORED))


def test_a_worker_that_crashed_shows_the_stack_of_the_thread_that_did() -> None:
    """Faulthandler writes all threads; one of them matters, and the signal is the error."""
    stderr = (
        "some noise\nFatal Python error: Segmentation fault\n\nThread 0x01 (most recent call first):\n"
        '  File "threading.py", line 1 in wait\n\nCurrent thread 0x02 (most recent call first):\n'
        '  File "ctypes.py", line 2 in string_at\n  File "job.py", line 7 in step\n\nExtension modules: numpy\n'
    )
    found = first_failure([ended(0, -11, stderr=stderr)])
    assert found is not None
    assert "killed by SIGSEGV" == found.error
    expected = (
        'Traceback (most recent call last):\n  File "job.py", line 7 in step\n  File "ctypes.py", line 2 in string_at\n'
        "Fatal Python error: Segmentation fault"
    )
    assert expected == found.traceback


MISMATCH = (
    "a warning\nterminate called after throwing an instance of 'gloo::EnforceNotMet'\n"
    "  what():  [enforce fail at /third_party/gloo/gloo/transport/tcp/pair.cc:456] op.preamble.length <= op.nbytes. "
    "256 vs 248. Received data size doesn't match expected size. Is there a distributed collective mismatch?\n"
    "Fatal Python error: Aborted\n\nThread 0x01 (most recent call first):\n"
    '  File "torch/distributed.py", line 9 in all_gather\n  File "job.py", line 8 in loss\n\nExtension modules: numpy\n'
)


def test_a_collective_mismatch_is_an_error_of_the_jobs_own_code() -> None:
    """It ends in SIGABRT, of a thread that is not Python's: what it said, the last lines and where the rank stood."""
    reports = [ended(0, -6, stderr=MISMATCH, at=9.0), ended(1, 1, PEER, at=8.0)]
    found = first_failure(reports)
    assert found is not None
    assert (0, "user_error", "1 other rank: connection closed by peer") == (
        found.rank,
        found.failure_class,
        found.others,
    )
    assert found.error.startswith(
        "killed by SIGABRT: the ranks took part in different collectives; help: every rank calls the model equally often"
    )
    assert any("256 vs 248. Received data size" in line for line in found.stderr)
    assert found.traceback is not None
    assert ['  File "job.py", line 8 in loss', '  File "torch/distributed.py", line 9 in all_gather'] == (
        found.traceback.splitlines()[1:3]
    )
    assert ("a warning", 3) == (found.stderr[0], len(found.stderr))
    other_sizes = first_failure([ended(0, -6, stderr=MISMATCH.replace("256 vs 248", "64 vs 32"))])
    assert other_sizes is not None
    assert found.fingerprint() == other_sizes.fingerprint()


def test_a_collective_mismatch_that_was_raised_is_no_lost_peer() -> None:
    """Gloo's own path stands in the text; still it is not what another rank's death looks like."""
    text = "RuntimeError: [enforce fail at gloo/gloo/x.cc:1] Received data size doesn't match expected size."
    found = first_failure([ended(0, 1, raised("user_error", text), at=9.0), ended(1, 1, PEER, at=8.0)])
    assert found is not None
    assert (0, "user_error") == (found.rank, found.failure_class)


def test_faults_are_told_apart_by_where_they_happened() -> None:
    """The same signal at the same place is the same failure; without a place, or from outside, nothing is known."""
    at = 'Fatal Python error: Segmentation fault\n\nCurrent thread 0x02 (most recent call first):\n  File "job.py", line {} in {}\n'
    one, again, elsewhere, bare, killed = (
        first_failure([ended(0, code, stderr=text)])
        for code, text in (
            (-11, at.format(7, "step")),
            (-11, at.format(8, "step")),
            (-11, at.format(7, "load")),
            (-11, ""),
            (-9, at.format(7, "step")),
        )
    )
    assert one is not None
    assert again is not None
    assert elsewhere is not None
    assert bare is not None
    assert killed is not None
    assert one.fingerprint() == again.fingerprint() != elsewhere.fingerprint()
    assert [True, True, False, False] == [f.is_traced_fault for f in (one, elsewhere, bare, killed)]


def test_a_worker_says_whether_another_try_would_end_in_the_same_way() -> None:
    """As `worker.raised` tells; lines of older versions say nothing, and leave it to the ledger."""
    for line, expected in (({"final": True}, True), ({"final": False}, False), ({}, False)):
        found = first_failure([ended(0, 1, {**raised("user_error"), **line})])
        assert found is not None
        assert found.is_final is expected


def test_a_link_that_broke_may_hold_next_time() -> None:
    """An abort that a lost connection led to is tried again, however often it comes."""
    text = "terminate called after throwing an instance of 'std::runtime_error'\n  what():  Connection reset by peer\n"
    found = first_failure([ended(0, -6, stderr=text)])
    assert found is not None
    assert ("crash", False, "killed by SIGABRT: Connection reset by peer") == (
        found.failure_class,
        found.is_traced_fault,
        found.error,
    )


def test_a_rank_that_left_while_others_needed_it_is_the_cause() -> None:
    """`os._exit(0)` in the job's own code looks like success; its peers' errors say it was none."""
    reports = [ended(0, 1, PEER, at=10.0), ended(1, 0, at=9.0)]
    found = first_failure(reports)
    assert found is not None
    assert (1, "crash", "left with exit code 0 in the middle of training") == (
        found.rank,
        found.failure_class,
        found.error,
    )
    assert "1 other rank: connection closed by peer" == found.others
    at_the_end = first_failure(reports, is_finished=True)
    assert at_the_end is not None
    assert 0 == at_the_end.rank


def test_fingerprints_do_not_depend_on_numbers() -> None:
    """The same bug at another index or address has the same fingerprint; another bug has not."""
    one, two, other = (
        first_failure([ended(0, 1, raised("user_error", text))])
        for text in ("IndexError: 17 is out of range", "IndexError: 4242 is out of range", "KeyError: 'x'")
    )
    assert one is not None
    assert two is not None
    assert other is not None
    assert one.fingerprint() == two.fingerprint() != other.fingerprint()
    # Where no steps are known, as of a script, another number may be all that tells progress; addresses tell none.
    assert one.fingerprint(knows_steps=False) != two.fingerprint(knows_steps=False)
    at, elsewhere = (
        first_failure([ended(0, 1, raised("user_error", f"KeyError: <Net object at {address}>"))])
        for address in ("0x7f01", "0x7f02")
    )
    assert at is not None
    assert elsewhere is not None
    assert at.fingerprint(knows_steps=False) == elsewhere.fingerprint(knows_steps=False)


def test_an_error_of_many_lines_becomes_one_short_line() -> None:
    """Events are one line each, however long the exception's text is."""
    found = first_failure([ended(0, 1, raised("user_error", "ValueError: a\n  b" + "c" * 2000))])
    assert found is not None
    assert found.error.startswith("ValueError: a bccc")
    assert len(found.error) == 500


def test_classes_are_those_of_the_design() -> None:
    """The classes are part of the log schema."""
    assert {
        "user_error", "oom", "device", "hang", "crash", "nonfinite", "diverged", "storage", "snapshot_corrupt",
        "node_lost", "preempted", "resized", "drained", "agent_lost", "peer",
    } == CLASSES  # fmt: skip


def test_a_scripts_peers_are_known_by_what_they_print() -> None:
    """No rank of a script writes a `worker.raised` line: its standard error is all there is."""
    peer = "Traceback (most recent call last):\n  ...\nRuntimeError: [gloo] Connection closed by peer [127.0.0.1]\n"
    own = "Traceback (most recent call last):\n  ...\nValueError: no such layer\n"
    found = first_failure([ended(0, 1, at=1.0, stderr=peer), ended(1, 1, at=2.0, stderr=own)])
    assert found is not None
    assert (1, "user_error", "ValueError: no such layer") == (found.rank, found.failure_class, found.error)
    assert found.others == "1 other rank: connection closed by peer"


def test_wrong_arguments_are_final_and_told_as_the_program_does() -> None:
    """Those of argparse and click; another exit code, or another text, is no such error."""
    usage = "usage: train.py [-h] [--lr LR]\ntrain.py: error: argument --lr: invalid float value: 'x'\n"
    click = "Usage: train.py [OPTIONS]\nTry 'train.py --help' for help.\n\nError: No such option: --lrr\n"
    told = []
    for code, text in ((2, usage), (2, click), (1, usage), (2, "error: disk")):
        found = first_failure([ended(0, code, stderr=text)])
        assert found is not None
        told.append((found.is_final, found.error))
    assert told == [
        (True, "train.py: error: argument --lr: invalid float value: 'x'"),
        (True, "Error: No such option: --lrr"),
        (False, "exit code 1, without an exception"),
        (False, "exit code 2, without an exception"),
    ]


WATCHDOG = (
    "[PG ID 0 PG GUID 0(default_pg) Rank 1] Process group watchdog thread terminated with exception: {}"
)
REMOTE = "NCCL error: remote process exited or there was a network error, NCCL version 2.27.7"
TIMEOUT = (
    "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE, NumelIn=8, "
    "NumelOut=8, Timeout(ms)=600000) ran for 600031 milliseconds before timing out."
)


def aborted(text: str) -> str:
    """Return the standard error of a process that NCCL's watchdog aborts with *text*, as torch 2.14 writes it.

    NCCL does not run on a machine without a GPU: the texts are those in libtorch_cuda.so.
    """
    said = WATCHDOG.format(text)
    return (
        f"[rank1]:[E1123 10:00:00.123 ProcessGroupNCCL.cpp:2092] {said}\n"
        "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.\n"
        "Last error:\nsocketPollConnect: connect returned Connection refused\n"
        "Exception raised from checkForNCCLErrorsInternal at ProcessGroupNCCL.cpp:2628 (most recent call first):\n"
        f"terminate called after throwing an instance of 'c10::DistBackendError'\n  what():  {said}\n"
        "Fatal Python error: Aborted\n\nThread 0x00007f1 (most recent call first):\n"
        '  File "/x/ddp.py", line 163 in _outcome\n  File "/x/train.py", line 80 in main\n'
    )


def test_a_survivor_that_nccl_aborts_is_no_cause() -> None:
    """Its watchdog is often seen first: a rank that was killed, or raised, later is what the others missed."""
    survivor = ended(1, -6, at=100.0, node="b", stderr=aborted(REMOTE))
    for cause in (
        ended(0, -9, at=100.5, node="a"),
        ended(0, 1, raised("user_error"), at=101.0, node="a"),
    ):
        found = first_failure([survivor, cause])
        assert found is not None
        assert (0, "a", "1 other rank: connection closed by peer") == (found.rank, found.node, found.others)


def test_survivors_of_a_rank_that_nothing_is_known_of_blame_no_snapshot() -> None:
    """It is a crash that the budget decides about: nothing faulted where the process stood when NCCL ended it."""
    found = first_failure([ended(1, -6, stderr=aborted(REMOTE))])
    assert found is not None
    assert ("crash", False, False) == (
        found.failure_class,
        found.is_traced_fault,
        found.can_come_from_snapshot,
    )


def test_a_collective_that_takes_too_long_for_nccl_is_a_hang() -> None:
    """So is a watchdog that gets stuck; if a rank has failed by itself, the others' time-outs follow from that."""
    stuck = "ProcessGroupNCCL's watchdog got stuck for 480 seconds without making progress"
    for text in (TIMEOUT, stuck):
        found = first_failure([ended(1, -6, stderr=aborted(text))])
        assert found is not None
        assert ("hang", False) == (found.failure_class, found.is_traced_fault)
    found = first_failure([ended(1, -6, at=1.0, stderr=aborted(TIMEOUT)), ended(0, -11, at=2.0)])
    assert found is not None
    assert (0, "crash") == (found.rank, found.failure_class)


def test_an_abort_for_the_rank_s_own_device_is_the_cause() -> None:
    """The same watchdog aborts a process whose kernel or device failed; its peers only notice."""
    for text, kind, traced in (
        ("CUDA error: uncorrectable ECC error encountered", "device", False),
        ("CUDA error: an illegal memory access was encountered", "crash", True),
    ):
        own = ended(0, -6, at=2.0, stderr=aborted(text).replace("ncclRemoteError", ""))
        found = first_failure([ended(1, -6, at=1.0, stderr=aborted(REMOTE)), own])
        assert found is not None
        assert (0, kind, traced, True) == (
            found.rank,
            found.failure_class,
            found.is_traced_fault,
            found.suspects_device,
        )


def test_an_abort_of_the_job_s_own_stays_one() -> None:
    """SIGABRT has many senders: without NCCL's words it is a fault that can come from the snapshot."""
    text = "terminate called after throwing an instance of 'std::out_of_range'\n  what():  vector::at\n"
    found = first_failure([ended(0, -6, stderr=text)])
    assert found is not None
    assert (True, True) == (found.is_traced_fault, found.can_come_from_snapshot)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (
            "torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered\nFor debugging ...",
            "device",
        ),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB", "oom"),
        (
            "torch.distributed.DistBackendError: NCCL error\nncclUnhandledCudaError: Call failed.\nLast error:\nCuda failure 2",
            "oom",
        ),
        ("torch.AcceleratorError: CUDA error: device-side assert triggered\n", "user_error"),
        ("ValueError: CUDA is not for me", "user_error"),
    ],
)
def test_device_errors_of_a_script_are_known_by_what_it_prints(error: str, expected: str) -> None:
    """No rank of a script writes a `worker.raised` line; one that lost its device is not one that noticed it."""
    stderr = f"a warning\nTraceback (most recent call last):\n  ...\n{error}\n"
    peer = "Traceback (most recent call last):\n  ...\nRuntimeError: [gloo] Connection closed by peer [127.0.0.1]\n"
    found = first_failure([ended(0, 1, at=1.0, stderr=peer), ended(1, 1, at=2.0, stderr=stderr)])
    assert found is not None
    assert (1, expected) == (found.rank, found.failure_class)


def test_memory_that_nccl_cannot_have_is_no_lost_peer() -> None:
    """NCCL's name stands in the text; the worker has told its class."""
    text = "DistBackendError: NCCL error in: x.cpp:1 ... Cuda failure 2 'out of memory'"
    found = first_failure([ended(1, 1, PEER, at=1.0), ended(0, 1, raised("oom", text), at=2.0)])
    assert found is not None
    assert (0, "oom") == (found.rank, found.failure_class)
