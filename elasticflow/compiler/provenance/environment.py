"""The environment of a launch: git, versions, machine."""

from __future__ import annotations

import contextlib
import hashlib
import platform
import re
import socket
import subprocess
import threading
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elasticflow.run_folder import RUNS
from elasticflow.system.processes import usable_cores

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_PACKAGES = ("elasticflow", "torch", "numpy", "safetensors", "fsspec")
_LIMIT_S, _SEARCH_LIMIT_S = 10.0, 3.0
_UNTRACKED_SUFFIXES = (".py", ".toml")
_MOST_UNTRACKED, _LARGEST_UNTRACKED = 1000, 1 << 20
_MOST_CHANGED = 50  # recorded names


def versions(names: Iterable[str] = ()) -> dict[str, str]:
    """Return the versions of Python, of the packages that always take part and of *names*, without absent packages."""
    by_name = {"python": platform.python_version()}
    for package in dict.fromkeys((*_PACKAGES, *names)):
        with contextlib.suppress(metadata.PackageNotFoundError):
            by_name[package] = metadata.version(package)
    return by_name


def versions_of_modules(modules: Iterable[str]) -> dict[str, str]:
    """Return the version of every distribution of the top-level *modules*; takes a tenth of a second."""
    owners = metadata.packages_distributions()
    return versions(sorted({name for module in modules for name in owners.get(module, ())}))


def git_state(project_root: Path) -> Mapping[str, Any] | None:
    """Return the state of the project's checkout; None outside of git or without git.

    `patch` is the SHA-256 over the differences from the commit, untracked sources included; None if there are none.
    The patch itself is not recorded: it may hold anything.
    """
    head = _git(project_root, "rev-parse", "HEAD", "--abbrev-ref", "HEAD")
    if head is None:
        return None
    commit, branch = head.splitlines()[:2]
    status = _git(project_root, "status", "--porcelain", "-z", "--untracked-files=no")
    changed = sorted(entry[3:] for entry in (status or "").split("\0") if entry[2:3] == " ")
    untracked = _untracked(project_root)
    return {
        "commit": commit,
        "branch": None if branch == "HEAD" else branch,
        "is_clean": status == "",
        "changed": changed[:_MOST_CHANGED],
        "patch": _patch(project_root, untracked) if changed or untracked else None,
    }


def machine() -> Mapping[str, Any]:
    """Return facts about this machine: host, system, kernel, libc, processor, GPUs and driver; loads no library."""
    try:
        system = platform.freedesktop_os_release().get("PRETTY_NAME", platform.system())
    except OSError:
        system = platform.platform()
    driver = re.search(r"Kernel Module\s+(?:for \S+\s+)?([\d.]+)", _text("/proc/driver/nvidia/version"))
    cards = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
    models = [re.search(r"Model:\s*(.+)", _text(card)) for card in cards]
    return {
        "host": socket.gethostname(),
        "os": system,
        "kernel": platform.release(),
        "libc": " ".join(platform.libc_ver()).strip() or None,
        "cpu": cpu_model(),
        "cores": usable_cores(),
        "gpus": [match[1].strip() for match in models if match],
        "driver": driver[1] if driver else None,
    }


def cpu_model() -> str:
    """Return the processor's name from the kernel."""
    match = re.search(r"model name\s*:\s*(.+)", _text("/proc/cpuinfo"))
    return match[1].strip() if match else platform.machine()


def digest_of(path: Path) -> str | None:
    """Return the SHA-256 of a file; None if the file cannot be read."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return None


def _untracked(project_root: Path) -> list[str]:
    """Return untracked sources of the project, except in run folders, which hold many generated train.py files."""
    patterns = [f":(exclude){RUNS}/", *(f"*{suffix}" for suffix in _UNTRACKED_SUFFIXES)]
    arguments = ("ls-files", "--others", "--exclude-standard", "-z", "--", *patterns)
    # git may search through all data in the folder.
    names = _git(project_root, *arguments, limit_s=_SEARCH_LIMIT_S) or ""
    return sorted(name for name in names.split("\0") if name)[:_MOST_UNTRACKED]


def _patch(project_root: Path, untracked: list[str]) -> str | None:
    """Return the digest of the diff, read piece by piece, as the diff may be as large as the checkout."""
    digest = hashlib.sha256()
    options = ("--binary", "--no-ext-diff", "--no-textconv", "--no-color")
    argv = ["git", "-C", str(project_root), "diff", "HEAD", *options]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        timer = threading.Timer(_LIMIT_S, process.kill)
        timer.start()
        assert process.stdout is not None
        while piece := process.stdout.read(1 << 20):
            digest.update(piece)
        timer.cancel()
    if process.returncode != 0:
        return None
    for name in untracked:
        path = project_root / name
        if path.is_file() and path.stat().st_size <= _LARGEST_UNTRACKED:
            digest.update(f"{name}\0{digest_of(path)}\0".encode())
    return digest.hexdigest()


def _git(folder: Path, *arguments: str, limit_s: float = _LIMIT_S) -> str | None:
    argv = ["git", "-C", str(folder), *arguments]
    try:
        # Names of files may be any bytes; a record holds them as far as they are UTF-8.
        done = subprocess.run(
            argv, capture_output=True, encoding="utf-8", errors="replace", timeout=limit_s, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _text(path: str | Path) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""
