"""Finds modules, the job's own and installed ones, without importing anything; the possible meanings of a name in them.

`importlib.util.find_spec("torch.optim")` would import torch; this looks at files only, in Python's order.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.machinery
import importlib.util
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    import ast
    from collections.abc import Iterable

_HOME = Path(__file__).parents[2]
_INSTALLED = {"site-packages", "dist-packages"}  # folders of installed packages, wherever an environment lies


class UnresolvedError(Exception):
    """Reading source does not lead from a name to its definition: the definition is missing or hidden."""


class CannotTellError(UnresolvedError):
    """Reading source does not show the answer: an extension module, a decorator, a package that is not installed."""


class NotInstalledError(CannotTellError):
    """The top-level package is neither on the job's path nor installed here."""


class NoModuleError(UnresolvedError):
    """There is no such module.

    Attributes:
        name: Dotted name of the missing module.
        package: The package that was searched.
    """

    def __init__(self, name: str, beside: list[str], package: Module) -> None:
        super().__init__(name)
        self.name = name
        self.beside = beside
        self.package = package


class Module(NamedTuple):
    """A module found by its file.

    Attributes:
        file: Source file; None for a namespace package.
        folders: Folders of its submodules; empty for a plain module.
        is_own: The module is on the job's path, not installed.
    """

    name: str
    file: Path | None
    folders: tuple[Path, ...]
    is_own: bool

    @property
    def package(self) -> str:
        """Name that relative imports start from."""
        return self.name if self.folders else self.name.rpartition(".")[0]


@dataclass(frozen=True)
class Finder:
    """Finds modules: on the job's own path first, then among installed packages."""

    own: tuple[Path, ...]
    installed: tuple[Path, ...]

    @classmethod
    def of_job(cls, project_root: Path, job_path: Iterable[str]) -> Finder:
        """Return the finder of a job whose `job.path` is relative to the project's root."""
        return cls(tuple(project_root / part for part in job_path), installed_folders())

    def has_own(self, top: str) -> bool:
        """Return whether a top-level module seems to be the job's own; a cheap check before `find`.

        An editable installation has Python look in a folder of the project, such as `src`.
        """
        editable = filter(self._is_own, self.installed)
        return any(
            (folder / f"{top}.py").is_file() or (folder / top).is_dir() for folder in (*self.own, *editable)
        )

    def within(self, folder: str) -> Finder:
        """Return the finder of a job whose path has a folder of this name instead."""
        return Finder(tuple(each / folder for each in self.own), ())

    def find(self, name: str) -> Module:
        """Return the module.

        Raises:
            NoModuleError: the package exists and has no such module.
            NotInstalledError: the top-level package does not exist here.
            CannotTellError: the module is built in or compiled.
        """
        top, *rest = name.split(".")
        if top in sys.builtin_module_names:  # before any file of that name
            raise CannotTellError(f"{top} is built into Python")
        module = self._look_for(top, top, (*self.own, *self.installed))
        if module is None and top == "elasticflow":  # it is running, however it was installed
            module = self._look_for(top, top, (_HOME,))
        if module is None:
            raise NotInstalledError(top)
        for part in rest:
            inner = self._look_for(f"{module.name}.{part}", part, module.folders)
            if inner is None:
                beside = _names_in(module.folders)
                if _may_make(module, part, beside):
                    raise CannotTellError(f"{module.name} makes its own submodules")
                self.refuse_namespace(module, part, beside)
                raise NoModuleError(f"{module.name}.{part}", beside, module)
            module = inner
        return module

    def _look_for(self, name: str, part: str, parents: tuple[Path, ...]) -> Module | None:
        """Return the module; as in Python, a folder without __init__.py counts only if no other folder has such a module."""
        namespace: list[Path] = []
        for parent in parents:
            folder = parent / part
            if (folder / "__init__.py").is_file():
                return Module(name, folder / "__init__.py", (folder,), self._is_own(parent))
            if (parent / f"{part}.py").is_file():
                return Module(name, parent / f"{part}.py", (), self._is_own(parent))
            if any((parent / f"{part}{end}").is_file() for end in _compiled()):
                raise CannotTellError(f"{name} is compiled")
            if folder.is_dir():
                namespace.append(folder)
        if not namespace:
            return None
        return Module(name, None, tuple(namespace), self._is_own(namespace[0]))

    def _is_own(self, folder: Path) -> bool:
        """Return whether a folder is of the job's own path; what is installed in a `.venv` of the project is not."""
        roots = [root for root in self.own if folder.is_relative_to(root)]
        environment = Path(sys.prefix)
        if folder.is_relative_to(environment) and any(environment.is_relative_to(root) for root in roots):
            return False
        return any(not _INSTALLED & {*folder.relative_to(root).parts} for root in roots)

    def refuse_namespace(self, module: Module, name: str, beside: list[str]) -> None:
        """Raise CannotTellError unless *name* is certainly missing in *module*.

        An installed package takes precedence over a folder of the same name without __init__.py, and an environment
        without torch is not the one that the job trains in.
        """
        import difflib  # most jobs hold no mistake

        is_sure = module.file is not None or (self.has_torch and not _has_editable_installs())
        if not is_sure and not difflib.get_close_matches(name, beside, 1):
            raise CannotTellError(
                f"{module.name} has no __init__.py: an installed package may take its place"
            )

    @property
    def has_torch(self) -> bool:
        """True if torch is installed, so that the job may train in this environment."""
        return any((folder / "torch").is_dir() for folder in self.installed)

    def names(self) -> list[str]:
        """Return the top-level modules on the job's own path."""
        return _names_in(self.own)


