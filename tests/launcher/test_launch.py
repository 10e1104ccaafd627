"""From a job to a supervised launch: lock, drift, edited entry points, snapshot place."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import socket
import time
from dataclasses import dataclass, field, replace
from importlib import metadata, util
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from elasticflow.compiler.plan.launch_plan import plan_job
from elasticflow.errors import (
    DriftRefusedError,
    GpuMissingError,
    StorageError,
    TorchMissingError,
)
from elasticflow.launcher import launch as launch_module
from elasticflow.launcher.launch import check_file_sizes, check_gpus, check_torch, launch
from elasticflow.launcher.rendezvous.store_server import StoreServer
from elasticflow.launcher.restarts.restart_ledger import RestartLedger
from elasticflow.launcher.restarts.restart_policy import FailedAttempt, RestartPolicy
from elasticflow.launcher.supervisor.command_runner import CommandRunner
from elasticflow.launcher.supervisor.commands import ClaimGeneration, GenerationClaimed
from elasticflow.launcher.supervisor.launch_record import Request
from elasticflow.protocol.json_codec import from_json, to_json
from elasticflow.run_folder import RunFolder, snapshot_place
from elasticflow.snapshots.client.writer_process import WriterStart
from tests.compiler.jobs import make_job
from tests.snapshots.store.test_catalog import commit

if TYPE_CHECKING:
    from collections.abc import Callable

    from elasticflow.launcher.supervisor.launch_record import Launch

_SEED = "  would corrupt the run\n    job.seed  0 -> 7  "


@dataclass
class Trial:
    """A project whose launches end at once; what would have been supervised is kept."""

    root: Path
    launches: list[Launch] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    accept_drift: bool = False

    @property
    def folder(self) -> RunFolder:
        """The run's folder."""
        return RunFolder.of(self.root, "small", "run")

    def launch(self, **changes: Any) -> Launch:
        """Launch the job with keys changed and return what was to be supervised."""
        self.warnings.clear()
        files = (self.root / "job.toml",)
        request = Request(make_job(**changes), files, (), self.root, self.folder, self.accept_drift)
        assert 0 == launch(request, lambda _: None, self.warnings.append)
        return self.launches[-1]

    def refusal(self, **changes: Any) -> str:
        """Return the whole message with which a launch of the changed job is refused; the run has a snapshot."""
        if self.launches[-1].catalog.newest() is None:
            commit(self.launches[-1].catalog, 1)
        with pytest.raises(DriftRefusedError) as refused:
            self.launch(**changes)
        return str(refused.value)

    def train_py(self, number: int) -> Path:
        """Return the entry point of a launch."""
        return self.folder.launch(number) / "train.py"


@pytest.fixture
def trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Trial:
    """Return a project with a job file, its launches caught where the supervisor would begin."""
    (tmp_path / "job.toml").write_text("# as make_job says\n")
    made = Trial(tmp_path)

    def supervisor(launch: Launch, show: Callable[[dict[str, Any]], None], tick: object) -> Any:
        made.launches.append(launch)
        return SimpleNamespace(run=lambda: 0)

    monkeypatch.setattr(launch_module, "Supervisor", supervisor)
    return made


def claim(
    launch: Launch,
    reason: str,
    last: int = 0,
    nodes: tuple[str, ...] = (),
    ledger: RestartLedger | None = None,
) -> int | None:
    """Claim the launch's next generation; by default with the ledger as the run folder has it."""
    launch = replace(launch, ledger=ledger or RestartLedger(launch.request.folder.ledger))
    nobody: Any = SimpleNamespace()
    answer = CommandRunner(launch, nobody, nobody, nobody).run(ClaimGeneration(reason, last, nodes))
    return answer.number if isinstance(answer, GenerationClaimed) else None


def test_launches_of_a_run_are_counted(trial: Trial) -> None:
    """The first is new, the next continues with the same run; each has its own folder."""
    first, second = trial.launch(), trial.launch()

    assert [(1, False, False), (2, True, False)] == [
        (made.number, made.is_resumed, made.is_edited) for made in (first, second)
    ]
    assert [1, 2] == trial.folder.launch_numbers()
    assert [] == trial.warnings


