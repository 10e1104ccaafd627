"""Assignment of samples to ranks: DistributedSampler and batch sizes."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

from elasticflow.jobfile.diagnostics import codes
from elasticflow.lint.rules.finding import Finding
from elasticflow.lint.rules.launching import reads_of_environment
from elasticflow.lint.script.ranks import words_of
from elasticflow.lint.script.values import is_repeated, passed, words_behind
from elasticflow.python_source.syntax import argument, called_name, dotted_name, has_unpacked, is_constant

if TYPE_CHECKING:
    from collections.abc import Iterator

    from elasticflow.lint.rules.finding import View
    from elasticflow.python_source.script import Script

SAMPLER = "torch.utils.data.DistributedSampler"
LOADER = "torch.utils.data.DataLoader"
# Frameworks that call set_epoch, or replace the script's samplers by their own.
_FRAMEWORKS = {"accelerate", "pytorch_lightning", "lightning", "lightning_fabric", "ignite", "composer", "deepspeed", "mmengine", "mmcv", "catalyst", "ray"}  # fmt: skip
_EVALUATION = re.compile(
    r"(^|_)(val|valid|validation|eval|evaluation|test|testing|dev)(_|\d|$)", re.IGNORECASE
)
_TRAINING = re.compile(r"train", re.IGNORECASE)
_EPOCH = re.compile(r"epoch|(^|_)ep(_|$)", re.IGNORECASE)
_WORLD = re.compile(r"world|num_replicas|nproc|n_?gpu|num_gpu|num_proc|ngpus|size_per|per_rank|micro|device_count|get_world_size|num_devices", re.IGNORECASE)  # fmt: skip


def _is_framework(script: Script) -> bool:
    return bool(script.names.modules & _FRAMEWORKS)


def sampler_without_epoch(view: View) -> Iterator[Finding]:
    """Yield each DistributedSampler of a script that trains for several epochs and never calls set_epoch."""
    script = view.script
    if "set_epoch" in script.text or _is_framework(script):
        return
    if not any(_is_in_epochs(script, call) for call in script.calls if called_name(call) == "backward"):
        return
    for call in script.calls_of(SAMPLER):
        shuffle = argument(call, "shuffle", 3)
        is_default = shuffle is None or is_constant(shuffle, True)
        if not is_default or has_unpacked(call) or _is_for_evaluation(script, call):
            continue
        if is_repeated(script, call):
            continue  # perhaps with a new seed each time
        yield Finding(
            codes.LINT_SET_EPOCH,
            call.func,
            "this sampler never learns the epoch, so every epoch reads the samples in the same order",
            "call sampler.set_epoch(epoch) at the beginning of each epoch",
        )


def _is_in_epochs(script: Script, node: ast.AST, hops: int = 4) -> bool:
    """Return whether a place lies in a loop over epochs, of this function or of one that calls it."""
    loops = [whole for whole, part in script.above(node) if isinstance(whole, ast.For) and part in whole.body]
    if len(loops) > 1 and any(_is_epoch_loop(loop) for loop in loops[1:]):
        return True
    function = script.function_of(node)
    if function is None or not hops:
        return False
    for call in script.callers.get(function, []):
        around = [
            each for each, part in script.above(call) if isinstance(each, ast.For) and part in each.body
        ]
        if (loops and any(_is_epoch_loop(loop) for loop in around)) or _is_in_epochs(script, call, hops - 1):
            return True
    return False


def _is_epoch_loop(loop: ast.For) -> bool:
    """Return whether a loop counts epochs, and more than one."""
    if not isinstance(loop.iter, ast.Call) or called_name(loop.iter) not in {"range", "trange"}:
        return False
    if (
        len(loop.iter.args) == 1
        and isinstance(loop.iter.args[0], ast.Constant)
        and loop.iter.args[0].value == 1
    ):
        return False
    return any(_EPOCH.search(word) for word in words_of(loop.target) | words_of(loop.iter))


def _is_for_evaluation(script: Script, call: ast.Call) -> bool:
    """Return whether a sampler is for evaluation, by the names of its data and of its variable."""
    words = _names_of(script, call)
    return any(_EVALUATION.search(word) for word in words) and not any(map(_TRAINING.search, words))


def _names_of(script: Script, call: ast.Call) -> set[str]:
    data = argument(call, "dataset", 0)
    words = set() if data is None else {dotted_name(data).rpartition(".")[2]}
    for whole, _ in script.above(call):
        if isinstance(whole, ast.Assign):
            words |= {dotted_name(target).rpartition(".")[2] for target in whole.targets}
        elif isinstance(whole, ast.keyword | ast.Call | ast.IfExp):
            continue
        else:
            break
    return words - {""}


def repeated_samples(view: View) -> Iterator[Finding]:
    """Yield each DistributedSampler by which an evaluation of this file counts some samples twice."""
    script = view.script
    if _is_framework(script):
        return
    for call in script.calls_of(SAMPLER):
        if not _is_for_evaluation(script, call) or has_unpacked(call):
            continue
        if not is_constant(argument(call, "shuffle", 3), False):
            continue
        drop_last = argument(call, "drop_last", 5)
        if drop_last is not None and not is_constant(drop_last, False):
            continue
        if _is_cut(script) or not _is_counted_here(script, call):
            continue
        yield Finding(
            codes.LINT_REPEATED,
            call.func,
            "where the samples do not divide by the number of ranks, the sampler repeats some, and the metric counts them twice",
            "evaluate a part per rank without padding, Subset(data, range(rank, len(data), world_size)), and add up sums and counts",
        )


def _is_cut(script: Script) -> bool:
    """Return whether gathered results are cut to a length, which removes the repeated samples."""
    return any(
        isinstance(node, ast.Slice) and node.upper is not None and any("len" in word or "num" in word or "total" in word or "size" in word for word in words_of(node.upper))
        for node in script.nodes
    )  # fmt: skip


def _is_counted_here(script: Script, sampler: ast.Call) -> bool:
    """Return whether a loop of this file iterates over the sampler's loader, and sums results over all ranks."""
    loaders = _loaders_of(script, sampler)
    reduces = any(script.calls_of("torch.distributed.all_reduce", "torch.distributed.reduce"))
    return reduces and any(_is_gone_over(script, name) for name in loaders)


