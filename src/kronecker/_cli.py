"""Commands: prune, convert, fold, compare."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from model_components._cli import ON_TERMINAL
from model_components._devices import find_device
from model_components._folders import NewFolder, check_new
from model_components._model_folders import complete_folder, load_tokenizer
from model_components._report import Report

from .config import INITS, Config, KroneckerConfig, LowRankConfig, PruneConfig
from .presets import PRESETS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def prune(
    model: str,
    out: Path,
    /,
    *,
    config: PruneConfig,
    calibration: Path,
    tokens: int = 50_000,
    context: int = 512,
    tokenizer: str | None = None,
    device: str = "cpu",
    progress: bool = ON_TERMINAL,
) -> Report:
    """Make a model smaller by removing hidden neurons or blocks.

    The result loads with transformers alone.

    Args:
        model: Folder or hub id of a transformers model.
        out: Output folder: a new path, or an empty folder.
        config: What goes, and how the rest makes up for it.
        calibration: Calibration set: a file of text, JSON, JSON lines, CSV, TSV or parquet, also
            gzipped.
        tokens: Number of tokens to read from the text.
        context: Length of each sequence, in tokens.
        tokenizer: Folder or hub id; default: the model's own.
        device: Device that computes, such as cpu or cuda.
        progress: Show a progress bar; default: only on a terminal.
    """
    import torch

    from .loading import calibration_of, load, tokens_of
    from .storage.checkpoints import is_compressed, smaller_card
    from .surgery.prune import prune_

    where = find_device(device, "prune")
    new = NewFolder(out, "prune", resumable=True)
    if is_compressed(model):
        raise ValueError(
            f"prune: expected an ordinary transformers model, got the compressed model {model}"
        )
    loaded = load(model, where)
    # prune_ computes in float32; afterwards each tensor gets the dtype that it was loaded in
    tensors = (*loaded.named_parameters(), *loaded.named_buffers())
    loaded_dtypes = {name: tensor.dtype for name, tensor in tensors}
    model_dtype = loaded.dtype
    source = tokenizer or model
    rows = tokens_of(calibration, source, [loaded], tokens=tokens, context=context)
    with new, torch.no_grad():
        report = prune_(
            loaded.float(),
            config,
            calibration=calibration_of(rows, loaded),
            cache=new.place / "fitted",
            progress=progress,
        )
        new.clear()
        for name, tensor in (*loaded.named_parameters(), *loaded.named_buffers()):
            tensor.data = tensor.data.to(loaded_dtypes.get(name, model_dtype))
        loaded.save_pretrained(new.folder)
        card = smaller_card(loaded, f"prune_(model, {config}, calibration=batches)")
        complete_folder(new.folder, card, _tokenizer_or_note(source))
    hint = ""
    if "CausalLM" in type(loaded).__name__:
        hint = f"; measure its loss: model-components compare {model} {out} --text FILE"
    print(f"{out} is a stock model{hint}")
    return report


def convert(
    model: str,
    out: Path,
    /,
    *,
    preset: str | None = None,
    b_shape: tuple[int, int] | None = None,
    low_rank: float | None = None,
    layers: tuple[str, ...] = (),
    rank: int | None = None,
    init: Literal["sequential", "van_loan", "van_loan_normalized", "prune", "random"] | None = None,
    calibration: Path | None = None,
    tokens: int = 12_000,
    context: int = 512,
    tokenizer: str | None = None,
    device: str = "cpu",
    progress: bool = ON_TERMINAL,
) -> Report:
    """Compress a model with low-rank or Kronecker factors.

    Give exactly one of --preset, --b-shape and --low-rank.

    Args:
        model: Folder or hub id of a transformers model.
        out: Output folder: a new path, or an empty folder.
        preset: A configuration for GPT-2 124M, such as gpt2-82m. An unknown name prints the list.
        b_shape: Rows and columns of B in the Kronecker product A x B that replaces a weight.
        low_rank: Fraction of each weight's parameters to keep, as a product of two matrices.
        layers: Name patterns of layers to compress instead of the MLPs, such as '*embed_tokens'.
        rank: Number of Kronecker products that are added for one weight; default: 1.
        init: Method that computes the first factors; default: sequential, which needs
            --calibration.
        calibration: Calibration set: a file of text, JSON, JSON lines, CSV, TSV or parquet, also
            gzipped.
        tokens: Number of tokens to read from the text.
        context: Length of each sequence, in tokens.
        tokenizer: Folder or hub id; default: the model's own.
        device: Device that computes, such as cpu or cuda.
        progress: Show a progress bar; default: only on a terminal.
    """
    config = _conversion(preset, b_shape, low_rank, layers, rank, init)
    import torch

    from .loading import calibration_of, load, tokens_of
    from .storage.checkpoints import smaller_card, write_files
    from .surgery.convert import convert_

    where = find_device(device, "convert")
    new = NewFolder(out, "convert", resumable=True)
    loaded = load(model, where)
    source = tokenizer or model
    data = None
    if calibration is not None:
        rows = tokens_of(calibration, source, [loaded], tokens=tokens, context=context)
        data = calibration_of(rows, loaded)
    with new, torch.no_grad():
        report = convert_(
            loaded, config, calibration=data, cache=new.place / "fitted", progress=progress
        )
        new.clear()
        write_files(loaded, new.folder)
        card = smaller_card(loaded, f"convert_(model, {config}, calibration=batches)")
        complete_folder(new.folder, card, _tokenizer_or_note(source))
    print(
        f"{out} is a compressed model: load it with kronecker.from_pretrained, or run "
        "model-components fold"
    )
    return report


def _conversion(
    preset: str | None,
    b_shape: tuple[int, int] | None,
    low_rank: float | None,
    layers: tuple[str, ...],
    rank: int | None,
    init: str | None,
) -> Config | Mapping[str, Config]:
    """Return what `convert_` is to do, from the flags.

    Raises:
        ValueError: Not exactly one of the three kinds, or a flag that belongs to another kind.
    """
    kinds = {"--preset": preset, "--b-shape": b_shape, "--low-rank": low_rank}
    given = [flag for flag, value in kinds.items() if value is not None]
    if len(given) != 1:
        raise ValueError(
            f"convert: expected one of {', '.join(kinds)}, got {' and '.join(given) or 'none'}"
        )
    if b_shape is None and (rank is not None or init is not None):
        raise ValueError(f"convert: --rank and --init belong to --b-shape, got {given[0]}")
    if preset is not None:
        if preset not in PRESETS:
            raise ValueError(f"convert: --preset must be one of {', '.join(PRESETS)}, got {preset}")
        if layers:
            raise ValueError(
                "convert: expected --preset without --layers (it names its layers), got both"
            )
        return PRESETS[preset]
    config: Config
    if low_rank is not None:
        config = LowRankConfig(keep=low_rank)
    else:
        config = KroneckerConfig(b_shape=b_shape, rank=rank or 1, init=init or INITS[0])
    return dict.fromkeys(layers, config) if layers else config


def _tokenizer_or_note(source: str) -> PreTrainedTokenizerBase | None:
    """Load the tokenizer of a folder or hub id; print a note if there is none."""
    found = load_tokenizer(source)
    if found is None:
        print(f"kronecker: {source} has no tokenizer, so none is written")
    return found


def fold(model: str, out: Path, /) -> str:
    """Turn a model that convert wrote into the smallest ordinary transformers checkpoint.

    Args:
        model: Folder that convert wrote.
        out: Output folder: a new path, or an empty folder.
    """
    from .loading import load
    from .storage import checkpoints
    from .surgery.convert import num_parameters

    check_new(out, "fold")
    compressed = load(model)
    checkpoints.fold(compressed, out, tokenizer=_tokenizer_or_note(model))
    return (
        f"{out} is a stock model of {num_parameters(load(str(out))):,} parameters, "
        f"{num_parameters(compressed):,} in {model}"
    )


def compare(
    models: tuple[str, ...],
    /,
    *,
    text: tuple[Path, ...],
    stride: int | None = None,
    tokens: int = 12_000,
    context: int = 512,
    tokenizer: str | None = None,
    device: str = "cpu",
) -> Report:
    """Compare models by parameters, perplexity and speed.

    Args:
        models: Folders or hub ids of models, compressed or not.
        text: Held-out texts, in the formats of --calibration. Each file becomes a column.
        stride: Tokens between the starts of overlapping windows.
        tokens: Number of tokens to read from each text.
        context: Length of each sequence, in tokens.
        tokenizer: Folder or hub id; default: the first model's own.
        device: Device that computes, such as cpu or cuda.
    """
    import torch

    from . import report
    from .data.text import strided
    from .loading import context_of, load, tokens_of

    where = find_device(device, "compare")
    if not models or not text:
        raise ValueError(
            f"compare: expected models and --text, got {len(models)} models, {len(text)} texts"
        )
    names = [file.stem for file in text]
    if len(set(names)) < len(names):
        raise ValueError(
            f"compare: expected text files whose names differ, got {', '.join(map(str, text))}"
        )
    loaded = {name: load(name, where) for name in models}
    source = tokenizer or models[0]
    every = list(loaded.values())
    texts = {}
    for file in text:
        batches = tokens_of(file, source, every, tokens=tokens, context=context)
        if stride is not None:
            batches = strided(batches, context=context_of(every, context), stride=stride)
        texts[file.stem] = batches
    with torch.no_grad():
        return report.compare(loaded, texts if len(texts) > 1 else next(iter(texts.values())))
