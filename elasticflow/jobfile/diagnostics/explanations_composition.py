"""What each code of references and of [matrix] means; see `jobfile/diagnostics/explanations.py`."""

from __future__ import annotations

from elasticflow.jobfile.diagnostics import codes
from elasticflow.jobfile.diagnostics.explanation import Explanation

_WITH_AXES = "[matrix.axes]\noptimizer.args.lr = [1e-3, 3e-3]\njob.seed = [1, 2]"

REFERENCES: dict[str, Explanation] = {
    codes.NO_REFERENCE: Explanation(
        "a reference that nothing is known about",
        "In a text, ${env:NAME} stands for a variable of the environment, ${env:NAME:-default} for the default where it is "
        "not set, ${job.name} and ${job.seed} for the job's, ${matrix.case} for the case's name. $${ stands for ${ itself.",
        '[snapshots]\nuri = "s3://bucket/${job.nmae}"',
        '[snapshots]\nuri = "s3://bucket/${job.name}"',
    ),
    codes.NO_REFERENCE_HERE: Explanation(
        "a reference where none may stand",
        "What is trained stands in the file; where it is trained, and where its data and snapshots are, may come from the "
        "environment: dataset.args, evaluation.args, model.weights, nodes.endpoint, nodes.interface, snapshots.uri, "
        "snapshots.options and torchrun.log_dir. $${ stands for ${ itself.",
        '[model]\nentry = "examples.mnist:Net"\nargs = { name = "${env:USER}" }\nloss = "torch.nn.functional:cross_entropy"',
        '[snapshots]\nuri = "file:///scratch/${env:USER:-me}"',
    ),
    codes.NOT_SET: Explanation(
        "a variable that is not set",
        "`run`, `plan`, `compile` and `resume` look variables up, once, and what they stand for becomes part of the job: "
        "another value is a difference that `resume` tells. `validate` does not look: what it says of a file is the same on "
        "every machine, so for it this is a note, in JSON, GitHub and SARIF output only.",
        '[snapshots]\nuri = "s3://${env:BUCKET}/mnist"',
        '[snapshots]\nuri = "s3://${env:BUCKET:-bucket}/mnist"',
    ),
    codes.SECRET_RECORDED: Explanation(
        "a secret where the run would record it",
        "The job is written into the run folder and beside its snapshots. Left out are the password in snapshots.uri, and "
        "what stands in snapshots.options at a key named like a secret; a variable named like one may stand only there. Your "
        "own code reads such a variable itself.",
        '[dataset]\nentry = "examples.mnist:digits"\nargs = { split = "${env:API_TOKEN}" }\nglobal_batch_size = 64',
        '[snapshots]\noptions = { secret = "${env:SECRET_KEY:-}" }',
    ),
}  # fmt: skip

MATRIX: dict[str, Explanation] = {
    codes.AXIS: Explanation(
        "an axis of the matrix cannot be used",
        "An axis is a key of the job, as in the file but for its list of values: numbers, texts, true or false, each once. "
        "Tables and lists are values of cases with a name: [matrix.cases.NAME].",
        "[matrix.axes]\noptimizer.args.lr = 1e-3",
        _WITH_AXES,
    ),
    codes.TOO_MANY_CASES: Explanation(
        "the matrix makes too many cases",
        "Every combination of the axes' values is a case, and a file may have 5,000.",
        f"[matrix.axes]\njob.seed = {list(range(1, 81))}\ntrain.steps = {list(range(1, 81))}",
        _WITH_AXES,
    ),
    codes.CASE_NAME: Explanation(
        "a case has no name of its own",
        "A case is named after the values of its axes, and its job and run folder after the job and the case. Two texts that "
        "differ in other than letters and digits only give the same name; a name has at most 100 letters.",
        '[matrix.axes]\ntrain.precision = ["fp32", "fp32 "]',
        '[matrix.axes]\ntrain.precision = ["fp32", "bf16"]',
    ),
    codes.EXCLUSION: Explanation(
        "an exclusion that leaves nothing out",
        "An exclusion names values of axes: all cases with all of them are left out.",
        f"{_WITH_AXES}\n\n[[matrix.exclude]]\njob.seed = 3",
        f"{_WITH_AXES}\n\n[[matrix.exclude]]\njob.seed = 2\noptimizer.args.lr = 1e-3",
    ),
    codes.CASE_KEY: Explanation(
        "a key that no case may change",
        "The job of a case is called after the job and the case; a case extends no files and has no cases of its own.",
        '[matrix.cases.wide]\njob.name = "wide"',
        "[matrix.cases.wide]\njob.seed = 2",
    ),
    codes.AXIS_OVERRIDDEN: Explanation(
        "a flag decides what an axis should (warning)",
        "Flags win over files and over cases. One that sets the key of an axis makes cases that differ in their names only: "
        "change the axis instead.",
        "elasticflow run jobs/sweep.toml --all --set optimizer.args.lr=0.1",
        "elasticflow run jobs/sweep.toml --all --set 'matrix.axes.optimizer.args.lr=[0.1]'",
    ),
    codes.NO_CASES: Explanation(
        "the matrix makes no case",
        "It has neither axes nor cases, or everything is excluded.",
        "[matrix]\nexclude = []",
        _WITH_AXES,
    ),
}  # fmt: skip
