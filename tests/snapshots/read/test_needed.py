"""A node reads and verifies of a snapshot in pieces what its ranks hold; all nodes together read every byte."""

from __future__ import annotations

import json
import math
import socket
import threading
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elasticflow.errors import SnapshotError
from elasticflow.snapshots.client import messages
from elasticflow.snapshots.client.channel import Channel
from elasticflow.snapshots.client.loading import NodeLoader
from elasticflow.snapshots.client.messages import Hello, Load
from elasticflow.snapshots.client.staging import StagingClient
from elasticflow.snapshots.format import manifest
from elasticflow.snapshots.format.manifest import BLOCK, DamagedSnapshotError, FileEntry
from elasticflow.snapshots.format.pieces import Part, Piece, TensorPlace
from elasticflow.snapshots.read import needed
from elasticflow.snapshots.read.needed import blocks_of, nbytes_of, needed_blocks
from elasticflow.snapshots.store.catalog import Catalog
from elasticflow.snapshots.writer.connected_rank import ConnectedRank
from elasticflow.snapshots.writer.load_service import LoadService
from elasticflow.storage.storage import Storage
from tests.snapshots import in_pieces
from tests.snapshots.format.test_manifest import made

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from elasticflow.snapshots.format.manifest import Manifest
    from elasticflow.snapshots.read.load import LoadedSnapshot
    from elasticflow.snapshots.writer.load_service import _Loading

MIB = 1 << 20
SHAPES = st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple), min_size=1, max_size=4)
WHOLE = TensorPlace("shard0", "U8", (3,), 8, 3)


