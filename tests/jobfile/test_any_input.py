"""Whatever a file, a flag, a base or a module holds: findings, never a traceback; exit code 0 or 1."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticflow.cli.main import call
from elasticflow.jobfile.diagnostics.render_text import FORMATS
from tests.jobfile.documents import TEXTS, VALUES, documents, quoted, written

if TYPE_CHECKING:
    from collections.abc import Callable

GALLERY = Path(__file__).parent / "gallery" / "jobs"
GOOD = (GALLERY / "good_base.toml").read_text("utf-8")
WRONG = [file.read_bytes() for file in sorted(GALLERY.glob("*.toml"))]
EXAMPLES = int(os.environ.get("ANY_INPUT_EXAMPLES", "12"))
Validate = "Callable[..., int]"
many = settings(max_examples=EXAMPLES)
TABLES = [
    "job", "model", "optimizer", "lr_scheduler", "dataset", "evaluation", "train", "ddp", "nodes", "restarts", "snapshots",
    "logging", "torchrun", "matrix", "extends", "slurm", "job.path", "model.args", "snapshots.keep", "snapshots.include",
]  # fmt: skip


@pytest.fixture
def code_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Return a function that validates a job file of given bytes and returns the exit code."""
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "good.toml").write_text(GOOD, "utf-8")
    monkeypatch.chdir(tmp_path)

    def run(content: bytes, *arguments: str, output_format: str = "full") -> int:
        Path("job.toml").write_bytes(content)
        return call(["validate", "job.toml", "--format", output_format, *arguments])

    return run


@many
@given(content=st.binary(max_size=200), style=st.sampled_from(FORMATS))
def test_any_bytes_are_answered(code_of: Callable[..., int], content: bytes, style: str) -> None:
    """A file of any bytes."""
    assert code_of(content, output_format=style) == 1


@many
@given(st.data())
def test_damaged_job_files_are_answered(code_of: Callable[..., int], data: st.DataObject) -> None:
    """A job file with a piece cut out, doubled or replaced by any bytes."""
    content = data.draw(st.sampled_from(WRONG))
    start = data.draw(st.integers(0, len(content)))
    end = data.draw(st.integers(start, min(len(content), start + 40)))
    piece = data.draw(
        st.one_of(st.binary(max_size=8), TEXTS.map(str.encode), st.just(content[start:end] * 2))
    )
    style = data.draw(st.sampled_from(FORMATS))
    assert code_of(content[:start] + piece + content[end:], output_format=style) in {0, 1}


@many
@given(document=documents(), style=st.sampled_from(FORMATS))
def test_any_document_is_answered(code_of: Callable[..., int], document: str, style: str) -> None:
    """Any TOML."""
    assert code_of(document.encode(), output_format=style) == 1


@many
@given(table=st.sampled_from(TABLES), key=TEXTS, value=VALUES, style=st.sampled_from(FORMATS))
def test_any_value_of_any_key_is_answered(
    code_of: Callable[..., int], table: str, key: str, value: object, style: str
) -> None:
    """A job with any value for a table, and for a key that may be unknown."""
    kept = GOOD if table not in {"job", "model", "optimizer", "dataset", "train"} else ""
    for text in (
        f"{table} = {written(value)}\n{kept}",
        f"{kept}\n[{table}.{quoted(key)}]\nx = {written(value)}\n",
    ):
        assert code_of(text.encode(), output_format=style) in {0, 1}


KNOWN = sorted({line.split("=")[0].strip() for file in WRONG for line in file.decode("utf-8", "replace").splitlines() if "=" in line})  # fmt: skip


@many
@given(table=st.sampled_from(TABLES), key=st.sampled_from(KNOWN), value=VALUES)
def test_any_value_of_a_known_key_is_answered(
    code_of: Callable[..., int], table: str, key: str, value: object
) -> None:
    """Values of the wrong kind for keys that exist, also set by a flag on top of a good job."""
    flag = f"{table}.{key}={written(value)}"
    assert code_of(GOOD.encode(), "--set", flag) in {0, 1}


@many
@given(
    flag=st.one_of(
        TEXTS, st.builds("{}={}".format, TEXTS, TEXTS), st.builds("train.{}={}".format, TEXTS, TEXTS)
    )
)
def test_any_flag_is_answered(code_of: Callable[..., int], flag: str) -> None:
    """Any text as `--set`."""
    assert code_of(GOOD.encode(), f"--set={flag}") in {0, 1}


@many
@given(content=st.one_of(st.binary(max_size=200), documents().map(str.encode), st.sampled_from(WRONG)))
def test_any_base_is_answered(code_of: Callable[..., int], content: bytes) -> None:
    """A good job on any base."""
    Path("base.toml").write_bytes(content)
    assert code_of(b'extends = ["good.toml", "base.toml"]\n') in {0, 1}


NAME = st.sampled_from(["Net", "Base", "x", "dataclass", "partial", "field", "self", "int", "Net.make"])
PARAMETERS = st.sampled_from(["", "self", "self, x", "*, x: int", "x, /", "*args, **kw", "x: 'int' = 1", "x: Literal[()]", "cls, x: tuple[()] = 1"])  # fmt: skip
STATEMENTS = st.one_of(
    st.builds("{} = {}".format, NAME, NAME),
    st.builds(
        "from {} import {}".format,
        st.sampled_from([".", ".m", "m", "dataclasses", "functools", "os", "..", "typing"]),
        st.sampled_from(["*", "Net", "dataclass", "partial", "field", "x"]),
    ),
    st.builds("import {}".format, NAME),
    st.builds("class {}({}): pass".format, NAME, NAME),
    st.builds(
        "class {}({}, {}):\n    def __init__({}): ...\n    x: {} = {}".format,
        NAME,
        NAME,
        NAME,
        PARAMETERS,
        NAME,
        NAME,
    ),
    st.builds("@{}\nclass {}:\n    x: {} = field({}=1)\n    def make(): ...".format, NAME, NAME, NAME, NAME),
    st.builds("@{}\ndef {}({}): ...".format, NAME, NAME, PARAMETERS),
    st.builds("{} = partial({}, {}, x={})".format, NAME, NAME, NAME, NAME),
    st.builds("if {}:\n    {} = 1\nelse:\n    from m import *".format, NAME, NAME),
    TEXTS,
)


@many
@given(
    module=st.one_of(
        st.binary(max_size=100), st.lists(STATEMENTS, max_size=8).map("\n".join).map(str.encode)
    ),
    name=NAME,
    args=st.dictionaries(st.sampled_from(["x", "self", "y"]), VALUES, max_size=2),
)
def test_any_module_is_answered(
    code_of: Callable[..., int], module: bytes, name: str, args: dict[str, object]
) -> None:
    """A job whose modules hold anything, Python or not."""
    Path("m.py").write_bytes(module)
    uses = (
        GOOD.replace("shop:Net", f"m:{name}")
        .replace("shop:Images", f"m:{name}")
        .replace("shop:weighted_loss", f"m:{name}")
    )
    text = uses.replace("[optimizer]", f"args = {written(args)}\n[optimizer]", 1)
    text += f'\n[snapshots]\ninclude = {{ x = "m:{name}" }}\n'
    assert code_of(text.encode()) in {0, 1}
