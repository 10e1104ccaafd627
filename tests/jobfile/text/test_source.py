"""Files, what they extend, and flags become one dict that knows where each key stands."""

from __future__ import annotations

import json
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import pytest
import tomli
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticflow.jobfile.diagnostics.render_text import render
from elasticflow.jobfile.text.layers import Layer, merge
from elasticflow.jobfile.text.source import Source, load_source

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty folder that is also the current one."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(folder: Path, **files: str) -> None:
    """Write TOML files by name."""
    for name, text in files.items():
        (folder / f"{name}.toml").write_text(text, "utf-8")


def where(source: Source, *path: str | int) -> str:
    """Return the layer and the text at a path."""
    layer, span = source.find(path)
    return f"{layer.name}: {layer.text[slice(*span)]}"


def test_tables_merge_and_the_own_file_wins(folder: Path) -> None:
    """Keys of a base stay unless the file says otherwise; lists are replaced whole."""
    write(
        folder,
        base="[a]\nx = 1\ny = [1, 2]\n[a.args]\np = 1\n[b]\nz = 1\n",
        job='extends = "base.toml"\n[a]\ny = [3]\nargs = { q = 2 }\n',
    )
    source = load_source(folder / "job.toml")
    assert source.raw == {"a": {"x": 1, "y": [3], "args": {"p": 1, "q": 2}}, "b": {"z": 1}}
    assert (folder / "job.toml", folder / "base.toml") == source.files


def test_later_bases_win_over_earlier_ones(folder: Path) -> None:
    """With several bases the order of the list decides."""
    write(folder, one="a = 1\nb = 1\n", two="b = 2\n", job='extends = ["one.toml", "two.toml"]\n')
    assert load_source(folder / "job.toml").raw == {"a": 1, "b": 2}


def test_a_base_is_relative_to_the_file_that_names_it(folder: Path) -> None:
    """A base in another folder finds its own base beside itself."""
    (folder / "shared").mkdir()
    write(folder / "shared", low="a = 1\n", base='extends = "low.toml"\nb = 2\n')
    write(folder, job='extends = "shared/base.toml"\n')
    assert load_source(folder / "job.toml").raw == {"a": 1, "b": 2}


def test_every_key_is_traced_to_the_file_or_flag_it_came_from(folder: Path) -> None:
    """A place is looked up in the layer that had the last word."""
    write(
        folder, base="[a]\nx = 10\ny = 20\n", job='extends = "base.toml"\n[a]\ny = 30\nz = [1, { w = 40 }]\n'
    )
    source = load_source(folder / "job.toml", ["a.v=50"])
    assert where(source, "a", "x").endswith("base.toml: 10")
    assert where(source, "a", "y").endswith("job.toml: 30")
    assert where(source, "a", "z", 1, "w").endswith("job.toml: 40")
    assert where(source, "a", "v") == "--set: 50"
    assert where(source, "a", "missing").endswith("job.toml: a")


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("a.x=3", 3),
        ("a.x = 3e-3", 3e-3),
        ("a.x=true", True),
        ("a.x=mnist", "mnist"),
        ("a.x=s3://bucket/a=b", "s3://bucket/a=b"),
        ('a.x="3"', "3"),
        ('a.x=["20 steps", "1 epoch"]', ["20 steps", "1 epoch"]),
        ("a.x={ p = 1 }", {"p": 1}),
        ("a.x=1979", 1979),
        ("a.x=10 min", "10 min"),
        ('"a".x=1', 1),
    ],
)
def test_flag_values_are_toml_and_bare_words_are_texts(folder: Path, flag: str, value: object) -> None:
    """`--set` takes what a file would have, and a word without quotes."""
    write(folder, job="[a]\n")
    source = load_source(folder / "job.toml", [flag])
    assert not source.problems
    assert value == source.raw["a"]["x"]


def test_an_empty_flag_leaves_the_key_out(folder: Path) -> None:
    """`--set train.epochs=` removes what a file gave."""
    write(folder, job="[train]\nepochs = 5\n[other]\n")
    assert load_source(folder / "job.toml", ["train.epochs=", "no.such="]).raw == {"train": {}, "other": {}}


