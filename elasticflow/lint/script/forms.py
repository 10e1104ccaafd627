"""Recognizes how a script trains: by DistributedDataParallel, Accelerate, Fabric, a library's trainer, and so on."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING, Literal, NamedTuple

from elasticflow.lint.script.ranks import words_of
from elasticflow.python_source.syntax import called_name, dotted_name

if TYPE_CHECKING:
    from elasticflow.python_source.script import Script

Kind = Literal[
    "joined",
    "ddp",
    "accelerate",
    "fabric",
    "trainer",
    "sharded",
    "wrapped",
    "spawned",
    "elsewhere",
    "unclear",
    "alone",
    "none",
]
DDP = "torch.nn.parallel.DistributedDataParallel"
INIT = "torch.distributed.init_process_group"
ACCELERATORS = ("accelerate.Accelerator",)
FABRICS = ("lightning_fabric.Fabric", "lightning.Fabric")
JOIN = "elasticflow.join"
SPAWN = ("torch.multiprocessing.spawn", "torch.multiprocessing.start_processes")
_TRAINERS = ("transformers.Trainer", "transformers.Seq2SeqTrainer", "lightning.Trainer", "lightning.pytorch.Trainer", "lightning.pytorch.cli.LightningCLI", "pytorch_lightning.Trainer", "pytorch_lightning.cli.LightningCLI")  # fmt: skip
_SHARDED = ("deepspeed.initialize", "torch.distributed.fsdp.FullyShardedDataParallel", "torch.distributed.fsdp.fully_shard", "torch.distributed._composable.fsdp.fully_shard", "torch.distributed.tensor.parallel.parallelize_module", "torch.distributed.optim.ZeroRedundancyOptimizer", "torch.distributed.device_mesh.init_device_mesh")  # fmt: skip
_WRAPPED = ("apex.parallel.DistributedDataParallel", "horovod.torch.DistributedOptimizer", "horovod.torch.init")  # fmt: skip
_LOOPS: dict[Kind, tuple[str, ...]] = {
    "accelerate": ACCELERATORS,
    "fabric": FABRICS,
    "ddp": (DDP,),
    "wrapped": _WRAPPED,
}
# Words in scripts of several processes, however they form the group.
_OTHERS = re.compile(
    r"torch\.distributed|DistributedDataParallel|LOCAL_RANK|local_rank|WORLD_SIZE|world_size|\bDDP\b"
)
# Words that may or may not concern several processes; in code, not in comments.
_PERHAPS = re.compile(r"distribut|all_?reduce|init_dist|horovod|(^|_)hvd|slurm|(^|_)rank(_|$)|multi_?(gpu|proc|node)|num_(gpus|processes|nodes)|n_gpus?$|nproc|accelerat|fabric|engine|deepspeed|colossal|mpi(_|$)|strategy", re.IGNORECASE)  # fmt: skip
_WORDS: dict[Kind, str] = {
    "joined": "a loop on elasticflow.join",
    "ddp": "a loop on torch's DistributedDataParallel",
    "accelerate": "a loop on Accelerate",
    "fabric": "a loop on Lightning Fabric",
    "trainer": "the trainer of a library, which has the loop",
    "sharded": "a loop over a sharded model or optimizer",
    "wrapped": "a loop on another library's wrapper",
    "spawned": "a script that can start its own processes",
    "elsewhere": "a loop in several processes, whose model this file does not wrap in DistributedDataParallel",
    "unclear": "a loop of which this file does not show in how many processes it trains",
    "alone": "a loop that this file shows in one process only",
    "none": "no training loop that this file shows",
}


class Form(NamedTuple):
    """The way in which a script trains.

    Attributes:
        kind: One of the known ways.
        node: The node that shows it; None if there is none.
        rung: 0: torchrun's contract; 1: on `elasticflow.join`; 2: exact gradients.
    """

    kind: Kind
    node: ast.AST | None
    rung: int = 0

    @property
    def words(self) -> str:
        """The form in words."""
        return _WORDS[self.kind]


def form_of(script: Script) -> Form:
    """Return the form of a script; of several forms the first certain one."""
    if (join := _first(script, JOIN)) is not None:
        exact = next((call for call in script.calls if called_name(call) == "gradients"), None)
        return Form("joined", join, 1 if exact is None else 2)
    spawn = _first(script, *SPAWN)
    if (found := _first_of(script, {"trainer": _TRAINERS, "sharded": _SHARDED})) is not None:
        return found
    if spawn is not None:
        return Form("spawned", spawn)
    if (found := _first_of(script, _LOOPS)) is not None:
        return found
    backward = next((call for call in script.calls if called_name(call) == "backward"), None)
    if backward is None:
        return Form("none", None)
    return Form(_kind_of_loop(script), backward)


def _kind_of_loop(script: Script) -> Kind:
    """Return the kind of a training loop, by the names in the file."""
    # accelerator.backward(loss), however the accelerator was made
    owners = {
        dotted_name(call.func.value).lower()
        for call in script.calls
        if called_name(call) == "backward" and call.args and isinstance(call.func, ast.Attribute)
    }
    if any("accelerat" in owner for owner in owners):
        return "accelerate"
    if any("fabric" in owner for owner in owners):
        return "fabric"
    if _OTHERS.search(script.text):
        return "elsewhere"
    names = {node.id for node in script.nodes if isinstance(node, ast.Name)}
    names |= {node.attr for node in script.nodes if isinstance(node, ast.Attribute) and not script.origin(node).startswith("torch.")}  # fmt: skip
    names |= {node.name.rpartition(".")[2] for node in script.nodes if isinstance(node, ast.alias)}
    return "unclear" if any(map(_PERHAPS.search, names | script.names.modules)) else "alone"


def _first_of(script: Script, forms: dict[Kind, tuple[str, ...]]) -> Form | None:
    for kind, origins in forms.items():
        if (node := _first(script, *origins)) is not None:
            return Form(kind, node)
    return None


def _first(script: Script, *origins: str) -> ast.Call | None:
    return next(script.calls_of(*origins), None)


def trains(script: Script) -> bool:
    """Return whether a file is a script that trains when run, and not just the module of a model."""
    if form_of(script).kind == "none" and not any(script.calls_of(INIT)):
        return False
    return any(_is_run(statement) for statement in script.tree.body)


def _is_run(statement: ast.stmt) -> bool:
    """Return whether a statement of the module does more than define names."""
    if isinstance(statement, ast.If) and "__name__" in words_of(statement.test):
        return True
    if isinstance(statement, ast.For | ast.While | ast.With):
        return True
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call) and called_name(statement.value) in {"main", "run", "train", "fit", "cli"}  # fmt: skip
