"""From a file to diagnostics: places, encodings, suppressions; what does not matter changes nothing."""

from __future__ import annotations

import ast
import cProfile
import itertools
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticflow.jobfile.diagnostics.codes import explanation_of, titles
from elasticflow.lint.check import Selection, lint_file, lint_source
from elasticflow.python_source.script import Names
from tests.lint.scripts import codes, found

if TYPE_CHECKING:
    from pathlib import Path

EXAMPLES = [
    text
    for code in titles()
    if code > "EF600" and (each := explanation_of(code)) is not None
    for text in (each.bad, each.good)
]
NAMES = st.from_regex(r"q[bcfhjk]{2,6}", fullmatch=True)


class _Renamed(ast.NodeTransformer):
    """Gives every import another alias."""

    def __init__(self, names: list[str]) -> None:
        self._names = iter(names)
        self.aliases: dict[str, str] = {}

    def visit_alias(self, node: ast.alias) -> ast.alias:
        if node.name == "annotations":
            return node
        name = next(self._names)
        self.aliases[node.asname or node.name.partition(".")[0]] = name
        return ast.alias(node.name, name)

    def visit_Name(self, node: ast.Name) -> ast.Name:
        return ast.Name(self.aliases.get(node.id, node.id), node.ctx)


def marked(text: str) -> list[tuple[str, str]]:
    """Return code and marked line, without its indentation, of each finding."""
    lines = text.split("\n")
    findings = lint_source(text.encode(), "train.py")
    return sorted((each.code, lines[(each.line or 1) - 1].strip()) for each in findings)


@settings(max_examples=60, deadline=None)
@given(text=st.sampled_from(EXAMPLES), names=st.lists(NAMES, min_size=9, max_size=9, unique=True))
def test_aliases_of_imports_do_not_matter(text: str, names: list[str]) -> None:
    """Whatever names a script gives to what it imports, the findings are the same."""
    tree = ast.parse(text)
    renamed = ast.unparse(ast.fix_missing_locations(_Renamed(names).visit(tree)))
    expected = [code for code, _ in marked(ast.unparse(ast.parse(text)))]
    assert expected == [code for code, _ in marked(renamed)]


@settings(max_examples=60, deadline=None)
@given(
    text=st.sampled_from(EXAMPLES),
    indent=st.sampled_from(["\t", " ", "  ", "        "]),
    noise=st.lists(
        st.sampled_from(["", "", "# dist.barrier() if rank == 0", "# é 漢字"]), min_size=1, max_size=9
    ),
    newline=st.sampled_from(["\n", "\r\n"]),
)
def test_layout_and_comments_do_not_matter(text: str, indent: str, noise: list[str], newline: str) -> None:
    """Tabs or blanks, comments and empty lines between any two lines: the same lines are marked."""
    lines = []
    for line, remark in zip(text.split("\n"), itertools.cycle(noise)):
        bare = line.lstrip(" ")
        depth = (len(line) - len(bare)) // 4
        lines += [indent * depth + bare, *([indent * depth + remark] if remark else [])]
    changed = newline.join(lines)
    assert marked(text) == marked(changed.replace("\r\n", "\n"))
    assert [code for code, _ in marked(text)] == sorted(
        each.code for each in lint_source(changed.encode(), "x.py")
    )


def test_columns_are_code_points() -> None:
    """After letters beyond ASCII and tabs, in lines of any file."""
    text = "import torch.distributed as dist\nif dist.get_rank() == 0:\n\tx = 'é漢𝄞'; dist.barrier()\n"
    [each] = lint_source(text.encode(), "train.py")
    line = text.split("\n")[2]
    assert (each.line, each.end_line) == (3, 3)
    assert line[(each.column or 0) - 1 : (each.end_column or 0) - 1] == "dist.barrier()"
    assert each.excerpt == line


@pytest.mark.parametrize(
    "content",
    [
        b"\xef\xbb\xbfimport torch.distributed as d\nif d.get_rank() == 0: d.barrier()\n",
        b"# -*- coding: latin-1 -*-\nimport torch.distributed as d\nx = '\xe9'\nif d.get_rank() == 0: d.barrier()\n",
        b"import torch.distributed as d\r\nif d.get_rank() == 0:\r\n    d.barrier()\r\n",
        b"import torch.distributed as d\n\x0c\nif d.get_rank() == 0: d.barrier()  # \xe2\x80\xa8 x\n",
    ],
)
def test_encodings(content: bytes) -> None:
    """A byte order mark, a declared encoding, other newlines, form feeds."""
    assert ["EF631"] == [each.code for each in lint_source(content, "train.py")]


@pytest.mark.parametrize(
    "content",
    [
        b"print 'x'\n",
        b"def f(:\n",
        b"\xff\xfe\x00",
        b"x = '\xe9'\n",
        b"\x00",
        b"(" * 9999,
        b"# coding: none\n",
    ],
)
def test_what_is_not_python_is_told(content: bytes) -> None:
    """As one error, whatever is wrong with it."""
    assert [("EF600", "error")] == [(each.code, each.severity) for each in lint_source(content, "train.py")]


@pytest.mark.parametrize(
    "text",
    [
        f"assert dist.get_world_size() % 2 == 0 and {'+'.join(['a'] * 990)}\n",
        f"if {'+'.join(['a'] * 990)}:\n    loss.backward()\nif dist.get_rank() == 0: dist.barrier()\n",
        f"if x == 0: pass\n{''.join(f'elif x == {n}: pass{chr(10)}' for n in range(2000))}",
    ],
)
def test_what_is_nested_too_deeply_is_told(text: str) -> None:
    """A long sum and a long chain of elif are read, or refused by name; other files of a folder are still read."""
    found = lint_source(f"import torch.distributed as dist\n{text}".encode(), "train.py")
    assert [each.code for each in found] in (["EF600"], ["EF604"], ["EF631"])


