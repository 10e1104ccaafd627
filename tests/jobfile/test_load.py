"""A job file becomes a job, or every reason why not; no file makes a traceback."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import tomli
from hypothesis import example, given, settings
from hypothesis import strategies as st

from elasticflow.errors import JobRefusedError
from elasticflow.jobfile.diagnostics.render_text import FORMATS, render
from elasticflow.jobfile.load import load_job, require_job
from elasticflow.jobfile.project import project_root_of
from elasticflow.jobfile.tables.job import Job

GALLERY = Path(__file__).parent / "gallery"
GOOD = (GALLERY / "jobs" / "good_base.toml").read_text("utf-8")
FUZZ = settings()


@pytest.fixture
def job_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the name of a job file in an empty folder that is also the current one."""
    monkeypatch.chdir(tmp_path)
    return Path("job.toml")


def test_a_text_is_checked_before_it_is_a_file(job_file: Path) -> None:
    """Of a file that is not there yet, and in place of one that is."""
    text = b'[job]\nname = "a"\nepochs = 3\n'
    real = str(job_file.resolve())
    found = load_job(job_file, texts={real: text}).diagnostics
    assert "job.toml" in {each.file for each in found}
    assert not job_file.exists()
    job_file.write_text("name = ")
    assert found == load_job(job_file, texts={real: text}).diagnostics


def test_a_loaded_job_equals_the_one_validated_as_a_whole() -> None:
    """Going table by table changes nothing about the job."""
    loaded = load_job(GALLERY / "jobs" / "good_base.toml")
    whole = Job.model_validate(tomli.loads(GOOD))
    assert loaded.job == whole
    assert loaded.job.model_dump_json() == whole.model_dump_json()
    assert loaded.job.as_tables() == whole.model_dump()
    assert loaded.job.model_fields_set == whole.model_fields_set
    assert Job.model_validate_json(loaded.job.model_dump_json()) == whole


def test_a_refused_job_raises_with_all_that_is_wrong() -> None:
    """`require_job` shows what `validate` would."""
    with pytest.raises(JobRefusedError) as caught:
        require_job(GALLERY / "jobs" / "many_at_once.toml")
    assert caught.value.exit_code == 2
    for code in ("EF105", "EF202", "EF101", "EF104", "EF303"):
        assert f"error[{code}]" in caught.value.message


def test_flags_are_checked_like_the_file_and_errors_point_at_them() -> None:
    """A wrong value from `--set` is shown in the flag."""
    loaded = load_job(GALLERY / "jobs" / "good_base.toml", ["train.epochs=five"])
    expected = (
        'error[EF103]: train.epochs must be a whole number, not "five"\n'
        " --> --set:1:14\n"
        "  |\n"
        "1 | train.epochs=five\n"
        "  |              ^^^^"
    )
    assert render([each for each in loaded.diagnostics if each.severity == "error"]) == expected


def test_a_length_in_epochs_is_exchanged_for_steps_by_two_flags() -> None:
    """An empty value leaves a key out."""
    loaded = load_job(GALLERY / "jobs" / "good_base.toml", ["train.epochs=", "train.steps=7"])
    assert (loaded.job.train.epochs, loaded.job.train.steps) == (None, 7)


def test_two_keys_that_exclude_each_other_are_told_once_beside_an_unknown_key(job_file: Path) -> None:
    """What the table's own check says behind the unknown key was said already, with a remedy."""
    text = (GALLERY / "jobs" / "good_base.toml").read_text()
    job_file.write_text(re.sub(r"(?m)^epochs = .*$", "epochs = 1\nsteps = 2\nstepz = 3", text))
    found = [each.message for each in load_job(job_file).diagnostics if each.code == "EF106"]
    assert found == ["train.epochs and train.steps exclude each other"]


def test_the_project_root_is_the_nearest_marked_folder(tmp_path: Path) -> None:
    """pyproject.toml or .git marks it; else it is the job file's folder, or the one above `jobs`."""
    (tmp_path / "a" / "jobs").mkdir(parents=True)
    job = tmp_path / "a" / "jobs" / "job.toml"
    assert project_root_of(job) == tmp_path / "a"
    assert project_root_of(tmp_path / "a" / "job.toml") == tmp_path / "a"
    (tmp_path / ".git").touch()  # a work tree has a file of this name
    assert project_root_of(job) == tmp_path
    (tmp_path / "a" / "pyproject.toml").touch()
    assert project_root_of(job) == tmp_path / "a"


