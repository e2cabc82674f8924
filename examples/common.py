"""What the examples share: whether they can draw, said before any training starts; and making room for a result."""

import importlib.util
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any


def can_draw() -> bool:
    """Whether matplotlib is there; if not, say how to get it."""
    there = importlib.util.find_spec("matplotlib") is not None
    if not there:
        print("no plots will be drawn: they need matplotlib, pip install 'model-components[plot]'")
    return there


def save_plot(wanted: bool, path: Path, plot: Callable[[], Any]) -> str:
    """Draw into a file where it is wanted; returns what to print of it."""
    if wanted:
        plot().savefig(path)
    return str(path) if wanted else "not drawn"


def remove_earlier(folder: Path) -> None:
    """Remove a checkpoint that an earlier run of an example left; anything else in its place stays."""
    if any((folder / name).is_file() for name in ("merge_manifest.json", "adapter_config.json", "config.json")):
        shutil.rmtree(folder)
