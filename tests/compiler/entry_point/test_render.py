from __future__ import annotations

import ast
import re
import subprocess
import sys
from datetime import date
from typing import TYPE_CHECKING, Any

import pytest

from elasticflow.compiler.entry_point.factories import CallForms
from elasticflow.compiler.entry_point.functions import functions_of
from elasticflow.compiler.entry_point.render import render, template
from elasticflow.compiler.provenance.job_json import job_digest
from elasticflow.errors import JobRefusedError
from elasticflow.jobfile.load import require_job
from elasticflow.jobfile.type_checks.annotations import DatasetValue
from elasticflow.python_source.bindings import bindings
from elasticflow.python_source.modules import Finder, NoModuleError, source_of
from elasticflow.system.installation import ABOVE_PACKAGE
from tests.compiler.golden.regenerate import CASES, FILES, HERE, ROOT, made
from tests.compiler.jobs import make_job

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from elasticflow.jobfile.tables.job import Job

SCHEDULER = {"entry": "torch.optim.lr_scheduler:StepLR", "args": {"step_size": 3}}

# One job per feature of the template, and some of them together.
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "devices": {"nodes__device": "cuda", "train__tf32": True, "train__channels_last": True},
    "shards": {"dataset__shards": 4},
    "steps": {"train__epochs": None, "train__steps": 10},
    "scheduler_step": {"lr_scheduler__entry": SCHEDULER["entry"], "lr_scheduler__args": SCHEDULER["args"]},
    "scheduler_epoch": {
        "lr_scheduler__entry": SCHEDULER["entry"],
        "lr_scheduler__args": SCHEDULER["args"],
        "lr_scheduler__interval": "epoch",
    },
    "scheduler_metric": {
        "lr_scheduler__entry": "torch.optim.lr_scheduler:ReduceLROnPlateau",
        "lr_scheduler__interval": "evaluation",
        "lr_scheduler__metric": "val.loss",
        "evaluation__val": {"entry": "pieces:digits", "every": ["5 steps", "1 epoch"]},
    },
    "evaluation": {"evaluation__entry": "pieces:digits", "evaluation__batch_size": 100},
    "metrics": {
        "evaluation__entry": "pieces:digits",
        "evaluation__metrics": {"accuracy": "pieces:accuracy", "top_5": "other.pieces:Top.five"},
        "evaluation__best": "max top_5",
        "dataset__micro_batch_size": 16,
    },
    "step": {
        "model__loss": None,
        "model__step": "pieces:Steps.training",
        "evaluation__entry": "pieces:digits",
        "evaluation__metrics": {"accuracy": "pieces:accuracy"},
    },
    "counted_loss": {"model__loss_count": "tokens:num_targets"},
    "counted_step": {
        "model__loss": None,
        "model__step": "pieces:training",
        "model__loss_count": "pieces:num_targets",
    },
    "objects": {
        "model__entry": "nano.model:GPT",
        "model__args": {
            "config": {
                "entry": "nano.model:GPTConfig",
                "args": {
                    "n_layer": 4,
                    "act": {
                        "entry": "torch.nn.functional:gelu",
                        "args": {"approximate": "tanh"},
                        "partial": True,
                    },
                },
            },
            "plain": {"entry": "no object"},
            "heads": [
                {"entry": "other.model:GPT"},
                {"entry": "nano.heads:Head", "args": {"entry": "a:b", "names": ["x"]}},
                {"entry": "builtins:dict", "args": {"entry": "a:b"}},
            ],
        },
        "optimizer__args": {"model": {"entry": "pieces:model", "partial": True}},
        "dataset__args": {
            "order": {"entry": "collections:OrderedDict"},
            "long": {
                "entry": "a_rather_long_package_name.with_a_subpackage.and_another_one.and_yet_another_one.models:first_one"
            },
        },
    },
    "data": {
        "dataset__prepare": "pieces:prepare",
        "dataset__collate": "pieces:samples",
        "dataset__samples": 100,
        "dataset__args": {
            "root": 'a "quoted" \\ path',
            "sizes": list(range(60)),
            "deep": {"a-b": {"c": [1.5, True]}},
        },
    },
    "collator": {
        "dataset__collate": {"entry": "pieces:Padded", "args": {"padding": 0}},
        "evaluation__entry": "pieces:digits",
        "optimizer__entry": "pieces:collator",
    },
    "collator_of_a_set": {
        "dataset__collate": "pieces:collator",
        "evaluation__entry": "pieces:digits",
        "evaluation__collate": {"entry": "pieces:padded", "args": {"padding": 0}, "partial": True},
    },
    "drawn": {"dataset__sampler": {"weights": "pieces:weights", "draws": 500}},
    "mixed": {
        "dataset__entry": None,
        "dataset__args": None,
        "dataset__mix": [
            {"entry": "pieces:books", "args": {"split": "train"}, "weight": 0.7},
            {"entry": "other.pieces:books", "weight": 0.3},
        ],
    },
    "by_temperature": {
        "dataset__entry": None,
        "dataset__mix": [{"entry": "pieces:books"}, {"entry": "pieces:code"}],
        "dataset__sampler": {"temperature": 2.0},
    },
    "balanced": {"dataset__sampler": {"balance_by": "targets"}},
    "bucketed": {"dataset__sampler": {"bucket_by": "pieces:lengths"}, "dataset__tail": "drop"},
    "numbers": {
        "optimizer__args": {"lr": 1e-3, "eps": float("inf"), "weight_decay": 1},
        "optimizer__clip_grad_norm": 1,
    },
    "fp16_ema": {
        "train__precision": "fp16",
        "train__ema": 0.99,
        "train__compile": True,
        "train__on_nonfinite": "skip",
    },
    "both_weights": {
        "train__ema": 0.99,
        "evaluation__entry": "pieces:digits",
        "evaluation__weights": "both",
    },
    "places": {
        "model__weights": "weights/base.safetensors",
        "snapshots__uri": "../shared",
        "snapshots__keep": {"last": 2, "best": 1, "every": "100 steps"},
        "snapshots__options": {
            "client_kwargs": {"endpoint_url": "https://objects.example", "region_name": "here"}
        },
        "job__path": ["src", "."],
    },
    "hooks": {
        "train__ema": 0.99,
        "train__consistency": "exact",
        "train__virtual_shards": 4,
        "hooks__on_start": "pieces:sample",
        "hooks__on_step": {"entry": "pieces:sample", "every": "100 steps", "all_ranks": True},
        "hooks__on_evaluation": {"entry": "pieces:sample", "args": {"length": 3}},
    },
    "measures": {
        "model__flops_per_sample": 1.5e9,
        "logging__peak_flops": 1e12,
        "logging__count_name": "tokens",
        "logging__grad_norm": True,
        "train__precision": "bf16",
    },
    "no_norm": {"optimizer__clip_grad_norm": 1.0, "logging__grad_norm": False},
    "ddp": {"ddp__find_unused_parameters": True, "ddp__bucket_cap_mb": 10},
    "names": {
        "model__entry": "a_rather_long_package_name.with_a_subpackage.and_another_one.and_yet_another_one.models:model"
    },
}


