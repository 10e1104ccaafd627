"""Entry points are found and their arguments checked by reading source; nothing is ever imported."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from elasticflow.jobfile.entry_points import check
from elasticflow.jobfile.load import load_job
from elasticflow.python_source import modules

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

JOB = """
[job]
name = "x"
[model]
entry = "{entry}"
args = {args}
loss = "pkg.ok:loss"
[optimizer]
entry = "pkg.ok:optimizer"
[dataset]
entry = "{dataset}"
global_batch_size = 8
[train]
epochs = 1
"""
OK = """
raise RuntimeError("user code must not run")
def loss(outputs, targets): ...
def optimizer(parameters, lr=0.1): ...
def data(): ...
"""
Said = list[tuple[str, str]]


@pytest.fixture
def said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Said]:
    """Return a function that writes modules, names an entry point and returns code and message of each finding."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "__init__.py").touch()
    (tmp_path / "pkg" / "ok.py").write_text(OK)

    def check(
        source: str, entry: str = "pkg.m:it", args: str = "{}", dataset: str = "pkg.ok:data", **more: str
    ) -> Said:
        for name, text in {"m": source, **more}.items():
            (tmp_path / "pkg" / f"{name}.py").write_text(text)
        (tmp_path / "job.toml").write_text(JOB.format(entry=entry, args=args, dataset=dataset))
        found = load_job(tmp_path / "job.toml").diagnostics
        return [(each.code, each.message) for each in found]

    return check


FITTING = {
    "function": ("def it(a, b=1): ...", "{ a = 1 }"),
    "keyword only": ("def it(*, a): ...", "{ a = 1 }"),
    "kwargs": ("def it(**kwargs): ...", "{ anything = 1 }"),
    "lambda": ("it = lambda a=1: a", "{ a = 2 }"),
    "class": ("class it(object):\n    def __init__(self, a): ...", "{ a = 1 }"),
    "class by __new__": ("class it:\n    def __new__(cls, a): ...", "{ a = 1 }"),
    "class without constructor": ("class it(object): ...", "{}"),
    "inherited constructor": (
        "class Base:\n    def __init__(self, a): ...\nclass it(Base): ...",
        "{ a = 1 }",
    ),
    "dataclass": (
        "from dataclasses import dataclass\n@dataclass\nclass it:\n    a: int\n    b: str = 'x'",
        "{ a = 1 }",
    ),
    "alias": ("def other(a): ...\nit = other", "{ a = 1 }"),
    "alias of a class in a module": ("import pkg.n as n\nit = n.C", "{ a = 1 }"),
    "re-export": ("from pkg.n import C as it", "{ a = 1 }"),
    "relative import": ("from .n import C as it", "{ a = 1 }"),
    "star import": ("from pkg.n import *\nit = C", "{ a = 1 }"),
    "listed by __all__": ("__all__ = ['it']\ndef it(a): ...", "{ a = 1 }"),
    "listed by an __all__ that grows": ("__all__ = []\n__all__ += ['it']\ndef it(a): ...", "{ a = 1 }"),
    "static method": ("class A:\n    @staticmethod\n    def make(a): ...", "{ a = 1 }"),
    "class method": ("class A:\n    @classmethod\n    def make(cls, a): ...", "{ a = 1 }"),
    "inherited class method": (
        "class B:\n    @classmethod\n    def make(cls, a): ...\nclass A(B): ...",
        "{ a = 1 }",
    ),
    "partial": ("from functools import partial\ndef f(x, a, b): ...\nit = partial(f, 1, b=2)", "{ a = 1 }"),
    "partial of a class": ("import functools\nfrom pkg.n import C\nit = functools.partial(C)", "{ a = 1 }"),
    "partial of a partial": (
        "from functools import partial\nf = partial(lambda x, a, *, y: 0, y=1)\nit = partial(f, 0)",
        "{ a = 1, y = 2 }",
    ),
    "named tuple": (
        "from typing import NamedTuple\nclass it(NamedTuple):\n    a: int\n    b: int = 1",
        "{ a = 1 }",
    ),
    "diamond": (
        (
            "class A:\n    def __init__(self, old): ...\nclass B(A): ...\nclass C(A):\n    def __init__(self, a): ...\n"
            "class it(B, C): ..."
        ),
        "{ a = 1 }",
    ),
    "overload": (
        "from typing import overload\n@overload\ndef it(a: int): ...\n@overload\ndef it(a: str): ...\ndef it(a): ...",
        "{ a = 1 }",
    ),
    "dataclass with fields": (
        (
            "from dataclasses import InitVar, dataclass, field\nfrom typing import ClassVar\n@dataclass(frozen=True)\n"
            "class it:\n    a: int\n    n: ClassVar[int] = 1\n    b: list[int] = field(default_factory=list)\n"
            "    c: int = field(init=False)\n    d: InitVar[int] = 1\n    e: int = field(default=1, kw_only=True)"
        ),
        "{ a = 1, b = [1], d = 2, e = 3 }",
    ),
    "dataclass that inherits": (
        (
            "import dataclasses as dc\n@dc.dataclass\nclass Base:\n    x: int = 1\n@dc.dataclass(kw_only=True)\n"
            "class it(Base):\n    a: int"
        ),
        "{ a = 1 }",
    ),
    "dataclass with its own constructor": (
        "from dataclasses import dataclass\n@dataclass\nclass it:\n    x: int\n    def __init__(self, a): ...",
        "{ a = 1 }",
    ),
    "transparent decorator": ("import functools\n@functools.cache\ndef it(a): ...", "{ a = 1 }"),
}
N = "class C(object):\n    def __init__(self, a): ...\n"


@pytest.mark.parametrize("name", FITTING)
def test_fitting_arguments_pass_and_others_do_not(said: Callable[..., Said], name: str) -> None:
    """Each way to define something callable is read: right arguments pass, and one too many is refused."""
    source, args = FITTING[name]
    entry = "pkg.m:A.make" if name.endswith(("static method", "class method")) else "pkg.m:it"
    entry = "pkg.star:it" if name.startswith("listed") else entry
    assert said(source, entry, args, n=N, star="from .m import *") == []
    if name != "kwargs":
        more = args.replace("{", "{ surplus = 1, ").replace(", }", " }")
        assert said(source, entry, more, n=N) == [("EF204", f'{entry} takes no argument "surplus"')]


