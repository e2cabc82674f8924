"""What the examples share: whether they can draw, said before training; a bar with a name.

Room for a result.
"""

import argparse
import importlib.util
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import PrinterCallback, ProgressCallback, Trainer


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


class NamedProgress(ProgressCallback):
    """Training's bar with the name of what is trained, and no figures between."""

    def __init__(self, name: str):
        super().__init__()
        self.name = name

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin a bar."""
        super().on_train_begin(args, state, control, **kwargs)
        if self.training_bar is not None:
            self.training_bar.set_description(self.name)

    def on_log(self, *given: Any, **named: Any) -> None:
        """Nothing."""


def run_named(trainer: Trainer, name: str) -> None:
    """Train, under that name."""
    for callback in (ProgressCallback, PrinterCallback):
        trainer.remove_callback(callback)
    trainer.add_callback(NamedProgress(name))
    trainer.train()


def ask_where(parser: argparse.ArgumentParser) -> None:
    """Options that say where a picture and figures go."""
    parser.add_argument("--out", type=Path, help="a folder for the picture")
    parser.add_argument("--json", type=Path, help="a file for the figures")


def make_room(parser: argparse.ArgumentParser, options: argparse.Namespace) -> bool:
    """Make the folders that `ask_where` was told, before any training.

    Whether a picture can be drawn there.
    """
    if options.json is not None and options.json.is_dir():
        parser.error(f"{options.json} is a folder; expected a file")
    for folder in filter(None, (options.out, options.json and options.json.parent)):
        folder.mkdir(parents=True, exist_ok=True)
    return options.out is not None and can_draw()


def save_curves(curves: Any, name: str, options: argparse.Namespace, wanted: bool) -> None:
    """Figures and picture of what `thinker.evaluate_steps` found, where `ask_where` was told."""
    if options.json is not None:
        options.json.write_text(json.dumps(curves.rows(), indent=1) + "\n", encoding="utf-8")
        print(f"figures: {options.json}")
    if options.out is not None:
        print(f"curves: {save_plot(wanted, options.out / f'{name}.svg', curves.plot)}")


def remove_earlier(folder: Path) -> None:
    """Remove a checkpoint that an earlier run of an example left.

    Anything else in its place stays.
    """
    if any(
        (folder / name).is_file()
        for name in ("merge_manifest.json", "adapter_config.json", "config.json")
    ):
        shutil.rmtree(folder)