@pytest.mark.parametrize(
    ("flag", "expected"),
    [
        (
            "epochs",
            (
                "error[EF004]: not of the form key=value\n"
                " --> --set:1:1\n"
                "  |\n"
                "1 | epochs\n"
                "  | ^^^^^^\n"
                "  = help: write --set key=value, for example --set train.epochs=3"
            ),
        ),
        (
            "dataset.args={split=",
            (
                "error[EF004]: the value is not valid TOML\n"
                " --> --set:1:14\n"
                "  |\n"
                "1 | dataset.args={split=\n"
                "  |              ^^^^^^^\n"
                "  = help: quote it for your shell, for example --set 'dataset.args={ split = \"train\" }'"
            ),
        ),
    ],
)
def test_a_bad_flag_is_explained(folder: Path, flag: str, expected: str) -> None:
    """The message shows the flag and how to write it."""
    write(folder, job="")
    assert expected == render(load_source(folder / "job.toml", [flag]).problems)


def test_a_missing_file_is_told_with_the_nearest_name(folder: Path) -> None:
    """A mistyped name gets a suggestion from the same folder, or from jobs/."""
    write(folder, mnist="")
    from pathlib import Path

    (folder / "jobs").mkdir()
    (folder / "jobs" / "gpt.toml").touch()
    assert render(load_source(Path("gpt.toml")).problems).endswith('did you mean "jobs/gpt.toml"?')

    expected = 'error[EF001]: no such file: mnits.toml\n--> mnits.toml\n = help: did you mean "mnist.toml"?'
    assert expected == render(load_source(Path("mnits.toml")).problems)
    expected = (
        "error[EF001]: . is a folder, not a job file\n--> .\n = help: name the job files in it: ./*.toml"
    )
    assert expected == render(load_source(Path()).problems)

    Path("link.toml").symlink_to("gone.toml")
    expected = "error[EF001]: link.toml is a link to gone.toml, which does not exist\n--> link.toml"
    assert expected == render(load_source(Path("link.toml")).problems)


def test_files_read_but_not_usable_do_not_hide_the_others(folder: Path) -> None:
    """A base with a syntax error is one problem; the keys of the other files are still there."""
    write(folder, bad="x = \n", good="a = 1\n", job='extends = ["bad.toml", "good.toml"]\nb = 2\n')
    source = load_source(folder / "job.toml")
    assert source.raw == {"a": 1, "b": 2}
    assert [each.code for each in source.problems] == ["EF003"]


def test_flags_take_effect_in_their_order(folder: Path) -> None:
    """A table is replaced, not merged, when it is taken out first; the files' own keys stay as they are."""
    write(folder, job="[optimizer]\nargs = { lr = 1, betas = [0, 1] }\n")
    flags = ["optimizer.args=", "optimizer.args.lr=2"]
    assert {"optimizer": {"args": {"lr": 2}}} == load_source(folder / "job.toml", flags).raw
    source = load_source(folder / "job.toml", ["optimizer.args={ lr = 2 }", "optimizer.args.betas="])
    assert {"optimizer": {"args": {"lr": 2}}} == source.raw
    assert isinstance(source.layers[0], Layer)
    assert {"optimizer": {"args": {"lr": 1, "betas": [0, 1]}}} == source.layers[0].raw


def test_a_base_of_two_bases_counts_once_and_below_both(folder: Path) -> None:
    """What the first of them changes is not undone by the second, which does not speak of it."""
    write(
        folder,
        low="a = 0\nb = 0\nc = 0\n",
        one='extends = "low.toml"\na = 1\n',
        two='extends = "low.toml"\nb = 2\n',
        job='extends = ["one.toml", "two.toml"]\nc = 3\n',
    )
    source = load_source(folder / "job.toml")
    assert {"a": 1, "b": 2, "c": 3} == source.raw
    assert ["low.toml", "one.toml", "two.toml", "job.toml"] == [
        layer_name(source, number) for number in range(4)
    ]


def layer_name(source: Source, number: int) -> str:
    """Return the file name of a layer."""
    layer = source.layers[number]
    assert isinstance(layer, Layer)
    return layer.name.rpartition("/")[2]


