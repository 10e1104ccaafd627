"""`elasticflow snapshots ...` on a run whose snapshots a real writer took."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from torch import nn

from elasticflow.cli.completion_candidates import complete
from elasticflow.cli.main import call, group
from elasticflow.cli.snapshots import selection, verify
from elasticflow.compiler.launch_folder import launch_files, materialize
from elasticflow.compiler.plan.launch_plan import plan_job
from elasticflow.compiler.provenance.origins import Made, Origins
from elasticflow.errors import SnapshotNotFoundError
from elasticflow.launcher.journal.run_lock import locked
from elasticflow.launcher.resume_check import record_job
from elasticflow.observe.snapshots.rows import SnapshotRow, pick_row
from elasticflow.protocol.snapshot_settings import Keep
from elasticflow.run_folder import RunFolder
from elasticflow.snapshots.store.catalog import Catalog
from elasticflow.storage.storage import Storage
from tests.compiler.jobs import make_job
from tests.observe.hand_made import event
from tests.snapshots import in_pieces
from tests.snapshots.conftest import Bench
from tests.snapshots.format.test_manifest import signed
from tests.snapshots.taking import Training
from tests.snapshots.test_frozen import FILE, share

if TYPE_CHECKING:
    from collections.abc import Callable

    from elasticflow.observe.snapshots.locate import SnapshotSource

ROOT = Path(__file__).resolve().parents[3]
RUN_ID = "20261120-100000-4f2a"
Ran = tuple[int, str, str]
# Steps and metrics of two generations; the second resumed from step 20.
TAKEN = {1: {10: 0.7, 20: 0.9, 30: None}, 2: {30: 0.8, 40: 0.85, 50: None}}


def name_of(step: int, generation: int = 2) -> str:
    """Return the name of a snapshot."""
    return f"{step:012d}-{generation:04d}-{step:08x}"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory, real_processes: None) -> Path:
    """Make a project with one run: two workers killed after step 33, one worker from step 20 on, interrupted."""
    root = tmp_path_factory.mktemp("project")
    (root / "pyproject.toml").touch()
    folder = RunFolder.of(root, "small", RUN_ID)
    job = make_job(
        evaluation__entry="pieces:digits",
        evaluation__metrics={"accuracy": "pieces:accuracy"},
        evaluation__best="max accuracy",
        snapshots__keep={"last": 2, "best": 1},
    )
    plan = plan_job(job, project_root=root, job_files=(root / "job.toml",))
    materialize(folder.launch(1), launch_files(plan, job, folder.launch(1), project_root=root))
    folder.state.write_text(json.dumps({"status": "interrupted", "job": "small", "run_id": RUN_ID}))
    bench = Bench(str(folder.path))
    record_job(folder, bench.catalog, plan, Made(job, Origins({})))
    writer = bench.writer(keep_last=100)
    for generation, reason in ((1, "start"), (2, "crash")):
        bench.catalog.claim_generation({"launch": 1, "reason": reason})
        world = 3 - generation
        clients = [bench.connect(writer, rank, world, generation=generation) for rank in range(world)]
        training = Training(model=nn.Linear(4, 4))
        parent = name_of(20, 1) if generation == 2 else None
        for step, metric in TAKEN[generation].items():
            training.steps = step
            training.take(clients, generation, metric=metric, epoch=step // 20, parent=parent)
    bench.close()
    happened = [
        event(0, "generation.started", 1, world_size=2, nodes=1, reason="start"),
        event(0, "training.started", 1, restored_from=None),
        event(1, "snapshot.committed", 1, name=name_of(5, 1)),
        event(2, "worker.failed", 1, rank=1, class_="crash", error="killed by SIGKILL"),
        event(2, "generation.ended", 1, class_="crash", reason="killed by SIGKILL", step=33),
        event(3, "generation.started", 2, world_size=1, nodes=1, reason="crash"),
        event(3, "training.started", 2, restored_from=name_of(20, 1)),
        event(4, "drain.requested", 2, reason="SIGTERM"),
        event(5, "generation.ended", 2, class_="drained", reason="all workers left", step=50),
    ]
    folder.events.write_text("".join(json.dumps(record) + "\n" for record in happened))
    return root


@pytest.fixture
def project(original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a copy of the project that the test may spoil; it is the working folder."""
    root = tmp_path / "project"
    shutil.copytree(original, root)
    monkeypatch.chdir(root)
    monkeypatch.setenv("TZ", "UTC")
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    time.tzset()
    return root


@pytest.fixture
def folder(project: Path) -> RunFolder:
    """Return the run's folder."""
    return RunFolder.of(project, "small", RUN_ID)


@pytest.fixture
def catalog(folder: RunFolder) -> Catalog:
    """Return the run's snapshots."""
    return Catalog(Storage(str(folder.path)))


