"""The page: what it says of a run, and that no text of a run is more than text in it."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from typing import TYPE_CHECKING, Any

import pytest

from elasticflow.report.facts import JobKey, facts_of, keys_of
from elasticflow.report.page import parts_of_bar, render_comparison, render_run
from elasticflow.run_folder import RunFolder
from tests.observe.hand_made import RUN_ID, event, make_run, step, story_of_a_kill

if TYPE_CHECKING:
    from pathlib import Path

HOSTILE = "</script><img src=x onerror=alert(1)>\"'&{{ 7*7 }}"


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """Return a run that lost a worker and finished, with what it wrote."""
    folder = RunFolder(make_run(tmp_path))
    lines = story_of_a_kill()
    folder.events.write_text("".join(json.dumps(r) + "\n" for r in lines if "event" in r))
    kept = {(r["step"], "eval" in r): r for r in lines if "event" not in r}
    folder.metrics.write_text("".join(json.dumps(kept[key]) + "\n" for key in sorted(kept)))
    folder.metrics_redone.write_text("".join(json.dumps(step(5 + n / 20, n)) + "\n" for n in range(41, 48)))
    folder.ledger.write_text(
        '{"time": 1795168805.0, "class": "crash", "step": 47, "generation": 1, "charged": true}\n'
    )
    return folder


class Tags(HTMLParser):
    """Collects what a browser would see: tags, their attributes, text outside of scripts and styles."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self._raw = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Take in a tag."""
        self.tags.append((tag, dict(attrs)))
        self._raw = tag if tag in {"script", "style"} else ""

    def handle_endtag(self, tag: str) -> None:
        """Take in its end."""
        self._raw = ""

    def handle_data(self, data: str) -> None:
        """Take in text."""
        if not self._raw and data.strip():
            self.texts.append(" ".join(data.split()))

    @property
    def text(self) -> str:
        """All of it."""
        return " ".join(self.texts)


def test_keys_of_a_case_are_not_at_their_defaults(run: RunFolder) -> None:
    """What [matrix] gives comes from its file: an axis, or the keys of a case with a name."""
    launch = run.launch(run.launch_numbers()[-1])
    text = "[matrix.axes]\njob.seed = [1, 2]\n[matrix.cases.wide]\nmodel.args.width = 64\n"
    (launch / "sources").mkdir(exist_ok=True)
    (launch / "sources" / "sweep.toml").write_text(text)
    job = {"job": {"seed": 1}, "model": {"args": {"width": 64}}}
    origins = []
    for case in ("seed1", "wide"):
        (launch / "job.json").write_text(json.dumps({"job": job, "files": ["sweep.toml"], "case": case}))
        origins.append([key.origin for key in keys_of(run)])
    assert [["sweep.toml", "default"], ["default", "sweep.toml"]] == origins


def page_of(run: RunFolder) -> Tags:
    """Return its report, parsed."""
    return Tags(render_run(facts_of(run, run.path / "report.html")))


def test_it_tells_the_story(run: RunFolder) -> None:
    """Result, failure, cost, curves, snapshots, budget."""
    page = page_of(run)
    assert f"{RUN_ID} interrupted" in page.text
    for words in (
        "rank 1: killed by SIGKILL",
        "7 steps done again",
        "training again after 0.27 s",
        "eval accuracy",
        "3 snapshots committed",
        "Restart budget: 1 failure in the ledger",
        f"elasticflow resume {RUN_ID}",
    ):
        assert words in page.text
    paths = [attributes for tag, attributes in page.tags if tag == "path"]
    assert sum("lost" in str(p["class"]) for p in paths) == 2  # of loss and learning rate


def test_hang_has_the_command_that_reads_the_dumps(run: RunFolder) -> None:
    """Those of NCCL's flight recorder; a failure without them has no such line."""
    assert "torchfrtrace" not in page_of(run).text
    lines = run.events.read_text().splitlines()
    at = next(number for number, line in enumerate(lines) if "worker.failed" in line)
    hang = {"event": "hang.detected", "generation": 1, "rank": 1, "dumps": ["/r/flight_recorder/rank_0"]}
    run.events.write_text("".join(f"{line}\n" for line in [*lines[:at], json.dumps(hang), *lines[at:]]))
    assert "torchfrtrace /r/flight_recorder" in page_of(run).text


def test_nothing_is_fetched(run: RunFolder) -> None:
    """No link but those to logs, no source, no import; a policy that forbids all scripts but the one of known digest."""
    text = render_run(facts_of(run, run.path / "report.html"))
    page = Tags(text)
    assert "http" not in re.sub(r"http-equiv", "", text)
    links = [a["href"] for tag, a in page.tags if tag == "a"]
    assert links
    assert all((run.path / str(link)).is_file() for link in links)
    assert not [
        a for _, a in page.tags if not str(a.get("src", "data:")).startswith("data:") or "onload" in a
    ]
    (policy,) = (
        str(a["content"]) for tag, a in page.tags if a.get("http-equiv") == "Content-Security-Policy"
    )
    assert "default-src 'none'" in policy
    assert "unsafe-inline" not in policy.partition("script-src")[2]


