"""Measure every peer on the same work under the same faults: `python -m tests.measured.peers [COMMAND]`.

    python -m tests.measured.peers install                  environments of the peers, from the package index; they are kept
    python -m tests.measured.peers measure [--peer ...] [--fault ...] [--seconds 1500]
    python -m tests.measured.peers page                     elasticflow/guide/compared.md and its pictures, from the trials

`measure` appends a line for each trial to `data/trials.jsonl`. The page is made of the newest trials of each peer and fault, and of quiet ones
where there are any.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import signal
import subprocess
import sys
import time
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from tests.measured.peers import judging
from tests.measured.peers.page import is_busy, read, write_page
from tests.measured.peers.peers import BY_KEY, PEERS, Peer, python_of
from tests.measured.peers.trial import Plan, Trial, strike

if TYPE_CHECKING:
    from collections.abc import Iterator

HERE = Path(__file__).parent
TRIALS = HERE / "data" / "trials.jsonl"
VERSIONS = HERE / "data" / "versions.json"
CACHE = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "elasticflow-peers"
SAMPLES, BATCH, SAVE_EVERY = 4800, 48, 50  # those of scripts/workload.py, which needs torch


def plan() -> Plan:
    """Return the plan of the faults."""
    table = tomllib.loads((HERE / "plan.toml").read_text())
    return Plan(**{**table, "steps": tuple(table["steps"])})


def install(environments: Path, peers: list[Peer]) -> None:
    """Make each environment that is missing, and note what is in it."""
    versions = json.loads(VERSIONS.read_text()) if VERSIONS.exists() else {}
    for peer in {peer.environment: peer for peer in peers}.values():
        python = python_of(peer, environments) / "python"
        if peer.environment != "elasticflow" and not python.exists():
            subprocess.run([sys.executable, "-m", "venv", environments / peer.environment], check=True)
        # pip is quick where all is there, and completes an environment that was given up halfway.
        subprocess.run([python, "-m", "pip", "install", "--quiet", *peer.packages], check=True)
        frozen = subprocess.run(
            [python, "-m", "pip", "list", "--format=json"], check=True, capture_output=True, text=True
        ).stdout
        versions[peer.environment] = {entry["name"]: entry["version"] for entry in json.loads(frozen)}
    VERSIONS.parent.mkdir(exist_ok=True)
    kept = {
        name: {n: v for n, v in of.items() if n.lower() in _named(name)}
        for name, of in sorted(versions.items())
    }
    VERSIONS.write_text(json.dumps(kept, indent=1) + "\n")


def _named(environment: str) -> set[str]:
    """Return the packages of an environment that peers of it name."""
    of = (package for peer in PEERS if peer.environment == environment for package in peer.packages)
    return {"elasticflow", *(package.split("==")[0].split("[")[0].lower() for package in of)}


def attempts(options: argparse.Namespace, faults: Plan) -> Iterator[tuple[Peer, str, int]]:
    """Yield peers, faults and numbers, the undisturbed run of each peer first."""
    names = [name for name in faults.faults if name in options.fault]
    for number, fault, key in itertools.product(range(options.tries), names, options.peer):
        peer = BY_KEY[key]
        if fault in peer.faults and (options.unpromised or fault not in peer.not_promised):
            yield peer, fault, number


def measure(options: argparse.Namespace) -> None:
    """Make the trials until the time is over."""
    faults = plan()
    if options.at:
        faults = replace(faults, steps=tuple(options.at))
    end = time.monotonic() + options.seconds
    options.trials.parent.mkdir(exist_ok=True)
    of_options = {"model": options.model, "workers": options.workers}
    for peer, fault, number in attempts(options, faults):
        if time.monotonic() > end or (options.until and options.until.exists()):
            print("the time is over", file=sys.stderr)
            return
        cell = {"peer": peer.name, "variant": peer.variant, "fault": fault, "number": number, **of_options}
        there = read(options.trials) if options.missing and options.trials.exists() else []
        if any(cell.items() <= record.items() and not is_busy(record) for record in there):
            continue
        record = tried(peer, fault, number, options, faults)
        with options.trials.open("a") as file:
            file.write(json.dumps(record) + "\n")
        told = {k: v for k, v in record.items() if k not in {"logs", "settings", "machine"}}
        print(json.dumps(told), file=sys.stderr, flush=True)


def _others_percent() -> float:
    """Return how much of the machine others take in a second; what runs at a lower priority yields to a trial."""
    share = psutil.cpu_times_percent(1.0)
    return round(100.0 - share.idle - share.iowait - share.nice, 1)


def tried(peer: Peer, fault: str, number: int, options: argparse.Namespace, faults: Plan) -> dict[str, Any]:
    """Make a trial, and return its record."""
    of_nodes = faults.faults[fault]["nodes"] or peer.each_worker_is_a_node
    most = options.workers if of_nodes else 1
    nodes = most - 1 if fault == "join" else most
    each = 1 if of_nodes else options.workers
    # Settings that speed up a recovery do not touch an undisturbed run: it stands for all that have its script.
    script = f"{Path(peer.script).stem}-{options.model}-{options.workers}"
    variant = "" if fault == "none" else f"-{peer.variant.replace(' ', '-')}"
    folder = options.work / script / f"{fault}{variant}"
    trial = Trial(
        peer, python_of(peer, options.environments), folder, nodes, most, each, options.model, options.epochs
    )
    with trial:
        if fault == "full":
            subprocess.run(["mount", "-t", "tmpfs", "-o", "size=160m", "none", trial.state], check=True)
        try:
            load, others = os.getloadavg()[0], _others_percent()
            trial.start()
            facts = strike(trial, fault, faults, number)
            limit_s = options.limit or faults.faults[fault].get("limit_s", faults.limit_s)
            ended = not facts.get("never") and trial.await_end(limit_s, SAMPLES * options.epochs // BATCH)
            reached, codes = trial.step(), trial.exit_codes()
        finally:
            trial.kill()
            if fault == "full":
                subprocess.run(["umount", "-l", trial.state], check=True)
    record: dict[str, Any] = {
        "peer": peer.name,
        "variant": peer.variant,
        "fault": fault,
        "number": number,
        "model": options.model,
        "workers": options.workers,
        "epochs": options.epochs,
        "nodes": most,
        "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "load": round(load, 1),
        "others_percent": others,
        "ended": ended,
        "exit": codes,
        "reached": reached,
        **judged(trial, facts, folder.parent / "none" / "records"),
        "settings": peer.settings,
        "logs": trial.digests(),
        "machine": f"{os.cpu_count()} cores, Python {platform.python_version()}",
    }
    return record


def judged(trial: Trial, facts: dict[str, Any], undisturbed: Path) -> dict[str, Any]:
    """Return what the records of a trial say."""
    steps = judging.read_steps(trial.records)
    found: dict[str, Any] = {name: value for name, value in facts.items() if name not in {"fault", "never"}}
    if not steps:
        return found
    found["first_step_s"] = round(steps[0].t - trial.began, 2) if "fault" not in facts else None
    fault = facts.get("fault")
    trained = judging.until_end(steps, SAMPLES * trial.epochs // BATCH)
    if fault is not None and (pause := judging.pause(trained, fault)) is not None:
        found |= {
            "pause_s": pause.seconds,
            "caught_up_s": pause.caught_up_s,
            "resumed_from": pause.resumed_from,
            "reached_before": pause.reached,
        }
    found["redone"] = judging.redone(trained)
    found["reads"] = sum(path.stat().st_size // 4 for path in trial.records.glob("reads-*.bin"))
    if (final := judging.final_of(trial.records)) is not None:
        chain = judging.lineage(steps, final.after)
        samples = judging.judge_samples(chain, SAMPLES, trial.epochs, BATCH)
        found |= {**vars(samples), "digest": final.digest, "replicas_agree": final.agree}
        if fault is None:
            found |= vars(judging.speed(steps, SAVE_EVERY))
        elif (other := judging.final_of(undisturbed)) is not None:
            found |= {
                "same_bits": other.digest == final.digest,
                "difference": judging.difference(final, other),
            }
    return found


def main() -> None:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("command", choices=("install", "measure", "page"), nargs="?", default="measure")
    parser.add_argument("--peer", nargs="+", default=list(BY_KEY), choices=list(BY_KEY))
    parser.add_argument("--fault", nargs="+", default=list(plan().faults), choices=list(plan().faults))
    parser.add_argument("--tries", type=int, default=1, help="of each fault")
    parser.add_argument("--model", choices=("mlp", "gpt"), default="mlp")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument(
        "--at", nargs=2, type=int, help="range of the faults' steps, where it is not the plan's"
    )
    parser.add_argument("--limit", type=float, help="seconds without a step, where they are not the plan's")
    parser.add_argument("--unpromised", action="store_true", help="also what a peer does not promise")
    parser.add_argument("--missing", action="store_true", help="only cells that have no quiet trial yet")
    parser.add_argument("--until", type=Path, help="no trial begins once this file exists")
    parser.add_argument("--trials", type=Path, default=TRIALS, help="file of the trials")
    parser.add_argument("--seconds", type=float, default=1500.0, help="after which no trial begins")
    parser.add_argument("--environments", type=Path, default=CACHE, help="folder of the environments")
    parser.add_argument("--work", type=Path, default=CACHE / "work", help="folder of the runs")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # and nothing that was started is left
    for folder in (options.environments, options.work):
        folder.mkdir(parents=True, exist_ok=True)
    if options.command == "install":
        install(options.environments, [BY_KEY[key] for key in options.peer])
    elif options.command == "measure":
        measure(options)
    else:
        write_page(options.trials, VERSIONS)


if __name__ == "__main__":
    main()
