"""Names of other tools: each is one of that tool, each key pointed at is one of ours, and what is said can be pasted."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import tomli

from elasticflow.jobfile.diagnostics import codes
from elasticflow.jobfile.load import load_job
from elasticflow.jobfile.tables.job import Job
from elasticflow.jobfile.wording.foreign_names import ROWS, TOOLS, meaning_of, meanings, plain
from elasticflow.jobfile.wording.type_descriptions import keys_at

if TYPE_CHECKING:
    from collections.abc import Callable

READ = json.loads((Path(__file__).parents[1] / "tools" / "names.json").read_text("utf-8"))
KEYS = [".".join(key) for table in Job.model_fields for key in ((table, each) for each in keys_at((table,)))]
KEYS += [f"snapshots.keep.{each}" for each in keys_at(("snapshots", "keep"))]
KEYS += [f"kubernetes.resources.{each}" for each in keys_at(("kubernetes", "resources"))]
# Variables that NCCL and Gloo read, which are not Python.
OF_LIBRARIES = {"NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_DEBUG"}
JOB = {
    "job": 'name = "x"',
    "model": 'entry = "model:net"\nloss = "torch.nn.functional:cross_entropy"',
    "optimizer": 'entry = "torch.optim:AdamW"',
    "dataset": 'entry = "shop:images"\nglobal_batch_size = 64',
    "train": "epochs = 5",
}

Told = list[tuple[str, str | None]]


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Told]:
    """Return what gives code and help of everything that is said about a job with other tables."""
    monkeypatch.chdir(tmp_path)
    Path("model.py").write_text("def net():\n    pass\n", "utf-8")
    Path("shop.py").write_text("def images():\n    return Images()\n", "utf-8")

    def told(*flags: str, **tables: str) -> Told:
        text = "\n".join(f"[{name}]\n{lines}" for name, lines in {**JOB, **tables}.items())
        Path("job.toml").write_text(text, "utf-8")
        found = load_job(Path("job.toml"), flags).diagnostics
        return [(each.code, each.help) for each in found if each.severity == "error"]

    return told


def _names(tool: str) -> set[str]:
    return {name for row in ROWS for name in row.names.get(tool, "").split()}


def test_there_are_many_names() -> None:
    """At least 60 were asked for; every row has names, and tools are known ones."""
    assert len({name for tool in set(TOOLS) - {"other"} for name in _names(tool)}) >= 150
    assert len(meanings()) >= 300
    assert all(row.names and set(row.names) <= set(TOOLS) and all(row.names.values()) for row in ROWS)


@pytest.mark.parametrize("tool", sorted(READ))
def test_every_name_is_one_of_its_tool(tool: str) -> None:
    """They were read from the sources of the tool (`tools/read_names.py`)."""
    assert _names(tool) - set(READ[tool]["names"]) == set()


def test_every_name_of_torch_is_one_of_torch() -> None:
    """Parameters of the loader, of DDP and of optimizers; variables that its sources speak of, or options in capitals."""
    import torch
    from torch.distributed.run import get_args_parser

    callables = (
        torch.utils.data.DataLoader,
        torch.nn.parallel.DistributedDataParallel,
        torch.optim.AdamW,
        torch.optim.SGD,
    )
    parameters = {name for each in callables for name in inspect.signature(each.__init__).parameters}
    assert _names("torch") - parameters == set()
    options = {action.dest.upper() for action in get_args_parser()._actions}
    folder = Path(torch.__file__).parent / "distributed"
    sources = " ".join(path.read_text("utf-8") for path in (folder / "elastic" / "agent").rglob("*.py"))
    assert _names("torchrun") - options - set(re.findall(r"[A-Z_]+", sources)) - OF_LIBRARIES == set()


def test_every_key_that_is_pointed_at_is_one_of_the_job_file() -> None:
    """A table, a key of the models, or a key of a free table."""
    for row in ROWS:
        key = row.meaning.key
        table, _, rest = key.partition(".args.")
        is_of_group = table == "optimizer.groups.match"
        assert (
            not key
            or key in {*Job.model_fields, "extends", *KEYS}
            or is_of_group
            or (rest and f"{table}.args" in KEYS)
        )


def test_keys_named_in_notes_are_keys() -> None:
    """`snapshots.every` in a sentence is a key as well."""
    for row in ROWS:
        spoken = re.findall(rf"\b(?:{'|'.join(Job.model_fields)})\.[a-z_]+", row.meaning.note)
        assert [each for each in spoken if each not in KEYS] == []


def test_a_note_beside_a_key_has_no_place_for_the_value() -> None:
    """It is shown as it stands: the value is in the line to write."""
    assert [row for row in ROWS if row.meaning.key and "{}" in row.meaning.note] == []


def test_what_other_tools_write_is_not_taken_over_unread(told: Callable[..., Told]) -> None:
    """Hydra's list of defaults, Composer's duration, Kubernetes's list of variables."""
    path = 'write extends = "FILE.toml" at the top of the file, above all tables'
    assert told(job='name = "x"\ndefaults = ["base", "_self_"]')[0] == (codes.UNKNOWN_KEY, path)
    duration = "this is train.epochs, train.steps or, as a time, train.time_limit here"
    assert told(job='name = "x"\nmax_duration = "10ep"')[0] == (codes.UNKNOWN_KEY, duration)
    variables = "write [env], not [[env]], and below it NAME = ... on a line for each"
    assert told(train='epochs = 5\n[[env]]\nname = "A"')[0] == (codes.WRONG_TYPE, variables)
    assert told(model='entry = "bert-base-uncased"\nloss = "torch.nn.functional:mse_loss"') == [
        (codes.MALFORMED, None)
    ]


