"""The commands lora tune, lora sweep, lora show and lora merge."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from model_components._cli import ON_TERMINAL
from model_components._formats import reading
from model_components._hub import find_folder
from model_components._model_folders import load_tokenizer
from model_components._report import Report
from model_components._yaml import read_yaml

from .config import TuneConfig

if TYPE_CHECKING:
    from peft import PeftModel


def tune(
    model: str,
    rows: str,
    out: Path,
    /,
    *,
    eval_rows: str | None = None,
    judge: Literal["likelihood_gain"] | None = None,
    tune_config: TuneConfig,
    progress: bool = ON_TERMINAL,
) -> Report:
    """Tune a language model on rows of text; write an adapter, a merged model and a report.

    To continue an interrupted run, give the same command again.

    Args:
        model: Folder or hub id of a causal language model.
        rows: File or hub id of training rows. A row has the fields messages, conversations, prompt
            and completion, instruction and output, or text. A file is JSON, JSON lines, CSV or TSV
            (optionally gzipped), parquet or plain text.
        out: Output folder: a new path, or the folder of a run to continue.
        eval_rows: File or hub id of held-out rows; default: the fraction --held-out of ROWS.
        judge: Judge that scores the answers to held-out prompts. likelihood_gain measures, in nats,
            how much likelier the prompt makes the answer under the model before tuning.
        tune_config: Settings of the run.
        progress: Show progress bars; default: only on a terminal.
    """
    # imported here, because torch takes seconds to import and --help does not need it
    from .training import tune as run

    return run(
        model,
        rows,
        out=out,
        eval_rows=eval_rows,
        judge=judge,
        progress=progress,
        **tune_config.to_dict(),
    )


def sweep(
    model: str,
    rows: str,
    grid: Path,
    out: Path,
    /,
    *,
    eval_rows: str | None = None,
    judge: Literal["likelihood_gain"] | None = "likelihood_gain",
    progress: bool = ON_TERMINAL,
) -> Report:
    """Tune a model with every combination of settings in a file, and compare the runs in a table.

    To continue an interrupted sweep, give the same command again.

    Args:
        model: Folder or hub id of a causal language model.
        rows: File or hub id of training rows, as for lora tune.
        grid: YAML file that maps flags of lora tune to a value or a list of values, or a list of
            such mappings.
        out: Output folder: a new path, or the folder of a sweep to continue.
        eval_rows: File or hub id of held-out rows; default: a part of ROWS, as for lora tune.
        judge: How to score the answers to held-out prompts, as for lora tune.
        progress: Show progress bars; default: only on a terminal.
    """
    from .sweep import sweep as run

    return run(
        model,
        rows,
        read_grid(grid),
        out=out,
        eval_rows=eval_rows,
        judge=judge,
        progress=progress,
    )


def read_grid(path: Path) -> Any:
    """Return the grid in a YAML file, with underscores for the hyphens in setting names.

    Raises:
        ValueError: The file cannot be read, or does not contain a grid.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise ValueError(f"sweep: {path} cannot be read: {error}") from error
    try:
        documents = read_yaml(text)
    except ValueError as error:
        raise ValueError(f"sweep: {path} cannot be read: {error}") from error
    grid = documents[0] if len(documents) == 1 else documents
    grids = grid if isinstance(grid, list) else [grid]
    if not grids or not all(isinstance(one, dict) for one in grids):
        raise ValueError(
            f"sweep: expected a YAML mapping of flags, or a list of such mappings, in {path}, got "
            f"{grid!r:.80}"
        )
    named = [{str(k).replace("-", "_"): _numbers(v) for k, v in one.items()} for one in grids]
    if any(len(one) < len(given) for one, given in zip(named, grids, strict=True)):
        raise ValueError(
            f"sweep: expected each setting once in {path}, got one setting both with - and with _"
        )
    return named


def _numbers(value: Any) -> Any:
    """Convert strings such as 5e-4, which YAML reads as text, to numbers."""
    if isinstance(value, list):
        return [_numbers(one) for one in value]
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _load(base: Path, adapter: str, **options: Any) -> PeftModel:
    """Check an adapter, and load it with its base model, in the dtype of the model's files."""
    from transformers import AutoModelForCausalLM

    from .storage.adapters import load_lora, read_shapes

    folder = find_folder(adapter, patterns=["*adapter_*"], operation="load_lora")
    # check the adapter first, because loading the base may take minutes
    read_shapes("load_lora", folder)
    with reading(base, "load_lora"):
        model = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    return load_lora(model, folder, **options)


def show(model: str, adapter: str, /) -> Report:
    """Print an adapter's layers and ranks, and the scalings and sizes of its updates.

    Args:
        model: Folder or hub id of the base model, a causal language model.
        adapter: Folder or hub id of the adapter.
    """
    from .report.adapters import lora_report

    # loaded for training, because otherwise no parameter would count as trainable
    return lora_report(_load(find_folder(model), adapter, is_trainable=True), trained=True)


def merge(
    model: str,
    adapter: str,
    out: Path,
    /,
    *,
    dtype: str | None = None,
    max_lost: float = 0.25,
    progress: bool = ON_TERMINAL,
) -> Report:
    """Merge an adapter into its base model, and write an ordinary checkpoint.

    Args:
        model: Folder or hub id of the base model, a causal language model.
        adapter: Folder or hub id of the adapter.
        out: Output folder: a new path, or an empty folder.
        dtype: Dtype of the written weights, such as float32; default: the base model's dtype.
        max_lost: Largest fraction of the updates that may be lost to rounding. If more would be
            lost, nothing is written.
        progress: Show a progress bar; default: only on a terminal.
    """
    from model_components._folders import check_new

    from .storage.merge import merge_lora

    check_new(out, "merge_lora")
    base = find_folder(model)
    return merge_lora(
        _load(base, adapter, accelerate=False),
        out,
        dtype=dtype,
        max_lost=max_lost,
        tokenizer=load_tokenizer(base),
        progress=progress,
    )
