"""What trains in a script: torch's DistributedDataParallel, Accelerate, Fabric, a trainer of a library, and so on."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING, Literal, NamedTuple

from elasticflow.lint.script.script import called_name

if TYPE_CHECKING:
    from elasticflow.lint.script.script import Script

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
    "alone",
    "none",
]
DDP = "torch.nn.parallel.DistributedDataParallel"
INIT = "torch.distributed.init_process_group"
ACCELERATORS = ("accelerate.Accelerator",)
FABRICS = ("lightning_fabric.Fabric", "lightning.Fabric")
JOIN = "elasticflow.join"
_SPAWN = ("torch.multiprocessing.spawn", "torch.multiprocessing.start_processes")
_TRAINERS = ("transformers.Trainer", "transformers.Seq2SeqTrainer", "lightning.Trainer", "lightning.pytorch.Trainer", "lightning.pytorch.cli.LightningCLI", "pytorch_lightning.Trainer", "pytorch_lightning.cli.LightningCLI")  # fmt: skip
_SHARDED = ("deepspeed.initialize", "torch.distributed.fsdp.FullyShardedDataParallel", "torch.distributed.fsdp.fully_shard", "torch.distributed._composable.fsdp.fully_shard", "torch.distributed.tensor.parallel.parallelize_module", "torch.distributed.optim.ZeroRedundancyOptimizer", "torch.distributed.device_mesh.init_device_mesh")  # fmt: skip
_WRAPPED = ("apex.parallel.DistributedDataParallel", "horovod.torch.DistributedOptimizer", "horovod.torch.init")  # fmt: skip
_LOOPS: dict[Kind, tuple[str, ...]] = {
    "accelerate": ACCELERATORS,
    "fabric": FABRICS,
    "ddp": (DDP,),
    "wrapped": _WRAPPED,
}
# What is written by scripts of several processes, however they form them.
_OTHERS = re.compile(
    r"torch\.distributed|DistributedDataParallel|LOCAL_RANK|local_rank|WORLD_SIZE|world_size|\bDDP\b"
)
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
    "alone": "a loop of one process, without DistributedDataParallel",
    "none": "no training loop that this file shows",
}


class Form(NamedTuple):
    """What trains in a script.

    Attributes:
        kind: Which of the known ones.
        node: Where that is seen; None: nowhere.
        rung: 0: torchrun's contract; 1: on `elasticflow.join`; 2: its gradients are exact.
    """

    kind: Kind
    node: ast.AST | None
    rung: int = 0

    @property
    def words(self) -> str:
        """What it is, for a person."""
        return _WORDS[self.kind]


def form_of(script: Script) -> Form:
    """Return what trains in a script; the first that is certain of several."""
    if (join := _first(script, JOIN)) is not None:
        exact = next((call for call in script.calls if called_name(call) == "gradients"), None)
        return Form("joined", join, 1 if exact is None else 2)
    spawn = _first(script, *_SPAWN)
    if (found := _first_of(script, {"trainer": _TRAINERS, "sharded": _SHARDED})) is not None:
        return found
    if spawn is not None:
        return Form("spawned", spawn)
    if (found := _first_of(script, _LOOPS)) is not None:
        return found
    backward = next((call for call in script.calls if called_name(call) == "backward"), None)
    if backward is None:
        return Form("none", None)
    return Form("elsewhere" if _OTHERS.search(script.text) else "alone", backward)


def _first_of(script: Script, forms: dict[Kind, tuple[str, ...]]) -> Form | None:
    for kind, origins in forms.items():
        if (node := _first(script, *origins)) is not None:
            return Form(kind, node)
    return None


def _first(script: Script, *origins: str) -> ast.Call | None:
    return next(script.calls_of(*origins), None)


def trains(script: Script) -> bool:
    """Return whether a file is a script that trains when it is run, and not only the module of a model."""
    if form_of(script).kind == "none" and not any(script.calls_of(INIT)):
        return False
    return any(_is_run(statement) for statement in script.tree.body)


def _is_run(statement: ast.stmt) -> bool:
    """Return whether a statement of the module does more than define."""
    if isinstance(statement, ast.If) and "__name__" in ast.unparse(statement.test):
        return True
    if isinstance(statement, ast.For | ast.While | ast.With):
        return True
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call) and called_name(statement.value) in {"main", "run", "train", "fit", "cli"}  # fmt: skip
