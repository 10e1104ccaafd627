from __future__ import annotations

import os
from typing import TYPE_CHECKING

from elasticflow.observe.records import newest_with, parse, read, tail
from elasticflow.system import records
from elasticflow.system.json_lines import FollowedLines, lines_from_end

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_torn_and_foreign_lines_are_left_out(tmp_path: Path) -> None:
    """A file that is being written ends in half a line; that is no error."""
    path = tmp_path / "lines.jsonl"
    path.write_text('{"a": 1}\n[1]\nnoise\n{"a": 2}\n{"a"')
    assert list(read(path)) == [{"a": 1}, {"a": 2}]
    assert list(read(tmp_path / "absent")) == []
    assert parse(b"\xff") is None


def test_tail_reads_whole_lines_of_the_end(tmp_path: Path) -> None:
    """The first, probably cut, line of the tail is dropped; a small file is read whole."""
    path = tmp_path / "lines.jsonl"
    path.write_text("".join(f'{{"n": {n}}}\n' for n in range(100)))
    assert tail(path)[0] == {"n": 0}
    assert tail(path, 25) == [{"n": 98}, {"n": 99}]
    assert tail(tmp_path / "absent") == []


def test_follower_waits_for_the_newline(tmp_path: Path) -> None:
    """Half a line is given out once it is whole, or as the last one."""
    path = tmp_path / "log"
    follower = FollowedLines(path)
    assert follower.lines() == []
    path.write_bytes(b"one\ntw")
    assert follower.lines() == [b"one"]
    with path.open("ab") as file:
        file.write(b"o\nthr")
    assert follower.lines() == [b"two"]
    assert follower.unended() == [b"thr"]
    assert follower.unended() == []


def test_follower_survives_a_cut(tmp_path: Path) -> None:
    """After a file was cut, reading continues with what is written next."""
    path = tmp_path / "log"
    path.write_bytes(b"one\ntwo\nthree\n")
    follower = FollowedLines(path)
    assert len(follower.lines()) == 3
    path.write_bytes(b"one\n")
    assert follower.lines() == []
    with path.open("ab") as file:
        file.write(b"again\n")
    assert follower.lines() == [b"again"]


def test_follower_of_a_file_that_grows_while_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that prints faster than its lines are read does not keep the reader for ever."""
    path, pread, reads = tmp_path / "log", os.pread, iter(range(100))
    path.write_bytes(b"first\n")

    def read_while_it_grows(descriptor: int, size: int, offset: int) -> bytes:
        if next(reads, None) is not None:
            with path.open("ab") as file:
                file.write(b"more\n")
        return pread(descriptor, size, offset)

    monkeypatch.setattr(os, "pread", read_while_it_grows)
    follower = FollowedLines(path)
    assert follower.lines() == [b"first"]
    assert set(follower.lines()) == {b"more"}


def test_lines_from_the_end_of_a_file_that_is_cut_meanwhile(tmp_path: Path) -> None:
    """The reader lives, and ends where bytes are missing; a long line is read whole, an unended one too."""
    path = tmp_path / "metrics.jsonl"
    long = b"x" * 3_000_000 + b"\n"
    path.write_bytes(b"first\n" + long + b"last")
    lines = lines_from_end(path)
    size = path.stat().st_size
    assert next(lines) == (size, b"last")
    assert list(lines) == [(size - 4, long), (6, b"first\n")]
    lines = lines_from_end(path)
    next(lines)
    os.truncate(path, 0)
    assert list(lines) == []


def test_the_newest_records_with_a_key(tmp_path: Path) -> None:
    """They are found behind any number of others; the key's name inside of a record does not count."""
    path = tmp_path / "metrics.jsonl"
    assert list(newest_with(path, "eval")) == []
    others = '{"step": 1, "of": "eval", "in": {"eval": 1}}\n{"eval": null}\n{"eval": torn' * 40_000
    path.write_text(f'{{"eval": 1}}\n{{"eval": 2}}\n{others}\n')
    assert list(newest_with(path, "eval")) == [{"eval": 2}, {"eval": 1}]


def test_a_number_too_large_for_a_float_is_no_number() -> None:
    """A view of a damaged record shows what it can."""
    record = records.parse(b'{"time": 1' + b"0" * 400 + b"}")
    assert records.float_of(record, "time") is None
    assert records.int_of(record, "time") == 0


def test_a_pipe_that_holds_nothing_yet_is_an_empty_record(tmp_path: Path) -> None:
    """It is damage, and nobody waits for its writer."""
    path = tmp_path / "state.json"
    os.mkfifo(path)
    writer = os.open(path, os.O_RDWR)
    try:
        assert str(records.read(path)) == f"{path} is empty"
    finally:
        os.close(writer)


def test_name_that_is_no_utf8_can_be_printed() -> None:
    """Python has such bytes of a file's name as characters that no stream takes."""
    name = b"caf\xe9.png".decode(errors="surrogateescape")
    assert "no caf\\xdce9.png" == records.printable(f"no {name}")
