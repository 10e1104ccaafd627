"""What each code means: title, reason, a bad and a good example.

The examples are job file lines; a test runs every bad one and finds its code.
"""

from __future__ import annotations

from elasticflow.jobfile.diagnostics import codes
from elasticflow.jobfile.diagnostics.explanation import Explanation
from elasticflow.jobfile.diagnostics.explanations_between import BETWEEN_KEYS
from elasticflow.jobfile.diagnostics.explanations_composition import MATRIX, REFERENCES
from elasticflow.jobfile.diagnostics.explanations_deep import DEEP

EXPLANATIONS: dict[str, Explanation] = {
    codes.NO_FILE: Explanation(
        "the job file cannot be read",
        "The name is mistyped, is a folder, or the file may not be read.",
        "elasticflow validate jobs/mnits.toml",
        "elasticflow validate jobs/mnist.toml",
    ),
    codes.NOT_UTF8: Explanation(
        "the file is not UTF-8",
        "TOML files are UTF-8. Some editors save Latin-1 or UTF-16; save the file again as UTF-8.",
        'name = "caf\\xe9"  # one byte, in Latin-1',
        'name = "caf\\xc3\\xa9"  # two bytes, in UTF-8',
    ),
    codes.NOT_TOML: Explanation(
        "the file is not valid TOML",
        "Texts stand in quotes, true and false are in small letters, and a key stands once in its table.",
        "entry = examples.mnist:Net\ncompile = True",
        'entry = "examples.mnist:Net"\ncompile = true',
    ),
    codes.BAD_SET: Explanation(
        "a --set flag cannot be read",
        "A flag names one key with its table, and a value as the file would have it; a bare word is a text. "
        "Quote the whole for your shell when it holds brackets. An empty value leaves the key out. "
        "Flags take effect in their order, over all files and over the case of a matrix.",
        "--set epochs",
        "--set train.epochs=3  --set 'snapshots.every=[\"20 steps\"]'  --set train.epochs=",
    ),
    codes.EXTENDS: Explanation(
        "a file to extend cannot be used",
        "`extends` names one file or several, relative to the file that says so; they may not extend each other in a circle. "
        "Tables merge key by key, later files win, anything else is replaced whole. A file that several extend counts once, "
        "below all of them. To replace a table instead of merging, take it out first: "
        "--set optimizer.args= --set optimizer.args.lr=0.1",
        'extends = "jobs/base.toml"  # in jobs/mnist.toml',
        'extends = "base.toml"',
    ),
    **REFERENCES,
    codes.UNKNOWN_KEY: Explanation(
        "unknown key or table",
        "A key that nobody reads is most often a typing mistake, and would silently change nothing: it is refused. "
        "Arguments of your own functions belong into `args`.",
        "[train]\nepoch = 5",
        "[train]\nepochs = 5",
    ),
    codes.MISSING: Explanation(
        "a key or table is missing",
        "It has no default. [job], [model], [optimizer], [dataset] and [train] are needed in every job.",
        '[dataset]\nentry = "examples.mnist:digits"\nargs = { split = "train" }',
        '[dataset]\nentry = "examples.mnist:digits"\nargs = { split = "train" }\nglobal_batch_size = 64',
    ),
    codes.WRONG_TYPE: Explanation(
        "a value of the wrong type",
        'Types are strict: "8" is a text and not the number 8.',
        '[train]\nepochs = "5"',
        "[train]\nepochs = 5",
    ),
    codes.OUT_OF_RANGE: Explanation(
        "a value that is not allowed",
        "The key has bounds, or a list of words to choose from.",
        "[train]\nepochs = 0",
        "[train]\nepochs = 1",
    ),
    codes.MALFORMED: Explanation(
        "a text of the wrong form",
        "Names have letters, digits, dots, hyphens and underscores, and no blanks; entry points are "
        '"package.module:name", with a colon; intervals are a number with a unit (steps, epochs, samples, s, min, h, d), '
        "sizes one with a unit of bytes (4 GiB).",
        '[snapshots]\nevery = "500"',
        '[snapshots]\nevery = "500 steps"',
    ),
    codes.EXCLUSIVE: Explanation(
        "exactly one of two keys must be given",
        "They say the same thing in two ways: `epochs` or `steps`; `loss` or `step`.",
        "[train]\nepochs = 5\nsteps = 1000",
        "[train]\nsteps = 1000",
    ),
    codes.WRONG_KIND: Explanation(
        "an entry point makes something else than its key is for",
        "Its bases, or what its function returns, show that it makes a dataset where a model is wanted, a loader where a "
        "dataset is wanted (elasticflow makes the batches itself), and so on.",
        '[model]\nentry = "torch.utils.data:TensorDataset"\nloss = "torch.nn.functional:cross_entropy"',
        '[model]\nentry = "examples.mnist:Net"\nloss = "torch.nn.functional:cross_entropy"',
    ),
    codes.NO_SUCH_PLACE: Explanation(
        "a URI or path that names no place",
        "A protocol stands before two slashes (s3://bucket/name), and is one that fsspec knows; each needs its extra, as in "
        "elasticflow[s3]. Nothing expands $HOME: variables are written ${env:HOME}.",
        '[snapshots]\nuri = "s3:/bucket/mnist"',
        '[snapshots]\nuri = "s3://bucket/mnist"',
    ),
    codes.NOT_PASSABLE: Explanation(
        "a value that cannot be passed on",
        "Arguments are written into the generated train.py and kept as JSON: no dates, no infinities, no whole numbers "
        "beyond 64 bits; names of arguments are Python names.",
        '[model]\nentry = "examples.mnist:Net"\nargs = { width = inf }\nloss = "torch.nn.functional:cross_entropy"',
        '[model]\nentry = "examples.mnist:Net"\nargs = { width = 16 }\nloss = "torch.nn.functional:cross_entropy"',
    ),
    codes.NO_MODULE: Explanation(
        "the module does not exist",
        "Modules are looked for on the job's path (job.path, relative to the project's root: the nearest folder with "
        "pyproject.toml or .git), then among installed packages. A package that is not installed here cannot be judged.",
        '[dataset]\nentry = "examples.mnits:digits"\nargs = { split = "train" }\nglobal_batch_size = 64',
        '[dataset]\nentry = "examples.mnist:digits"\nargs = { split = "train" }\nglobal_batch_size = 64',
    ),
    codes.NO_ATTRIBUTE: Explanation(
        "the module has no such name",
        "The module's source binds no such name, also not by imports.",
        '[dataset]\nentry = "examples.mnist:digit"\nargs = { split = "train" }\nglobal_batch_size = 64',
        '[dataset]\nentry = "examples.mnist:digits"\nargs = { split = "train" }\nglobal_batch_size = 64',
    ),
    codes.NOT_CALLABLE: Explanation(
        "the entry point cannot be called",
        "It is a constant or a module; name a class or a function.",
        '[dataset]\nentry = "examples:mnist"\nglobal_batch_size = 64',
        '[dataset]\nentry = "examples.mnist:digits"\nargs = { split = "train" }\nglobal_batch_size = 64',
    ),
    codes.BAD_ARGUMENT: Explanation(
        "the arguments do not fit",
        "`args` are passed by name. An optimizer gets the parameters first, a schedule the optimizer, a loss outputs and targets.",
        '[optimizer]\nentry = "torch.optim:AdamW"\nargs = { learning_rate = 1e-3 }',
        '[optimizer]\nentry = "torch.optim:AdamW"\nargs = { lr = 1e-3 }',
    ),
    codes.BAD_ARGUMENT_TYPE: Explanation(
        "an argument of the wrong type",
        "The function's annotation says another type.",
        '[optimizer]\nentry = "torch.optim:AdamW"\nargs = { amsgrad = "yes" }',
        '[optimizer]\nentry = "torch.optim:AdamW"\nargs = { amsgrad = true }',
    ),
    codes.NO_LENGTH: Explanation(
        "the dataset has no length or no index",
        "Every sample is seen once at any number of workers, and a run goes on in the middle of an epoch: that takes "
        "a dataset with __len__ and __getitem__, not a stream.",
        "class Stream(IterableDataset):\n    def __iter__(self): ...",
        "class Samples(Dataset):\n    def __len__(self): ...\n    def __getitem__(self, i): ...",
    ),
    codes.NO_FOLDER: Explanation(
        "a folder of job.path does not exist",
        "Paths start at the project's root: the nearest folder at or above the job file with pyproject.toml or .git.",
        '[job]\nname = "mnist"\npath = ["scr"]',
        '[job]\nname = "mnist"\npath = ["."]',
    ),
    codes.UNREADABLE_MODULE: Explanation(
        "a module is not valid Python here",
        "Importing it will fail, unless training uses a newer Python than this command does.",
        "def digits(split)\n    return Samples(split)",
        "def digits(split):\n    return Samples(split)",
    ),
    codes.CANNOT_TELL: Explanation(
        "an entry point is not checked (note)",
        "Reading source does not show what it takes: the package is not installed here, is compiled, or a decorator hides "
        "the arguments. Shown in JSON and SARIF output only; `validate --deep` and the run itself will find out.",
        "@registered\ndef digits(split): ...",
        "def digits(split): ...",
    ),
    codes.NOT_INSTALLED: Explanation(
        "a package is not installed here (note; an error when a run is to start)",
        "An entry point, or a module it is in, imports a package that is neither on the job's path nor installed on this "
        "machine. `validate` may run where nothing is installed, so there it is a note, shown in JSON and SARIF output "
        "only. `run`, `resume`, `chaos` and `verify-elastic` train here, and refuse the job before anything starts.",
        '[model]\nentry = "no_such_package:Net"\nloss = "torch.nn.functional:cross_entropy"',
        '[model]\nentry = "examples.mnist:Net"  # your own, or of an installed package\nloss = "torch.nn.functional:cross_entropy"',
    ),
    codes.NOT_A_FUNCTION: Explanation(
        "a class where a function is called",
        "A loss is called with outputs and targets and returns the loss. Calling a class makes an object instead: "
        "name a function, such as one of torch.nn.functional, or one of yours that uses the class.",
        '[model]\nentry = "examples.mnist:Net"\nloss = "torch.nn:CrossEntropyLoss"',
        '[model]\nentry = "examples.mnist:Net"\nloss = "torch.nn.functional:cross_entropy"',
    ),
    codes.NO_STATE: Explanation(
        "an included object without state",
        "snapshots.include names objects of your modules, used as they are. Each gives its state by state_dict() and takes "
        "it back by load_state_dict(state); a class, a function or a number has none.",
        '[snapshots]\ninclude = { settings = "examples.mnist:Net" }',
        '[snapshots]\ninclude = { curriculum = "my.module:curriculum" }',
    ),
    codes.OBJECT_ARGUMENT: Explanation(
        "an argument that looks like an object",
        "Among the arguments of a factory, a table with the keys `entry` and, where wanted, `args` and `partial`, whose `entry` "
        'has the form "package.module:name", is what calling that gives: a config, a transform, an activation; with partial = true it '
        "is a functools.partial. Objects may stand in lists, dicts and other objects. Every other table is a plain dict, and this is said of "
        "those that look like an object. A dict that would be taken for an object is made by one: "
        '{ entry = "builtins:dict", args = { entry = "a:b" } }.',
        '[model]\nentry = "examples.mnist:Net"\nargs = { width = { entry = "my.sizes:Width", cells = 32 } }\nloss = "torch.nn.functional:cross_entropy"',
        '[model]\nentry = "examples.mnist:Net"\nargs = { width = { entry = "my.sizes:Width", args = { cells = 32 } } }\nloss = "torch.nn.functional:cross_entropy"',
    ),
    codes.FOREIGN_METHOD: Explanation(
        "a method of another class than the model's",
        "optimizer.entry and model.step may name a method of the model's class, as \"module:Class.method\": it is called on the model, "
        "an optimizer's with optimizer.args, a step's with the batch. The model has to be of that class or inherit from it.",
        '[model]\nentry = "examples.mnist:Net"\nstep = "torch.nn:Linear.forward"',
        '[model]\nentry = "examples.mnist:Net"\nstep = "examples.mnist:Net.forward"',
    ),
    **BETWEEN_KEYS,
    **MATRIX,
    **DEEP,
}  # fmt: skip
