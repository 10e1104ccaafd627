"""What is read from source is what Python says: signatures of real callables, of many packages."""

from __future__ import annotations

import importlib
import inspect
from typing import TYPE_CHECKING, Any

import pytest

from elasticflow.python_source.modules import CannotTellError, Definition, Finder, installed_folders
from elasticflow.python_source.resolve import Resolver
from elasticflow.python_source.signatures import signature_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from elasticflow.python_source.signatures import Parameter, Signature

# Module, and how many of its names must at least be read: what is known shall not become "cannot tell" unnoticed.
MODULES = {
    "argparse": 10, "calendar": 15, "click": 50, "collections": 1, "concurrent.futures": 2, "csv": 6, "dataclasses": 10,
    "decimal": 0, "email.message": 2, "fractions": 1, "fsspec": 3, "functools": 5, "http.client": 10, "json": 6,
    "logging": 30, "numpy": 0, "operator": 0, "pathlib": 5, "pydantic": 0, "queue": 3, "random": 2, "shutil": 20,
    "statistics": 20, "string": 3, "subprocess": 8, "tempfile": 8, "textwrap": 6, "threading": 15, "tomli": 0,
    "torch.nn": 160, "torch.nn.functional": 85, "torch.optim": 14, "torch.optim.lr_scheduler": 14, "torch.utils.data": 18,
    "torchvision.models": 0, "urllib.parse": 18, "urllib.request": 30,
}  # fmt: skip
# torch and typing wrap these in `(*args, **kwargs)` when they are imported; their source says more.
WRAPPED = {"torch.nn:Container", "torch.nn:NLLLoss2d", "torch.optim.lr_scheduler:SupportsFloat"}
Shape = tuple[list[tuple[str, bool]], list[tuple[str, bool]], list[tuple[str, bool]], bool, bool]


def as_python_says(real: Callable[..., Any]) -> Shape:
    """Return names and defaults by kind, as `inspect` gives them."""
    parameters = inspect.signature(real).parameters.values()
    kinds: dict[Any, list[tuple[str, bool]]] = {}
    for each in parameters:
        kinds.setdefault(each.kind, []).append((each.name, each.default is not each.empty))
    return (
        kinds.get(inspect.Parameter.POSITIONAL_ONLY, []),
        kinds.get(inspect.Parameter.POSITIONAL_OR_KEYWORD, []),
        sorted(kinds.get(inspect.Parameter.KEYWORD_ONLY, [])),
        inspect.Parameter.VAR_POSITIONAL in kinds,
        inspect.Parameter.VAR_KEYWORD in kinds,
    )


def as_read(signature: Signature) -> Shape:
    """Return the same of what was read."""

    def pairs(parameters: list[Parameter]) -> list[tuple[str, bool]]:
        return [(each.name, each.is_optional) for each in parameters]

    places = pairs(signature.positional_only), pairs(signature.positional)
    any_kind = signature.takes_any_positional, signature.takes_any_named
    return (*places, sorted(pairs(signature.named)), *any_kind)


@pytest.mark.integration  # it imports torch
@pytest.mark.filterwarnings("ignore")  # deprecated names of other packages
@pytest.mark.parametrize("name", MODULES)
def test_signatures_read_are_those_python_has(name: str) -> None:
    """Each public name of a module is there, callable when Python says so, and takes what Python says; or is not told."""
    module = pytest.importorskip(name, exc_type=ImportError)
    resolver = Resolver(Finder((), installed_folders()))
    known, wrong = 0, []
    for attribute, real in vars(module).items():
        if attribute.startswith("_") or inspect.ismodule(real):
            continue
        try:
            found = resolver.entry(f"{name}:{attribute}")
            assert callable(real) == isinstance(found, Definition), attribute
            read = as_read(signature_of(found, resolver)) if isinstance(found, Definition) else None
        except CannotTellError:
            continue
        if read is None or f"{name}:{attribute}" in WRAPPED:
            continue
        try:
            truth = as_python_says(real)
        except ValueError:  # Python cannot tell either
            continue
        known += 1
        if read != truth:
            wrong.append((attribute, read, truth))
    assert wrong == []
    assert known >= MODULES[name]


def test_own_definitions_of_every_kind_are_read_as_python_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dataclasses, named tuples, partials, class methods and diamonds of a module full of them."""
    from pathlib import Path

    folder = Path(__file__).parent
    monkeypatch.syspath_prepend(str(folder))
    module = importlib.import_module("kinds_of_callables")
    resolver = Resolver(Finder((folder,), ()))
    for attribute in module.ENTRIES:
        real: Any = module
        for part in attribute.split("."):
            real = getattr(real, part)
        found = resolver.entry(f"kinds_of_callables:{attribute}")
        assert isinstance(found, Definition), attribute
        assert as_read(signature_of(found, resolver)) == as_python_says(real), attribute
