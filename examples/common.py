"""Functions that the examples share: for plots, a progress bar with a name, and output files."""

import argparse
import importlib.util
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import PrinterCallback, ProgressCallback, Trainer


def can_draw() -> bool:
    """Return whether matplotlib is installed; if not, print how to install it."""
    there = importlib.util.find_spec("matplotlib") is not None
    if not there:
        print("no plots will be drawn: matplotlib is missing; pip install 'model-components[plot]'")
    return there


def save_plot(wanted: bool, path: Path, plot: Callable[[], Any]) -> str:
    """Save a plot if ``wanted``; return its path or "not drawn", for printing."""
    if wanted:
        plot().savefig(path)
    return str(path) if wanted else "not drawn"


class NamedProgress(ProgressCallback):
    """A progress bar that shows the name of the model, and prints no logged metrics."""

    def __init__(self, name: str):
        super().__init__()
        self.name = name

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the bar, and show the name."""
        super().on_train_begin(args, state, control, **kwargs)
        if self.training_bar is not None:
            self.training_bar.set_description(self.name)

    def on_log(self, *given: Any, **named: Any) -> None:
        """Print no metrics."""


def run_named(trainer: Trainer, name: str) -> None:
    """Train with a progress bar that shows the name."""
    for callback in (ProgressCallback, PrinterCallback):
        trainer.remove_callback(callback)
    trainer.add_callback(NamedProgress(name))
    trainer.train()


def ask_where(parser: argparse.ArgumentParser) -> None:
    """Add the options ``--out`` and ``--json``, for a plot and for the results."""
    parser.add_argument("--out", type=Path, help="a folder for the plot")
    parser.add_argument("--json", type=Path, help="a JSON file for the results")


def make_room(parser: argparse.ArgumentParser, options: argparse.Namespace) -> bool:
    """Create the folders for the options of `ask_where`; return whether to draw a plot.

    Call this function before training, so that a wrong path is found early.
    """
    if options.json is not None and options.json.is_dir():
        parser.error(f"--json: expected a file, got the folder {options.json}")
    for folder in filter(None, (options.out, options.json and options.json.parent)):
        folder.mkdir(parents=True, exist_ok=True)
    return options.out is not None and can_draw()


def save_curves(curves: Any, name: str, options: argparse.Namespace, wanted: bool) -> None:
    """Save the results of `thinker.evaluate_steps` and their plot to the files in the options."""
    if options.json is not None:
        options.json.write_text(json.dumps(curves.rows(), indent=1) + "\n", encoding="utf-8")
        print(f"results: {options.json}")
    if options.out is not None:
        print(f"plot: {save_plot(wanted, options.out / f'{name}.svg', curves.plot)}")


def remove_earlier(folder: Path) -> None:
    """Remove a checkpoint that an earlier run of an example left.

    A folder without the files of such a checkpoint is kept.
    """
    if any(
        (folder / name).is_file()
        for name in ("merge_manifest.json", "adapter_config.json", "config.json")
    ):
        shutil.rmtree(folder)