UNTOLD = {
    "global in a function": "def make():\n    global it\n    it = 1",
    "lazy loader": "__getattr__, __dir__, __all__ = attach()",
    "assigned constructor": "class it(object):\n    __init__ = other",
    "constructor under a condition": "class it(object):\n    if True:\n        def __init__(self): ...",
    "enum": "from enum import Enum\nclass it(Enum):\n    a = 1",
    "built-in base": "class it(dict): ...",
    "unknown decorator": "from pkg.n import C\n@C\ndef it(a): ...",
    "metaclass": "class it(metaclass=type(str)): ...",
    "made by a call": "it = make()",
    "condition": "if True:\n    def it(): ...\nelse:\n    it = None",
    "match": "import sys\nmatch sys.platform:\n    case 'linux':\n        def it(): ...\n    case _:\n        it = None",
    "except*": "try:\n    def it(): ...\nexcept* ValueError:\n    it = None",
    "walrus": "if (it := make()): ...",
    "not for type checkers": "from typing import TYPE_CHECKING\nif not TYPE_CHECKING:\n    def it(): ...",
    "loop under a condition": "if True:\n    for it in make(): ...",
    "try": "try:\n    from numpy import it\nexcept ImportError:\n    it = None",
    "module __getattr__": "def __getattr__(name): ...",
    "globals": "globals()['it'] = 1",
    "package that is not installed": "from no_such_package import it",
    "base that is not installed": "from no_such_package import Base\nclass it(Base): ...",
    "import that fails": "from pkg.gone import it",
    "circle": "from pkg.m import it",
    "circle of classes": "class it(A): ...\nclass A(it): ...",
    "circle through a member": "class it(it.Inner): ...",
    "circle of partials": "from functools import partial\nit = partial(it)",
    "dataclass of another library": "from attrs import define\n@define\nclass it:\n    a: int",
    "dataclass with computed options": "from dataclasses import dataclass\n@dataclass(**options)\nclass it:\n    b: int",
    "wrapped function": "import functools\ndef log(f): ...\n@log\ndef it(b): ...",
    "own decorator that is called cache": "def cache(f): ...\n@cache\ndef it(b): ...",
    "partial with arguments from elsewhere": "from functools import partial\nit = partial(print, *ARGS)",
    "star import under a condition": "try:\n    from pkg.n import *\nexcept ImportError: ...",
    "alias of a built-in": "it = dict",
    "attribute of an object": "class A: ...\nit = A().make",
    "extension module": "from _struct import pack as it",
}


@pytest.mark.parametrize("name", UNTOLD)
def test_what_reading_does_not_show_is_never_an_error(said: Callable[..., Said], name: str) -> None:
    """Where source does not tell, there is a note and no guess."""
    expected = "EF215" if name.endswith("not installed") else "EF209"
    assert [code for code, _ in said(UNTOLD[name], args="{ a = 1 }", n=N)] == [expected]


