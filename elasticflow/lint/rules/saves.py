"""Where a script writes checkpoints, and what stands in them."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from elasticflow.lint.script.names import dotted_name
from elasticflow.lint.script.ranks import words_of
from elasticflow.lint.script.script import argument, called_name
from elasticflow.lint.script.values import values_given, words_behind

if TYPE_CHECKING:
    from collections.abc import Iterator

    from elasticflow.lint.script.script import Script

_STATE = "state_dict"
_BUFFERS = re.compile(r"^(buf|buffer|bio|bytes_io|stream|io)$|BytesIO|NamedTemporaryFile|TemporaryFile|tmp|temp|mkstemp", re.IGNORECASE)  # fmt: skip


@dataclass(frozen=True)
class Save:
    """A call of torch.save.

    Attributes:
        call: The call.
        path: Where to; the path of an opened file.
        contents: What is written, as far as the file shows it: each dict that it may be.
    """

    call: ast.Call
    path: ast.expr
    contents: tuple[Contents, ...]

    @property
    def has_model(self) -> bool:
        """Whether some state_dict is written."""
        return any(each.has_state for each in self.contents)


@dataclass(frozen=True)
class Contents:
    """What a checkpoint holds.

    Attributes:
        words: Keys of a dict and the names in its values; of something else, the names in it.
        is_dict: It is a dict of which every key is known.
    """

    words: frozenset[str]
    is_dict: bool

    @property
    def has_state(self) -> bool:
        """Whether it holds a state_dict."""
        return _STATE in self.words


def saves_in(script: Script) -> list[Save]:
    """Return the calls of torch.save that write to a file, in the order of the file."""
    saves = []
    for call in script.calls_of("torch.save"):
        value, target = argument(call, "obj", 0), argument(call, "f", 1)
        if value is None or target is None:
            continue
        path = _opened(script, target)
        if any(_BUFFERS.search(word) for word in words_behind(script, path, 2)):
            continue
        contents = [each for given in values_given(script, value) for each in contents_of(script, given)]
        saves.append(Save(call, path, tuple(contents)))
    return saves


def _opened(script: Script, target: ast.expr) -> ast.expr:
    """Return the path of `with open(path, "wb") as target`, else what is given."""
    if isinstance(target, ast.Name):
        for value in script.names.assigned(target.id):
            if isinstance(value, ast.Call) and called_name(value) == "open" and value.args:
                return value.args[0]
    return target


def contents_of(script: Script, node: ast.expr) -> list[Contents]:
    """Return what an expression may hold: a dict with what is added to it later, or names."""
    if isinstance(node, ast.Name):
        scope = script.function_of(node)
        values = [
            value
            for value in script.names.assigned(node.id)
            if value is not None and script.function_of(value) is scope
        ]
        if len(values) == 1 and (contents := _of_dict(script, values[0])):
            words, is_known = _added(script, node.id, scope)
            return [Contents(contents.words | words, contents.is_dict and is_known)]
        found = [_of_dict(script, value) or Contents(frozenset(words_behind(script, value, 2)), is_dict=False) for value in values]  # fmt: skip
        return found or [Contents(frozenset(words_of(node)), is_dict=False)]
    return [_of_dict(script, node) or Contents(frozenset(words_behind(script, node, 2)), is_dict=False)]


def _of_dict(script: Script, node: ast.expr) -> Contents | None:
    if isinstance(node, ast.Call) and script.origin(node.func) == "builtins.dict" and not node.args:
        keys: list[ast.expr | None] = [ast.Constant(each.arg) if each.arg else None for each in node.keywords]
        return _of_pairs(script, keys, [each.value for each in node.keywords])
    return _of_pairs(script, node.keys, node.values) if isinstance(node, ast.Dict) else None


def _of_pairs(script: Script, keys: list[ast.expr | None], values: list[ast.expr]) -> Contents:
    words: set[str] = set()
    is_known = True
    for key, value in zip(keys, values, strict=True):
        if isinstance(key, ast.Name):  # a constant of the module
            words |= words_behind(script, key, 1)
        elif isinstance(key, ast.Constant) and isinstance(key.value, str):
            words.add(key.value)
        else:
            is_known = False
        words |= words_behind(script, value, 2)
        # What the script itself says its state is, anything may stand in.
        owner = dotted_name(value.func) if isinstance(value, ast.Call) else dotted_name(value)
        is_known = is_known and owner not in {"self.state_dict", "state", "self.state", "trainer.state_dict", "extra", "extra_state", "meta", "metadata", "kwargs"}  # fmt: skip
    return Contents(frozenset(words), is_known)


def _added(script: Script, name: str, scope: ast.AST | None) -> tuple[frozenset[str], bool]:
    """Return the words in what is put into a dict later, `name[key] = value`, and whether no more can be."""
    words: set[str] = set()
    is_known = True
    for node in script.nodes:
        if isinstance(node, ast.Assign) and script.function_of(node) is scope:
            for target in node.targets:
                if isinstance(target, ast.Subscript) and dotted_name(target.value) == name:
                    words |= words_of(target.slice) | words_behind(script, node.value, 2)
        elif isinstance(node, ast.Call) and script.function_of(node) is scope:
            if dotted_name(node.func) in {f"{name}.update", f"{name}.setdefault"}:
                words |= words_of(node)
                is_known = False
            elif dotted_name(node.func) != "torch.save" and any(
                dotted_name(each) == name for each in node.args
            ):
                is_known = is_known and script.origin(node.func) == "torch.save"
    return frozenset(words), is_known


_RESUMES = re.compile(r"resum|snapshot|restart|continu|epoch|step|iter|optim|sched|start", re.IGNORECASE)


def resumes(script: Script, load: ast.Call) -> bool:
    """Return whether training goes on from what is loaded, by the words around: `resume`, `checkpoint["epoch"]`."""
    words = {word for each in load.args for word in words_of(each)}
    function = script.function_of(load)
    if function is not None and function.name != "main":
        words.add(function.name)
    for whole, part in script.above(load):
        if isinstance(whole, ast.If) and part is not whole.test:
            words |= words_of(whole.test)
    parent = script.parents.get(load)
    for target in parent.targets if isinstance(parent, ast.Assign) else []:
        words |= _keys_read(script, dotted_name(target), function)
    return any(_RESUMES.search(word) for word in words)


def _keys_read(script: Script, name: str, scope: ast.AST | None) -> set[str]:
    """Return the keys that a function reads of a dict."""
    return {
        word
        for node in script.nodes
        if isinstance(node, ast.Subscript)
        and dotted_name(node.value) == name
        and script.function_of(node) is scope
        for word in words_of(node.slice)
    }


def loads_in(script: Script) -> Iterator[ast.Call]:
    """Yield the calls of torch.load of which some object takes its state."""
    for call in script.calls_of("torch.load"):
        whole = script.parents.get(call)
        while isinstance(whole, ast.Subscript | ast.Attribute):
            whole = script.parents.get(whole)
        if (isinstance(whole, ast.Call) and called_name(whole) == "load_state_dict") or (
            isinstance(whole, ast.Assign)
            and any(_is_loaded_from(script, call, target) for target in whole.targets)
        ):
            yield call


def _is_loaded_from(script: Script, load: ast.Call, target: ast.expr) -> bool:
    """Return whether `x.load_state_dict(name[...])` stands in the function that has assigned a load to a name."""
    name, scope = dotted_name(target), script.function_of(load)
    return bool(name) and any(
        called_name(call) == "load_state_dict"
        and script.function_of(call) is scope
        and any(_begins_with(each, name) for each in call.args)
        for call in script.calls
    )


def _begins_with(node: ast.expr, name: str) -> bool:
    while isinstance(node, ast.Subscript):
        node = node.value
    return dotted_name(node) == name
