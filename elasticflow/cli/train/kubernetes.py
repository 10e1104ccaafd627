"""`elasticflow render kubernetes JOB`: a manifest for kubectl."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from elasticflow.cli.parameters import JOB_FILE, RUN_ID, case_option, output_option, overrides_option
from elasticflow.jobfile.diagnostics import codes

if TYPE_CHECKING:
    from pathlib import Path

    from elasticflow.clusters.kubernetes.render import Form

# The manifest sets the endpoint of the pods, and the place of their snapshots has a check of its own.
_SAID_OTHERWISE = frozenset({codes.NO_ENDPOINT, codes.LOCAL_SNAPSHOTS})


@click.command("kubernetes")
@click.argument("job_file", metavar="JOB", type=JOB_FILE)
@output_option
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
) -> None:
    """Write a job as a manifest with a pod for each node; the pods meet, restart and grow by themselves.

    [kubernetes] in the job file gives the image and the resources of the pods. Applied again, or after its pods are
    gone, the manifest continues the same run.

    \b
    elasticflow render kubernetes jobs/mnist.toml -o mnist.yaml
    kubectl apply -f mnist.yaml
    elasticflow render kubernetes jobs/mnist.toml --run-id second -o second.yaml
    elasticflow render kubernetes jobs/mnist.toml --form jobset
    """
    from elasticflow.cli.output import show_warnings
    from elasticflow.clusters.kubernetes.render import render_kubernetes
    from elasticflow.jobfile.load import require_job
    from elasticflow.run_folder import RUN_ID as FORM_OF_ID
    from elasticflow.system import atomic_files

    if run_id is not None and not FORM_OF_ID.fullmatch(run_id):
        raise click.BadParameter("letters, digits, '.', '_' and '-' only, at most 100", param_hint="--run-id")
    # Variables are looked up in the pods, not here.
    loaded = require_job(job_file, overrides, case=case, environment=None)
    text = render_kubernetes(loaded, overrides, form, run_id)
    show_warnings(loaded, but=_SAID_OTHERWISE)
    if target is None:
        click.echo(text, nl=False)
    else:
        atomic_files.write(target, (text.encode(),))
        click.echo(f"wrote {target}: kubectl apply -f {target}")
