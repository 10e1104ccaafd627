"""For all tests: guards of unit tests, real servers of stores on loopback, and the time of each tier."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import itertools
import os
import pickle
import re
import signal
import sys
import uuid
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pytest
from hypothesis import HealthCheck, settings

from tests import run_folders, servers
from tests.bytecode import write_from_the_end
from tests.command_line import variables_put_back
from tests.forked import ForkedPrograms
from tests.guards import Guard, temporary_folders
from tests.places import make_place

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.end_to_end.tiny_job import Reference
    from tests.places import Place


# A time limit fails on a busy machine, per example or for the making of examples, and fixtures of a function are made once for
# all of its examples, as is meant; under CI hypothesis' own profile also fixes the examples.
settings.register_profile(
    "ours",
    settings.get_profile(settings.get_current_profile_name()),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("ours")

# Before torch is imported, and for all processes that tests start: threads of OpenMP that wait sleep. Spinning, they keep a
# busy machine's cores from the threads that they wait for, and training takes twice as long.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Tests start hundreds of interpreters. Where the environment forbids bytecode, as images of containers do, each of them
# compiles every module that it imports: more CPU than all else that a launch does.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# A fork that collected what earlier tests left would run its finalizers: that of a process group of gloo waits for ever for
# threads that the fork does not have. Workers of a run do the same (`elasticflow.system.forked_children`).
os.register_at_fork(after_in_child=gc.freeze)

T = TypeVar("T")

GUARD = Guard()
_numbers = itertools.count()  # of temporary folders
STORY_S = 900  # a guard alone: no test of a slower tier reaches it, however busy the machine is
TIERS = ("nightly", "e2e", "integration", "campaign", "gpu")  # every other test is a unit test


def tier_of(item: pytest.Item) -> str:
    """Return the tier that a test's markers put it in."""
    return next((name for name in TIERS if item.get_closest_marker(name)), "unit")


def pytest_configure() -> None:
    """Let Ctrl-C reach what tests start: a shell's background jobs ignore it, and so would every child."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    """Do without the collector while modules of tests are imported: they stay, and it takes a fifth of the time.

    If all tests are collected, the second process of pytest-xdist begins with the bytecode of the last modules.
    """
    gc.disable()
    try:
        are_all = session.config.args_source is pytest.Config.ArgsSource.TESTPATHS
        if are_all and os.environ.get("PYTEST_XDIST_WORKER") == "gw1":
            write_from_the_end(Path(__file__).parent, session.config)
        return (yield)
    finally:
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Have each report say its tier, for the summary; tests of no other tier bear the marker `unit`.

    Folders of slower tiers have marked their tests by now: pytest asks conftest.py files further down first. Those tests
    start real processes, which take their time on a busy machine; none of them is about how long.
    """
    for item in items:
        tier = tier_of(item)
        item.user_properties.append(("tier", tier))
        if tier == "unit":
            item.add_marker(tier)
        elif item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(STORY_S))


def pytest_collection_finish() -> None:
    """Have the collector leave out what the tests' modules made: each full collection would walk 800,000 objects more."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Iterator[None]:
    """Leave the variables that interpreters read to no later test."""
    with variables_put_back():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Keep unit tests from starting processes and from writing outside their temporary folders; check what others' runs wrote."""
    asked = "real_processes" in getattr(item, "fixturenames", ())
    if asked or tier_of(item) != "unit":
        result = yield
        if (wrong := run_folders.violations_of_test(item)) and not item.get_closest_marker("lines_of_others"):
            pytest.fail(
                "lines in run folders are not as `elasticflow guide --schema events` has them:\n"
                + "\n".join(wrong[:20])
            )
        return result
    with GUARD.watch(*temporary_folders(item.config)):
        return (yield)