def test_the_line_of_a_syntax_error_shows_no_secret() -> None:
    """As the lines of other findings."""
    [each] = lint_source(b"API_KEY = 'hunter22hunter22\n", "train.py")
    assert each.excerpt is not None
    assert "hunter" not in each.excerpt


def test_a_file_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    """By name, as an error."""
    [each] = lint_file(tmp_path / "none.py", "none.py")
    assert (each.code, each.where) == ("EF600", "none.py")


BARRIER = "if dist.get_rank() == 0:\n    dist.barrier(){}\n"


@pytest.mark.parametrize(
    ("comment", "expected"),
    [
        ("  # noqa", []),
        ("  # NOQA", []),
        ("  # noqa: EF631", []),
        ("  # noqa:EF601,EF631", []),
        ("  # noqa: EF601, EF631  # meant", []),
        ("  # noqa: EF631 rank 0 is alone here", []),
        ("  # noqa: EF601", ["EF631"]),
        ("  # noqa: F401", ["EF631"]),
        ("  # noqa:", ["EF631"]),
        ("; x = '# noqa'", ["EF631"]),
        ("\n    # noqa: EF631", ["EF631"]),
        ("\n# elasticflow: noqa: EF631", []),
        ("\n# elasticflow: noqa", []),
        ("\n# elasticflow: noqa: EF601", ["EF631"]),
        ("\n# ruff: noqa", ["EF631"]),
    ],
)
def test_comments_take_findings_away(comment: str, expected: list[str]) -> None:
    """On their line or in the whole file, with or without codes; not in texts."""
    assert codes(BARRIER.format(comment)) == expected


def test_a_comment_on_the_last_line_of_a_call_counts() -> None:
    """Formatters put it there."""
    assert codes("if dist.get_rank() == 0:\n    dist.all_reduce(\n        x\n    )  # noqa: EF631\n") == []


@pytest.mark.parametrize(
    ("select", "ignore", "wanted"),
    [
        ((), (), {"EF601", "EF631"}),
        (("EF63",), (), {"EF631"}),
        (("EF6",), ("EF601",), {"EF631"}),
        ((), ("EF6",), set()),
        (("EF631",), ("EF6",), {"EF631"}),
        (("EF631",), ("EF631",), set()),
    ],
)
def test_selection(select: tuple[str, ...], ignore: tuple[str, ...], wanted: set[str]) -> None:
    """The longer beginning of a code decides; of two alike, the one that leaves out."""
    assert wanted == {code for code in ("EF601", "EF631") if Selection(select, ignore).wants(code)}


def test_findings_of_one_script_stand_side_by_side() -> None:
    """Several rules on one file."""
    body = """
    os.environ["MASTER_PORT"] = "29500"
    if dist.get_rank() == 0:
        dist.barrier()
    """
    assert found(body) == [("EF621", 2), ("EF631", 4)]


@settings(max_examples=40, deadline=None)
@given(
    lines=st.lists(
        st.sampled_from(
            [
                "dist.barrier()",
                "if rank == 0:",
                "else:",
                "return",
                "while x:",
                "def f():",
                "f()",
                "rank = f()",
                "class A:",
                "self.f()",
                "torch.save(x.state_dict(), rank)",
                "x = x",
                "for x in x:",
                "with x as x:",
                "rank = is_main = rank",
            ]
        ),
        max_size=25,
    ),
    depths=st.lists(st.integers(0, 3), min_size=25, max_size=25),
)
def test_nothing_makes_it_fail(lines: list[str], depths: list[int]) -> None:
    """Names that are assigned to themselves, functions that call themselves, whatever parses."""
    text = "import torch\nimport torch.distributed as dist\n"
    depth = 0
    for line, wanted in zip(lines, depths, strict=False):
        depth = min(depth, wanted)
        text += "    " * depth + line + "\n"
        if line.endswith(":"):
            depth += 1
            text += "    " * depth + "pass\n"
    lint_source(text.encode(), "train.py")


def test_the_origin_of_an_expression_is_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many rules ask for it: a script of 20,000 lines takes a second."""
    looked_up: list[tuple[ast.AST, int]] = []
    look_up = Names.origin

    def origin(names: Names, node: ast.AST, hops: int = 0) -> str:
        looked_up.append((node, hops))
        return look_up(names, node, hops)

    monkeypatch.setattr(Names, "origin", origin)
    lint_source(EXAMPLES[0].encode(), "train.py")
    direct = [node for node, hops in looked_up if not hops]
    assert direct
    assert len(direct) == len(set(direct))


PART = """
def train_#(model, path):
    state = {"model": model.state_dict()}
    state["epoch"] = #
    for part in range(9):
        model(part).backward()
        torch.save(state, f"{path}-#")
    found = torch.load(path)
    model.load_state_dict(found["model"])
"""


def test_the_work_grows_with_the_script() -> None:
    """Twice the script takes about twice the work, also where every function saves and loads. Calls are counted, not seconds."""

    def calls(parts: int) -> int:
        text = "import torch\n" + "".join(PART.replace("#", str(number)) for number in range(parts))
        profile = cProfile.Profile()
        profile.runcall(lint_source, text.encode(), "train.py")
        return sum(each.callcount for each in profile.getstats())

    assert calls(80) < 2.5 * calls(40)
