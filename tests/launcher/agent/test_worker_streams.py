"""Where the standard streams of workers go, and which of them are shown."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from pathlib import Path

import pytest

from elasticflow.launcher.agent import worker_streams
from elasticflow.launcher.agent.worker_streams import WorkerStreams
from elasticflow.launcher.fork_server.protocol import TorchrunOptions
from elasticflow.run_folder import RunFolder


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """Return a run folder."""
    return RunFolder(tmp_path / "runs" / "job" / "run")


def test_streams_of_a_generation_have_a_folder_of_their_own(folder: RunFolder) -> None:
    """Torch 2.13 names the folder after its restart count, which a join does not raise, and empties it before use."""
    ranks = {0: 2, 1: 3}
    first = WorkerStreams(folder, 7, ranks, TorchrunOptions(nproc=2), "n0")
    assert folder.path / "logs" / "g0007" / "rank2.stderr" == first.stderrs[0]
    first.stderrs[0].write_text("what it said")
    again = WorkerStreams(folder, 7, ranks, TorchrunOptions(nproc=2), "n0")
    other = WorkerStreams(folder, 8, ranks, TorchrunOptions(nproc=2), "n0")

    assert "what it said" == again.stderrs[0].read_text()
    assert not set(first.stderrs.values()) & set(other.stderrs.values())


def test_what_is_shown_is_kept_too_by_whole_lines(
    folder: RunFolder, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    """As torchrun shows it, each line after its worker's name; what has no end is shown when the worker is gone."""
    options = TorchrunOptions(nproc=2, role="trainer", shown_stdouts=(1,), shown_stderrs=(0, 1))
    streams = WorkerStreams(folder, 1, {0: 4, 1: 5}, options, "n0")
    streams.show()  # no worker has opened its streams yet
    for local_rank in (0, 1):
        streams.stdouts[local_rank].write_text(f"out {local_rank}\n")
        streams.stderrs[local_rank].write_bytes(f"err {local_rank}\nhal".encode() + b"\xff")
    streams.show()
    streams.show()
    assert (b"[trainer1]:out 1\n", b"[trainer0]:err 0\n[trainer1]:err 1\n") == capsysbinary.readouterr()

    for local_rank in (0, 1):
        with streams.stderrs[local_rank].open("ab") as file:
            file.write(b"f\nlast")
    streams.close()
    streams.close()
    halves = [b"[trainer%d]:%s\n" % (rank, line) for rank in (0, 1) for line in (b"hal\xfff", b"last")]
    assert (b"", b"".join(halves)) == capsysbinary.readouterr()
    assert "out 0\n" == folder.rank_log(1, 4, "stdout").read_text()


