"""`elasticflow init [MODEL_FILE]`, `init --example NAME`: a job file that runs at once."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import click

from elasticflow.cli.parameters import EXAMPLE, FILE, MODEL_FILE, set_option


@click.command("init")
@click.argument("model_file", metavar="[MODEL_FILE]", type=MODEL_FILE, required=False)
@click.option(
    "--example", type=EXAMPLE, metavar="NAME", help="Write a whole example, with code, data and job."
)
@click.option(
    "-o", "--output", type=FILE, help="Where to write it; default: jobs/NAME.toml; for an example: NAME/."
)
@click.option("--name", help="The job's name; default: the model's, or spirals.")
@click.option("--model", help="Class or function of the file, where it has several.")
@click.option("--dataset", help="Function or class: NAME of the file or its neighbours, or module:NAME.")
@click.option("--loss", help="Function of outputs and targets: NAME of the file, or module:NAME.")
@click.option("--epochs", type=click.IntRange(1), default=None, help="Passes over the data.")
@click.option(
    "--batch-size", type=click.IntRange(1), default=None, help="Samples per step, over all workers."
)
@click.option("--workers", type=click.IntRange(1), default=None, help="Workers per machine.")
@set_option("An argument: model.args.width=64, dataset.args.n=9.")
@click.option("--print", "only_print", is_flag=True, help="Print the job file; write nothing.")
@click.option(
    "--gitignore/--no-gitignore", default=None, help="Add runs/ to .gitignore, in a checkout; else asks."
)
@click.option("--pre-commit", is_flag=True, help="Have pre-commit check job files.")
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
    gitignore: bool | None,
    only_print: bool,
    pre_commit: bool,
    deep: bool | None,
    yes: bool,
    **options: Any,
) -> int:
    """Write a job file that runs at once: for the model in MODEL_FILE, or an example.

    Models, datasets and losses are found by reading the file and its neighbours. What it cannot tell is asked on a
    terminal. A model without data gets made-up data of its shape, to be replaced; one that no loss of outputs and
    targets trains gets a training step. Nothing that exists is overwritten. In the end the job is tried out in a
    process of its own, and what keeps it from training is told.

    \b
    elasticflow init                                   the smallest example: model, data, job
    elasticflow init --example gpt                     a whole one, in a folder of its own; there are:
      contrastive  pairs of views (SimCLR)         images     augmentation, mixup, averaging
      dcgan        two networks, two optimizers    lora       LoRA of a Llama (transformers, peft)
      gpt          a character GPT on sonnets      streaming  text shards, read in order
      tabular      regression: numbers, categories
    elasticflow init model.py                          asks where there is a choice
    elasticflow init model.py --model Net --dataset data:faces --set model.args.width=64 -y
    elasticflow init model.py --print
    """
    from elasticflow.cli.write.init_answers import InitOptions, new_job
    from elasticflow.cli.write.init_files import finish, print_only

    may_ask = not (yes or only_print) and sys.stdin.isatty() and sys.stdout.isatty()
    if example is not None:
        from elasticflow.cli.write import init_example

        folder = options.pop("output")
        if workers or pre_commit or any(options.values()):
            raise click.UsageError("with --example go -o, --print, --gitignore, --deep and --yes only")
        if only_print:
            return init_example.print_job(example)
        return init_example.finish(example, folder, may_ask=may_ask, gitignore=gitignore, deep=deep)
    init_options = InitOptions(**options, workers=workers or _workers(), may_ask=may_ask)
    job = new_job(init_options)
    if only_print:
        return print_only(job)
    return finish(job, init_options, gitignore=gitignore, pre_commit=pre_commit, deep=deep)


def _workers() -> int | str:
    """Return `auto` where there are GPUs, one worker for each; else 2, enough to see workers share a batch."""
    if Path("/proc/driver/nvidia/version").exists():
        return "auto"
    return min(2, os.cpu_count() or 1)
