"""`elasticflow render kubernetes JOB`: a manifest for kubectl."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from elasticflow.cli.parameters import FILE_ONLY, JOB_FILE, RUN_ID, case_option, overrides_option
from elasticflow.jobfile.diagnostics import codes

if TYPE_CHECKING:
    from pathlib import Path

    from elasticflow.clusters.kubernetes.render import Form

# Where the pods meet is the manifest's to say, and where their snapshots are kept was checked for pods.
_SAID_OTHERWISE = frozenset({codes.NO_ENDPOINT, codes.LOCAL_SNAPSHOTS})


@click.command("kubernetes")
@click.argument("job_file", metavar="JOB", type=JOB_FILE)
@click.option(
    "-o",
    "--output",
    "target",
    metavar="FILE",
    type=FILE_ONLY,
    help="Where it goes; default: standard output.",
)
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
    """Write a job as a manifest: a pod for each node, which meet, restart and grow by themselves.

    [kubernetes] in the job file says which image the pods have and what they ask for. Applied again, or with its pods
    gone, the manifest continues with the same run.

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
    # Variables are the pods': they are not looked up here.
    loaded = require_job(job_file, overrides, case=case, environment=None)
    text = render_kubernetes(loaded, overrides, form, run_id)
    show_warnings(loaded, but=_SAID_OTHERWISE)
    if target is None:
        click.echo(text, nl=False)
    else:
        atomic_files.write(target, (text.encode(),))
        click.echo(f"wrote {target}: kubectl apply -f {target}")
