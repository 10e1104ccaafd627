"""The differences between the origins of two launches, the weight of each for a run, and their table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from elasticflow.compiler.provenance.job_json import public_tables, to_json
from elasticflow.compiler.provenance.origins import JOB_FILE
from elasticflow.jobfile.tables.evaluation import path_of_set, without_set
from elasticflow.protocol.key_weights import (
    EXACT_WEIGHTS,
    KEYS_OF_SCHEDULE,
    LISTS,
    OF_SCHEDULE,
    Weight,
    weigh,
)
from elasticflow.system.redaction import mask_url

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from elasticflow.compiler.provenance.origins import Made, Origins
    from elasticflow.jobfile.tables.job import Job

# Buckets of similar length end at the end of a batch, so the order depends on the size of a batch.
_CUTS = "dataset.sampler.bucket_by: the order of samples depends on it"
_BUCKETED_WEIGHTS: dict[str, tuple[Weight, str]] = {
    "dataset.global_batch_size": ("corrupting", _CUTS),
    "dataset.tail": ("corrupting", _CUTS),
}

_BITS = 'train.consistency = "exact" promises bits that this may change'
_ROUNDING = "equal up to rounding"
_BEGINS_ANEW = "the run has no snapshot, and begins anew"
_PLACE = ("snapshots.uri", "snapshots.options")
_NO_WEIGHTS = frozenset({"evaluation", "hooks", "prepare"})  # roles that do not influence the weights
# Packages that influence no number of the training: ours, and torch's imports for its compiler and its hub.
_PLUMBING = frozenset({
    "python", "annotated-types", "click", "fsspec", "pydantic", "pydantic-core", "safetensors", "structlog", "tomli",
    "typing-extensions", "typing-inspection", "dill", "filelock", "jinja2", "markupsafe", "mpmath", "networkx",
    "packaging", "psutil", "pyyaml", "rich", "setuptools", "sympy", "tqdm",
})  # fmt: skip
_DIGEST_SHOWN = 12
WEIGHTS: dict[Weight, str] = {
    "corrupting": "would corrupt the run",
    "trajectory": "changes the trajectory",
    "harmless": "harmless",
}
_WIDEST_KEY, _WIDEST_CHANGE, _LONGEST_VALUE = 44, 44, 60


@dataclass(frozen=True)
class Difference:
    """One key that differs.

    Attributes:
        key: Dotted key as in the job file: `optimizer.args.lr`.
        old: Value of the run so far; None if the key was absent.
        new: Value now; None if the key is gone.
        weight: Effect on a resumed run: none, another trajectory, or corruption.
    """

    key: str
    old: Any
    new: Any
    weight: Weight
    reason: str

    @property
    def is_of_the_job(self) -> bool:
        """True for a key of the job, False for other origins of a launch."""
        return self.key.partition(".")[0] not in {"sources", "versions", "machine", "git"}

    def to_json(self) -> dict[str, Any]:
        """Return the difference as job.json and events hold it."""
        return dict(to_json(asdict(self)))


def compare(old: Job, new: Job) -> list[Difference]:
    """Return the differences in the order of the job file, new keys last."""
    before, after = dict(_leaves(public_tables(old))), dict(_leaves(public_tables(new)))
    is_script = new.script is not None
    is_exact = not is_script and new.train.consistency == "exact"
    own_weights = dict(EXACT_WEIGHTS) if is_exact else {}
    if not is_script and new.dataset.sampler is not None and new.dataset.sampler.bucket_by is not None:
        own_weights |= _BUCKETED_WEIGHTS
    measured = None if is_script or new.lr_scheduler is None else new.lr_scheduler.metric
    if measured is not None:
        of_set = path_of_set(measured.rpartition(".")[0])
        keys = ((key, key.split(".")) for key in {**before, **after})
        own_weights |= {
            key: OF_SCHEDULE
            for key, parts in keys
            if tuple(parts[: len(of_set)]) == of_set and {*parts[len(of_set) :][:1]} & KEYS_OF_SCHEDULE
        }
    differences = []
    for key in {**before, **after}:
        was, now = before.get(key), after.get(key)
        if was != now or type(was) is not type(now):
            weight = own_weights.get("env" if key.startswith("env.") else key) or _weigh(key, was, now)
            differences.append(Difference(key, was, now, *weight))
    return differences


def _leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):  # an empty table has no keys that could differ
        for name, item in value.items():
            yield from _leaves(item, f"{key}.{name}" if key else name)
    elif key in LISTS:
        for number, group in enumerate(value):
            yield from _leaves(group, f"{key}.{number}")
    else:
        yield key, value


def _weigh(key: str, was: Any, now: Any) -> tuple[Weight, str]:
    parts = [str(part) for part in without_set(tuple(key.split(".")))]
    if ".".join(parts[:2]) in LISTS and len(parts) > 2:
        del parts[2]  # the number of the table
    return weigh(".".join(parts), was, now)


def compare_made(old: Made, new: Made, *, after_user_error: bool = False) -> list[Difference]:
    """Return the differences: keys of the job first, then its own sources, versions, machine and checkout.

    A fact that only one side has is no difference: an older launch recorded less, and workers have yet to report.

    Args:
        old: Origins of the run so far.
        new: Origins of the launch that would resume it.
        after_user_error: The run ended with an error of the job's own code.
    """
    is_script = new.job.script is not None
    is_exact = not is_script and new.job.train.consistency == "exact"
    depends_on_cores = is_exact and new.job.train.threads is None
    return [
        *compare(old.job, new.job),
        *_sources(old.origins, new.origins, is_exact=is_exact, after_user_error=after_user_error),
        *_versions(old.origins, new.origins, is_exact=is_exact),
        *_machine(old.origins, new.origins, is_exact=is_exact, depends_on_cores=depends_on_cores),
        *_git(old.origins, new.origins),
    ]


def weighed_anew(differences: Sequence[Difference], *, has_snapshots: bool) -> list[Difference]:
    """Return the differences; without snapshots they are harmless, since nothing of the training continues.

    They weigh as before if the place of the snapshots has changed, also by its options: `endpoint_url` names another store.
    """
    if has_snapshots or any(each.key.startswith(_PLACE) for each in differences):
        return list(differences)
    return [
        each if each.weight == "harmless" else replace(each, weight="harmless", reason=_BEGINS_ANEW)
        for each in differences
    ]


def _sources(old: Origins, new: Origins, *, is_exact: bool, after_user_error: bool) -> Iterator[Difference]:
    if not old.sources or not new.sources:
        return
    for name in sorted({**old.sources, **new.sources}):
        was, now = old.sources.get(name), new.sources.get(name)
        roles = {*(was.roles if was else ()), *(now.roles if now else ())}
        if JOB_FILE in roles or (was and now and was.sha256 == now.sha256):
            continue
        weight: Weight = "harmless"
        if roles == {"script"}:
            reason = "a script resumes from its own checkpoint"
        elif roles <= _NO_WEIGHTS:
            reason = "the weights do not depend on it"
        elif is_exact:
            weight, reason = "trajectory", _BITS
        elif after_user_error:
            reason = "expected after an error in the job's own code; it counts from here on"
        else:
            reason = "counts as it is now, from here on"
        old_digest, new_digest = (
            None if file is None else file.sha256[:_DIGEST_SHOWN] for file in (was, now)
        )
        reason = f"{', '.join(sorted(roles))}: {reason}"
        yield Difference(f"sources.{name}", old_digest, new_digest, weight, reason)


def _versions(old: Origins, new: Origins, *, is_exact: bool) -> Iterator[Difference]:
    for name, was in old.versions.items():
        now = new.versions.get(name)
        if was == now or (now is None and not new.versions):
            continue
        is_plumbing = name.lower().replace("_", "-") in _PLUMBING
        matters = is_exact and not is_plumbing
        weight: Weight = "trajectory" if matters else "harmless"
        reason = "moves no number" if is_plumbing else _BITS if matters else _ROUNDING
        yield Difference(f"versions.{name}", was, now, weight, reason)


def _machine(old: Origins, new: Origins, *, is_exact: bool, depends_on_cores: bool) -> Iterator[Difference]:
    if not old.machine or not new.machine:
        return
    for name in ("cpu", "gpus", "cores", "driver", "os", "libc", "kernel"):
        was, now = old.machine.get(name), new.machine.get(name)
        weight: Weight = "harmless"
        reason = _ROUNDING if name in {"cpu", "gpus", "cores"} else "where it runs, not what it computes"
        if is_exact and (name in {"cpu", "gpus"} or (name == "cores" and depends_on_cores)):
            weight, reason = "trajectory", _BITS
        if was != now:
            yield Difference(f"machine.{name}", was, now, weight, reason)


def _git(old: Origins, new: Origins) -> Iterator[Difference]:
    was, now = ((each.git or {}).get("commit") for each in (old, new))
    if was and now and was != now:
        reason = "the files that take part in the job are compared one by one"
        yield Difference("git.commit", was[:_DIGEST_SHOWN], now[:_DIGEST_SHOWN], "harmless", reason)


def lines_of(
    differences: Sequence[Difference], paint: Callable[[str, Weight], str] = lambda title, _: title
) -> Iterator[str]:
    """Yield the table's lines, the weightiest group first: key, old -> new, reason.

    Args:
        differences: Differences in the order within their groups.
        paint: Returns a group's head in the colour of its weight.
    """
    rows = [(each, each.key, change(each)) for each in differences]
    keys = min(max((len(key) for _, key, _ in rows), default=0), _WIDEST_KEY)
    changes = min(max((len(text) for *_, text in rows), default=0), _WIDEST_CHANGE)
    for weight, title in WEIGHTS.items():
        group = [row for row in rows if row[0].weight == weight]
        if group:
            yield f"  {paint(title, weight)}"
        for each, key, text in group:
            yield f"    {key:<{keys}}  {text:<{changes}}  {each.reason}"


def change(difference: Difference) -> str:
    """Return `0.1 -> 0.2`, with `-` for an absent value."""
    return f"{value(difference.old)} -> {value(difference.new)}"


def value(content: Any) -> str:
    """Return a value, shortened for the table."""
    match content:
        case None | []:
            return "-"
        case str():
            text = mask_url(content)
        case list():
            text = ", ".join(map(str, content))
        case _:
            text = repr(content)
    return text if len(text) <= _LONGEST_VALUE else f"{text[: _LONGEST_VALUE - 3]}..."
