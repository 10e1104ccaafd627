"""Checkpoints that a kill destroys, that all ranks write, or from which training does not resume as it was."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

from elasticflow.jobfile.diagnostics import codes
from elasticflow.lint.rules.finding import Finding
from elasticflow.lint.rules.launching import reads_of_environment
from elasticflow.lint.rules.saves import Contents, Save, loaded_words, loads_in, resumes, saves_in
from elasticflow.lint.script.forms import DDP, INIT, SPAWN
from elasticflow.lint.script.ranks import RANKISH, may_choose_ranks, words_of
from elasticflow.lint.script.values import is_repeated, values_given, words_behind
from elasticflow.python_source.syntax import argument, called_name, dotted_name, has_unpacked, is_constant

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from elasticflow.lint.rules.finding import View
    from elasticflow.python_source.script import Script

_OPTIMIZER = re.compile(r"optim|(^|_)opts?(_|\d|$)|adam|sgd", re.IGNORECASE)
_SCHEDULE = re.compile(r"sched|(^|_)lr_|warmup", re.IGNORECASE)
_POSITION = re.compile(
    r"epoch|step|iter|position|progress|(^|_)it(_|$)|num_|batch|count|samples|tokens", re.IGNORECASE
)
_SCALER = re.compile(r"scaler|(^|_)amp(_|$)", re.IGNORECASE)
_AVERAGE = re.compile(r"(^|_)ema(_|$)|averag|(^|_)swa(_|$)|shadow", re.IGNORECASE)
_RANDOM = re.compile(r"rng|random|generator", re.IGNORECASE)
_MOVES = ("os.replace", "os.rename", "os.renames", "shutil.move", "shutil.copy", "shutil.copyfile", "shutil.copy2", "os.link", "os.symlink")  # fmt: skip
_OPTIONS = {"args", "opt", "opts", "options", "cfg", "config", "hparams", "flags", "FLAGS"}
_OF_PATHS = {"os.path.join", "pathlib.Path", "builtins.str"}
# With these, each rank holds a part of its own, or the framework writes.
_SHARDED = re.compile(
    r"FullyShardedDataParallel|\bFSDP\b|deepspeed|fully_shard|tensor_parallel|megatron|xla_model|torch_xla"
)


def saved_in_place(view: View) -> Iterator[Finding]:
    """Yield a checkpoint that every save overwrites, if no other checkpoint is kept."""
    script = view.script
    saves = [save for save in saves_in(script) if save.has_model or not save.contents]
    if not saves or any(script.calls_of(*_MOVES)) or _renames(script):
        return
    repeated = [save for save in saves if is_repeated(script, save.call)]
    if not repeated or len({_spelled(script, save.path) for save in repeated}) != 1:
        return
    given = values_given(script, repeated[0].path)
    if repeated[0].has_model and len(given) == 1 and _is_fixed(script, given[0]):
        yield Finding(
            codes.LINT_SAVED_IN_PLACE,
            repeated[0].call.func,
            "each save writes over the only checkpoint: a kill while it does leaves none that can be read",
            "write to a file beside it, then os.replace(temporary, path)",
        )


def _renames(script: Script) -> bool:
    """Return whether a method renames a path, or moves a file or an old checkpoint."""
    return any(
        isinstance(call.func, ast.Attribute)
        and (call.func.attr in {"rename", "symlink_to", "link_to", "hardlink_to"} or (call.func.attr == "replace" and len(call.args) == 1))
        for call in script.calls
    )  # fmt: skip


def _spelled(script: Script, path: ast.expr) -> str:
    given = values_given(script, path)
    if len(given) == 1 and isinstance(given[0], ast.Name):
        values = [value for value in script.names.assigned(given[0].id) if value is not None]
        if len(values) == 1:
            return ast.unparse(values[0])
    return "|".join(sorted(ast.unparse(each) for each in given))


def _is_fixed(script: Script, node: ast.expr, hops: int = 4, *, is_folder: bool = False) -> bool:
    """Return whether an expression has one value in all of a run; a folder may be any option or constant."""
    match node:
        case ast.Constant(value=str()):
            return True
        case ast.Attribute(value=ast.Name(id=owner), attr=name) if owner != "self":  # args.checkpoint
            is_option = is_folder or owner in _OPTIONS
            return is_option and not _POSITION.search(name) and not script.names.assigned_attribute(name)
        case ast.Name() | ast.Attribute():
            return _is_assigned_once(script, node, hops)
        case ast.Call(args=parts, keywords=[]) if script.origin(node.func) in _OF_PATHS:
            pass
        case ast.BinOp(op=ast.Div() | ast.Add(), left=left, right=right):
            parts = [left, right]
        case ast.JoinedStr(values=values):
            parts = [each.value if isinstance(each, ast.FormattedValue) else each for each in values]
        case _:
            return False
    return bool(parts and hops) and all(
        _is_fixed(script, each, hops - 1, is_folder=each is not parts[-1]) for each in parts
    )


def _is_assigned_once(script: Script, node: ast.Name | ast.Attribute, hops: int) -> bool:
    """Return whether a variable or an attribute of `self` has one fixed value, or is a parameter that gets one."""
    if isinstance(node, ast.Attribute):
        values = script.names.assigned_attribute(node.attr)
    else:
        values = script.names.assigned(node.id) or [*values_given(script, node)]
    if len(values) != 1 or not hops or (value := values[0]) is None or value is node:
        return False
    if any(isinstance(whole, ast.For | ast.While) for whole, _ in script.above(value)):
        return False
    given = values_given(script, value)
    return bool(given) and all(_is_fixed(script, each, hops - 1) for each in given)


def saved_by_all(view: View) -> Iterator[Finding]:
    """Yield each checkpoint that all ranks write to the same file, as far as the text shows."""
    script = view.script
    if not _is_replicated(script) or _SHARDED.search(script.text):
        return
    for save in saves_in(script):
        words = words_behind(script, save.path)
        given = [word for each in values_given(script, save.path) for word in words_behind(script, each)]
        if any(RANKISH.search(word) for word in (*words, *given)) or not save.has_model:
            continue
        if _is_run_by_all(script, save.call):
            yield Finding(
                codes.LINT_SAVED_BY_ALL,
                save.call.func,
                "every rank writes this file, all at the same time",
                "put it under `if dist.get_rank() == 0:`",
                "error",
            )


def _is_replicated(script: Script) -> bool:
    return any(script.calls_of(DDP)) and any(script.calls_of(INIT))


def _is_run_by_all(script: Script, node: ast.AST, hops: int = 6) -> bool:
    """Return whether no condition in this file on the way to a place may distinguish ranks."""
    if not hops:
        return False
    line = getattr(node, "lineno", 0)
    for whole, part in script.above(node):
        if (
            isinstance(whole, ast.If | ast.While | ast.IfExp)
            and part is not whole.test
            and may_choose_ranks(whole.test)
        ):
            return False
        if isinstance(whole, ast.Match) or (
            isinstance(whole, ast.With) and may_choose_ranks(whole.items[0].context_expr)
        ):
            return False
    function = script.function_of(node)
    for each in script.nodes_of[function]:
        if isinstance(each, ast.If) and each.lineno < line and may_choose_ranks(each.test) and _leaves(each):
            return False
    if function is None:
        return True
    if function.decorator_list and not all(_is_plain_mark(mark) for mark in function.decorator_list):
        return False
    callers = [call for call in script.callers.get(function, []) if script.function_of(call) is not function]
    started = _is_started(script, function.name)
    return (bool(callers) or started) and all(_is_run_by_all(script, call, hops - 1) for call in callers)


def _is_started(script: Script, name: str) -> bool:
    spawns = script.calls_of(*SPAWN)
    return any(dotted_name(argument(call, "fn", 0) or call) == name for call in spawns)


def _is_plain_mark(mark: ast.expr) -> bool:
    name = dotted_name(mark.func if isinstance(mark, ast.Call) else mark).rpartition(".")[2]
    return name in {"record", "no_grad", "inference_mode", "staticmethod", "classmethod"}


def _leaves(branch: ast.If) -> bool:
    return any(isinstance(each, ast.Return | ast.Continue | ast.Break | ast.Raise) or (isinstance(each, ast.Call) and "exit" in dotted_name(each.func)) for each in ast.walk(branch))  # fmt: skip


def saved_in_part(view: View) -> Iterator[Finding]:
    """Yield a checkpoint that this file resumes from, and that lacks state which the file trains with."""
    script = view.script
    found = _resumed(script)
    if found is None:
        return
    save, contents = found
    parts = [
        ("the optimizer", _OPTIMIZER, _has_stateful_optimizer(script)),
        ("the learning rate schedule", _SCHEDULE, _has_schedule(script)),
        ("the gradient scaler", _SCALER, _has_scaler(script)),
        ("the averaged weights", _AVERAGE, _has_average(script)),
    ]
    missing = [name for name, words, is_there in parts if is_there and not _any_word(words, contents)]
    if not _any_word(_POSITION, contents) and not _reads_position_of_name(script):
        missing.append("the epoch or step")
    if missing:
        yield Finding(
            codes.LINT_SAVED_IN_PART,
            save.call.func,
            f"the script resumes from this checkpoint, which does not hold {' or '.join(missing)}: a restart loses that state",
            "put the state_dict() of whatever has one into it, and the number of the epoch and step",
        )
    taken = loaded_words(script)
    left = [name for name, words, is_there in parts if is_there and _any_word(words, contents) and taken is not None and not any(map(words.search, taken))]  # fmt: skip
    if left:
        yield Finding(
            codes.LINT_SAVED_IN_PART,
            next(loads_in(script)).func,
            f"the script resumes from this checkpoint and never loads {' or '.join(left)}, which it holds: a restart loses that state",
            "call load_state_dict() of whatever has a state in it",
        )


def saved_without_random_state(view: View) -> Iterator[Finding]:
    """Yield a checkpoint that this file resumes from, without the state of the random number generators."""
    found = _resumed(view.script)
    if found is None:
        return
    save, contents = found
    if not _any_word(_RANDOM, contents) and "rng_state" not in view.script.text:
        yield Finding(
            codes.LINT_NO_RANDOM_STATE,
            save.call.func,
            "the checkpoint does not hold the state of the random number generators: dropout and augmentation differ after a restart",
            "store torch.get_rng_state() and torch.cuda.get_rng_state_all() of each rank, and of Python and NumPy where they draw",
            "note",
        )


def _resumed(script: Script) -> tuple[Save, list[Contents]] | None:
    """Return the first checkpoint that the file writes in a loop and resumes from, and all content that it ever writes.

    None if there is no such checkpoint, or if the text does not show its whole content.
    """
    if not any(resumes(script, load) for load in loads_in(script)) or not any(
        called_name(call) == "backward" for call in script.calls
    ):
        return None
    if _SHARDED.search(script.text):
        return None
    saves = saves_in(script)
    contents = [each for save in saves for each in save.contents]
    if not contents or any(not save.contents for save in saves):
        return None
    repeated = [save for save in saves if save.has_model and is_repeated(script, save.call)]
    if not repeated or not all(each.is_dict for each in repeated[0].contents):
        return None
    if any(not each.is_dict and not each.has_state for each in contents):
        return None
    return repeated[0], contents


def _any_word(pattern: re.Pattern[str], contents: Iterable[Contents]) -> bool:
    return any(pattern.search(word) for each in contents for word in each.words if word not in _NO_WORDS)


_NO_WORDS = {"state_dict"}


def _has_stateful_optimizer(script: Script) -> bool:
    """Return whether an optimizer of torch keeps state between steps; SGD without momentum does not."""
    for call in script.calls:
        origin = script.origin(call.func)
        if not origin.startswith("torch.optim.") or origin.startswith(
            ("torch.optim.lr_scheduler", "torch.optim.swa")
        ):
            continue
        if origin != "torch.optim.SGD":
            return True
        momentum = argument(call, "momentum", 2)
        if has_unpacked(call) or (momentum is not None and not is_constant(momentum, 0)):
            return True
    return False


def _has_schedule(script: Script) -> bool:
    """Return whether a schedule of torch is made and stepped."""
    for call in script.calls:
        if script.origin(call.func).startswith("torch.optim.lr_scheduler."):
            whole = script.parents.get(call)
            targets = whole.targets if isinstance(whole, ast.Assign) else []
            names = {dotted_name(target) for target in targets} - {""}
            if any(dotted_name(step.func) in {f"{name}.step" for name in names} for step in script.calls):
                return True
    return False


def _reads_position_of_name(script: Script) -> bool:
    """Return whether a number is read from a path, as in scripts with the step in a checkpoint's name."""
    parts = {"splitext", "basename", "split", "rsplit", "stem", "search", "match", "findall", "replace"}
    return any(
        script.origin(call.func) == "builtins.int" and any(words_of(each) & parts for each in call.args)
        for call in script.calls
    )


