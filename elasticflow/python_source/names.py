"""Origins of names: imports under any alias, and assigned values."""

from __future__ import annotations

import ast
from collections import defaultdict
from typing import TYPE_CHECKING

from elasticflow.python_source.syntax import STAR, dotted_name, imported_names

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

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
