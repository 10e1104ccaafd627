"""`elasticflow init [MODEL_FILE]`, `init train.py`, `init --example NAME`: a job file."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from elasticflow.cli.parameters import EXAMPLE, FILE, MODEL_FILE, set_option
from elasticflow.errors import ScaffoldError

if TYPE_CHECKING:
    from elasticflow.cli.write.init_files import InitOptions, NewJob


@click.command("init")
@click.argument("model_file", metavar="[MODEL_FILE]", type=MODEL_FILE, required=False)
@click.option(
    "--example", type=EXAMPLE, metavar="NAME", help="Write a whole example, with code, data and job."
)
@click.option(
    "-o", "--output", type=FILE, help="Where to write it; default: jobs/NAME.toml; for an example: NAME/."
)
@click.option("--name", help="The job's name; default: the model's, or spirals.")
@click.option("--model", help="Class or function of the file, if it has several.")
@click.option("--dataset", help="Function or class: NAME of the file or its neighbours, or module:NAME.")
@click.option(
    "--loss", help="Function of outputs and targets: NAME, of the file or of torch, or module:NAME."
)
@click.option("--epochs", type=click.IntRange(1), default=None, help="Passes over the data.")
@click.option(
    "--batch-size", type=click.IntRange(1), default=None, help="Samples per step, over all workers."
)
@click.option("--workers", type=click.IntRange(1), default=None, help="Workers per machine.")
@set_option("Set a key of model, optimizer or dataset: model.args.width=64.")
@click.option("--script", is_flag=True, help="Take the file as a training script in any case.")
@click.option("--args", metavar="WORDS", help="A script's arguments, quoted as for a shell.")
@click.option("--print", "only_print", is_flag=True, help="Print the job file; write nothing.")
@click.option("--pre-commit", is_flag=True, help="Make pre-commit check job files.")
@click.option(
    "--deep/--no-deep",
    default=None,
    help="Try the job out at the end, as `validate --deep` does; default: where torch is installed.",
)
@click.option("-y", "--yes", is_flag=True, help="Ask nothing.")
def command(
    *,
    example: str | None,
    workers: int | None,
    only_print: bool,
    pre_commit: bool,
    deep: bool | None,
    yes: bool,
    script: bool,
    args: str | None,
    **options: Any,
) -> int:
    """Write a job file: for the model in MODEL_FILE, for a training script as it is, or an example.

    The command finds models, datasets, losses and training steps by reading the file and its neighbours, and names them
    with file and line. On a terminal it asks for the missing parts of a job; elsewhere it names the missing keys and the
    flags that give them. It makes nothing up, and overwrites no existing file. At the end it tries the job in a process
    of its own, and reports what keeps it from training.

    A file that trains when it is run, under torchrun for instance, is a script: it is read, not run, and gets a job with
    [script]. The command names the rung of the script, and the lines to change for the next one.

    \b
    elasticflow init                                   the smallest example: model, data, job
    elasticflow init --example gpt                     a whole one, in a folder of its own; there are:
      contrastive   pairs of views (SimCLR)         images        augmentation, mixup, averaging
      dcgan         two networks, two optimizers    lora          LoRA of a Llama (transformers, peft)
      detection     boxes, ragged targets           segmentation  a U-Net, a label for each pixel
      diffusion     DDPM, averaged weights          streaming     text shards, read in order
      gpt           a character GPT on sonnets      tabular       regression: numbers, categories
      graphs        graphs joined into batches
    elasticflow init model.py                          asks for what the file does not tell
    elasticflow init model.py --dataset data:faces --loss cross_entropy --set model.args.width=64 -y
    elasticflow init model.py --print
    elasticflow init train.py --args "--epochs 10"     the script as it is: [script]
    """
    if (script or args is not None) and options["model_file"] is None and example is None:
        raise click.UsageError("--script and --args go with a file: init --script train.py")
    may_ask = not (yes or only_print) and sys.stdin.isatty() and sys.stdout.isatty()
    if example is not None:
        from elasticflow.cli.write.init_files import finish_example, print_example

        folder = options.pop("output")
        if workers or pre_commit or script or args or any(options.values()):
            raise click.UsageError("with --example go -o, --print, --deep and --yes only")
        if only_print:
            return print_example(example)
        return finish_example(example, folder, deep=deep)
    from elasticflow.cli.write.init_files import InitOptions

    given = InitOptions(**options, args=args, workers=workers or _workers(), may_ask=may_ask)
    of_model = [
        name for name in ("model", "dataset", "loss", "epochs", "batch_size", "overrides") if options[name]
    ]
    if _is_script(options["model_file"], of_model, is_said=script or args is not None):
        from elasticflow.cli.write import init_script

        if deep:
            raise click.UsageError(
                "--deep tries out what a job names, and a script would train: leave it out"
            )
        return init_script.finish(
            options["model_file"],
            given,
            has_workers=workers is not None,
            only_print=only_print,
            pre_commit=pre_commit,
        )
    from elasticflow.cli.write.init_files import finish, print_only, write

    job = _new_job(given, only_print=only_print)
    if only_print:
        return print_only(job)
    loaded = write(job, pre_commit=pre_commit)
    return finish(job, loaded, deep=deep)


def _new_job(options: InitOptions, *, only_print: bool) -> NewJob:
    """Return the job to write, and print the candidates for each role."""
    from elasticflow.cli.write.init_files import NewJob
    from elasticflow.cli.write.init_model import job_for_model
    from elasticflow.jobfile.project import project_root_of
    from elasticflow.scaffold.gallery import spirals

    root = project_root_of((options.output or Path.cwd() / "job.toml").resolve())
    if options.model_file is not None:
        return job_for_model(options, options.model_file, root, quiet=only_print)
    if options.model or options.dataset or options.loss or options.overrides:
        raise click.UsageError("--model, --dataset, --loss and --set go with a model file: init FILE.py")
    name = options.name or "spirals"
    if not name.isidentifier():
        raise ScaffoldError(
            f'"{name}" cannot be a package', "give a name of letters, digits and _: --name NAME"
        )
    text, code = spirals(
        name, epochs=options.epochs or 10, batch_size=options.batch_size or 64, workers=options.workers
    )
    return NewJob(root, options.output or root / "jobs" / f"{name}.toml", text, code)


def _is_script(path: Path | None, of_model: list[str], *, is_said: bool) -> bool:
    if is_said and of_model:
        names = ", ".join(f"--{name.replace('_', '-').replace('overrides', 'set')}" for name in of_model)
        raise click.UsageError(f"{names} go with a model; a script has its own arguments: --args")
    if path is None or of_model:
        return False
    if is_said:
        return True
    from elasticflow.cli.write.init_script import is_script

    return is_script(path)


def _workers() -> int | str:
    """Return `auto`, one worker per GPU, if there are GPUs; else 2, enough to see workers share a batch."""
    if Path("/proc/driver/nvidia/version").exists():
        return "auto"
    return min(2, os.cpu_count() or 1)
