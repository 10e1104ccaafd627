"""Checkpoints: written in place, by all ranks, in part, loaded to one GPU; and what only looks alike."""

from __future__ import annotations

import re

import pytest

from elasticflow.lint.check import lint_source
from tests.lint.scripts import HEAD, codes, found

IN_PLACE = [
    "for e in range(9):\n    torch.save(model.state_dict(), 'last.pt')\ntorch.save(model.state_dict(), 'final.pt')",
    "for e in range(9):\n    torch.save(model.state_dict(), 'last.pt')",
    "path = os.path.join(args.out, 'last.pt')\nfor e in range(9):\n    torch.save({'m': model.state_dict()}, path)",
    (
        "def save(e):\n    state = {'m': model.state_dict(), 'epoch': e}\n    with open('last.pt', 'wb') as f:\n        torch.save(state, f)\n"
        "for e in range(9):\n    save(e)"
    ),
    (
        "class T:\n    def __init__(self, path):\n        self.path = path\n    def save(self):\n        torch.save(self.model.state_dict(), self.path)\n"
        "    def train(self):\n        while True:\n            self.save()\nT('last.pt').train()"
    ),
    "def save(state, path='last.pt'):\n    torch.save(state, path)\nfor e in range(9):\n    save({'m': model.state_dict()})",
]
NOT_IN_PLACE = [
    "torch.save(model.state_dict(), 'last.pt')",  # once, at the end
    "for e in range(9):\n    torch.save(model.state_dict(), f'{e}.pt')",
    "for e in range(9):\n    torch.save(model.state_dict(), 'epoch_%d.pt' % e)",
    "for e in range(9):\n    torch.save(model.state_dict(), 'epoch_{}.pt'.format(e))",
    "for e in range(9):\n    path = f'{e}.pt'\n    torch.save(model.state_dict(), path)",
    "for e in range(9):\n    torch.save(model.state_dict(), 'new')\n    os.replace('new', 'last.pt')",
    "for e in range(9):\n    torch.save(model.state_dict(), path.with_suffix('.new'))\n    path.with_suffix('.new').rename(path)",
    "for e in range(9):\n    torch.save(model.state_dict(), 'last.pt')\n    if best:\n        torch.save(model.state_dict(), 'best.pt')",
    "import shutil\nfor e in range(9):\n    torch.save(model.state_dict(), 'last.pt')\n    shutil.copy('last.pt', f'{e}.pt')",
    "import io\nfor e in range(9):\n    buffer = io.BytesIO()\n    torch.save(model.state_dict(), buffer)",
    "for e in range(9):\n    torch.save(losses, 'losses.pt')",  # no weights
    "for e in range(9):\n    torch.save(model.state_dict(), name_of(e))",
    "def save(path):\n    torch.save(model.state_dict(), path)\nfor e in range(9):\n    save(f'{e}.pt')",
    "from fsspec import save\nfor e in range(9):\n    save(model.state_dict(), 'last.pt')",
]


@pytest.mark.parametrize("body", IN_PLACE)
def test_saves_over_the_only_checkpoint(body: str) -> None:
    """In a loop, in what a loop calls, by a path that is the same each time."""
    assert codes(body + "\n") == ["EF611"]


@pytest.mark.parametrize("body", NOT_IN_PLACE)
def test_other_saves(body: str) -> None:
    """Another path each time, several files, a rename, no file, no checkpoint."""
    assert codes(body + "\n") == []


