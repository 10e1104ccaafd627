"""Editors' own tools over the schema: tombi and taplo on the corpus, and a session with tombi's language server."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from elasticflow.jobfile.tables.json_schema import SCHEMA_FILE

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.nightly

CORPUS = Path(__file__).parents[1] / "jobfile" / "corpus"
TOOLS = Path(sys.executable).parent
MARK = re.compile(r"# line (\d+)(?:, (.*?))?: ")
CONFIGURATION = '[[schemas]]\npath = "job.schema.json"\ninclude = ["**/*.toml"]\n'


def tool(name: str) -> str:
    """Return the program of an editor's tool, which pip installs beside Python."""
    found = shutil.which(name, path=f"{TOOLS}{os.pathsep}{os.environ['PATH']}")
    if found is None:
        pytest.skip(f"{name} is not installed: pip install {name}")
    return found


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Return a folder with the corpus and the schema, which a configuration names for all files."""
    shutil.copytree(CORPUS, tmp_path, dirs_exist_ok=True)
    (tmp_path / "base.toml").unlink()  # no job by itself
    shutil.copy(SCHEMA_FILE, tmp_path)
    (tmp_path / "tombi.toml").write_text(CONFIGURATION)
    return tmp_path


def marks(folder: Path) -> dict[str, tuple[int, str]]:
    """Return the wrong line of each bad file, and who alone can know."""
    found = {path.name: MARK.match(path.read_text("utf-8")) for path in folder.glob("*.toml")}
    return {name: (int(mark[1]), mark[2] or "") for name, mark in found.items() if mark}


def test_tombi_refuses_each_bad_file_on_its_line_and_accepts_the_good_ones(project: Path) -> None:
    """One run over all files, offline: every complaint stands on the line that the file names."""
    report = project / "report.json"
    command = [tool("tombi"), "lint", "--offline", "--quiet", "--diagnostics-format", "json"]
    subprocess.run(
        [*command, "--diagnostics-file", report.name, "bad", "good"], cwd=project, timeout=60, check=False, capture_output=True
    )  # fmt: skip
    complaints: dict[str, set[int]] = {}
    for each in json.loads(report.read_text()):
        complaints.setdefault(each["path"], set()).add(each["range"]["start"]["line"])
    expected = {
        f"bad/{name}": {line}
        for name, (line, who) in marks(project / "bad").items()
        if who in {"", "not taplo"}
    }
    assert expected == complaints


def test_taplo_refuses_each_bad_file_and_accepts_the_good_ones(project: Path) -> None:
    """One run over all files, offline; taplo reads TOML 1.0 only, and takes dates for texts and 5.0 for 5."""
    files = sorted(str(path.relative_to(project)) for path in project.glob("*/*.toml"))
    done = subprocess.run(
        [tool("taplo"), "lint", "--no-auto-config", "--colors", "never", "--schema", SCHEMA_FILE.as_uri(), *files],
        cwd=project, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    refused = set(re.findall(r"┌─ .*?((?:bad|good)/\w+\.toml):", done.stderr))
    expected = {f"bad/{name}" for name, (_, who) in marks(project / "bad").items() if who == ""}
    assert {*expected, "bad/beyond_infinity.toml", "good/toml_1_1.toml"} == refused


class Editor:
    """A client of tombi's language server, as an editor is one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._server = subprocess.Popen(
            [tool("tombi"), "lsp", "--offline"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )  # fmt: skip
        self._number = 0
        root = {"uri": folder.as_uri(), "name": folder.name}
        markdown = {"completionItem": {"documentationFormat": ["markdown"]}}
        capabilities = {"textDocument": {"completion": markdown, "hover": {"contentFormat": ["markdown"]}}}
        start = {"processId": os.getpid(), "rootUri": folder.as_uri(), "workspaceFolders": [root]}
        self.ask("initialize", **start, capabilities=capabilities)
        self._send({"method": "initialized", "params": {}})

    def open(self, name: str, text: str) -> dict[str, Any]:
        """Show a text to the server, and return what further questions about it begin with."""
        (self.folder / name).write_text(text, "utf-8")
        uri = (self.folder / name).as_uri()
        document = {"uri": uri, "languageId": "toml", "version": 1, "text": text}
        self._send({"method": "textDocument/didOpen", "params": {"textDocument": document}})
        self.ask("textDocument/diagnostic", textDocument={"uri": uri})  # it has read the schema, then
        return {"textDocument": {"uri": uri}}

    def ask(self, method: str, **parameters: Any) -> Any:
        """Return the server's answer; what it asks meanwhile is answered with nothing."""
        self._number += 1
        self._send({"id": f"ours-{self._number}", "method": method, "params": parameters})
        while True:
            message = self._receive()
            if message.get("id") == f"ours-{self._number}":
                assert "error" not in message, message
                return message["result"]
            if "id" in message:
                self._send({"id": message["id"], "result": None})

    def close(self) -> None:
        """End the server."""
        self._server.kill()
        self._server.communicate()

    def _send(self, message: dict[str, Any]) -> None:
        body = json.dumps({"jsonrpc": "2.0", **message}).encode()
        assert self._server.stdin is not None
        self._server.stdin.write(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
        self._server.stdin.flush()

    def _receive(self) -> dict[str, Any]:
        assert self._server.stdout is not None
        size = 0
        while (line := self._server.stdout.readline()) != b"\r\n":
            assert line, "the server has ended"
            name, _, value = line.partition(b":")
            size = int(value) if name.lower() == b"content-length" else size
        message: dict[str, Any] = json.loads(self._server.stdout.read(size))
        return message


@pytest.fixture
def editor(tmp_path: Path) -> Iterator[Editor]:
    """Open an editor in a folder that holds the schema, which files name in their first line."""
    shutil.copy(SCHEMA_FILE, tmp_path)
    opened = Editor(tmp_path)
    yield opened
    opened.close()


def at(line: int, character: int) -> dict[str, dict[str, int]]:
    """Return a position as the protocol counts: both from 0."""
    return {"position": {"line": line, "character": character}}


def test_editor_completes_keys_and_values(editor: Editor) -> None:
    """A key of [train] and a choice of it are offered, with what they mean."""
    document = editor.open("a.toml", '#:schema job.schema.json\n[train]\nprec\n\n[logging]\nlevel = ""\n')
    [item] = editor.ask("textDocument/completion", **document, **at(2, 4))
    assert item["label"] == "precision"
    assert "bf16: autocast" in item["documentation"]["value"]
    values = editor.ask("textDocument/completion", **document, **at(5, 9))
    assert {'"debug"', '"info"', '"warning"', '"error"'} <= {each["label"] for each in values}


def test_editor_explains_tables_and_keys_where_the_pointer_rests(editor: Editor) -> None:
    """Hover texts say what a key is, its default and an example."""
    text = "#:schema job.schema.json\n[snapshots]\nkeep = { last = 5 }\n\n[train]\nepochs = 5\n"
    document = editor.open("b.toml", text)
    said = editor.ask("textDocument/hover", **document, **at(2, 10))["contents"]["value"]
    assert "Keep this many of the newest snapshots." in said
    assert "Default: `3`" in said
    said = editor.ask("textDocument/hover", **document, **at(5, 2))["contents"]["value"]
    assert "Passes over the dataset." in said
    assert "Examples:\n- `5`" in said
    said = editor.ask("textDocument/hover", **document, **at(4, 2))["contents"]["value"]
    assert "Length and manner of training." in said


def test_editor_underlines_the_wrong_value(editor: Editor) -> None:
    """The place of a complaint is that of the value."""
    text = '#:schema job.schema.json\nextends = "base.toml"\n\n[snapshots]\nkeep = { last = 0 }\n'
    document = editor.open("c.toml", text)
    [found] = editor.ask("textDocument/diagnostic", **document)["items"]
    assert {"start": {"line": 4, "character": 16}, "end": {"line": 4, "character": 17}} == found["range"]