@pytest.fixture
def ran(project: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """Return a function that runs `elasticflow snapshots ...` and returns code, output and errors."""

    def run(*arguments: str) -> Ran:
        code = call(["snapshots", *arguments])
        out, err = capsys.readouterr()
        return code, out, err

    return run


def flip(catalog: Catalog, name: str, file: str = "shard-00000-of-00001.safetensors") -> None:
    """Change the last byte of a file of a snapshot."""
    path = catalog.storage.local_path(f"{catalog.folder(name)}/{file}")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


TABLE = """\
small 20261120-100000-4f2a  6 snapshots, * kB
SNAPSHOT                    STEP  EPOCHS  SAMPLES  SIZE    AGE  GEN  WORKERS  TRIGGER  METRIC  KEPT          STATE
000000000050-0002-00000032  50    2       300      * kB  * s  2    1        steps    -       newest, last  committed
000000000040-0002-00000028  40    2       240      * kB  * s  2    1        steps    0.8500  last          committed
000000000030-0002-0000001e  30    1       180      * kB  * s  2    1        steps    0.8000  -             committed
000000000030-0001-0000001e  30    1       180      * kB  * s  1    2        steps    -       -             committed
000000000020-0001-00000014  20    1       120      * kB  * s  1    2        steps    0.9000  best, parent  committed
000000000010-0001-0000000a  10    0       60       * kB  * s  1    2        steps    0.7000  -             committed
"""


def without_measures(text: str) -> str:
    """Return *text* with sizes and times as stars, and their columns no wider than those."""
    text = re.sub(r"\d+(\.\d+)? kB", "* kB", text)
    text = re.sub(r"\d+(\.\d+)? m?s\b", "* s", text)
    return re.sub(r"(?<=\S)  +", "  ", text)


@pytest.mark.parametrize(
    "run", [(), ("small",), (RUN_ID,), (f"runs/small/{RUN_ID}",), (f"runs/small/{RUN_ID}/",)]
)
def test_list_is_a_table(ran: Callable[..., Ran], run: tuple[str, ...]) -> None:
    """However the run is named: one row per snapshot, the newest first, with why each stays."""
    code, out, err = ran("list", *run)
    assert (0, "") == (code, err)
    assert without_measures(TABLE) == without_measures(out)


def test_list_as_json(ran: Callable[..., Ran]) -> None:
    """The keys are frozen: scripts read them."""
    code, out, _ = ran("list", "--json")
    facts = json.loads(out)
    assert (0, 6) == (code, len(facts))
    assert ran("list", "--format", "json")[1] == out
    newest, best = facts[0], facts[4]
    assert sorted(newest) == [
        "borrowed_bytes",
        "bytes",
        "created",
        "epoch",
        "generation",
        "kept",
        "metric",
        "name",
        "parent",
        "permanent",
        "pinned",
        "reason",
        "samples",
        "state",
        "step",
        "trigger",
        "world_size",
    ]
    assert (name_of(50), 50, 2, name_of(20, 1)) == tuple(
        newest[k] for k in ("name", "step", "generation", "parent")
    )
    assert (["best", "parent"], True, 0.9) == (best["kept"], best["permanent"], best["metric"])
    assert re.fullmatch(r"2\d{3}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", newest["created"])


def test_nothing_that_lies_there_is_hidden(ran: Callable[..., Ran], catalog: Catalog) -> None:
    """Set aside, damaged and unfinished snapshots are in the list, each with its reason; none of them is kept."""
    catalog.quarantine(name_of(40), "shard: block 0 is not what was written")
    flip(catalog, name_of(30), "MANIFEST.json")
    catalog.storage.write(f"snapshots/.tmp-{name_of(60)}/shard", (b"half",))
    _, out, _ = ran("list", "--json")
    found = {each["name"]: (each["state"], each["reason"], each["kept"]) for each in json.loads(out)}
    assert ("set aside", "shard: block 0 is not what was written", []) == found[name_of(40)]
    state, reason, kept = found[name_of(30)]
    assert ("damaged", []) == (state, kept)
    assert reason.startswith("MANIFEST.json is no")
    assert ("unfinished", "left by a writer that died", []) == found[name_of(60)]
    _, out, _ = ran("list")
    assert "4 snapshots, " in out.splitlines()[0]
    assert out.splitlines()[0].endswith("1 set aside, 1 damaged, 1 unfinished")
    assert f"{name_of(40)}  set aside: shard: block 0 is not what was written\n" in out


def _huge(content: dict[str, Any]) -> None:
    next(iter(content["tensors"].values()))["shape"] = [2**40, 2**40]


def _before_its_file(content: dict[str, Any]) -> None:
    next(iter(content["tensors"].values()))["offset"] = -8


def _elsewhere(content: dict[str, Any]) -> None:
    content["files"]["../../x"] = content["files"].pop("state.json")


def _screen_wiped(content: dict[str, Any]) -> None:
    content["trigger"] = "\x1b[2J\x1b]0;title\x07"


def _vast(content: dict[str, Any]) -> None:
    next(iter(content["files"].values()))["size"] = 2**62


@pytest.mark.parametrize("spoil", [_huge, _before_its_file, _elsewhere, _screen_wiped, _vast])
def test_a_manifest_that_means_nothing_is_neither_whole_nor_exported(
    ran: Callable[..., Ran], catalog: Catalog, tmp_path: Path, spoil: Callable[[dict[str, Any]], None]
) -> None:
    """Its digest is right, what it says is not: every command says so, and nothing of it acts on the terminal."""
    path = f"{catalog.folder(name_of(50))}/MANIFEST.json"
    content = json.loads(catalog.storage.read(path))
    del content["digest"]
    spoil(content)
    catalog.storage.write(path, [signed(content)])
    code, out, _ = ran("verify", "--all")
    assert (1, True) == (code, f"{name_of(50)}  damaged  MANIFEST.json: " in out)
    target = tmp_path / "x.safetensors"
    code, _, err = ran("export", name_of(50), "--format", "safetensors", "-o", str(target))
    assert (2, False) == (code, target.exists())
    assert "is damaged" in err
    for words in (("list",), ("show", name_of(50)), ("show",)):
        code, out, err = ran(*words)
        assert code == 0
        assert not {"\x1b", "\x07"} & set(out + err)


def test_what_a_live_writer_writes_is_not_called_dead(
    ran: Callable[..., Ran], catalog: Catalog, folder: RunFolder
) -> None:
    """While the run holds its lock, an unfinished snapshot of the newest generation is being written."""
    catalog.storage.write(f"snapshots/.tmp-{name_of(60)}/shard", (b"half",))
    with locked(folder):
        _, out, _ = ran("list", "--json")
    assert "being written" == json.loads(out)[0]["reason"]


def test_list_without_snapshots(ran: Callable[..., Ran], folder: RunFolder) -> None:
    """An empty answer says where it looked; it is no error."""
    shutil.rmtree(folder.path / "snapshots")
    assert ran("list") == (0, "", f"no snapshots of small {RUN_ID} at {folder.path}\n")
    assert ran("list", "--json") == (0, "[]\n", "")


LINEAGE = """\
lineage
  generation 1  2 workers, start, from the beginning, launch 1
  ├── 1 snapshot more, since removed
  ├── step 10  000000000010-0001-0000000a  steps
  ├── step 20  000000000020-0001-00000014  steps, kept: best, parent
  ├── step 30  000000000030-0001-0000001e  steps
  └── crash after step 33: rank 1 killed by SIGKILL
  generation 2  1 worker (before: 2), crash, from step 20 (000000000020-0001-00000014)
  ├── step 30  000000000030-0002-0000001e  steps
  ├─▶ step 40  000000000040-0002-00000028  steps, kept: last
  ├── step 50  000000000050-0002-00000032  steps, kept: newest, last
  └── drained after step 50 (SIGTERM)
"""


def test_show_tells_all_and_draws_the_lineage(ran: Callable[..., Ran]) -> None:
    """The kill, the smaller generation after it, what it resumed from, and the drain are all to be seen."""
    code, out, err = ran("show", "step:40")
    assert (0, "") == (code, err)
    assert out.endswith(LINEAGE)
    for line in (
        "step        40 (2 epochs finished, 240 samples)",
        "state       committed",
        "kept        last (ephemeral)",
        "by          generation 2, 1 worker",
        f"parent      {name_of(20, 1)}",
        "metric      0.8500",
    ):
        assert line in out.splitlines()
    assert re.search(r"^  shard-00000-of-00001.safetensors +\d+ bytes  1 block of CRC-32$", out, re.MULTILINE)
    assert re.search(r"^  model +F32 +2 tensors +80 bytes$", out, re.MULTILINE)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((), name_of(50)),
        (("latest",), name_of(50)),
        (("small", "best"), name_of(20, 1)),
        (("best", "small"), name_of(20, 1)),
        (("step:30",), name_of(30)),
        ((name_of(30, 1),), name_of(30, 1)),
        ((f"runs/small/{RUN_ID}/snapshots/{name_of(10, 1)}",), name_of(10, 1)),
        ((f"runs/small/{RUN_ID}/snapshots/{name_of(10, 1)}/",), name_of(10, 1)),
    ],
)
def test_ways_to_name_a_snapshot(ran: Callable[..., Ran], words: tuple[str, ...], expected: str) -> None:
    """By name, by what it is, by step (the newest generation's), by its folder; the newest without a word."""
    code, out, _ = ran("show", *words, "--json")
    assert (0, expected) == (code, json.loads(out)["name"])


