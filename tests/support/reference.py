"""The reference pages of the site: every public name of a package, and what its functions give and
take beside."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import NamedTuple


class Page(NamedTuple):
    """A package's page: its heading, the guide that explains it, and names of modules inside."""

    package: str
    heading: str
    guide: str
    more: tuple[str, ...] = ()


PAGES = (
    Page(
        "mergekit_lite",
        "Merging checkpoints",
        "merging",
        (
            "adapters.report.AdapterReport",
            "layerwise.CalibratedMerge",
            "learning.config.LearnConfig",
            "learning.report.LearnReport",
            "methods.MergeMethod",
            "planning.MergePlan",
            "recipe.MergeRecipe",
            "recipe.ModelEntry",
            "recipe.Slice",
            "recipe.TokenRule",
            "recipe.TokenizerSpec",
            "report.MergeReport",
        ),
    ),
    Page(
        "mergekit_lite.masks",
        "Learned masks",
        "masks",
        (
            "constraints.constrain",
            "data.CachedTeachers",
            "losses.mask_penalty",
            "report.MaskReport",
            "report.MaskRow",
        ),
    ),
    Page(
        "kronecker",
        "Smaller models",
        "kronecker",
        (
            "data.text.strided",
            "init",
            "report.Comparison",
            "surgery.reports.ConversionReport",
            "surgery.reports.LayerReport",
            "surgery.reports.PruneReport",
            "surgery.reports.PrunedLayer",
            "training.parameters.parameter_groups",
        ),
    ),
    Page(
        "thinker",
        "Latent thinking",
        "thinker",
        (
            "curriculum.Batch",
            "flow.FlowRow",
            "losses.LastAndRandom",
            "losses.LearnedWeights",
            "losses.StepLoss",
            "report.Accuracy",
            "report.Curves",
            "report.Grid",
            "schedules.Dynamic",
            "schedules.Fixed",
            "schedules.Progressive",
            "schedules.Schedule",
            "schedules.Uniform",
            "state.Context",
            "state.ThinkerOutput",
            "state.ThinkerState",
            "state.Thought",
            "tasks.Sample",
            "tasks.TensorTask",
            "tasks.sudoku_puzzles",
            "tasks.sudoku_fill",
            "tasks.sudoku_shuffle",
            "training.CurriculumCallback",
            "training.ThinkerCallback",
            "training.parameter_groups",
        ),
    ),
    Page(
        "heads.lora",
        "LoRA",
        "lora",
        (
            "data.check_packed_examples",
            "judging.Judge",
            "report.runs.SweepReport",
            "report.runs.TuneReport",
            "report.adapters.AdapterRow",
            "report.adapters.LoraReport",
            "report.training.Spike",
            "report.training.TuningReport",
            "storage.merge.MergedLayer",
            "storage.merge.MergeReport",
            "surgery.accelerate.AccelerationReport",
            "surgery.inject.InjectionReport",
        ),
    ),
    Page(
        "heads.pairwise",
        "Which answer is better",
        "pairwise",
        (
            "data.collate.PairwiseDataset",
            "report.metrics.pairwise_metrics",
            "training.parameters.parameter_groups",
        ),
    ),
    Page(
        "model_components.testing",
        "Testing your own layers",
        "testing",
        ("counting.OperationCount", "equivalence.Judgment", "modules.ModuleReport"),
    ),
    Page("model_components", "All packages", "commands"),
)


def names(page: Page) -> list[str]:
    """What the page has, as it is imported."""
    module = importlib.import_module(page.package)
    return [f"{page.package}.{name}" for name in (*module.__all__, *page.more)]


def written_below(name: str, package: ModuleType) -> str:
    """The first line of the text below a constant, which has no docstring at run time."""
    folder = Path(str(package.__file__)).parent
    below = re.compile(rf'^{name}\b.*=.*\n"""(.+?)(?:""")?$', re.M)
    for path in sorted(folder.rglob("*.py")):
        if found := below.search(path.read_text(encoding="utf-8")):
            return found[1]
    return ""


def text(page: Page) -> str:
    """The page: a table of first lines, then each name whole, as mkdocstrings writes it."""
    lines = [
        f"# {page.heading}: `{page.package}`",
        "",
        f"What it is for, and how it works: [the guide](../{page.guide}.md).",
        "",
    ]
    lines += ["| name | purpose |", "|---|---|"]
    for name in names(page):
        home, short = name.rsplit(".", 1)
        thing = getattr(importlib.import_module(home), short)
        said = ""
        if inspect.isclass(thing) or inspect.isroutine(thing) or inspect.ismodule(thing):
            said = (inspect.getdoc(thing) or "").split("\n")[0]
        elif isinstance(thing, Mapping):
            said = ", ".join(f"`{key}`" for key in thing)
        else:
            said = written_below(short, importlib.import_module(home))
        lines.append(
            f"| [`{name.removeprefix(page.package + '.')}`][{name}] | "
            f"{said.replace('|', '&#124;')} |"
        )
    return "\n".join([*lines, "", *(f"::: {name}\n" for name in names(page))])
