"""The JSON Schema for editors says what the models say: the same file, the same verdicts, on files and on anything.

After a change of the models: `python -m tests.jobfile.tools.made_schema` writes the package's schema again.
"""

from __future__ import annotations

import re
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import tomli
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator, ValidationError, validators
from pydantic import ValidationError as ModelError

from elasticflow.jobfile.entry_points.object_arguments import collate_tables
from elasticflow.jobfile.load import load_job
from elasticflow.jobfile.tables.evaluation import sets_beside_keys
from elasticflow.jobfile.tables.job import OF_TRAINING, Job
from elasticflow.jobfile.tables.json_schema import SCHEMA_FILE
from elasticflow.jobfile.tables.types import ONE_OF
from tests.jobfile.tools.made_schema import BEYOND, job_schema, schema_text

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[3]
CORPUS = Path(__file__).parents[1] / "corpus"
GALLERY = Path(__file__).parents[1] / "gallery"
BAD = sorted((CORPUS / "bad").glob("*.toml"))
GOOD = [*sorted((CORPUS / "good").glob("*.toml")), *sorted((ROOT / "jobs").glob("*.toml"))]
# "# line 7, checks only: ..." says where a case is wrong, and who alone can know.
MARK = re.compile(r"# line (?P<line>\d+)(?:, (?P<who>not taplo|not the schema|checks only))?: .")


def test_the_package_carries_what_the_models_say() -> None:
    """The file is up to date; if not: `python -m tests.jobfile.tools.made_schema`."""
    assert schema_text() == SCHEMA_FILE.read_text("utf-8")


def test_schema_is_one() -> None:
    """The schema keeps to the rules of its own draft, and needs nothing from elsewhere."""
    schema = job_schema()
    Draft202012Validator.check_schema(schema)
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert schema["$id"] == "urn:elasticflow:job-file"
    assert '$ref": "http' not in schema_text()


def test_tables_are_closed_and_nothing_is_null() -> None:
    """Every table refuses unknown keys; TOML has no null."""
    schema = job_schema()
    assert set(schema["properties"]) == {"extends", *Job.model_fields}
    tables = {"": schema, **schema["$defs"]}
    is_closed = {name: table["additionalProperties"] is False for name, table in tables.items()}
    assert [name for name, closed in is_closed.items() if not closed] == ["EvaluationTable"]
    assert tables["EvaluationTable"]["additionalProperties"] == {"$ref": "#/$defs/EvaluationSet"}
    assert "null" not in schema_text()


def test_every_key_has_a_hover_text_and_teaches_its_values() -> None:
    """A description for each table and key; choices or examples wherever a value is not true or false."""
    schema = job_schema()
    keys = [("", name, key) for name, key in schema["properties"].items()]
    for table, content in schema["$defs"].items():
        assert content["description"]
        keys += [(table, name, key) for name, key in content["properties"].items()]
    assert [] == [(table, name) for table, name, key in keys if not key.get("description")]
    silent = [
        (table, name)
        for table, name, key in keys
        if table and "examples" not in key and "enum" not in key and key.get("type") != "boolean"
    ]
    assert [] == silent


def test_examples_and_defaults_of_the_schema_are_right() -> None:
    """What an editor offers for a key is accepted there."""
    schema = job_schema()
    for table in schema["$defs"].values():
        for key in table["properties"].values():
            offered = [*key.get("examples", []), *([key["default"]] if "default" in key else [])]
            for value in offered:
                _Toml({**key, "$defs": schema["$defs"]}).validate(value)


def test_a_file_that_extends_others_may_leave_out_what_they_give() -> None:
    """Nothing is required then; what is there is checked all the same."""
    assert schema_accepts({"extends": "base.toml"})
    assert schema_accepts({"extends": [], "model": {}, "train": {"threads": 1}})
    assert not schema_accepts({"model": {}})
    assert not schema_accepts({"extends": "base.toml", "train": {"epochs": 1, "steps": 1}})
    assert not schema_accepts({"extends": "base.toml", "train": {"epoch": 1}})


@pytest.mark.parametrize("path", BAD, ids=lambda path: path.stem)
def test_schema_models_and_validate_refuse_the_same(path: Path) -> None:
    """Each bad file is refused by those who can know, and `validate` points at its line."""
    mark = MARK.match(path.read_text("utf-8"))
    assert mark, "the first line says which line is wrong, and why"
    raw = tomli.loads(path.read_text("utf-8"))
    expected = {"checks only": (True, True), "not the schema": (True, False)}.get(mark["who"], (False, False))
    assert expected == (schema_accepts(raw), models_accept(raw))
    lines = {each.line for each in load_job(path).diagnostics if each.severity == "error"}
    assert int(mark["line"]) in lines


