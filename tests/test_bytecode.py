from __future__ import annotations

from typing import TYPE_CHECKING

from _pytest.assertion import rewrite

from tests.bytecode import write_from_the_end

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_only_what_another_process_has_not_written_is_written(
    tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    """From the last module on, as pytest itself writes it: it reads what it finds, and its assertions are rewritten."""
    modules = [tmp_path / f"test_{letter}.py" for letter in "abcd"]
    for module in modules[:2]:
        module.write_text("def test() -> None:\n    assert [1] == [2]\n")
    assert modules[1::-1] == write_from_the_end(tmp_path, pytestconfig)
    for module in modules[2:]:
        module.write_text("")
    assert modules[:1:-1] == write_from_the_end(tmp_path, pytestconfig)

    [folder] = {rewrite.get_cache_dir(module) for module in modules}
    assert {module.stem + rewrite.PYC_TAIL for module in modules} == {path.name for path in folder.iterdir()}
    code = rewrite._read_pyc(modules[0], folder / (modules[0].stem + rewrite.PYC_TAIL))
    assert code is not None
    assert "@pytest_ar" in code.co_names
