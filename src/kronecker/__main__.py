"""The command line: ``python -m kronecker prune|convert|fold|compare``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel

from model_components._commands import GOES_ON, run_command
from model_components._devices import find_device
from model_components._folders import NewFolder, check_new, is_begun
from model_components._hub import find_folder

from .config import GRANULARITIES, INITS, Config, KroneckerConfig, LowRankConfig, PruneConfig
from .data.batches import positions_of
from .data.text import strided, text_batches, text_of
from .presets import PRESETS
from .report import compare
from .storage.checkpoints import fold, from_pretrained, is_compressed, model_class, write_files
from .surgery.convert import convert_, num_parameters
from .surgery.prune import prune_


def parser() -> argparse.ArgumentParser:
    """The arguments."""
    top = argparse.ArgumentParser(prog="python -m kronecker", description="Make models smaller.")
    commands = top.add_subparsers(dest="command", required=True)
    pruning = commands.add_parser(
        "prune", help="drop hidden neurons or blocks and write a smaller stock model"
    )
    pruning.add_argument("model", help="folder or hub id of a transformers model")
    pruning.add_argument("out", help="folder to write; must not exist or be empty")
    share = pruning.add_mutually_exclusive_group()
    share.add_argument("--keep", type=float, help="share that stays (default: 0.5)")
    share.add_argument(
        "--budget", type=int, help="parameters of the whole model, instead of --keep"
    )
    pruning.add_argument(
        "--granularity", choices=GRANULARITIES, default="neuron", help="what goes (default: neuron)"
    )
    pruning.add_argument(
        "--multiple-of", type=int, default=1, help="round sizes to this (default: 1)"
    )
    convert = commands.add_parser(
        "convert", help="compress a model's MLPs by low rank or Kronecker sums and write it"
    )
    convert.add_argument("model", help="folder or hub id of a transformers model")
    convert.add_argument("out", help="folder to write; must not exist or be empty")
    what = convert.add_mutually_exclusive_group(required=True)
    what.add_argument("--preset", choices=PRESETS, help="for GPT-2 124M")
    what.add_argument("--b-shape", type=int, nargs=2, metavar=("O2", "I2"), help="Kronecker sums")
    what.add_argument(
        "--low-rank", type=float, metavar="KEEP", help="two thin matrices of this share"
    )
    convert.add_argument(
        "--layers",
        nargs="+",
        metavar="PATTERN",
        help="these instead of the MLPs, such as '*embed_tokens'",
    )
    convert.add_argument("--rank", type=int, default=1, help="terms, with --b-shape (default: 1)")
    convert.add_argument(
        "--init", choices=INITS, help="where Kronecker factors start (default: sequential)"
    )
    folding = commands.add_parser(
        "fold", help="write the smallest stock checkpoint of a compressed model"
    )
    folding.add_argument("model", help="folder that convert wrote")
    folding.add_argument("out", help="folder to write; must not exist or be empty")
    comparing = commands.add_parser("compare", help="parameters, perplexity and speed of models")
    comparing.add_argument("models", nargs="+", help="folders, compressed or not")
    comparing.add_argument(
        "--text", required=True, nargs="+", help="files as for --calibration, each a column"
    )
    comparing.add_argument(
        "--stride", type=int, help="tokens between the starts of overlapping windows"
    )
    for command in (pruning, convert):
        command.add_argument(
            "--calibration",
            required=command is not convert,
            help="text, or .json or .jsonl of records with texts: what layers are fitted on",
        )
        command.add_argument("--no-progress", action="store_true", help="no progress bar")
    for command in (pruning, convert, comparing):
        command.add_argument("--device", default="cpu", help="where to compute (default: cpu)")
        many = 50_000 if command is pruning else 12_000
        command.add_argument(
            "--tokens", type=int, default=many, help=f"of the text to use (default: {many})"
        )
        command.add_argument(
            "--context", type=int, default=512, help="tokens in a row (default: 512)"
        )
        command.add_argument("--tokenizer", help="folder or hub id (default: the model's own)")
    return top


def load(name: str) -> PreTrainedModel:
    """A model, compressed or not, in evaluation mode and its own dtype."""
    name = str(find_folder(name, operation="kronecker"))
    if is_compressed(name):
        return from_pretrained(name)
    if Path(name, "adapter_config.json").is_file() and not Path(name, "config.json").is_file():
        raise ValueError(f"kronecker: {name} is an adapter, expected a whole model: merge it first")
    try:
        config = AutoConfig.from_pretrained(name)
    except OSError as error:
        first = str(error).splitlines()[0]
        raise ValueError(
            f"kronecker: {name} is no model's folder, nor found on the hub ({first})"
        ) from None
    architectures = config.architectures or []
    if not architectures:
        raise ValueError(f"kronecker: {name} does not say its architecture in config.json")
    try:
        loaded: Any = model_class(architectures[0], "kronecker").from_pretrained(
            name, output_loading_info=True
        )
        model, loading_info = loaded
    except Exception as error:  # whatever a damaged file or a config that was edited gives
        raise ValueError(
            f"kronecker: {name} cannot be loaded: {type(error).__name__}: {error}"
        ) from error
    for what in ("missing_keys", "mismatched_keys"):
        if loading_info[what]:
            names = sorted(map(str, loading_info[what]))
            raise ValueError(
                f"kronecker: {name} has no {names[0]} that fits its config "
                f"({len(names)} weights, which would be random)"
            )
    if unexpected := loading_info["unexpected_keys"]:
        print(
            f"kronecker: {len(unexpected)} weights in {name} are not used by the model",
            file=sys.stderr,
        )
    return model.eval()


def tokens(
    options: argparse.Namespace, file: str, tokenizer: str, *models: PreTrainedModel
) -> list[Tensor]:
    """Return batches of token ids from the beginning of a text.

    Rows are as long as the models have positions for.
    """
    context = _context(options, models)
    try:
        encode = AutoTokenizer.from_pretrained(find_folder(tokenizer))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"kronecker: {tokenizer} has no tokenizer, expected --tokenizer FOLDER"
        ) from error
    return text_batches(
        text_of(file),
        # pyrefly: ignore[not-callable]: AutoTokenizer may give None; find_folder found one
        lambda text: encode(text, verbose=False)["input_ids"],
        tokens=options.tokens,
        context=context,
    )


def calibration(
    options: argparse.Namespace, tokenizer: str, model: PreTrainedModel
) -> list[object]:
    """Batches of what layers are fitted on; an encoder-decoder reads the text on both sides."""
    rows = tokens(options, options.calibration, tokenizer, model)
    if model.config.is_encoder_decoder:
        return [{"input_ids": ids, "decoder_input_ids": ids} for ids in rows]
    return list(rows)


def _context(options: argparse.Namespace, models: Sequence[PreTrainedModel]) -> int:
    return min([options.context, *(p for m in models if (p := positions_of(m)))])


def _compare(options: argparse.Namespace) -> None:
    tokenizer = options.tokenizer or options.models[0]
    models = {name: load(name).to(options.device) for name in options.models}
    loaded = list(models.values())
    texts = {Path(f).stem: tokens(options, f, tokenizer, *loaded) for f in options.text}
    if len(texts) < len(options.text):
        raise ValueError(
            f"compare: files of one name, {', '.join(options.text)}; expected names that differ"
        )
    if options.stride is not None:
        context = _context(options, loaded)
        texts = {
            name: strided(batches, context=context, stride=options.stride)
            for name, batches in texts.items()
        }
    print(compare(models, texts if len(texts) > 1 else next(iter(texts.values()))))


def _prune(options: argparse.Namespace) -> None:
    config = PruneConfig(
        keep=options.keep,
        granularity=options.granularity,
        budget=options.budget,
        multiple_of=options.multiple_of,
    )
    new = NewFolder(options.out, "prune", resumable=True)
    name = options.tokenizer or options.model
    if is_compressed(options.model):
        raise ValueError(f"prune: {options.model} holds a compressed model, expected a stock one")
    model = load(options.model).to(options.device)
    tensors = [*model.named_parameters(), *model.named_buffers()]
    stored = model.dtype
    dtypes = {n: t.dtype for n, t in tensors}
    data = calibration(options, name, model)
    with new:
        fitted = new.place / "fitted"
        quiet = options.no_progress
        report = prune_(model.float(), config, calibration=data, cache=fitted, progress=not quiet)
        new.clear()
        for n, t in (*model.named_parameters(), *model.named_buffers()):
            t.data = t.data.to(dtypes.get(n, stored))
        model.save_pretrained(new.folder)
        if (tokenizer := _tokenizer(name)) is not None:
            tokenizer.save_pretrained(new.folder)
    print(report)
    asked = f"; what it cost: python -m kronecker compare {options.model} {options.out} --text FILE"
    print(f"{options.out} is a stock model{asked if 'CausalLM' in type(model).__name__ else ''}")


def _convert(options: argparse.Namespace) -> None:
    if options.preset and (options.rank != 1 or options.init is not None):
        raise ValueError("convert: a preset sets --rank and --init itself; leave them out")
    config: object
    if options.preset:
        config = PRESETS[options.preset]
    elif options.low_rank is not None:
        if options.rank != 1 or options.init is not None:
            raise ValueError(
                "convert: --rank and --init are of Kronecker sums, expected --low-rank alone"
            )
        config = LowRankConfig(keep=options.low_rank)
    else:
        init = options.init or "sequential"
        config = KroneckerConfig(b_shape=tuple(options.b_shape), rank=options.rank, init=init)
    if options.layers:
        if not isinstance(config, Config):
            raise ValueError("convert: a preset names its layers itself; leave out --layers")
        config = dict.fromkeys(options.layers, config)
    new = NewFolder(options.out, "convert", resumable=True)
    name = options.tokenizer or options.model
    model = load(options.model).to(options.device)
    if options.calibration:
        data = calibration(options, name, model)
    else:
        data = None
    with new:
        fitted = new.place / "fitted"
        quiet = options.no_progress
        report = convert_(model, config, calibration=data, cache=fitted, progress=not quiet)
        new.clear()
        write_files(model, new.folder)
        if (tokenizer := _tokenizer(name)) is not None:
            tokenizer.save_pretrained(new.folder)
    print(report)
    print(
        f"{options.out} holds factors: kronecker.from_pretrained loads them, fold makes a stock "
        "model of them"
    )


def _tokenizer(name: str) -> Any:
    try:
        return AutoTokenizer.from_pretrained(find_folder(name))
    except (OSError, ValueError):
        print(f"kronecker: {name} has no tokenizer to copy", file=sys.stderr)
        return None


def _fold(options: argparse.Namespace) -> None:
    check_new(options.out, "fold")
    model = load(options.model)
    fold(model, options.out, tokenizer=_tokenizer(options.model))
    print(
        f"{options.out} is a stock model of {num_parameters(load(options.out)):,} parameters, "
        f"{num_parameters(model):,} in {options.model}"
    )


COMMANDS = {"prune": _prune, "convert": _convert, "fold": _fold, "compare": _compare}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    options = parser().parse_args(arguments)

    def work() -> None:
        options.device = find_device(getattr(options, "device", "cpu"), options.command)
        COMMANDS[options.command](options)

    out = getattr(options, "out", None)
    return run_command("kronecker", work, kept=lambda: GOES_ON if out and is_begun(out) else "")


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    sys.exit(main())
