"""A report in a real browser: ours is the only script that runs, nothing is fetched, it fits a phone."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

from elasticflow.report.facts import facts_of
from elasticflow.report.page import render_run
from elasticflow.run_folder import RunFolder
from tests.observe.hand_made import event, make_run, story_of_a_kill

if TYPE_CHECKING:
    from pathlib import Path

LIMIT_S = 120
CHROMIUM = shutil.which("chromium")
HOSTILE = "</script><script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">"
# Says what the browser made of the page, where only the page's own text can be read: in its title.
ASKED = """
document.title = JSON.stringify({
  ready: document.documentElement.dataset.ready,
  paths: [...document.querySelectorAll("path.line")].filter((p) => p.getTotalLength() > 1).length,
  fetched: performance.getEntriesByType("resource").length,
  wide: document.documentElement.scrollWidth - document.documentElement.clientWidth,
  tip: (() => {
    const area = document.querySelector(".area"), box = area.getBoundingClientRect();
    const at = {clientX: box.left + box.width / 2, clientY: box.top + box.height / 2, bubbles: true};
    area.dispatchEvent(new PointerEvent("pointermove", at));
    return document.getElementById("tip").textContent;
  })(),
});
"""

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed: apt-get install chromium"),
]


def opened(page: Path, folder: Path, width: int) -> str:
    """Return the document as the browser has it once the page stands still."""
    command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}"]
    command += [f"--window-size={width},900", "--virtual-time-budget=3000", "--dump-dom", f"file://{page}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=True)
    return done.stdout


@pytest.fixture
def page(tmp_path: Path) -> Path:
    """Return the report of a run whose texts are hostile."""
    run = RunFolder(make_run(tmp_path))
    lines = story_of_a_kill()
    hostile = event(7, "worker.failed", 2, rank=1, node=HOSTILE, error=HOSTILE, traceback=HOSTILE)
    ended = event(7, "generation.ended", 2, class_="crash", reason=HOSTILE)
    run.events.write_text("".join(json.dumps(r) + "\n" for r in [*lines, hostile, ended] if "event" in r))
    steps = sorted((r for r in lines if "event" not in r), key=lambda r: r["step"])
    run.metrics.write_text("".join(json.dumps({**r, HOSTILE: 1.0}) + "\n" for r in steps))
    path = run.path / "report.html"
    path.write_text(render_run(facts_of(run, path)))
    return path


def test_no_script_but_ours_runs(page: Path, tmp_path: Path) -> None:
    """The policy forbids others, and there are none: the title is that of the run."""
    document = opened(page, tmp_path / "profile", 1200)
    assert 'data-ready="yes"' in document
    assert re.findall(r"<title>([^<]*)", document)[0].startswith("mnist ")


@pytest.mark.parametrize("width", [1200, 500])
def test_the_page_works(page: Path, tmp_path: Path, width: int) -> None:
    """Curves have length, a pointer gets its value, nothing was fetched, and nothing is wider than the screen."""
    text = page.read_text()
    head, script, tail = text.rpartition("</script>")
    asking = f"<script>{ASKED}</script>"
    # The same page without the policy, which would forbid the question.
    asked = page.with_name("asked.html")
    asked.write_text(re.sub(r"<meta http-equiv[^>]*>", "", head) + script + asking + tail)
    document = opened(asked, tmp_path / "profile", width)
    found = json.loads(re.findall(r"<title>([^<]*)", document)[0].replace("&amp;", "&"))
    assert found["ready"] == "yes"
    assert found["paths"] >= 4
    assert found["fetched"] == 0
    assert found["wide"] <= 0
    assert re.fullmatch(r"step \d+: [\d.e-]+ \(generation \d\)", found["tip"])
