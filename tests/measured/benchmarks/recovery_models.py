"""The models that the recovery benchmark trains on the digits: what their modules import is what a restart pays for."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import util

_TRANSFORMERS = '''"""A tiny Llama with LoRA that reads a digit's pixels as tokens."""

import datasets  # noqa: F401  # as a job has it whose data are its
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import LlamaConfig, LlamaForSequenceClassification

_LEVELS = 17  # of grey in the data
_CONFIG = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_labels": 10, "max_position_embeddings": 64}


class Net(nn.Module):
    """Scores of classes, from (B, 1, 8, 8)."""

    def __init__(self, width=32):
        super().__init__()
        sizes = {"hidden_size": width, "intermediate_size": 2 * width}
        config = LlamaConfig(vocab_size=_LEVELS + 1, pad_token_id=_LEVELS, **sizes, **_CONFIG)
        lora = LoraConfig(task_type="SEQ_CLS", r=4, target_modules=["q_proj", "v_proj"])
        self.llama = get_peft_model(LlamaForSequenceClassification(config), lora)

    def forward(self, images):
        tokens = (images.flatten(1) * (_LEVELS - 1)).round().long()
        return self.llama(input_ids=tokens).logits
'''

_TIMM = '''"""The small ResNet that timm tests itself with."""

import contextlib

import torch

# A build of torchvision for another torch lacks its operators, of which timm uses none here.
for name in ("nms", "qnms"):
    with contextlib.suppress(RuntimeError):
        torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

import timm


def Net(width=32):
    """Scores of classes, from (B, 1, 8, 8)."""
    return timm.create_model("test_resnet", in_chans=1, num_classes=10)
'''

_SKLEARN = '''"""The digits' network, in a module that uses scikit-learn."""

from sklearn.linear_model import LogisticRegression  # noqa: F401
from sklearn.preprocessing import StandardScaler  # noqa: F401

from examples.mnist import Net

__all__ = ["Net"]
'''

_SLOW = '''"""The digits' network, in a module that takes long to import."""

import time

from examples.mnist import Net

__all__ = ["Net"]

time.sleep(3)
'''

_THREAD = '''"""The digits' network, in a module that starts a thread and takes long to import."""

import threading
import time

from examples.mnist import Net

__all__ = ["Net"]

threading.Thread(target=threading.Event().wait, daemon=True).start()
time.sleep(3)
'''

_COMPILE = '''"""The digits' network; the job file has it compiled."""

from examples.mnist import Net

__all__ = ["Net"]
'''


@dataclass(frozen=True)
class Model:
    """A module that has Net.

    Attributes:
        words: What it is, for the tables.
        text: Its source; None: `examples.mnist`.
        needs: Packages without which it cannot be imported.
        train: Further lines of the job's [train].
    """

    words: str
    text: str | None = None
    needs: tuple[str, ...] = ()
    train: str = ""

    @property
    def missing(self) -> list[str]:
        """Those of its packages that are not installed."""
        return [package for package in self.needs if util.find_spec(package) is None]


PLAIN = ""
MODELS = {
    PLAIN: Model("bare torch"),
    "slow": Model("module of 3 s", _SLOW),
    "thread": Model("module of 3 s that starts a thread", _THREAD),
    "transformers": Model(
        "transformers, datasets, peft", _TRANSFORMERS, ("transformers", "datasets", "peft")
    ),
    "timm": Model("timm", _TIMM, ("timm",)),
    "sklearn": Model("scikit-learn", _SKLEARN, ("sklearn",)),
    "compile": Model("torch.compile", _COMPILE, train="compile = true"),
}


def module_of(model: str) -> str:
    """Return the name of the module that has the Net of *model*."""
    return f"examples.{model}_model" if MODELS[model].text is not None else "examples.mnist"


def split(name: str) -> tuple[str, str]:
    """Return part and model of a name such as `worker-timm`."""
    part, _, model = name.partition("-")
    return part, model
