"""What the child process of `--deep` is asked, and what it reports.

The request is one JSON object on standard input, each message one on a line of a pipe (`json_codec.py`).
`elasticflow/deep` asks, `elasticflow/deep/child` answers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from elasticflow.protocol.json_codec import MessageCodec


@dataclass(frozen=True)
class DeepRequest:
    """What the child is to try out.

    Attributes:
        entry_point: The text of the job's train.py.
        keys: The key of the job file that each function of train.py is about, by the function's name.
        entries: What the job names, by key.
        own: Folders of the job's own code.
        apart: Keys of the evaluation sets whose samples are to be looked up in the training data.
        takes_step: A step is to be trained on the CPU.
    """

    entry_point: str
    keys: dict[str, str]
    entries: dict[str, str]
    own: list[str]
    apart: tuple[str, ...]
    takes_step: bool


@dataclass(frozen=True)
class Doing:
    """What comes next: it may hang, or end the process.

    Attributes:
        what: In words, such as "building the model".
        key: Key of the job file that it is about.
    """

    what: str
    key: str


@dataclass(frozen=True)
class Problem:
    """Something that is wrong, or could not be found out.

    Attributes:
        kind: import, factory, result, sample, collate, length, overlap, other_data, state, step, loss, weights, hang, died,
            left, restart, device, memory, unknown.
        key: Key of the job file.
        message: In one line.
        remedy: What to do; may be empty.
        frames: Where in the job's own code, outermost first.
        is_warning: It need not be wrong.
    """

    kind: str
    key: str
    message: str
    remedy: str = ""
    frames: tuple[str, ...] = ()
    is_warning: bool = False


@dataclass(frozen=True)
class Note:
    """How something was found out, or why it was not."""

    text: str


@dataclass(frozen=True)
class Facts:
    """Something that was found out; None: nothing of it.

    Attributes:
        samples: Of the training data.
        evaluation_samples: Of the evaluation's; of several sets, of the last one.
        sample: What the first training sample is, in words.
        parameters: Numbers in the model.
        trainable: Those of them that take a gradient.
        snapshot_bytes: Of a whole snapshot.
        model_bytes: Of the model in it.
        optimizer_bytes: Of the optimizers in it.
        loss: Of the first step, as Python writes it.
        sets: Samples of each set of the mixture.
        shares: Of these sets among all samples drawn.
        groups: Of parameters, each as the event `parameters.grouped` has it, if the job declares some.
    """

    samples: int | None = None
    evaluation_samples: int | None = None
    sample: str | None = None
    parameters: int | None = None
    trainable: int | None = None
    snapshot_bytes: int | None = None
    model_bytes: int | None = None
    optimizer_bytes: int | None = None
    loss: str | None = None
    sets: tuple[int, ...] | None = None
    shares: tuple[float, ...] | None = None
    groups: tuple[dict[str, Any], ...] | None = None

    def known(self) -> dict[str, Any]:
        """Return by name what is not None."""
        return {name: value for name, value in vars(self).items() if value is not None}


@dataclass(frozen=True)
class Done:
    """Everything was tried."""


DeepMessage = Doing | Problem | Note | Facts | Done

MESSAGES: MessageCodec[DeepMessage] = MessageCodec(
    "type", {"doing": Doing, "problem": Problem, "note": Note, "facts": Facts, "done": Done}
)
