"""The job's train.py as `--deep` uses it: each function is called as `main` in train.py calls it."""

from __future__ import annotations

import inspect
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

    from elasticflow.deep.messages import DeepRequest
    from elasticflow.runtime.data.dataset import OpenedDataset

_SET = "build_evaluation_dataset"


class DataTable(NamedTuple):
    """A table of the job file that names data.

    Attributes:
        key: Key of the set: `dataset`, `evaluation` or, with several sets, `evaluation.val`.
        end: Ending of the names of its functions in train.py.
        is_to_be_apart: True if its samples must not be in the training data; they are looked up there.
        takes_one: True if a forward takes one sample: then samples of different sizes never meet in a batch.
    """

    key: str
    end: str = ""
    is_to_be_apart: bool = False
    takes_one: bool = False

    @property
    def is_training(self) -> bool:
        """True for the training data."""
        return self.key == "dataset"

    @property
    def build(self) -> str:
        """Name of the function that opens the data."""
        return "build_dataset" if self.is_training else f"{_SET}{self.end}"

    @property
    def collate(self) -> str:
        """Name of the function that returns the table's own collate function, if there is one."""
        return "build_collate" if self.is_training else f"build_evaluation_collate{self.end}"

    @property
    def metrics(self) -> str:
        """Name of the function that returns the metrics, if there are metrics."""
        return f"build_metrics{self.end}"

    @property
    def step(self) -> str:
        """Name of the step of the evaluation's own, if there is one."""
        return f"evaluation_step{self.end}"


class EntryPoint:
    """The job's train.py, executed as a module.

    Args:
        request: Has the text of train.py and the key of the job file that each function is about.

    Attributes:
        dataset: The opened training data; None before that, and for data shards.
        entries: The Python names in the job file, by key.
    """

    def __init__(self, request: DeepRequest) -> None:
        module = ModuleType("train")
        module.__file__ = "train.py"
        exec(compile(request.entry_point, "train.py", "exec"), module.__dict__)  # noqa: S102  # ours
        self._names: Mapping[str, Any] = vars(module)
        self._keys, self.entries = request.keys, request.entries
        self._apart, self._alone = request.apart, request.alone
        self.dataset: OpenedDataset | None = None

    def __contains__(self, name: str) -> bool:
        """Return True if train.py defines a function or constant of this name."""
        return name in self._names

    def __getitem__(self, name: str) -> Any:
        """Return a function or constant."""
        return self._names[name]

    def get(self, name: str) -> Any:
        """Return a constant, or None if train.py does not define it."""
        return self._names.get(name)

    def key_of(self, function: str) -> str:
        """Return the key of the job file that a function is about."""
        return self._keys[function]

    def call(self, function: str, **known: Any) -> Any:
        """Call a function with the *known* values that it has parameters for, and return its result."""
        known |= {} if self.dataset is None else {"dataset": self.dataset}
        called = self._names[function]
        parameters = inspect.signature(called).parameters
        return called(**{name: value for name, value in known.items() if name in parameters})

    @property
    def training(self) -> DataTable:
        """The table of the training data."""
        return DataTable("dataset", takes_one="dataset" in self._alone)

    @property
    def evaluations(self) -> list[DataTable]:
        """The tables of the evaluation sets."""
        tables = [
            (key.rpartition(".")[0], name.removeprefix(_SET))
            for name, key in self._keys.items()
            if name.startswith(_SET)
        ]
        return [DataTable(table, end, table in self._apart, table in self._alone) for table, end in tables]

    @property
    def lacks_values(self) -> bool:
        """True if arguments of the job stand for values of the training data, and that data is not open."""
        return "VALUES" in self and self.dataset is None

    @property
    def seed(self) -> int:
        """The job's seed."""
        return int(self["SEED"])

    @property
    def precision(self) -> str:
        """Precision of the forward pass."""
        return str(self["GRADIENTS"].precision)

    @property
    def is_exact(self) -> bool:
        """True if the job promises the same bits at any number of workers."""
        return self["GRADIENTS"].virtual_shards is not None

    @property
    def moves_optimizers(self) -> bool:
        """True if the job's step moves the optimizers itself."""
        return bool(self["GRADIENTS"].moves_optimizers)

    @property
    def has_loss(self) -> bool:
        """True if the step is a loss of the model's outputs and the targets."""
        return self.key_of("training_step") == "model.loss"

    @property
    def ignored(self) -> tuple[str, ...]:
        """Names of state that no step depends on."""
        return tuple(self["SNAPSHOTS"].ignore)