SETUP = "def main(model, optimizer, rank, args):\n    dist.init_process_group()\n    model = DDP(model)\n"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("torch.save(model.state_dict(), 'w.pt')", ["EF612"]),
        ("torch.save({'m': model.module.state_dict()}, args.path)", ["EF612"]),
        ("torch.save(model.state_dict(), f'w_{rank}.pt')", []),
        ("if rank == 0: torch.save(model.state_dict(), 'w.pt')", []),
        ("if rank % args.gpus == 0: torch.save(model.state_dict(), 'w.pt')", []),
        ("if args.master: torch.save(model.state_dict(), 'w.pt')", []),
        ("if rank != 0: return\n    torch.save(model.state_dict(), 'w.pt')", []),
        ("with first_rank(): torch.save(model.state_dict(), 'w.pt')", []),
        ("torch.save(args, 'args.pt')", []),
        ("save_on_master(model.state_dict(), 'w.pt')", []),
    ],
)
def test_saves_by_every_rank(line: str, expected: list[str]) -> None:
    """Where nothing on the way there may tell ranks apart, and the path has none."""
    assert codes(f"{SETUP}    {line}\nmain(None, None, None, None)\n") == expected


def test_a_save_is_every_ranks_by_all_ways_to_it() -> None:
    """A function that is called under a condition, or by another file, may be one rank's."""
    save = "def save(model):\n    torch.save(model.state_dict(), 'w.pt')\n"
    start = "main(None, None, None, None)\n"
    assert codes(f"{save}{SETUP}    save(model)\n{start}") == ["EF612"]
    assert codes(f"{save}{SETUP}    if rank == 0:\n        save(model)\n{start}") == []
    assert codes(f"{save}{SETUP}    pass\n{start}") == []
    assert codes(f"{save}{SETUP}    save(model)\n") == []
    assert codes(
        f"{save}{SETUP}    save(model)\nif __name__ == '__main__':\n    mp.spawn(main, nprocs=2)\n"
    ) == ["EF612"]


def training(state: str, optimizer: str = "torch.optim.AdamW(model.parameters())", more: str = "") -> str:
    """Return a script that resumes from a checkpoint of this content."""
    return f"""
optimizer = {optimizer}
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
if args.resume:
    loaded = torch.load(args.resume, map_location="cpu")
    model.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    scheduler.load_state_dict(loaded["scheduler"])
for epoch in range(9):
    model(x).sum().backward()
    optimizer.step()
    {"scheduler.step()" if "sched" in more else "pass"}
    state = {state}
    torch.save(state, f"{{epoch}}.pt")
"""


MODEL = '"model": model.state_dict()'
ALL = f'{MODEL}, "optimizer": optimizer.state_dict(), "epoch": epoch'


WEIGHTS_ONLY = re.sub(
    r"    (optimizer|scheduler)\.load_.*\n",
    "",
    training(f"{{{MODEL}}}").replace("args.resume", "args.weights"),
)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (training(f"{{{MODEL}}}"), ["EF613", "EF614"]),
        (training(f'{{{MODEL}, "epoch": epoch}}'), ["EF613", "EF614"]),
        (training(f"{{{MODEL}, 'optimizer': optimizer.state_dict()}}"), ["EF613", "EF614"]),
        (training(f"{{{ALL}}}"), ["EF614"]),
        (training(f"{{{ALL}}}", more="sched"), ["EF613", "EF614"]),
        (training(f'{{{ALL}, "lr_scheduler": scheduler.state_dict()}}', more="sched"), ["EF614"]),
        (training(f'{{{ALL}, "rng": torch.get_rng_state()}}'), []),
        (training("dict(model=model.state_dict(), opt=optimizer.state_dict(), step=epoch)"), ["EF614"]),
        (training(f'{{{MODEL}, "epoch": epoch}}', "torch.optim.SGD(model.parameters(), lr=0.1)"), ["EF614"]),
        (training(f'{{{MODEL}, "epoch": epoch}}', "torch.optim.SGD(model.parameters(), 0.1, momentum=m)"), ["EF613", "EF614"]),
        (training(f"{{{MODEL}, **extra()}}"), []),
        (training("everything(model)"), []),
        (training(f'{{{MODEL}, "trainer": self.state_dict()}}'), []),
        (WEIGHTS_ONLY, []),
        (training(f"{{{MODEL}}}\n    state['optimizer'] = optimizer.state_dict()\n    state['step'] = epoch"), ["EF614"]),
        (training(f"{{{MODEL}}}\n    add_rest(state)"), []),
    ],
)  # fmt: skip
def test_what_a_checkpoint_leaves_out(body: str, expected: list[str]) -> None:
    """Only where the script resumes from it, and all of it is known."""
    assert codes(body, notes=True) == expected


