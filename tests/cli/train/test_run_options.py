from __future__ import annotations

from pathlib import Path

from elasticflow.cli.train.run_options import RunOptions


def test_command_that_goes_on_has_all_that_says_where_and_what() -> None:
    """The machines, the case and the values; quoted as a shell needs it."""
    options = RunOptions(
        job_file=Path("jobs/sweep.toml"), overrides=("env.NOTE=a b",), hosts=Path("hosts.txt"), case="lr1"
    )
    assert (
        options.command_with("nightly-lr1")
        == "elasticflow run jobs/sweep.toml --hosts hosts.txt --case lr1 --set 'env.NOTE=a b' --run-id nightly-lr1"
    )
    assert "elasticflow run a.toml --on ray --run-id x" == RunOptions(
        job_file=Path("a.toml"), on="ray"
    ).command_with("x")