@pytest.mark.parametrize("path", GOOD, ids=lambda path: path.stem)
def test_schema_models_and_validate_accept_the_same(path: Path) -> None:
    """Each good file is accepted by all three."""
    raw = tomli.loads(path.read_text("utf-8"))
    errors = [each for each in load_job(path).diagnostics if each.severity == "error"]
    assert (True, True, []) == (schema_accepts(raw), models_accept(raw), errors)


def test_schema_and_models_agree_on_the_gallery() -> None:
    """What the schema says of each readable file there, the models say; only what is beyond it they alone refuse."""
    alone = set()
    for path in sorted((GALLERY / "jobs").glob("*.toml")):
        try:
            raw = tomli.loads(path.read_bytes().decode("utf-8-sig").replace("\r\n", "\n"))
        except ValueError:
            continue
        schema, models = schema_accepts(raw), models_accept(raw)
        assert schema or not models, path.stem
        if schema and not models:
            alone.add(path.stem)
    of_slurm = {
        f"slurm_{what}"
        for what in (
            *("gpus_twice", "option_breaking", "option_ours", "option_short", "option_unknown"),
            *("container", "output_folder", "srun_ours"),
        )
    }
    assert {
        "collate_no_entry",
        "notify_nobody",
        "notify_secret",
        "range_empty",
        "ray_resource_counted",
        *of_slurm,
    } == alone
    assert len(BEYOND) == 10


def test_corpus_is_large_enough() -> None:
    """At least 60 bad files that an editor can know to be bad."""
    marks = [MARK.match(path.read_text("utf-8")) for path in BAD]
    assert sum(mark is not None and mark["who"] in {None, "not taplo"} for mark in marks) >= 60


# Values that are nearly right somewhere, for places where they are wrong.
_TEXTS = st.one_of(
    st.sampled_from(
        ["a:b", "a.b", "a:b\n", ":b", "max loss", "max", "5 steps", "5 steps\n", "05 steps", "1.0 epoch", "1.5 epochs"]
    ),
    st.sampled_from(["0.5 h", "0 s", "90s", "1 hs", "2\t min ", "5 samples", "1_000 s", "1e3 s", "4 GiB", "0.001 kB"]),
    st.sampled_from(["0.1 B", "9 gb", "head:1", "head:0", "head:65535", "head:65536", "head:01", "auto", "never", ""]),
    st.from_regex(r"\A[0-9.]{1,4}[ \t]{0,2}(steps?|epochs?|samples?|s|mins?|h|ds?|[kKMG]?i?B)\Z"),
    st.from_regex(r"\A[a-z.]{0,3}:[a-z0-9.]{0,6}\Z"),
    st.text(max_size=5),
)  # fmt: skip
_SCALARS = st.one_of(
    _TEXTS,
    st.integers(-1, 5) | st.sampled_from([1024, 1025, 65_536, 65_537, 2**63 - 1, 2**63, 10**15, 10**15 + 1]),
    st.sampled_from([0.0, 0.5, 1.0, 2.0, 60.0, 60.1, -1.0]),
    st.booleans(),
)
_VALUES = st.one_of(
    _SCALARS,
    st.lists(_SCALARS, max_size=2),
    st.dictionaries(st.sampled_from(["last", "a", "a b", "a\n", "split", ""]), _SCALARS, max_size=2),
)


@st.composite
def nearly_jobs(draw: st.DrawFn) -> dict[str, Any]:
    """Return a good job in which some keys were replaced, taken out or added."""
    job: dict[str, Any] = deepcopy(draw(st.sampled_from(good_jobs())))
    schema = the_schema()
    for _ in range(draw(st.integers(1, 3))):
        table = draw(st.sampled_from(sorted(schema["properties"])))
        if draw(st.integers(0, 9)) == 0 or not isinstance(job.get(table, {}), dict):
            job[table] = draw(_VALUES)
            continue
        here = job.setdefault(table, {})
        ref = schema["properties"][table].get("$ref", "/").rpartition("/")[2]
        known = sorted(schema["$defs"].get(ref, {"properties": {}})["properties"])
        key = draw(st.sampled_from([*known, "unknown"]))
        if draw(st.booleans()) or key not in here:
            here[key] = draw(_VALUES)
        else:
            del here[key]
    return job