def _rendered(job: Job, **options: Any) -> str:
    return render(job, digest=job_digest(job), job_file="jobs/small.toml", root="../..", **options)


@pytest.mark.parametrize("case", CASES)
def test_golden_files(case: str) -> None:
    """The compiler makes the committed plan.json, train.py and torchrun.sh of each case, byte for byte."""
    expected = {name: (HERE / case / name).read_text(encoding="utf-8") for name in FILES}
    assert made(case) == expected


@pytest.mark.usefixtures("real_processes")
def test_what_is_made_is_linted_formatted_and_compiles(tmp_path: Path) -> None:
    """Each feature of the template gives valid Python that ruff's formatter and default rules find nothing in."""
    for name, changes in FEATURES.items():
        text = _rendered(make_job(**changes))
        compile(text, f"{name}.py", "exec")
        (tmp_path / f"{name}.py").write_text(text)
    for arguments in (["format", "--diff"], ["check", "--extend-select=I,F,UP,SIM,RUF,PIE,PERF,RET,D"]):
        argv = [
            sys.executable,
            "-m",
            "ruff",
            *arguments,
            "--isolated",
            "--line-length=110",
            "--target-version=py311",
        ]
        options = ["--config=lint.pydocstyle.convention='google'"] if arguments[0] == "check" else []
        done = subprocess.run(
            [*argv, *options, "."], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60
        )
        assert (done.returncode, done.stdout) in [(0, ""), (0, "All checks passed!\n")], (
            done.stdout + done.stderr
        )


