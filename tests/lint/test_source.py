"""The text of a training script, and files that are none."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from elasticflow.errors import ScriptError
from elasticflow.lint.check import read

if TYPE_CHECKING:
    from pathlib import Path


def test_newlines_and_a_byte_order_mark_are_read(tmp_path: Path) -> None:
    """As Python reads them."""
    path = tmp_path / "train.py"
    path.write_bytes(b"\xef\xbb\xbfimport torch\r\nx = 1\r\n")
    assert read(path, "train.py").text == "import torch\nx = 1\n"


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("none.py", None, "none.py cannot be read: No such file"),
        ("train.ipynb", b"{}", "is a notebook"),
        ("train.py", b"import torch\nx = (\n", "train.py:2: no Python"),
        ("train.py", b"print(1)\n", "shows no training"),
        ("train.py", b"import torch\n\n# \xff\n", "train.py:3: this is no UTF-8"),
        (".", None, ". is a folder"),
    ],
)
def test_what_is_no_script(tmp_path: Path, name: str, content: bytes | None, said: str) -> None:
    """The place, the reason and a remedy."""
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ScriptError, match=said) as caught:
        read(tmp_path / name, name)
    assert caught.value.remedy
