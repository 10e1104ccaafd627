"""Exports of real snapshots, loaded by those they are for."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tracemalloc
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load

from elasticflow.errors import ExportError
from elasticflow.runtime.state import tensors
from elasticflow.runtime.state.state import State
from elasticflow.snapshots.format.manifest import DamagedSnapshotError
from elasticflow.snapshots.format.pieces import DTYPES, Span
from elasticflow.snapshots.store.catalog import Catalog
from elasticflow.snapshots.tools import export_torch
from elasticflow.snapshots.tools.export import write
from elasticflow.snapshots.tools.exported import Export, TensorSlice, measured_part
from elasticflow.storage.storage import Storage
from tests.snapshots import in_pieces
from tests.snapshots.conftest import Bench
from tests.snapshots.taking import Net, Training, one_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

ROOT = Path(__file__).resolve().parents[3]
SAVED = "model.safetensors"
FORMATS = ("safetensors", "torch", "dcp")
alone = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")  # what is meant


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    """Keep torch to one thread."""
    with one_thread():
        yield


@pytest.fixture(scope="module")
def run_of_two(quick: None, tmp_path_factory: pytest.TempPathFactory, real_processes: None) -> Path:
    """Make a run of two snapshots by two ranks; the second borrows the frozen layer from the first."""
    bench = Bench(str(tmp_path_factory.mktemp("export") / "run"))
    writer = bench.writer()
    clients = [bench.connect(writer, rank, 2) for rank in range(2)]
    training = Training()
    for _ in range(2):
        training.step(2)
        training.take(clients)
    bench.close()
    return Path(bench.uri)


class Taken:
    """A run of two snapshots, and the training that took them as it was at the second."""

    def __init__(self, folder: Path) -> None:
        self.catalog = Catalog(Storage(str(folder)))
        self.second, self.first = (manifest.name for manifest in self.catalog.committed())
        self.training = Training()
        self.training.step(4)
        self.model = {key: value.clone() for key, value in self.training.model.state_dict().items()}

    def export(self, **options: Any) -> Export:
        """Return the export of the second snapshot's model, unless *options* say otherwise."""
        name = options.pop("name", self.second)
        return Export(self.catalog, self.catalog.manifest(name), options.pop("part", "model"), **options)

    def again(self, degree: int) -> str:
        """Take the second snapshot again, by as many ranks that share its tensors; return the name of this one."""
        state = self.training.state.capture()
        return in_pieces.take(self.catalog, state, degree=degree, step=4, generation=2).name


@pytest.fixture
def taken(run_of_two: Path, tmp_path: Path) -> Taken:
    """A run of two snapshots that the test may spoil."""
    shutil.copytree(run_of_two, tmp_path / "run")
    return Taken(tmp_path / "run")


def same(expected: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    """Check that two state dicts have the same names and the same bits."""
    assert list(expected) == [key for key in expected if key in found]
    assert sorted(expected) == sorted(found)
    for key, value in expected.items():
        assert (value.dtype, value.shape) == (found[key].dtype, found[key].shape), key
        assert torch.equal(value, found[key]), key


def test_the_second_snapshot_borrows(taken: Taken) -> None:
    """What the tests below export lies in files of two snapshots."""
    assert taken.catalog.manifest(taken.second).borrowed_from == {taken.first}


def test_safetensors_holds_the_state_dict_under_the_users_names(taken: Taken, tmp_path: Path) -> None:
    """All names, all bits, ties under each name; a strict load into a new model succeeds."""
    path = tmp_path / "model.safetensors"
    count = write(taken.export(), "safetensors", path)
    found = load_file(path)
    assert len(taken.model) == count
    same(taken.model, found)
    Net().load_state_dict(found, strict=True)
    with safe_open(path, "pt") as file:
        about = file.metadata()
    assert ("pt", taken.second, "4") == (about["format"], about["snapshot"], about["step"])
    assert {"head.weight": "embed.weight"} == json.loads(about["tied"])


def test_every_tensor_is_aligned_to_its_width(taken: Taken, tmp_path: Path) -> None:
    """Readers that map the file need it."""
    path = tmp_path / "model.safetensors"
    write(taken.export(), "safetensors", path)
    data = path.read_bytes()
    front = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:front])
    widths = {"F32": 4, "I64": 8, "BF16": 2}
    del header["__metadata__"]
    assert [] == [k for k, v in header.items() if (front + v["data_offsets"][0]) % widths[v["dtype"]]]
    assert len(data) == front + max(v["data_offsets"][1] for v in header.values())