@pytest.mark.timeout(300)
@pytest.mark.nightly
def test_golden_entry_points_are_typed() -> None:
    """In strict mode mypy finds nothing in what the golden jobs became."""
    files = [str(HERE / case / "train.py") for case in CASES]
    # What these import is checked by the repository's own mypy run.
    argv = [sys.executable, "-m", "mypy", "--follow-imports=silent", *files]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", FEATURES)
def test_nothing_of_the_template_is_left_over(name: str) -> None:
    """No marker of the template is left in what it becomes, which is Python."""
    text = _rendered(make_job(**FEATURES[name]))
    compile(text, name, "exec")
    assert not [line for line in text.splitlines() if "  # = " in line]


@pytest.mark.parametrize("name", FEATURES)
def test_all_that_is_imported_is_there(name: str) -> None:
    """What the template's lines import of elasticflow, this version has; also where the step moves the optimizers."""
    job = make_job(**FEATURES[name])
    moves = CallForms(step_moves_optimizers=job.model.step is not None)
    for forms in (CallForms(), moves):
        assert list(_not_there(_rendered(job, forms=forms))) == []


def _is_module(finder: Finder, name: str) -> bool:
    try:
        return finder.find(name) is not None
    except NoModuleError:
        return False


def _not_there(text: str) -> Iterator[str]:
    """Yield each name that a text imports from elasticflow, or takes from a module of it, and that this version lacks."""
    finder = Finder((), (ABOVE_PACKAGE,))
    modules: dict[str, str] = {}
    for node in ast.walk(ast.parse(text)):
        names: list[tuple[str, str]] = []
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("elasticflow"):
            names = [(str(node.module), each.name) for each in node.names]
            modules |= {each.name: f"{node.module}.{each.name}" for each in node.names}
        elif (
            isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules
        ):
            names = [(modules[node.value.id], node.attr)]
        for module, name in names:
            is_there = (
                bool(bindings(source_of(finder.find(module)), name)[0])
                if _is_module(finder, module)
                else True
            )
            is_there = is_there or _is_module(finder, f"{module}.{name}")
            if not is_there:
                yield f"{module}.{name}"


def test_the_same_job_gives_the_same_bytes() -> None:
    """Rendering has no clock and no randomness."""
    assert _rendered(make_job()) == _rendered(make_job())


def test_the_template_is_valid_python() -> None:
    """The template compiles with its sample values."""
    compile(template(), "train.py", "exec")


def test_the_header_tells_how_to_make_it_again() -> None:
    """The header names the job file, the digest and the command with its overrides, ready for a shell."""
    job = make_job()
    text = _rendered(job, overrides=["train.epochs=3", "job.name=it's"])
    assert f"Made by elasticflow from jobs/small.toml (job digest {job_digest(job)[:16]})." in text
    command = """elasticflow plan jobs/small.toml --set=train.epochs=3 '--set=job.name=it'"'"'s' -o DIR"""
    assert f"Make it again:          {command}" in text


def test_the_optimizer_gets_the_parameters_or_the_model() -> None:
    """A factory whose first parameter is `model` gets the model."""
    assert "    return SGD(model.parameters(), lr=0.1)\n" in _rendered(make_job())
    assert "    return SGD(model, lr=0.1)\n" in _rendered(
        make_job(), forms=CallForms(optimizer_takes_model=True)
    )