@pytest.mark.parametrize("is_outside", [False, True])
def test_launch_is_marked_where_other_machines_may_join(trial: Trial, *, is_outside: bool) -> None:
    """At a store outside, another machine may wait to take over a run of one node."""
    changes: dict[str, Any] = {}
    listener = socket.create_server(("127.0.0.1", 0))
    with contextlib.closing(StoreServer(listener)):
        if is_outside:
            endpoint = f"127.0.0.1:{listener.getsockname()[1]}"
            changes = {"nodes__endpoint": endpoint, "torchrun__rdzv_conf": {"is_host": False}}
        made = trial.launch(nodes__max=1, **changes)
    assert is_outside == made.catalog.has_launch(made.origins.launch_id)


def test_run_with_snapshots_elsewhere_goes_on_with_them(trial: Trial) -> None:
    """The run folder is new, but a generation was claimed at the URI: another machine ran it before."""
    first = trial.launch(snapshots__uri="store")
    claim(first, "start")
    shutil.rmtree(trial.folder.path)
    again = trial.launch(snapshots__uri="store")

    assert (1, True) == (again.number, again.is_resumed)
    assert 2 == claim(again, "resume")


def test_run_that_another_machine_went_on_with_is_not_taken_back(trial: Trial) -> None:
    """A launch claims on after its own last generation only; begun anew, on purpose, it takes the run over again."""
    first = trial.launch(snapshots__uri="store")
    assert 1 == claim(first, "start")
    assert 2 == claim(first, "crash", 1)
    shutil.rmtree(trial.folder.path)
    elsewhere = trial.launch(snapshots__uri="store")
    assert 3 == claim(elsewhere, "resume")
    with pytest.MonkeyPatch.context() as another_machine:
        another_machine.setattr(socket, "gethostname", lambda: "another")
        assert claim(first, "crash", 2) is None
    assert 4 == claim(elsewhere, "crash", 3)


def test_claim_whose_answer_was_lost_is_the_launchs_own(trial: Trial) -> None:
    """The store made it and could not say so: asked again, it is no other launch's."""
    launched = trial.launch()
    assert 1 == claim(launched, "start", nodes=("n0",))
    assert 2 == claim(launched, "crash", 1, ("n0", "n1"))
    assert 2 == claim(launched, "crash", 1, ("n0", "n1"))


def test_failures_are_counted_on_where_there_is_no_run_folder_too(trial: Trial) -> None:
    """What failed before a generation lies beside the snapshots: another machine has what is left of the budget."""
    first = trial.launch(snapshots__uri="store")
    ledger = RestartLedger(first.request.folder.ledger)
    assert 1 == claim(first, "start", ledger=ledger)
    for generation in (1, 2):
        charge(first, ledger, FailedAttempt("crash", step=10 * generation, generation=generation))
        assert generation + 1 == claim(first, "crash", generation, ledger=ledger)
    shutil.move(trial.folder.path, trial.folder.path.with_name("here"))

    elsewhere = trial.launch(snapshots__uri="store")
    goes_on = RestartLedger(elsewhere.request.folder.ledger)
    assert ledger.entries == goes_on.entries
    assert 1 == RestartPolicy(elsewhere.plan.restarts).left(goes_on.entries, time.time())
    charge(elsewhere, goes_on, FailedAttempt("hang", step=30, generation=3))
    assert 4 == claim(elsewhere, "resume", ledger=goes_on)
    shutil.rmtree(trial.folder.path)
    shutil.move(trial.folder.path.with_name("here"), trial.folder.path)

    back = trial.launch(snapshots__uri="store")
    assert goes_on.entries == RestartLedger(back.request.folder.ledger).entries


def charge(launch: Launch, ledger: RestartLedger, failed: FailedAttempt) -> None:
    """Write a failure down as the supervisor does."""
    entry = RestartPolicy(launch.plan.restarts).decide(failed, ledger.entries, time.time()).entry
    assert entry is not None
    ledger.append(entry)


def test_job_is_compared_where_there_is_no_run_folder_too(trial: Trial) -> None:
    """The job is recorded beside the snapshots: another machine may not corrupt the run either."""
    trial.launch(snapshots__uri="store")
    shutil.rmtree(trial.folder.path)

    assert _SEED in trial.refusal(snapshots__uri="store", job__seed=7)