def test_progress_bars_are_shown_as_they_move(
    folder: RunFolder, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    """They end no line; and what never ends one is shown in pieces, not kept."""
    streams = WorkerStreams(folder, 1, {0: 0}, TorchrunOptions(nproc=1, role="w", shown_stdouts=(0,)), "n0")
    with streams.stdouts[0].open("wb", buffering=0) as file:
        file.write(b"\r 1 %\r 2 %")
        streams.show()
        file.write(b"\r 3 %\r\ndone\n" + b"x" * 70_000)
        streams.show()
    shown = capsysbinary.readouterr().out.splitlines()

    assert [b"[w0]:", b"[w0]: 1 %", b"[w0]: 2 %", b"[w0]: 3 %", b"[w0]:done"] == shown[:-1]
    assert b"[w0]:" + b"x" * 70_000 == shown[-1]


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_bytes_that_the_locale_cannot_write_are_shown(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    """As they are: an agent that ended for them would end again in every generation."""
    shown = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", shown)
    streams = WorkerStreams(folder, 1, {0: 0}, TorchrunOptions(nproc=1, role="w", shown_stdouts=(0,)), "n0")
    streams.stdouts[0].write_bytes("f\u00fcr \u4e2d\n".encode() + b"\xff\n")
    streams.show()

    assert "[w0]:f\u00fcr \u4e2d\n[w0]:".encode() + b"\xff\n" == shown.buffer.getvalue()


def test_stream_that_cannot_be_shown_ends_nothing(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk below the agent's own log is no reason for it to leave its workers alone."""
    full = Path("/dev/full").open("w", encoding="utf-8")  # noqa: SIM115  # to close it fails, too
    monkeypatch.setattr("sys.stdout", full)
    streams = WorkerStreams(folder, 1, {0: 0}, TorchrunOptions(nproc=1, shown_stdouts=(0,)), "n0")
    streams.stdouts[0].write_text("one\n")
    streams.show()
    streams.close()
    monkeypatch.undo()
    with contextlib.suppress(OSError):
        full.close()

    assert "one\n" == streams.stdouts[0].read_text()


def test_a_flood_keeps_its_beginning_and_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is written, the file stays bounded, and every line is either there or counted; the writer continues as it was."""
    monkeypatch.setattr(worker_streams, "MOST_BYTES", 10_000)
    monkeypatch.setattr(worker_streams, "HEAD", 2_000)
    monkeypatch.setattr(worker_streams, "TAIL", 1_000)
    path = tmp_path / "rank3.stdout"
    bounded = worker_streams.BoundedFile(path, "n0", 3, "stdout")
    assert bounded.cut() is None
    told = []
    with path.open("a", buffering=1) as worker:
        for number in range(20_000):
            worker.write(f"line {number}\n")
            if number % 100 == 0 and (left_out := bounded.cut()) is not None:
                told.append(left_out)
            assert path.stat().st_size < 13_000
    last = bounded.untold() or told[-1]
    lines = path.read_text().splitlines()
    markers = [line for line in lines if line.startswith("... ")]

    assert ("line 0", "line 19999") == (lines[0], lines[-1])
    assert 1 == len(markers)
    assert f"{last['lines']:,} lines ({last['bytes']:,} bytes)" in markers[0]
    assert 20_000 == last["lines"] + len(lines) - 1
    assert ("n0", 3, "stdout") == (last["node"], last["rank"], last["stream"])
    assert len(told) < 4
    assert bounded.untold() is None


def test_lines_that_never_end_are_bounded_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A progress bar on one line, binary output."""
    monkeypatch.setattr(worker_streams, "MOST_BYTES", 10_000)
    monkeypatch.setattr(worker_streams, "HEAD", 2_000)
    monkeypatch.setattr(worker_streams, "TAIL", 1_000)
    path = tmp_path / "rank0.stderr"
    path.write_bytes(b"\xff\r" * 30_000)
    left_out = worker_streams.BoundedFile(path, "n0", 0, "stderr").cut()

    assert left_out is not None
    assert 57_000 == left_out["bytes"]
    assert path.stat().st_size < 4_000


def test_a_worker_that_writes_as_fast_as_its_file_is_read_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cut ends, whatever is still being written; each byte is kept or counted."""
    for name, size in (("MOST_BYTES", 10_000), ("HEAD", 2_000), ("TAIL", 1_000), ("_PIECE", 1_001)):
        monkeypatch.setattr(worker_streams, name, size)
    path = tmp_path / "rank0.stdout"
    lines = [b"%099d\n" % number for number in range(2_000)]
    path.write_bytes(b"".join(lines[:110]))
    written, read = 110, os.pread

    def while_it_writes(descriptor: int, size: int, at: int) -> bytes:
        nonlocal written
        if size == 1_001:
            with path.open("ab") as file:
                file.writelines(lines[written : written + 15])
            written = min(written + 15, len(lines))
        return read(descriptor, size, at)

    monkeypatch.setattr(os, "pread", while_it_writes)
    left_out = worker_streams.BoundedFile(path, "n0", 0, "stdout").cut()

    assert left_out is not None
    assert written < len(lines) / 2
    kept = [line for line in path.read_bytes().splitlines(keepends=True) if not line.startswith(b"...")]
    assert written * 100 == left_out["bytes"] + sum(map(len, kept))
    assert kept[:20] == lines[:20]
    assert kept[20:] == lines[written - len(kept) + 20 : written]
