"""What each code of a problem between keys means; see `jobfile/diagnostics/explanations.py`."""

from __future__ import annotations

from elasticflow.jobfile.diagnostics import codes
from elasticflow.jobfile.diagnostics.explanation import Explanation

BETWEEN_KEYS: dict[str, Explanation] = {
    codes.EMPTY_RANGE: Explanation(
        "the node range is empty",
        "The job trains on nodes.min to nodes.max nodes.",
        "[nodes]\nmin = 4\nmax = 2",
        "[nodes]\nmin = 2\nmax = 4",
    ),
    codes.BATCH_TOO_SMALL: Explanation(
        "the batch is smaller than the largest world size",
        "The global batch is the same at every number of workers and is shared out among them: each needs a sample of it.",
        "[nodes]\nmax = 32\nnproc_per_node = 8  # with global_batch_size = 64",
        "[nodes]\nmax = 8\nnproc_per_node = 8",
    ),
    codes.NO_METRIC: Explanation(
        "nothing says what is best",
        'Which snapshots are the best is told by evaluation.best, such as "max accuracy", with a metric of that name or "loss".',
        "[snapshots]\nkeep = { best = 1 }",
        '[evaluation]\nentry = "examples.mnist:digits"\nargs = { split = "train" }\nbest = "min loss"\n\n[snapshots]\nkeep = { best = 1 }',
    ),
    codes.NOT_BUILT: Explanation(
        "not supported by this version",
        "The key belongs to the format, and this version cannot do what it asks; ignoring it would be worse.",
        '[logging]\nsinks = ["wandb"]',
        '[logging]\nlevel = "info"',
    ),
    codes.NEEDS_METRIC: Explanation(
        "the schedule needs a metric",
        "ReduceLROnPlateau is stepped with a metric; schedules here are stepped by count alone.",
        '[lr_scheduler]\nentry = "torch.optim.lr_scheduler:ReduceLROnPlateau"',
        '[lr_scheduler]\nentry = "torch.optim.lr_scheduler:CosineAnnealingLR"\nargs = { T_max = 1000 }',
    ),
    codes.NO_STEP: Explanation(
        "no step is ever made",
        "With the tail dropped, an epoch shorter than the batch has no full batch.",
        '[dataset]\nentry = "examples.mnist:digits"\nargs = { split = "train" }\nsamples = 50\nglobal_batch_size = 64\ntail = "drop"',
        '[dataset]\nentry = "examples.mnist:digits"\nargs = { split = "train" }\nsamples = 50\nglobal_batch_size = 64\ntail = "spill"',
    ),
    codes.NEEDS_CLOSURE: Explanation(
        "the optimizer computes its own gradients",
        "LBFGS evaluates the loss several times within a step. Here a step has one gradient, of a batch that all workers share.",
        '[optimizer]\nentry = "torch.optim:LBFGS"',
        '[optimizer]\nentry = "torch.optim:AdamW"',
    ),
    codes.VIRTUAL_SHARDS: Explanation(
        "the virtual shards do not fit the job",
        "With exact consistency a batch is cut into a fixed number of equal shards, which the workers share out: "
        "at least as many as there may ever be workers, and the batch a multiple of them.",
        '[dataset]\nentry = "examples.mnist:digits"\nargs = { split = "train" }\nglobal_batch_size = 100\n\n[train]\nepochs = 5\nconsistency = "exact"\nvirtual_shards = 8',
        '[dataset]\nentry = "examples.mnist:digits"\nargs = { split = "train" }\nglobal_batch_size = 96\n\n[train]\nepochs = 5\nconsistency = "exact"\nvirtual_shards = 8',
    ),
    codes.DATA_SHARDS: Explanation(
        "the data shards do not fit the job",
        "Data that can only be read in order is read in a fixed number of shards, each in order and by one worker: at least "
        "as many as there may ever be workers, and the batch a multiple of them. The dataset's callable gets `shard` and "
        "`shards` and returns what yields that shard's samples. The number cannot change during a run.",
        '[dataset]\nentry = "my.data:lines"\nshards = 12\nglobal_batch_size = 64',
        '[dataset]\nentry = "my.data:lines"\nshards = 16\nglobal_batch_size = 64',
    ),
    codes.RENDEZVOUS: Explanation(
        "the rendezvous cannot serve these nodes",
        "etcd-v2, static, and c10d with is_host = false meet at an address, which nodes.endpoint names. With static the "
        "nodes are a fixed set, each told its rank: nodes.min and nodes.max are the same.",
        '[nodes]\nmin = 1\nmax = 2\nendpoint = "head:29400"\n\n[torchrun]\nrdzv_backend = "static"',
        '[nodes]\nmin = 2\nmax = 2\nendpoint = "head:29400"\n\n[torchrun]\nrdzv_backend = "static"',
    ),
    codes.SCHEDULE_ENDS: Explanation(
        "the schedule stops training",
        "OneCycleLR raises an error when it is stepped beyond its length. It is stepped once per step, or once per epoch with "
        'interval = "epoch".',
        '[train]\nsteps = 2000\n\n[lr_scheduler]\nentry = "torch.optim.lr_scheduler:OneCycleLR"\nargs = { max_lr = 0.1, total_steps = 1000 }',
        '[train]\nsteps = 2000\n\n[lr_scheduler]\nentry = "torch.optim.lr_scheduler:OneCycleLR"\nargs = { max_lr = 0.1, total_steps = 2000 }',
    ),
    codes.LOSS_TWICE: Explanation(
        "a metric named loss",
        "Every evaluation measures the loss, with what model.loss or model.step gives, and calls it `loss`; `best` and the "
        "metrics' file know it by that name. A metric of the job's own has another one.",
        '[evaluation]\nentry = "examples.mnist:digits"\nargs = { split = "test" }\nmetrics = { loss = "examples.mnist:accuracy" }',
        '[evaluation]\nentry = "examples.mnist:digits"\nargs = { split = "test" }\nmetrics = { accuracy = "examples.mnist:accuracy" }',
    ),
    codes.NO_AVERAGE: Explanation(
        "there are no averaged weights to measure",
        "With train.ema an average of the weights is kept, and evaluations measure it unless evaluation.weights says otherwise: "
        '"raw" for the trained weights themselves, "both" for the two. Without train.ema there is nothing but the weights.',
        '[evaluation]\nentry = "examples.mnist:digits"\nargs = { split = "test" }\nweights = "both"',
        '[train]\nepochs = 5\nema = 0.999\n\n[evaluation]\nentry = "examples.mnist:digits"\nargs = { split = "test" }\nweights = "both"',
    ),
    codes.NO_ENDPOINT: Explanation(
        "several nodes and no endpoint (warning)",
        "Other machines join at the first machine's address. Without one the job runs on this machine alone.",
        "[nodes]\nmax = 4",
        '[nodes]\nmax = 4\nendpoint = "head:29400"',
    ),
    codes.LOCAL_SNAPSHOTS: Explanation(
        "several machines and a local snapshot folder (warning)",
        "A machine restores from what all machines wrote. A local folder does, if every machine sees the same one.",
        '[nodes]\nmax = 4\nendpoint = "head:29400"',
        '[nodes]\nmax = 4\nendpoint = "head:29400"\n\n[snapshots]\nuri = "s3://bucket/mnist"',
    ),
    codes.SECRET_IN_FILE: Explanation(
        "a secret in the job file (warning)",
        "Job files are checked in and copied into every run folder. Credentials come from the environment.",
        '[snapshots]\noptions = { secret = "hunter2" }',
        '[snapshots]\nuri = "s3://bucket/mnist"',
    ),
    codes.NOT_SHARED: Explanation(
        "snapshots where a run cannot write them",
        "What writes snapshots and what restores them are several processes; memory:// is another place in each of them. "
        "What a web server shows at http:// or https:// can be read (`snapshots list`, `verify`, `export`), not written.",
        '[snapshots]\nuri = "memory://mnist"',
        '[snapshots]\nuri = "snapshots"',
    ),
    codes.ONE_NODE_ONLY: Explanation(
        "snapshots in memory cover one node (warning)",
        "Each worker holds its part in its own node's memory. While workers are spread over several nodes nothing is held, "
        "and a crash goes back to the newest snapshot on the store; while all are on one node, it goes back to what is held.",
        '[nodes]\nmax = 4\nendpoint = "head:29400"\n\n[snapshots]\nuri = "s3://bucket/mnist"\nmemory = "1 step"',
        '[nodes]\nmax = 1\n\n[snapshots]\nmemory = "1 step"',
    ),
    codes.NOT_CHECKED: Explanation(
        "what is promised for data shards rests on their order (warning)",
        "The position of a run is how many samples each data shard has given. A run that goes on takes the next ones, so a "
        "shard must yield the same samples in the same order each time it is read. What it draws from random, numpy and "
        "torch is the same each time; files, threads and servers are its own business, and a fingerprint sees no sample.",
        "def lines(shard, shards):\n    for path in os.listdir(FOLDER)[shard::shards]: ...",
        "def lines(shard, shards):\n    for path in sorted(os.listdir(FOLDER))[shard::shards]: ...",
    ),
    codes.NEVER_DUE: Explanation(
        "something is due only after the end of training (warning)",
        "An interval is longer than the whole run, so what it times never happens. How long the run is, is known from train.steps, "
        "from train.epochs, and with dataset.samples from either.",
        '[train]\nsteps = 2000\n\n[snapshots]\nevery = "5000 steps"',
        '[train]\nsteps = 2000\n\n[snapshots]\nevery = "500 steps"',
    ),
    codes.SCHEDULE_LENGTH: Explanation(
        "the schedule and training differ in length (warning)",
        "A schedule that is longer than training never gets to its end; one that is shorter does something else from there on. "
        'Schedules count steps, or epochs with interval = "epoch".',
        '[train]\nsteps = 2000\n\n[lr_scheduler]\nentry = "torch.optim.lr_scheduler:CosineAnnealingLR"\nargs = { T_max = 20000 }',
        '[train]\nsteps = 2000\n\n[lr_scheduler]\nentry = "torch.optim.lr_scheduler:CosineAnnealingLR"\nargs = { T_max = 2000 }',
    ),
    codes.SHORT_GRACE: Explanation(
        "no time to leave (warning)",
        "A preempted worker has snapshots.grace to end its step and leave with a snapshot. Whoever preempts it says how long that "
        "is: Slurm's KillWait, Kubernetes' terminationGracePeriodSeconds.",
        '[snapshots]\ngrace = "0.1 s"',
        '[snapshots]\ngrace = "30 s"',
    ),
    codes.ENDLESS_REFILL: Explanation(
        "the budget refills before a snapshot is due (warning)",
        "After restarts.refill a failure counts no more. Where that is shorter than the time between snapshots, a job that fails in "
        "between goes back to the same snapshot each time, without end. A refill by steps or epochs counts progress alone.",
        '[restarts]\nrefill = "5 min"\n\n[snapshots]\nevery = "1 h"',
        '[restarts]\nrefill = "1 h"\n\n[snapshots]\nevery = "10 min"',
    ),
    codes.STAGING_MEMORY: Explanation(
        "snapshots take more memory than there is (warning)",
        "Each node stages its part of a snapshot in memory, and snapshots.memory holds three copies more. How large a snapshot is, "
        "`elasticflow validate --deep` finds out; it compares with snapshots.staging_limit and with this machine's memory.",
        '[snapshots]\nstaging_limit = "10 MB"  # and a snapshot has 2 GiB',
        '[snapshots]\nstaging_limit = "4 GiB"',
    ),
    codes.EVALUATES_TRAINING: Explanation(
        "the evaluation names the training data (warning)",
        "[evaluation] makes the same call as [dataset], with the same arguments, so its metrics say how well the model knows what it "
        'was trained on. Where that is meant, evaluation.overlap = "allowed" says so.',
        '[dataset]\nentry = "examples.mnist:digits"\nargs = { split = "train" }\nglobal_batch_size = 64\n\n[evaluation]\nentry = "examples.mnist:digits"\nargs = { split = "train" }',
        '[dataset]\nentry = "examples.mnist:digits"\nargs = { split = "train" }\nglobal_batch_size = 64\n\n[evaluation]\nentry = "examples.mnist:digits"\nargs = { split = "test" }',
    ),
    codes.BATCH_OVER_DATA: Explanation(
        "a batch is more than the whole dataset (warning)",
        "A step takes global_batch_size samples. Where the dataset has fewer, one step holds some samples several times, or the "
        "whole of an epoch, and a training of several epochs may be a single step.",
        '[dataset]\nentry = "examples.mnist:digits"\nargs = { split = "train" }\nsamples = 400\nglobal_batch_size = 100000',
        '[dataset]\nentry = "examples.mnist:digits"\nargs = { split = "train" }\nsamples = 400\nglobal_batch_size = 100',
    ),
    codes.OWN_STEP: Explanation(
        "cannot be combined with a step that moves its optimizers",
        "A step(model, batch, optimizers) is called once per worker with its whole share of the batch, runs its own backward and moves "
        "the optimizers itself; gradients become those of the global batch when an optimizer moves. What cuts, casts, weighs or leaves "
        "out what train.py would run has nothing to work on then.",
        '[model]\nentry = "gan:Gan"\nstep = "gan:step"  # def step(model, batch, optimizers)\n[train]\nconsistency = "exact"\nvirtual_shards = 8',
        '[model]\nentry = "gan:Gan"\nstep = "gan:step"  # def step(model, batch, optimizers)\n[train]\nconsistency = "batch"',
    ),
}  # fmt: skip