def test_corrupting_change_is_refused(trial: Trial) -> None:
    """All differences of that weight are named, with both values, and nothing is written."""
    trial.launch(model__args={"width": 8})
    expected = (
        "run run cannot continue with what changed since its last launch:\n"
        "  would corrupt the run\n"
        "    job.seed           0 -> 7      the order of samples is another: some would be repeated, some left out\n"
        "    model.args.width   8 -> 16     the snapshots hold other state than the job would\n"
        "  changes the trajectory\n"
        "    optimizer.args.lr  0.1 -> 0.2  the rest of the run is trained in another way; what the optimizer has learned stays\n"
        "  help: start a new run of the changed job: elasticflow run"
    )

    assert expected == trial.refusal(model__args={"width": 16}, job__seed=7, optimizer__args={"lr": 0.2})
    assert [1] == trial.folder.launch_numbers()


def test_consent_does_not_make_a_corrupting_change_harmless(trial: Trial) -> None:
    """--accept-drift is for the trajectory."""
    trial.launch()
    trial.accept_drift = True

    assert _SEED in trial.refusal(job__seed=7)


def test_consent_is_given_to_one_launch(trial: Trial) -> None:
    """Its scripts are told; the environment of this process, which later launches have, is not changed."""
    trial.launch()
    before = dict(os.environ)
    trial.accept_drift = True

    assert trial.launch(optimizer__args={"lr": 0.2}).request.accept_drift
    assert before == dict(os.environ)


def test_change_of_the_trajectory_needs_consent(trial: Trial) -> None:
    """Refused with the difference named; wanted, it is said and done."""
    trial.launch()
    table = (
        "  changes the trajectory\n"
        "    optimizer.args.lr  0.1 -> 0.2  the rest of the run is trained in another way; what the optimizer has learned stays"
    )
    expected = (
        f"run run cannot continue with what changed since its last launch:\n{table}\n"
        "  help: undo the change, or say that you want it: --accept-drift"
    )
    assert expected == trial.refusal(optimizer__args={"lr": 0.2})
    trial.accept_drift = True
    made = trial.launch(optimizer__args={"lr": 0.2})

    assert [
        f"run run continues with what changed since its last launch, as accepted:\n{table}"
    ] == trial.warnings
    assert ["optimizer.args.lr"] == [each.key for each in made.drift]
    record = json.loads((trial.folder.launch(2) / "job.json").read_text())
    assert ["optimizer.args.lr"] == [each["key"] for each in record["drift"]]


def test_drift_accepted_here_is_not_asked_again_elsewhere(trial: Trial) -> None:
    """What a launch continued with is recorded beside the snapshots, for machines that have no run folder."""
    trial.launch(snapshots__uri="store")
    trial.accept_drift = True
    trial.launch(snapshots__uri="store", optimizer__args={"lr": 0.2})
    trial.accept_drift = False
    trial.folder.path.rename(trial.folder.path.with_name("of another machine"))
    trial.launch(snapshots__uri="store", optimizer__args={"lr": 0.2})
    assert [] == trial.warnings

    trial.accept_drift = True  # and back: the older folder here does not count
    trial.launch(snapshots__uri="store", optimizer__args={"lr": 0.3})
    trial.accept_drift = False
    shutil.rmtree(trial.folder.path)
    trial.folder.path.with_name("of another machine").rename(trial.folder.path)
    trial.launch(snapshots__uri="store", optimizer__args={"lr": 0.3})
    assert [] == trial.warnings


def test_jobs_own_code_that_changed_is_told_and_does_not_block(trial: Trial) -> None:
    """A bug fixed between two launches: said, recorded with its text, and expected after an error of that code."""
    code = trial.root / "pieces.py"
    code.write_text("class Net: ...\n")
    trial.launch()
    assert "class Net: ...\n" == (trial.folder.launch(1) / "sources" / "pieces.py").read_text()
    code.write_text("class Net:\n    fixed = True\n")
    trial.folder.state.write_text(json.dumps({"verdict": {"class": "user_error"}}))
    made = trial.launch()

    assert [("sources.pieces.py", "harmless")] == [(each.key, each.weight) for each in made.drift]
    assert "dataset, model: expected after an error in the job's own code" in trial.warnings[0]
    code.write_text("class Net:\n    fixed = 2\n")
    trial.folder.state.unlink()
    trial.launch()
    assert "counts as it is now, from here on" in trial.warnings[0]