def test_methods_of_the_models_class_are_called_on_the_model() -> None:
    """Whatever wraps it; their class is imported as every name is."""
    job = make_job(
        model__entry="nano:GPT",
        model__loss=None,
        model__step="nano:GPT.training_step",
        optimizer__entry="nano:GPT.configure_optimizers",
    )
    text = _rendered(job, forms=CallForms(optimizer_is_method=True, step_is_method=True))
    assert "from elasticflow.runtime.training.unwrap import unwrap_model\n" in text
    assert "    return unwrap_model(model, GPT).configure_optimizers(lr=0.1)\n" in text
    assert "    return unwrap_model(model, GPT).training_step(batch)\n" in text
    text = _rendered(job, forms=CallForms(step_is_method=True, step_moves_optimizers=True))
    assert "    return unwrap_model(model, GPT).training_step(batch, optimizers)\n" in text


def test_a_factory_named_like_a_variable_is_renamed() -> None:
    """A factory called `model` does not hide the variable of that name."""
    text = _rendered(make_job(optimizer__entry="pieces:model"))
    assert "    from pieces import model as job_model\n" in text
    assert "    return job_model(model.parameters(), lr=0.1)\n" in text


@pytest.mark.parametrize("name", ["random_streams", "SEED"])
def test_a_factory_named_like_what_sets_its_random_state_is_renamed(name: str) -> None:
    """A factory called `random_streams` or `SEED` does not hide what its random state is set with."""
    text = _rendered(make_job(optimizer__entry=f"pieces:{name}"))
    assert f"    from pieces import {name} as job_{name}\n" in text
    assert f"    return job_{name}(model.parameters(), lr=0.1)\n" in text


def test_batches_are_made_by_one_object() -> None:
    """Made once, in a random state of its own, and called for training and evaluation alike; a set's own wins."""
    text = _rendered(make_job(**FEATURES["collator"]))
    made = '    random_streams.begin(SEED, "collate")\n    return Padded(padding=0)\n'
    assert (1, 1, 2) == (text.count(made), text.count("build_collate()\n"), text.count("collate=collate"))
    text = _rendered(make_job(**FEATURES["collator_of_a_set"]))
    assert "    return partial(padded, padding=0)\n" in text
    assert (1, 1) == (text.count("collate=collate"), text.count("collate=build_evaluation_collate()"))


def test_every_factory_begins_in_a_random_state_of_its_own() -> None:
    """Between the import of a factory and its call stands what sets the random state; the data share one."""
    others = {"evaluation__entry": "pieces:data", "lr_scheduler__entry": "pieces:schedule"}
    text = _rendered(make_job(**others, dataset__prepare="pieces:prepare"))
    functions = re.findall(r"^def (\w+)\(.*\n((?:    .*\n|\n)+)", text, re.MULTILINE)
    begun = {
        name: found[1]
        for name, body in functions
        if (found := re.search(r'\n\n    random_streams.begin\(SEED, "(\w+)"\)\n    (?:return )?\w+\(', body))
    }
    assert begun == {
        "prepare": "data",
        "build_dataset": "data",
        "build_model": "model",
        "build_optimizer": "optimizer",
        "build_scheduler": "scheduler",
        "build_evaluation_dataset": "data",
    }


def test_a_function_that_needs_a_value_of_the_data_is_given_the_data() -> None:
    """No other is: their parameters say what they need."""
    value = DatasetValue("width")
    text = _rendered(make_job(model__args={"width": value}, evaluation__entry="pieces:other"))
    assert "def build_model(dataset: OpenedDataset) -> nn.Module:\n" in text
    assert "    model = build_model(dataset)\n" in text
    assert "def build_optimizer(model: nn.Module) -> Optimizer:\n" in text
    assert 'open_dataset(worker, build_dataset, "train", values=VALUES)' in text
    text = _rendered(make_job(evaluation__entry="pieces:other", evaluation__args={"width": value}))
    assert 'worker, lambda: build_evaluation_dataset(dataset), "evaluation"' in text


