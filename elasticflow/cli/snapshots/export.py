"""`elasticflow snapshots export [RUN] [SNAPSHOT]`: weights for other programs."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from elasticflow.cli.output import ProgressMeter, paint, print_json
from elasticflow.cli.parameters import FILE
from elasticflow.cli.snapshots.selection import (
    find,
    find_one,
    find_rows,
    option_option,
    store_errors,
    words_argument,
)
from elasticflow.errors import ExportError, SnapshotNotFoundError
from elasticflow.observe.snapshots.rows import BEST, better_step, ranking_metric
from elasticflow.observe.terminal.formats import plural, size
from elasticflow.snapshots.tools.export import write
from elasticflow.snapshots.tools.exported import Export, measured_part

if TYPE_CHECKING:
    from elasticflow.observe.snapshots.locate import SnapshotSource
    from elasticflow.observe.snapshots.rows import BetterStep, SnapshotRow
    from elasticflow.snapshots.tools.export import Format, SaveModel
    from elasticflow.snapshots.tools.exported import Part

_ENDINGS: dict[Format, str] = {
    "safetensors": ".safetensors",
    "torch": ".pt",
    "dcp": ".dcp",
    "transformers": "",
}


@click.command("export")
@words_argument("[RUN] [SNAPSHOT]")
@click.option(
    "--format", "form", type=click.Choice(list(_ENDINGS)), required=True, help="safetensors needs no torch."
)
@click.option("-o", "--output", type=FILE, help="Default: JOB-stepN with the format's ending, here.")
@click.option(
    "--part",
    type=click.Choice(["model", "ema", "optimizer", "all"]),
    help="Part to write; default: the weights that evaluations measured, ema or model.",
)
@click.option(
    "--tokenizer",
    metavar="FOLDER",
    help="With transformers: save this tokenizer beside the model; a folder, or a name that AutoTokenizer takes.",
)
@click.option(
    "--force", is_flag=True, help="Replace an existing target, atomically, once the new one is whole."
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@option_option
def command(
    words: tuple[str, ...],
    options: tuple[str, ...],
    form: Format,
    output: Path | None,
    part: Part | None,
    tokenizer: str | None,
    *,
    force: bool,
    as_json: bool,
) -> None:
    """Write SNAPSHOT of RUN for other programs; every byte is verified, and the target is whole or absent.

    \b
    safetensors  one file, all names of model.state_dict(); tied weights under each of their names
    torch        what torch.load(PATH, weights_only=True) returns as model.state_dict()
    dcp          a folder for torch.distributed.checkpoint.load, in one process or many
    transformers a folder for from_pretrained; of a peft model the adapter

    Without --part, the weights that the run's metrics measured are written, so that the best snapshot gives the best
    weights: the averaged weights (`ema`) if evaluations measured these, as they do with train.ema, else the model's.
    `ema` is written under the model's own names. `all` is model, optimizer, schedule and the rest, each under its own
    key; `optimizer` is its state_dict().

    \b
    elasticflow snapshots export best --format safetensors
    elasticflow snapshots export mnist step:5000 --format torch -o mnist.pt
    elasticflow snapshots export mnist latest --format dcp --part all -o mnist.dcp
    """
    source, names = find(words, options)
    rows = find_rows(source)
    row = find_one(source, rows, names)
    if row.manifest is None:
        raise SnapshotNotFoundError(
            f"{row.name} is {row.state}: {row.reason}", "export one that is committed"
        )
    if part is None:
        with store_errors():
            part = measured_part(source.catalog, row.manifest)
    better = better_step(source, row) if BEST in names else None
    if tokenizer is not None and form != "transformers":
        raise click.UsageError("--tokenizer goes with --format transformers")
    path = output or _default(source, row, form, part)
    total = sum(entry.size for entry in row.manifest.locations().values())
    with store_errors(), ProgressMeter(f"exporting {row.name}", total) as meter:
        save_model = None if form != "transformers" else _save_model(source, tokenizer)
        export = Export(source.catalog, row.manifest, part, meter)
        count = write(export, form, path, replaces=force, save_model=save_model)
    if as_json:
        facts = {"snapshot": row.name, "path": str(path), "format": form, "part": part}
        measured = {
            "step": row.step,
            "metric": row.manifest.metric,
            "metric_name": ranking_metric(source.job),
        }
        lost = {"better": None if better is None else better._asdict()}
        print_json({**facts, "tensors": count, "bytes": _bytes(path), **measured, **lost})
        return
    of_part = f"{part}, " if part != "model" else ""
    click.echo(
        f"{paint(str(path), bold=True)}  {of_part}{plural(count, 'tensor')}, {size(_bytes(path))}, "
        f"from {row.name}{_measured(source, row)}"
    )
    if better is not None:
        click.echo(f"warning: {_passed_over(better, rows)}", err=True)
    if part in {"model", "ema"}:
        click.echo(f"load it with: {_recipe(form, path)}")


def _measured(source: SnapshotSource, row: SnapshotRow) -> str:
    metric, name = row.manifest.metric if row.manifest else None, ranking_metric(source.job)
    return f": step {row.step}" + ("" if metric is None else f", {name or 'metric'} {metric:.6g}")


def _passed_over(better: BetterStep, rows: list[SnapshotRow]) -> str:
    """Return the sentence about a step with a better metric, whose weights are in no snapshot for `best`."""
    said = f"the evaluation after step {better.step} measured better, {better.value:.6g}"
    if any(row.step == better.step and row.state == "committed" for row in rows):
        return (
            f"{said}; the snapshot of that step was taken before it was measured: export step:{better.step}"
        )
    return (
        f"{said}, and no snapshot has those weights: "
        "snapshots.keep = { best = 1 } has one taken at each new best value"
    )


def _save_model(source: SnapshotSource, tokenizer: str | None) -> SaveModel:
    if source.job is None or source.folder is None:
        raise ExportError(
            "--format transformers builds the model, and what job took this snapshot is not known here",
            "name the run, in its project, or export with --format safetensors",
        )
    from elasticflow.cli.snapshots.saved_model import save

    return partial(save, source.job, source.folder.project_root, tokenizer=tokenizer)


def _default(source: SnapshotSource, row: SnapshotRow, form: Format, part: Part) -> Path:
    name = source.job.job.name if source.job else row.manifest.run_id if row.manifest else ""
    return Path(f"{name}-step{row.step}{'' if part == 'model' else f'-{part}'}{_ENDINGS[form]}")


def _bytes(path: Path) -> int:
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())


def _recipe(form: Format, path: Path) -> str:
    if form == "safetensors":
        return f'model.load_state_dict(safetensors.torch.load_file("{path}"))'
    if form == "torch":
        return f'model.load_state_dict(torch.load("{path}", weights_only=True))'
    if form == "transformers" and (path / "adapter_config.json").is_file():
        return f'peft.PeftModel.from_pretrained(model, "{path}")'
    if form == "transformers":
        return f'transformers.AutoModel...from_pretrained("{path}"), or model.weights = "{path}"'
    return f'torch.distributed.checkpoint.load(state := model.state_dict(), checkpoint_id="{path}")'
