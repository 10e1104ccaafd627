"""Scripts that `elasticflow adopt` changes no line of: each with the reason, at its line."""

from __future__ import annotations

import pytest

from elasticflow.adopt.patch import patched
from elasticflow.adopt.reading.refusal import RefusalError
from tests.adopt.scripts import ACCELERATE, FUNCTIONS, PLAIN, TRAINER

_STEP = "            optimizer.step()\n"
_LOOP = "        for i, (inputs, targets) in enumerate(loader):\n"
# Name: script, what is replaced in it, by what, a part of the reason.
CASES: dict[str, tuple[str, str, str, str]] = {
    "accumulation": (PLAIN, _STEP, "            if i % 4 == 0:\n                optimizer.step()\n", "under a condition"),
    "accumulate": (ACCELERATE, "            loss = ", "            accelerator.accumulate(model)\n            loss = ", "added up"),
    "break": (PLAIN, "            seen += 1\n", "            seen += 1\n            if seen > 9:\n                break\n", "`break` in the loop over batches"),
    "continue": (PLAIN, "            seen += 1\n", "            seen += 1\n            if seen > 9:\n                continue\n", "`continue`"),
    "early stopping": (PLAIN, "        best = max(best, accuracy)\n", "        if accuracy > 0.9:\n            break\n", "`break` in the loop over epochs"),
    "not shuffled": (PLAIN, "DistributedSampler(data)", "DistributedSampler(data, shuffle=False)", "does not shuffle"),
    "no sampler": (PLAIN, "sampler=sampler", "shuffle=True", "no DistributedSampler"),
    "no shuffle": (ACCELERATE, "shuffle=True", "shuffle=False", "does not shuffle"),
    "own sampler": (PLAIN, "sampler = DistributedSampler(data)", "sampler = torch.utils.data.RandomSampler(data)", "not certain to be"),
    "loader of another file": (PLAIN, "loader = DataLoader(data, batch_size=16, sampler=sampler)", "loader = loaders.of(data)", "how loader is made"),
    "batch sampler": (PLAIN, "batch_size=16, sampler=sampler", "batch_sampler=sampler", "batch_sampler"),
    "unpacked": (PLAIN, "batch_size=16, sampler=sampler", "**options", "not in its text"),
    "stream": (PLAIN, "data = points()", "data = load_dataset('x', streaming=True)", "not by index"),
    "group under a condition": (PLAIN, '    dist.init_process_group("gloo")', '    if args.out:\n        dist.init_process_group("gloo")', "under a condition"),
    "no group": (PLAIN, '    dist.init_process_group("gloo")\n', "", "in no places"),
    "schedule first": (PLAIN, "        model.train()\n", "        scheduler.step()\n        model.train()\n", "at the beginning of an epoch"),
    "while": (PLAIN, "    for epoch in range(args.epochs):", "    epoch = 0\n    while epoch < 4:", "`while`"),
    "several trainings": (PLAIN, "    main()\n", "    for fold in range(3):\n        main()\n", "three loops"),
    "two models": (PLAIN, "    model = DDP(network())\n", "    other = DDP(network())\n    model = DDP(network())\n", "several models"),
    "gathers": (PLAIN, "            seen += 1\n", "            seen += 1\n            dist.all_gather(parts, inputs)\n", "gather tensors"),
    "rates are multiplied first": (PLAIN, "        model.train()\n", "        for group in optimizer.param_groups:\n            group['lr'] *= 0.5\n        model.train()\n", "at the beginning of an epoch"),
    "another loader in each epoch": (PLAIN, "        model.train()\n", "        loader = DataLoader(data, batch_size=8, sampler=sampler)\n        model.train()\n", "another one in each epoch"),
    "another model in each epoch": (PLAIN, "        model.train()\n", "        model = torch.compile(model)\n", "another one in each epoch"),
    "an average elsewhere": (PLAIN.replace("def main()", "def average(model):\n    ema = AveragedModel(model)\n    return ema\n\n\ndef main()"), "import time\n", "import time\nfrom torch.optim.swa_utils import AveragedModel\n", "follow the model"),
    "spawned": (PLAIN, "    main()\n", "    torch.multiprocessing.spawn(main, nprocs=2)\n", "starts processes itself"),
    "one process": (PLAIN, PLAIN, "import torch\nfor x in data:\n    model(x).backward()\n", "one process"),
    "sharded": (PLAIN, "    model = DDP(network())\n", "    model = torch.distributed.fsdp.FullyShardedDataParallel(network())\n", "sharded"),
    "library": (PLAIN, PLAIN, "from transformers import Trainer\nTrainer(model).train()\n", "library's trainer"),
    "called by a decorator": (FUNCTIONS, "def main():", "@find_executable_batch_size\ndef main():", "by its decorator"),
    "also measures": (FUNCTIONS, "        scheduler.step()\n", "        train(args, model, loader, optimizer, epoch)\n        scheduler.step()\n", "several places"),
    "behind the end": (PLAIN, "    dist.destroy_process_group()\n", "    dist.destroy_process_group()\n    print(best)\n", "follows the end"),
    "several ends": (PLAIN, "    dist.destroy_process_group()\n", "    dist.destroy_process_group()\n    dist.destroy_process_group()\n", "several places"),
    "loading elsewhere": (TRAINER, "        self.model = DDP(self.model)\n", "        self.loaded = self._load(path)\n        self.model = DDP(self.model)\n", "not certain"),
    "else initializes": (TRAINER, "            self._load(path)\n", "            self._load(path)\n        else:\n            initialize(model)\n", "does other things"),
    "loaded and used": (TRAINER, "            self._load(path)\n", "            self._load(path)\n            self.found = path\n        print(self.found)\n", "is used elsewhere"),
    "unknown start": (TRAINER, "        self.epochs_run = 0\n", "        self.epochs_run = path.count('x')\n", "is 0 without a checkpoint"),
    "schedule in a function": (
        PLAIN.replace("def main()", "def end(scheduler):\n    scheduler.step()\n\n\ndef main()"),
        "        scheduler.step()\n", "        end(scheduler)\n", "does not show it",
    ),
    "trackers": (ACCELERATE, "    loader = DataLoader", "    accelerator.init_trackers('x')\n    loader = DataLoader", "trackers"),
    "own state": (TRAINER, '{"model": self.model.module.state_dict(), ', '{"model": self.model.module.state_dict(), "ema": self.ema.state_dict(), ', "self.ema"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_script_that_is_not_certain_is_not_patched(name: str) -> None:
    """The reason names what stands in the way, and where."""
    text, old, new, reason = CASES[name]
    assert old in text
    with pytest.raises(RefusalError) as caught:
        patched(text.replace(old, new, 1))
    told = caught.value.reason
    assert reason in told.message
    assert told.remedy