WRONG = {
    "no module": ("", "pkg.gone:it", "{}", ("EF201", "there is no module pkg.gone")),
    "no name": ("x = 1", "pkg.m:it", "{}", ("EF202", "pkg.m has no it")),
    "type checkers only": ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from a import it", "pkg.m:it", "{}", ("EF202", "pkg.m has no it")),
    "a coroutine": ("async def it(a): ...", "pkg.m:it", "{ a = 1 }", ("EF210", "pkg.m:it is `async def`: a call of it makes a coroutine, which nobody awaits")),
    "a keyword": ("def it(): ...", "pkg.lambda:it", "{}", ("EF201", "pkg.lambda:it cannot be imported: lambda is a keyword of Python")),
    "not in __all__": ("__all__ = ['C']\ndef it(): ...", "pkg.star:it", "{}", ("EF202", "pkg.star has no it")),
    "private beyond a star": ("def _it(): ...", "pkg.star:_it", "{}", ("EF202", "pkg.star has no _it")),
    "deleted by del is still bound": ("it = 'text'", "pkg.m:it", "{}", ("EF203", "pkg.m:it cannot be called: it is a text")),
    "a list": ("it = [1]", "pkg.m:it", "{}", ("EF203", "pkg.m:it cannot be called: it is a list")),
    "a module": ("import pkg.n as it", "pkg.m:it", "{}", ("EF203", "pkg.m:it cannot be called: it is a module")),
    "a namespace package": ("", "pkg.sub:it", "{}", ("EF201", "there is no module pkg.sub")),
    "missing": ("def it(a): ...", "pkg.m:it", "{}", ("EF204", 'pkg.m:it needs the argument "a"')),
    "positional only": ("def it(a, /): ...", "pkg.m:it", "{}", ("EF204", 'pkg.m:it needs the argument "a"')),
    "text for int": ("def it(a: int): ...", "pkg.m:it", '{ a = "1" }', ("EF205", 'pkg.m:it takes int as "a", not "1"')),
    "float for int": ("def it(a: int): ...", "pkg.m:it", "{ a = 1.5 }", ("EF205", 'pkg.m:it takes int as "a", not 1.5')),
    "bool for float": ("def it(a: float): ...", "pkg.m:it", "{ a = true }", ("EF205", 'pkg.m:it takes float as "a", not true')),
    "number for optional": ("def it(a: str | None = None): ...", "pkg.m:it", "{ a = 1 }", ("EF205", 'pkg.m:it takes str | None as "a", not 1')),
    "word not in literal": ("import typing as t\ndef it(a: t.Literal['x', 'y']): ...", "pkg.m:it", '{ a = "z" }', ("EF205", 'pkg.m:it takes "x" or "y" as "a", not "z"')),
    "no such member": ("class A:\n    @staticmethod\n    def make(): ...", "pkg.m:A.mak", "{}", ("EF202", "pkg.m:A has no mak")),
    "missing after partial": ("from functools import partial\ndef f(a, b): ...\nit = partial(f, 1)", "pkg.m:it", "{}", ("EF204", 'pkg.m:it needs the argument "b"')),
    "table for list": ("def it(a: list[int]): ...", "pkg.m:it", "{ a = {} }", ("EF205", 'pkg.m:it takes list[int] as "a", not an empty table')),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_for_certain_is_an_error(said: Callable[..., Said], name: str) -> None:
    """Missing modules, names, arguments and wrong literal types are named."""
    source, entry, args, expected = WRONG[name]
    assert said(source, entry, args, n=N, star="from .m import *") == [expected]


TYPES = """
import collections.abc as abc
import typing as t
from pathlib import Path
from typing import Annotated, Any, List, Literal, Optional, Sequence, Union
T = t.TypeVar("T")
class Mode(str): ...
"""
FITTING_TYPES = [
    ("int", "1"), ("float", "1"), ("float", "1.5"), ("bool", "true"), ("int", "true"), ("str", '"x"'), ("Path", '"x"'),
    ("tuple[int, int]", "[1, 2]"), ("tuple[int, ...]", "[1, 2, 3]"), ("tuple[()]", "[]"), ("list[int]", "[]"), ("list", '["x"]'),
    ("Sequence[str]", '"x"'), ("dict[str, int]", "{ b = 1 }"), ("abc.Mapping[str, T]", "{ b = 1 }"), ("set[int]", "[1]"),
    ("Optional[int]", "1"), ("int | str", '"x"'), ("Union[int, str]", '"x"'), ("t.Optional[t.Union[int, Mode]]", '"x"'),
    ("Custom", "1"), ("Mode", '"x"'), ("T", "1"), ("'int'", "1"), ("'Custom | None'", "1"), ("'not python'", "1"), ("Any", "1"),
    ("Literal['x']", '"x"'), ("Literal['x', 1] | None", "1"), ("Literal[Mode.x]", '"x"'), ("Annotated[int, 'm']", "1"),
    ("List[Union[int, str]]", '[1, "x"]'), ("t.Callable", '"relu"'), ("type[int]", '"x"'), ("lists.List[int]", '"x"'),
]  # fmt: skip
WRONG_TYPES = [
    ("'int'", '"x"'), ("Path", "1"), ("tuple[int, int]", "[1, 2, 3]"), ("list[int]", '["x"]'), ("List[str]", '"x"'),
    ("Union[int, str]", "1.5"), ("t.Optional[bool]", '"no"'), ("Optional[Literal['x']]", '"y"'), ("abc.Mapping", "1"),
    ("Annotated[int, 'm']", '"x"'), ("dict[str, int]", "[1]"), ("list[list[int]]", "[1]"), ("Sequence[int]", "1"),
]  # fmt: skip


@pytest.mark.parametrize(("annotation", "value"), FITTING_TYPES)
def test_types_that_may_fit_pass(said: Callable[..., Said], annotation: str, value: str) -> None:
    """Only a certain mismatch is refused; TOML has no tuples, and a whole number is a float too."""
    assert said(f"{TYPES}def it(a: {annotation}): ...", args=f"{{ a = {value} }}") == []


@pytest.mark.parametrize(("annotation", "value"), WRONG_TYPES)
def test_types_that_cannot_fit_are_refused(said: Callable[..., Said], annotation: str, value: str) -> None:
    """Annotations are read through aliases, quotes, unions and elements."""
    codes = [code for code, _ in said(f"{TYPES}def it(a: {annotation}): ...", args=f"{{ a = {value} }}")]
    assert codes == ["EF205"]


NUMBERS = """
from torch import Tensor
from typing import Union
import torch
import numpy as np
"""
QUOTED = [  # a parameter, a value, and what was meant; None: it may be meant as it is
    ("a=0.1", '"1e-3"', "without quotes: a = 1e-3"),
    ("a=-1", '"8"', "without quotes: a = 8"),
    ("*, a=0.1", '"0.5"', "without quotes: a = 0.5"),
    ("a=False", '"True"', "without quotes: a = true"),
    ("a: int", '"8"', "without quotes: a = 8"),
    ("a: float | Tensor = 1e-3", '"1e-3"', "without quotes: a = 1e-3"),
    ("a: Union[float, torch.Tensor]", '"1e-3"', "without quotes: a = 1e-3"),
    ("a: tuple[float, float]", '"0.9, 0.99"', "did you mean [0.9, 0.99]?"),
    ("a: list[float]", "0.5", "did you mean [0.5]?"),
    ("a: list[int]", '["1", "2"]', "did you mean [1, 2]?"),
    ("a: bool", '"true"', "without quotes: a = true"),
    ("a: str", "3", 'did you mean "3"?'),
    ("a: int", "5.0", "did you mean 5?"),
    ("a=0.1", '"auto"', None),
    ("a='8'", '"9"', None),
    ("a=None", '"8"', None),
    ("a=N", '"8"', None),
    ("a", '"8"', None),
    ("a=False", '"no"', None),
    ("a: float | str", '"8"', None),
    ("a: 'float | Custom'", '"8"', None),
    ("a: Size = 8", '"8"', None),
    ("a: np.ndarray | str", '"8"', None),
]  # fmt: skip


@pytest.mark.parametrize(("parameter", "value", "meant"), QUOTED)
def test_numbers_in_quotes_are_told_apart_from_texts(
    said: Callable[..., Said], tmp_path: Path, parameter: str, value: str, meant: str | None
) -> None:
    """By the annotation, or by a default where the text is a number; any other text may be meant."""
    found = said(f"{NUMBERS}def it({parameter}): ...", args=f"{{ a = {value} }}")
    assert [code for code, _ in found] == [] if meant is None else ["EF205"]
    if meant is not None:
        [help_] = [each.help for each in load_job(tmp_path / "job.toml").diagnostics]
        assert help_ is not None
        assert help_.split("\n")[0] == meant


MAKERS = """
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.optim import Optimizer, SGD
from torch.optim.lr_scheduler import LRScheduler, StepLR
class Net(nn.Module): ...
class Deep(Net): ...
class Data(Dataset[int]): ...
class Both(Data, nn.Module): ...
class Plain: ...
class Odd(make_base()): ...
class Mine(SGD): ...
def net() -> nn.Module: ...
def data() -> "Dataset": ...
def loader(): return DataLoader(Data())
def anything(): return build()
def either(x):
    if x: return Net()
    return Data()
"""
MADE = {  # what is named as the model, and what it is said to be
    "Net": None, "Deep": None, "Both": None, "Odd": None, "net": None, "anything": None, "either": None,
    "Data": "is a dataset", "Mine": "is an optimizer", "data": "returns a dataset", "loader": "returns a loader",
    "Plain": "is a class without a base", "StepLR": "is a schedule", "DataLoader": "is a loader",
}  # fmt: skip


@pytest.mark.parametrize("name", MADE)
def test_what_certainly_makes_no_model_is_refused(said: Callable[..., Said], name: str) -> None:
    """By bases that can be read, a return annotation, or the class a function calls; nothing is guessed."""
    found = [each for each in said(MAKERS, f"pkg.m:{name}") if each[0] == "EF108"]
    if MADE[name] is None:
        assert found == []
    else:
        assert len(found) == 1
        assert str(MADE[name]) in found[0][1]


def test_a_model_or_a_loader_is_no_dataset(said: Callable[..., Said]) -> None:
    """What makes batches is told that they are made already."""
    for name, words in {"Net": "is a model", "loader": "returns a loader", "data": None}.items():
        found = [each for each in said(MAKERS, "pkg.ok:data", dataset=f"pkg.m:{name}") if each[0] == "EF108"]
        assert [words in message for _, message in found] == [True] * bool(words) if words else found == []


def test_a_name_that_hides_a_built_in_type_is_not_taken_for_it(said: Callable[..., Said]) -> None:
    """`int` of the module's own is another type."""
    assert said("class int: ...\ndef it(a: int): ...", args='{ a = "x" }') == []


def test_an_argument_given_by_place_cannot_be_given_again(said: Callable[..., Said], tmp_path: Path) -> None:
    """The optimizer gets its parameters from elasticflow."""
    said("def it(): ...")
    text = (tmp_path / "job.toml").read_text()
    (tmp_path / "job.toml").write_text(
        text.replace('optimizer"\n', 'optimizer"\nargs = { parameters = [] }\n')
    )
    found = load_job(tmp_path / "job.toml").diagnostics
    assert [each.message for each in found] == ['pkg.ok:optimizer gets "parameters" from elasticflow already']


def test_an_argument_taken_by_place_only_is_said_to_be_that(
    said: Callable[..., Said], tmp_path: Path
) -> None:
    """It is missing, and giving it by name is no cure: both findings say so."""
    assert len(said("def it(width, /, depth=1): ...", args="{ width = 3 }")) == 2
    helps = {str(each.help).partition(":")[0] for each in load_job(tmp_path / "job.toml").diagnostics}
    assert helps == {"it is taken by place only, and a job file gives arguments by name"}


@pytest.mark.parametrize(("has_torch", "severity"), [(True, "error"), (False, "warning")])
def test_a_module_that_is_no_python_is_an_error_where_it_would_train(
    said: Callable[..., Said],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    has_torch: bool,
    severity: str,
) -> None:
    """Without torch, in a hook, training may use a newer Python."""
    monkeypatch.setattr(modules.Finder, "has_torch", has_torch)
    assert said("def it()\n    pass\n")[0][0] == "EF208"
    assert load_job(tmp_path / "job.toml").diagnostics[0].severity == severity


def test_a_module_is_read_in_the_encoding_that_it_declares(said: Callable[..., Said], tmp_path: Path) -> None:
    """As Python reads it; of one in another encoding nothing is said."""
    text = "# B\xfcro\ndef it(a): ..."
    said("")
    for head, expected in (("# coding: latin-1\n", "EF204"), ("# coding: none\n", "EF209"), ("", "EF209")):
        (tmp_path / "pkg" / "m.py").write_bytes((head + text).encode("latin-1"))
        assert expected == load_job(tmp_path / "job.toml").diagnostics[0].code


def test_an_error_without_a_line_is_told_without_one(said: Callable[..., Said]) -> None:
    """A zero byte has no line in Python's words."""
    [(code, message)] = said("def it(): ...\n\0")
    assert (code, "None" in message) == ("EF208", False)


def test_datasets_with_length_pass_whatever_they_inherit_from(said: Callable[..., Said]) -> None:
    """__len__ and __getitem__ may come from a base, or from one that cannot be read."""
    base = "class Base:\n    def __len__(self): ...\n"
    source = f"{base}class D(Base):\n    def __getitem__(self, i): ...\ndef it(): ..."
    assert said(source, dataset="pkg.m:D") == []
    assert said("from no_such import B\nclass D(B): ...\ndef it(): ...", dataset="pkg.m:D")[0][0] == "EF215"
    for length in (
        "try:\n        def __len__(self): ...\n    finally: ...",
        "__len__: object = lambda self: 1",
        "__len__, other = make()",
    ):
        source = f"class D:\n    def __getitem__(self, i): ...\n    {length}\ndef it(): ..."
        assert said(source, dataset="pkg.m:D") == []
    source = "class D:\n    def __getitem__(self, i): ...\ndef it(): ..."
    assert said(source, dataset="pkg.m:D") == [("EF206", "pkg.m:D has no __len__")]


OWN_DATASET = (
    "class Dataset:\n    classes = 3\n    def __len__(self): ...\n    def __getitem__(self, n): ...\n"
)


@pytest.mark.parametrize(
    "source",
    [
        "from pkg.own import Dataset\nclass D(Dataset): ...",
        "from torch_geometric.data import Dataset\nclass D(Dataset):\n    def len(self): ...\n    def get(self, n): ...",
        "import torch_geometric.data as g\nclass Data(g.Dataset): ...\ndef D(): return Data()",
        "from pkg.own import listed\n@listed\ndef D():\n    yield 1",
    ],
)
def test_a_base_is_torchs_dataset_only_by_its_module(said: Callable[..., Said], source: str) -> None:
    """Classes of other libraries, and of the job, may be called Dataset, too; a decorator may make a list of a generator."""
    source += "\nfrom torch import nn\nclass it(nn.Module):\n    def __init__(self, a): ..."
    found = said(source, args='{ a = "${dataset.classes}" }', dataset="pkg.m:D", own=OWN_DATASET)
    assert [each for each in found if each[0] not in {"EF209", "EF215"}] == []


@pytest.mark.parametrize("how", ["from pkg.own import *", "from pkg.own import IterableDataset"])
def test_torchs_stream_is_known_by_another_module_that_passes_it_on(
    said: Callable[..., Said], how: str
) -> None:
    """Its name does not show where it comes from; reading does."""
    source = f"{how}\nclass D(IterableDataset):\n    def __iter__(self): ..."
    own = "from torch.utils.data import IterableDataset"
    found = said(f"{source}\ndef it(): ...", dataset="pkg.m:D", own=own)
    assert ("EF206", "pkg.m:D is an IterableDataset: it has no length") in found


def test_a_star_import_binds_over_what_stands_above_it(said: Callable[..., Said]) -> None:
    """As in Python, the statement that comes last wins, be it a definition or a star import."""
    more = {"old": "def it(old): ...", "new": "def it(a): ..."}
    for source in ("def it(old): ...\nfrom .new import *", "from .old import *\nfrom .new import *"):
        assert said(source, args="{ a = 1 }", **more) == []
        assert said(source, args="{ old = 1 }", **more)[0][0] == "EF204"
    assert said("from .new import *\ndef it(old): ...", args="{ old = 1 }", **more) == []


def test_large_modules_are_cut_and_still_right(said: Callable[..., Said]) -> None:
    """Beyond 30,000 characters only the definition is parsed: decorators, closing brackets and line numbers stay."""
    filler = "".join(f"def filler_{n}(a,\n    b=1,\n):\n    '''Text.'''\n" for n in range(1000))
    source = filler + "@staticmethod\ndef it(\n    a: int,\n) -> None:\n    x = 1\n" + filler
    assert said(source, args="{ a = 1 }") == []
    assert said(source, args='{ a = "x" }') == [("EF205", 'pkg.m:it takes int as "a", not "x"')]
    assert said(source + "it = 5\n") == [("EF203", "pkg.m:it cannot be called: it is a number")]


@pytest.mark.parametrize(
    "again",
    [
        "if True:\n    def it(b): ...",
        "if True:\n    it = None",
        "try:\n    from pkg.n import it\nexcept ImportError: ...",
        "try:\n    from pkg.n import (\n        other,\n        it,\n    )\nexcept ImportError: ...",
    ],
)
def test_a_large_module_that_may_bind_a_name_again_is_read_as_a_small_one(
    said: Callable[..., Said], again: str
) -> None:
    """A second definition under a condition hides which one a run gets, however long the file is."""
    source = f"def it(a): ...\n{again}\n"
    for filler in ("", "# filler\n" * 4000):
        assert [code for code, _ in said(source + filler, args="{ a = 1 }", n="def it(c): ...")] == ["EF209"]


def test_keywords_are_no_suggestions(said: Callable[..., Said], tmp_path: Path) -> None:
    """The words before a colon that begin a block are not among the names that a module has."""
    said("try:\n    x = 1\nfinally:\n    y = 1\ndef real(): ...")
    (found,) = load_job(tmp_path / "job.toml").diagnostics
    assert found.help == "there are: real"


def test_the_jobs_own_path_comes_before_installed_packages(said: Callable[..., Said], tmp_path: Path) -> None:
    """A module of the job hides an installed one of the same name, as it does in training."""
    (tmp_path / "click.py").write_text("def it(mine): ...")
    assert said("", "click:it") == [("EF204", 'click:it needs the argument "mine"')]


def test_what_is_installed_in_the_project_is_not_the_jobs_own(
    said: Callable[..., Said], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A package in a `.venv` of the project is told as the installed one, as a package elsewhere is."""
    site = tmp_path / ".venv" / "lib" / "python3" / "site-packages"
    (site / "parts").mkdir(parents=True)
    (site / "parts" / "__init__.py").touch()
    monkeypatch.setattr(check, "installed_folders", lambda: (site,))
    assert said("", "parts.gone:it") == [("EF201", "there is no module parts.gone")]
    (found,) = load_job(tmp_path / "job.toml").diagnostics
    assert f"parts is the installed one: {site / 'parts' / '__init__.py'}" == found.help


def test_a_package_that_is_not_installed_here_cannot_be_judged(
    said: Callable[..., Said], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without torch, as in a hook's environment, its names are notes."""
    monkeypatch.setattr(check, "installed_folders", tuple)
    message = "torch.nn:Linear is not checked: torch is not installed here"
    assert said("", "torch.nn:Linear") == [("EF215", message)]


def test_a_near_module_of_the_job_is_what_was_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error where training can run, or where the near module has the name; in a hook's environment else a warning."""
    (tmp_path / "dataset.py").write_text("def digits(): ...")
    job = tmp_path / "job.toml"

    def found(entry: str) -> tuple[str, str, str | None]:
        job.write_text(f'[dataset]\nentry = "{entry}"\nglobal_batch_size = 8\n')
        (one,) = [each for each in load_job(job).diagnostics if each.code == "EF201"]
        return one.severity, one.message, one.help

    here = modules.installed_folders()
    told = "there is no module datasset on the job's path, and it is not installed here"
    help_ = f'did you mean "dataset"? (looked in {modules.seen_from_here(tmp_path)})'
    for places in (here, ()):
        monkeypatch.setattr(check, "installed_folders", lambda places=places: places)
        assert ("error", told, help_) == found("datasset:digits")
    assert "warning" == found("datasets:load_dataset")[0]
    (tmp_path / "site" / "torch").mkdir(parents=True)
    monkeypatch.setattr(check, "installed_folders", lambda: (tmp_path / "site",))
    assert "error" == found("datasets:load_dataset")[0]


def test_what_import_hooks_find_is_installed(
    said: Callable[..., Said], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An editable installation lies in none of Python's folders; it is not called missing."""

    class Hook:
        @staticmethod
        def find_spec(name: str, *_: object) -> object:
            return name == "edited" or None

    assert [code for code, _ in said("", "edited:it")] == ["EF215"]
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Hook])
    assert [code for code, _ in said("", "edited:it")] == ["EF209"]


@pytest.mark.parametrize(
    ("entry", "args", "expected"),
    [
        ("torch.nn:Linear", "{ in_features = 3, out_features = 4 }", []),
        (
            "torch.nn:Linear",
            "{ in_features = 3 }",
            [("EF204", 'torch.nn:Linear needs the argument "out_features"')],
        ),
        ("torch.nn:Linaer", "{}", [("EF202", "torch.nn has no Linaer")]),
        ("torch.nn:Embedding", "{ num_embeddings = 4, embedding_dim = 2 }", []),
    ],
)
def test_torchs_own_source_is_read_and_torch_not_loaded(
    said: Callable[..., Said], entry: str, args: str, expected: Said
) -> None:
    """Names of torch are followed through its re-exports without importing it."""
    pytest.importorskip("torch", exc_type=ImportError) if "torch" in sys.modules else None
    if not any((place / "torch" / "nn").is_dir() for place in modules.installed_folders()):
        pytest.skip("torch is not installed")
    assert said("", entry, args) == expected


def test_a_data_folder_does_not_hide_an_installed_package(
    said: Callable[..., Said], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder without __init__.py gives way to a real package, here or elsewhere; near names are typing errors."""
    (tmp_path / "click").mkdir()
    assert said("", "click:Argument", "{ param_decls = [] }") == []
    monkeypatch.setattr(check, "installed_folders", tuple)
    (tmp_path / "datasets").mkdir()
    (tmp_path / "datasets" / "loading.py").touch()
    assert [code for code, _ in said("", "datasets:load_dataset")] == ["EF209"]
    assert [code for code, _ in said("", "datasets.arrow:Reader")] == ["EF209"]
    assert said("", "datasets.loadin:it") == [("EF201", "there is no module datasets.loadin")]


def test_a_class_is_no_loss(said: Callable[..., Said], tmp_path: Path) -> None:
    """`nn.CrossEntropyLoss` as a loss would make an object per batch; the function is meant."""
    said("class Loss:\n    def __init__(self, weight=None, reduction=None): ...\ndef it(): ...")
    text = (tmp_path / "job.toml").read_text()
    (tmp_path / "job.toml").write_text(text.replace("pkg.ok:loss", "pkg.m:Loss"))
    found = load_job(tmp_path / "job.toml").diagnostics
    message = "pkg.m:Loss is a class, and is called with outputs, targets: that makes an object of it"
    assert [each.message for each in found] == [message]


CONFIG = """
from dataclasses import dataclass
from typing import Callable
@dataclass
class Config:
    layers: int
    width: int = 8
    act: Callable = print
def gelu(x, approximate: str = "none"): ...
def it(config: Config, other=None, extra: int = 0, parts: list[int] = []): ...
NUMBER = 3
"""
OBJECTS = {
    "a dataclass": ('{ config = { entry = "pkg.m:Config", args = { layers = 2 } } }', []),
    "without arguments": ('{ config = { entry = "pkg.ok:data" } }', []),
    "one inside another": (
        '{ config = { entry = "pkg.m:Config", args = { layers = 2, act = { entry = "pkg.m:gelu", partial = true } } } }',
        [],
    ),
    "where a number is taken": ('{ config = 1, extra = { entry = "pkg.ok:data" } }', []),
    "in a list": ('{ config = 1, parts = [1, { entry = "pkg.ok:data" }] }', []),
    "a dict that holds entry": ('{ config = 1, other = { entry = "main", size = 1 } }', []),
    "arguments named as those of an object": ('{ config = { entry = "pkg.m:it", args = { config = 1, other = { entry = "a" } } } }', []),
    "an argument it does not take": (
        '{ config = { entry = "pkg.m:Config", args = { layers = 2, widht = 3 } } }',
        [("EF204", 'pkg.m:Config takes no argument "widht"')],
    ),
    "an argument of another type": (
        '{ config = { entry = "pkg.m:Config", args = { layers = "2" } } }',
        [("EF205", 'pkg.m:Config takes int as "layers", not "2"')],
    ),
    "a missing argument": (
        '{ config = { entry = "pkg.m:Config" } }',
        [("EF204", 'pkg.m:Config needs the argument "layers"')],
    ),
    "no such attribute": ('{ config = { entry = "pkg.m:Confg" } }', [("EF202", "pkg.m has no Confg")]),
    "no such module": ('{ config = [{ entry = "pkg.n:C" }] }', [("EF201", "there is no module pkg.n")]),
    "a number": ('{ config = { entry = "pkg.m:NUMBER" } }', [("EF203", "pkg.m:NUMBER cannot be called: it is a number")]),
    "a partial of an unknown argument": (
        '{ config = { entry = "pkg.m:gelu", partial = true, args = { aproximate = "tanh" } } }',
        [("EF204", 'pkg.m:gelu takes no argument "aproximate"')],
    ),
    "no name of an argument": (
        '{ config = { entry = "pkg.m:Config", args = { layers = 2, "a-b" = 3 } } }',
        [("EF107", '"a-b" cannot be the name of an argument')],
    ),
    "arguments that are no table": (
        '{ config = { entry = "pkg.m:gelu", partial = 1, args = [1] } }',
        [
            ("EF213", "model.args.config.partial must be true or false, not 1"),
            ("EF213", "model.args.config.args must be a table, not a list"),
        ],
    ),
    "a plain table for a dataclass": (
        "{ config = { layers = 2 } }",
        [("EF205", 'pkg.m:it takes Config as "config", not a plain table')],
    ),
    "arguments beside the entry": (
        '{ config = { entry = "pkg.m:Config", layers = 2 } }',
        [
            ("EF213", "model.args.config is a plain dict: beside `entry` it holds layers"),
        ],
    ),
    "a dot for a colon": (
        '{ config = { entry = "pkg.m.Config", args = { layers = 2 } } }',
        [("EF213", 'model.args.config is a plain dict: its `entry` is "pkg.m.Config", which names no attribute of a module')],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OBJECTS)
def test_objects_among_arguments_are_checked_as_entry_points_are(
    said: Callable[..., Said], name: str
) -> None:
    """Module, attribute and arguments of each, wherever it stands; tables that only look like objects are told."""
    args, expected = OBJECTS[name]
    assert expected == said(CONFIG, args=args)


def test_findings_of_an_object_stand_at_its_own_keys(tmp_path: Path, said: Callable[..., Said]) -> None:
    """Line and column of the nested key, and where to add what is missing."""
    args = '{ config = [\n  { entry = "pkg.m:Config", args = { layers = 1, widht = 3 } },\n  { entry = "pkg.m:Config" },\n] }'
    said(CONFIG, args=args)
    first, second = load_job(tmp_path / "job.toml").diagnostics
    assert (first.line, first.column) == (7, 50)
    assert second.line == 8
    assert "add to model.args.config[1].args: layers = ..." in (second.help or "")


METHODS = """
class Base:
    def configure(self, lr: float, betas=(0.9, 0.95)): ...
class it(Base):
    def training_step(self, batch): ...
    def lightning_step(self, batch, batch_idx): ...
    def moving_step(self, batch, optimizers): ...
    @property
    def rate(self): ...
from torch import nn
class Other(nn.Module):
    def configure(self, lr): ...
def build(): return it()
"""
METHOD_JOB = """
[job]
name = "x"
[model]
entry = "pkg.m:{model}"
step = "pkg.m:{step}"
[optimizer]
entry = "pkg.m:{optimizer}"
args = {args}
[dataset]
entry = "pkg.ok:data"
global_batch_size = 8
[train]
epochs = 1
"""
OF_THE_MODEL = {
    "model": "it",
    "step": "it.training_step",
    "optimizer": "it.configure",
    "args": "{ lr = 0.1 }",
}
METHOD_CASES: dict[str, tuple[dict[str, str], list[str]]] = {
    "its own and inherited": ({}, []),
    "named by the base": ({"optimizer": "Base.configure"}, []),
    "of what a function makes": ({"model": "build"}, []),
    "an argument too many": ({"args": "{ lr = 0.1, weigth = 1 }"}, ["EF204"]),
    "of another type": ({"args": '{ lr = "much" }'}, ["EF205"]),
    "an argument too few": ({"args": "{}"}, ["EF204"]),
    "a step that takes more": ({"step": "it.lightning_step"}, ["EF204"]),
    "a step that moves the optimizers": ({"step": "it.moving_step"}, []),
    "another class": ({"optimizer": "Other.configure"}, ["EF214"]),
    "another class's step": ({"model": "Other", "optimizer": "Other.configure"}, ["EF214"]),
    "none of that name": ({"optimizer": "it.configura"}, ["EF202"]),
    "a property": ({"step": "it.rate"}, ["EF209"]),
}


@pytest.mark.parametrize("name", METHOD_CASES)
def test_methods_of_the_models_class_are_called_on_the_model(
    tmp_path: Path, said: Callable[..., Said], name: str
) -> None:
    """Their arguments are held against the signature without self; another class's are refused."""
    changes, expected = METHOD_CASES[name]
    said(METHODS)
    (tmp_path / "job.toml").write_text(METHOD_JOB.format(**OF_THE_MODEL | changes))
    assert expected == [each.code for each in load_job(tmp_path / "job.toml").diagnostics]


def test_a_method_is_held_against_the_model_of_each_case(said: Callable[..., Said], tmp_path: Path) -> None:
    """A method that suits the first case's model is refused in the case whose model has another class."""
    said(METHODS)
    matrix = '[matrix.axes]\nmodel.entry = ["pkg.m:it", "pkg.m:Other"]\n'
    text = METHOD_JOB.format(**OF_THE_MODEL | {"optimizer": "it.configure"})
    (tmp_path / "job.toml").write_text(text + matrix)
    found = load_job(tmp_path / "job.toml").diagnostics
    assert ["EF214", "EF214"] == [each.code for each in found]
    assert all(each.message.endswith("(case entry_Other)") for each in found)


METHOD_HELP: dict[str, tuple[dict[str, str], str]] = {
    "a letter too few, of the base": ({"optimizer": "it.configur"}, 'did you mean "configure"?'),
    "a letter too few, of its own": ({"step": "it.training_ste"}, 'did you mean "training_step"?'),
    "nothing near": (
        {"optimizer": "it.zzz"},
        "there are: configure, lightning_step, moving_step, training_step",
    ),
    "where no method may stand": ({"model": "it.configur"}, ""),
    "a step's third argument": (
        {"step": "step"},
        'call it "optimizers" to be given what optimizer.entry returns',
    ),
    "a step's fourth argument": (
        {"step": "more"},
        "model.step is called with model, batch: give the argument a default",
    ),
}
STEPS = "def step(model, batch, opts): ...\ndef more(model, batch, optimizers, rate): ...\n"


@pytest.mark.parametrize("name", METHOD_HELP)
def test_what_is_called_on_the_model_is_told_by_its_names(
    tmp_path: Path, said: Callable[..., Said], name: str
) -> None:
    """Plain methods are named where they are allowed, and the optimizers where a step seems to want them."""
    changes, expected = METHOD_HELP[name]
    said(METHODS + STEPS)
    (tmp_path / "job.toml").write_text(METHOD_JOB.format(**OF_THE_MODEL | changes))
    helps = [each.help or "" for each in load_job(tmp_path / "job.toml").diagnostics]
    assert [expected] == [text.partition("\ndefined at")[0] for text in helps]


GROUPED = """
class Adam:
    def __init__(self, params, lr: float = 0.1, weight_decay: float = 0.0): ...
class Reads:
    def __init__(self, params): ...
class Norm: ...
def of_parameters(params, lr): ...
def of_model(model, lr=0.1): ...
from torch import nn
class Net(nn.Module):
    def configure(self, lr=0.1): ...
number = 3
"""
GROUP_CASES: dict[str, tuple[str, str, list[str]]] = {
    "as it should be": ("Adam", 'match = "*.bias"\nargs = { lr = 0.2, weight_decay = 0 }', []),
    "several of each": (
        "Adam",
        'match = ["a", "b"]\nndim = [0, 1]\nmodule = ["pkg.m:Norm", "pkg.m:Net"]',
        [],
    ),
    "an option misspelt": ("Adam", "ndim = 1\nargs = { weigth_decay = 0.0 }", ["EF204"]),
    "an option of another type": ("Adam", 'ndim = 1\nargs = { lr = "1e-3" }', ["EF205"]),
    "no Python name": ("Adam", 'ndim = 1\nargs = { "weight-decay" = 0.0 }', ["EF107"]),
    "an optimizer that reads its groups": ("Reads", "ndim = 1\nargs = { use_muon = true }", []),
    "a function that may": ("of_parameters", "ndim = 1\nargs = { weight_decay = 0.0 }", ["EF204"]),
    "a function with the model": ("of_model", "ndim = 1\nargs = { lrr = 0.0 }", ["EF216"]),
    "a method of the model": ("Net.configure", "ndim = 1", ["EF216"]),
    "no class of that name": ("Adam", 'module = "pkg.m:Nrom"', ["EF202"]),
    "a function for a class": ("Adam", 'module = ["pkg.m:Norm", "pkg.m:of_model"]', ["EF203"]),
    "a number for a class": ("Adam", 'module = "pkg.m:number"', ["EF203"]),
    "no optimizer of that name": ("Adma", "ndim = 1\nargs = { lr = 0.1 }", ["EF202"]),
    "an object in its arguments": (
        "Adam",
        'ndim = 1\nargs = { lr = { entry = "pkg.m:nothing" } }',
        ["EF202"],
    ),
}


@pytest.mark.parametrize("name", GROUP_CASES)
def test_groups_of_parameters_are_checked(tmp_path: Path, said: Callable[..., Said], name: str) -> None:
    """Options against the optimizer's own arguments, classes by their names, at their places; each mistake once."""
    entry, group, expected = GROUP_CASES[name]
    said(GROUPED)
    text = JOB.format(entry="pkg.m:Net", args="{}", dataset="pkg.ok:data")
    groups = f"[[optimizer.groups]]\n{group}\n[[optimizer.groups]]\nmatch = '*'\nargs = {{ lr = 0.3 }}\n"
    text = text.replace('"pkg.ok:optimizer"', f'"pkg.m:{entry}"').replace("[dataset]", f"{groups}[dataset]")
    (tmp_path / "job.toml").write_text(text)
    found = load_job(tmp_path / "job.toml").diagnostics
    # A function's arguments are its own business, but for `lr` of optimizer.args, which is missing here.
    assert expected == [each.code for each in found]


DATA = """
from dataclasses import dataclass
from torch.utils.data import Dataset
from elsewhere import Hidden
class Text(Dataset):
    kind = "text"
    size: int
    def __init__(self):
        self.vocab_size = self.length = 3
    @property
    def width(self): ...
class More(Text):
    def grow(self):
        self.tokenizer = object()
@dataclass
class Made:
    vocab_size: int = 3
class Open(Text):
    def __getattr__(self, name): ...
class Named(Text):
    def __init__(self): setattr(self, "x", 1)
@dataclass(frozen=True)
class Frozen(Text):
    def __post_init__(self): object.__setattr__(self, "x", 1)
class OfOthers(Hidden): ...
def text(): return Text()
def some(): return Text() if More else More()
"""
VALUE_CASES = {
    ("Text", "vocab_size"): [], ("Text", "kind"): [], ("Text", "size"): [], ("Text", "width"): [], ("Text", "length"): [],
    ("Text", "vocab_sise"): ["EF217"], ("More", "tokenizer.any.thing"): [], ("More", "vocab_size"): [], ("More", "tok"): ["EF217"],
    ("Made", "vocab_size"): [], ("Open", "anything"): [], ("Named", "x"): [], ("Frozen", "x"): [], ("OfOthers", "x"): [],
    ("text", "vocab_size"): [], ("text", "vocab"): ["EF217"], ("some", "vocab"): [], ("Text", "__len__"): ["EF217"],
}  # fmt: skip


@pytest.mark.parametrize(("dataset", "name"), VALUE_CASES)
def test_values_of_the_data_are_looked_up_in_its_class(
    said: Callable[..., Said], dataset: str, name: str
) -> None:
    """What certainly has no such attribute is refused; types are not held against what the data will say."""
    model = (
        "from torch import nn\nclass it(nn.Module):\n    def __init__(self, width: int = 1, config=None): ..."
    )
    found = said(model, "pkg.m:it", f'{{ width = "${{dataset.{name}}}" }}', f"pkg.data:{dataset}", data=DATA)
    codes = [code for code, _ in found if code not in {"EF206", "EF215", "EF209"}]
    assert codes == VALUE_CASES[dataset, name]


OF_OTHER_TOOLS = {
    '{ _target_ = "pkg.m.Config", n_layer = 3 }': True,
    '{ class_path = "pkg.m.Config", init_args = { n_layer = 3 } }': True,
    '[{ of = { _target_ = "pkg.m.Config" } }]': True,
    '{ entry = "pkg.m:Config", args = { n_layer = 3 } }': False,
    "{ class_path = 3 }": False,
}


@pytest.mark.parametrize("config", OF_OTHER_TOOLS)
def test_objects_of_hydra_and_jsonargparse_are_told_as_dicts(
    tmp_path: Path, said: Callable[..., Said], config: str
) -> None:
    """What they are to the factory, and how the object is written here."""
    model = "from torch import nn\nclass it(nn.Module):\n    def __init__(self, config=None): ...\nclass Config:\n    def __init__(self, n_layer=1): ..."
    said(model, "pkg.m:it", f"{{ config = {config} }}")
    found = [each for each in load_job(tmp_path / "job.toml").diagnostics if each.severity != "note"]
    assert [each.code for each in found] == ["EF213"] * OF_OTHER_TOOLS[config]
    assert all('{ entry = "module:name", args = { ... } }' in (each.help or "") for each in found)
