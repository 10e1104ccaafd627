"""Jobs whose own code is wrong in one way each, for the tests of `--deep`."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from pathlib import Path

JOB = """\
[job]
name = "shop"

[model]
entry = "shop:Net"
args = { width = 8 }
loss = "torch.nn.functional:cross_entropy"

[optimizer]
entry = "torch.optim:AdamW"
args = { lr = 0.001 }

[lr_scheduler]
entry = "torch.optim.lr_scheduler:CosineAnnealingLR"
args = { T_max = 13 }

[dataset]
entry = "shop:digits"
global_batch_size = 8

[evaluation]
entry = "shop:digits"
overlap = "allowed"
metrics = { accuracy = "shop:accuracy" }

[train]
epochs = 2
"""

SHOP = """\
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inner = nn.Linear(4, width)
        self.norm = nn.BatchNorm1d(width)
        self.outer = nn.Linear(width, 3)

    def make_optimizer(self, lr):
        return torch.optim.AdamW(self.parameters(), lr=lr)

    def forward(self, inputs):
        return self.outer(self.norm(self.inner(inputs)).relu())


class Digits:
    def __len__(self):
        return 50

    def __getitem__(self, index):
        if index >= 50:
            raise IndexError(index)
        return torch.ones(4) * index, index % 3


def digits():
    return Digits()


def twice(cells):
    return 2 * cells


def wait():
    pass


def late():
    return open('/nowhere/digits.bin')


def shard(shard, shards):
    yield from (Digits()[index] for index in range(shard, 50, shards))


def nothing(shard, shards):
    return iter(())


def pair(outputs, targets):
    return nn.functional.cross_entropy(outputs, targets), outputs


def masked(outputs, targets):
    return nn.functional.cross_entropy(outputs, targets.where(targets > 0, -1), ignore_index=-1)


def num_targets(batch):
    return (batch[1] > 0).sum()


def accuracy(outputs, targets):
    return (outputs.argmax(1) == targets).float().mean()
"""


class Project(NamedTuple):
    """A job that is wrong.

    Attributes:
        old: Text of the module, or of the job file, that is replaced.
        new: By what.
        found: Code, key line of the job file (its beginning), and a part of the message of what is found.
        deep_step: It shows in a training step only.
        is_wild: It does what only a process of its own can take.
        job: Text of the job file that is replaced besides, and by what.
        more: Text at the end of the job file.
    """

    old: str
    new: str
    found: tuple[str, str, str] | None
    deep_step: bool = False
    is_wild: bool = False
    job: tuple[str, str] = ("", "")
    more: str = ""


COLLATORS = """\
class Joined:
    def __init__(self, dim):
        self.dim = dim

    def __call__(self, samples):
        return torch.stack([cells for cells, _ in samples], self.dim), torch.tensor([label for _, label in samples])


def joined(samples, dim):
    return Joined(dim)(samples)


