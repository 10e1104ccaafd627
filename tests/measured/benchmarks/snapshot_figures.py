"""What the snapshot benchmark reports: figures out of measured rows, a table, targets; pure."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

OURS = "elasticflow"
COPY = "copy"
FSYNCED = "torch.save"
LOADS = (OURS, FSYNCED, "dcp.save", "dcp.load alone")
WAYS = (COPY, OURS, FSYNCED, "dcp.save", "dcp.async_save, thread", "dcp.async_save, process")
MOST_STALL = 2.0  # times the plain copy
MOST_MEMORY = {"double": 2.1, "single": 1.1}  # times the state
MOST_OVER_SHARE = 1.05  # times state / world size

Figures = dict[str, Any]
Rows = list[dict[str, list[float]]]


def of_times(result: Mapping[str, Any]) -> Figures:
    """Return each way's medians over the rounds, in seconds, and our stall against the copy of the same round."""
    saves: Rows = result["saves"]
    return {
        "state_bytes": result["state"],
        "stall_s": _medians(saves, 0),
        "durable_s": _medians(saves, 1),
        **of_loads(result),
        "stall_per_copy": round(statistics.median(row[OURS][0] / row[COPY][0] for row in saves), 3),
    }


def of_loads(result: Mapping[str, Any]) -> Figures:
    """Return each way's medians over the rounds, in seconds, with the files in the page cache and dropped from it."""
    loads: Rows = result["loads"]
    return {"load_warm_s": _medians(loads, 0), "load_cold_s": _medians(loads, 1)}


def of_worlds(results: Mapping[int, Mapping[str, Any]]) -> dict[int, Figures]:
    """Return for each world size the most bytes a rank stages, that as a share of the state, and the stalls."""
    return {
        world_size: {
            "bytes_per_rank": max(result["bytes"]),
            "share": round(max(result["bytes"]) / result["state"], 4),
            "stall_s": _medians(result["saves"], 0),
        }
        for world_size, result in sorted(results.items())
    }


def of_memory(results: Mapping[str, Mapping[str, Any]]) -> dict[str, list[float]]:
    """Return for each way the most memory while it saves and while it loads, as multiples of the state."""
    found = {}
    for which, result in results.items():
        for name, most in result.items():
            if name != "state":
                label = name if which == "theirs" else f"{name}, {which} buffers"
                found[label] = [round(nbytes / result["state"], 3) for nbytes in most]
    return found


def table(figures: Figures) -> str:
    """Return the figures as tables of Markdown."""
    lines: list[str] = []
    if "times" in figures:
        times = figures["times"]
        lines += [
            "| | stall, ms | durable, ms | load, warm, ms | load, cold, ms |",
            "|---|---:|---:|---:|---:|",
        ]
        columns = [times[key] for key in ("stall_s", "durable_s", "load_warm_s", "load_cold_s")]
        lines += [
            f"| {name} | " + " | ".join(_ms(c.get(name)) for c in columns) + " |"
            for name in (*WAYS, *LOADS[3:])
        ]
    if "loads" in figures:
        lines += ["", "| | load, warm, ms | load, cold, ms |", "|---|---:|---:|"]
        columns = [figures["loads"][key] for key in ("load_warm_s", "load_cold_s")]
        lines += [f"| {name} | " + " | ".join(_ms(c.get(name)) for c in columns) + " |" for name in LOADS]
    if "worlds" in figures:
        lines += ["", "| processes | bytes per rank | of the state | stall, ms | plain copy, ms |"]
        lines += ["|---:|---:|---:|---:|---:|"]
        for world_size, world in figures["worlds"].items():
            stalls = f"{_ms(world['stall_s'][OURS])} | {_ms(world['stall_s'][COPY])}"
            lines.append(f"| {world_size} | {world['bytes_per_rank']} | {world['share']:.3f} | {stalls} |")
    if "memory" in figures:
        lines += ["", "| memory above the state, times the state | saving | loading |", "|---|---:|---:|"]
        lines += [f"| {name} | {save:.2f} | {load:.2f} |" for name, (save, load) in figures["memory"].items()]
    return "\n".join(lines)


def targets(figures: Figures) -> dict[str, bool]:
    """Return each target that the figures tell of, in words, and whether it is met."""
    found: dict[str, bool] = {}
    if "times" in figures:
        times = figures["times"]
        stall, durable = times["stall_s"], times["durable_s"]
        others = [name for name in WAYS if name not in (COPY, OURS)]
        ratio = times["stall_per_copy"]
        found[f"stall {ratio:.2f} of a plain copy's, at most {MOST_STALL:g}"] = ratio <= MOST_STALL
        found["stall below every other way's"] = all(stall[OURS] < stall[name] for name in others)
        found[f"durable no later than {FSYNCED} with fsync"] = durable[OURS] <= durable[FSYNCED]
    for part in ("times", "loads"):
        for kind in ("warm", "cold") if part in figures else ():
            load = figures[part][f"load_{kind}_s"]
            found[f"load ({kind}) not slower than dcp.load as documented"] = load[OURS] <= load["dcp.save"]
            found[f"load ({kind}) not slower than the bare dcp.load"] = load[OURS] <= load["dcp.load alone"]
    for world_size, world in figures.get("worlds", {}).items():
        name = (
            f"{world_size} processes: bytes per rank at most {MOST_OVER_SHARE:g} / {world_size} of the state"
        )
        found[name] = world["share"] <= MOST_OVER_SHARE / world_size
    for which, most in MOST_MEMORY.items():
        saving = figures.get("memory", {}).get(f"{OURS}, {which} buffers")
        if saving is not None:
            found[f"memory {saving[0]:.2f} of the state with {which} buffers, at most {most:g}"] = (
                saving[0] <= most
            )
    return found


def _medians(rows: Rows, column: int) -> dict[str, float]:
    names: Iterable[str] = rows[0] if rows else ()
    return {name: round(statistics.median(row[name][column] for row in rows), 5) for name in names}


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1000:.0f}"
