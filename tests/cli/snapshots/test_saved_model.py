"""A model saved by its own `save_pretrained`, built by the job's code in another process."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from elasticflow.cli.snapshots.saved_model import save
from elasticflow.errors import ExportError, StateError
from elasticflow.jobfile.load import require_job
from elasticflow.jobfile.tables.job import Job
from elasticflow.protocol.child_processes import SaveRequest
from elasticflow.runtime.state import save_pretrained
from tests.end_to_end.harness import ROOT

pytestmark = pytest.mark.usefixtures("real_processes")

MODEL = """
import json
import os
from pathlib import Path

import torch
from safetensors.torch import save_file


class Net(torch.nn.Linear):
    def __init__(self, width):
        super().__init__(width, 2)

    def save_pretrained(self, folder):
        folder = Path(folder)
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"width": self.in_features, "flag": os.environ["FLAG"]}))
        save_file(self.state_dict(), folder / "model.safetensors")
"""


def job(entry: str = "named:Net", width: int = 3) -> Job:
    """Return a job whose model is *entry*."""
    return Job.model_validate(
        {
            "job": {"name": "small"},
            "model": {"entry": entry, "args": {"width": width}, "loss": "torch.nn.functional:cross_entropy"},
            "optimizer": {"entry": "torch.optim:SGD"},
            "dataset": {"entry": "named:data", "global_batch_size": 8},
            "train": {"epochs": 1},
            "env": {"FLAG": "set"},
        }
    )


def test_model_is_saved_with_the_snapshots_weights(tmp_path: Path) -> None:
    """With its own files; the job's variables are there."""
    (tmp_path / "named.py").write_text(MODEL)
    weights = {"weight": torch.randn(2, 3), "bias": torch.randn(2)}
    save_file(weights, tmp_path / "weights")
    save(job(), tmp_path, tmp_path / "weights", tmp_path / "out", None)
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {"width": 3, "flag": "set"}
    saved = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(saved[key], weights[key]) for key in weights)


@pytest.mark.nightly  # two processes import transformers and peft
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore::FutureWarning")  # peft's, of transformers
def test_an_adapter_is_loaded_again_onto_its_base_model(tmp_path: Path) -> None:
    """The lora example's, as peft reads it: the same outputs, to the last bit, as the model that was trained."""
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    lora = require_job(ROOT / "examples" / "lora" / "job.toml").job
    assert lora is not None
    torch.manual_seed(1)
    base = lora.model.args["model"]["args"]["config"]["args"]
    trained = peft.get_peft_model(
        transformers.LlamaForCausalLM(transformers.LlamaConfig(**base)),
        peft.LoraConfig(**lora.model.args["peft_config"]["args"]),
    ).eval()
    for parameter in trained.parameters():
        if parameter.requires_grad:
            parameter.data += torch.randn_like(parameter) / 10
    weights = {name: tensor.clone() for name, tensor in trained.state_dict().items()}
    save_file(weights, tmp_path / "weights")
    save(lora, ROOT / "examples" / "lora", tmp_path / "weights", tmp_path / "adapter", None)

    torch.manual_seed(1)
    again = transformers.LlamaForCausalLM(transformers.LlamaConfig(**base))
    ids = torch.arange(24).view(2, 12)
    untrained = again(input_ids=ids).logits
    loaded = peft.PeftModel.from_pretrained(again, tmp_path / "adapter").eval()
    with torch.no_grad():
        expected, found = trained(input_ids=ids).logits, loaded(input_ids=ids).logits
    assert torch.equal(expected, found)
    assert not torch.allclose(untrained, found)


def test_code_that_is_gone_is_refused(tmp_path: Path) -> None:
    """What the other process says is the error."""
    (tmp_path / "named.py").write_text(MODEL)
    save_file({"weight": torch.randn(2, 3), "bias": torch.randn(2)}, tmp_path / "weights")
    with pytest.raises(ExportError) as caught:
        save(job("named:Gone"), tmp_path, tmp_path / "weights", tmp_path / "out", None)
    assert "ImportError: cannot import name 'Gone'" in caught.value.message
    assert not (tmp_path / "out").exists()


class Saving(torch.nn.Linear):
    """A model that knows how it is saved."""

    def save_pretrained(self, folder: str) -> None:
        """Write nothing that anybody reads."""
        Path(folder).mkdir()


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (torch.nn.Linear(3, 2), "model.entry returns a Linear, which has no save_pretrained()"),
        (Saving(4, 2), "weight has shape (2, 3) in the snapshot, (2, 4) in the job"),
    ],
)
def test_what_cannot_be_saved_is_refused(model: torch.nn.Linear, said: str, tmp_path: Path) -> None:
    """A model without a way of its own, another model than the snapshot's."""
    save_file({"weight": torch.randn(2, 3), "bias": torch.randn(2)}, tmp_path / "weights")
    request = SaveRequest("", [], str(tmp_path / "weights"), str(tmp_path / "out"), None)
    with pytest.raises(StateError, match=re.escape(said)):
        save_pretrained.save(model, request)
    assert not (tmp_path / "out").exists()
