"""Makes one launch of a trial: `python -m elasticflow.trials.launch_process PARENT_PID`, with the request on standard input."""

from __future__ import annotations

import os
import pickle
import sys

from elasticflow.launcher.agent.waiting_agent import start_ahead
from elasticflow.system.processes import die_with_parent


def main() -> None:
    """Launch, and exit with the exit code that `elasticflow run` would have."""
    die_with_parent(int(sys.argv[1]))
    start_ahead(["run"], os.environ)
    # The first step waits for the agent's imports, not for these.
    from elasticflow.errors import ElasticflowError
    from elasticflow.launcher.launch import launch

    request = pickle.loads(sys.stdin.buffer.read())  # noqa: S301  # of the process that started this one
    try:
        code = launch(request, lambda _: None, lambda sentence: _say(f"warning: {sentence}"))
    except ElasticflowError as error:
        _say(f"error: {error}")
        code = error.exit_code
    os._exit(code)  # see `cli/main.py`


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    main()
