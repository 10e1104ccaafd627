"""Lightning, as its documentation has it: a module, `ModelCheckpoint`, and `ckpt_path="last"`."""

import os
from datetime import timedelta

import lightning as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader, DistributedSampler
from workload import BATCH, EPOCHS, SAVE_EVERY, SEED, STATE, Counted, CountedSGD, Samples, loss_of


class Resumable(DataLoader):
    """A loader that continues in the middle of an epoch."""

    done = 0

    def __iter__(self):
        """Yield the batches that are left."""
        first = self.done % len(self)  # an epoch's last batch may be the last that was asked for
        for number, batch in enumerate(super().__iter__(), 1):
            if number > first:
                self.done = number
                yield batch
        self.done = 0

    def state_dict(self):
        """Return how many batches of the epoch are done."""
        return {"done": self.done}

    def load_state_dict(self, state):
        """Take what was kept."""
        self.done = state["done"]


class Module(pl.LightningModule):
    """The model and its step."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Counted()

    def training_step(self, batch, number):
        """Return the loss of a batch."""
        inputs, targets = batch
        return loss_of(self.model(inputs), targets)

    def configure_optimizers(self):
        """Return the optimizer."""
        return CountedSGD(self.parameters())


def main() -> None:
    """Train."""
    pl.seed_everything(SEED)
    nodes, workers = int(os.environ["GROUP_WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
    checkpoints = ModelCheckpoint(
        dirpath=STATE, every_n_train_steps=SAVE_EVERY, save_last=True, enable_version_counter=False
    )
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=workers,
        num_nodes=nodes,
        strategy=DDPStrategy(
            process_group_backend="gloo",
            timeout=timedelta(seconds=float(os.environ.get("PG_TIMEOUT_S", "1800"))),
        ),
        max_epochs=EPOCHS,
        callbacks=[checkpoints],
        logger=False,
        use_distributed_sampler=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=STATE,
    )
    dataset, world = Samples(), nodes * workers
    sampler = DistributedSampler(dataset, world, int(os.environ["RANK"]), seed=SEED)
    loader = Resumable(dataset, batch_size=BATCH // world, sampler=sampler)
    trainer.fit(Module(), loader, ckpt_path="last")


if __name__ == "__main__":
    main()
