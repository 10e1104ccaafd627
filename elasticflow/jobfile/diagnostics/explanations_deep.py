"""What each code of `--deep` means; see `jobfile/diagnostics/explanations.py`."""

from __future__ import annotations

from elasticflow.jobfile.diagnostics import codes
from elasticflow.jobfile.diagnostics.explanation import Explanation

DEEP: dict[str, Explanation] = {
    codes.DEEP_IMPORT: Explanation(
        "a module of the job cannot be imported",
        "The module was found, and raised while it was imported; or it has no such attribute once it is. "
        "The lines of your own code that led there stand below the help.",
        "# shop/net.py\nimport flash_attn  # not installed",
        "# shop/net.py\nimport torch",
    ),
    codes.DEEP_FACTORY: Explanation(
        "a factory raises",
        "Model, optimizer, schedule and data are built as train.py builds them, with the arguments of the job file. "
        "Model and optimizer are first built on the meta device, which takes no memory, and on the CPU if they refuse that.",
        "args = { width = 33 }  # under [model]; raises ValueError: width must be even",
        "args = { width = 32 }",
    ),
    codes.DEEP_RESULT: Explanation(
        "a factory returns what cannot be used",
        "A model is a torch.nn.Module with parameters to train, an optimizer a torch.optim.Optimizer, a dataset has a length "
        "and items by index, and metrics, losses and steps can be called.",
        "def digits():\n    return iter(samples)",
        "def digits():\n    return list(samples)",
    ),
    codes.DEEP_SAMPLE: Explanation(
        "a sample cannot be read",
        "The first and the last sample of the dataset are read. A length that is one too long shows here.",
        "def __len__(self):\n    return len(self.names) + 1",
        "def __len__(self):\n    return len(self.names)",
    ),
    codes.DEEP_COLLATE: Explanation(
        "samples make no batch",
        "dataset.collate, or torch's default, makes a batch of a list of samples; with model.loss a batch is (inputs, targets).",
        "def __getitem__(self, i):\n    return self.images[i]  # with model.loss",
        "def __getitem__(self, i):\n    return self.images[i], self.labels[i]",
    ),
    codes.DEEP_LENGTH: Explanation(
        "the data has another length than the job file says",
        "dataset.samples is compared with the data, and so is the batch where the tail of an epoch is dropped.",
        "samples = 60000  # under [dataset]; there are 1438",
        "samples = 1438",
    ),
    codes.DEEP_STATE: Explanation(
        "state that no snapshot can hold",
        "Snapshots hold tensors and JSON, and no pickles. What cannot be expressed so is refused at a run's first step; "
        "`--deep` finds it before.",
        'self.register_buffer("mask", torch.eye(4).to_sparse())',
        'self.register_buffer("mask", torch.eye(4))',
    ),
    codes.DEEP_STEP: Explanation(
        "a training step fails",
        "With --deep-step one batch goes forward, backward and through optimizer and schedule on the CPU, and the metrics are measured; "
        "without it only the optimizer takes a step, on gradients of zero.",
        "return nn.Linear(32, 10)  # on images of 28 x 28",
        "return nn.Sequential(nn.Flatten(), nn.Linear(784, 10))",
    ),
    codes.DEEP_HANG: Explanation(
        "the job's code does not come to an end",
        "What was being done, and the lines of your code where it stood, are named. --deep-timeout sets the seconds for each job.",
        "while not ready(): time.sleep(1)  # when imported",
        "elasticflow validate --deep --deep-timeout 300 job.toml",
    ),
    codes.DEEP_DIED: Explanation(
        "the job's code ends its process",
        "By os._exit, a crash in native code, or the kernel for want of memory. In a run the worker would be gone without a traceback.",
        "os._exit(1)",
        'raise ValueError("what is wrong")',
    ),
    codes.DEEP_UNKNOWN: Explanation(
        "cannot be tried here",
        "torch or a GPU is missing, memory is short, or the data is not there before dataset.prepare has run, "
        "which --deep does not call since it may download. Nothing is known to be wrong.",
        "elasticflow validate --deep job.toml  # without torch",
        "pip install 'elasticflow[torch]'",
    ),
    codes.DEEP_LEFT: Explanation(
        "the job's code leaves processes behind",
        "Whatever it starts is ended with the check. In a run such processes may outlive their worker and keep its memory or its ports.",
        'subprocess.Popen(["redis-server"])',
        'server = subprocess.Popen(["redis-server"])\natexit.register(server.kill)',
    ),
    codes.DEEP_OVERLAP: Explanation(
        "the evaluation's samples are in the training data",
        "Two parts of one set by random_split are compared sample by sample. Of other data that is read by index up to 256 samples "
        "of the evaluation are looked up by content in as much of the training data as can be read in five seconds; twins of one in a "
        "hundred are no error, nor are as many as training samples have among themselves. A run looks for half a second before its first step, and warns. Where training on samples that are "
        'evaluated is meant, evaluation.overlap = "allowed" says so.',
        "def digits(split):\n    train, test = random_split(load(), [0.9, 0.1])\n    return train if split == 'train' else load()",
        "def digits(split):\n    train, test = random_split(load(), [0.9, 0.1])  # begins in the same state at each call\n    return train if split == 'train' else test",
    ),
    codes.DEEP_OTHER_DATA: Explanation(
        "data is other data when it is opened again",
        "Every worker opens the data by itself, and so does every restart: all must get the same. What is drawn from random, numpy's "
        "global generator or torch's is the same at each call, since every factory begins in a state that follows from job.seed. A "
        "generator without a seed takes one from the system. A run is refused by the data's fingerprint, but no sooner than at its restart.",
        "rows = numpy.random.default_rng().permutation(len(table))",
        "rows = numpy.random.default_rng(0).permutation(len(table))",
    ),
    codes.DEEP_RESTART: Explanation(
        "a restart would lose something",
        "With --deep-step a second step is trained twice: by what was built and trained one step, and by what was built anew and "
        "given what a snapshot holds of the first. Whatever can be reached from optimizer, schedule and included objects (tensors, "
        "numbers, random generators) has to be the same then, and so have the weights. A run looks for the same after its first "
        "steps, in a cheaper way. What no step depends on may be named in snapshots.ignore.",
        "class TwoAdams(Optimizer):  # holds two optimizers, and has no state_dict of its own\n    def step(self): self.g.step(); self.d.step()",
        'def optimizers(model):  # for a step(model, batch, optimizers)\n    return {"g": Adam(model.g.parameters()), "d": Adam(model.d.parameters())}',
    ),
    codes.DEEP_LOSS: Explanation(
        "what a training step returns is no loss",
        "It returns the loss as a mean over the samples; (loss_sum, count), a sum and over how many items it is; or a dict with "
        "`loss`, a mean over its `count` items, or over the samples where it holds no `count`. Other keys of a dict are not read. "
        "Logits and the like are no part of it.",
        "return loss, logits",
        "return loss",
    ),
    codes.DEEP_WEIGHTS: Explanation(
        "the loss depends on how a batch is cut",
        "Each worker computes the loss of its share of a batch, and shares are weighed by their samples. A mean over something else, "
        "such as tokens without padding (ignore_index), must be weighed by that, or the job trains on another loss at another number of workers: "
        "name a function that counts in model.loss_count, or let the step return (loss_sum, count) or a dict with `loss` and `count`. "
        "Found by comparing the loss of a batch with those of its parts; a loss that compares samples with each other shows here too, "
        "and has no remedy but one worker and no micro-batches.",
        'loss = "tokens:masked_cross_entropy"  # under [model]; a mean over the tokens that count',
        'loss = "tokens:masked_cross_entropy"\nloss_count = "tokens:num_targets"  # def num_targets(batch): return (batch[1] != -100).sum()',
    ),
}