def test_project_of_a_file_beside_the_working_folder_is_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder one stands in lies on the way to `../other/jobs`, not above it."""
    for name in ("tool", "other/jobs"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "tool" / "pyproject.toml").touch()
    monkeypatch.chdir(tmp_path / "tool")
    assert tmp_path / "other" == project_root_of(Path("../other/jobs/mnist.toml"))


@FUZZ
@given(st.binary(max_size=300))
@example(b"\xef\xbb\xbf")
@example(b"\xff\xfe[\x00")
@example(b"a=" + b"[" * 5000)
@example(b"a" + b".a" * 900 + b"=1")
@example(b"a=" + b"9" * 5000)
@example(b"a=0x" + b"f" * 5000)
@example(b'extends="\\u0000"')
@example(b'extends=["job.toml"]')
@example(b'[job]\npath=["\\u0000"]')
@example(b"job=1\nmodel=[]\ntrain=''\nnodes=1979-05-27\nsnapshots={keep=5,options=7}")
def test_any_bytes_give_findings_and_never_a_traceback(job_file: Path, data: bytes) -> None:
    """Whatever a file holds, each format shows what is wrong with it."""
    job_file.write_bytes(data)
    loaded = load_job(job_file)
    assert loaded.valid_job is None
    assert loaded.diagnostics
    for style in FORMATS:
        assert render(loaded.diagnostics, style)  # type: ignore[arg-type]  # a tuple of the literals


WORDS = st.sampled_from(
    ["", "x", "5", "500 steps", "10 min", "1 epoch", "max loss", "shop:Net", "torch.optim:AdamW", "exact", "auto", "s3://b/p", "\x1b[2J", "é"]
)  # fmt: skip
SCALARS = st.one_of(
    WORDS, st.booleans(), st.integers(-(10**30), 10**30), st.floats(), st.datetimes(), st.dates(), st.times()
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=5,
)
TABLES = {
    name: sorted(getattr(field.annotation, "model_fields", {})) for name, field in Job.model_fields.items()
}
KEYS = st.sampled_from(
    [(table, key) for table, keys in TABLES.items() for key in keys] + [("job", "naem"), ("nodse", "min")]
)


def as_toml(value: object) -> str:
    """Return a value as TOML."""
    import json

    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value)
    if isinstance(value, list):
        return f"[{', '.join(map(as_toml, value))}]"
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{json.dumps(key)} = {as_toml(each)}' for key, each in value.items())} }}"
    return value.isoformat() if hasattr(value, "isoformat") else str(value)


@FUZZ
@given(st.lists(st.tuples(KEYS, VALUES), max_size=4))
def test_any_value_at_any_key_gives_a_job_or_an_error(
    job_file: Path, changes: list[tuple[tuple[str, str], object]]
) -> None:
    """A good job with values changed by flags is a job that survives JSON, or is refused with places."""
    job_file.write_text(GOOD, "utf-8")
    loaded = load_job(job_file, [f"{table}.{key}={as_toml(value)}" for (table, key), value in changes])
    assert (loaded.valid_job is None) == any(each.severity == "error" for each in loaded.diagnostics)
    assert render(loaded.diagnostics)
    if loaded.valid_job is not None:
        assert Job.model_validate_json(loaded.job.model_dump_json()) == loaded.job
        assert loaded.job.as_tables() == loaded.job.model_dump()


@FUZZ
@given(st.text(max_size=30))
@example("a=1\n[b]\nc=2")
@example("job.name=\x00")
@example("=")
@example('"=')
@example("job.name.x.y=1")
def test_any_flag_gives_findings_and_never_a_traceback(job_file: Path, flag: str) -> None:
    """Whatever a flag holds, it is a value or an error."""
    job_file.write_text(GOOD, "utf-8")
    assert render(load_job(job_file, [flag]).diagnostics, "json")
