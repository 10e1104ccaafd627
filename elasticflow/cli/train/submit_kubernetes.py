"""`elasticflow submit kubernetes JOB`: a manifest for kubectl, applied, printed or written."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from elasticflow.cli.parameters import JOB_FILE, RUN_ID, case_option, overrides_option
from elasticflow.cli.train.submit_group import print_options, write_out
from elasticflow.jobfile.diagnostics import codes

if TYPE_CHECKING:
    from pathlib import Path

    from elasticflow.clusters.kubernetes.render import Form

# The manifest sets the endpoint of the pods, and the place of their snapshots has a check of its own.
_SAID_OTHERWISE = frozenset({codes.NO_ENDPOINT, codes.LOCAL_SNAPSHOTS})


@click.command("kubernetes")
@click.argument("job_file", metavar="JOB", type=JOB_FILE)
@print_options
@click.option(
    "--form",
    type=click.Choice(["job", "jobset", "trainjob"]),
    help="An elastic Indexed Job, a JobSet or a Kubeflow TrainJob; default: as [kubernetes] says.",
)
@click.option(
    "--run-id", type=RUN_ID, metavar="ID", help="The run that the pods train; default: the job's name."
)
@case_option
@overrides_option
def command(
    job_file: Path,
    target: Path | None,
    form: Form | None,
    run_id: str | None,
    case: str | None,
    overrides: tuple[str, ...],
    *,
    is_printed: bool,
) -> None:
    """Apply a job as a manifest with a pod for each node; the pods meet, restart and grow by themselves.

    [kubernetes] in the job file gives the image and the resources of the pods. Applied again, or after its pods are
    gone, the manifest continues the same run. kubectl applies it, in the namespace and context that kubectl is set to.

    \b
    elasticflow submit kubernetes jobs/mnist.toml
    elasticflow submit kubernetes jobs/mnist.toml -o mnist.yaml   then: kubectl apply -f mnist.yaml
    elasticflow submit kubernetes jobs/mnist.toml --run-id second
    elasticflow submit kubernetes jobs/mnist.toml --form jobset --print
    """
    from elasticflow.cli.output import show_warnings
    from elasticflow.clusters.kubernetes.kubectl import apply
    from elasticflow.clusters.kubernetes.render import render_kubernetes
    from elasticflow.jobfile.load import require_job

    # Variables are looked up in the pods, not here.
    loaded = require_job(job_file, overrides, case=case, environment=None)
    text = render_kubernetes(loaded, overrides, form, run_id)
    show_warnings(loaded, but=_SAID_OTHERWISE)
    if is_printed or target is not None:
        write_out(text, target, "kubectl apply -f")
    else:
        assert loaded.job.kubernetes is not None
        patch = loaded.job.kubernetes.patch
        click.echo(apply(text, None if patch is None else loaded.project_root / patch), nl=False)
