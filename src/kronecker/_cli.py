"""The commands prune, convert, fold and compare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from model_components._cli import RunFlags
from model_components._devices import find_device
from model_components._folders import NewFolder, check_new
from model_components._model_folders import complete_folder, load_tokenizer
from model_components._report import Report

from .config import Config, Init, KroneckerConfig, LowRankConfig, PruneConfig
from .presets import PRESETS

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True)
class Reading:
    """Flags for turning text into tokens.

    Args:
        context: Length of each sequence, in tokens. It is reduced to the number of positions that
            the model has.
        tokenizer: Folder or hub id of a tokenizer; default: the one in MODEL, or in the
            first of MODELS.
    """

    context: int = 512
    tokenizer: str | None = None


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """Flags that choose a compression: a preset, a shape of B, or a fraction to keep.

    Args:
        preset: A configuration for GPT-2 124M, such as gpt2-82m. An unknown name prints the list of
            presets.
        b_shape: Rows and columns of B in the Kronecker product of A and B that replaces a weight.
        low_rank: Fraction of each weight's parameters to keep. Each weight becomes a product of two
            matrices.
        layers: Name patterns of layers to compress instead of the MLPs, such as '*embed_tokens'.
        rank: Number of Kronecker products whose sum replaces one weight.
        init: Method that computes the initial factors. sequential needs --calibration.
    """

    preset: str | None = None
    b_shape: tuple[int, int] | None = None
    low_rank: float | None = None
    layers: tuple[str, ...] = ()
    rank: int = 1
    init: Init = "sequential"

    def config(self) -> Config | Mapping[str, Config]:
        """Return the config, or the map of configs, for `convert_`.

        Raises:
            ValueError: Not exactly one of --preset, --b-shape and --low-rank is given, the preset
                is unknown, or another flag does not apply to the given one.
        """
        kinds = {
            "--preset": self.preset,
            "--b-shape": self.b_shape,
            "--low-rank": self.low_rank,
        }
        given = [flag for flag, value in kinds.items() if value is not None]
        if len(given) != 1:
            raise ValueError(
                f"convert: expected exactly one of {', '.join(kinds)}, got "
                f"{' and '.join(given) or 'none'}"
            )
        # otherwise --rank and --init would be ignored silently
        if self.b_shape is None and (self.rank != 1 or self.init != "sequential"):
            raise ValueError(
                f"convert: expected --rank and --init only with --b-shape, got them with {given[0]}"
            )
        if self.preset is not None:
            return self._preset(self.preset)
        config: Config
        if self.low_rank is not None:
            config = LowRankConfig(keep=self.low_rank)
        else:
            config = KroneckerConfig(b_shape=self.b_shape, rank=self.rank, init=self.init)
        return dict.fromkeys(self.layers, config) if self.layers else config

    def reads_data(self, config: Config | Mapping[str, Config]) -> bool:
        """Return whether `convert_` needs a calibration set for the MLPs."""
        # with --layers, convert_ decides: only it can tell which layers the patterns match
        configs = config.values() if isinstance(config, Mapping) else [config]
        return not self.layers and any(one.init == "sequential" for one in configs)

    def _preset(self, name: str) -> Config | Mapping[str, Config]:
        if name not in PRESETS:
            raise ValueError(
                f"convert: expected --preset to be one of {', '.join(PRESETS)}, got {name}"
            )
        if self.layers:
            raise ValueError(
                "convert: expected --preset without --layers, got both; a preset already names its "
                "layers"
            )
        return PRESETS[name]


def prune(
    model: str,
    out: Path,
    /,
    *,
    config: PruneConfig,
    calibration: Path,
    tokens: int | None = None,
    reading: Reading,
    fresh: bool = False,
    run_flags: RunFlags,
) -> Report:
    """Make a model smaller by removing hidden neurons or blocks.

    The result loads with transformers alone, except with --allocate influence.

    Args:
        model: Folder or hub id of a transformers model.
        out: Output folder: a new path, or an empty folder.
        config: How many neurons or blocks to drop, and how to fit the remaining ones.
        calibration: Calibration set: a text, JSON, JSON lines, CSV or TSV file, which may be
            gzipped, or a parquet file.
        tokens: Number of tokens to read from the calibration set; default: 12,000 with the method
            fast, 50,000 with the other methods.
        reading: Flags for turning text into tokens.
        fresh: Start over instead of continuing an interrupted run.
        run_flags: The device, and whether to show progress.
    """
    # imported here, so that --help does not load torch
    import torch

    from .data.text import text_batches, text_of
    from .loading import calibration_of, context_of, encoder_of, find_model, load
    from .storage.checkpoints import compressed_card, has_smaller_layers, smaller_card
    from .surgery.prune import prune_

    if tokens is None:
        tokens = 12_000 if config.chosen_method == "fast" else 50_000
    # check device, folder, text and model before loading the weights
    where = find_device(run_flags.device, "prune")
    new = NewFolder(out, "prune", resumable=True, fresh=fresh)
    text = text_of(calibration)
    found = find_model(model)
    if not found.architecture:
        raise ValueError(
            f"prune: expected an ordinary transformers model, got the compressed model {model}; "
            "run model-components fold on it first"
        )
    source = reading.tokenizer or model
    encode = encoder_of(source)
    loaded = load(found, where)
    rows = text_batches(text, encode, tokens=tokens, context=context_of([loaded], reading.context))
    with new, torch.no_grad():
        report = prune_(
            loaded,
            config,
            calibration=calibration_of(rows, loaded),
            # kept after an interruption: a repeated command continues from the parts stored there
            cache=new.place / "fitted",
            progress=run_flags.progress,
        )
        # an interrupted run may have left an incomplete result in the folder
        new.clear()
        loaded.save_pretrained(new.folder)
        call = f"prune_(model, {config}, calibration=batches)"
        is_stock = not has_smaller_layers(loaded)
        notes = _calibration_notes(rows, calibration)
        if is_stock:
            card = smaller_card(model, loaded, call, notes)
        else:
            card = compressed_card(loaded, call, notes)
        complete_folder(new.folder, card, source=model, tokenizer=_tokenizer_or_note(source))
    kind = "a stock model"
    if not is_stock:
        kind = (
            "a compressed model: load it with kronecker.from_pretrained, or run model-components "
            "fold"
        )
    print(f"{out} is {kind}{_hint_to_compare(loaded, model, out)}")
    return report


def _hint_to_compare(loaded: object, model: str, out: Path) -> str:
    """Return a hint on how to measure a language model's loss; empty for other models."""
    if "CausalLM" not in type(loaded).__name__ and "LMHead" not in type(loaded).__name__:
        return ""
    return f"; measure its loss: model-components compare {model} {out} --text FILE"


