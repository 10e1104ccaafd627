"""One Python file: its tree, its functions and classes, and the function that a call means."""

from __future__ import annotations

import ast
from collections import defaultdict
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING

from elasticflow.python_source.syntax import STAR, dotted_name, imported_names, parse

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

_Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
# One name for each object, whichever module it was imported from.
_SAME = {
    "torch.distributed.distributed_c10d": "torch.distributed",
    "torch.nn.parallel.distributed": "torch.nn.parallel",
    "torch.utils.data.distributed": "torch.utils.data",
    "torch.utils.data.dataloader": "torch.utils.data",
    "torch.multiprocessing.spawn": "torch.multiprocessing",
    "torch.serialization": "torch",
    "lightning.fabric": "lightning_fabric",
    "accelerate.accelerator": "accelerate",
}
_MOST_HOPS = 6


class Names:
    """Bindings of a file.

    Args:
        scope_of: The function, lambda, class or module around a node.
    """

    def __init__(self, nodes: Iterable[ast.AST], scope_of: Callable[[ast.AST], ast.AST]) -> None:
        self._scope_of = scope_of
        self._imported: dict[str, set[str]] = defaultdict(set)
        self._stars: set[str] = set()
        self._values: dict[str, list[ast.expr | None]] = defaultdict(list)
        self._attributes: dict[str, list[ast.expr | None]] = defaultdict(list)
        self._bound: dict[str, set[ast.AST]] = defaultdict(set)
        for node in nodes:
            self._note(node)

    def _note(self, node: ast.AST) -> None:
        match node:
            case ast.Import() | ast.ImportFrom():
                self._import(node)
            case ast.Assign(targets=targets, value=value):
                for target in targets:
                    self._assign(target, value)
            case (
                ast.AnnAssign(target=target, value=ast.expr() as value)
                | ast.NamedExpr(target=target, value=value)
            ):
                self._assign(target, value)
            case ast.withitem(optional_vars=ast.expr() as target, context_expr=value):
                self._assign(target, value)
            case ast.AugAssign() | ast.For() | ast.AsyncFor() | ast.comprehension():
                self._assign(node.target, None)
            case ast.arg(arg=name):
                self._bound[name].add(self._scope_of(node))
            case _:
                pass

    def _import(self, statement: ast.Import | ast.ImportFrom) -> None:
        for name, origin in imported_names(statement).items():
            if name == STAR:
                self._stars.add(origin)
            else:
                self._imported[name].add(origin)

    def _assign(self, target: ast.expr, value: ast.expr | None) -> None:
        match target, value:
            case ast.Name(id=name), _:
                self._values[name].append(value)
                self._bound[name].add(self._scope_of(target))
            case ast.Attribute(attr=name), _:
                self._attributes[name].append(value)
            case (ast.Tuple(elts=targets) | ast.List(elts=targets)), (ast.Tuple(elts=values) | ast.List(elts=values)) if len(targets) == len(values):  # fmt: skip
                for each, part in zip(targets, values, strict=True):
                    self._assign(each, part)
            case ((ast.Tuple(elts=targets) | ast.List(elts=targets)), _):
                for each in targets:
                    self._assign(each, None)
            case ast.Starred(value=inner), _:
                self._assign(inner, None)
            case _:
                pass

    def assigned(self, name: str) -> list[ast.expr | None]:
        """Return the values that a file assigns to a variable of this name; None for a value that the text does not show."""
        return self._values.get(name, [])

    def assigned_attribute(self, name: str) -> list[ast.expr | None]:
        """Return the values that a file assigns to attributes of this name, of any object."""
        return self._attributes.get(name, [])

    def is_rebound(self, name: str) -> bool:
        """Return whether a variable or parameter has the same name."""
        return name in self._bound

    def is_parameter(self, name: str, scope: ast.AST) -> bool:
        """Return whether the function *scope* has a parameter of this name, and assigns nothing to it."""
        if not isinstance(scope, _Function):
            return False
        given = scope.args
        return any(each.arg == name for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)) and all(
            value is None or self._scope_of(value) is not scope for value in self.assigned(name)
        )

    @property
    def modules(self) -> set[str]:
        """The first part of every imported name."""
        origins = {origin for each in self._imported.values() for origin in each} | self._stars
        return {origin.partition(".")[0] for origin in origins}

    def origin(self, node: ast.AST, hops: int = 0) -> str:
        """Return the dotted name that an expression stands for; empty if imports do not say."""
        dotted = dotted_name(node)
        if not dotted:
            return ""
        first, _, rest = dotted.partition(".")
        base = self._first(first, node, hops)
        return _canonical(f"{base}.{rest}" if rest else base) if base else ""

    def _first(self, name: str, node: ast.AST, hops: int) -> str:
        scope = self._scope_of(node)
        binding = self._bound.get(name, set())
        while True:
            if scope in binding:
                return self._alias(name, hops)
            if isinstance(scope, ast.Module):
                break
            scope = self._scope_of(scope)
        origins = self._imported.get(name, set())
        if len(origins) == 1:
            return next(iter(origins))
        if origins or len(self._stars) != 1:
            return "" if origins or name not in _BUILTINS else f"builtins.{name}"
        return f"{next(iter(self._stars))}.{name}"

    def _alias(self, name: str, hops: int) -> str:
        """Return the origin of a variable that is an alias of an imported name."""
        values = self._values.get(name, [])
        if len(values) != 1 or hops > _MOST_HOPS or name in self._imported or len(self._bound[name]) != 1:
            return ""
        value = values[0]
        if value is None or dotted_name(value).partition(".")[0] in {"", name}:
            return ""
        return self.origin(value, hops + 1)


