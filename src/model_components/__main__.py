"""The command line: ``model-components doctor``."""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
from collections.abc import Sequence

from . import __version__
from .doctor import PACKAGES, examine, other_distributions

_SHOWN = (
    "torch",
    "transformers",
    "safetensors",
    "peft",
    "accelerate",
    "huggingface_hub",
    "numpy",
    "matplotlib",
)

_COMMANDS = """the other commands, each with --help:
  mergekit-lite               merge checkpoints, plan a merge, extract adapters, train masks
  python -m kronecker         prune, convert, fold and compare models
  python -m thinker           train a thinker on a task, evaluate it, draw what was found
  python -m heads.lora        show adapters, merge them into a checkpoint
  python -m heads.pairwise    judge pairs of answers, put answers in order, report on a judge"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status: 1 where something needs repair."""
    top = argparse.ArgumentParser(
        prog="model-components",
        description="Look whether the installation is whole.",
        epilog=_COMMANDS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"model-components {__version__}")
    commands = top.add_subparsers(dest="command", required=True)
    commands.add_parser(
        "doctor", help="versions, and packages that another distribution has overwritten"
    )
    top.parse_args(arguments)
    print(f"model-components {__version__}, Python {sys.version.split()[0]}")
    for name in _SHOWN:
        try:
            print(f"  {name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            print(f"  {name} is not installed")
    findings = examine()
    for finding in findings:
        print(finding)
    for package in PACKAGES:
        if package not in [finding.package for finding in findings] and (
            others := other_distributions(package)
        ):
            print(f"{package}: ours, but {', '.join(others)} has a package of that name, too")
    if not findings:
        print("all four packages are ours")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