SCALED = """
scaler = torch.amp.GradScaler({enabled})
ema = copy.deepcopy(model)
optimizer = torch.optim.AdamW(model.parameters())
loaded = torch.load(args.resume, map_location="cpu")
model.load_state_dict(loaded["model"])
{load}
for epoch in range(loaded["epoch"], 9):
    scaler.scale(model(x).sum()).backward()
    scaler.step(optimizer)
    state = {{"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch{more}}}
    torch.save(state, f"{{epoch}}.pt")
"""
LOAD_ALL = "optimizer.load_state_dict(loaded['optimizer']); scaler.load_state_dict(loaded['scaler']); ema.load_state_dict(loaded['ema'])"
SAVE_ALL = ", 'scaler': scaler.state_dict(), 'ema': ema.state_dict()"


@pytest.mark.parametrize(
    ("enabled", "load", "more", "expected"),
    [
        ("", LOAD_ALL, SAVE_ALL, ""),
        ("", LOAD_ALL, "", "does not hold the gradient scaler or the averaged weights"),
        ("enabled=False", LOAD_ALL, ", 'ema': ema.state_dict()", ""),
        ("enabled=args.amp", LOAD_ALL, ", 'ema': ema.state_dict()", "does not hold the gradient scaler"),
        ("", "", SAVE_ALL, "never loads the optimizer or the gradient scaler or the averaged weights"),
        ("", "optimizer.load_state_dict(loaded['optimizer'])", SAVE_ALL, "never loads the gradient scaler or the averaged weights"),
        ("", "restore(loaded)", SAVE_ALL, ""),
    ],
)  # fmt: skip
def test_scaler_and_average_and_parts_that_are_not_loaded(
    enabled: str, load: str, more: str, expected: str
) -> None:
    """Stored and loaded, not stored, stored and not loaded; a function that is given all may load all."""
    text = f"import copy\n{HEAD}{SCALED.format(enabled=enabled, load=load, more=more)}"
    told = [each.message for each in lint_source(text.encode(), "train.py") if each.code == "EF613"]
    assert len(told) == bool(expected)
    assert expected in " ".join(told)


@pytest.mark.parametrize(
    ("load", "expected"),
    [
        ("model.load_state_dict(torch.load(p))", ["EF615"]),
        ("c = torch.load(p, weights_only=True)\n    model.load_state_dict(c['model'])", ["EF615"]),
        ("model.load_state_dict(torch.load(p, map_location='cpu'))", []),
        ("model.load_state_dict(torch.load(p, 'cpu'))", []),
        ("model.load_state_dict(torch.load(p, **options))", []),
        ("images = torch.load(p)", []),
        ("if rank == 0: model.load_state_dict(torch.load(p))", []),
        ("if args.gpu is None:\n        c = torch.load(p)\n    else:\n        c = torch.load(p, map_location='cuda:1')\n    model.load_state_dict(c)", []),
    ],
)  # fmt: skip
def test_loads_without_map_location(load: str, expected: list[str]) -> None:
    """By every rank of a script for several GPUs, where what is loaded is a state."""
    body = f"def main(model, p, rank):\n    dist.init_process_group('nccl')\n    model = DDP(model.cuda())\n    {load}\nmain(None, None, None)\n"
    assert codes(body) == expected
    assert codes(body.replace("dist.init_process_group('nccl')", "pass")) == []


def test_the_place_is_that_of_the_call() -> None:
    """Line of `torch.save`, where the carets stand."""
    assert found("for e in range(9):\n    torch.save(\n        model.state_dict(), 'x.pt')\n") == [
        ("EF611", 2)
    ]