def test_show_as_json(ran: Callable[..., Ran]) -> None:
    """Files with their digests, tensors by part, and the lineage."""
    _, out, _ = ran("show", "--json")
    facts = json.loads(out)
    assert {"shard-00000-of-00001.safetensors", "state.json"} == set(facts["files"])
    assert {"size", "crc32", "sha256"} == set(facts["files"]["state.json"])
    assert {"prefix": "model", "dtype": "F32", "tensors": 2, "bytes": 80} in facts["tensors"]
    assert [(1, 2, None), (2, 1, name_of(20, 1))] == [
        (each["number"], each["world_size"], each["parent"]) for each in facts["lineage"]
    ]
    assert [name_of(30), name_of(40), name_of(50)] == facts["lineage"][1]["snapshots"]


def test_show_of_what_is_not_committed(ran: Callable[..., Ran], catalog: Catalog) -> None:
    """A name leads to it; only what is known is shown."""
    catalog.storage.write(f"snapshots/.tmp-{name_of(60)}/shard", (b"half",))
    code, out, _ = ran("show", name_of(60))
    assert 0 == code
    assert "state       unfinished: left by a writer that died" in out.splitlines()
    assert "├─▶ step 60" in out


@pytest.mark.parametrize(
    ("words", "error", "remedy"),
    [
        (
            ("show", "step:7"),
            f"small {RUN_ID}: there is no snapshot step:7",
            "there are snapshots of steps 50, 40, 30, 30, 20, 10",
        ),
        (("list", "smal"), 'no run "smal" in {root}/runs', 'did you mean "small"?'),
        (
            ("list", "runs"),
            "there are no snapshots of a run at runs",
            "give a run's own folder, which holds `snapshots` and `generations`, or a run of this project",
        ),
    ],
)
def test_what_is_not_there(
    ran: Callable[..., Ran], project: Path, words: tuple[str, ...], error: str, remedy: str
) -> None:
    """Exit code 2, what was looked for and where, and a way on."""
    assert ran(*words) == (2, "", f"error: {error.format(root=project)}\nhelp: {remedy}\n")


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("show", "small", "mnist"), '"small" and "mnist" cannot both be the run'),
        (("show", "best", "latest"), 'one snapshot at a time: "best" or "latest"'),
        (("list", "best"), "try: elasticflow snapshots show best"),
        (("verify", "best", "--all"), "--all or names of snapshots, not both"),
        (("pin",), "which snapshot? Give a name, latest, best or step:N"),
        (("prune", "best"), "to keep one: elasticflow snapshots pin best"),
        (("list", "--option", "anon"), '"anon" is not KEY=VALUE'),
        (("list", "--option", "a=1", "--option", "a.b=2"), "a has a value, and cannot have b in it"),
        (("prune", "--keep-within", "3 steps"), 'must be a time, like "30 s"'),
    ],
)
def test_misuse(ran: Callable[..., Ran], words: tuple[str, ...], part: str) -> None:
    """Exit code 2 and a sentence that helps on."""
    code, out, err = ran(*words)
    assert (2, "") == (code, out)
    assert part in err


