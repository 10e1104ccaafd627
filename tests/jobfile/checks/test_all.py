"""What needs several tables: lengths, schedules, intervals and world sizes, in closed forms."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticflow.deep.check import check_deep_facts
from elasticflow.jobfile.checks.training_length import length_of_training, steps_per_epoch
from elasticflow.jobfile.load import load_job
from elasticflow.jobfile.tables.training import DatasetTable, TrainTable
from elasticflow.jobfile.text.source import load_source
from elasticflow.system.units import parse_interval

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

JOB = """
[job]
name = "x"
[model]
entry = "torch.nn:Linear"
args = {{ in_features = 1, out_features = 1 }}
loss = "torch.nn.functional:mse_loss"
[optimizer]
entry = "torch.optim:SGD"
[dataset]
entry = "torch.utils.data:TensorDataset"
global_batch_size = {batch}
{dataset}
[train]
{train}
{rest}
"""
Told = list[tuple[str, str]]


@pytest.fixture
def told(tmp_path: Path) -> Callable[..., Told]:
    """Return a function that checks a job and returns code and message of what it says."""

    def check(rest: str = "", *, train: str = "steps = 100", dataset: str = "", batch: int = 64) -> Told:
        file = tmp_path / "job.toml"
        file.write_text(JOB.format(train=train, dataset=dataset, batch=batch, rest=rest))
        return [
            (each.code, each.message)
            for each in load_job(file).diagnostics
            if each.code not in {"EF209", "EF215"}
        ]

    return check


def walked(samples: int, batch: int, tail: str, epochs: int) -> tuple[int, set[int]]:
    """Return the steps of a run, and the steps that end in each epoch, by walking it."""
    steps, per_epoch, left = 0, [], 0
    for _ in range(epochs):
        left = samples + (left if tail == "spill" else 0)
        full, left = divmod(left, batch)
        per_epoch.append(full + (tail == "short" and left > 0))
        steps += per_epoch[-1]
    return steps + (tail == "spill" and left > 0), set(per_epoch)


@given(
    st.integers(1, 60), st.integers(1, 40), st.sampled_from(["spill", "short", "drop"]), st.integers(1, 12)
)
def test_lengths_in_closed_form_are_those_of_walking(
    samples: int, batch: int, tail: Any, epochs: int
) -> None:
    """Steps of a run, and the fewest and most of an epoch, for every tail."""
    dataset = DatasetTable(entry="a:b", samples=samples, global_batch_size=batch, tail=tail)
    steps, per_epoch = walked(samples, batch, tail, epochs)
    horizon = length_of_training(TrainTable(epochs=epochs), dataset)
    assert (horizon.steps, horizon.epochs) == (steps, epochs)
    fewest, most = steps_per_epoch(dataset, samples)
    assert fewest <= min(per_epoch)
    assert max(per_epoch) <= most


@given(st.integers(1, 10**12), st.integers(1, 10**9), st.integers(1, 10**12), st.integers(1, 10**12 - 1))
def test_an_interval_is_beyond_the_end_only_for_certain(
    steps: int, batch: int, samples: int, many: int
) -> None:
    """Steps and samples are compared as they are; a time may always come; what is not known is never beyond."""
    unknown = DatasetTable(entry="a:b", global_batch_size=batch)
    horizon = length_of_training(TrainTable(steps=steps), unknown)
    assert horizon.is_beyond(parse_interval(f"{many} steps")) == (many > steps)
    assert horizon.is_beyond(parse_interval(f"{many} samples")) == (many > steps * batch)
    assert not horizon.is_beyond(parse_interval(f"{many} epochs"))
    assert not horizon.is_beyond(parse_interval(f"{many} h"))
    by_epochs = length_of_training(TrainTable(epochs=3), unknown)
    assert not by_epochs.is_beyond(parse_interval(f"{many} steps"))
    assert by_epochs.is_beyond(parse_interval("4 epochs"))
    assert not by_epochs.is_beyond(parse_interval("3 epochs"))
    known = DatasetTable(entry="a:b", global_batch_size=batch, samples=samples)
    assert length_of_training(TrainTable(steps=steps), known).epochs == -(-steps * batch // samples)


SCHEDULE = '[lr_scheduler]\nentry = "torch.optim.lr_scheduler:{}"\nargs = {}\ninterval = "{}"'
LENGTHS = [
    ("CosineAnnealingLR", "{ T_max = 100 }", "step", []),
    ("CosineAnnealingLR", "{ T_max = 101 }", "step", ["EF408"]),
    ("CosineAnnealingLR", "{ T_max = 99 }", "step", ["EF408"]),
    ("CosineAnnealingLR", "{ T_max = 5 }", "epoch", []),  # epochs of a job in steps are not known
    ("OneCycleLR", "{ max_lr = 1.0, total_steps = 100 }", "step", []),
    ("OneCycleLR", "{ max_lr = 1.0, total_steps = 99 }", "step", ["EF320"]),
    ("OneCycleLR", "{ max_lr = 1.0, epochs = 2, steps_per_epoch = 50 }", "step", []),
    ("OneCycleLR", "{ max_lr = 1.0, epochs = 2, steps_per_epoch = 51 }", "step", ["EF408"]),
    ("LinearLR", "{ total_iters = 10 }", "step", []),
    ("LinearLR", "{ total_iters = 200 }", "step", ["EF408"]),
    ("ConstantLR", "{ total_iters = 200 }", "step", ["EF408"]),
    ("PolynomialLR", "{ total_iters = 50 }", "step", ["EF408"]),
    ("StepLR", "{ step_size = 30 }", "step", []),
    ("StepLR", "{ step_size = 100 }", "step", ["EF408"]),
    ("MultiStepLR", "{ milestones = [50, 99] }", "step", []),
    ("MultiStepLR", "{ milestones = [50, 100, 150] }", "step", ["EF408", "EF408"]),
    ("CosineAnnealingWarmRestarts", "{ T_0 = 50 }", "step", []),
    ("CosineAnnealingWarmRestarts", "{ T_0 = 500 }", "step", ["EF408"]),
    ("ExponentialLR", "{ gamma = 0.9 }", "step", []),
    ("CosineAnnealingLR", "{ T_max = true }", "step", ["EF205"]),
]


@pytest.mark.parametrize(("name", "args", "interval", "expected"), LENGTHS)
def test_schedules_are_compared_with_the_length_of_training(
    told: Callable[..., Told], name: str, args: str, interval: str, expected: list[str]
) -> None:
    """Too long, too short and just right, for each schedule of torch that has a length."""
    found = [code for code, _ in told(SCHEDULE.format(name, args, interval))]
    assert [code for code in found if code != "EF205"] == [code for code in expected if code != "EF205"]


OURS = '[lr_scheduler]\nentry = "elasticflow.schedules:{}"\nargs = {}'
NUMBERS = [
    ("warmup_cosine", "{ warmup = 10, total = 100 }", []),
    ("warmup_cosine", "{ warmup = 10, total = 101 }", ["EF408"]),
    ("warmup_linear", "{ warmup = 10, total = 99 }", ["EF408"]),  # trains on at a rate of nought
    ("warmup_linear", "{ warmup = 10, total = 99, final = 0.1 }", []),
    ("warmup_cosine", "{ warmup = 101, total = 100 }", ["EF104"]),
    ("warmup_cosine", "{ warmup = -1, total = 100 }", ["EF104"]),
    ("warmup_cosine", "{ warmup = 1, total = 100, final = 10 }", ["EF104"]),
    ("warmup_stable_decay", "{ warmup = 10, total = 100, decay = 90 }", []),
    ("warmup_stable_decay", "{ warmup = 10, total = 100, decay = 91 }", ["EF104"]),
]


@pytest.mark.parametrize(("name", "args", "expected"), NUMBERS)
def test_schedules_of_ours_are_checked_by_their_numbers(
    told: Callable[..., Told], name: str, args: str, expected: list[str]
) -> None:
    """What a schedule would refuse when it is made is refused before."""
    assert [code for code, _ in told(OURS.format(name, args))] == expected


def test_a_schedule_of_epochs_is_compared_with_epochs(told: Callable[..., Told]) -> None:
    """With `interval = "epoch"` the number of epochs counts; steps follow from `samples`."""
    rest = SCHEDULE.format("CosineAnnealingLR", "{ T_max = 10 }", "epoch")
    assert told(rest, train="epochs = 10") == []
    assert [code for code, _ in told(rest, train="epochs = 5")] == ["EF408"]
    rest = SCHEDULE.format("CosineAnnealingLR", "{ T_max = 10 }", "step")
    assert told(rest, train="epochs = 5") == []
    assert told(rest, train="epochs = 5", dataset="samples = 128") == []
    assert [code for code, _ in told(rest, train="epochs = 5", dataset="samples = 1280")] == ["EF408"]


@pytest.mark.parametrize(
    ("rest", "expected"),
    [
        ('[restarts]\nrefill = "5 min"\n[snapshots]\nevery = "10 min"', ["EF410"]),
        ('[restarts]\nrefill = "10 min"\n[snapshots]\nevery = "10 min"', []),
        ('[restarts]\nrefill = "5 min"\n[snapshots]\nevery = ["10 min", "50 steps"]', []),
        ('[restarts]\nrefill = "1 step"\n[snapshots]\nevery = "10 min"', []),  # counts progress alone
        ('[snapshots]\ngrace = "0.9 s"', ["EF409"]),
        ('[snapshots]\ngrace = "1 s"', []),
    ],
)
def test_budget_and_grace_are_compared_with_snapshots(
    told: Callable[..., Told], rest: str, expected: list[str]
) -> None:
    """A refill by time that comes before any snapshot, and a grace that nothing fits into."""
    assert [code for code, _ in told(rest)] == expected


def test_the_largest_numbers_are_checked_at_once(told: Callable[..., Told]) -> None:
    """Nothing loops over a range: a job at every bound is checked like any other."""
    rest = '[nodes]\nmax = 65536\nnproc_per_node = 1024\n[evaluation]\nentry = "torch.utils.data:TensorDataset"\nevery = "999999999999 steps"'
    train = "epochs = 1000000000"
    found = told(rest, train=train, dataset="samples = 1000000000000", batch=1)
    assert {"EF302", "EF401"} <= {code for code, _ in found}


def test_defaults_never_come_too_late(told: Callable[..., Told]) -> None:
    """Only what the files say is checked: a short run with every default has nothing to warn of."""
    assert told(train="steps = 1") == []
    assert told(train="steps = 1", dataset="samples = 1000", rest="[snapshots]\n[logging]\n[restarts]") == []


def test_a_trial_that_a_flag_cuts_short_is_not_warned_of(tmp_path: Path) -> None:
    """`--set train.steps=5` is no mistake in the file; what the flags themselves say is checked."""
    file = tmp_path / "job.toml"
    rest = '[logging]\nevery = "50 steps"\n' + SCHEDULE.format(
        "OneCycleLR", "{ max_lr = 1.0, total_steps = 100 }", "step"
    )
    file.write_text(JOB.format(train="steps = 100", dataset="", batch=64, rest=rest))

    def codes_of(*flags: str) -> list[str]:
        return [
            each.code for each in load_job(file, flags).diagnostics if each.code not in {"EF209", "EF215"}
        ]

    assert codes_of("train.steps=5") == []
    assert codes_of("train.steps=500") == ["EF320"]
    assert codes_of("train.steps=5", "logging.every=10 steps") == ["EF407"]


LEARNT = [
    ("", 2 << 30, 16 << 30, None),
    ("", 32 << 30, 16 << 30, "staging a snapshot takes 32.0 GiB on each node, and this machine has 16.0 GiB"),
    ('[nodes]\nmin = 4\nmax = 4\nendpoint = "h:1"\n[snapshots]\nuri = "s3://b"', 32 << 30, 16 << 30, None),
    ('[snapshots]\nstaging_limit = "100 MB"', 200 << 20, None, "snapshots.staging_limit is too small: each node takes 200 MiB for snapshots"),
    ('[snapshots]\nstaging_limit = "1 GiB"', 200 << 20, None, None),
    ('[snapshots]\nstaging_limit = "1 GiB"\nmemory = "1 step"', 512 << 20, None, "snapshots.staging_limit is too small: each node takes 1.5 GiB for snapshots"),
    ('[snapshots]\nmemory = "1 step"', 5 << 30, 16 << 30, "staging a snapshot and holding it in memory takes 20.0 GiB on each node, and this machine has 16.0 GiB"),
    ('[snapshots]\nmemory = "1 step"', None, 1, None),
]  # fmt: skip


@pytest.mark.parametrize(("rest", "snapshot_bytes", "memory_bytes", "expected"), LEARNT)
def test_memory_for_snapshots_is_compared_once_their_size_is_known(
    tmp_path: Path, rest: str, snapshot_bytes: int | None, memory_bytes: int | None, expected: str | None
) -> None:
    """The need is most at the fewest nodes; the tier in memory holds three copies more."""
    file = tmp_path / "job.toml"
    file.write_text(JOB.format(train="steps = 100", dataset="", batch=64, rest=rest))
    job = load_job(file).job
    assert job is not None
    found = check_deep_facts(
        load_source(file), job, samples=None, snapshot_bytes=snapshot_bytes, memory_bytes=memory_bytes
    )
    assert [each.message for each in found] == ([] if expected is None else [expected])


def test_a_length_that_was_found_out_is_used_for_all_checks_of_length(tmp_path: Path) -> None:
    """Epochs become steps: the schedule and the intervals are checked after all."""
    file = tmp_path / "job.toml"
    rest = '[logging]\nevery = "50 steps"\n' + SCHEDULE.format(
        "OneCycleLR", "{ max_lr = 1.0, total_steps = 9 }", "step"
    )
    file.write_text(JOB.format(train="epochs = 2", dataset="", batch=64, rest=rest))
    job = load_job(file).job
    assert job is not None
    found = check_deep_facts(load_source(file), job, samples=640, snapshot_bytes=None, memory_bytes=None)
    assert [each.code for each in found] == ["EF320", "EF407"]


def test_order_of_data_shards_is_a_note(tmp_path: Path) -> None:
    """Nothing that --strict refuses: nobody could do anything about it in the file."""
    file = tmp_path / "job.toml"
    file.write_text(JOB.format(train="steps = 100", dataset="shards = 16", batch=64, rest=""))
    assert {each.severity for each in load_job(file).diagnostics if each.code == "EF406"} == {"note"}


def test_worker_for_each_gpu_does_not_train_on_the_cpu(told: Callable[..., Told]) -> None:
    """One of the keys is wrong; a worker for each core, or a type of GPU, goes with the other."""
    message = 'nodes.nproc_per_node = "gpu" and nodes.device = "cpu" exclude each other'
    assert told('[nodes]\nnproc_per_node = "gpu"\ndevice = "cpu"') == [("EF106", message)]
    assert told('[nodes]\nnproc_per_node = "gpu"\ndevice = "cuda"') == []
    assert told('[nodes]\nnproc_per_node = "cpu"\ndevice = "cpu"') == []


def test_an_evaluation_that_measures_nothing_is_refused(told: Callable[..., Told]) -> None:
    """With a step of its own a set has no loss: without metrics its lines would be empty, for hours."""
    table = '[evaluation.val]\nentry = "torch.utils.data:StackDataset"\nstep = "m:step"\n'
    message = "evaluation.val measures nothing: it has no metrics, and with a step of its own no loss"
    assert [("EF102", message)] == told(table)
    assert [] == told(f'{table}metrics = {{ accuracy = "m:accuracy" }}')


def test_remedies_for_large_numbers_can_be_followed(tmp_path: Path) -> None:
    """Degrees near the one that was meant, found without walking all; no more virtual shards than a job may have."""
    file = tmp_path / "job.toml"

    def help_of(code: str, batch: int, train: str, rest: str) -> str:
        file.write_text(JOB.format(train=f"steps = 1\n{train}", dataset="", batch=batch, rest=rest))
        (found,) = [each for each in load_job(file).diagnostics if each.code == code]
        return found.help or ""

    nodes = "[nodes]\nmax = 65536\nnproc_per_node = 1024\n"
    remedy = help_of("EF327", 10**9, "", f"{nodes}[parallel]\nshard = 1048575")
    assert "such as 1048496, 1048512, 1048528, 1048544, 1048560, 1048576;" in remedy
    exact = 'consistency = "exact"\nvirtual_shards = 8'
    assert "use virtual_shards = 1, or a batch of 1000000 or 1000008" == help_of(
        "EF308", 1_000_003, exact, ""
    )
    few = "[nodes]\nnproc_per_node = 8"
    assert "use a batch of 1000000 or 1000008" == help_of("EF308", 1_000_003, exact, few)
