"""Commands: prune, convert, fold, compare."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from model_components._cli import ON_TERMINAL
from model_components._devices import find_device
from model_components._folders import NewFolder, check_new
from model_components._model_folders import complete_folder, find_tokenizer
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
    """Drop hidden neurons or blocks, and write a smaller stock model.

    Args:
        model: Folder or hub id of a transformers model.
        out: Folder to write; it must not exist or be empty.
        config: What goes, and how the rest makes up for it.
        calibration: Text, or .json or .jsonl of records with texts: what layers are fitted on.
        tokens: Tokens of the text to use.
        context: Tokens in a row.
        tokenizer: Folder or hub id; default: the model's own.
        device: Where to compute.
        progress: Show a progress bar.
    """
    import torch

    from .loading import calibration_of, load, tokens_of
    from .storage.checkpoints import is_compressed, smaller_card
    from .surgery.prune import prune_

    where = find_device(device, "prune")
    new = NewFolder(out, "prune", resumable=True)
    if is_compressed(model):
        raise ValueError(f"prune: {model} holds a compressed model, expected a stock one")
    loaded = load(model, where)
    stored = {n: t.dtype for n, t in (*loaded.named_parameters(), *loaded.named_buffers())}
    usual = loaded.dtype
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
        for n, tensor in (*loaded.named_parameters(), *loaded.named_buffers()):
            tensor.data = tensor.data.to(stored.get(n, usual))
        loaded.save_pretrained(new.folder)
        card = smaller_card(loaded, f"prune_(model, {config}, calibration=batches)")
        complete_folder(new.folder, card, _tokenizer(source))
    asked = ""
    if "CausalLM" in type(loaded).__name__:
        asked = f"; what it cost: model-components compare {model} {out} --text FILE"
    print(f"{out} is a stock model{asked}")
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
    """Compress a model's MLPs by low rank or Kronecker sums, and write it.

    Expects one of --preset, --b-shape and --low-rank.

    Args:
        model: Folder or hub id of a transformers model.
        out: Folder to write; it must not exist or be empty.
        preset: A name of `kronecker.PRESETS`, for GPT-2 124M.
        b_shape: Rows and columns of the second factor of Kronecker sums.
        low_rank: Share of the parameters that two thin matrices keep.
        layers: Patterns of names instead of the MLPs, such as '*embed_tokens'.
        rank: Terms of a Kronecker sum; default: 1.
        init: Where Kronecker factors start; default: sequential.
        calibration: Text, or .json or .jsonl of records with texts: what layers are fitted on.
        tokens: Tokens of the text to use.
        context: Tokens in a row.
        tokenizer: Folder or hub id; default: the model's own.
        device: Where to compute.
        progress: Show a progress bar.
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
        complete_folder(new.folder, card, _tokenizer(source))
    print(
        f"{out} holds factors: kronecker.from_pretrained loads them, fold makes a stock model of "
        "them"
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
            raise ValueError("convert: a preset names its layers itself; leave out --layers")
        return PRESETS[preset]
    config: Config
    if low_rank is not None:
        config = LowRankConfig(keep=low_rank)
    else:
        config = KroneckerConfig(b_shape=b_shape, rank=rank or 1, init=init or INITS[0])
    return dict.fromkeys(layers, config) if layers else config


def _tokenizer(source: str) -> PreTrainedTokenizerBase | None:
    found = find_tokenizer(source)
    if found is None:
        print(f"kronecker: {source} has no tokenizer to copy")
    return found


def fold(model: str, out: Path, /) -> str:
    """Write the smallest stock checkpoint of a compressed model.

    Args:
        model: Folder that convert wrote.
        out: Folder to write; it must not exist or be empty.
    """
    from .loading import load
    from .storage import checkpoints
    from .surgery.convert import num_parameters

    check_new(out, "fold")
    compressed = load(model)
    checkpoints.fold(compressed, out, tokenizer=_tokenizer(model))
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
        models: Folders, compressed or not.
        text: Text, or .json or .jsonl of records with texts; each file is a column.
        stride: Tokens between the starts of overlapping windows.
        tokens: Tokens of each text to use.
        context: Tokens in a row.
        tokenizer: Folder or hub id; default: the first model's own.
        device: Where to compute.
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
