"""Job files put right: what has one answer is gone, and not one byte else is another."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import tomli
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from elasticflow.errors import FixError
from elasticflow.jobfile.diagnostics import codes
from elasticflow.jobfile.diagnostics.positions import spots_in
from elasticflow.jobfile.fixes import Fixed, FixedFile, fix
from elasticflow.jobfile.load import load_job
from elasticflow.jobfile.text.edits import in_file

if TYPE_CHECKING:
    from collections.abc import Mapping

    from elasticflow.jobfile.diagnostics.diagnostic import Diagnostic

GALLERY = Path(__file__).parent / "gallery"
GOOD = """\
# The shop's own job.
[job]
name = "shop"  # ours
seed = 7

[model]
entry = "shop:Net"
args = { width = 32 }   # wide enough
loss = "shop:weighted_loss"

[optimizer]
entry = "torch.optim:AdamW"
args = { lr = 1e-3 }
clip_grad_norm = 1.0

[dataset]
entry = "shop:Images"
args = { split = "train" }
global_batch_size = 64
num_workers = 0

[train]
epochs = 5
precision = "fp32"

[nodes]
min = 1
nproc_per_node = 2

[restarts]
budget = 3
hang_timeout = "10 min"

[snapshots]
every = ["100 steps", "1 epoch"]
keep.last = 3  # no more
"""


def check(file: Path, texts: Mapping[str, bytes]) -> list[Diagnostic]:
    """Return what is wrong with a file."""
    return load_job(file, (), texts=texts).diagnostics


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    """Return a project with the shop's module; its job file is yet to be written."""
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "shop").symlink_to(GALLERY / "shop")
    return tmp_path


def put_right(shop: Path, text: str | bytes) -> str:
    """Return the text of a job file after its fix, which the file holds then, and which changes no more."""
    file = shop / "job.toml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    for each in fix([file], check).files:
        each.write()
    assert () == fix([file], check).files, "another time changes nothing"
    return file.read_bytes().decode()


def test_good_file_stays_as_it_is(shop: Path) -> None:
    """The example that the other tests spoil is right."""
    file = shop / "job.toml"
    file.write_text(GOOD)
    assert [] == [each for each in check(file, {}) if each.severity == "error"]
    assert GOOD == put_right(shop, GOOD)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("epochs = 5", "epoch = 5"),
        ("epochs = 5", "Epochs = 5"),
        ("epochs = 5", 'epochs = "5"'),
        ("epochs = 5", "epochs = 5.0"),
        ("epochs = 5", "epochs: 5"),
        ("epochs = 5", "max_epochs = 5"),
        ('precision = "fp32"', 'precision = "float32"'),
        ('precision = "fp32"', "precision = 'FP32'"),
        ('precision = "fp32"', "precision = fp32"),
        ("precision", "precison"),
        ("[optimizer]", "[optimiser]"),
        ("clip_grad_norm", "max_grad_norm"),
        ("[snapshots]", "[checkpoint]"),
        ("keep.last", "keep.lsat"),
        ('entry = "shop:Net"', 'entry = "shop.Net"'),
        ('entry = "shop:Images"', 'entry = "shop:Imagse"'),
        (
            'entry = "shop:Net"',
            "entry = \N{LEFT DOUBLE QUOTATION MARK}shop:Net\N{RIGHT DOUBLE QUOTATION MARK}",
        ),
        ("width = 32", "widht = 32"),
        ('hang_timeout = "10 min"', 'hang_timeout = "10 mn"'),
        ('loss = "shop:weighted_loss"', 'criterion = "shop:weighted_loss"'),
    ],
)
@pytest.mark.parametrize("style", ["as it is", "windows"])
def test_one_answer_is_written_and_nothing_else_changes(
    shop: Path, right: str, wrong: str, style: str
) -> None:
    """The file is again what it was before somebody spoiled it, byte for byte."""
    good, bad = GOOD, GOOD.replace(right, wrong, 1)
    assert good != bad
    if style == "windows":
        good, bad = (f"\ufeff{text}".replace("\n", "\r\n") for text in (good, bad))
    assert good == put_right(shop, bad)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("global_batch_size = 64", "batch_size = 64"),  # of all workers, or of one?
        ("hang_timeout", "timeout_hang_limit"),
        ("epochs = 5", "epochs = -5"),
        ("epochs = 5", 'epochs = "five"'),
        ("min = 1", "mix = 1"),  # min or max?
        ('entry = "shop:Net"', 'entry = "shop:Nett"'),  # Net or Nets?
        ('name = "shop"', 'name = "my shop"'),  # my-shop, my_shop?
        ("keep.last = 3", "keep = 3"),
        ("lr = 1e-3", "lr = 1,500"),
        ("lr = 1e-3", "lr = 0,001"),
        ("lr = 1e-3", 'lr = "0,001"'),
        ('hang_timeout = "10 min"', 'hang_timeout = "0,5 min"'),
        ('precision = "fp32"', 'precision = "fp8"'),
    ],
)
def test_what_takes_a_decision_is_left_alone(shop: Path, right: str, wrong: str) -> None:
    """No value and no key is made up."""
    bad = GOOD.replace(right, wrong, 1)
    assert GOOD != bad
    assert bad == put_right(shop, bad)


