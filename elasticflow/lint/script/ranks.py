"""Conditions about ranks: finds the ranks that run a branch, as far as the text of the file shows."""

from __future__ import annotations

import ast
import re
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from elasticflow.python_source.syntax import argument, called_name, dotted_name

if TYPE_CHECKING:
    from elasticflow.python_source.script import Function, Script


class Side(Enum):
    """The ranks that run a branch."""

    MAIN = "rank 0"
    OTHERS = "the other ranks"

    @property
    def opposite(self) -> Side:
        """The ranks that do not run the branch."""
        return Side.OTHERS if self is Side.MAIN else Side.MAIN


class Sides(NamedTuple):
    """The ranks that take each branch of a condition; None if all ranks may, or if the text does not say."""

    if_true: Side | None
    if_false: Side | None


class _Plain(Enum):
    """Conditions without a rank that rules distinguish."""

    DISTRIBUTED = "there are several processes"
    ALONE = "there is one process"


NEITHER = Sides(None, None)
_ON_MAIN = Sides(Side.MAIN, Side.OTHERS)
_ON_OTHERS = Sides(Side.OTHERS, Side.MAIN)
_Meaning = Sides | _Plain
_RANKS = re.compile(r"_?((global|local|world|ddp|dist|ddp_local|process)_)?rank_?", re.IGNORECASE)
_RANK_CALLS = {"get_rank", "get_local_rank", "get_global_rank"}
_RANK_VARIABLES = {"RANK", "LOCAL_RANK"}
# Usual names of a project's own helpers for the question.
_MAIN_WORDS = re.compile(
    r"_?is_(main|master|primary|chief|lead|leader|root)(_(process|proc|rank|node|worker))?_?|is_(global|local|rank)_zero|is_rank_?0"
    r"|is_local_(main|master|primary)(_process)?|_?(main|master)_process|is_global_(main|master|primary)(_process)?",
    re.IGNORECASE,
)
_DISTRIBUTED_WORDS = re.compile(
    r"_?(is_|use_|enable_|is_dist_)?(distributed|ddp|dist|dist_avail_and_initialized|multi_gpu|multigpu|multi_process|multiprocess)(_mode|_training|_run|_initialized|_available)?_?"
    r"|is_dist(_avail(able)?)?(_and_initialized|_initialized)?|is_dist_available(_and_initialized)?|is_torchelastic_launched|is_initialized|is_available_and_initialized",
    re.IGNORECASE,
)
_SIZE_WORDS = re.compile(
    r"_?(ddp_)?world_?size_?|num_(processes|procs|replicas)|get_world_size", re.IGNORECASE
)
RANKISH = re.compile(
    r"rank|master|main|primary|leader|chief|is_root|dist|ddp|proc|node|worker|world|gpu|device|local|coordinator|ordinal|zero",
    re.IGNORECASE,
)
"""Words in a condition that may select processes."""
_MOST_HOPS = 5


