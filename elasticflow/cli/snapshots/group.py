"""`elasticflow snapshots`: the commands for a run's snapshots."""

from __future__ import annotations

import click

from elasticflow.cli.lazy_group import CommandEntry, LazyGroup

COMMANDS: dict[str, CommandEntry] = {
    "list": CommandEntry("snapshots.list", "List a run's snapshots, with why each stays."),
    "show": CommandEntry("snapshots.show", "Show all of one snapshot, and where it comes from."),
    "verify": CommandEntry("snapshots.verify", "Check every byte of snapshots."),
    "pin": CommandEntry("snapshots.pin", "Keep snapshots until they are unpinned.", "pin"),
    "unpin": CommandEntry("snapshots.pin", "Leave snapshots to the job's policy again.", "unpin"),
    "prune": CommandEntry("snapshots.prune", "Remove the snapshots that no rule keeps."),
    "export": CommandEntry(
        "snapshots.export", "Write the weights as safetensors, a torch state_dict or a DCP folder."
    ),
}


@click.group("snapshots", cls=LazyGroup, table=COMMANDS)
def command() -> None:
    """List, check, keep, prune and export a run's snapshots.

    RUN is a run folder, a run id, a job's name or file (its newest run), or a path or URL of a run's snapshots;
    default: the newest run. SNAPSHOT is a name, `latest`, `best` or `step:N`; default: `latest`.

    \b
    elasticflow snapshots list                              the newest run's
    elasticflow snapshots show mnist best                   the best one, and its origin
    elasticflow snapshots verify s3://bucket/mnist/RUN_ID --all
    elasticflow snapshots pin mnist step:5000 --note "used in the paper"
    elasticflow snapshots export mnist best --format safetensors -o mnist.safetensors
    """