def is_found_by_hooks(top: str) -> bool:
    """Return whether Python finds a top-level module outside of its folders; nothing is imported.

    This covers editable installations, which setuptools finds by code of its own, and modules in archives.
    """
    archives = [each for each in sys.path if each and Path(each).is_file()]
    for finder in sys.meta_path:
        searched = archives if finder is importlib.machinery.PathFinder else None
        with contextlib.suppress(Exception):  # other people's code
            if finder.find_spec(top, searched) is not None:
                return True
    return False


def _has_editable_installs() -> bool:
    """Return whether setuptools finds packages by code of its own, which may add to any namespace."""
    return any("__editable__" in getattr(each, "__module__", "") for each in sys.meta_path)


@functools.cache
def _compiled() -> tuple[str, ...]:
    return (*importlib.machinery.EXTENSION_SUFFIXES, ".pyc")


def _may_make(module: Module, part: str, beside: list[str]) -> bool:
    """Return whether a package may make a submodule that no file has; a package like torch makes none that is a slip away."""
    import difflib  # most jobs hold no mistake

    is_slip = module.name.isidentifier() and difflib.get_close_matches(part, beside, 1, 0.8)
    return bool(
        re.search(rf"\b(?:{part}|__path__{'' if is_slip else '|sys[.]modules'})\b", source_of(module))
    )


def _names_in(folders: tuple[Path, ...]) -> list[str]:
    names = set()
    for folder in folders:
        for each in folder.iterdir() if folder.is_dir() else ():
            if each.suffix == ".py" or (each.is_dir() and each.name.isidentifier()):
                names.add(each.stem)
    return sorted(names - {"__init__", "__pycache__"})


def source_of(module: Module) -> str:
    """Return the module's source; empty for a namespace package.

    Raises:
        CannotTellError: the file cannot be read.
    """
    if module.file is None:
        return ""
    try:
        facts = module.file.stat()
        return _read(module.file, facts.st_mtime_ns, facts.st_size)
    # A file that declares an encoding that does not exist is a SyntaxError.
    except (OSError, UnicodeDecodeError, SyntaxError) as error:
        raise CannotTellError(f"{module.file} cannot be read") from error


@functools.lru_cache(maxsize=256)
def _read(file: Path, _changed: int, _size: int) -> str:
    data = file.read_bytes()
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        # Looks for the encoding that a file declares, by a module that takes milliseconds to import.
        return importlib.util.decode_source(data)


# Distributions with another name than the module they install.
_DISTRIBUTIONS = {
    "PIL": "pillow", "bs4": "beautifulsoup4", "cv2": "opencv-python-headless",
    "skimage": "scikit-image", "sklearn": "scikit-learn", "yaml": "pyyaml",
    "pytorch_lightning": "pytorch-lightning", "dateutil": "python-dateutil", "streaming": "mosaicml-streaming",
}  # fmt: skip

