"""A manifest that fits together and still lies of its tensors is found out by the headers of the files."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from elasticflow.snapshots.format.manifest import DamagedSnapshotError
from elasticflow.snapshots.read import load, verify
from elasticflow.snapshots.read.verify import Headers
from elasticflow.snapshots.store.catalog import Catalog
from elasticflow.snapshots.tools.export import write
from elasticflow.snapshots.tools.exported import Export
from elasticflow.storage.storage import Storage
from tests.snapshots import in_pieces

if TYPE_CHECKING:
    from pathlib import Path

    from elasticflow.snapshots.format.manifest import Manifest


@pytest.fixture(params=["local", "remote"])
def catalog(request: pytest.FixtureRequest, tmp_path: Path) -> Catalog:
    """A run with a snapshot that two ranks share."""
    uri = str(tmp_path / "run") if request.param == "local" else f"memory://headers-{tmp_path.name}"
    made = Catalog(Storage(uri))
    in_pieces.take(made, in_pieces.v_and_w(), degree=2)
    return made


@pytest.mark.parametrize("told", in_pieces.LIES)
def test_no_lie_is_loaded_verified_or_exported(catalog: Catalog, tmp_path: Path, told: str) -> None:
    """Tensor and rows are named, and the file, where its header tells otherwise."""
    (before,) = catalog.committed()
    found = in_pieces.lie(catalog, before.name, told)
    seen, text = Catalog(catalog.storage), re.escape(found)
    with pytest.raises(DamagedSnapshotError, match=rf"^MANIFEST\.json: .*{text}"):
        load.load(seen, before.name)
    if before.name in (damaged := seen.damaged()):  # it does not fit together: nothing of it is read
        assert found in damaged[before.name]
        return
    (manifest,) = seen.committed()
    (line,) = verify.verify(seen, manifest)
    assert line.startswith("MANIFEST.json: ")
    assert found in line
    with pytest.raises(DamagedSnapshotError, match=text):
        write(Export(seen, manifest, "model"), "safetensors", tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_damage_is_told_beside_a_lie(catalog: Catalog) -> None:
    """Of a file that is damaged itself the header is not believed; those of the others are."""
    (before,) = catalog.committed()
    in_pieces.lie(catalog, before.name, "names exchanged")
    catalog.storage.remove(f"{catalog.folder(before.name)}/shard-00000-of-00002.safetensors")
    (manifest,) = Catalog(catalog.storage).committed()
    first, second = verify.verify(catalog, manifest)
    assert first == "shard-00000-of-00002.safetensors: is absent"
    assert second.startswith("MANIFEST.json: rows 4 to 8 of model/v are F32")


def contradiction(manifest: Manifest, header: bytes) -> str | None:
    """Return what is found if the first shard begins with *header*, taken byte by byte."""
    path = f"snapshots/{manifest.name}/shard-00000-of-00002.safetensors"
    found = Headers(manifest, "snapshots")
    for offset in range(len(header)):
        found.take(path, offset, memoryview(header)[offset : offset + 1])
    return found.contradiction([path])


def test_headers_that_nobody_writes(catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another length, no JSON, an odd entry, a place beyond any header: each is told, and none takes memory for it."""
    (manifest,) = catalog.committed()
    place = manifest.tensors["model/v@0"]
    good = catalog.storage.read(f"{catalog.folder(manifest.name)}/{place.file}")[: place.offset]
    assert contradiction(manifest, good) is None
    assert contradiction(manifest, (9).to_bytes(8, "little") + good[8:]) == (
        f"the tensors of {place.file} begin at byte 224, and its header ends at byte 17"
    )
    assert contradiction(manifest, good[:8] + b"[" + good[9:]) == (
        f"{place.file} holds tensors, and its header is no JSON at character 15"
    )
    content = json.loads(good[8:])
    content["model/v@0"] = ["\x1b[2J"]
    odd = json.dumps(content).encode().ljust(len(good) - 8)
    assert contradiction(manifest, good[:8] + odd) == (
        f"rows 0 to 4 of model/v are F32 of shape [4, 2] at bytes 224 to 256 of {place.file}, "
        "and its header tells ['\\x1b[2J']"
    )
    monkeypatch.setattr(verify, "_LONGEST", 100)
    assert contradiction(manifest, good) == f"the tensors of {place.file} begin at byte 224"


def test_a_whole_tensor_is_named_without_rows(tmp_path: Path) -> None:
    """Its type is not what the manifest says."""
    catalog = Catalog(Storage(str(tmp_path)))
    manifest = in_pieces.take(catalog, in_pieces.v_and_w(), degree=0)
    place = manifest.tensors["model/w"]
    lying = replace(manifest, tensors={**manifest.tensors, "model/w": replace(place, dtype="I32")})
    (line,) = verify.verify(catalog, lying)
    assert line.startswith("MANIFEST.json: the elements of model/w are I32 of shape [8, 2] at bytes ")
