"""What a child process is told that saves a model as its library does."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SaveRequest:
    """A model to be saved.

    Attributes:
        entry_point: Text of a module with the job's factories.
        own: Folders of the job's own code.
        weights: A safetensors file with all of `model.state_dict()`.
        folder: Where it is written; it does not exist yet.
        tokenizer: A folder, or a name that transformers knows, of the tokenizer to be saved beside it.
    """

    entry_point: str
    own: list[str]
    weights: str
    folder: str
    tokenizer: str | None