def test_best_where_no_metric_is_a_number() -> None:
    """An evaluation that measured NaN each time is named as the cause."""
    rows = [SnapshotRow(name_of(20), "committed")]
    with pytest.raises(SnapshotNotFoundError, match="no snapshot best: no snapshot's metric is a number"):
        pick_row(rows, "best", Keep(last=1, best=1, best_mode="min"))


def test_best_without_a_recorded_rule(ran: Callable[..., Ran], catalog: Catalog) -> None:
    """Of bare snapshots without a job nobody knows what best means."""
    uri = str(catalog.storage.local_path())
    for name in ("launches", "state.json", "events.jsonl", "JOB.json"):
        path = Path(uri) / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    code, _, err = ran("show", uri, "best")
    assert 2 == code
    assert err.startswith(
        f"error: {uri}: which snapshot is the best is not known: no job is recorded there\n"
    )


def test_verify_reads_every_byte(ran: Callable[..., Ran]) -> None:
    """Whole: exit code 0, and what was read; without names only the newest."""
    code, out, err = ran("verify")
    assert (0, "") == (code, err)
    assert re.fullmatch(rf"{name_of(50)}  whole    \d\.\d kB in .* \(.*/s\)\n", out)
    assert [6, 6] == [
        len(ran("verify", "--all")[1].splitlines()),
        len(json.loads(ran("verify", "--all", "--json")[1])),
    ]