def _calibration_notes(rows: Sequence[Tensor], file: Path | None) -> list[str]:
    """Return the model card's notes on calibration; empty without a calibration file."""
    if file is None:
        return []
    return [f"Calibrated on {sum(row.numel() for row in rows):,} tokens of `{file.name}`."]


def convert(
    model: str,
    out: Path,
    /,
    *,
    conversion: Conversion,
    calibration: Path | None = None,
    tokens: int = 12_000,
    reading: Reading,
    fresh: bool = False,
    run_flags: RunFlags,
) -> Report:
    """Compress a model with low-rank or Kronecker factors.

    Give exactly one of --preset, --b-shape and --low-rank.

    Args:
        model: Folder or hub id of a transformers model.
        out: Output folder: a new path, or an empty folder.
        conversion: Flags that choose a compression.
        calibration: Calibration set: a text, JSON, JSON lines, CSV or TSV file, which may be
            gzipped, or a parquet file. Required with --preset and --low-rank, and with --b-shape if
            --init is sequential.
        tokens: Number of tokens to read from the calibration set.
        reading: Flags for turning text into tokens.
        fresh: Start over instead of continuing an interrupted run.
        run_flags: The device, and whether to show progress.
    """
    config = conversion.config()
    if calibration is None and conversion.reads_data(config):
        raise ValueError(
            "convert: expected --calibration FILE, which the sequential init needs, got none; give "
            "a file, or use --b-shape with another --init"
        )
    import torch

    from .data.text import text_batches, text_of
    from .loading import calibration_of, context_of, encoder_of, find_model, load
    from .storage.checkpoints import compressed_card, write_files
    from .surgery.convert import convert_

    where = find_device(run_flags.device, "convert")
    new = NewFolder(out, "convert", resumable=True, fresh=fresh)
    source = reading.tokenizer or model
    text = "" if calibration is None else text_of(calibration)
    found = find_model(model)
    encode = None if calibration is None else encoder_of(source)
    loaded = load(found, where)
    rows = []
    data = None
    if encode is not None:
        context = context_of([loaded], reading.context)
        rows = text_batches(text, encode, tokens=tokens, context=context)
        data = calibration_of(rows, loaded)
    with new, torch.no_grad():
        report = convert_(
            loaded,
            config,
            calibration=data,
            cache=new.place / "fitted",
            progress=run_flags.progress,
        )
        new.clear()
        write_files(loaded, new.folder)
        call = f"convert_(model, {config}, calibration=batches)"
        card = compressed_card(loaded, call, _calibration_notes(rows, calibration))
        complete_folder(new.folder, card, source=model, tokenizer=_tokenizer_or_note(source))
    print(
        f"{out} is a compressed model: load it with kronecker.from_pretrained, or run "
        f"model-components fold{_hint_to_compare(loaded, model, out)}"
    )
    return report