def test_torch_loads_weights_only_and_strictly(taken: Taken, tmp_path: Path) -> None:
    """A plain state_dict, in which tied weights are one tensor still."""
    path = tmp_path / "model.pt"
    write(taken.export(), "torch", path)
    found = torch.load(path, weights_only=True)
    same(taken.model, found)
    Net().load_state_dict(found, strict=True)
    assert found["head.weight"].data_ptr() == found["embed.weight"].data_ptr()


@alone
def test_dcp_loads_into_a_model_without_a_process_group(taken: Taken, tmp_path: Path) -> None:
    """`dcp.load` into the state dict of another model gives the snapshot's bits."""
    path = tmp_path / "model.dcp"
    write(taken.export(), "dcp", path)
    model = Net()
    state = model.state_dict()
    load(state, checkpoint_id=path, no_dist=True)
    model.load_state_dict(state, strict=True)
    same(taken.model, model.state_dict())


@alone
def test_dcp_of_all_state_goes_on_as_the_run_does(taken: Taken, tmp_path: Path) -> None:
    """Model and optimizer, loaded as torch teaches it, take the same next step to the bit."""
    path = tmp_path / "all.dcp"
    write(taken.export(part="all"), "dcp", path)
    other = Training(seed=1)
    model, optimizer = get_state_dict(other.model, other.optimizer)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer}
    load(state, checkpoint_id=path, no_dist=True)
    set_state_dict(
        other.model,
        other.optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    other.scheduler.load_state_dict(taken.training.scheduler.state_dict())
    other.steps = taken.training.steps
    other.step()
    taken.training.step()
    same(taken.training.model.state_dict(), other.model.state_dict())


def test_torch_of_all_state_goes_on_as_the_run_does(taken: Taken, tmp_path: Path) -> None:
    """Every part under its own key, loaded without trusting the file."""
    path = tmp_path / "all.pt"
    write(taken.export(part="all"), "torch", path)
    found = torch.load(path, weights_only=True)
    assert {"model", "optimizer", "scheduler", "ema", "position"} == set(found)
    assert found["position"] == {"step": 4, "epoch": 0, "samples": 24}
    other = Training(seed=1)
    for name in ("model", "optimizer", "scheduler", "ema"):
        getattr(other, name).load_state_dict(found[name])
    other.steps = 4
    other.step()
    taken.training.step()
    same(taken.training.model.state_dict(), other.model.state_dict())
    same(taken.training.ema.state_dict(), other.ema.state_dict())


@pytest.mark.parametrize("form", ["safetensors", "torch"])
def test_ema_is_exported_under_the_models_names(taken: Taken, tmp_path: Path, form: Any) -> None:
    """The averaged weights load into the model itself."""
    path = tmp_path / "ema"
    write(taken.export(part="ema"), form, path)
    found = load_file(path) if form == "safetensors" else torch.load(path, weights_only=True)
    same(taken.training.ema.module.state_dict(), found)


def test_optimizer_as_safetensors_says_what_is_no_tensor(taken: Taken, tmp_path: Path) -> None:
    """Tensors by the path that leads to them; options and structure as JSON in the header."""
    path = tmp_path / "optimizer.safetensors"
    write(taken.export(part="optimizer"), "safetensors", path)
    found = load_file(path)
    expected = taken.training.optimizer.state_dict()
    assert torch.equal(expected["state"][0]["exp_avg"], found["state/0/exp_avg"])
    with safe_open(path, "pt") as file:
        state = json.loads(file.metadata()["state"])
    assert {"$tensor": "state/0/exp_avg"} == state["state"]["0"]["exp_avg"]
    assert expected["param_groups"][0]["lr"] == state["param_groups"][0]["lr"]


def test_optimizer_as_torch_is_its_state_dict(taken: Taken, tmp_path: Path) -> None:
    """`optimizer.load_state_dict` takes it."""
    path = tmp_path / "optimizer.pt"
    write(taken.export(part="optimizer"), "torch", path)
    found = torch.load(path, weights_only=True)
    expected = taken.training.optimizer.state_dict()
    assert expected["param_groups"] == found["param_groups"]
    for number, state in expected["state"].items():
        same(state, found["state"][number])


class Extra(nn.Linear):
    """A layer whose state is not all tensors."""

    def get_extra_state(self) -> dict[str, int]:
        """Return something else."""
        return {"calls": 3}

    def set_extra_state(self, state: Any) -> None:
        """Take it back."""


def test_state_that_is_no_tensor(bench: Bench, tmp_path: Path) -> None:
    """Safetensors refuses it by name; the others hold it."""
    training = Training(model=Extra(2, 2))
    name = training.take([bench.connect(bench.writer())])
    export = Export(bench.catalog, bench.catalog.manifest(name), "model")
    with pytest.raises(ExportError, match=r"_extra_state of the model is no tensor") as caught:
        write(export, "safetensors", tmp_path / "x")
    assert caught.value.remedy == "export it with --format torch"
    write(export, "torch", tmp_path / "x")
    assert {"calls": 3} == torch.load(tmp_path / "x", weights_only=True)["_extra_state"]


def test_every_kind_of_number_is_exported_to_torch(bench: Bench, tmp_path: Path) -> None:
    """What a snapshot can hold comes out as the same type, with the same bits."""
    model = nn.Linear(2, 2)
    for name, dtype in tensors.BY_NAME.items():
        model.register_buffer(name, torch.ones(3).to(dtype))
    taken = Training(model=model).take([bench.connect(bench.writer())])
    write(Export(bench.catalog, bench.catalog.manifest(taken), "model"), "torch", tmp_path / "x")
    found = torch.load(tmp_path / "x", weights_only=True)
    for name, dtype in tensors.BY_NAME.items():
        assert dtype == found[name].dtype
        assert torch.equal(found[name].view(torch.uint8), torch.ones(3).to(dtype).view(torch.uint8))


def test_part_that_is_not_there(bench: Bench, tmp_path: Path) -> None:
    """The message says which parts there are."""
    training = Training(model=nn.Linear(2, 2))
    del training.state._parts["ema"]
    name = training.take([bench.connect(bench.writer())])
    with pytest.raises(ExportError, match=f"snapshot {name} has no ema") as caught:
        write(Export(bench.catalog, bench.catalog.manifest(name), "ema"), "torch", tmp_path / "x")
    assert caught.value.remedy == "it has model, optimizer, scheduler"


@pytest.mark.parametrize("degree", [0, 2], ids=["whole", "pieces"])
@pytest.mark.parametrize("form", FORMATS)
def test_damage_is_never_exported(taken: Taken, tmp_path: Path, form: Any, degree: int) -> None:
    """One flipped byte in the model: file and block are named, and nothing is left, whole or in part."""
    name = taken.again(degree) if degree else taken.second
    place = taken.catalog.manifest(name).whole["model/conv.weight"].pieces[-1]
    shard = taken.catalog.storage.local_path(f"{taken.catalog.folder(name)}/{place.file}")
    data = bytearray(shard.read_bytes())
    data[place.offset] ^= 1
    shard.write_bytes(data)
    target = tmp_path / "out" / "model"
    target.parent.mkdir()
    with pytest.raises(DamagedSnapshotError, match=rf"is damaged: {place.file}: block 0 \(from byte 0\)"):
        write(taken.export(name=name), form, target)
    assert [] == list(target.parent.iterdir())


@alone
@pytest.mark.parametrize(
    ("form", "part"),
    [
        *product(FORMATS, ("model", "ema", "optimizer", "all")),
        *product(["transformers"], ("model", "ema")),  # it holds no other part
    ],
)
def test_pieces_are_exported_as_the_whole_is(taken: Taken, tmp_path: Path, form: Any, part: Any) -> None:
    """One state, whole in the files of two ranks and in pieces at two degrees: byte for byte the same export.

    Only what torch calls each DCP folder differs, and nothing that is read from it.
    """
    state, made = taken.training.state.capture(), []
    for degree in (0, 2, 3):
        catalog = Catalog(Storage(str(tmp_path / f"run{degree}")))
        manifest = in_pieces.take(catalog, state, degree=degree, world=2)
        in_more = [key for key, whole in manifest.whole.items() if len(whole.pieces) > 1]
        assert bool(in_more) == (degree > 0)
        target = tmp_path / str(degree) / "export"
        target.parent.mkdir()
        write(Export(catalog, manifest, part), form, target, save_model=_save_weights)
        made.append(content(target))
    if form == "dcp":
        assert [{".metadata", "__0_0.distcp"}] * 3 == [set(files) for files in made]
        loaded = [_loaded_dcp(tmp_path / str(degree) / "export") for degree in (0, 2, 3)]
        same(loaded[0], loaded[1])
        same(loaded[0], loaded[2])
        for files in made:
            del files[".metadata"]
    assert made[0] == made[1] == made[2]


def _save_weights(weights: Path, folder: Path) -> None:
    folder.mkdir()
    shutil.copy(weights, folder / SAVED)
    (folder / "config.json").touch()


def _loaded_dcp(folder: Path) -> dict[str, Any]:
    about = FileSystemReader(folder).read_metadata().state_dict_metadata
    sizes = {key: value for key, value in about.items() if isinstance(value, TensorStorageMetadata)}
    state: dict[str, Any] = {
        key: torch.empty(value.size, dtype=value.properties.dtype) for key, value in sizes.items()
    }
    load(state, checkpoint_id=folder, no_dist=True)
    return state


def test_a_file_of_safetensors_is_written_as_its_pieces_are_read(tmp_path: Path) -> None:
    """A model in pieces is never in memory as a whole: what is read is written at its place at once."""
    catalog, size = Catalog(Storage(str(tmp_path / "run"))), 24 << 20
    state = in_pieces.state_of({name: torch.zeros(24, 1 << 18) for name in "vw"})
    export = Export(catalog, in_pieces.take(catalog, state, degree=3), "model")
    tracemalloc.start()
    try:
        write(export, "safetensors", tmp_path / "model")
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 2 * size < (tmp_path / "model").stat().st_size
    assert most < size / 2


@pytest.mark.parametrize("form", FORMATS)
def test_nothing_is_overwritten_unasked(taken: Taken, tmp_path: Path, form: Any) -> None:
    """A target that exists is refused and untouched; with leave, it is replaced by the new one."""
    target = tmp_path / "model"
    write(taken.export(name=taken.first), form, target)
    before = content(target)
    with pytest.raises(ExportError, match=r"/model exists\n"):
        write(taken.export(), form, target)
    assert before == content(target)
    write(taken.export(), form, target, replaces=True)
    assert before != content(target)
    assert [target] == [path for path in tmp_path.iterdir() if path.name != "run"]


@pytest.mark.parametrize("form", FORMATS)
def test_what_no_export_made_is_never_replaced(taken: Taken, tmp_path: Path, form: Any) -> None:
    """A folder of the user's own stays, whatever was asked for."""
    target = tmp_path / "results"
    target.mkdir()
    (target / "thesis.tex").write_text("years of work")
    with pytest.raises(ExportError, match="results exists"):
        write(taken.export(), form, target, replaces=True)
    assert "years of work" == (target / "thesis.tex").read_text()


@pytest.mark.parametrize("form", FORMATS)
def test_failed_replacement_leaves_the_old(taken: Taken, tmp_path: Path, form: Any) -> None:
    """Damage met while a target was to be replaced: the old one is still there, whole."""
    target = tmp_path / "model"
    write(taken.export(name=taken.first), form, target)
    before = content(target)
    taken.catalog.storage.remove(f"{taken.catalog.folder(taken.second)}/shard-00000-of-00002.safetensors")
    with pytest.raises(DamagedSnapshotError, match="is absent"):
        write(taken.export(), form, target, replaces=True)
    assert before == content(target)
    assert [target] == [path for path in tmp_path.iterdir() if path.name != "run"]


def test_a_place_that_is_not_there(taken: Taken, tmp_path: Path) -> None:
    """The path and the reason, in one line."""
    target = tmp_path / "nowhere" / "model"
    with pytest.raises(ExportError, match=r"nowhere/model cannot be written: No such file or directory"):
        write(taken.export(), "torch", target)


def test_progress_tells_all_bytes_of_the_files_read(taken: Taken, tmp_path: Path) -> None:
    """The last figure is the size of every shard that holds some of the model, lent ones too."""
    told: list[int] = []
    write(taken.export(progress=told.append), "torch", tmp_path / "model")
    files = taken.catalog.manifest(taken.second).locations()
    shards = [entry.size for path, entry in files.items() if path.endswith(".safetensors")]
    assert sum(shards) == told[-1]


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = sys.modules["numpy"] = None
from elasticflow.cli.main import call
sys.exit(call(sys.argv[1:]))
"""


@pytest.fixture
def without_torch(taken: Taken, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Return a function that exports in a process that has neither torch nor numpy."""

    def run(*arguments: str, before: str = "") -> subprocess.CompletedProcess[str]:
        command = ["snapshots", "export", str(tmp_path / "run"), *arguments]
        return subprocess.run(
            ["bash", "-c", f'{before} exec "$@"', "-", sys.executable, "-c", WITHOUT_TORCH, *command],
            cwd=tmp_path,
            # No bytecode: Python would leave what it could not write whole under the limit for every later process.
            env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )

    return run


def test_safetensors_needs_no_torch(
    without_torch: Callable[..., subprocess.CompletedProcess[str]], taken: Taken, tmp_path: Path
) -> None:
    """The same bits from a process that cannot import torch."""
    done = without_torch("--format", "safetensors", "-o", "here.safetensors")
    assert (0, "") == (done.returncode, done.stderr)
    same(taken.model, load_file(tmp_path / "here.safetensors"))


@pytest.mark.parametrize("form", ["torch", "dcp"])
def test_the_others_say_that_they_need_torch(
    without_torch: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path, form: str
) -> None:
    """One line, one remedy, nothing left behind."""
    done = without_torch("--format", form, "-o", "here")
    assert 2 == done.returncode
    assert done.stderr == (
        f"error: --format {form} needs torch, which is not installed\n"
        "help: pip install 'elasticflow[torch]', or take --format safetensors, which needs none\n"
    )
    assert ["run"] == [path.name for path in tmp_path.iterdir()]


def test_a_disk_without_room(
    without_torch: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    """A file that may not grow as large as needed: said before anything is read, and nothing is left."""
    done = without_torch("--format", "safetensors", "-o", "here", before="ulimit -f 1;")
    assert 2 == done.returncode
    assert "error: here cannot be written: File too large\n" in done.stderr
    assert ["run"] == [path.name for path in tmp_path.iterdir()]


def content(path: Path) -> dict[str, bytes]:
    """Return what is at *path*, a file or a folder."""
    files = path.rglob("*") if path.is_dir() else [path]
    return {file.name: file.read_bytes() for file in files if file.is_file()}


class Measured:
    """What an evaluation keeps in a snapshot."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        """Return it."""
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take it over."""
        self.state = state


@pytest.mark.parametrize(
    ("evaluation", "part"),
    [
        ({"best": None, "weights": "ema"}, "ema"),
        ({"best": None, "weights": "raw"}, "model"),
        ({"best": None}, "model"),
        (None, "model"),
    ],
    ids=["average", "raw", "older", "none"],
)
def test_part_that_was_measured(bench: Bench, evaluation: dict[str, Any] | None, part: str) -> None:
    """The average only where the run's evaluations measured it; an older version's measured the model alone."""
    training = Training(model=nn.Linear(2, 2))
    given: Any = None if evaluation is None else Measured(evaluation)
    training.state = State(
        model=training.model, optimizer=training.optimizer, ema=training.ema, evaluation=given
    )
    name = training.take([bench.connect(bench.writer())])
    assert part == measured_part(bench.catalog, bench.catalog.manifest(name))


@pytest.mark.parametrize("name", DTYPES)
def test_every_type_that_a_snapshot_can_hold_is_exported(name: str) -> None:
    """One table says what each is in torch, and how wide."""
    width = DTYPES[name].nbytes
    tensor = export_torch._tensor(
        TensorSlice((Span("file", 0, 2 * width),), name, (2,)), bytearray(2 * width)
    )
    assert (DTYPES[name].torch_name, width) == (
        str(tensor.dtype).removeprefix("torch."),
        tensor.element_size(),
    )


def test_saved_model_is_whole_or_absent(run_of_two: Path, tmp_path: Path) -> None:
    """Its library gets all weights, and nothing is left of a folder that it could not finish."""
    taken = Taken(run_of_two)
    manifest = taken.catalog.manifest(taken.second)
    export = Export(taken.catalog, manifest, "model")
    path = tmp_path / "saved"

    def fails(weights: Path, folder: Path) -> None:
        _save_weights(weights, folder)
        raise ExportError("the model cannot be saved")

    with pytest.raises(ExportError, match="cannot be saved"):
        write(export, "transformers", path, save_model=fails)
    assert [] == list(tmp_path.iterdir())
    assert write(export, "transformers", path, save_model=_save_weights) == len(load_file(path / SAVED))
    with pytest.raises(ExportError, match="exists"):
        write(export, "transformers", path, save_model=_save_weights)
    write(export, "transformers", path, save_model=_save_weights, replaces=True)
    assert [path] == list(tmp_path.iterdir())
    (path / "config.json").unlink()
    with pytest.raises(ExportError) as caught:
        write(export, "transformers", path, save_model=_save_weights, replaces=True)
    assert "no folder of a saved model" in str(caught.value.remedy)
    with pytest.raises(ExportError, match="holds a model, not optimizer"):
        write(
            Export(taken.catalog, manifest, "optimizer"),
            "transformers",
            tmp_path / "o",
            save_model=_save_weights,
        )