def test_key_in_the_wrong_table_moves_with_its_comment(shop: Path) -> None:
    """Below the last line of its own table; a table that is not there is added at the end."""
    bad = GOOD.replace("seed = 7\n", "seed = 7\nbudget = 3  # enough\nlog_every = 10\n").replace(
        "budget = 3\n", "", 1
    )
    assert put_right(shop, bad) == (
        GOOD.replace("budget = 3\n", "").replace('"10 min"\n', '"10 min"\nbudget = 3  # enough\n')
        + '\n[logging]\nevery = "10 steps"\n'
    )


def test_key_that_is_given_already_is_not_given_again(shop: Path) -> None:
    """Which of the two counts is for its author to say."""
    bad = GOOD.replace("epochs = 5", "epochs = 5\nepoch = 6\nmax_epochs = 7")
    assert bad == put_right(shop, bad)


def test_rename_reaches_every_header_of_a_table(shop: Path) -> None:
    """A table and those below it are named in several places."""
    good = GOOD.replace("args = { lr = 1e-3 }\n", "").replace(
        "[dataset]", "[optimizer.args]\nlr = 1e-3\n\n[dataset]"
    )
    assert good == put_right(shop, good.replace("[optimizer", "[optimiser"))


def test_value_that_refers_to_others_is_left_alone(shop: Path) -> None:
    """What it comes to here is not what its author wrote."""
    bad = GOOD.replace('precision = "fp32"', 'precision = "${job.name}"').replace(
        'name = "shop"', 'name = "fp-32"'
    )
    assert bad == put_right(shop, bad)


def test_file_that_is_extended_changes_only_if_it_is_named(shop: Path) -> None:
    """Others may extend it, too; it is told how many answers it holds."""
    base, job = shop / "base.toml", shop / "job.toml"
    base.write_text(GOOD.replace("epochs", "epoch"))
    job.write_text('extends = "base.toml"\n[nodes]\nmaxx = 2\n')
    fixed = fix([job], check)
    assert [b'extends = "base.toml"\n[nodes]\nmax = 2\n'] == [each.after for each in fixed.files]
    assert {str(base): 1} == fixed.elsewhere
    both = fix([job, base], check)
    assert {job: 1, base: 1} == {each.path: 1 for each in both.files}
    assert GOOD.encode() == both.files[1].after
    assert {} == both.elsewhere
    assert GOOD.replace("epochs", "epoch") == base.read_text(), "nothing is written unasked"


def test_file_is_replaced_whole_with_its_permissions(shop: Path) -> None:
    """A link stays a link; what was changed meanwhile is not overwritten; what cannot be written is said."""
    real, link = shop / "real.toml", shop / "job.toml"
    real.write_text("old")
    real.chmod(0o664)
    link.symlink_to(real)
    file = FixedFile(link, b"old", b"new")
    file.write()
    assert (b"new", 0o664, True) == (real.read_bytes(), real.stat().st_mode & 0o777, link.is_symlink())
    with pytest.raises(FixError, match="changed meanwhile"):
        file.write()
    with pytest.raises(FixError, match="cannot write"):
        FixedFile(shop / "none" / "job.toml", b"", b"").write()