def test_jobs_own_code_is_part_of_the_bits(trial: Trial) -> None:
    """In exact mode changed code needs consent, whatever went wrong before."""
    code = trial.root / "pieces.py"
    code.write_text("")
    trial.launch(train__consistency="exact")
    code.write_text("# other\n")
    trial.folder.state.write_text(json.dumps({"verdict": {"class": "user_error"}}))

    assert "changes the trajectory\n    sources.pieces.py" in trial.refusal(train__consistency="exact")


def test_what_the_workers_found_is_looked_at_again(trial: Trial) -> None:
    """A module imported under a name made at run time, and a library: known from the launch before."""
    trial.launch()
    (trial.root / "plugin.py").write_text("new")
    found = {"files": {"plugin.py": "0" * 64}, "versions": {"click": "0.0.1", "gone-package": "1.0"}}
    (trial.folder.launch(1) / "environment.json").write_text(json.dumps(found))
    made = trial.launch()

    assert ["sources.plugin.py", "versions.click", "versions.gone-package"] == [e.key for e in made.drift]


def test_drift_is_measured_against_the_launch_before(trial: Trial) -> None:
    """Not against the first one: what was accepted once is the run's job from then on."""
    trial.launch()
    trial.accept_drift = True
    trial.launch(optimizer__args={"lr": 0.2})
    trial.accept_drift = False
    trial.launch(optimizer__args={"lr": 0.2})

    assert "0.2 -> 0.1" in trial.refusal()


def test_harmless_change_is_said(trial: Trial) -> None:
    """Other workers, other epochs: the run continues, the change is told."""
    trial.launch()
    trial.launch(nodes__nproc_per_node=3)

    expected = (
        "run run continues with what changed since its last launch:\n"
        "  harmless\n"
        "    nodes.nproc_per_node  2 -> 3  the global batch is the same at every world size"
    )
    assert [expected] == trial.warnings


def test_edited_entry_point_is_carried_forward(trial: Trial) -> None:
    """The next launches run the edited train.py, and each of them says so."""
    trial.launch()
    edited = trial.train_py(1).read_text() + "\n# mine\n"
    trial.train_py(1).write_text(edited)
    second, third = trial.launch(), trial.launch()

    assert [True, True] == [second.is_edited, third.is_edited]
    assert [edited, edited] == [trial.train_py(n).read_text() for n in (2, 3)]
    assert [] == trial.warnings


def test_edited_entry_point_of_a_changed_job_is_left_behind(trial: Trial) -> None:
    """It was edited for another job: made anew, and the sentence says where the edited one is."""
    trial.launch()
    trial.train_py(1).write_text(trial.train_py(1).read_text() + "\n# mine\n")
    made = trial.launch(train__epochs=5)

    assert not made.is_edited
    assert "# mine" not in trial.train_py(2).read_text()
    assert "    train.epochs  2 -> 5  the run ends sooner or later" in trial.warnings[0]
    assert [
        f"the job changed, so train.py is made anew; the edited one stays in {trial.folder.launch(1)}",
    ] == trial.warnings[1:]


def test_place_that_cannot_be_written_is_refused_before_anything_is_made(trial: Trial) -> None:
    """The key is named; no run folder is left."""
    (trial.root / "occupied").write_text("a file")
    with pytest.raises(StorageError, match=r"snapshots\.uri"):
        trial.launch(snapshots__uri="occupied/here")

    assert not trial.folder.path.exists()


@pytest.mark.parametrize(
    ("uri", "expected"),
    [
        (None, ("{run}", "")),
        ("snapshots", ("{root}/snapshots", "run/")),
        ("../shared", ("{root}/../shared", "run/")),
        ("/mnt/store", ("/mnt/store", "run/")),
        ("s3://bucket/path", ("s3://bucket/path", "run/")),
    ],
)
def test_snapshot_place(tmp_path: Path, uri: str | None, expected: tuple[str, str]) -> None:
    """Without a URI the run folder; a relative path from the project root; below a URI each run has its prefix."""
    folder = RunFolder.of(tmp_path, "small", "run")
    place = expected[0].format(run=folder.path, root=tmp_path), expected[1]

    assert place == snapshot_place(uri, folder, tmp_path)