# Distributions with the name of their module. No other name is recommended: anybody can register a misspelling.
_SAME_NAME = frozenset(
    {
        "accelerate", "albumentations", "datasets", "diffusers", "einops", "h5py", "kornia", "lightning", "matplotlib",
        "monai", "numpy", "pandas", "peft", "pyarrow", "scipy", "sentencepiece", "timm", "tokenizers", "torchaudio",
        "torchmetrics", "torchvision", "tqdm", "transformers", "webdataset",
    }
)  # fmt: skip


def installed_folders() -> tuple[Path, ...]:
    """Return the folders of installed packages, without the current folder."""
    folders = (Path(text) for text in dict.fromkeys(sys.path) if text)
    return tuple(folder for folder in folders if folder != Path.cwd() and folder.is_dir())


def install_help(top: str, finder: Finder) -> str:
    """Return the remedy for a package that is neither on the job's path nor installed."""
    name = "'elasticflow[torch]'" if top == "torch" else _DISTRIBUTIONS.get(top)
    name = top if top in _SAME_NAME else name
    what = f"pip install {name}" if name else f"install the package that has {top}"
    return f"{what}; or, for code of your own, add its folder to job.path (looked in {looked_in(finder)})"


def looked_in(finder: Finder) -> str:
    """Return the folders of the job's own code as a comma-separated list."""
    return ", ".join(seen_from_here(folder) for folder in finder.own)


def seen_from_here(folder: Path) -> str:
    """Return a folder relative to the current one if it lies inside, else its full path."""
    if not folder.is_relative_to(Path.cwd()):
        return str(folder)
    return f"./{folder.relative_to(Path.cwd())}".removesuffix(".")


class NoAttributeError(UnresolvedError):
    """The module or class binds no such name.

    Attributes:
        beside: Callable names that the module or class does bind.
        methods: The plain methods of a class in the job's own code, which need an object of the class.
    """

    def __init__(self, module: str, name: str, beside: list[str], methods: tuple[str, ...] = ()) -> None:
        super().__init__(name)
        self.module = module
        self.name = name
        self.beside = beside
        self.methods = methods


class UnreadableModuleError(UnresolvedError):
    """A module of the job is not valid Python here."""

    def __init__(self, module: Module, error: SyntaxError) -> None:
        line = "" if error.lineno is None else f", line {error.lineno}"
        super().__init__(f"{file_seen_from_here(module)}{line}: {error.msg}")


class MadeByCallError(CannotTellError):
    """The name stands for the result of a call: `curriculum = Curriculum()`."""

    def __init__(self, module: Module, call: ast.Call) -> None:
        super().__init__("it is made by a call")
        self.module = module
        self.call = call


class MethodError(CannotTellError):
    """The name is a method, which needs an object of its class."""

    def __init__(self, owner: Definition, definition: Definition, name: str) -> None:
        super().__init__(f"{name} is a method")
        self.owner = owner
        self.definition = definition


def file_seen_from_here(module: Module) -> str:
    """Return a module's file relative to the current folder, or its full path if it lies outside."""
    assert module.file is not None  # only source has lines
    current = Path.cwd()
    return str(module.file.relative_to(current) if module.file.is_relative_to(current) else module.file)


class Definition(NamedTuple):
    """A function, class or lambda.

    Attributes:
        module: The module in whose namespace the source is read.
        num_bound: Number of positional arguments bound by `functools.partial`, or by the class of a class method.
        preset: Names of the keyword arguments bound by `functools.partial`.
    """

    module: Module
    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda
    num_bound: int = 0
    preset: tuple[str, ...] = ()

    @property
    def where(self) -> str:
        """File and line, the file relative to the current folder if it lies inside."""
        return f"{file_seen_from_here(self.module)}:{self.node.lineno}"


class PlainValue(NamedTuple):
    """Something that cannot be called, in words: "a number", "a module"."""

    words: str


Resolved = Definition | Module | PlainValue


class DottedNames(Protocol):
    """Finds the meaning of dotted names; `resolve.Resolver` implements it."""

    def dotted(self, module: Module, names: list[str]) -> Resolved:
        """Return the meaning of a dotted name inside *module*."""