def _loaders_of(script: Script, sampler: ast.Call) -> set[str]:
    """Return the variables that a DataLoader with this sampler is assigned to."""
    names: set[str] = set()
    for call in script.calls_of(LOADER):
        given = argument(call, "sampler", 3)
        values = script.names.assigned(given.id) if isinstance(given, ast.Name) else [given]
        if any(value is not None and sampler in ast.walk(value) for value in values):
            whole = script.parents.get(call)
            if isinstance(whole, ast.Assign):
                names |= {target.id for target in whole.targets if isinstance(target, ast.Name)}
    return names


def _is_gone_over(script: Script, name: str) -> bool:
    """Return whether a loop iterates over a variable, in its function or in a function of this file that gets it."""
    for node in script.nodes:
        if isinstance(node, ast.For) and name in words_of(node.iter):
            return True
    for function, calls in script.callers.items():
        for parameter in (*function.args.posonlyargs, *function.args.args):
            given = [passed(script, call, function, parameter.arg) for call in calls]
            if any(isinstance(value, ast.Name) and value.id == name for value in given):
                loops = [each for each in ast.walk(function) if isinstance(each, ast.For)]
                if any(parameter.arg in words_of(loop.iter) for loop in loops):
                    return True
    return False


def batch_per_rank(view: View) -> Iterator[Finding]:
    """Yield each batch size per rank of a script that may resume with another number of ranks."""
    script = view.script
    if _is_framework(script) or not _is_elastic(script) or _knows_world_size(script):
        return
    samplers = list(script.calls_of(SAMPLER))
    for call in script.calls_of(LOADER):
        size = argument(call, "batch_size", 1)
        given = argument(call, "sampler", 3)
        if size is None or given is None or not samplers or has_unpacked(call):
            continue
        values = script.names.assigned(given.id) if isinstance(given, ast.Name) else [given]
        if not any(value is not None and any(s in ast.walk(value) for s in samplers) for value in values):
            continue
        if any(_EVALUATION.search(word) for word in words_of(call)) or any(map(_WORLD.search, words_behind(script, size))):  # fmt: skip
            continue
        yield Finding(
            codes.LINT_BATCH_PER_RANK,
            size,
            "a batch size per rank: the global batch, and with it the training, changes when the run resumes with another number of ranks",
            "divide a global batch size by the world size, or scale the learning rate with it",
        )


def _is_elastic(script: Script) -> bool:
    """Return whether torchrun starts the script, and the script resumes by itself or declares itself elastic."""
    if not reads_of_environment(script, {"LOCAL_RANK", "RANK", "WORLD_SIZE"}):
        return False
    if "elastic" in script.text and (
        "torch.distributed.elastic" in script.text or "TORCHELASTIC" in script.text
    ):
        return True
    looks = any(script.calls_of("os.path.exists", "os.path.isfile")) and "load_state_dict" in script.text
    return looks and any(script.calls_of("torch.load")) and any(script.calls_of("torch.save"))


def _knows_world_size(script: Script) -> bool:
    return any(
        isinstance(node, ast.BinOp)
        and isinstance(node.op, ast.Div | ast.FloorDiv | ast.Mult)
        and any(_WORLD.search(word) for word in words_of(node))
        for node in script.nodes
    ) or any(
        isinstance(node, ast.AugAssign) and any(map(_WORLD.search, words_of(node))) for node in script.nodes
    )