class Ranks:
    """Finds the ranks that take a branch, for the conditions of one file."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self._known_ranks: dict[tuple[str, str], bool] = {}
        self._known_names: dict[tuple[str, str], _Meaning | None] = {}

    def sides(self, test: ast.expr) -> Sides:
        """Return the ranks that take the branches of a condition."""
        meaning = self._meaning(test, 0)
        return meaning if isinstance(meaning, Sides) else NEITHER

    def is_distributed(self, test: ast.expr) -> bool:
        """Return whether a condition only tests for several processes."""
        return self._meaning(test, 0) is _Plain.DISTRIBUTED

    def is_alone(self, test: ast.expr) -> bool:
        """Return whether a condition only tests for a single process."""
        return self._meaning(test, 0) is _Plain.ALONE

    def is_rank(self, node: ast.expr | None) -> bool:
        """Return whether an expression is the rank of this process: the global or the local one."""
        match node:
            case ast.Call():
                return self._is_rank_call(node)
            case ast.Subscript(value=mapping, slice=key):
                return dotted_name(mapping).endswith("environ") and self._names_rank(key)
            case ast.IfExp(body=body, orelse=orelse):  # int(os.environ["RANK"]) if distributed else 0
                return self.is_rank(body) or self.is_rank(orelse)
            case ast.Name(id=name):
                return self._is_rank_name("variable", name, self._script.names.assigned(name))
            case ast.Attribute(attr=name):
                return self._is_rank_name("attribute", name, self._script.names.assigned_attribute(name))
            case _:
                return False

    def _is_rank_name(self, sort: str, name: str, values: list[ast.expr | None]) -> bool:
        key = sort, name
        if key not in self._known_ranks:
            self._known_ranks[key] = False  # what is assigned to itself
            self._known_ranks[key] = self._is_rank_by(name, values)
        return self._known_ranks[key]

    def _is_rank_by(self, name: str, values: list[ast.expr | None]) -> bool:
        """Return whether a name means a rank, by all values assigned to it, or by the name if the values show nothing."""
        is_called_so = bool(_RANKS.fullmatch(name))
        known = [value for value in values if value is not None]
        if not known or len(known) < len(values):
            return is_called_so
        are_ranks = [self.is_rank(value) for value in known]
        if any(are_ranks):
            return all(is_one or _is_number(value) for is_one, value in zip(are_ranks, known, strict=True))
        return is_called_so and all(map(_may_be_rank, known))

    def _is_rank_call(self, call: ast.Call) -> bool:
        origin = self._script.origin(call.func)
        last = origin.rpartition(".")[2] or called_name(call)
        if origin in {"os.getenv", "os.environ.get"}:
            return bool(call.args) and self._names_rank(call.args[0])
        if origin == "builtins.int" and call.args:
            return self.is_rank(call.args[0])
        # With arguments it is about a group.
        return last in _RANK_CALLS and not call.args and argument(call, "group") is None

    @staticmethod
    def _names_rank(key: ast.expr) -> bool:
        return isinstance(key, ast.Constant) and key.value in _RANK_VARIABLES

    def _meaning(self, test: ast.expr, hops: int) -> _Meaning | None:  # one case per form
        if hops > _MOST_HOPS:
            return None
        match test:
            case ast.UnaryOp(op=ast.Not(), operand=inner):
                return _negated(self._meaning(inner, hops))
            case ast.BoolOp(op=ast.And(), values=values):
                return _both([self._meaning(each, hops) for each in values])
            case ast.BoolOp(op=ast.Or(), values=values):
                return _negated(_both([_negated(self._meaning(each, hops)) for each in values]))
            case ast.Compare(left=left, ops=[operation], comparators=[right]):
                return self._comparison(left, operation, right)
            case ast.Call():
                return self._of_call(test, hops)
            case ast.Name() | ast.Attribute():
                return self._of_name(test, hops)
            case _:
                return None

    def _comparison(self, left: ast.expr, operation: ast.cmpop, right: ast.expr) -> _Meaning | None:
        if isinstance(left, ast.Constant) and isinstance(operation, ast.Eq | ast.NotEq):
            left, right = right, left
        if self._is_size(left) and isinstance(right, ast.Constant):
            return _about_size(operation, right.value)
        if isinstance(operation, ast.NotEq | ast.IsNot | ast.Eq | ast.Is) and _is_minus_one(right) and self.is_rank(left):  # fmt: skip
            return _Plain.ALONE if isinstance(operation, ast.Eq | ast.Is) else _Plain.DISTRIBUTED
        return _about_rank(operation, right) if self.is_rank(left) else None

    def _is_size(self, node: ast.expr) -> bool:
        inner = node.func if isinstance(node, ast.Call) else node
        return bool(_SIZE_WORDS.fullmatch(dotted_name(inner).rpartition(".")[2]))

    def _of_call(self, call: ast.Call, hops: int) -> _Meaning | None:
        function = self._script.called(call)
        if function is not None:
            return self._of_function(function, hops + 1)
        if self._is_rank_call(call):
            return _ON_OTHERS
        last = called_name(call)
        if _MAIN_WORDS.fullmatch(last):
            return _ON_MAIN
        if last == "is_available" and not self._script.origin(call.func).startswith("torch.distributed"):
            return None
        is_known = _DISTRIBUTED_WORDS.fullmatch(last) or last == "is_available"
        return _Plain.DISTRIBUTED if is_known else None

    def _of_function(self, function: Function, hops: int) -> _Meaning | None:
        """Return the meaning of a helper: `def is_main(): return not is_initialized() or get_rank() == 0`."""
        answers = [
            node.value
            for node in ast.walk(function)
            if isinstance(node, ast.Return) and node.value is not None
        ]
        meanings = [self._meaning(each, hops) for each in answers if not isinstance(each, ast.Constant)]
        constants: set[object] = {each.value for each in answers if isinstance(each, ast.Constant)}
        return _of_all(meanings, constants)

    def _of_name(self, node: ast.Name | ast.Attribute, hops: int) -> _Meaning | None:
        if isinstance(node, ast.Attribute) and (answer := self._of_property(node, hops)):
            return answer
        is_variable = isinstance(node, ast.Name)
        name = node.id if isinstance(node, ast.Name) else node.attr
        key = "variable" if is_variable else "attribute", name
        if key not in self._known_names:
            names = self._script.names
            values = names.assigned(name) if is_variable else names.assigned_attribute(name)
            self._known_names[key] = None  # what is assigned to itself
            self._known_names[key] = self._of_values(node, name, values, hops)
        return self._known_names[key]

    def _of_values(self, node: ast.Name | ast.Attribute, name: str, values: list[ast.expr | None], hops: int) -> _Meaning | None:  # fmt: skip
        if None in values:
            return None
        known = [value for value in values if value is not None]
        constants: set[object] = {value.value for value in known if isinstance(value, ast.Constant)}
        others = [self._meaning(value, hops + 1) for value in known if not isinstance(value, ast.Constant)]
        if known and (meaning := _of_all(others, constants)) is not None:
            return meaning
        if self.is_rank(node):
            return _ON_OTHERS
        if not known and _MAIN_WORDS.fullmatch(name):
            return _ON_MAIN
        return _Plain.DISTRIBUTED if _DISTRIBUTED_WORDS.fullmatch(name) else None

    def _of_property(self, node: ast.Attribute, hops: int) -> _Meaning | None:
        method = self._script.meant(node)
        marks = [] if method is None else [dotted_name(mark) for mark in method.decorator_list]
        if method is None or not any(mark.endswith("property") for mark in marks):
            return None
        return self._of_function(method, hops + 1)


def _of_all(meanings: list[_Meaning | None], constants: set[object]) -> _Meaning | None:
    """Return the common meaning of several results: all the same, except constants for a single process."""
    if len(set(meanings)) != 1 or meanings[0] is None:
        return None
    meaning = meanings[0]
    if isinstance(meaning, _Plain):
        return meaning if constants <= {meaning is _Plain.ALONE, None} else None
    return meaning if constants <= {meaning.if_true is Side.MAIN, None} else None


def _negated(meaning: _Meaning | None) -> _Meaning | None:
    if isinstance(meaning, Sides):
        return Sides(meaning.if_false, meaning.if_true)
    if meaning is None:
        return None
    return _Plain.ALONE if meaning is _Plain.DISTRIBUTED else _Plain.DISTRIBUTED


def _both(meanings: list[_Meaning | None]) -> _Meaning | None:
    """Return the meaning if all of several conditions hold, and the meaning if one does not."""
    sides = [each for each in meanings if isinstance(each, Sides)]
    plain = {each for each in meanings if isinstance(each, _Plain)}
    if not sides:
        return next(iter(plain)) if len(plain) == 1 and None not in meanings else None
    trues = {each.if_true for each in sides if each.if_true is not None}
    falses = {each.if_false for each in sides}
    is_complete = None not in meanings and plain <= {_Plain.DISTRIBUTED} and len(falses) == 1
    if_false = next(iter(falses)) if is_complete else None
    return Sides(next(iter(trues)) if len(trues) == 1 and _Plain.ALONE not in plain else None, if_false)


def _about_rank(operation: ast.cmpop, right: ast.expr) -> Sides | None:
    match operation, right:
        case ((ast.Eq() | ast.Is() | ast.LtE()), ast.Constant(value=0)):
            return _ON_MAIN
        case ast.Lt(), ast.Constant(value=1):
            return _ON_MAIN
        case ((ast.NotEq() | ast.IsNot() | ast.Gt()), ast.Constant(value=0)):
            return _ON_OTHERS
        case ast.GtE(), ast.Constant(value=1):
            return _ON_OTHERS
        case ast.In(), _ if _is_zero_among(right):
            return _ON_MAIN
        case ast.NotIn(), _ if _is_zero_among(right):
            return _ON_OTHERS
        case _:
            return None


def _about_size(operation: ast.cmpop, number: object) -> _Plain | None:
    match operation, number:
        case ((ast.Gt() | ast.NotEq()), 1):
            return _Plain.DISTRIBUTED
        case ast.GtE(), 2:
            return _Plain.DISTRIBUTED
        case ((ast.Eq() | ast.LtE()), 1):
            return _Plain.ALONE
        case ast.Lt(), 2:
            return _Plain.ALONE
        case _:
            return None


def _is_minus_one(node: ast.expr) -> bool:
    match node:
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=1)):
            return True
        case ast.Constant(value=None):
            return True
        case _:
            return False


def _is_zero_among(node: ast.expr) -> bool:
    """Return whether a list holds 0, or 0 with the -1 or None of a single process."""
    if not isinstance(node, ast.List | ast.Tuple | ast.Set):
        return False
    is_zero = [
        isinstance(each, ast.Constant) and each.value == 0 and each.value is not None for each in node.elts
    ]
    return any(is_zero) and all(
        zero or _is_minus_one(each) for zero, each in zip(is_zero, node.elts, strict=True)
    )


def _is_number(node: ast.expr) -> bool:
    return _is_minus_one(node) or (isinstance(node, ast.Constant) and isinstance(node.value, int))


def _may_be_rank(node: ast.expr) -> bool:
    """Return whether a variable named `rank` may be a rank by its assigned values, which come from elsewhere."""
    return (
        _is_number(node)
        or isinstance(node, ast.Name | ast.Attribute)
        or (isinstance(node, ast.Call) and "rank" in dotted_name(node.func).lower())
        or (isinstance(node, ast.BinOp) and any("rank" in name.lower() for name in words_of(node)))
    )


def words_of(node: ast.AST) -> set[str]:
    """Return the names, attributes and texts in an expression."""
    words: set[str] = set()
    for each in ast.walk(node):
        match each:
            case ast.Name(id=word) | ast.Attribute(attr=word) | ast.Constant(value=str(word)):
                words.add(word)
            case ast.keyword(arg=str(word)):
                words.add(word)
            case _:
                pass
    return words


def is_entry_check(test: ast.expr) -> bool:
    """Return whether a condition is `__name__ == "__main__"`."""
    return isinstance(test, ast.Compare) and "__name__" in words_of(test)


def may_choose_ranks(test: ast.expr) -> bool:
    """Return whether a condition may select processes, by any word in it."""
    return not is_entry_check(test) and any(RANKISH.search(word) for word in words_of(test))
