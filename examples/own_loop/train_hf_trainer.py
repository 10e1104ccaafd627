"""The Trainer of Transformers, resuming in the midst of an epoch, at any number of workers.

    python train_hf_trainer.py
    elasticflow run hf_trainer.toml

A callback finishes each step, and has the Trainer stop where all workers were asked to leave. A subclass hands the Trainer its
batches, and what the newest snapshot holds, with the best metric and what callbacks such as EarlyStoppingCallback
have counted. Checkpoints of the Trainer's own are not needed. A batch is a step:
`gradient_accumulation_steps` stays 1. Where ranks have unequal parts, the Trainer weighs them by their tokens.
"""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import ExportableState

import elasticflow as ef

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

VOCABULARY, LENGTH = 32, 16


class Sums(Dataset[dict[str, torch.Tensor]]):
    """Sequences of which each number is the sum of the two before it, modulo the vocabulary."""

    def __init__(self, samples: int = 512) -> None:
        generator = torch.Generator().manual_seed(0)
        first = torch.randint(VOCABULARY, (samples, 2), generator=generator)
        columns = [first[:, 0], first[:, 1]]
        while len(columns) < LENGTH:
            columns.append((columns[-1] + columns[-2]) % VOCABULARY)
        self.rows = torch.stack(columns, dim=1)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


class Batches:
    """What the Trainer takes for its loader: this rank's parts of the run's batches, from where the run continues."""

    def __init__(self, run: ef.Run, dataset: Any, size: int, steps: int) -> None:
        self.run, self.dataset, self.size, self.steps = run, dataset, size, steps

    def __iter__(self) -> Iterator[Any]:
        for batch in self.run.batches(self.dataset, size=self.size, steps=self.steps):
            yield batch.data


class FinishSteps(TrainerCallback):
    """Tells the run of each step; at the end, the process ends with the run."""

    def __init__(self, run: ef.Run, pause: float) -> None:
        self.run, self.pause = run, pause
        self.loss: torch.Tensor | None = None

    def on_step_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """The Trainer has moved the weights and the schedule."""
        self.run.step(loss=self.loss)
        time.sleep(self.pause)
        control.should_training_stop = control.should_training_stop or self.run.should_leave


class Progress:
    """What the Trainer's evaluations have found: without it an early stopping counts anew after a restart."""

    def __init__(self, state: Any, callbacks: list[Any]) -> None:
        self.state = state
        self.callbacks = [each for each in callbacks if isinstance(each, ExportableState)]

    def state_dict(self) -> dict[str, Any]:
        """Return the best metric, where it was measured, and what the callbacks have counted."""
        best = {name: value for name, value in vars(self.state).items() if name.startswith("best_")}
        return {"best": best, "callbacks": [each.state()["attributes"] for each in self.callbacks]}

    def load_state_dict(self, held: dict[str, Any]) -> None:
        """Put it back."""
        vars(self.state).update(held["best"])
        for callback, attributes in zip(self.callbacks, held["callbacks"], strict=True):
            vars(callback).update(attributes)


class ElasticTrainer(Trainer):
    """A Trainer of which the run brings the batches and keeps the state."""

    def __init__(
        self, run: ef.Run, *, size: int, pause: float, callbacks: Sequence[Any] = (), **options: Any
    ) -> None:
        self.run, self.size, self.steps = run, size, FinishSteps(run, pause)
        super().__init__(**options, callbacks=[self.steps, *callbacks])

    def get_train_dataloader(self) -> Any:
        """Return the run's batches in place of a DataLoader and its sampler."""
        return Batches(self.run, self.train_dataset, self.size, self.args.max_steps)

    def training_step(self, *given: Any, **named: Any) -> torch.Tensor:
        """Make the gradients, as ever, and note the loss."""
        self.steps.loss = loss = super().training_step(*given, **named)
        return loss

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Make the schedule, the last of what is kept; then the newest snapshot says where training continues."""
        scheduler = super().create_scheduler(num_training_steps, optimizer)
        progress = Progress(self.state, self.callback_handler.callbacks)
        self.run.keep(model=self.model, optimizer=self.optimizer, scheduler=scheduler, progress=progress)
        self.state.global_step = self.run.position.step
        return scheduler


def main() -> None:
    """Train as one of any number of workers."""
    parser = argparse.ArgumentParser(description="Train a small GPT-2 on sums.")
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds after each step")
    options = parser.parse_args()

    # First: the Trainer takes the process group that is there. The rest of its record is only shown.
    run = ef.join(seed=1234, ignore="include.progress")
    torch.manual_seed(1234)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=2)
    )
    trainer = ElasticTrainer(
        run,
        size=32,
        pause=options.pause,
        model=model,
        train_dataset=Sums(),
        args=TrainingArguments(
            output_dir="runs/hf-trainer",
            max_steps=options.steps,
            learning_rate=1e-2,
            logging_steps=16,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=run.device.type == "cpu",
        ),
    )
    trainer.train()
    run.finish()


if __name__ == "__main__":
    main()