def accuracy("""

JOINED = (
    "global_batch_size = 8",
    'collate = { entry = "shop:Joined", args = { dim = 0 } }\nglobal_batch_size = 8',
)

STUCK = """\
class Stuck(torch.optim.SGD):
    def step(self, closure=None):
        raise RuntimeError("stuck")


def digits():
"""
FALLING = """\
class Falling(torch.optim.lr_scheduler.LRScheduler):
    def get_lr(self):
        return [1 / (1 - self.last_epoch)]


def digits():
"""
INCLUDED = """\
class Level:
    def state_dict(self):
        return {"level": torch.ones(2)}

    def load_state_dict(self, state):
        pass


level = Level()


def digits():
"""
HALF = """\
def half():
    return [Digits()[index] for index in range(25, 50)]


def digits():
"""
NOISE = """\
        import numpy
        self.rng = getattr(self, "rng", numpy.random.default_rng(0))
        return torch.ones(4) * index + self.rng.random(dtype="float32"), index % 3
"""
TWO_ADAMS = """\
class Two(torch.optim.Optimizer):
    def __init__(self, params, lr):
        params = list(params)
        super().__init__(params, {"lr": lr})
        self.first, self.second = torch.optim.Adam(params[:3], lr), torch.optim.Adam(params[3:], lr)

    def step(self, closure=None):
        self.first.step()
        self.second.step()


def digits():
"""
TWO_ADAMS_WITH_STATE = TWO_ADAMS.replace(
    "\n\n\ndef digits",
    """

    def state_dict(self):
        return {**super().state_dict(), "first": self.first.state_dict(), "second": self.second.state_dict()}

    def load_state_dict(self, state):
        self.first.load_state_dict(state.pop("first"))
        self.second.load_state_dict(state.pop("second"))
        super().load_state_dict(state)


def digits""",
)
TWO_ADAMS_WITH_COPIES = "import copy\n\n\n" + TWO_ADAMS_WITH_STATE.replace(
    "self.first.state_dict(),", "copy.deepcopy(self.first.state_dict()),"
)
COUNTING = """\
class Counting(torch.optim.AdamW):
    seen = 0

    def step(self, closure=None):
        self.seen += 1
        return super().step(closure)


def digits():
"""
CACHING = """\
import time


class Caching(torch.optim.AdamW):
    norm = mask = began = None

    def step(self, closure=None):
        self.began = time.perf_counter()
        if self.mask is None:
            self.mask = {"ones": torch.ones(3), "of": 3}
        self.norm = sum(p.grad.norm() for group in self.param_groups for p in group["params"])
        return super().step(closure)


def digits():
"""

PROJECTS = {
    "good": Project("", "", None, deep_step=True),
    "import_raises": Project(
        "import torch\n", "import torch\nimport flash_attention_4\n", ("EF501", 'entry = "shop:Net"', "ModuleNotFoundError: No module named 'flash_attention_4'")
    ),
    "import_exits": Project("import torch\n", "import torch\nraise SystemExit(4)\n", ("EF501", 'entry = "shop:Net"', "importing shop raises SystemExit: 4")),
    "build_raises": Project(
        "        super().__init__()\n", "        super().__init__()\n        if width % 3:\n            raise ValueError('width must be a multiple of 3')\n",
        ("EF502", "args = { width = 8 }", "building the model raises ValueError: width must be a multiple of 3"),
    ),
    "no_module": Project("def digits", "def Net(width):\n    return [1, 2]\n\n\ndef digits", ("EF503", 'entry = "shop:Net"', "model.entry returned a list, which is no torch.nn.Module")),
    "refuses_meta": Project(
        "        self.outer =", "        assert float(torch.ones(2).sum()) == 2\n        self.outer =", None
    ),
    "hangs": Project("import torch\n", "import time\n\nimport torch\n\n\ndef wait():\n    time.sleep(600)\n\n\nwait()\n", ("EF509", 'entry = "shop:Net"', "s in all; the last of it was importing shop"), is_wild=True),
    "exits": Project("        super().__init__()\n", "        super().__init__()\n        import os\n        os._exit(7)\n", ("EF510", "args = { width = 8 }", "building the model ended the process with exit code 7"), is_wild=True),
    "crashes": Project(
        "def digits():\n", "def digits():\n    import ctypes\n    ctypes.string_at(0)\n", ("EF510", 'entry = "shop:digits"', "opening dataset ended the process with SIGSEGV"), is_wild=True
    ),
    "prints": Project("import torch\n", "import os\n\nimport torch\n\nprint('x' * 300_000)\nos.write(2, b'\\xff{\"end\": true}' * 1000)\n", None, is_wild=True),
    "leaves_a_process": Project(
        "import torch\n", "import subprocess\n\nimport torch\n\nsubprocess.Popen(['sleep', '987'], start_new_session=True)\n",
        ("EF512", 'entry = "shop:Net"', "leaves processes behind: sleep"), is_wild=True,
    ),
    "needs_a_gpu": Project(
        "        super().__init__()\n", "        super().__init__()\n        torch.zeros(1).cuda()\n", ("EF511", "args = { width = 8 }", "building the model raises")
    ),
    "dataset_raises": Project("    return Digits()", "    return open('/nowhere/digits.bin')", ("EF502", 'entry = "shop:digits"', "opening dataset raises FileNotFoundError")),
    "no_items": Project("    return Digits()", "    return iter([1])", ("EF503", 'entry = "shop:digits"', "cannot be read by index")),
    "length_is_a_lie": Project("        return 50\n", "        return 51\n", ("EF504", 'entry = "shop:digits"', "reading sample 50 of dataset raises IndexError: 50")),
    "no_batch": Project("torch.ones(4) * index", "torch.ones(4 + index % 2)", ("EF505", 'entry = "shop:digits"', "making a batch of dataset raises RuntimeError: stack expects each tensor to be equal size")),
    "collate_made_with_arguments": Project("def accuracy(", COLLATORS, None, deep_step=True, job=JOINED),
    "samples_of_other_sizes_one_at_a_time": Project("torch.ones(4) * index", "torch.ones(4 + index % 2)", None, job=("global_batch_size = 8", "micro_batch_size = 1\nglobal_batch_size = 8")),
    "collate_raises": Project("def accuracy(", COLLATORS.replace("self.dim)", "self.dim + 7)"), ("EF505", "collate = {", "making a batch of dataset raises IndexError"), job=JOINED),
    "collate_cannot_be_made": Project("def accuracy(", COLLATORS.replace("self.dim =", "self.dim = {}[dim]; self.dim ="), ("EF502", "collate = {", "making dataset.collate raises KeyError: 0"), job=JOINED),
    "collate_is_no_callable": Project("def accuracy(", COLLATORS.replace("__call__", "call"), ("EF503", "collate = {", "collate is made as shop.Joined, which cannot be called with a list of samples"), job=JOINED),
    "collate_with_a_generator": Project("def accuracy(", COLLATORS.replace("self.dim =", "self.rng = torch.Generator()\n        self.dim ="), ("EF507", "collate = {", "dataset.collate.rng is a random generator of its own"), job=JOINED),
    "collate_of_a_set": Project("def accuracy(", COLLATORS, ("EF505", "collate = {", "making a batch of evaluation raises IndexError"), job=('overlap = "allowed"', 'collate = { entry = "shop:joined", args = { dim = 5 }, partial = true }\noverlap = "allowed"')),
    "no_pair": Project("torch.ones(4) * index, index % 3", "torch.ones(4) * index", ("EF505", 'entry = "shop:digits"', "model.loss is called on batches of (inputs, targets)")),
    "other_length": Project("global_batch_size = 8", "samples = 60\nglobal_batch_size = 8", ("EF506", "samples = 60", "dataset.samples = 60, but the Digits has 50")),
    "no_step": Project("global_batch_size = 8", 'tail = "drop"\nglobal_batch_size = 80', ("EF506", "global_batch_size = 80", "no step is ever made: an epoch has 50 samples")),
    "table_for_an_object": Project(
        "    def __init__(self, width):\n", "    def __init__(self, width):\n        width = width.number\n", ("EF502", "args = { width", "building the model raises AttributeError: 'dict' object has no attribute 'number'"), job=("width = 8", "width = { number = 8 }")
    ),
    "optimizer_raises": Project("lr = 0.001", "lr = -1.0", ("EF502", "args = { lr = -1.0 }", "building the optimizer raises ValueError: Invalid learning rate")),
    "group_of_nothing": Project("args = { lr = 0.001 }\n", 'args = { lr = 0.001 }\ngroups = [{ ndim = 1 }, { match = "*.biass" }]\n', ("EF502", "groups = [", "optimizer.groups[1] takes no parameter: none of the Net is *.biass")),
    "group_with_an_option_of_nothing": Project(
        "def digits():\n", "def adam(parameters, lr):\n    return torch.optim.AdamW(parameters, lr=lr)\n\n\ndef digits():\n",
        ("EF503", "groups = [", "optimizer.groups[0].args.weigth_decay: AdamW has no option `weigth_decay`"),
        job=('"torch.optim:AdamW"', '"shop:adam"\ngroups = [{ ndim = 1, args = { weigth_decay = 0.0 } }]'),
    ),
    "groups": Project("args = { lr = 0.001 }\n", 'args = { lr = 0.001 }\ngroups = [{ ndim = 1 }, { module = "torch.nn:Linear", args = { lr = 0.1 } }]\n', None, deep_step=True),
    "value_of_the_data": Project(
        "    def __len__(self):\n", "    width = 8\n\n    def __len__(self):\n", None, deep_step=True, job=("width = 8", 'width = "${dataset.width}"'),
    ),
    "value_that_the_data_lacks": Project(
        "def digits():\n    return Digits()", "def digits():\n    data = Digits()\n    return data", ("EF503", 'args = { width = "$', "model.args.width is ${dataset.width}, and the Digits that dataset.entry returned has no `width`"),
        job=("width = 8", 'width = "${dataset.width}"'),
    ),
    "state_that_cannot_be_kept": Project(
        "        self.outer =", "        self.register_buffer('mask', torch.eye(3).to_sparse())\n        self.outer =", ("EF507", 'entry = "shop:Net"', "model/mask is a sparse tensor")
    ),
    "hooks": Project("def accuracy(", "def look(context, name):\n    context.log_scalar(name, context.metrics['loss'])\n    context.log_scalar('accuracy', context.metrics['eval']['accuracy'])\n    context.log_image(name, context.model.inner.weight)\n\n\ndef accuracy(", None, deep_step=True, more='[hooks.on_evaluation]\nentry = "shop:look"\nargs = { name = "x" }\n'),
    "hook_reads_the_data": Project("def accuracy(", "def look(context):\n    context.log_scalar('rows', len(context.dataset))\n\n\ndef accuracy(", None, deep_step=True, more='[hooks]\non_step = "shop:look"\n'),
    "hook_raises": Project("def accuracy(", "def look(context):\n    return {}['gone']\n\n\ndef accuracy(", ("EF508", 'on_step = "shop:look"', "calling hooks.on_step raises KeyError: 'gone'"), deep_step=True, more='[hooks]\non_step = "shop:look"\n'),
    "hook_changes": Project("def accuracy(", "def look(context):\n    context.model.inner.weight.data.mul_(2)\n\n\ndef accuracy(", ("EF508", 'on_finish = "shop:look"', 'hooks.on_finish = "shop:look" changed inner.weight'), deep_step=True, more='[hooks]\non_finish = "shop:look"\n'),
    "scalar_of_ours": Project("def accuracy(", "def step(model, batch):\n    loss = nn.functional.cross_entropy(model(batch[0]), batch[1])\n    return {'loss': loss, 'lr': 0.1}\n\n\ndef score(model, batch):\n    return 0.5\n\n\ndef accuracy(", ("EF518", 'step = "shop:step"', "a scalar `lr`, and metrics.jsonl has a field of that name"), deep_step=True, job=('loss = "torch.nn.functional:cross_entropy"', 'step = "shop:step"')),
    "too_many_scalars": Project("def accuracy(", "def step(model, batch):\n    loss = nn.functional.cross_entropy(model(batch[0]), batch[1])\n    return {'loss': loss, **{f's{n}': 0.1 for n in range(65)}}\n\n\ndef score(model, batch):\n    return 0.5\n\n\ndef accuracy(", ("EF518", 'step = "shop:step"', "the training step returned 65 different scalars, and there is room for 64"), deep_step=True, job=('loss = "torch.nn.functional:cross_entropy"', 'step = "shop:step"')),
    "wrong_shapes": Project("nn.Linear(4, width)", "nn.Linear(5, width)", ("EF508", 'loss = "torch', "mat1 and mat2 shapes cannot be multiplied"), deep_step=True),
    "unused_parameters": Project("        self.outer =", "        self.spare = nn.Linear(2, 2)\n        self.outer =", ("EF508", 'entry = "shop:Net"', "parameter spare.weight and 1 more got no gradient"), deep_step=True),
    "not_prepared": Project('entry = "shop:digits"\nglobal', 'prepare = "shop:wait"\nentry = "shop:late"\nglobal', ("EF511", 'entry = "shop:late"', "dataset cannot be opened here (FileNotFoundError: ")),
    "data_shards": Project('entry = "shop:digits"\nglobal', 'entry = "shop:shard"\nshards = 2\nglobal', None, deep_step=True),
    "shard_without_an_order": Project(
        "    yield from (Digits()[index] for index in range(shard, 50, shards))", "    import numpy\n    yield from (Digits()[index] for index in numpy.random.default_rng().permutation(50))",
        ("EF514", 'entry = "shop:shard"', "data shard 0 yields other samples when it is read again"), job=('entry = "shop:digits"\nglobal', 'entry = "shop:shard"\nshards = 2\nglobal'),
    ),
    "shard_that_skips_with_other_draws": Project(
        "def nothing(", "class Shuffled:\n    def __init__(self, begin=0):\n        self.begin = begin\n\n    def skip(self, count):\n        return Shuffled(self.begin + count)\n\n"
        "    def __iter__(self):\n        import itertools\n        import random\n\n        waiting = list(range(50))\n"
        "        drawn = (Digits()[waiting.pop(random.randrange(len(waiting)))] for _ in range(50))\n        return itertools.islice(drawn, self.begin, None)\n\n\n"
        "def shuffled(shard, shards):\n    return Shuffled()\n\n\ndef nothing(",
        ("EF514", 'entry = "shop:shuffled"', "data shard 0 yields other samples after skip() than without it"), job=('entry = "shop:digits"\nglobal', 'entry = "shop:shuffled"\nshards = 2\nglobal'),
    ),
    "empty_shard": Project('entry = "shop:digits"\nglobal', 'entry = "shop:nothing"\nshards = 2\nglobal', None),
    "shard_not_prepared": Project('entry = "shop:digits"\nglobal', 'prepare = "shop:wait"\nentry = "shop:nothing"\nshards = 2\nglobal', ("EF511", 'entry = "shop:nothing"', "data shard 0 has no samples, perhaps since dataset.prepare has not run")),
    "no_weights": Project("args = { width = 8 }", 'args = { width = 8 }\nweights = "no.safetensors"', ("EF503", 'weights = "no', "reading no.safetensors raises FileNotFoundError")),
    "stops": Project("    def forward(self, inputs):\n", "    def forward(self, inputs):\n        from elasticflow import StopTraining\n        raise StopTraining('enough')\n", None, deep_step=True),
    "two_optimizers_in_one": Project(
        "def digits():\n", TWO_ADAMS, ("EF515", 'entry = "shop:Two"', "optimizer.first.state['inner.weight']['step'] (and 17 more like it) changes with the steps, and no snapshot holds it"), deep_step=True, job=('entry = "torch.optim:AdamW"', 'entry = "shop:Two"')
    ),
    "two_optimizers_in_one_without_a_step": Project(
        "def digits():\n", TWO_ADAMS, ("EF515", 'entry = "shop:Two"', "optimizer.first.state['inner.weight']['exp_avg'] (and 11 more like it) changes with the steps, and no snapshot holds it"), job=('entry = "torch.optim:AdamW"', 'entry = "shop:Two"')
    ),
    "two_optimizers_with_a_state_without_a_step": Project("def digits():\n", TWO_ADAMS_WITH_STATE, None, job=('entry = "torch.optim:AdamW"', 'entry = "shop:Two"')),
    "two_optimizers_with_copies_of_a_state": Project("def digits():\n", TWO_ADAMS_WITH_COPIES, None, job=('entry = "torch.optim:AdamW"', 'entry = "shop:Two"')),
    "two_optimizers_with_a_state": Project("def digits():\n", TWO_ADAMS_WITH_STATE, None, deep_step=True, job=('entry = "torch.optim:AdamW"', 'entry = "shop:Two"')),
    "a_counter_beside": Project(
        "def digits():\n", COUNTING, ("EF515", 'entry = "shop:Counting"', "optimizer.seen changes with the steps"), deep_step=True, job=('entry = "torch.optim:AdamW"', 'entry = "shop:Counting"')
    ),
    "a_counter_that_is_ignored": Project("def digits():\n", COUNTING, None, deep_step=True, job=('entry = "torch.optim:AdamW"', 'entry = "shop:Counting"'), more='\n[snapshots]\nignore = ["optimizer.seen"]\n'),
    "a_cache_and_a_clock": Project("def digits():\n", CACHING, None, deep_step=True, job=('entry = "torch.optim:AdamW"', 'entry = "shop:Caching"')),
    "a_step_that_counts": Project(
        "    def forward(self, inputs):\n", "    calls = 0\n\n    def forward(self, inputs):\n        self.calls += 1\n        inputs = inputs * self.calls\n",
        ("EF515", 'entry = "shop:Net"', "the first step after a restart would give inner.weight other values"), deep_step=True,
    ),
    "other_data_each_time": Project(
        "    return Digits()", "    import numpy\n    return [(torch.ones(4) * i, i % 3) for i in numpy.random.default_rng().permutation(50)]",
        ("EF514", 'entry = "shop:digits"', "returns other data when it is called again"),
    ),
    "split_at_random": Project(
        "    return Digits()", "    import random\n    return [(torch.ones(4) * i, i % 3) for i in random.sample(range(50), 20)]", None
    ),
    "evaluated_on_training_data": Project(
        "def digits():\n", HALF, ("EF513", 'entry = "shop:half"', "25 of 25 evaluation samples looked up are in the training data: evaluation sample "),
        job=('entry = "shop:digits"\noverlap = "allowed"', 'entry = "shop:half"'),
    ),
    "samples_vary": Project(
        "        return torch.ones(4) * index, index % 3", NOISE, ("EF514", 'entry = "shop:digits"', "a shop.Digits, is not the same when it is read twice"),
    ),
    "samples_vary_in_exact_mode": Project(
        "        return torch.ones(4) * index, index % 3", NOISE, ("EF514", 'entry = "shop:digits"', "exact mode cannot repeat a step"),
        job=("epochs = 2", 'epochs = 2\nconsistency = "exact"\nvirtual_shards = 2'),
    ),
    "evaluated_so_on_purpose": Project("def digits():\n", HALF, None, job=('entry = "shop:digits"\noverlap', 'entry = "shop:half"\noverlap')),
    "averages": Project("epochs = 2", 'epochs = 2\nema = 0.99\nprecision = "bf16"', None, deep_step=True),
    "not_finite": Project("torch.ones(4) * index", "torch.ones(4) / 0 * index", ("EF508", 'loss = "torch', "the loss of the first step is nan"), deep_step=True),
    "logits_too": Project("torch.nn.functional:cross_entropy", "shop:pair", ("EF518", 'loss = "shop:pair"', "the training step returned (float32 (), float32 (8, 3))"), deep_step=True),
    "uncounted": Project("torch.nn.functional:cross_entropy", "shop:masked", ("EF519", 'loss = "shop:masked"', "but the mean over its parts, weighed by their samples"), deep_step=True),
    "uncounted_in_exact_mode": Project(
        "torch.nn.functional:cross_entropy", "shop:masked", None, deep_step=True, job=("epochs = 2", 'epochs = 2\nconsistency = "exact"\nvirtual_shards = 2')
    ),
    "counted": Project('torch.nn.functional:cross_entropy"', 'shop:masked"\nloss_count = "shop:num_targets"', None, deep_step=True),
    "method_and_object": Project(
        'args = { width = 8 }\nloss = "torch.nn.functional:cross_entropy"\n\n[optimizer]\nentry = "torch.optim:AdamW"',
        'args = { width = { entry = "shop:twice", args = { cells = 4 } } }\nloss = "torch.nn.functional:cross_entropy"\n\n[optimizer]\nentry = "shop:Net.make_optimizer"', None, deep_step=True,
    ),
    "object_raises": Project("width = 8", 'width = { entry = "builtins:int", args = { x = 8 } }', ("EF502", "args = { width", "building the model raises TypeError"), deep_step=True),
    "metrics_cannot_be_made": Project(
        "def accuracy(", "def close(outputs, targets, by):\n    return 1.0\n\n\ndef accuracy(", ("EF502", "metrics = {", "making evaluation.metrics raises TypeError"), deep_step=True,
        job=('{ accuracy = "shop:accuracy" }', '{ near = { entry = "shop:close", args = { by = { entry = "builtins:int", args = { x = 8 } } } } }'),
    ),
    "optimizer_cannot_step": Project("def digits():\n", STUCK, ("EF508", 'entry = "shop:Stuck"', "a step of the optimizer raises RuntimeError: stuck"), deep_step=True, job=('entry = "torch.optim:AdamW"', 'entry = "shop:Stuck"')),
    "schedule_cannot_step": Project(
        "def digits():\n", FALLING, ("EF508", 'entry = "shop:Falling"', "a step of the schedule raises ZeroDivisionError"), deep_step=True,
        job=('entry = "torch.optim.lr_scheduler:CosineAnnealingLR"\nargs = { T_max = 13 }', 'entry = "shop:Falling"'),
    ),
    "schedule_is_no_schedule": Project("def digits():\n", "def flat(optimizer):\n    return 1\n\n\ndef digits():\n", ("EF503", 'entry = "shop:flat"', "int"), job=('entry = "torch.optim.lr_scheduler:CosineAnnealingLR"\nargs = { T_max = 13 }', 'entry = "shop:flat"')),
    "checkpointing_of_nothing": Project("epochs = 2", 'epochs = 2\ngradient_checkpointing = ["blocks.*"]', ("EF503", "gradient_checkpointing = [", 'no module of the Net has a name like "blocks.*"')),
    "checkpointing": Project("epochs = 2", 'epochs = 2\ngradient_checkpointing = ["inner"]', None, deep_step=True),
    "fp16": Project("epochs = 2", 'epochs = 2\nprecision = "fp16"', None, deep_step=True),
    "several_sets": Project(
        '[evaluation]\nentry = "shop:digits"\noverlap = "allowed"\nmetrics = { accuracy = "shop:accuracy" }',
        '[evaluation.val]\nentry = "shop:digits"\noverlap = "allowed"\nmetrics = { accuracy = "shop:accuracy" }\n[evaluation.test]\nentry = "shop:late"',
        ("EF502", 'entry = "shop:late"', "opening evaluation.test raises FileNotFoundError"), deep_step=True,
    ),
    "weights_of_samples": Project("def digits():\n", "def weights(data):\n    return [1.0] * len(data)\n\n\ndef digits():\n", None, job=("global_batch_size = 8", 'sampler = { weights = "shop:weights" }\nglobal_batch_size = 8')),
    "weights_of_other_samples": Project(
        "def digits():\n", "def weights(data):\n    return [1.0]\n\n\ndef digits():\n", ("EF503", "sampler = {", "50"), job=("global_batch_size = 8", 'sampler = { weights = "shop:weights" }\nglobal_batch_size = 8')
    ),
    "a_mixture": Project('entry = "shop:digits"\nglobal_batch_size = 8', 'mix = [{ entry = "shop:digits", weight = 3 }, { entry = "shop:digits", weight = 1 }]\nglobal_batch_size = 8', None, deep_step=True),
    "a_mixture_of_nothing": Project('entry = "shop:digits"\nglobal_batch_size = 8', 'mix = [{ entry = "shop:digits" }, { entry = "shop:late" }]\nglobal_batch_size = 8', ("EF502", "mix = [", "opening dataset raises FileNotFoundError")),
    "included": Project("def digits():\n", INCLUDED, None, deep_step=True, more='\n[snapshots]\ninclude = { level = "shop:level" }\n'),
    "evaluation_step": Project("def accuracy(", "def look(model, batch):\n    assert not model.training\n    return {'logits': model(batch[0])}, batch[1]\n\n\ndef accuracy(", None, deep_step=True, job=('metrics = { accuracy = "shop:accuracy" }', 'step = "shop:look"\nmetrics = { accuracy = { entry = "shop:accuracy", outputs = "logits" } }')),
    "evaluation_step_of_no_pair": Project("def accuracy(", "def look(model, batch):\n    return model(batch[0])\n\n\ndef accuracy(", ("EF508", "metrics = ", "evaluation.step returned"), deep_step=True, job=("metrics = {", 'step = "shop:look"\nmetrics = {')),
    "metric_raises": Project("(outputs.argmax(1)", "(outputs.argmax(2)", ("EF508", "metrics = ", "measuring accuracy raises IndexError"), deep_step=True),
}  # fmt: skip


def write(folder: Path, project: Project) -> Path:
    """Write the project's files and return the job file."""
    (folder / "pyproject.toml").touch()
    assert project.old in JOB + SHOP
    shop, job = (text.replace(project.old, project.new, 1) if project.old else text for text in (SHOP, JOB))
    (folder / "shop.py").write_text(shop)
    (folder / "job.toml").write_text(job.replace(*project.job, 1) + project.more)
    return folder / "job.toml"
