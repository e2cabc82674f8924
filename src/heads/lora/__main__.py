"""The command line: ``python -m heads.lora merge|show``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from transformers import AutoModelForCausalLM, AutoTokenizer

from model_components._commands import run_command
from model_components._hub import find_folder

from .report.adapters import lora_report
from .storage.adapters import load_lora
from .storage.merge import merge_lora


def parser() -> argparse.ArgumentParser:
    """The arguments."""
    top = argparse.ArgumentParser(
        prog="python -m heads.lora", description="Look at LoRA adapters, and merge them."
    )
    commands = top.add_subparsers(dest="command", required=True)
    showing = commands.add_parser(
        "show", help="what an adapter holds: layers, ranks, scalings, sizes of updates"
    )
    merging = commands.add_parser(
        "merge", help="write the model with an adapter as an ordinary checkpoint"
    )
    for command in (showing, merging):
        command.add_argument("model", help="folder or hub id of the base, a causal language model")
        command.add_argument("adapter", help="folder or hub id of the adapter")
    merging.add_argument("out", help="folder to write; must not exist or be empty")
    merging.add_argument(
        "--dtype", help="of what is written, such as float32 (default: the base's)"
    )
    merging.add_argument(
        "--max-lost",
        type=float,
        default=0.25,
        help="share of an update that may be lost (default: 0.25)",
    )
    merging.add_argument("--no-progress", action="store_true", help="no progress bar")
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    options = parser().parse_args(arguments)
    return run_command("heads.lora", lambda: _run(options))


def _run(options: argparse.Namespace) -> None:
    folder = find_folder(options.model)
    base = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    if options.command == "show":
        print(lora_report(load_lora(base, options.adapter, is_trainable=True), trained=True))
        return
    model = load_lora(base, options.adapter, accelerate=False)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError):
        tokenizer = None
    print(
        merge_lora(
            model,
            options.out,
            dtype=options.dtype,
            max_lost=options.max_lost,
            tokenizer=tokenizer,
            progress=not options.no_progress,
        )
    )


if __name__ == "__main__":
    sys.exit(main())
