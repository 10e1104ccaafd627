"""What differs between what two launches were made from, and how much it matters."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elasticflow.compiler.drift.compare import Difference, compare
from elasticflow.compiler.inputs.sources import JOB_FILE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from elasticflow.compiler.inputs.origins import Made, Origins
    from elasticflow.protocol.key_weights import Weight

_BITS = 'train.consistency = "exact" promises bits that this may change'
_ROUNDING = "equal up to rounding"
_NO_WEIGHTS = frozenset({"evaluation", "hooks", "prepare"})  # roles that no weight depends on
# Move no number that training computes: ours, and what torch imports for its compiler and its hub.
_PLUMBING = frozenset({
    "python", "annotated-types", "click", "fsspec", "pydantic", "pydantic-core", "safetensors", "structlog", "tomli",
    "typing-extensions", "typing-inspection", "dill", "filelock", "jinja2", "markupsafe", "mpmath", "networkx",
    "packaging", "psutil", "pyyaml", "rich", "setuptools", "sympy", "tqdm",
})  # fmt: skip
_DIGEST_SHOWN = 12


def compare_made(old: Made, new: Made, *, after_user_error: bool = False) -> list[Difference]:
    """Return what differs: keys of the job first, then its own sources, versions, machine and checkout.

    What only one side knows is no difference: an older launch recorded less, and workers have yet to report.

    Args:
        old: What the run was made from so far.
        new: What it is to go on with.
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
            reason = "a script goes on from what it has saved"
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
        reason = "what of it takes part in the job is compared file by file"
        yield Difference("git.commit", was[:_DIGEST_SHOWN], now[:_DIGEST_SHOWN], "harmless", reason)
