"""What arguments take, as far as source tells."""

from __future__ import annotations

import ast
import contextlib
import math
import re
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from elasticflow.python_source.bindings import origin_in
from elasticflow.python_source.classes import classes_of
from elasticflow.python_source.definitions import Definition
from elasticflow.python_source.modules import CannotTellError, Module
from elasticflow.python_source.signatures import from_arguments
from elasticflow.python_source.syntax import decorators_of, dotted_names, unquoted

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from elasticflow.python_source.signatures import Parameter

ValueType = Literal["int", "float", "bool", "str", "list", "table", "any", "object"]
_WORDS: dict[ValueType, str] = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "a text",
    "list": "a list",
    "table": "a table",
    "any": "a value",
    "object": "an object, which a job file cannot give",
}
_TYPES: dict[str, ValueType] = {
    "builtins.int": "int",
    "builtins.float": "float",
    "builtins.bool": "bool",
    "builtins.str": "str",
    "pathlib.Path": "str",
    "os.PathLike": "str",
    "typing.Any": "any",
}
_LISTS = (
    "builtins.list", "builtins.tuple", "builtins.set", "typing.List", "typing.Tuple", "typing.Sequence",
    "typing.Iterable", "collections.abc.Sequence", "collections.abc.Iterable",
)  # fmt: skip
_TABLES = ("builtins.dict", "typing.Dict", "typing.Mapping", "collections.abc.Mapping")
# Names that say what an argument without annotation and default takes.
_WHOLE = re.compile(
    r"(n|num|nb)_\w+|\w*(size|dim|dims|channels|classes|layers|heads|features|length|width|depth|blocks|hidden)"
    r"|n(token|inp|hid|layers|head|gpu|classes)|d_model|d_ff|vocab|dim\w*|depths?|heads?|channels?"
)
_REAL = re.compile(r"(\w*_)?(rate|dropout|lr|alpha|beta|gamma|momentum|eps|temperature|prob|scale|decay)|p")
_TEXT = re.compile(r"(\w*_)?(root|path|dir|folder|file|filename|name|split|mode|url)")
_CONFIGS = {"config", "cfg", "conf", "args", "hparams", "params", "opt", "options"}


# Stands for the module whose source is read: only what it defines itself is looked for.
_FILE = Module("", None, (), is_own=True)


class Takes(NamedTuple):
    """What an argument takes.

    Attributes:
        types: Any of them, the first that fits.
        choices: It is one of these.
        item: What the items of a list are.
        config: A dataclass of the same file, of which it is an object.
        is_guess: Only the argument's name says it: what is given in quotes or brackets is taken as it stands.
    """

    types: tuple[ValueType, ...]
    choices: tuple[Any, ...] = ()
    item: Takes | None = None
    config: str | None = None
    is_guess: bool = False

    @property
    def words(self) -> str:
        """What it takes, in words."""
        if self.config is not None:
            return f"an object of {self.config}"
        if self.choices:
            return "one of " + ", ".join(map(str, self.choices))
        words = " or ".join(_WORDS[each] for each in self.types)
        if self.item is not None and self.types == ("list",):
            words += f", each {self.item.words}"
        return words

    @property
    def is_object(self) -> bool:
        """Whether a job file cannot give it."""
        return self.types == ("object",) and self.config is None


ANY = Takes(("any",))
OBJECT = Takes(("object",))


class Argument(NamedTuple):
    """One argument of a class or function, or one field of a dataclass.

    Attributes:
        name: Its name.
        takes: What it takes.
        is_required: It has no default.
        default: The default, if it is a constant that a job file can give.
    """

    name: str
    takes: Takes
    is_required: bool
    default: Any = None


class Config(NamedTuple):
    """A dataclass that arguments of the same file may be objects of."""

    name: str
    fields: tuple[Argument, ...]


