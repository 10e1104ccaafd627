"""How a model is trained, told by what its `forward` takes and returns."""

from __future__ import annotations

from typing import Any

import pytest

from elasticflow.scaffold.candidates import candidates
from elasticflow.scaffold.steps import Step, loss_of_outputs, losses_in, step_for

HEAD = "import torch\nimport torch.nn.functional as F\nfrom torch import nn\n"


def _model(forward: str, rest: str = "", base: str = "nn.Module", init: str = "pass") -> tuple[Any, str]:
    body = "".join(f"        {line}\n" for line in forward.splitlines()[1:])
    text = f"{HEAD}\nclass Net({base}):\n    def __init__(self):\n        {init}\n"
    text += f"    def forward(self, {forward.splitlines()[0]}):\n{body}\n{rest}"
    return next(each for each in candidates(text) if each.name == "Net"), text


def _step(forward: str, rest: str = "") -> Step | None:
    model, text = _model(forward, rest)
    return step_for(model, losses_in(text), "net")


@pytest.mark.parametrize(
    ("forward", "line"),
    [
        ("idx, targets=None\nloss = None\nreturn logits, loss", "return model(inputs, targets=targets)[1]"),
        (
            "x, y=None\nreturn (F.mse_loss(x, y), x)",
            "return model(inputs, y=targets)[0]",
        ),
        (
            "x, labels\nreturn {'loss': self.f(x), 'logits': x}",
            'return model(inputs, labels=targets)["loss"]',
        ),
        ("a, b, target\nreturn F.cross_entropy(a, target)", "return model(*inputs, target=targets)"),
        ("x\nloss = x.sum()\nreturn loss", "return model(inputs)"),
        (
            "input_ids, attention_mask, labels=None\nreturn Output(loss=loss, logits=logits)",
            "return model(**batch).loss",
        ),
    ],
)
def test_a_model_that_computes_its_loss_gets_a_step(forward: str, line: str) -> None:
    """A loss of outputs and targets would be called with what is none: the step takes the model's own."""
    step = _step(forward)
    assert step is not None
    assert line in step.text
    assert not step.is_draft
    assert "computes the loss itself" in step.reason
    compile(step.text, "step", "exec")


def test_names_tell_how_a_loss_of_several_values_is_called() -> None:
    """A variational autoencoder; its loss is a sum over the batch, so the number of samples is returned with it."""
    loss = "def loss_function(recon_x, x, mu, logvar):\n    return F.mse_loss(recon_x, x, reduction='sum')\n"
    step = _step("x\nmu, logvar = self.encode(x)\nreturn self.decode(mu), mu, logvar", loss)
    assert step is not None
    assert "return loss_function(outputs[0], inputs, outputs[1], outputs[2]), len(inputs)" in step.text
    assert "from net import loss_function" in step.text
    compile(step.text, "step", "exec")


@pytest.mark.parametrize(
    ("forward", "told"),
    [
        ("input, hidden\nreturn F.log_softmax(input, 1), hidden", "takes input, hidden and returns"),
        ("one, two\nreturn one * two", "takes one, two"),
        ("x\nreturn self.decode(x), x", "takes x and returns (self.decode(x), x)"),
    ],
)
def test_what_no_loss_is_called_with_gets_a_draft(forward: str, told: str) -> None:
    """Nothing is guessed: a person writes the loss, and is told what `forward` takes and returns."""
    step = _step(forward)
    assert step is not None
    assert step.is_draft
    assert told in step.reason
    assert "raise NotImplementedError" in step.text
    compile(step.text, "step", "exec")


def test_a_model_with_a_training_step_of_its_own() -> None:
    """As Lightning's modules have it: called with the batch and its number."""
    text = HEAD + (
        "import lightning as L\nclass Lit(L.LightningModule):\n    def forward(self, x): return x\n"
        "    def training_step(self, batch, batch_idx): ...\n    def configure_optimizers(self): ...\n"
        "class Data(L.LightningDataModule): ...\n"
    )
    (model,) = candidates(text)
    step = step_for(model, (), "net")
    assert step is not None
    assert "model.training_step(batch, 0)" in step.text
    compile(step.text, "step", "exec")


@pytest.mark.parametrize(
    ("forward", "init", "expected"),
    [
        ("x\nreturn self.l(x)", "pass", ("torch.nn.functional:cross_entropy", True)),
        ("x\nout = F.log_softmax(x, dim=1)\nreturn out", "pass", ("torch.nn.functional:nll_loss", False)),
        ("x\nreturn self.l(x)", "self.l = nn.LogSoftmax(1)", ("torch.nn.functional:nll_loss", False)),
        ("x\nreturn torch.sigmoid(x)", "pass", ("torch.nn.functional:binary_cross_entropy", True)),
    ],
)
def test_the_loss_fits_what_forward_ends_in(forward: str, init: str, expected: tuple[str, bool]) -> None:
    """Log-probabilities are no scores: cross_entropy would take their logarithm again."""
    model, _ = _model(forward, init=init)
    assert loss_of_outputs(model) == expected
    assert step_for(model, (), "net") is None