def test_a_wrong_base_of_two_bases_is_told_once(folder: Path) -> None:
    """Its place is in its own file."""
    write(folder, low="a = \n", one='extends = "low.toml"\n', two='extends = "low.toml"\n')
    write(folder, job='extends = ["one.toml", "two.toml"]\n')
    (problem,) = load_source(folder / "job.toml").problems
    assert (str(folder / "low.toml"), 1) == (problem.file, problem.line)


def test_arrays_of_tables_are_replaced_whole(folder: Path) -> None:
    """As any list; their places are those of the file that won."""
    write(
        folder,
        base="[[a.b]]\nx = 1\n[[a.b]]\nx = 2\n",
        job='extends = "base.toml"\n[[a.b]]\nx = 3\n',
    )
    source = load_source(folder / "job.toml")
    assert {"a": {"b": [{"x": 3}]}} == source.raw
    assert where(source, "a", "b", 0, "x").endswith("job.toml: 3")


@pytest.mark.parametrize("name", ["x" * 5000, "loop.toml", "folder", "a\\u0000b"])
def test_what_cannot_be_a_base_is_a_problem_and_no_traceback(folder: Path, name: str) -> None:
    """Names too long for a file system, links to themselves, folders."""
    (folder / "loop.toml").symlink_to("loop.toml")
    (folder / "folder").mkdir()
    write(folder, job=f'extends = "{name}"\n')
    (problem,) = load_source(folder / "job.toml").problems
    assert problem.code == "EF005"


LEAVES = st.one_of(
    st.integers(-9, 9), st.booleans(), st.text("xyz ", max_size=3), st.lists(st.integers(0, 3), max_size=2)
)
FILES = st.dictionaries(st.sampled_from(["a.b", "a.c", "d.e.f", "d.g"]), LEAVES, max_size=4)


def nested(keys: dict[str, Any]) -> dict[str, Any]:
    """Return dotted keys as tables."""
    return tomli.loads("".join(f"{key} = {json.dumps(value)}\n" for key, value in keys.items()))


@given(FILES, FILES, FILES)
def test_it_does_not_matter_where_a_chain_of_bases_is_cut(
    low: dict[str, Any], middle: dict[str, Any], high: dict[str, Any]
) -> None:
    """Merging is associative where a key is a table in all files or in none, and what is merged stays as it was."""
    files = [nested(each) for each in (low, middle, high)]
    before = deepcopy(files)
    assert merge(merge(files[0], files[1]), files[2]) == merge(files[0], merge(files[1], files[2]))
    assert before == files
    assert files[0] == merge(files[0], {}) == merge({}, files[0])


@settings(max_examples=25)
@given(FILES, FILES, FILES)
def test_every_leaf_stands_where_it_is_said_to(
    folder: Path, base: dict[str, Any], own: dict[str, Any], flags: dict[str, Any]
) -> None:
    """The text at the place of each key reads as its value, from whichever file or flag it came."""
    texts = ["".join(f"{key} = {json.dumps(value)}\n" for key, value in each.items()) for each in (base, own)]
    write(folder, base=texts[0], job=f'extends = "base.toml"\n{texts[1]}')
    source = load_source(folder / "job.toml", [f"{key}={json.dumps(value)}" for key, value in flags.items()])
    assert not source.problems
    for key, value in {**base, **own, **flags}.items():
        layer, span = source.find(tuple(key.split(".")))
        assert {"v": value} == tomli.loads(f"v = {layer.text[slice(*span)]}")


def test_ipv6_endpoint_needs_no_quotes(folder: Path) -> None:
    """It begins like a list of TOML, and is none."""
    write(folder, job="")
    source = load_source(folder / "job.toml", ["nodes.endpoint=[fd00::1]:29400"])
    assert not source.problems
    assert source.raw == {"nodes": {"endpoint": "[fd00::1]:29400"}}


@pytest.mark.parametrize(("name", "is_shown"), [("passwd", False), ("base.toml", True)])
def test_line_of_a_file_that_is_no_job_file_is_not_shown(folder: Path, name: str, *, is_shown: bool) -> None:
    """`extends` can name any file of the machine, and what is said goes into logs of others."""
    (folder / name).write_text("root:x:0:0:root:/root:/bin/bash\n", "utf-8")
    write(folder, job=f'extends = "{name}"\n')
    text = render(load_source(folder / "job.toml").problems)
    assert f"{name}:1:5" in text
    assert ("/bin/bash" in text) is is_shown
