"""The snapshot folders of a run, with their states and the reasons to keep them."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

from elasticflow.errors import SnapshotNotFoundError
from elasticflow.observe import records
from elasticflow.observe.status import is_locked
from elasticflow.observe.terminal.formats import rfc3339
from elasticflow.protocol.snapshot_settings import Keep
from elasticflow.run_folder import SNAPSHOT_NAME, step_of
from elasticflow.snapshots.format.manifest import OtherVersionError
from elasticflow.snapshots.format.policy import PERMANENT, REASONS, reasons
from elasticflow.snapshots.store.publish import UNFINISHED
from elasticflow.system.records import float_of, int_of, printable_in

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from elasticflow.jobfile.tables.job import Job
    from elasticflow.observe.snapshots.locate import SnapshotSource
    from elasticflow.snapshots.format.manifest import Manifest

State = Literal["committed", "set aside", "damaged", "other version", "unfinished"]
_STEP = re.compile(r"step:(?P<step>\d{1,12})")
LATEST, BEST = "latest", "best"


@dataclass(frozen=True)
class SnapshotRow:
    """A snapshot folder.

    Attributes:
        state: `committed`; `set aside` (never loaded); `damaged` (the manifest is damaged, and the snapshot not set
            aside yet); `other version` (only another version reads the manifest); `unfinished` (no manifest).
        reason: Reason that it is not committed.
        manifest: The snapshot's manifest, if it can be read.
        kept: Rules that keep it; empty: the next retention removes it.
        note: Note of its pin; None if it is not pinned.
    """

    name: str
    state: State
    reason: str | None = None
    manifest: Manifest | None = None
    kept: tuple[str, ...] = ()
    note: str | None = None

    @property
    def step(self) -> int:
        """Finished steps."""
        return step_of(self.name)

    @property
    def generation(self) -> int:
        """The generation that took the snapshot."""
        return int(self.name.split("-")[1])

    @property
    def is_permanent(self) -> bool:
        """True if a reason to keep the snapshot is permanent."""
        return not set(PERMANENT).isdisjoint(self.kept)

    def facts(self) -> dict[str, object]:
        """Return the row as `--format json` prints it."""
        manifest = self.manifest
        return {
            "name": self.name,
            "state": self.state,
            "reason": self.reason,
            "step": self.step,
            "generation": self.generation,
            "epoch": manifest and manifest.epoch,
            "samples": manifest and manifest.samples,
            "bytes": manifest and manifest.size,
            "borrowed_bytes": manifest and sum(entry.size for entry in manifest.borrowed.values()),
            "created": manifest and rfc3339(manifest.created),
            "world_size": manifest and manifest.world_size,
            "trigger": manifest and manifest.trigger,
            "parent": manifest and manifest.parent,
            "metric": manifest and manifest.metric,
            "kept": list(self.kept),
            "permanent": self.is_permanent,
            "pinned": self.note,
        }


def rows_of(source: SnapshotSource) -> list[SnapshotRow]:
    """Return all snapshot folders of the run, the newest first.

    Raises:
        OSError: the place, or every manifest in it, cannot be read.
    """
    catalog = source.catalog
    set_aside, pinned = printable_in(catalog.quarantined()), printable_in(catalog.pinned())
    folders = catalog.storage.list(catalog.folder())
    names = [name for name in folders if SNAPSHOT_NAME.fullmatch(name.removeprefix(UNFINISHED))]
    whole = {name for name in names if not name.startswith(UNFINISHED)}
    begun = {name.removeprefix(UNFINISHED) for name in names} - whole
    rows = [
        _row(source, name, manifest, set_aside.get(name)) for name, manifest in catalog.read_manifests(whole)
    ]
    rows += [_row(source, name, None, None) for name in begun]
    kept = _kept([r.manifest for r in rows if r.state == "committed" and r.manifest], source.rules, pinned)
    rows = [replace(r, kept=kept.get(r.name, ()), note=pinned.get(r.name)) for r in rows]
    return sorted(rows, key=lambda r: (r.generation, r.step, r.name), reverse=True)


def pick_row(rows: Sequence[SnapshotRow], text: str, rules: Keep | None) -> SnapshotRow:
    """Return the snapshot that *text* means: its name, `latest`, `best` or `step:N`.

    Only its name can mean a snapshot that is not committed; `latest` may also be another version's, which a start refuses.

    Raises:
        SnapshotNotFoundError: there is no such snapshot; lists the existing snapshots.
    """
    committed = [row for row in rows if row.state == "committed"]
    if text == LATEST:
        matches = [row for row in rows if row.state in {"committed", "other version"}][:1]
    elif text == BEST:
        matches = _best(committed, rules)
    elif match := _STEP.fullmatch(text):
        matches = [row for row in committed if row.step == int(match["step"])]
    else:
        matches = [row for row in rows if row.name == text]
    if not matches:
        why = ": no snapshot's metric is a number" if committed and text == BEST else ""
        raise SnapshotNotFoundError(f"there is no snapshot {text}{why}", _remedy(committed))
    return matches[0]


def ordered_reasons(why: Collection[str]) -> tuple[str, ...]:
    """Return the reasons to keep a snapshot in the order for display: the surest first."""
    return tuple(sorted(why, key=REASONS.index))


def is_selector(text: str) -> bool:
    """Return True if *text* can mean a snapshot: a name, `latest`, `best` or `step:N`."""
    return text in {LATEST, BEST} or any(pattern.fullmatch(text) for pattern in (_STEP, SNAPSHOT_NAME))


def _row(
    source: SnapshotSource,
    name: str,
    manifest: Manifest | OtherVersionError | str | None,
    verdict: str | None,
) -> SnapshotRow:
    """Return the row of a snapshot; *manifest* is as `Catalog.read_manifests` yields it."""
    if manifest is None:
        return SnapshotRow(name, "unfinished", _why_unfinished(source, name))
    if isinstance(manifest, OtherVersionError):
        return SnapshotRow(
            name, "other version" if verdict is None else "set aside", verdict or manifest.message
        )
    if isinstance(manifest, str):
        return SnapshotRow(name, "damaged" if verdict is None else "set aside", verdict or manifest)
    return SnapshotRow(name, "committed" if verdict is None else "set aside", verdict, manifest)


def _why_unfinished(source: SnapshotSource, name: str) -> str:
    if source.folder is None:
        return "being written, or left by a writer that died"
    generation = SnapshotRow(name, "unfinished").generation
    if is_locked(source.folder) and generation == source.catalog.newest_generation():
        return "being written"
    return "left by a writer that died"


def _kept(
    committed: list[Manifest], rules: Keep | None, pinned: dict[str, str]
) -> dict[str, tuple[str, ...]]:
    kept = reasons(committed, rules or Keep(last=0), pinned=pinned)
    return {name: ordered_reasons(why) for name, why in kept.items()}


def _best(committed: list[SnapshotRow], rules: Keep | None) -> list[SnapshotRow]:
    if rules is None or rules.best_mode is None:
        cause = "no job is recorded there" if rules is None else "its job has no evaluation.best"
        raise SnapshotNotFoundError(
            f"which snapshot is the best is not known: {cause}", "give a name, `latest` or step:N"
        )
    only = Keep(last=0, best=1, best_mode=rules.best_mode)
    why = reasons([row.manifest for row in committed if row.manifest], only)
    return [row for row in committed if "best" in why.get(row.name, ())]


def _remedy(committed: list[SnapshotRow]) -> str:
    if not committed:
        return "no snapshot is committed there; `elasticflow snapshots list` shows what there is"
    steps = ", ".join(str(row.step) for row in committed[:8])
    return f"there are snapshots of steps {steps}{' ...' if len(committed) > 8 else ''}"


class BetterStep(NamedTuple):
    """A step whose evaluation gave a better value than a snapshot has.

    Attributes:
        value: Value of the metric that ranks snapshots.
    """

    step: int
    value: float


def ranking_metric(job: Job | None) -> str | None:
    """Return the metric in `evaluation.best` by its name in metrics.jsonl: `accuracy`, `val.loss`; None if unset."""
    from elasticflow.jobfile.tables.evaluation import ranking_set

    ranking = None if job is None else ranking_set(job.evaluation)
    if ranking is None:
        return None
    name, table = ranking
    metric = (table.best or "").partition(" ")[2]
    return f"{name}.{metric}" if name else metric


def better_step(source: SnapshotSource, row: SnapshotRow) -> BetterStep | None:
    """Return the run's best measured step, if its value is better than that of snapshot *row*.

    None if this machine has no folder of the run: snapshots alone do not tell.
    """
    metric, rules = ranking_metric(source.job), source.rules
    has = None if row.manifest is None else row.manifest.metric
    if source.folder is None or metric is None or has is None or rules is None:
        return None
    best, measured = None, {}
    for line in records.read(source.folder.metrics):
        values = line.get("eval")
        if isinstance(values, dict) and (value := float_of(values, metric)) is not None:
            # Among equal values, the newest step counts. `best` forgets values that another evaluation measured.
            measured[value] = int_of(line, "step")
            best = float_of(line, "best")
    if best is None or best not in measured or not (best > has if rules.best_mode == "max" else best < has):
        return None
    return BetterStep(measured[best], best)