def arguments_of(
    function: ast.FunctionDef, text: str, configs: Mapping[str, Config], *, skip: int
) -> tuple[Argument, ...]:
    """Return the arguments that can be given by name, less the first *skip*.

    Args:
        function: A function or constructor.
        text: The source it stands in.
        configs: The dataclasses of that source.
        skip: 1 for a method.
    """
    signature = from_arguments(function.args, _FILE)
    parameters = [*signature.positional_only, *signature.positional, *signature.named][skip:]
    return tuple(_argument(each, function, text, configs) for each in parameters)


def _argument(
    parameter: Parameter, function: ast.FunctionDef, text: str, configs: Mapping[str, Config]
) -> Argument:
    value = constant(parameter.default)
    takes = ANY
    if parameter.annotation is not None:
        takes = takes_of(parameter.annotation, text, configs)
    elif isinstance(value, bool | int | float | str | list):
        takes = _like(value)
    if takes == ANY and not parameter.is_optional:
        takes = _by_use(parameter.name, function, configs)
    return Argument(parameter.name, takes, not parameter.is_optional, value)


def config_of(
    node: ast.ClassDef, text: str, configs: Mapping[str, Config], classes: Mapping[str, ast.ClassDef]
) -> Config | None:
    """Return what making an object of a dataclass takes; None if the class is none."""
    if not _is_dataclass(node, text):
        return None
    fields: dict[str, Argument] = {}
    for owner in reversed(inherited_in_file(node, classes)):
        if _is_dataclass(owner, text):
            fields |= {field.name: field for field in _fields(owner, text, configs)}
    return Config(node.name, tuple(fields.values()))


def _is_dataclass(node: ast.ClassDef, text: str) -> bool:
    return any(origin_in(text, decorator) == "dataclasses.dataclass" for decorator in decorators_of(node))


def _fields(node: ast.ClassDef, text: str, configs: Mapping[str, Config]) -> Iterator[Argument]:
    """Yield the fields that the body of a dataclass defines."""
    for each in node.body:
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            default, is_required = each.value, each.value is None
            if isinstance(default, ast.Call) and dotted_names(default.func)[-1:] == ["field"]:
                options = {keyword.arg: keyword.value for keyword in default.keywords}
                default = options.get("default")
                is_required = not {"default", "default_factory"} & options.keys()
            takes = takes_of(each.annotation, text, configs)
            yield Argument(each.target.id, takes, is_required, constant(default))


class _OneFile:
    """Finds the classes of one source, whatever module they are said to be of."""

    def __init__(self, classes: Mapping[str, ast.ClassDef]) -> None:
        self._classes = classes

    def dotted(self, module: Module, names: list[str]) -> Definition:
        if names[-1] not in self._classes:
            raise CannotTellError(f"{names[-1]} stands elsewhere")
        return Definition(module, self._classes[names[-1]])


def inherited_in_file(node: ast.ClassDef, classes: Mapping[str, ast.ClassDef]) -> list[ast.ClassDef]:
    """Return a class and those of the same file that it inherits from, in the order Python looks methods up."""
    nodes = []
    with contextlib.suppress(CannotTellError):  # in a circle, or in no order: as far as it goes
        for each in classes_of(Definition(_FILE, node), _OneFile(classes), skips_unreadable=True):
            assert isinstance(each.node, ast.ClassDef)
            nodes.append(each.node)
    return nodes


def constant(node: ast.expr | None) -> Any:
    """Return the value of a literal that a job file can give; None for any other expression."""
    try:
        value = ast.literal_eval(node) if node is not None else None
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return None
    if isinstance(value, tuple):
        value = list(value)
    if isinstance(value, float) and not math.isfinite(value):
        return None
    plain = value if isinstance(value, list) else [value]
    return value if all(isinstance(each, bool | int | float | str) for each in plain) else None