def test_writer_is_told_where_and_what_to_keep(tmp_path: Path) -> None:
    """The writer's configuration holds what the plan says, under the run's own prefix."""
    job = make_job(
        snapshots__keep={"last": 4, "every": "10 epochs", "within": "2 h"},
        snapshots__integrity="sha256",
        snapshots__staging_limit="1.5 GiB",
        snapshots__options={"anon": True},
    )
    plan = plan_job(job, project_root=tmp_path, job_files=(tmp_path / "job.toml",))
    expected = {
        "uri": None,
        "every": ["10 min", "1 epoch"],
        "memory": "auto",
        "keep_last": 4,
        "keep_best": None,
        "keep_every": "10 epochs",
        "keep_within": "2 h",
        "best_mode": None,
        "integrity": "sha256",
        "staging_limit": "1.5 GiB",
        "options": {"anon": True},
    }
    start = WriterStart("s3://b", "run", plan.snapshots, "run/")

    assert expected == json.loads(to_json(start))["settings"]
    assert start.settings.staging_bytes == 3 << 29
    assert start == from_json(WriterStart, json.loads(to_json(start)))


def test_missing_torch_is_refused_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """One line and the command."""
    monkeypatch.setattr(util, "find_spec", lambda _: None)
    with pytest.raises(TorchMissingError) as refused:
        check_torch(lambda _: None)

    assert "torch is not installed\n  help: pip install 'elasticflow[torch]'" == str(refused.value)


@pytest.mark.parametrize(
    ("version", "visible", "has_driver", "why"),
    [
        ("2.13.0+cpu", None, True, "built without CUDA"),
        ("2.13.0", "", True, 'CUDA_VISIBLE_DEVICES is ""'),
        ("2.13.0", None, False, "no NVIDIA driver"),
        ("2.13.0+rocm6.4", None, False, None),
        ("2.13.0+xpu", "", False, None),
        ("2.13.0", "0", True, None),
    ],
)
def test_workers_per_gpu_are_refused_where_there_is_none(
    monkeypatch: pytest.MonkeyPatch, version: str, visible: str | None, *, has_driver: bool, why: str | None
) -> None:
    """Before anything starts: in one line, with the reason and what to write."""
    monkeypatch.setattr(metadata, "version", lambda _: version)
    monkeypatch.setattr(Path, "exists", lambda _: has_driver)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    check_gpus(make_job())
    job = make_job(nodes__nproc_per_node="gpu")
    if why is None:
        check_gpus(job)
        return
    with pytest.raises(GpuMissingError, match=why) as refused:
        check_gpus(job)
    assert "nodes.nproc_per_node=auto" in (refused.value.remedy or "")


def test_files_that_may_not_grow_are_refused_or_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before an agent ends by them; where there is no limit, nothing is said."""
    told: list[str] = []
    for limit in (resource.RLIM_INFINITY, 1 << 30):
        monkeypatch.setattr(resource, "getrlimit", lambda _, limit=limit: (limit, limit))
        check_file_sizes(told.append)
    assert ["a file may have 1,073,741,824 bytes here"] == [each.partition(", in")[0] for each in told]
    monkeypatch.setattr(resource, "getrlimit", lambda _: (8192, 8192))
    with pytest.raises(StorageError, match=r"a file may have 8,192 bytes") as refused:
        check_file_sizes(told.append)
    assert "ulimit -f unlimited" == refused.value.remedy


@pytest.mark.parametrize(("found", "told"), [("2.13.0+cpu", False), ("2.15.0", False), ("2.1.3", True)])
def test_torch_never_tried_is_told(monkeypatch: pytest.MonkeyPatch, found: str, *, told: bool) -> None:
    """Another minor version than the tested one is a sentence, not a refusal."""
    monkeypatch.setattr(metadata, "version", lambda _: found)
    warnings: list[str] = []
    check_torch(warnings.append)

    expected = f"torch {found} has not been tried with this version of elasticflow; 2.13, 2.14 and 2.15 have"
    assert ([expected] if told else []) == warnings
