from __future__ import annotations

import sys
from pathlib import Path

import pytest

from elasticflow.compiler.entry_point.factories import CallForms, call_forms, is_method, parameters
from elasticflow.compiler.entry_point.render import render_for_child
from elasticflow.python_source.modules import Finder
from elasticflow.python_source.resolve import Resolver
from tests.compiler.jobs import make_job

SOURCE = """
from inner.deep import moved
raise RuntimeError("a factory's module must not be imported to look at it")

def by_parameters(params, lr): ...
def by_model(model, lr): ...
def keyword_only(*, model): ...

class Wrapped:
    def __init__(self, model): ...

    @staticmethod
    def build(model): ...

    @classmethod
    def made(cls, model): ...

    def configure(self, lr): ...

    def step(self, batch, optimizers): ...

    def configure_with(self, model): ...

class Heir(Wrapped): ...

constant = 3
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Return a project with factories in `src/`."""
    (tmp_path / "src" / "inner").mkdir(parents=True)
    (tmp_path / "src" / "inner" / "__init__.py").write_text("from .deep import moved as renamed\n")
    (tmp_path / "src" / "inner" / "deep.py").write_text("def moved(model): ...\n")
    (tmp_path / "src" / "factories.py").write_text(SOURCE)
    return tmp_path


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ("factories:by_parameters", "params"),
        ("factories:by_model", "model"),
        ("factories:keyword_only", None),
        ("factories:Wrapped", "model"),
        ("factories:Wrapped.build", "model"),
        ("factories:moved", "model"),
        ("inner:renamed", "model"),
        ("factories:constant", None),
        ("factories:absent", None),
        ("no_such_package:thing", None),
    ],
)
def test_first_parameter(project: Path, entry: str, expected: str | None) -> None:
    """The first parameter's name is read from the source, through re-exports, or is unknown."""
    resolver = Resolver(Finder.of_job(project, ["src"]))
    assert next(iter(parameters(entry, resolver)), None) == expected


def test_torchs_optimizers_take_parameters() -> None:
    """The source of torch is looked at without loading torch."""
    had_torch = "torch" in sys.modules
    resolver = Resolver(Finder.of_job(Path.cwd(), ["."]))
    assert parameters("torch.optim:AdamW", resolver)[0] == "params"
    assert ("torch" in sys.modules) == had_torch


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ("factories:Wrapped.configure", True),
        ("factories:Heir.configure", True),
        ("factories:Wrapped.build", False),
        ("factories:Wrapped.made", False),
        ("factories:by_model", False),
        ("factories:Wrapped.absent", False),
        ("no_such_package:Class.thing", False),
    ],
)
def test_methods_are_told_from_functions(project: Path, entry: str, expected: bool) -> None:
    """Own and inherited methods; not static and class methods, which are called on the class."""
    assert is_method(entry, Resolver(Finder.of_job(project, ["src"]))) is expected


def test_the_forms_of_a_job_are_read_off_its_factories(project: Path) -> None:
    """Optimizer and step apart."""
    made = make_job(job__path=["src"], optimizer__entry="factories:Wrapped.configure")
    assert call_forms(made, project) == CallForms(optimizer_is_method=True)
    made = make_job(
        job__path=["src"],
        model__loss=None,
        model__step="factories:Heir.configure",
        optimizer__entry="factories:by_model",
    )
    assert call_forms(made, project) == CallForms(optimizer_takes_model=True, step_is_method=True)
    made = make_job(
        job__path=["src"],
        model__loss=None,
        model__step="factories:Heir.step",
        optimizer__entry="factories:Heir.configure_with",
    )
    assert call_forms(made, project) == CallForms(
        optimizer_is_method=True, step_is_method=True, step_moves_optimizers=True
    )


def test_an_optimizer_that_is_not_the_first_argument_is_given_by_name(project: Path) -> None:
    """As transformers' get_scheduler(name, optimizer, ...) has it, also where its source is not found under that name."""
    (project / "src" / "rates.py").write_text("def get(name, optimizer, steps): ...\n")
    for entry in ("rates:get", "transformers:get_scheduler"):
        made = make_job(job__path=["src"], lr_scheduler__entry=entry, lr_scheduler__args={"name": "linear"})
        forms = call_forms(made, project)
        assert forms.schedule_by_name
        text = render_for_child(made, project, forms)
        assert f'    return {entry.partition(":")[2]}(optimizer=optimizer, name="linear")\n' in text
    made = make_job(job__path=["src"], lr_scheduler__entry="torch.optim.lr_scheduler:StepLR")
    assert not call_forms(made, project).schedule_by_name


def test_schedules_of_timm_are_known_by_where_they_come_from(project: Path) -> None:
    """By its name, also where timm is not installed; by an import of the job's own; a function's are its own business."""
    (project / "src" / "timm").mkdir()
    (project / "src" / "timm" / "__init__.py").touch()
    (project / "src" / "timm" / "cosine.py").write_text("class Cosine: ...\n")
    (project / "src" / "rates.py").write_text(
        "from timm.cosine import Cosine\ndef make(optimizer): return Cosine()\n"
    )
    expected = {"timm.cosine:Cosine": True, "timm.absent:X": True, "rates:Cosine": True, "rates:make": False}
    for entry, is_timms in {**expected, "factories:by_model": False, "no_such:x": False}.items():
        forms = call_forms(make_job(job__path=["src"], lr_scheduler__entry=entry), project)
        assert forms.schedule_is_timms is is_timms
