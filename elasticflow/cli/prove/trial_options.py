"""Options of the commands that compare short runs of a job."""

from __future__ import annotations

import click

from elasticflow.trials.compare_runs import TOLERANCE

tolerance_option = click.option(
    "--tolerance",
    type=click.FloatRange(0, min_open=True),
    default=TOLERANCE,
    show_default=True,
    help='For consistency = "batch": how far two smoothed losses may lie apart, as a share of the largest.',
)
