"""Programs that tests fork from one process are like programs started in fresh interpreters."""

from __future__ import annotations

import json
import signal
import textwrap
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from tests.forked import ForkedPrograms

pytestmark = pytest.mark.e2e

PROGRAM = """
    import json, os, random, signal, sys
    import beside
    facts = {"argv": sys.argv, "environment": dict(os.environ), "cwd": os.getcwd(), "drawn": random.random()}
    facts["finders"] = [type(each).__module__ for each in sys.meta_path if "elasticflow" in type(each).__module__]
    facts["torch"] = "torch" in sys.modules
    facts["blocked"] = list(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
    print(json.dumps(facts))
    match sys.argv[1]:
        case "raise": raise ValueError("no such layer")
        case "exit": sys.exit(3)
        case "wait": signal.pause()
"""


def test_a_fork_is_like_a_fresh_interpreter(forked: ForkedPrograms, tmp_path: Path) -> None:
    """Arguments, variables, folder, modules beside it, exit codes, signals and tracebacks; its random numbers are its own."""
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(PROGRAM))
    (tmp_path / "beside.py").write_text("")
    hows = ("end", "raise", "exit", "wait")
    started = [forked.start(program, how, environment={"A": "b"}, cwd=tmp_path) for how in hows]
    assert started[3].poll() is None
    with pytest.raises(TimeoutError):
        started[3].wait(0.01)
    started[3].kill()

    assert [0, 1, 3, -signal.SIGKILL] == [each.wait(60) for each in started]
    told = [json.loads(each.stdout.read_text()) for each in started[:3]]
    assert [[str(program), how] for how in hows[:3]] == [facts["argv"] for facts in told]
    assert 3 == len({facts["drawn"] for facts in told})
    for facts in told:
        assert {"A": "b"} == facts["environment"]
        assert (str(tmp_path), True) == (facts["cwd"], facts["torch"])
        assert [] == facts["blocked"] == facts["finders"]
    errors = [each.stderr.read_text() for each in started]
    assert ["", "", ""] == [errors[0], *errors[2:]]
    assert errors[1].endswith("ValueError: no such layer\n")
