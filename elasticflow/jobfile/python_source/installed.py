"""Where installed packages lie, and how one that is not here comes to be."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from elasticflow.jobfile.python_source.modules import Finder

# What is installed under another name than it is imported by.
_DISTRIBUTIONS = {
    "PIL": "pillow", "bs4": "beautifulsoup4", "cv2": "opencv-python-headless",
    "skimage": "scikit-image", "sklearn": "scikit-learn", "yaml": "pyyaml",
    "pytorch_lightning": "pytorch-lightning", "dateutil": "python-dateutil", "streaming": "mosaicml-streaming",
}  # fmt: skip


def installed_places() -> tuple[Path, ...]:
    """Return the folders Python finds installed packages in; the current folder is not one of them."""
    here = Path.cwd()
    return tuple(
        Path(each) for each in dict.fromkeys(sys.path) if each and Path(each) != here and Path(each).is_dir()
    )


def install_help(top: str, finder: Finder) -> str:
    """Return how a package that is not here comes to be."""
    name = "'elasticflow[torch]'" if top == "torch" else _DISTRIBUTIONS.get(top, top)
    return f"pip install {name}; or, for code of your own, add its folder to job.path (looked in {looked_in(finder)})"


def looked_in(finder: Finder) -> str:
    """Return the folders of the job's own code, as a sentence has them."""
    return ", ".join(shown(place) for place in finder.own)


def shown(folder: Path) -> str:
    """Return a folder as seen from the current one, where it lies inside."""
    here = Path.cwd()
    return f"./{folder.relative_to(here)}".removesuffix(".") if folder.is_relative_to(here) else str(folder)