def test_difference_shows_no_secret() -> None:
    """It goes to terminals and logs."""
    before = b'[env]\nAPI_TOKEN = "abcdef"\nepoch = 1\n'
    lines = FixedFile(Path("x.toml"), before, before.replace(b"epoch", b"epochs")).diff()
    assert {"-epoch = 1", "+epochs = 1"} <= set(lines)
    assert "abcdef" not in "".join(lines)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a project for all examples of a property."""
    root = tmp_path_factory.mktemp("shop")
    (root / "pyproject.toml").touch()
    (root / "shop").symlink_to(GALLERY / "shop")
    return root


@settings(max_examples=int(os.environ.get("ANY_INPUT_EXAMPLES", "12")) * 4)
@given(data=st.data())
def test_misspelt_key_is_put_right_or_left_alone(data: st.DataObject, project: Path) -> None:
    """After the fix the file parses, all but the key is the same byte for byte, and the finding is gone."""
    spots = [
        (path, spot.key) for path, spot in spots_in(GOOD).items() if spot.key is not None and len(path) > 1
    ]
    path, span = data.draw(st.sampled_from(spots))
    name, at = str(path[-1]), data.draw(st.integers(0, len(str(path[-1])) - 1))
    letter = data.draw(st.sampled_from("aeinrst_"))
    wrong = data.draw(
        st.sampled_from(
            [
                name[:at] + name[at + 1 :],
                name[:at] + letter + name[at:],
                name[:at] + letter + name[at + 1 :],
                name[:at] + name[at : at + 2][::-1] + name[at + 2 :],
            ]
        )
    )
    assume(wrong not in {"", name})
    text = f"{GOOD[: span.start]}{wrong}{GOOD[span.end :]}"
    if data.draw(st.booleans()):
        text = f"\ufeff{text}".replace("\n", "\r\n")
    file = project / "misspelt.toml"
    file.write_bytes(text.encode())
    before, fixed = check(file, {}), fix([file], check)
    if not fixed.files:
        return
    after = fixed.files[0].after.decode()
    start = text.index(wrong, 0) if text.count(wrong) == 1 else None
    tomli.loads(after.removeprefix("\ufeff"))
    assert len(text.split("\n")) == len(after.split("\n"))
    changed = [(a, b) for a, b in zip(text.split("\n"), after.split("\n"), strict=True) if a != b]
    assert len(changed) == 1
    assert start is None or changed[0][0].count(wrong) == 1
    old, new = changed[0]
    assert old.replace(wrong, "", 1) in {new.replace(name, "", 1) for name in _names_in(new)}
    left = [each.message for each in fix_left(file, fixed)]
    gone = [each for each in before if each.message not in left]
    assert {codes.UNKNOWN_KEY, codes.BAD_ARGUMENT} & {each.code for each in gone}


def _names_in(line: str) -> list[str]:
    return re.findall(r"\w+", line)


def fix_left(file: Path, fixed: Fixed) -> list[Diagnostic]:
    """Return what is wrong with a file once it is put right."""
    return check(file, fixed.texts)


@given(
    text=st.text(
        st.sampled_from('ab#\n"= \N{LATIN SMALL LETTER O WITH DIAERESIS}\N{GRINNING FACE}'), max_size=30
    ),
    cut=st.tuples(st.integers(0, 30), st.integers(0, 5)),
    windows=st.booleans(),
)
def test_edits_are_of_the_text_and_land_in_the_bytes(
    text: str, cut: tuple[int, int], *, windows: bool
) -> None:
    """A byte order mark, line ends of two bytes and letters of four do not move them."""
    from elasticflow.jobfile.diagnostics.positions import Edit

    start = min(cut[0], len(text))
    end = min(start + cut[1], len(text))
    data = text.replace("\n", "\r\n") if windows else text
    expected = f"{text[:start]}new\n{text[end:]}"
    if windows and "\n" in text:
        expected = expected.replace("\n", "\r\n")
    found = in_file(f"\ufeff{data}".encode(), [Edit(start, end, "new\n")])
    assert f"\ufeff{expected}".encode() == found


def test_a_strategy_of_steps_does_not_become_an_epoch(shop: Path) -> None:
    """The interval that the file gives is taken; the strategy, which has no key here, is left to its author."""
    right = put_right(
        shop, GOOD.replace("epochs = 5", 'epochs = 5\neval_strategy = "steps"\neval_steps = 50')
    )
    assert 'eval_strategy = "steps"' in right
    assert 'every = "50 steps"' in right