def takes_of(node: ast.expr, text: str, configs: Mapping[str, Config]) -> Takes:
    """Return what an annotation takes."""
    match node:
        case ast.Constant(value=str()):
            annotation = unquoted(node)
            return ANY if annotation is None else takes_of(annotation, text, configs)
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return _either([left, right], text, configs)
        case ast.Subscript(value=head, slice=inner):
            parts = inner.elts if isinstance(inner, ast.Tuple) else [inner]
            return _generic(origin_in(text, head), parts, text, configs)
        case ast.Name(id=name) if name in configs:
            return Takes(("object",), config=name)
    name = origin_in(text, node)
    kind: ValueType = "list" if name in _LISTS else "table" if name in _TABLES else _TYPES.get(name, "object")
    return Takes((kind,))


def _generic(name: str, parts: list[ast.expr], text: str, configs: Mapping[str, Config]) -> Takes:
    if name in {"typing.Optional", "typing.Union"}:
        return _either(parts, text, configs)
    if name in {"typing.Annotated", "typing.Final"}:
        return takes_of(parts[0], text, configs)
    if name in {"typing.Literal", "typing_extensions.Literal"}:
        return Takes(("any",), choices=tuple(part.value for part in parts if isinstance(part, ast.Constant)))
    if name in _LISTS:
        return Takes(("list",), item=takes_of(parts[0], text, configs))
    return Takes(("table",)) if name in _TABLES else OBJECT


def _either(parts: list[ast.expr], text: str, configs: Mapping[str, Config]) -> Takes:
    """Return what one of several annotations takes; TOML has no null, so None is left out."""
    given = [p for p in parts if not (isinstance(p, ast.Constant) and p.value is None)]
    takes = [each for part in given if not (each := takes_of(part, text, configs)).is_object]
    if len(takes) < 2:
        return takes[0] if takes else OBJECT
    types = tuple(dict.fromkeys(name for each in takes for name in each.types))
    order = sorted(types, key=lambda name: name in {"str", "any"})  # any text is a text
    return Takes(tuple(order), item=next((each.item for each in takes if each.item), None))


def _like(value: Any) -> Takes:
    """Return what an argument takes whose default is *value*."""
    if isinstance(value, list):
        return Takes(("list",), item=_like(value[0]) if value else None, is_guess=True)
    types: dict[type, tuple[ValueType, ...]] = {bool: ("bool",), int: ("int", "float"), float: ("float",)}
    return Takes(types.get(type(value), ("str",)), is_guess=True)


def _by_use(name: str, function: ast.FunctionDef, configs: Mapping[str, Config]) -> Takes:
    """Return what an argument without annotation and default takes: by what is done with it, then by its name."""
    read, is_compared, is_called = _uses_of(name, function)
    if is_called:
        return OBJECT
    fitting = [each for each in configs.values() if read and read <= {field.name for field in each.fields}]
    if name in _CONFIGS and len(configs) == 1:
        fitting = fitting or list(configs.values())
    if len(fitting) == 1:
        return Takes(("object",), config=fitting[0].name)
    if is_compared:
        return Takes(("str",), is_guess=True)
    if read or name in _CONFIGS:
        return OBJECT
    if _WHOLE.fullmatch(name):
        return Takes(("int", "list") if name.endswith("size") else ("int",), is_guess=True)
    if _REAL.fullmatch(name):
        return Takes(("float",), is_guess=True)
    return Takes(("str",), is_guess=True) if _TEXT.fullmatch(name) else ANY


def _uses_of(name: str, function: ast.FunctionDef) -> tuple[set[str], bool, bool]:
    """Return which attributes of *name* are read, whether it is compared with texts, and whether it is called."""
    read: set[str] = set()
    is_compared = is_called = False
    for node in ast.walk(function):
        match node:
            case ast.Attribute(value=ast.Name(id=used), attr=attribute) if used == name:
                read.add(attribute)
            case ast.Call(func=ast.Name(id=used)) if used == name:
                is_called = True
            case ast.Compare(left=ast.Name(id=used), comparators=[compared]) if used == name:
                inner = (each.value for each in ast.walk(compared) if isinstance(each, ast.Constant))
                is_compared |= any(isinstance(each, str) for each in inner)
    return read, is_compared, is_called
