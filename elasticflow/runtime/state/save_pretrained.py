"""A model of transformers or peft saved as its library saves it: main of a child process of `snapshots export`.

`python -m elasticflow.runtime.state.save_pretrained`, with a `SaveRequest` as JSON on standard input. The model is built by
the job's own code. What goes wrong is said as one line of JSON, the last of standard output.
"""

from __future__ import annotations

import json
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from elasticflow.errors import ElasticflowError, StateError
from elasticflow.protocol.child_processes import SaveRequest
from elasticflow.protocol.json_codec import from_json
from elasticflow.runtime.state.loading import load_weights

if TYPE_CHECKING:
    from torch import nn

_REMEDY = "export it with --format safetensors"


def main() -> int:
    """Save the model; return the exit code."""
    request = from_json(SaveRequest, json.load(sys.stdin))
    try:
        sys.path[:0] = request.own
        code = ModuleType("train")
        code.__file__ = "train.py"
        exec(compile(request.entry_point, "train.py", "exec"), code.__dict__)  # noqa: S102  # ours
        save(code.build_model(), request)
    except ElasticflowError as error:
        return _told(error.message, error.remedy)
    except Exception as error:  # noqa: BLE001  # the job's own code, or its libraries
        return _told(f"{type(error).__name__}: {error}", None)
    return 0


def save(model: nn.Module, request: SaveRequest) -> None:
    """Give the model the weights, and write it into the folder as `save_pretrained` does, the tokenizer beside it.

    Raises:
        StateError: the model is not the snapshot's, or none that knows how it is saved.
    """
    save_model: Any = getattr(model, "save_pretrained", None)
    if not callable(save_model):
        what = f"model.entry returns a {type(model).__name__}, which has no save_pretrained()"
        raise StateError(what, _REMEDY)
    load_weights(model, request.weights)
    save_model(request.folder)
    if request.tokenizer is not None:
        import transformers  # type: ignore[import-not-found,unused-ignore]

        transformers.AutoTokenizer.from_pretrained(request.tokenizer).save_pretrained(request.folder)


def _told(message: str, remedy: str | None) -> int:
    sys.stdout.write("\n" + json.dumps({"error": message, "help": remedy}) + "\n")
    sys.stdout.flush()
    return 1


if __name__ == "__main__":
    sys.exit(main())
