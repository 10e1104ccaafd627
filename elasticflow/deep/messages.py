"""The request to the child process of `--deep`, and the messages of its report.

The request is a JSON object on standard input; each message is a JSON object on a line of a pipe (`json_codec.py`).
`elasticflow/deep` asks, `elasticflow/deep/child` answers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, get_args

from elasticflow.protocol.json_codec import MessageCodec


@dataclass(frozen=True)
class DeepRequest:
    """The code that the child is to try out.

    Attributes:
        entry_point: The text of the job's train.py.
        keys: The key of the job file that each function of train.py is about, by the function's name.
        entries: The Python names in the job file, by key.
        apart: Keys of the evaluation sets whose samples must not be in the training data.
        alone: Keys of the tables of data of which a forward takes one sample at a time.
        takes_step: True: a step is trained on the CPU.
    """

    entry_point: str
    keys: dict[str, str]
    entries: dict[str, str]
    own: list[str]
    apart: tuple[str, ...]
    alone: tuple[str, ...]
    takes_step: bool


@dataclass(frozen=True)
class Doing:
    """The child's next activity, which may hang or end the process.

    Attributes:
        what: The activity in words, such as "building the model".
        key: Key of the job file that the activity is about.
    """

    what: str
    key: str


@dataclass(frozen=True)
class Problem:
    """A mistake, or a question that the child could not answer.

    Attributes:
        kind: import, factory, result, sample, collate, length, overlap, other_data, state, step, loss, weights, hang, died,
            left, restart, device, memory, unknown.
        remedy: Advice; may be empty.
        frames: Frames in the job's own code, outermost first.
        is_warning: True if it may be intended.
    """

    kind: str
    key: str
    message: str
    remedy: str = ""
    frames: tuple[str, ...] = ()
    is_warning: bool = False


@dataclass(frozen=True)
class Note:
    """A remark: the way a fact was found, or the reason it was not."""

    text: str


@dataclass(frozen=True)
class Facts:
    """Facts of the job; None: not known.

    Attributes:
        sample: The first training sample, described in words.
        trainable: Numbers in the parameters that take a gradient.
        block_bytes: Size of the largest part of a model in [parallel] that is gathered as a whole: a block, or the rest of the model.
        loss: Loss of the first step, as Python prints it.
        sets: Samples of each set of the mixture.
        shares: Share of each set among all samples drawn.
        groups: Parameter groups as in the event `parameters.grouped`, if the job declares groups.
    """

    samples: int | None = None
    sample: str | None = None
    parameters: int | None = None
    trainable: int | None = None
    snapshot_bytes: int | None = None
    block_bytes: int | None = None
    loss: str | None = None
    sets: tuple[int, ...] | None = None
    shares: tuple[float, ...] | None = None
    groups: tuple[dict[str, Any], ...] | None = None

    def known(self) -> dict[str, Any]:
        """Return the known facts by name."""
        return {name: value for name, value in vars(self).items() if value is not None}


@dataclass(frozen=True)
class Done:
    """Everything was tried."""


DeepMessage = Doing | Problem | Note | Facts | Done

MESSAGES: MessageCodec[DeepMessage] = MessageCodec(*get_args(DeepMessage))
