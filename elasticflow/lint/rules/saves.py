"""The checkpoints that a script writes and loads, and their content."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from elasticflow.lint.script.ranks import words_of
from elasticflow.lint.script.values import values_given, words_behind
from elasticflow.python_source.syntax import argument, called_name, dotted_name, is_constant

if TYPE_CHECKING:
    from collections.abc import Iterator

    from elasticflow.python_source.script import Function, Script

_STATE = "state_dict"
_BUFFERS = re.compile(r"^(buf|buffer|bio|bytes_io|stream|io)$|BytesIO|NamedTemporaryFile|TemporaryFile|tmp|temp|mkstemp", re.IGNORECASE)  # fmt: skip


@dataclass(frozen=True)
class Save:
    """A call of torch.save.

    Attributes:
        path: The path, also of an opened file.
        contents: Each dict that the call may write, as far as the file shows.
    """

    call: ast.Call
    path: ast.expr
    contents: tuple[Contents, ...]

    @property
    def has_model(self) -> bool:
        """True if a state_dict is written."""
        return any(each.has_state for each in self.contents)


@dataclass(frozen=True)
class Contents:
    """Content of a checkpoint.

    Attributes:
        words: Keys of a dict and the names in its values; for another expression, its names.
        is_dict: The content is a dict whose keys are all known.
    """

    words: frozenset[str]
    is_dict: bool

    @property
    def has_state(self) -> bool:
        """True if the content has a state_dict."""
        return _STATE in self.words


# Several rules ask for them, of one script after the other.
@lru_cache(maxsize=1)
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
    """Return the path of `with open(path, "wb") as target`, else *target* itself."""
    if isinstance(target, ast.Name):
        for value in script.names.assigned(target.id):
            if isinstance(value, ast.Call) and called_name(value) == "open" and value.args:
                return value.args[0]
    return target


def contents_of(script: Script, node: ast.expr) -> list[Contents]:
    """Return the possible contents of an expression: a dict with later additions, or names."""
    if isinstance(node, ast.Name):
        scope = script.function_of(node)
        values = [
            value
            for value in script.names.assigned(node.id)
            if value is not None
            and script.function_of(value) is scope
            and not _is_empty_or_loaded(script, value)
        ]
        if len(values) == 1 and (contents := _of_dict(script, values[0])):
            words, is_known = _added(script, node.id, scope)
            return [Contents(contents.words | words, contents.is_dict and is_known)]
        found = [_of_dict(script, value) or Contents(frozenset(words_behind(script, value, 2)), is_dict=False) for value in values]  # fmt: skip
        return found or [Contents(frozenset(words_of(node)), is_dict=False)]
    return [_of_dict(script, node) or Contents(frozenset(words_behind(script, node, 2)), is_dict=False)]


def _is_empty_or_loaded(script: Script, value: ast.expr) -> bool:
    return is_constant(value, None) or (
        isinstance(value, ast.Call) and script.origin(value.func) == "torch.load"
    )


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
        # A state that the script itself defines may hold anything.
        owner = dotted_name(value.func) if isinstance(value, ast.Call) else dotted_name(value)
        is_known = is_known and owner not in {"self.state_dict", "state", "self.state", "trainer.state_dict", "extra", "extra_state", "meta", "metadata", "kwargs"}  # fmt: skip
    return Contents(frozenset(words), is_known)


def _added(script: Script, name: str, scope: Function | None) -> tuple[frozenset[str], bool]:
    """Return the words that `name[key] = value` adds to a dict later, and whether there can be no other additions."""
    words: set[str] = set()
    is_known = True
    for node in script.nodes_of[scope]:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Subscript) and dotted_name(target.value) == name:
                    words |= words_of(target.slice) | words_behind(script, node.value, 2)
        elif isinstance(node, ast.Call):
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
    """Return whether training resumes from a load, by the words around it: `resume`, `checkpoint["epoch"]`."""
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


def _keys_read(script: Script, name: str, scope: Function | None) -> set[str]:
    """Return the keys that a function reads from a dict."""
    return {
        word
        for node in script.nodes_of[scope]
        if isinstance(node, ast.Subscript) and dotted_name(node.value) == name
        for word in words_of(node.slice)
    }


def loads_in(script: Script) -> Iterator[ast.Call]:
    """Yield the calls of torch.load from which an object takes its state."""
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
    """Return whether a function assigns a load to a name and then calls `x.load_state_dict(name[...])`."""
    name, scope = dotted_name(target), script.function_of(load)
    return bool(name) and any(
        isinstance(call, ast.Call)
        and called_name(call) == "load_state_dict"
        and any(_begins_with(each, name) for each in call.args)
        for call in script.nodes_of[scope]
    )


def _begins_with(node: ast.expr, name: str) -> bool:
    while isinstance(node, ast.Subscript):
        node = node.value
    return dotted_name(node) == name


def loaded_words(script: Script) -> set[str] | None:
    """Return the names of objects that take a state, and the keys read from loaded checkpoints; None if unclear.

    It is unclear if a function gets a whole checkpoint, of which it may load any part.
    """
    words: set[str] = set()
    for load in loads_in(script):
        parent = script.parents.get(load)
        names = (
            {dotted_name(target) for target in parent.targets} if isinstance(parent, ast.Assign) else set()
        )
        scope = script.function_of(load)
        if any(_is_passed_on(node, names) for node in script.nodes_of[scope]):
            return None
        for name in names:
            words |= _keys_read(script, name, scope)
    for call in script.calls:
        if called_name(call) == "load_state_dict":
            words |= words_of(call)
        elif called_name(call).startswith("load") and script.called(call) is None and not call.args:
            return None
    return words | {called_name(call) for call in state_loads(script)}


def _is_passed_on(node: ast.AST, names: set[str]) -> bool:
    """Return whether a node returns a variable of these names, or passes one to a function that may load from it."""
    if isinstance(node, ast.Return):
        return any(dotted_name(part) in names for part in ast.walk(node))
    if not isinstance(node, ast.Call) or called_name(node) in {"load_state_dict", "print", "len", "set"}:
        return False
    return any(dotted_name(each) in names for each in (*node.args, *(each.value for each in node.keywords)))


# Names of methods and functions that write a state.
_STATE_CALLS = {
    "save_state",
    "save_pretrained",
    "save_checkpoint",
    "save_model",
    "save_snapshot",
    "save_ckpt",
}
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|[0-9]+")
_LOADS = {
    "load",
    "loads",
    "loaded",
    "resume",
    "resumes",
    "restore",
    "restart",
    "recover",
    "reload",
    "warmstart",
}
# Loads of other things than checkpoints: by the words in the name of a call, and by its library.
_OF_DATA = {"data", "dataset", "datasets", "loader", "loaders", "dataloader", "tokens", "image", "images", "classes", "config", "configs", "cfg", "args", "json", "yaml", "metric", "metrics", "vocab", "tokenizer", "wav", "audio", "hparams", "env", "dotenv", "csv", "text", "file", "files", "filepaths", "filenames", "shard", "batch", "samples", "features", "labels", "mask", "masks", "annotations", "corpus", "names", "safe", "full", "module", "inline", "extension", "graph", "lines", "svmlight", "split", "splits", "card"}  # fmt: skip
_OTHERS = ("numpy", "json", "yaml", "datasets", "torchvision", "torchaudio", "librosa", "soundfile", "evaluate", "tomllib", "toml", "csv", "PIL", "pandas", "omegaconf", "importlib", "wandb", "builtins", "dotenv", "torchtext", "sklearn", "scipy", "torch.utils.cpp_extension", "torch.hub", "torch.jit", "hydra", "marshal", "sentencepiece", "cv2", "imageio", "h5py", "pickle", "joblib", "logging")  # fmt: skip


def state_saves(script: Script) -> list[ast.Call]:
    """Return the calls of any library that write a state to a file, in the order of the file."""
    by_torch = {id(save.call) for save in saves_in(script)}
    return [call for call in script.calls if id(call) in by_torch or _saves_state(script, call)]


def _saves_state(script: Script, call: ast.Call) -> bool:
    if called_name(call) in _STATE_CALLS:
        return script.called(call) is None
    if called_name(call) != "save" or not isinstance(call.func, ast.Attribute):
        return False
    owner = dotted_name(call.func.value).lower()
    return "fabric" in owner or "accelerator" in owner or script.origin(call.func) == "torch.distributed.checkpoint.save"  # fmt: skip


def state_loads(script: Script) -> list[ast.Call]:
    """Return the calls that load or may load a state, by name; `from_pretrained` only for paths that the script saves."""
    return [call for call in script.calls if _may_load_state(script, call)]


def _may_load_state(script: Script, call: ast.Call) -> bool:
    name, origin = called_name(call), script.origin(call.func)
    if _is_of_state_dict_method(script, call) or name.startswith("register") or _is_copy(call):
        return False
    if name in {"from_pretrained", "load_from_checkpoint"}:
        return bool(call.args) and bool(_paths_saved(script) & words_of(call.args[0]))
    words = {word.lower() for word in _WORD.findall(name)}
    if not words & _LOADS or words & _OF_DATA or origin.partition(".")[0] in _OTHERS or origin.startswith(_OTHERS):  # fmt: skip
        return False
    if isinstance(call.func, ast.Attribute) and {"wandb", "np", "json", "yaml"} & words_of(call.func.value):
        return False
    # The loads inside a function of this file are counted there.
    return script.called(call) is None


def _is_copy(call: ast.Call) -> bool:
    """Return whether a call copies the state of another object: `a.load_state_dict(b.state_dict())`."""
    return any(
        isinstance(each, ast.Call) and called_name(each) in {_STATE, "parameters"} for each in call.args
    )


def _is_of_state_dict_method(script: Script, call: ast.Call) -> bool:
    """Return whether a call stands in a `load_state_dict` that the file defines, and that a load calls."""
    function = script.function_of(call)
    return function is not None and function.name in {"load_state_dict", "set_state_dict", "load_model_hook"}


def _paths_saved(script: Script) -> set[str]:
    """Return the names in the paths that models are saved to by `save_pretrained`."""
    paths = [call.args[0] for call in script.calls if called_name(call) == "save_pretrained" and call.args]
    return {word for path in paths for word in words_of(path)} - {"os", "path", "join", "args", "opt", "self"}