def test_what_has_no_literal_is_refused_at_its_key() -> None:
    """A date, which TOML has and a job cannot hand over."""
    job = make_job(lr_scheduler__entry=SCHEDULER["entry"], lr_scheduler__args={"when": date(2026, 1, 1)})
    with pytest.raises(JobRefusedError, match=r"^lr_scheduler\.args\.when: a date cannot be an argument"):
        render(job, digest="", job_file="job.toml", root=".")


def test_each_function_says_which_key_it_is_about() -> None:
    """The arguments where the job gives some, else what is called."""
    job = make_job(**FEATURES["collator_of_a_set"], hooks__on_start="pieces:sample", train__ema=0.9)
    keys = {each.name: each.key for each in functions_of(job, CallForms(), ()).values()}
    assert keys == {
        "build_dataset": "dataset.entry",
        "build_collate": "dataset.collate",
        "build_model": "model.entry",
        "training_step": "model.loss",
        "build_optimizer": "optimizer.args",
        "build_average": "train.ema",
        "build_evaluation_dataset": "evaluation.entry",
        "build_evaluation_collate": "evaluation.collate",
        "build_hooks": "hooks",
    }


def test_only_where_the_data_is_to_be_apart_it_is_compared() -> None:
    """Not where the job file allows it, or names the training data itself, which is told without looking."""
    other = {"evaluation__entry": "pieces:held_back"}
    compared = '"evaluation", apart_from=dataset)'
    assert compared in _rendered(make_job(**other))
    for evaluation in ({**other, "evaluation__overlap": "allowed"}, {"evaluation__entry": "pieces:digits"}):
        text = _rendered(make_job(**evaluation))
        assert 'open_dataset(worker, build_evaluation_dataset, "evaluation")' in text


def test_relative_places_start_at_the_project_root() -> None:
    """Relative paths of snapshots and weights do not depend on the working folder; URLs and absolute ones stay."""
    text = _rendered(make_job(snapshots__uri="shared/x", model__weights="base.safetensors"))
    assert 'uri=str(ROOT / "shared/x")' in text
    assert 'WEIGHTS = str(ROOT / "base.safetensors")' in text
    for uri in ("s3://bucket/x", "/shared/x", "~/x", "memory://x"):
        assert f'uri="{uri}"' in _rendered(make_job(snapshots__uri=uri))


def test_entry_point_of_the_example_is_short() -> None:
    """What a newcomer reads first."""
    loaded = require_job(ROOT / "jobs" / "mnist.toml")
    assert len(_rendered(loaded.job).splitlines()) <= 150


@pytest.mark.parametrize("case", CASES)
def test_entry_points_can_be_read_at_one_sitting(case: str) -> None:
    """Even with everything switched on, train.py stays short, and so does what a reader begins with: `main`."""
    text = (HERE / case / "train.py").read_text()
    main = text.partition("def main()")[2].splitlines()
    assert (True, True) == (len(text.splitlines()) <= 175, len(main) <= 60)


@pytest.mark.parametrize(
    ("ema", "weights", "is_average", "is_both"),
    [
        (None, None, False, False),
        (None, "raw", False, False),
        (0.99, None, True, False),
        (0.99, "ema", True, False),
        (0.99, "both", True, True),
        (0.99, "raw", False, False),
    ],
)
def test_an_average_is_what_evaluations_measure(
    ema: float | None, weights: str | None, *, is_average: bool, is_both: bool
) -> None:
    """Where one is kept, unless the job says otherwise."""
    text = _rendered(make_job(train__ema=ema, evaluation__entry="pieces:digits", evaluation__weights=weights))
    start = text.index(" Evaluation(")
    call = text[start : text.index("run.keep(", start)]
    assert ("average=average" in call, "also_raw=True" in call) == (is_average, is_both)