@pytest.fixture
def tmp_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a new folder of this test's own. To find a free name, pytest's fixture would look at those of all tests before."""
    name = re.sub(r"\W", "_", request.node.name)[:30]
    return tmp_path_factory.mktemp(f"{name}{next(_numbers)}", numbered=False)


@pytest.fixture(scope="session")
def real_processes() -> None:
    """Let this test start processes and write where they write, though it belongs to no slower tier."""


@pytest.fixture(scope="session")
def forked(real_processes: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkedPrograms]:
    """Yield what starts programs as forks of one process for all tests: it takes seconds to import torch."""
    # Each program that shards a model would import the compiler.
    programs = ForkedPrograms(tmp_path_factory.mktemp("forked"), ("torch._dynamo.config",))
    yield programs
    programs.close()


@pytest.fixture(scope="session")
def tiny_reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """Return what the tiny job comes to undisturbed: one launch for all tests that compare bits with it.

    Processes of pytest-xdist, whose temporary folders lie side by side, share it.
    """
    from tests.end_to_end import tiny_job

    own = tmp_path_factory.getbasetemp()
    kept = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "tiny-reference.pickle"
    with kept.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not kept.exists():
            reference = tiny_job.reference(tmp_path_factory.mktemp("tiny-reference") / "project")
            kept.write_bytes(pickle.dumps(reference))
        loaded: Reference = pickle.loads(kept.read_bytes())
    return loaded


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """Serve S3 on loopback for the whole session and return its URL."""
    from botocore.loaders import JSONFileLoader

    # Tests make hundreds of clients, and each would parse botocore's descriptions of S3, 1 MB, anew.
    read = JSONFileLoader().load_file
    with pytest.MonkeyPatch.context() as patch, servers.s3() as url:
        patch.setattr(JSONFileLoader, "load_file", staticmethod(cache(read)))
        yield url


@pytest.fixture
def s3_bucket(s3_server: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the name of a new bucket; endpoint and keys are in the environment, for child processes too."""
    import s3fs

    environment = {
        "AWS_ENDPOINT_URL": s3_server,
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",  # else clients ask a host that is not there
        "AWS_CONFIG_FILE": "/dev/null",
        "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    bucket = f"bucket-{uuid.uuid4().hex[:8]}"
    s3fs.S3FileSystem(skip_instance_cache=True).mkdir(bucket)
    return bucket


@pytest.fixture(scope="session")
def azure_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Serve Azure blobs on loopback for the whole session and return the connection string."""
    with _or_skip(servers.azurite(tmp_path_factory.mktemp("azurite"))) as connection:
        yield connection


@pytest.fixture(scope="session")
def gcs_server() -> Iterator[str]:
    """Serve Google's storage interface on loopback for the whole session and return its URL."""
    with _or_skip(servers.gcs()) as url:
        yield url


@pytest.fixture(scope="session")
def ssh_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.SshServer]:
    """Serve sftp on loopback for the whole session."""
    with _or_skip(servers.sshd(tmp_path_factory.mktemp("sshd"))) as server:
        yield server


@contextlib.contextmanager
def _or_skip(server: contextlib.AbstractContextManager[T]) -> Iterator[T]:
    with contextlib.ExitStack() as stack:
        try:
            running = stack.enter_context(server)
        except servers.MissingServerError as error:
            pytest.skip(str(error))
        yield running


@pytest.fixture
def place(request: pytest.FixtureRequest) -> Place:
    """Return a new, empty place on a store of the kind that the test's parameter names."""
    return make_place(request.param, request)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say how long each tier of tests took."""
    seconds: dict[str, float] = dict.fromkeys(("unit", *TIERS), 0.0)
    counts = dict.fromkeys(seconds, 0)
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                tier = str(dict(report.user_properties).get("tier", "unit"))
                seconds[tier] += report.duration
                counts[tier] += report.when == "call"
    terminalreporter.section("time by tier")
    for tier, count in counts.items():
        terminalreporter.write_line(f"{tier:<12} {count:5d} tests {seconds[tier]:8.1f} s")