@settings(max_examples=80)
@given(nearly_jobs())
def test_schema_and_models_agree_on_nearly_good_jobs(raw: dict[str, Any]) -> None:
    """Whatever is changed in a good job, the schema accepts it exactly if the models do."""
    assert schema_accepts(raw) == models_accept(raw) or is_beyond(raw)


def generated(schema: dict[str, Any], wanted: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Return what the schema of a key or table allows, read off its keywords; *wanted* is what a whole job must have."""
    if "$ref" in schema:
        return generated(the_schema()["$defs"][schema["$ref"].rpartition("/")[2]], wanted)
    if "enum" in schema or "const" in schema:
        return st.sampled_from(schema.get("enum") or [schema["const"]])
    if "anyOf" in schema:
        return st.one_of([generated(each, {}) for each in schema["anyOf"]])
    if schema["type"] == "object":
        return _tables(schema, wanted)
    if schema["type"] == "array":
        return st.lists(generated(schema["items"], {}), min_size=schema.get("minItems", 0), max_size=3)
    if schema["type"] == "string":
        texts = _texts(schema["pattern"]) if "pattern" in schema else st.text(min_size=1)
        return texts.filter(lambda text: len(text) <= schema.get("maxLength", 10**6))
    if schema["type"] == "integer":
        return st.integers(schema.get("minimum"), schema.get("maximum"))
    if schema["type"] == "number":
        low, high = schema.get("exclusiveMinimum"), schema.get("maximum", schema.get("exclusiveMaximum"))
        return st.floats(
            low,
            high,
            allow_nan=False,
            allow_infinity=False,
            exclude_min=low is not None,
            exclude_max="exclusiveMaximum" in schema,
        )
    assert schema["type"] == "boolean"
    return st.booleans()


@cache
def _texts(pattern: str) -> st.SearchStrategy[str]:
    return st.from_regex(_to_the_end(pattern), alphabet=st.characters(max_codepoint=127))


@st.composite
def _tables(draw: st.DrawFn, schema: dict[str, Any], wanted: dict[str, Any]) -> dict[str, Any]:
    if "patternProperties" in schema:
        [(pattern, inner)] = schema["patternProperties"].items()
        return draw(st.dictionaries(_texts(pattern), generated(inner, {}), max_size=2))
    if "properties" not in schema:
        return draw(st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=5), max_size=2))
    keys = list(schema["properties"])
    if "propertyNames" in schema:  # [evaluation]: one set, or several
        if draw(st.booleans()):
            of_set = generated(the_schema()["$defs"]["EvaluationSet"], wanted["else"]["additionalProperties"])
            return {draw(st.sampled_from(["val", "held_back_2"])): draw(of_set)}
        schema, wanted = the_schema()["$defs"]["EvaluationSet"], wanted["then"]
    chosen = {name for name in keys if draw(st.booleans())} | set(
        wanted.get("required", schema.get("required", ()))
    )
    if pair := [each["required"][0] for each in wanted.get("anyOf", ())]:
        chosen = (chosen - set(pair)) | {draw(st.sampled_from(pair))}
    if "oneOf" in schema:
        choice = draw(st.sampled_from(schema["oneOf"]))
        chosen -= {name for each in schema["oneOf"] for name in each["required"]} | set(
            choice.get("properties", ())
        )
        chosen |= set(choice["required"])
    if "if" in schema and chosen.issuperset(schema["if"]["required"]):
        chosen -= set(schema["then"]["properties"])
    return {name: draw(generated(schema["properties"][name], {})) for name in keys if name in chosen}


@settings(max_examples=15)
@given(st.data())
def test_what_the_schema_generates_the_models_accept(data: st.DataObject) -> None:
    """A table made from nothing but its schema is accepted by both in a good job."""
    schema = the_schema()
    name = data.draw(st.sampled_from([each for each in schema["properties"] if each != "extends"]))
    wanted = schema["else"]["properties"].get(name, {})
    whole = next(job for job in good_jobs() if "extends" not in job and "matrix" not in job)
    if name == "script":  # which leaves no place for what says what is trained
        whole = {each: table for each, table in whole.items() if each not in OF_TRAINING}
    raw = whole | {name: data.draw(generated(schema["properties"][name], wanted))}
    assert schema_accepts(raw)
    assert models_accept(raw) or is_beyond(raw)


@cache
def the_schema() -> dict[str, Any]:
    """Return the schema; not to be changed."""
    return job_schema()


@cache
def good_jobs() -> list[dict[str, Any]]:
    """Return the good files' keys."""
    return [tomli.loads(path.read_text("utf-8")) for path in GOOD]


def _pattern(validator: Any, pattern: str, instance: Any, schema: Any) -> Iterator[ValidationError]:
    """In Python `$` also matches before a newline at the end; in JSON Schema's regular expressions it does not."""
    if isinstance(instance, str) and not re.search(_to_the_end(pattern), instance):
        yield ValidationError(f"{instance!r} does not match")


def _names(validator: Any, patterns: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
    """The same for keys; all of ours that have a pattern are in closed tables."""
    [(pattern, inner)] = patterns.items()
    for name, value in instance.items() if isinstance(instance, dict) else ():
        if re.search(_to_the_end(pattern), name):
            yield from validator.descend(value, inner)
        else:
            yield ValidationError(f"{name!r} does not match")


def _to_the_end(pattern: str) -> str:
    assert pattern.startswith("^")
    assert pattern.endswith("$")
    return f"{pattern[:-1]}\\Z"


def _is_integer(checker: Any, instance: Any) -> bool:
    """As editors for TOML have it, which know that 5.0 is none."""
    return isinstance(instance, int) and not isinstance(instance, bool)


_Toml = validators.extend(
    Draft202012Validator,
    {"pattern": _pattern, "patternProperties": _names},
    type_checker=Draft202012Validator.TYPE_CHECKER.redefine("integer", _is_integer),
)


@cache
def _validator() -> Any:
    return _Toml(the_schema())


def schema_accepts(raw: dict[str, Any]) -> bool:
    """Return whether the schema accepts a file's keys."""
    return bool(_validator().is_valid(raw))


def models_accept(raw: dict[str, Any]) -> bool:
    """Return whether the models accept a file's keys; what other files or its cases may give need not be there."""
    raw = dict(raw)
    if "extends" not in raw and "matrix" not in raw:
        return not list(_errors(raw))
    bases = raw.pop("extends", [])
    bases = bases if isinstance(bases, list) else [bases]
    if not all(isinstance(base, str) and base for base in bases):
        return False
    for each in _errors(raw):
        if (
            each["loc"] == ()
        ):  # of the whole: a table is missing, or has no meaning beside [script], as merged with the others
            continue
        table = each["loc"][0]
        is_neither = "exactly one" in each["msg"] and not set(ONE_OF[table]) & set(raw[table])
        is_neither |= each["loc"] == ("evaluation",) and raw["evaluation"] == {}
        if each["type"] != "missing" and not is_neither:
            return False
    return True


def _errors(raw: dict[str, Any]) -> Iterator[Any]:
    try:
        Job.model_validate(raw)
    except ModelError as error:
        for each in error.errors(include_url=False):
            if each["loc"][:1] == ("evaluation",) and len(each["loc"]) > 1:  # as one set, and as several
                is_of_several = str(each["loc"][1]).startswith("dict[")
                if is_of_several is not (sets_beside_keys(raw["evaluation"]) is not None):
                    continue
            yield each


_BEYOND_WORDS = (
    "is no network interface",
    "greater than nodes.max",
    "a group of parameters needs",
    "of a group must not be empty",
    "has `every`, which is on_step's",
    "a claim's or a secret's, not both",
    "size is of an empty folder",
    'operator = "Equal"',
    "would stand in the manifest",
    "two volumes have the path",
    "the pods have a volume",
    "kubernetes.secrets both set",
    "[notify] needs url or command",
    "notify.url holds a secret",
    "both ask for GPUs",
    "slurm.extra:",
    "slurm.srun:",
    "slurm.output: Slurm makes no folder",
    "is no custom resource",
)


def is_beyond(raw: dict[str, Any]) -> bool:
    """Return whether the models refuse the job for nothing but what no schema can say."""
    found = list(_errors({key: raw[key] for key in raw if key != "extends"}))
    messages = [each["msg"] for each in found if each["type"] != "missing" or "extends" not in raw]
    # Tables inside these may leave to a file that is extended what they need; a text in their place is told besides.
    lacks = any(each["type"] == "missing" and len(each["loc"]) > 2 for each in found)
    if lacks and (raw.keys() & {"hooks", "env"} or any(collate_tables(raw))):
        return True
    return all(any(words in text for words in _BEYOND_WORDS) for text in messages)