def _tokenizer_or_note(source: str) -> PreTrainedTokenizerBase | None:
    """Return the tokenizer of a folder or hub id, or print a note and return None."""
    found = load_tokenizer(source)
    if found is None:
        print(f"kronecker: no tokenizer could be read from {source}, so none is written")
    return found


@dataclass(frozen=True)
class FoldReport(Report):
    """The folder of a folded model, and the number of parameters before and after."""

    out: str
    compressed_parameters: int
    parameters: int

    def summary(self) -> Sequence[str]:
        """Return a line with the numbers of parameters before and after folding."""
        return (
            f"{self.out} loads with transformers alone and has {self.parameters:,} parameters; "
            f"the compressed model has {self.compressed_parameters:,} parameters",
        )


def fold(model: str, out: Path, /) -> Report:
    """Turn a compressed model into the smallest ordinary transformers checkpoint.

    Args:
        model: Folder of a model that convert wrote, or prune with --allocate influence.
        out: Output folder: a new path, or an empty folder.
    """
    from .discovery.finding import num_parameters
    from .loading import find_model, load
    from .storage import checkpoints

    check_new(out, "fold")
    compressed = load(find_model(model))
    checkpoints.fold(compressed, out, tokenizer=_tokenizer_or_note(model))
    folded = load(find_model(str(out)))
    return FoldReport(str(out), num_parameters(compressed), num_parameters(folded))


def compare(
    models: tuple[str, ...],
    /,
    *,
    text: tuple[Path, ...],
    stride: int | None = None,
    tokens: int = 12_000,
    reading: Reading,
    run_flags: RunFlags,
) -> Report:
    """Compare models by parameters, perplexity and speed.

    Args:
        models: Folders or hub ids of models, compressed or not.
        text: Held-out text files, in the formats that prune --calibration accepts. Each file gets
            its own columns of losses.
        stride: Number of tokens from the start of one window to the start of the next. It must be
            below --context, so that windows overlap; default: windows do not overlap.
        tokens: Number of tokens to read from each text.
        reading: Flags for turning text into tokens. The default tokenizer is the first model's.
            Models whose own tokenizers split the text differently cause an error.
        run_flags: The device, and whether to show progress.
    """
    import torch

    from . import report
    from .data.text import strided, text_batches, text_of
    from .loading import check_tokenizers, context_of, encoder_of, find_model, load

    where = find_device(run_flags.device, "compare")
    if not models or not text:
        raise ValueError(
            f"compare: expected one or more models and --text files, got {len(models)} models and "
            f"{len(text)} texts"
        )
    names = [file.stem for file in text]
    if len(set(names)) < len(names):
        raise ValueError(
            f"compare: expected --text files with different names (extensions aside), got "
            f"{', '.join(map(str, text))}"
        )
    texts = {file.stem: text_of(file) for file in text}
    found = {name: find_model(name) for name in models}
    encode = encoder_of(reading.tokenizer or models[0])
    check_tokenizers(models, encode, texts.values())
    loaded = {name: load(folder, where) for name, folder in found.items()}
    context = context_of([*loaded.values()], reading.context)
    columns: dict[str, Any] = {}
    for name, written in texts.items():
        columns[name] = text_batches(written, encode, tokens=tokens, context=context)
        if stride is not None:
            columns[name] = strided(columns[name], context=context, stride=stride)
    with torch.no_grad():
        return report.compare(loaded, columns, progress=run_flags.progress)