def test_hostile_texts_stay_texts(run: RunFolder) -> None:
    """Of events, metrics, ledger, job, environment and logs, wherever a job or a library may put them."""
    launch = run.launch(1)
    launch.mkdir(parents=True, exist_ok=True)
    job = {
        "job": {"job": {"name": HOSTILE}, HOSTILE: 1},
        "overrides": [HOSTILE],
        "files": [HOSTILE],
        "case": HOSTILE,
    }
    (launch / "job.json").write_text(
        json.dumps(job | {"machine": {HOSTILE: HOSTILE}, "git": {"commit": HOSTILE}})
    )
    (launch / "environment.json").write_text(json.dumps({"datasets": {HOSTILE: {HOSTILE: HOSTILE}}}))
    hostile: list[dict[str, Any]] = [
        event(7, "node.joined", 2, node=HOSTILE, host=HOSTILE),
        event(7, "generation.started", 3, reason=HOSTILE, members=[HOSTILE]),
        event(
            8, "worker.failed", 3, rank=1, node=HOSTILE, error=HOSTILE, traceback=HOSTILE, stderr=[HOSTILE]
        ),
        event(8, "generation.ended", 3, class_=HOSTILE, reason=HOSTILE, durations={HOSTILE: 3.0}),
        event(9, "snapshot.committed", 3, name=HOSTILE, step=HOSTILE, bytes=HOSTILE, trigger=HOSTILE),
    ]
    with run.events.open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in hostile)
    with run.metrics.open("a") as file:
        file.write(json.dumps({"step": 61, "generation": 3, HOSTILE: 1.0, "eval": {HOSTILE: 2.0}}) + "\n")
    (run.path / "logs" / "<b>.txt").write_text("x")
    facts = facts_of(run, run.path / "report.html")
    harmless = Tags(render_run(facts_of(RunFolder(make_run(run.path / "other")), run.path / "x")))
    for page in (
        Tags(render_run(facts)),
        Tags(render_comparison([facts, facts], title=HOSTILE, is_sweep=True)),
    ):
        assert sum(tag == "script" and not a for tag, a in page.tags) == 1
        assert {tag for tag, _ in page.tags} <= {tag for tag, _ in harmless.tags} | {
            "path",
            "pre",
            "ol",
            "a",
            "script",
        }
        assert "onerror=alert(1)" in page.text
        assert "{{ 7*7 }}" in page.text
        assert not [a for _, a in page.tags if any(name.startswith("on") for name in a)]


def test_what_hooks_logged_is_shown(run: RunFolder) -> None:
    """Numbers as curves, texts as texts, images inside the page; what is no image of the run's is left out."""
    images = run.path / "logged" / "images"
    images.mkdir(parents=True)
    png = b"\x89PNG\r\n\x1a\n" + bytes(100)
    (images / "a.png").write_bytes(png)
    (images / "b.png").write_text("<svg onload=alert(1)>")
    (run.path.parent / "secret.png").write_bytes(png)
    common = {"epoch": 1, "hook": "on_step", "time": 1.0}
    points = [
        {"from": 0},
        *({**common, "step": n, "kind": "scalar", "name": "norm", "value": 0.5 * n} for n in range(1, 31)),
        {**common, "step": 31, "kind": "scalar", "name": "norm", "value": None},
        *(
            {**common, "step": n, "kind": "text", "name": "sample", "value": f"{n} {HOSTILE}"}
            for n in range(1, 41)
        ),
        *(
            {**common, "step": 1, "kind": "image", "name": "layer", "value": value}
            for value in (
                "logged/images/a.png",
                "logged/images/b.png",
                "../secret.png",
                "logged/images/gone.png",
            )
        ),
    ]
    (run.path / "logged" / "g0001-rank0.jsonl").write_text(
        "".join(json.dumps(point) + "\n" for point in points)
    )
    facts = facts_of(run, run.path / "report.html")
    page = Tags(render_run(facts))
    (norm,) = (curve for curve in facts.curves if curve.name == "norm")
    assert (norm.last, norm.odd) == (15.0, (31,))
    assert "sample 40 texts, some of them" in page.text
    assert f"40 {' '.join(HOSTILE.split())}" in page.text
    assert [step.step for step in facts.logged[0].shown][::11] == [40, 1]
    sources = [str(a["src"]) for tag, a in page.tags if tag == "img"]
    assert len(sources) == 1
    assert sources[0].startswith("data:image/png;base64,iVBOR")


