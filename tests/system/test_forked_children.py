"""Children that a process forks, as real processes."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

pytestmark = pytest.mark.usefixtures("real_processes")

BEGIN = """
import multiprocessing, os, signal, socket, sys, threading, time
from elasticflow.system import forked_children

context = multiprocessing.get_context("fork")


def note(number, frame):
    print("noted", flush=True)


signal.signal(signal.SIGTERM, note)
forked_children.set_apart()
forked_children.own_handler(signal.SIGTERM, note)
"""


def said(code: str) -> str:
    """Return what a process says that runs *code* after `BEGIN`."""
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_child_is_ended_by_a_signal_at_whatever_moment() -> None:
    """A hundred of them, some before they have run at all; the process itself still handles the signal."""
    code = """
    for number in range(100):
        child = context.Process(target=time.sleep, args=(60,))
        child.start()
        time.sleep(number * 1e-5)
        child.terminate()
        child.join()
        assert child.exitcode == -signal.SIGTERM, child.exitcode
    os.kill(os.getpid(), signal.SIGTERM)
    """
    assert said(code) == "noted\n"


def test_signal_that_was_blocked_over_a_fork_stays_blocked() -> None:
    """Loader processes are to ignore it first."""
    code = """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    child = os.fork()
    if child == 0:
        os.kill(os.getpid(), signal.SIGTERM)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        os._exit(3)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """
    assert said(code) == "3\n"


def test_handler_of_the_script_s_own_stays() -> None:
    """Children of a process without elasticflow have it as well."""
    code = """
    signal.signal(signal.SIGTERM, lambda *_: os._exit(4))
    child = os.fork()
    if child == 0:
        os.kill(os.getpid(), signal.SIGTERM)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """
    assert said(code) == "4\n"


def test_garbage_of_the_parent_is_collected_in_the_parent_alone() -> None:
    """The finalizer of a process group of gloo waits for ever in a child."""
    code = """
    import gc


    class Circle:
        def __init__(self, name):
            self.circle, self.name = self, name

        def __del__(self):
            os.write(1, f"{self.name} collected\\n".encode())


    gc.disable()
    Circle("the parent's")
    if os.fork() == 0:
        Circle("the child's")
        gc.collect()
        os._exit(0)
    os.wait()
    print("child ended", flush=True)
    gc.collect()
    """
    assert said(code) == "the child's collected\nchild ended\nthe parent's collected\n"


def test_connection_of_the_parent_is_cut_in_a_child_alone() -> None:
    """The other side sees the parent's end while the child lives; what was opened anew under the same number is kept."""
    code = """
    with forked_children.own_sockets():
        here, there = socket.socketpair()
        others, closed = socket.socketpair()
    number = others.detach()
    os.close(number)
    reused = os.open("/proc/self/cmdline", os.O_RDONLY)
    assert reused == number
    child = os.fork()
    if child == 0:
        assert os.read(reused, 1)
        try:
            here.send(b"from the child")
        except OSError:
            os._exit(0)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    here.send(b"from the parent")
    print(there.recv(100).decode())
    """
    assert said(code) == "from the parent\n"


def test_sockets_may_come_and_go_while_they_are_listed() -> None:
    """Threads of libraries open and close connections of their own; a number that is given again is another socket."""
    code = """
    import stat

    def churn():
        while not done.is_set():
            with socket.socket(), socket.socket():
                pass

    done = threading.Event()
    sys.setswitchinterval(1e-6)
    threads = [threading.Thread(target=churn, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    enough = time.monotonic() + 20
    for _ in range(2000):
        with forked_children.own_sockets():
            pass
        if time.monotonic() > enough:
            break
    done.set()
    for thread in threads:
        thread.join()

    old = socket.socket()
    number = old.fileno()
    with forked_children.own_sockets():
        old.close()
        new = socket.socket()
    assert number == new.fileno()
    child = context.Process(target=lambda: print(stat.S_ISSOCK(os.fstat(number).st_mode), flush=True))
    child.start()
    child.join()
    """
    assert said(code) == "False\n"


def test_child_ends_with_its_parent_and_its_own_children_do_not() -> None:
    """Also where the parent is killed; a grandchild has none of the parent's rules."""
    code = """
    read, write = os.pipe()
    if os.fork() == 0:
        forked_children.set_apart()
        if os.fork() == 0:
            if os.fork() == 0:
                os.write(write, b"grandchild\\n")
                time.sleep(1)
                os.write(write, b"lives\\n")
                os._exit(0)
            os.write(write, b"child\\n")
            time.sleep(60)
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    os.close(write)
    print(sorted(os.fdopen(read).read().split()))
    """
    assert said(code) == "['child', 'grandchild', 'lives']\n"


def test_another_program_outlives_its_parent_as_it_does_without_hooks() -> None:
    """Though `subprocess` calls them where it was given a `preexec_fn`."""
    code = """
    import subprocess
    lives = "import time; time.sleep(0.5); print('lives')"
    subprocess.Popen([sys.executable, "-c", lives], preexec_fn=os.setsid)
    os.kill(os.getpid(), signal.SIGKILL) if os.fork() == 0 else os._exit(0)
    """
    assert said(code) == "lives\n"


def test_children_of_other_threads_are_ended_where_exit_handlers_are_left_out() -> None:
    """A child has a copy of the list in which its siblings stand, and ends none of them."""
    code = """
    child = context.Process(target=time.sleep, args=(60,))
    thread = threading.Thread(target=child.start)
    thread.start()
    thread.join()
    time.sleep(0.2)
    sibling = os.fork()
    if sibling == 0:
        forked_children.end_children()
        os._exit(0)
    os.waitpid(sibling, 0)
    time.sleep(0.1)
    assert child.is_alive()
    forked_children.end_children()
    child.join(10)
    print(child.exitcode)
    """
    assert said(code) == "-15\n"