def _has_scaler(script: Script) -> bool:
    """Return whether a gradient scaler is made that no constant switches off."""
    made = [call for call in script.calls if script.origin(call.func).endswith(".GradScaler")]
    return any(not is_constant(argument(call, "enabled"), False) for call in made)


def _has_average(script: Script) -> bool:
    """Return whether averaged weights are kept beside the model: the result of a call, under a telling name."""
    for node in script.nodes:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            made = script.origin(node.value.func) == "torch.optim.swa_utils.AveragedModel"
            names = [dotted_name(target).rpartition(".")[2] for target in node.targets]
            if made or any(re.fullmatch(r"(model_|net_)?ema(_(model|net))?", name) for name in names):
                return True
    return False


def load_without_map(view: View) -> Iterator[Finding]:
    """Yield each torch.load with which every rank of a script for several GPUs puts tensors on rank 0's GPU."""
    script = view.script
    if not _is_replicated(script) and not reads_of_environment(script, {"LOCAL_RANK"}):
        return
    if "cuda" not in script.text or not any(script.calls_of(INIT)):
        return
    loads = list(script.calls_of("torch.load"))
    maps = [call for call in loads if argument(call, "map_location", 1) is not None or has_unpacked(call)]
    scopes = {script.function_of(call) for call in maps}
    for call in loads_in(script):
        if call in maps or script.function_of(call) in scopes or not _is_run_by_all(script, call):
            continue
        yield Finding(
            codes.LINT_MAP_LOCATION,
            call.func,
            "without map_location every rank loads the tensors to the GPU that rank 0 saved them from",
            'pass map_location="cpu", or this rank\'s device',
        )
