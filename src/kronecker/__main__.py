"""The command line: ``python -m kronecker convert|plan|fold|compare``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel

from model_components._folders import NewFolder, check_new, new_file

from .compare import compare
from .config import INITS, PRESETS, KroneckerConfig, from_json, preset, to_json
from .convert import convert_
from .planning import plan
from .storage import fold, from_pretrained, is_compressed, model_class, write_files


def parser() -> argparse.ArgumentParser:
    """The arguments."""
    top = argparse.ArgumentParser(prog="python -m kronecker", description="Compress models by Kronecker sums.")
    commands = top.add_subparsers(dest="command", required=True)
    convert = commands.add_parser("convert", help="compress a model and write it")
    convert.add_argument("model", help="folder or hub id of a transformers model")
    convert.add_argument("out", help="folder to write; must not exist or be empty")
    what = convert.add_mutually_exclusive_group(required=True)
    what.add_argument("--preset", choices=PRESETS, help="for GPT-2 124M")
    what.add_argument("--plan", help="JSON file that `plan` wrote")
    what.add_argument("--b-shape", type=int, nargs=2, metavar=("O2", "I2"), help="for all MLPs")
    convert.add_argument("--rank", type=int, default=1, help="terms, with --b-shape (default: 1)")
    convert.add_argument("--init", choices=INITS, default="sequential", help="where it starts (default: sequential)")
    planning = commands.add_parser("plan", help="choose shapes for a budget of parameters")
    planning.add_argument("model", help="folder or hub id of a transformers model")
    planning.add_argument("--budget", type=int, required=True, help="parameters of the whole model")
    planning.add_argument("--out", help="JSON file to write, for convert --plan")
    folding = commands.add_parser("fold", help="write a stock dense checkpoint of a compressed model")
    folding.add_argument("model", help="folder that convert wrote")
    folding.add_argument("out", help="folder to write; must not exist or be empty")
    comparing = commands.add_parser("compare", help="parameters, perplexity and speed of models")
    comparing.add_argument("models", nargs="+", help="folders, compressed or not")
    comparing.add_argument("--calibration", required=True, help="text file")
    for command in (convert, planning):
        command.add_argument("--calibration", help="text file, for inits that look at inputs and for planning")
        command.add_argument("--no-progress", action="store_true", help="no progress bar")
    for command in (convert, planning, comparing):
        command.add_argument("--tokens", type=int, default=12_000, help="of the text to use (default: 12000)")
        command.add_argument("--context", type=int, default=512, help="tokens in a row (default: 512)")
        command.add_argument("--tokenizer", help="folder or hub id (default: the model's own)")
    return top


def load(name: str) -> PreTrainedModel:
    """A model, compressed or not, in evaluation mode and its own dtype."""
    if is_compressed(name):
        return from_pretrained(name)
    config = AutoConfig.from_pretrained(name)
    architectures = config.architectures or []
    if not architectures:
        raise ValueError(f"kronecker: {name} does not say its architecture in config.json")
    return model_class(architectures[0], "kronecker").from_pretrained(name).eval()


def tokens(options: argparse.Namespace, tokenizer: str, *models: PreTrainedModel) -> list[Tensor]:
    """Batches of token ids from the beginning of the text file, in rows that the models have positions for."""
    path, count = options.calibration, options.tokens
    positions = [getattr(m.config, "max_position_embeddings", None) for m in models]
    context = min([options.context, *(p for p in positions if p)])
    text = Path(path).read_text(encoding="utf-8", errors="replace")[: 20 * count]
    encode = AutoTokenizer.from_pretrained(tokenizer)
    made = encode(text, return_tensors="pt", verbose=False)["input_ids"][0][:count]  # pyrefly: ignore
    if len(made) < 2:
        raise ValueError(f"kronecker: {path} has {len(made)} tokens, needed some text")
    context = min(context, len(made))
    rows = made[: len(made) // context * context].view(-1, context)
    return list(rows.split(4))


def _convert(options: argparse.Namespace) -> None:
    if options.preset:
        config: object = preset(options.preset, init=options.init)
    elif options.plan:
        planned = from_json(Path(options.plan).read_text(encoding="utf-8"))
        config = {name: replace(c, init=options.init) for name, c in planned.items()}
    else:
        config = KroneckerConfig(b_shape=tuple(options.b_shape), rank=options.rank, init=options.init)
    new = NewFolder(options.out, "convert", resumable=True)
    name = options.tokenizer or options.model
    model = load(options.model)
    data = tokens(options, name, model) if options.calibration else None
    with new:
        fitted, quiet = new.place / "fitted", options.no_progress
        report = convert_(model, config, calibration=data, cache=fitted, progress=not quiet)  # pyrefly: ignore
        new.clear()
        write_files(model, new.folder)
        if (tokenizer := _tokenizer(name)) is not None:
            tokenizer.save_pretrained(new.folder)
    print(report)


def _tokenizer(name: str) -> Any:
    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError):
        print(f"kronecker: {name} has no tokenizer to copy", file=sys.stderr)
        return None


def _plan(options: argparse.Namespace) -> None:
    if not options.calibration:
        raise ValueError("plan: --calibration is missing, needed a text file")
    model = load(options.model)
    data = tokens(options, options.tokenizer or options.model, model)
    made = plan(model, budget=options.budget, calibration=data, progress=not options.no_progress)
    print(made)
    if options.out:
        with new_file(options.out, "plan") as part:
            part.write_text(to_json(made.configs) + "\n", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    options = parser().parse_args(arguments)
    try:
        if options.command == "convert":
            _convert(options)
        elif options.command == "plan":
            _plan(options)
        elif options.command == "fold":
            check_new(options.out, "fold")
            fold(load(options.model), options.out, tokenizer=_tokenizer(options.model))
        else:
            tokenizer = options.tokenizer or options.models[0]
            models = {name: load(name) for name in options.models}
            print(compare(models, tokens(options, tokenizer, *models.values())))
    except (ValueError, OSError, json.JSONDecodeError) as error:
        print(f"kronecker: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("kronecker: stopped; the same command goes on from here", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    sys.exit(main())
