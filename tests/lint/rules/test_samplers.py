"""DistributedSampler without an epoch, in an evaluation, and batch sizes per rank."""

from __future__ import annotations

import pytest

from tests.lint.scripts import codes

TRAIN = """
def main(data, model, args):
    sampler = {sampler}
    loader = DataLoader(data, batch_size=32, sampler=sampler)
    for epoch in {epochs}:
        {first}
        for x in loader:
            {step}
"""


def script(sampler: str = "DistributedSampler(data)", epochs: str = "range(args.epochs)", first: str = "pass", step: str = "model(x).backward()") -> str:  # fmt: skip
    """Return a loop over epochs."""
    return TRAIN.format(sampler=sampler, epochs=epochs, first=first, step=step)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (script(), ["EF601"]),
        (script("DistributedSampler(data, shuffle=True)"), ["EF601"]),
        (script("torch.utils.data.distributed.DistributedSampler(data) if args.ddp else None"), ["EF601"]),
        (script(step="run(model, x)") + "def run(model, x):\n    model(x).backward()\n", ["EF601"]),
        (script(first="sampler.set_epoch(epoch)"), []),
        (script(first="loader.sampler.set_epoch(epoch)"), []),
        (script("DistributedSampler(data, shuffle=False)"), []),
        (script("DistributedSampler(data, shuffle=args.shuffle)"), []),
        (script("DistributedSampler(data, **options)"), []),
        (script(epochs="range(1)"), []),
        (script(epochs="configs"), []),
        (script(step="evaluate(model, x)"), []),
        (script("RandomSampler(data)"), []),
        ("from accelerate import Accelerator\n" + script(), []),
        ("from lightning.fabric import Fabric\n" + script(), []),
    ],
)
def test_set_epoch(body: str, expected: list[str]) -> None:
    """Told where the whole training stands in the file, and nobody else may call it."""
    assert codes(body) == expected


EVALUATE = """
def evaluate(model, val_set):
    sampler = {sampler}
    loader = DataLoader(val_set, 64, sampler=sampler)
    total = torch.zeros(1)
    for x in loader:
        total += model(x)
    {after}
"""


@pytest.mark.parametrize(
    ("sampler", "after", "expected"),
    [
        ("DistributedSampler(val_set, shuffle=False)", "dist.all_reduce(total)", ["EF602"]),
        ("DistributedSampler(val_set, shuffle=False, drop_last=False)", "dist.reduce(total, 0)", ["EF602"]),
        ("DistributedSampler(val_set, shuffle=False, drop_last=True)", "dist.all_reduce(total)", []),
        ("DistributedSampler(val_set, shuffle=False)", "dist.all_gather(all, total); all = all[:len(val_set)]; dist.all_reduce(n)", []),
        ("DistributedSampler(val_set, shuffle=False)", "merge(total)", []),
        ("DistributedSampler(train_set, shuffle=False)", "dist.all_reduce(total)", []),
        ("DistributedSampler(val_set)", "dist.all_reduce(total)", []),
        ("SequentialSampler(val_set)", "dist.all_reduce(total)", []),
    ],
)  # fmt: skip
def test_repeated_samples(sampler: str, after: str, expected: list[str]) -> None:
    """Told where the metric is summed over ranks in this file and nothing takes the repeated samples away."""
    assert codes(EVALUATE.format(sampler=sampler, after=after)) == expected


ELASTIC = """
rank = int(os.environ["{variable}"])
path = name()
if os.path.exists(path):
    model.load_state_dict(torch.load(path, map_location="cpu"))
loader = DataLoader(data, batch_size={size}, sampler=DistributedSampler(data))
torch.save(model.state_dict(), path)
"""


@pytest.mark.parametrize(
    ("variable", "size", "expected"),
    [
        ("RANK", "64", ["EF603"]),
        ("LOCAL_RANK", "args.batch_size", ["EF603"]),
        ("RANK", "64 // dist.get_world_size()", []),
        ("RANK", "args.batch_size // world_size", []),
        ("RANK", "args.batch_size_per_gpu", []),
        ("SLURM_PROCID", "64", []),
    ],
)
def test_batch_per_rank(variable: str, size: str, expected: list[str]) -> None:
    """Told of a script that torchrun starts and that continues by itself."""
    body = ELASTIC.format(variable=variable, size=size)
    assert codes(body) == expected
    assert codes(body + "lr = 0.1 * dist.get_world_size()\n") == []
    assert codes(body.replace("os.path.exists(path)", "args.path")) == []