_BUILTINS = frozenset({"print", "len", "int", "str", "range", "enumerate", "open", "exit", "quit", "super", "isinstance", "getattr", "setattr", "hasattr", "max", "min", "sum", "sorted", "zip", "list", "dict", "set", "tuple", "float", "bool", "next", "iter", "round", "abs", "any", "all", "map", "filter", "format", "type", "id", "input", "repr", "vars"})  # fmt: skip


def _canonical(origin: str) -> str:
    for module, same in _SAME.items():
        if origin == module or origin.startswith(f"{module}."):
            inner = origin[len(module) :]
            # `torch.multiprocessing.spawn` is the function as well as its module.
            return f"{same}{inner}" if inner else origin
    return origin


Function = ast.FunctionDef | ast.AsyncFunctionDef
"""A function or method that has a name."""
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)


class Script:
    """A Python file that is valid.

    Args:
        text: The file, with line feeds as newlines.

    Raises:
        SyntaxError: the text is not Python of this version.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.lines = text.split("\n")
        self.tree = parse(text)
        self.parents: dict[ast.AST, ast.AST] = {}
        self.calls: list[ast.Call] = []
        self.nodes: list[ast.AST] = []
        self.functions: dict[str, list[Function]] = defaultdict(list)
        self.classes: dict[str, list[ast.ClassDef]] = defaultdict(list)
        waiting: list[ast.AST] = [self.tree]
        while waiting:
            node = waiting.pop()
            self.nodes.append(node)
            children = list(ast.iter_child_nodes(node))
            self.parents.update(dict.fromkeys(children, node))
            waiting += reversed(children)
            if isinstance(node, ast.Call):
                self.calls.append(node)
            elif isinstance(node, Function):
                self.functions[node.name].append(node)
            elif isinstance(node, ast.ClassDef):
                self.classes[node.name].append(node)
        self.names = Names(self.nodes, self.scope_of)
        self._origins: dict[ast.AST, str] = {}

    def origin(self, node: ast.AST) -> str:
        """Return the dotted name of an expression by the imports: `torch.save`; empty if they do not show it."""
        if node not in self._origins:
            self._origins[node] = self.names.origin(node)
        return self._origins[node]

    def calls_of(self, *origins: str) -> Iterator[ast.Call]:
        """Yield the calls of functions and classes by their dotted names, in the order of the file."""
        places = (self._places_by_origin.get(origin, ()) for origin in dict.fromkeys(origins))
        for place in sorted(chain.from_iterable(places)):
            yield self.calls[place]

    @cached_property
    def _places_by_origin(self) -> dict[str, list[int]]:
        """The places in `calls` of the calls of each function and class."""
        places: dict[str, list[int]] = defaultdict(list)
        for place, call in enumerate(self.calls):
            places[self.origin(call.func)].append(place)
        return places

    def scope_of(self, node: ast.AST) -> ast.AST:
        """Return the function, lambda or class around a node, else the module."""
        above = self.parents.get(node)
        while above is not None and not isinstance(above, _SCOPES):
            above = self.parents.get(above)
        return self.tree if above is None else above

    def function_of(self, node: ast.AST) -> Function | None:
        """Return the function around a node; None at the level of the module or of a class."""
        scope = self.scope_of(node)
        while isinstance(scope, ast.Lambda):
            scope = self.scope_of(scope)
        return scope if isinstance(scope, Function) else None

    @cached_property
    def nodes_of(self) -> dict[Function | None, list[ast.AST]]:
        """The nodes of each function, without those of functions inside it, in the order of the file; None: of the module."""
        nodes: dict[Function | None, list[ast.AST]] = defaultdict(list)
        for node in self.nodes:
            nodes[self.function_of(node)].append(node)
        return nodes

    def class_of(self, node: ast.AST) -> ast.ClassDef | None:
        """Return the class whose body, or whose methods, a node belongs to."""
        scope = self.scope_of(node)
        while not isinstance(scope, ast.ClassDef | ast.Module):
            scope = self.scope_of(scope)
        return scope if isinstance(scope, ast.ClassDef) else None

    def above(self, node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
        """Yield the nodes around a node, each with its child on the way, up to the function or module."""
        part, whole = node, self.parents.get(node)
        while whole is not None:
            yield whole, part
            if isinstance(whole, _SCOPES):
                return
            part, whole = whole, self.parents.get(whole)

    def called(self, call: ast.Call) -> Function | None:
        """Return the function of this file that a call means; None for a function of another file, or if unclear."""
        return self.meant(call.func)

    def meant(self, node: ast.expr) -> Function | None:
        """Return the function of this file that an expression means: `f`, `self.f`, `trainer.f`."""
        if isinstance(node, ast.Name):
            definitions = self.functions.get(node.id, [])
            if len(definitions) != 1 or self.names.is_rebound(node.id):
                return None
            return None if isinstance(self.scope_of(definitions[0]), ast.ClassDef) else definitions[0]
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            owner = self._class_behind(node.value)
            return None if owner is None else self.method(owner, node.attr)
        return None

    def method(self, owner: ast.ClassDef, name: str, hops: int = 8) -> Function | None:
        """Return a method of a class of this file, its own or inherited within the file."""
        own = [each for each in self.functions.get(name, ()) if self.parents[each] is owner]
        if own:
            return own[0] if len(own) == 1 else None
        for base in owner.bases if hops else []:
            inherited = self.class_called(dotted_name(base))
            if inherited and (found := self.method(inherited, name, hops - 1)):
                return found
        return None

    def class_called(self, name: str) -> ast.ClassDef | None:
        """Return the class of this file with a name; None unless there is exactly one."""
        classes = self.classes.get(name, [])
        return classes[0] if len(classes) == 1 else None

    def _class_behind(self, name: ast.Name) -> ast.ClassDef | None:
        if name.id in {"self", "cls"}:
            return self.class_of(name)
        values = self.names.assigned(name.id)
        if len(values) == 1 and isinstance(values[0], ast.Call):
            return self.class_called(dotted_name(values[0].func))
        return None

    @cached_property
    def callers(self) -> dict[Function, list[ast.Call]]:
        """The calls of each function of this file."""
        callers: dict[Function, list[ast.Call]] = defaultdict(list)
        for call in self.calls:
            if (function := self.called(call)) is not None:
                callers[function].append(call)
                continue
            owner = self.class_called(dotted_name(call.func))
            made = None if owner is None else self.method(owner, "__init__")
            if made is not None:
                callers[made].append(call)
        return callers