def manifest_of(shapes: Sequence[tuple[int, ...]], degree: int, *, sha256: str | None = None) -> Manifest:
    """Return a manifest of tensors in pieces, a file for each of *degree* ranks; the first file also holds a whole tensor."""
    tensors, ends = {"whole": WHOLE}, {f"shard{shard}": 8 for shard in range(degree)}
    ends["shard0"] += WHOLE.nbytes
    for number, shape in enumerate(shapes):
        for shard in range(degree):
            begin, end = Part(shard, degree).rows(shape[0])
            if begin < end:
                file, local = f"shard{shard}", (end - begin, *shape[1:])
                piece = Piece.of_rows(f"w{number}", shape, begin)
                tensors[piece.key] = TensorPlace(file, "U8", local, ends[file], math.prod(local), piece)
                ends[file] += math.prod(local)
    held = {place.file for place in tensors.values()}
    files = {file: FileEntry(end, (0,) * -(-end // 16), sha256) for file, end in ends.items() if file in held}
    state = {"state.json": FileEntry(40, (0,) * 3)}
    return made(files={**files, **state}, tensors=tensors, aliases={}, format=2)


@given(SHAPES, st.integers(1, 5), st.integers(1, 5), st.booleans())
def test_the_rows_of_a_part_are_needed_and_all_parts_together_need_everything(
    shapes: Sequence[tuple[int, ...]], saved: int, wanted: int, is_hashed: bool
) -> None:
    """Whatever the shapes and degrees are. A file with a SHA-256 is needed whole or not at all."""
    manifest = manifest_of(shapes, saved, sha256="0" * 64 if is_hashed else None)
    with mock.patch.object(needed, "BLOCK", 16):
        assert {} == needed_blocks(manifest, None)
        read = {location: set[int]() for location in manifest.locations()}
        for shard in range(wanted):
            part = Part(shard, wanted)
            partly = needed_blocks(manifest, [part])
            for whole in manifest.whole.values():
                row = whole.nbytes // whole.shape[0]
                begin, end = part.rows(whole.shape[0])
                for span in whole.spans(begin * row, end * row):
                    blocks = partly.get(manifest.location(span.file))
                    assert blocks is None or blocks.issuperset({0, *blocks_of(span)})
            assert not is_hashed or not any(partly.values())
            assert nbytes_of(manifest, partly) <= sum(entry.size for entry in manifest.files.values())
            for location, entry in manifest.locations().items():
                read[location] |= partly.get(location, {*range(len(entry.crc32))})
        assert read == {loc: {*range(len(entry.crc32))} for loc, entry in manifest.locations().items()}


class Node:
    """The writer's side of loading, for the ranks of one node, in this process, and the bytes that it reads."""

    def __init__(self, uri: str, parts: Sequence[Part | None], *, world_size: int) -> None:
        self.storage = Storage(uri)
        self.nbytes, self.may_read = 0, threading.Event()
        self.may_read.set()
        self._count_bytes()
        self.service = LoadService(Catalog(self.storage))
        self.links: list[StagingClient] = []
        self._ranks: list[ConnectedRank] = []
        self._threads: list[threading.Thread] = []
        for rank, part in enumerate(parts):
            ours, theirs = socket.socketpair()
            self.links.append(StagingClient(Channel(ours, messages.TO_WRITER, messages.TO_WORKER)))
            hello = Hello(rank, rank, world_size, len(parts), 2, part)
            self._ranks.append(ConnectedRank(Channel(theirs, messages.TO_WORKER, messages.TO_WRITER), hello))
        self.loaders = [NodeLoader(link, lambda: None) for link in self.links]

    def greet(self) -> None:
        """Have all ranks greet the writer."""
        for rank in self._ranks:
            self.service.greet(rank)
        self._threads = [threading.Thread(target=self._serve, args=(rank,)) for rank in self._ranks]
        for thread in self._threads:
            thread.start()

    def _serve(self, rank: ConnectedRank) -> None:
        while (message := rank.channel.receive()) is not None:
            if isinstance(message, Load):
                self.service.load(rank, message.name, is_whole=message.is_whole)
            else:
                self.service.leave(rank)
        rank.channel.close()

    def _count_bytes(self) -> None:
        open_read, lock = self.storage.open_read, threading.Lock()

        def opened(path: str) -> Any:
            assert self.may_read.wait(60)
            file = open_read(path)
            readinto = file.readinto  # type: ignore[attr-defined]

            def counted(target: Any) -> int:
                size: int = readinto(target)
                with lock:
                    self.nbytes += size
                return size

            proxy = mock.MagicMock(wraps=file)
            proxy.__enter__.return_value, proxy.readinto = proxy, counted
            proxy.__exit__.side_effect = lambda *_: file.close()
            return proxy

        self.storage.open_read = opened  # type: ignore[method-assign]

    def close(self) -> None:
        """End the connections."""
        for loader, link in zip(self.loaders, self.links, strict=True):
            loader.release()
            link.close()
        for thread in self._threads:
            thread.join(60)


@pytest.fixture(params=["local", "remote"])
def uri(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Where a run with a snapshot by four ranks is: four tensors of 12 MiB, in files of 12 MiB each."""
    place = str(tmp_path / "run") if request.param == "local" else f"memory://needed-{tmp_path.name}"
    in_pieces.take(Catalog(Storage(place)), state(), degree=4)
    return place


def state() -> Any:
    """Return four tensors of twelve rows, each row 1 MiB."""
    rows = torch.arange(12.0).view(12, 1).expand(12, MIB // 4)
    return in_pieces.state_of({f"w{number}": rows + 100 * number for number in range(4)})


@pytest.fixture
def nodes(uri: str) -> Iterator[Any]:
    """Make a node whose ranks hold these parts, of a group of *world_size*."""
    made_nodes: list[Node] = []

    def make(*parts: Part | None, world_size: int = 4) -> Node:
        made_nodes.append(Node(uri, parts, world_size=world_size))
        return made_nodes[-1]

    yield make
    for node in made_nodes:
        node.close()


def name_in(uri: str) -> str:
    """Return the snapshot's name."""
    (found,) = Catalog(Storage(uri)).committed()
    return found.name


def check(loaded: LoadedSnapshot, begin: int, end: int) -> None:
    """Compare rows of each tensor with what was stored."""
    for key, expected in state().tensors.items():
        found = torch.empty(end - begin, MIB // 4)
        loaded.read_into(key, found.view(-1).view(torch.uint8).numpy().data, begin * MIB)
        assert torch.equal(expected[begin:end], found)


@pytest.mark.parametrize("degree", [4, 2])
def test_each_node_reads_the_files_of_its_own_ranks(nodes: Any, uri: str, degree: int) -> None:
    """Half of a snapshot of 48 MiB, at the degree of the snapshot and at another; every rank finds its rows."""
    halves = [
        [Part(shard, degree) for shard in range(half * degree // 2, (half + 1) * degree // 2)]
        for half in (0, 1)
    ]
    for parts in halves:
        node = nodes(*parts, world_size=degree)
        node.greet()
        for part, loader in zip(parts, node.loaders, strict=True):
            check(loader.load(name_in(uri)), *part.rows(12))
        assert 24 * MIB < node.nbytes < 25 * MIB


def test_more_ranks_than_the_snapshot_has_read_the_blocks_of_their_rows(nodes: Any, uri: str) -> None:
    """At twelve shards a rank needs one row of each tensor: blocks of one file, of which the last has none of them."""
    node = nodes(Part(0, 12), world_size=12)
    node.greet()
    check(node.loaders[0].load(name_in(uri)), 0, 1)
    assert node.nbytes < 3 * BLOCK


def test_a_rank_that_shares_nothing_has_its_node_read_everything(nodes: Any, uri: str) -> None:
    """As has a node one of whose ranks is not known."""
    for parts in ((None,), (Part(0, 4), None)):
        node = nodes(*parts)
        node.greet()
        check(node.loaders[0].load(name_in(uri)), 0, 12)
        assert node.nbytes > 48 * MIB


def test_damage_is_found_by_the_node_that_needs_the_bytes(nodes: Any, uri: str) -> None:
    """The other one loads its own; if it asks for more after all, it is told, too. Each notices that a file is absent."""
    storage, name = Storage(uri), name_in(uri)
    path = f"snapshots/{name}/shard-00003-of-00004.safetensors"
    content = bytearray(storage.read(path))
    content[-1] ^= 1
    storage.write(path, [bytes(content)])
    first, second = nodes(Part(0, 4), Part(1, 4)), nodes(Part(2, 4), Part(3, 4))
    for node in (first, second):
        node.greet()
    loaded = first.loaders[0].load(name)
    check(loaded, 0, 3)
    told = r"^shard-00003-of-00004\.safetensors: block 1 "
    with pytest.raises(DamagedSnapshotError, match=told):
        second.loaders[0].load(name)
    with pytest.raises(DamagedSnapshotError, match=told):
        check(loaded, 0, 12)
    storage.remove(path)
    third = nodes(Part(0, 4), Part(1, 4))
    third.greet()
    with pytest.raises(DamagedSnapshotError, match="is absent"):
        third.loaders[0].load(name)


def test_another_versions_snapshot_is_refused_with_the_remedy(nodes: Any, uri: str) -> None:
    """Not only with the reason, on its way from the writer."""
    catalog, name = Catalog(Storage(uri)), name_in(uri)
    path = f"{catalog.folder(name)}/{manifest.FILE_NAME}"
    content = {**json.loads(catalog.storage.read(path)), "format": 3}
    del content["digest"]
    catalog.storage.write(path, [json.dumps({**content, "digest": manifest._digest(content)}).encode()])
    node = nodes(None)
    node.greet()
    with pytest.raises(SnapshotError, match=r"has format 3, .*\n  help: continue with that version"):
        node.loaders[0].load(name)


def test_rows_that_a_node_did_not_need_are_verified_when_they_are_asked_for(nodes: Any, uri: str) -> None:
    """A tensor that was sharded and is not any more: the rank reads all of it, and everything was verified."""
    node = nodes(Part(0, 4))
    node.greet()
    loaded = node.loaders[0].load(name_in(uri))
    check(loaded, 0, 3)
    assert node.nbytes < 13 * MIB
    check(loaded, 0, 12)
    assert 60 * MIB < node.nbytes < 62 * MIB
    check(loaded, 3, 6)
    assert node.nbytes < 62 * MIB


def test_what_is_read_ahead_is_narrowed_to_what_the_ranks_hold(nodes: Any, uri: str) -> None:
    """Before the first ranks have greeted, all is read ahead; as soon as they ask, their rows suffice."""
    node, name = nodes(Part(0, 4)), name_in(uri)
    node.may_read.clear()
    node.service.load_ahead(name)
    (loading,) = node.service._loadings
    node.greet()
    answered: list[LoadedSnapshot] = []
    waiting = threading.Thread(target=lambda: answered.append(node.loaders[0].load(name)))
    waiting.start()
    while loading.reader.parts is None:
        assert waiting.is_alive()
    node.may_read.set()
    waiting.join()
    check(answered[0], 0, 3)
    assert node.nbytes < 13 * MIB


def test_the_next_generations_rows_are_read_ahead(nodes: Any, uri: str) -> None:
    """The ranks before are gone; those that come will most likely hold the same rows."""
    node, name = nodes(Part(1, 4)), name_in(uri)
    node.greet()
    node.service.load_ahead(name)
    loading: _Loading = node.service._loadings[0]
    check(node.loaders[0].load(name), 3, 6)
    assert frozenset({Part(1, 4)}) == loading.reader.parts
    assert node.nbytes < 13 * MIB
