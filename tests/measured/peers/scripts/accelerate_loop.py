"""Accelerate, as its guide has it: `save_state`, `load_state` and `skip_first_batches`, projects with automatic names."""

import os
from datetime import timedelta

from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, InitProcessGroupKwargs, ProjectConfiguration, set_seed
from torch.utils.data import DataLoader
from workload import BATCH, EPOCHS, SAVE_EVERY, SEED, STATE, Counted, CountedSGD, Samples, loss_of


class Position:
    """How many steps are done, kept with the rest."""

    step = 0

    def state_dict(self) -> dict[str, int]:
        """Return what is kept."""
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Take what was kept."""
        self.step = state["step"]


def main() -> None:
    """Train."""
    project = ProjectConfiguration(project_dir=str(STATE), automatic_checkpoint_naming=True, total_limit=3)
    timeout = timedelta(seconds=float(os.environ.get("PG_TIMEOUT_S", "1800")))
    groups = InitProcessGroupKwargs(timeout=timeout)
    order = DataLoaderConfiguration(use_seedable_sampler=True)
    accelerator = Accelerator(
        cpu=True, project_config=project, dataloader_config=order, kwargs_handlers=[groups]
    )
    set_seed(SEED)
    model = Counted()
    optimizer = CountedSGD(model.parameters())
    loader = DataLoader(Samples(), batch_size=BATCH // accelerator.num_processes, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    position = Position()
    accelerator.register_for_checkpointing(position)
    saved = sorted(
        (STATE / "checkpoints").glob("checkpoint_*"), key=lambda path: int(path.name.split("_")[1])
    )
    if saved:
        accelerator.load_state(str(saved[-1]))
        project.iteration = int(saved[-1].name.split("_")[1]) + 1
    first, skipped = divmod(position.step, len(loader))
    for epoch in range(first, EPOCHS):
        loader.set_epoch(epoch)
        batches = accelerator.skip_first_batches(loader, skipped) if skipped else loader
        for inputs, targets in batches:
            optimizer.zero_grad()
            accelerator.backward(loss_of(model(inputs), targets))
            optimizer.step()
            position.step += 1
            if position.step % SAVE_EVERY == 0:
                accelerator.save_state()
        skipped = 0
    accelerator.end_training()


if __name__ == "__main__":
    main()
