"""The functions behind ``merge``, ``plan``, ``learn`` and ``lora extract`` of `model-components`.

``mergekit-lite`` is a shorter command for merge and plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from model_components._cli import ON_TERMINAL, RunFlags
from model_components._report import Report

from .learning.config import LearnConfig

if TYPE_CHECKING:
    from .recipe import MergeRecipe

Pickle = Literal["weights_only"]


@dataclass(frozen=True, kw_only=True)
class Files:
    """Flags for reading and writing checkpoints.

    Args:
        max_shard_size: Largest size of one weight file, such as 5GB.
        allow_pickle: Set to weights_only to also read pickled .bin checkpoints.
        allow_incomplete: Merge models even if they lack tensors that their config implies or that
            their other layers have.
        allow_mixed: Merge models even if their configs name different architectures.
        truncate_embeddings: Cut token embeddings and heads to the smallest number of rows in any
            model. This has no effect if the recipe names a tokenizer.
    """

    max_shard_size: str = "5GB"
    allow_pickle: Pickle | None = None
    allow_incomplete: bool = False
    allow_mixed: bool = False
    truncate_embeddings: bool = False

    @property
    def allowed(self) -> dict[str, Any]:
        """The ``allow_*`` flags and ``truncate_embeddings``, as keyword arguments."""
        return {
            "allow_pickle": self.allow_pickle,
            "allow_incomplete": self.allow_incomplete,
            "allow_mixed": self.allow_mixed,
            "truncate_embeddings": self.truncate_embeddings,
        }


def merge(
    recipe: Path,
    out: Path,
    /,
    *,
    calibration: tuple[Path, ...] | None = None,
    impl: Literal["auto", "fused", "eager"] = "auto",
    seed: int = 0,
    threads: int | None = None,
    files: Files,
    trust_remote_code: bool = False,
    fresh: bool = False,
    run_flags: RunFlags,
) -> Report:
    """Merge checkpoints as a YAML recipe describes.

    The recipe is checked before the merge, and one error lists every problem.

    Args:
        recipe: YAML file.
        out: Output folder: a new path, or an empty folder.
        calibration: Data files for regmean and regmean++, one per model in the recipe's order. A
            file holds plain text, or examples as JSON, JSON lines, CSV, TSV or parquet.
        impl: fused runs compiled kernels, eager runs torch functions, and auto runs kernels if
            possible.
        seed: Random seed for methods that use random numbers.
        threads: Number of threads that kernels and torch use; default: one per core, at most 8.
        files: Flags for checkpoints.
        trust_remote_code: Also copy the model's own Python files.
        fresh: Start over instead of continuing an interrupted run of the same merge.
        run_flags: The device, and whether to show progress.
    """
    # commands import what they need when they run, so that --help is fast
    from .functional import merge_models

    report = merge_models(
        _read_recipe(recipe, files),
        out=out,
        calibration=calibration,
        device=run_flags.device,
        impl=impl,
        seed=seed,
        threads=threads,
        max_shard_size=files.max_shard_size,
        **files.allowed,
        trust_remote_code=trust_remote_code,
        fresh=fresh,
        progress=run_flags.progress,
    )
    assert isinstance(report, Report)  # not a state dict, because of `out`
    return report


def plan(recipe: Path, /, *, files: Files) -> Report:
    """Check a recipe, and print the files and the memory that the merge needs.

    Args:
        recipe: YAML file.
        files: Flags for checkpoints.
    """
    from .functional import parse_size
    from .planning import make_plan

    limit = parse_size(files.max_shard_size)
    return make_plan(_read_recipe(recipe, files), max_shard_size=limit, **files.allowed)


def _read_recipe(path: Path, files: Files) -> MergeRecipe:
    """Read a recipe.

    If the recipe is invalid, also plan its valid part, so that one error lists all problems.
    """
    from .methods import CALIBRATED
    from .planning import PlanError, make_plan
    from .recipe import RecipeError, load_recipe

    try:
        return load_recipe(path)
    except RecipeError as error:
        # methods with calibration are not planned
        if error.partial is None or error.partial.merge_method in CALIBRATED:
            raise
        problems = list(error.problems)
        try:
            make_plan(error.partial, **files.allowed)
        except PlanError as further:
            problems += further.problems
        raise PlanError(problems) from error


def learn(
    out: Path,
    /,
    *,
    components: tuple[str, ...],
    data: tuple[str, ...],
    base: str | None = None,
    learn_config: LearnConfig,
    fresh: bool = False,
    progress: bool = ON_TERMINAL,
) -> Report:
    """Train a merge of models, compare it with other merges, and write the best.

    Args:
        out: Output folder: a new path, or an empty folder.
        components: Folders, hub ids or MODEL+ADAPTER of two or more models.
        data: One data file per component: JSON, JSON lines, CSV, TSV, parquet or text.
        base: Folder or hub id of the model that the components were tuned from, for methods that
            use a base.
        learn_config: Settings of the run.
        fresh: Start over instead of continuing an interrupted run.
        progress: Show progress bars and the first example of each task; default: only on a
            terminal.
    """
    from .learning.run import learn_merge

    return learn_merge(
        components,
        data,
        out=out,
        base=base,
        fresh=fresh,
        progress=progress,
        **learn_config.to_dict(),
    )


def extract(
    model: str,
    base: str,
    out: Path,
    /,
    *,
    rank: int = 16,
    energy: float = 1.0,
    dtype: str | None = None,
    save_others: bool = False,
    allow_pickle: Pickle | None = None,
    progress: bool = ON_TERMINAL,
) -> Report:
    """Extract the LoRA adapter closest to the difference between a tuned model and its base.

    Args:
        model: Folder or hub id of the tuned model.
        base: Folder or hub id of the base model.
        out: Output folder: a new path, or an empty folder.
        rank: Largest rank of the adapter in any layer.
        energy: Fraction of the squared norm of each layer's change to keep. A layer gets the
            smallest rank that keeps this fraction, but at most --rank.
        dtype: Dtype of the adapter's weights; default: the dtype of the tuned model.
        save_others: Also save changed embeddings, heads and norms, at full size.
        allow_pickle: Set to weights_only to also read pickled .bin checkpoints.
        progress: Show a progress bar; default: only on a terminal.
    """
    from .adapters.extraction import extract_lora

    return extract_lora(
        model,
        base,
        out,
        rank=rank,
        energy=energy,
        dtype=dtype,
        save_others=save_others,
        allow_pickle=allow_pickle,
        progress=progress,
    )