def test_no_name_is_two_things_by_accident() -> None:
    """A name stands in two rows only where two tools mean two things, and the first is the more common."""
    seen: dict[str, set[str]] = {}
    for number, row in enumerate(ROWS):
        for tool, words in row.names.items():
            for name in words.split():
                if not row.meaning.table:
                    seen.setdefault(plain(name), set()).add(f"{number}{tool}")
    twice = {name for name, where in seen.items() if len({re.sub(r"\D", "", each) for each in where}) > 1}
    assert twice == {"num_processes", "warmup_steps"} & twice


def test_a_name_is_known_however_it_is_spelled() -> None:
    """As an option, as a variable, with hyphens or in capitals."""
    for name in ("max_grad_norm", "--max-grad-norm", "MAX_GRAD_NORM"):
        found = meaning_of(name)
        assert found is not None
        assert found.key == "optimizer.clip_grad_norm"
    assert meaning_of("PET_MAX_RESTARTS") == meaning_of("max_restarts") is not None
    assert meaning_of("nothing_of_the_kind") is None


SAMPLES: dict[str, tuple[str, str, str]] = {  # name -> value, table it stands in, what is to be pasted where
    "num_train_epochs": ("3", "job", "train: epochs = 3"),
    "max_grad_norm": ("1.0", "train", "optimizer: clip_grad_norm = 1.0"),
    "save_total_limit": ("2", "train", "snapshots: keep.last = 2"),
    "save_steps": ("500", "train", 'snapshots: every = "500 steps"'),
    "log_every_n_steps": ("50", "train", 'logging: every = "50 steps"'),
    "check_val_every_n_epoch": ("2", "train", 'evaluation: every = "2 epochs"'),
    "ddp_timeout": ("1800", "train", 'restarts: hang_timeout = "1800 s"'),
    "learning_rate": ("3e-4", "train", "optimizer: args.lr = 0.0003"),
    "adam_beta2": ("0.95", "train", "optimizer: args.betas = [0.9, 0.95]"),
    "bf16": ("true", "train", 'train: precision = "bf16"'),
    "mixed_precision": ('"bfloat16"', "train", 'train: precision = "bf16"'),
    "devices": ("4", "train", "nodes: nproc_per_node = 4"),
    "gpus": ("-1", "train", 'nodes: nproc_per_node = "auto"'),
    "output_dir": ('"out"', "train", 'snapshots: uri = "out"'),
    "dataloader_drop_last": ("true", "dataset", 'dataset: tail = "drop"'),
    "lr": ('"1e-3"', "optimizer", 'optimizer: args.lr = "1e-3"'),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_what_is_said_can_be_pasted(told: Callable[..., Told], name: str) -> None:
    """The line is named with its value in the spelling of the key, and its table where that is another one."""
    value, table, wanted = SAMPLES[name]
    lines = "\n".join(
        each for each in JOB[table].split("\n") if not wanted.startswith(f"{table}: {each[:3]}")
    )
    tables = {"train": "steps = 5"} if name == "num_train_epochs" else {}
    found = told(**{**tables, table: f"{lines}\n{name} = {value}"})
    code, remedy = found[0]
    assert [code] == [codes.UNKNOWN_KEY] * len(found)
    home, _, line = wanted.partition(": ")
    where = "" if home == table else f" in [{home}]"
    assert remedy is not None
    assert remedy.partition(" (")[0] == f"write {line}{where}"
    tomli.loads(line)


def test_one_mistake_is_one_error_also_where_a_key_is_missing_for_it(told: Callable[..., Told]) -> None:
    """What is missing because it has a foreign name, or stands in a foreign table, is not said to be missing besides."""
    told_of = {
        "dataset": 'entry = "shop:images"\nbatch_size = 64',
        "train": "num_train_epochs = 3",
        "model": 'entry = "model:net"\ncriterion = "torch.nn.functional:cross_entropy"',
    }
    for name, lines in told_of.items():
        assert [code for code, _ in told(**{name: lines})] == [codes.UNKNOWN_KEY]
    assert [
        code for code, _ in told(dataset='entry = "shop:images"', train="epochs = 1\nbatch_size = 64")
    ] == [codes.UNKNOWN_KEY]


def test_a_flag_is_told_the_flag_to_write(told: Callable[..., Told]) -> None:
    """With --set it is --set again, quoted for a shell where that needs it."""
    assert told("optimizer.lr=1e-3") == [(codes.UNKNOWN_KEY, "write --set optimizer.args.lr=0.001")]
    assert told("save_steps=500") == [(codes.UNKNOWN_KEY, "write --set 'snapshots.every=500 steps'")]
    assert told("optimiser.args.lr=1") == [(codes.UNKNOWN_KEY, "write --set optimizer.args.lr=1")]
    assert told("training.epochs=3") == [(codes.UNKNOWN_KEY, "write --set train.epochs=3")]
    assert told("--train.epochs=3") == [(codes.UNKNOWN_KEY, "write --set train.epochs=3")]
    assert told("train.precision=BF16") == [(codes.OUT_OF_RANGE, "write --set train.precision=bf16")]
    assert told("train.compile=True") == [(codes.WRONG_TYPE, "write --set train.compile=true")]
    assert told("job.name=7") == [(codes.WRONG_TYPE, "write --set 'job.name=\"7\"'")]
    assert told("snapshots.every=[500, 10 min]")[0][1] == (
        "quote it for your shell, for example --set 'dataset.args={ split = \"train\" }'"
    )
    assert told("job.extends=base.toml")[0][1] == "write it in the job file: a flag cannot extend it"
    assert told("num_workers=4") == [(codes.UNKNOWN_KEY, "write --set dataset.num_workers=4")]
    assert (
        told("train.shuffle=true")[0][1]
        == "leave it out: each epoch has an order of its own, made of job.seed"
    )


def test_no_secret_is_repeated(told: Callable[..., Told]) -> None:
    """A remedy shows no value that may be one."""
    for line in ('hub_token = "hf_hunter2"', 'output_dir = "s3://me:hunter2@bucket/x"'):
        assert "hunter2" not in str(told(train=f"epochs = 1\n{line}"))


@pytest.mark.usefixtures("real_processes")
def test_the_table_is_not_read_for_a_file_without_mistakes() -> None:
    """Validation of good files does not wait for it."""
    root = Path(__file__).resolve().parents[3]
    code = (
        "import sys; from pathlib import Path; from elasticflow.jobfile.load import load_job;"
        "found = load_job(Path('jobs/mnist.toml')); assert not found.has_errors;"
        "late = {'foreign_names', 'pydantic_messages', 'same_values', 'syntax_errors', 'unknown_keys'};"
        "print([name for name in sys.modules if name.rpartition('.')[2] in late])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