def test_runs_side_by_side(run: RunFolder, tmp_path: Path) -> None:
    """What varies in their jobs, the best of each metric, one plot for all."""
    other = RunFolder(make_run(tmp_path / "b"))
    for folder, lr in ((run, 0.1), (other, 0.2)):
        launch = folder.launch(1)
        launch.mkdir(parents=True, exist_ok=True)
        record = {
            "job": {"job": {"name": "mnist"}, "optimizer": {"args": {"lr": lr}}, "train": {"steps": 60}}
        }
        (launch / "job.json").write_text(json.dumps(record))
    facts = [facts_of(folder, tmp_path / "x.html") for folder in (run, other)]
    page = Tags(render_comparison(facts, title="two", is_sweep=False))
    heads = page.text.partition("Results")[2].partition("Where the time went")[0]
    assert "optimizer.args.lr" in heads
    assert "train.steps" not in heads
    assert "0.1" in heads
    assert "0.2" in heads


@pytest.mark.parametrize(
    ("name", "rule", "bold"),
    [
        ("ce", None, []),
        ("ce", "min ce", ["0.2000"]),
        ("accuracy", None, ["0.3000"]),
        ("val.accuracy", None, ["0.3000"]),
        ("rmse", None, ["0.2000"]),
        ("accuracy_loss", None, []),
    ],
)
def test_only_a_value_whose_direction_is_known_is_the_best(
    tmp_path: Path, name: str, rule: str | None, bold: list[str]
) -> None:
    """By the job's `evaluation.best`, or else by a word in the metric's name; otherwise no value is bold.

    The first run diverged: its value counts for nothing.
    """
    facts = []
    for value in (math.nan, 0.2, 0.3):
        folder = RunFolder(make_run(tmp_path / str(value)))
        folder.metrics.write_text(json.dumps({"step": 5, "eval": {name: value}, "best": None}) + "\n")
        launch = folder.launch(1)
        launch.mkdir(parents=True, exist_ok=True)
        (launch / "job.json").write_text(json.dumps({"job": {"evaluation": {"best": rule} if rule else {}}}))
        facts.append(facts_of(folder, tmp_path / "x.html"))
    page = render_comparison(facts, title="two", is_sweep=False)
    assert bold == re.findall(r'class="best">([^<]*)<', page)


def test_parts_of_a_bar_fill_it() -> None:
    """Whatever parts another version may know; nothing where no time is known."""
    parts = parts_of_bar({"training": 3.0, "ending": 0.0, "dreaming": 1.0})
    assert [(part.name, part.share) for part in parts] == [("training", 75.0), ("dreaming", 25.0)]
    assert parts_of_bar({}) == []


def test_an_empty_folder_has_a_report(tmp_path: Path) -> None:
    """A run that was killed before it wrote anything."""
    folder = tmp_path / "runs" / "job" / "id"
    folder.mkdir(parents=True)
    page = page_of(RunFolder(folder))
    assert "Nothing was measured yet." in page.text


def test_a_script_that_tells_no_steps_is_not_said_to_have_trained_none(tmp_path: Path) -> None:
    """Its steps, its beginning after a restart and its snapshots are its own affair: the page is silent about them."""
    folder = RunFolder(make_run(tmp_path))
    state = json.loads(folder.state.read_text())
    durations = {"run": {"training": 6.0, "starting": 2.0}}
    folder.state.write_text(json.dumps({**state, "script": "train.py", "step": 0, "durations": durations}))
    folder.metrics.write_text("")
    lines = [
        event(0, "run.started", 0, launch=1),
        event(1, "node.joined", 0, node="n0", host="a"),
        event(2, "generation.started", 1, world_size=2, nodes=1, reason="start"),
        event(3, "script.started", 1, script="train.py"),
        event(8, "worker.failed", 1, rank=1, node="n0", error="killed by SIGKILL"),
        event(9, "generation.ended", 1, class_="crash", reason="killed by SIGKILL", step=0),
        event(10, "generation.started", 2, world_size=2, nodes=1, reason="crash"),
    ]
    folder.events.write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = page_of(folder)
    assert "script 6.0 s" in page.text
    for words in (
        "training 6.0 s",
        "0 steps",
        "0 snapshots ",
        "after step 0",
        "the beginning",
        "goodput",
        "A colour",
    ):
        assert words not in page.text.replace("0 snapshots committed", "")


def test_an_override_stands_instead_of_the_files_value(run: RunFolder) -> None:
    """Only a file stands instead of what it extends."""
    keys = [
        JobKey("train.epochs", "60", "--set", overrides=True),
        JobKey("job.seed", "1", "b.toml", overrides=True),
    ]
    page = Tags(render_run(replace(facts_of(run, run.path / "report.html"), keys=keys)))
    assert "--set, instead of the file's value" in page.text
    assert "b.toml, instead of what it extends" in page.text


def test_a_generation_from_memory_names_no_snapshot(run: RunFolder) -> None:
    """A snapshot of that name was never written."""
    told = run.events.read_text().replace('"restored_from": "s"', '"restored_from": "s", "from_memory": true')
    run.events.write_text(told)
    assert "step 40, in memory" in page_of(run).text