def test_verify_names_file_and_block(ran: Callable[..., Ran], catalog: Catalog) -> None:
    """Damaged: exit code 1, file and block; nothing is set aside unasked."""
    flip(catalog, name_of(40))
    code, out, err = ran("verify", "step:50", "step:40")
    assert 1 == code
    assert out.splitlines()[1] == (
        f"{name_of(40)}  damaged  shard-00000-of-00001.safetensors: block 0 (from byte 0) is not what was written"
    )
    assert err == "help: --quarantine sets damaged snapshots aside, so that nothing loads them\n"
    assert {} == catalog.quarantined()
    _, out, _ = ran("verify", "step:40", "--json")
    (finding,) = json.loads(out)
    assert (False, {"shard-00000-of-00001.safetensors": "block 0 (from byte 0) is not what was written"}) == (
        finding["whole"],
        finding["problems"],
    )


def test_what_retention_removes_meanwhile_is_not_damaged(
    ran: Callable[..., Ran], catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others are verified, nothing is set aside; a snapshot that was asked for by name is missed."""
    rows_of = selection.find_rows

    def found(source: SnapshotSource) -> list[SnapshotRow]:
        rows = rows_of(source)
        catalog.remove_snapshot(name_of(40))
        return rows

    monkeypatch.setattr(verify, "find_rows", found)
    shutil.copytree(
        there := catalog.storage.local_path(catalog.folder(name_of(40))), kept := there.with_name("kept")
    )
    code, out, err = ran("verify", "--all", "--quarantine")
    assert (0, f"warning: snapshot {name_of(40)} was removed while it was read\n") == (code, err)
    assert 5 == len(out.splitlines())
    assert {} == catalog.quarantined()
    kept.rename(there)
    code, out, err = ran("verify", "step:40")
    assert (False, "") == (code == 0, out)
    assert f"snapshot {name_of(40)} was removed while it was read" in err


def test_verify_names_what_is_wrong_with_pieces(ran: Callable[..., Ran], catalog: Catalog) -> None:
    """A lie of the manifest with tensor and rows, damage of a shard with its file, in one answer."""
    name = in_pieces.take(catalog, in_pieces.v_and_w(), degree=2, generation=2, step=60).name
    assert (0, "") == ran("verify")[::2]
    flip(catalog, name, "shard-00001-of-00002.safetensors")
    found = in_pieces.lie(catalog, name, "offsets exchanged")
    code, out, _ = ran("verify")
    assert 1 == code
    assert [
        f"{name}  damaged  shard-00001-of-00002.safetensors: block 0 (from byte 0) is not what was written",
        f"{name}  damaged  MANIFEST.json: {found}",
    ] == out.splitlines()


def test_verify_names_all_that_borrow_a_damaged_file(
    ran: Callable[..., Ran], folder: RunFolder, catalog: Catalog
) -> None:
    """One frozen file is damaged: its own snapshot and each that borrows it are told, whichever is asked for."""
    bench = Bench(str(folder.path))
    client = bench.connect(bench.writer(keep_last=100), generation=2)
    names = []
    for step in (60, 70, 80):
        names.append(share(client, step, generation=2))
        client.flush(20)
    bench.close()
    flip(catalog, names[0], FILE)
    code, out, _ = ran("verify", "step:60", "step:80")
    assert 1 == code
    block = "block 0 (from byte 0) is not what was written"
    assert [
        f"{names[0]}  damaged  {FILE}: {block}",
        f"{names[0]}  damaged  and cannot be loaded either: {names[2]}, {names[1]}",
        f"{names[2]}  damaged  {names[0]}/{FILE}: {block}; it is borrowed, and no snapshot that borrows it can be loaded",
        f"{names[2]}  damaged  and cannot be loaded either: {names[1]}, {names[0]}",
    ] == out.splitlines()
    found = json.loads(ran("verify", "step:70", "--json")[1])
    assert [[names[2], names[0]]] == [finding["needed_by"] for finding in found]


def test_verify_sets_damaged_ones_aside(ran: Callable[..., Ran], catalog: Catalog) -> None:
    """With leave: they are never restored again, and the list says why."""
    flip(catalog, name_of(50))
    flip(catalog, name_of(30), "MANIFEST.json")
    code, out, _ = ran("verify", "--all", "--quarantine")
    assert 1 == code
    assert f"{name_of(50)}  set aside\n" in out
    assert {name_of(50), name_of(30)} == set(catalog.quarantined())
    newest = catalog.newest()
    assert newest is not None
    assert name_of(40) == newest.name
    code, out, _ = ran("verify", "--all")
    assert (0, 4) == (code, len(out.splitlines()))


def test_a_snapshot_of_another_version_stays_as_it_is(ran: Callable[..., Ran], catalog: Catalog) -> None:
    """It is not damaged: it is not set aside, its lenders are not removed, and each command says what reads it."""
    path = f"{catalog.folder(name_of(50))}/MANIFEST.json"
    content = {**json.loads(catalog.storage.read(path)), "format": 3}
    del content["digest"]
    catalog.storage.write(path, [signed(content)])
    reason = "MANIFEST.json has format 3, which only another version of elasticflow reads"
    assert ran("list")[1].splitlines()[0].endswith(", 1 other version")
    assert f"{name_of(50)}  other version: {reason}\n" in ran("list")[1]
    code, out, err = ran("verify", "--all", "--quarantine")
    assert (0, 5) == (code, len(out.splitlines()))
    assert f"warning: {name_of(50)} is not verified: {reason}\n" == err
    assert {} == catalog.quarantined()
    export = ("export", name_of(50), "--format", "torch")
    assert "state       other version: MANIFEST.json has format 3" in ran("show", "latest")[1]
    for words in (("verify", "latest"), export, ("pin", name_of(50)), ("prune", "--yes")):
        code, _, err = ran(*words)
        assert (True, True, False) == (code > 0, reason in err, "credentials" in err), words
    assert 5 == len(catalog.committed())


def test_pins_keep_and_say_why(ran: Callable[..., Ran], catalog: Catalog) -> None:
    """A pinned snapshot survives a policy that lets it go; unpinned, it goes."""
    pinned = ran("pin", "step:10", name_of(30, 1), "--note", "for the paper")
    assert (0, "") == (pinned[0], pinned[2])
    assert f"{name_of(10, 1)}  pinned: for the paper\n" in pinned[1]
    assert {name_of(10, 1): "for the paper", name_of(30, 1): "for the paper"} == catalog.pinned()
    assert f"{name_of(10, 1)}  pinned: for the paper\n" in ran("list")[1]
    ran("prune", "--yes")
    assert name_of(10, 1) in {each.name for each in catalog.committed()}
    assert (
        ran("unpin", "step:10", "step:40")[1]
        == f"{name_of(10, 1)}  unpinned\n{name_of(40)}  was not pinned\n"
    )
    ran("prune", "--yes")
    assert name_of(10, 1) not in {each.name for each in catalog.committed()}


def test_only_what_could_be_restored_is_pinned(ran: Callable[..., Ran], catalog: Catalog) -> None:
    """A snapshot that is set aside is refused with the reason."""
    catalog.quarantine(name_of(40), "damaged")
    assert ran("pin", name_of(40)) == (
        2,
        "",
        f"error: {name_of(40)} is set aside: damaged\nhelp: only a snapshot that could be restored is pinned\n",
    )


PRUNED = f"""\
small {RUN_ID}  * kB to be freed
  stays  {name_of(50)}  newest, last
  stays  {name_of(40)}  last
  stays  {name_of(20, 1)}  best, parent
  goes   {name_of(30)}  * kB
  goes   {name_of(30, 1)}  * kB
  goes   {name_of(10, 1)}  * kB
  goes   .tmp-{name_of(31, 1)}  4 bytes, unfinished
"""


def test_prune_by_the_jobs_policy(ran: Callable[..., Ran], catalog: Catalog) -> None:
    """A dry run shows what --yes then does; what dead writers left goes too."""
    catalog.storage.write(f"snapshots/.tmp-{name_of(31, 1)}/shard", (b"half",))
    before = catalog.committed()
    code, out, err = ran("prune", "--dry-run")
    assert (0, "") == (code, err)
    assert without_measures(PRUNED) == without_measures(out)
    assert before == catalog.committed()
    code, out, _ = ran("prune", "--yes")
    assert 0 == code
    assert without_measures(PRUNED) + "removed 4 folders, * kB freed\n" == without_measures(out)
    assert [name_of(50), name_of(40), name_of(20, 1)] == [each.name for each in catalog.committed()]
    assert sorted([name_of(50), name_of(40), name_of(20, 1)]) == catalog.storage.list("snapshots")
    assert ran("prune")[1].endswith("nothing goes: a rule keeps every snapshot\n")


def test_prune_by_rules_of_its_own(ran: Callable[..., Ran], catalog: Catalog) -> None:
    """Any --keep option stands alone; the newest and what it resumed from stay whatever is said."""
    _, out, _ = ran("prune", "--keep-every", "20 steps", "--dry-run", "--json")
    assert {
        name_of(50): ["newest", "last"],
        name_of(40): ["every"],
        name_of(20, 1): ["every", "parent"],
    } == json.loads(out)["staying"]
    code, out, _ = ran("prune", "--keep-last", "1", "--yes", "--json")
    facts = json.loads(out)
    assert (0, {name_of(50), name_of(20, 1)}) == (code, {each.name for each in catalog.committed()})
    assert [name_of(40), name_of(30), name_of(30, 1), name_of(10, 1)] == facts["removed"]


def test_prune_counts_from_the_newest_that_verifies(ran: Callable[..., Ran], catalog: Catalog) -> None:
    """A damaged newest one does not push the whole ones out: what stays can be restored."""
    flip(catalog, name_of(50))
    code, out, _ = ran("prune", "--keep-last", "1", "--yes")
    assert 0 == code
    assert f"  stays  {name_of(50)}  damaged: shard-00000-of-00001.safetensors: block 0" in out
    assert [name_of(50), name_of(40), name_of(20, 1)] == [each.name for each in catalog.committed()]


def test_prune_asks_and_is_refused(ran: Callable[..., Ran], catalog: Catalog) -> None:
    """Without a terminal nobody can be asked: nothing is removed."""
    code, _, err = ran("prune")
    assert 2 == code
    assert "there is no terminal to ask on: give --yes, or --dry-run to look only" in err
    assert 6 == len(catalog.committed())


def test_prune_of_a_running_run_is_refused(
    ran: Callable[..., Ran], folder: RunFolder, catalog: Catalog
) -> None:
    """Whoever holds the run's lock may be restoring any of them; looking is allowed."""
    with locked(folder):
        code, out, err = ran("prune", "--yes")
        assert (2, "") == (code, out)
        assert err.startswith(
            f"error: run {RUN_ID} is running (process {os.getpid()} on {socket.gethostname()})\n"
        )
        catalog.storage.write(f"snapshots/.tmp-{name_of(60)}/shard", (b"half",))
        code, out, _ = ran("prune", "--dry-run")
        assert (0, False) == (code, ".tmp-" in out), "what a live writer writes is not called dead"
    assert ".tmp-" in ran("prune", "--dry-run")[1]
    assert 6 == len(catalog.committed())


@pytest.fixture
def shared(project: Path, folder: RunFolder) -> Path:
    """Return a folder of another project's runs, reached by path alone."""
    place = project.parent / "shared"
    for name in ("generations", "snapshots", "JOB.json"):
        source = folder.path / name
        target = place / RUN_ID / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(source, target) if source.is_dir() else shutil.copy(source, target)
    return place


def test_a_bare_place_is_read_with_its_recorded_job(ran: Callable[..., Ran], shared: Path) -> None:
    """No run folder: JOB.json tells the policy, and the lineage comes from the snapshots themselves."""
    _, out, _ = ran("list", f"{shared}/{RUN_ID}", "--json")
    assert ["best", "parent"] == json.loads(out)[4]["kept"]
    _, out, _ = ran("show", f"file://{shared}/{RUN_ID}", "best")
    assert f"generation 2  1 worker (before: 2), crash, from step 20 ({name_of(20, 1)})" in out
    assert ran("list", str(shared), "--json") == ran("list", f"{shared}/{RUN_ID}", "--json")


def test_a_place_of_several_runs_is_not_guessed(ran: Callable[..., Ran], shared: Path) -> None:
    """They are named, and the way to say which."""
    shutil.copytree(shared / RUN_ID, shared / "20261121-100000-aaaa")
    assert ran("list", str(shared)) == (
        2,
        "",
        (
            f"error: there are 2 runs at {shared}, such as 20261121-100000-aaaa, {RUN_ID}\n"
            f"help: say which: {shared}/20261121-100000-aaaa\n"
        ),
    )


def test_prune_of_a_bare_place_wants_a_word(ran: Callable[..., Ran], shared: Path) -> None:
    """Nothing tells whether a run uses it, so --yes is needed; leftovers of the newest generation stay then."""
    catalog = Catalog(Storage(str(shared / RUN_ID)))
    for name in (name_of(31, 1), name_of(60)):
        catalog.storage.write(f"snapshots/.tmp-{name}/shard", (b"half",))
    code, _, err = ran("prune", f"{shared}/{RUN_ID}")
    assert 2 == code
    assert f"whether a run is using {shared}/{RUN_ID} cannot be known here" in err
    code, out, _ = ran("prune", f"{shared}/{RUN_ID}", "--yes", "--json")
    assert (0, [f".tmp-{name_of(31, 1)}"]) == (
        code,
        [each["folder"] for each in json.loads(out)["leftovers"]],
    )
    assert f".tmp-{name_of(60)}" in catalog.storage.list("snapshots")
    assert 3 == len(catalog.committed())


def test_prune_without_any_rule(ran: Callable[..., Ran], shared: Path) -> None:
    """No recorded job and no option: nothing is guessed."""
    (shared / RUN_ID / "JOB.json").unlink()
    code, _, err = ran("prune", f"{shared}/{RUN_ID}", "--yes")
    assert 2 == code
    assert "no job is recorded there: say which stay, such as --keep-last 3" in err


def test_export_writes_beside_the_user(ran: Callable[..., Ran], project: Path) -> None:
    """By default a file named after job and step, in the working folder; never over another."""
    code, out, err = ran("export", "best", "--format", "safetensors")
    path = project / "small-step20.safetensors"
    assert (0, "") == (code, err)
    assert out == (
        f"small-step20.safetensors  2 tensors, {path.stat().st_size} bytes, "
        f"from {name_of(20, 1)}: step 20, accuracy 0.9\n"
        'load it with: model.load_state_dict(safetensors.torch.load_file("small-step20.safetensors"))\n'
    )
    assert ran("export", "best", "--format", "safetensors") == (
        2,
        "",
        "error: small-step20.safetensors exists\nhelp: give another place (-o PATH), or replace it: --force\n",
    )
    code, out, _ = ran("export", "best", "--format", "safetensors", "--force", "--json")
    assert (0, 2, "small-step20.safetensors") == (code, json.loads(out)["tensors"], json.loads(out)["path"])


@pytest.mark.parametrize(
    ("steps", "told"),
    [
        ((20, 30), None),
        ((20, 25, 30), "25 measured better, 0.95, and no snapshot has those weights"),
        (
            (20, 30, 50),
            "50 measured better, 0.95; the snapshot of that step was taken before it was measured",
        ),
    ],
)
def test_export_says_which_step_measured_better(
    ran: Callable[..., Ran], folder: RunFolder, steps: tuple[int, ...], told: str | None
) -> None:
    """A run of an older version took no snapshot at its best value; a text on standard error, a record in JSON."""
    values = {20: 0.9, 25: 0.95, 30: 0.8, 50: 0.95}
    lines, best = [], 0.0
    for step in steps:
        best = max(best, values[step])
        lines.append({"step": step, "eval": {"accuracy": values[step], "loss": 1.0}, "best": best})
    folder.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    code, _, err = ran("export", "best", "--format", "safetensors", "-o", "a.safetensors")
    assert code == 0
    assert (f"warning: the evaluation after step {told}" in err) if told else (err == "")
    _, out, _ = ran("export", "best", "--format", "safetensors", "-o", "b.safetensors", "--json")
    facts = json.loads(out)
    assert (20, 0.9, "accuracy") == (facts["step"], facts["metric"], facts["metric_name"])
    assert facts["better"] == ({"step": int(told[:2]), "value": 0.95} if told else None)
    _, _, err = ran("export", "step:30", "--format", "safetensors", "-o", "c.safetensors")
    assert err == ""


def test_export_of_a_damaged_snapshot(ran: Callable[..., Ran], catalog: Catalog, project: Path) -> None:
    """Exit code 1, file and block, and nothing written."""
    flip(catalog, name_of(50))
    code, _, err = ran("export", "--format", "torch", "-o", "out.pt")
    assert 1 == code
    assert err == (
        f"error: snapshot {name_of(50)} is damaged: shard-00000-of-00001.safetensors: "
        "block 0 (from byte 0) is not what was written\nhelp: export another: elasticflow snapshots list\n"
    )
    assert not (project / "out.pt").exists()


def test_names_are_completed(ran: Callable[..., Ran], catalog: Catalog) -> None:
    """Runs, jobs and the newest run's snapshots before a run is given; that run's snapshots afterwards."""

    def offered(*words: str, typed: str = "") -> set[str]:
        return {item.value for item in complete(["snapshots", *words], typed, group)}

    assert {"list", "show", "verify", "pin", "unpin", "prune", "export"} == offered()
    assert {"small", RUN_ID, "latest", "best", name_of(50), "step:50"} <= offered("show")
    assert {"step:50", "step:40", "step:30", "step:20", "step:10"} == offered("show", typed="step")
    assert {name_of(50), name_of(40), name_of(30)} <= offered("verify", "small", typed="0000")
    assert "small" not in offered("verify", "small")
    assert set() == offered("show", "nothing-here", typed="0")


@pytest.mark.usefixtures("real_processes")
def test_looking_after_snapshots_loads_no_torch(project: Path) -> None:
    """All but exports in torch's own formats work, and are fast, where torch is not installed."""
    program = (
        "import sys; from elasticflow.cli.main import call;"
        "words = ('list', 'show', 'verify --all', 'pin best', 'unpin best', 'prune --yes', 'export --format safetensors');"
        "codes = [call(['snapshots', *w.split()]) for w in words];"
        "print(codes, [m for m in ('torch', 'numpy', 'fsspec') if m in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=project,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stderr == "[0, 0, 0, 0, 0, 0, 0] []\n"
