"""Chapter 2. Merge both specialists: by formulas, closed forms, learned masks, and mergekit.

    python examples/field_trial/merge.py        # after tune.py

Each method has the parameters that a user would try first; no parameter is tuned on the held-out
examples. If mergekit is installed (extra `bench`), it merges the same checkpoints by the same
recipes. The next chapters use the best merge.
"""

import importlib.util
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from story import KINDS, Story, begin, cpu_seconds, head

from mergekit_lite.masks import KLConfig, MaskTrainer, Merger, TaskMixture

BOTH = [1.0] * len(KINDS)
RECIPES: dict[str, dict[str, Any]] = {  # by mergekit's names
    "linear": {"weight": 1.0},
    "ties": {"weight": 1.0, "density": 0.5},
}


def masks(story: Story) -> Any:
    """Train a mask for each linear layer, over the change of each specialist from the base.

    The loss is the divergence from the specialists' logits.
    """
    merger = Merger.from_pretrained(story.components, base=story.model, dtype="float32")
    trainer = MaskTrainer(
        merger,
        story.arguments(1e-1, story.steps, 0),
        kl=KLConfig(coefficients="evidence"),
        train_dataset=TaskMixture(story.train, weights="tokens", seed=0),
        data_collator=story.collator,
    )
    trainer.train()
    return merger.eval().fold_()


def recipe_of(story: Story, method: str) -> Path:
    """Write a recipe that both programs can read, and return its path."""
    models = [
        {"model": str(story.checkpoint_of(k)), "parameters": RECIPES[method]}
        for k in range(len(KINDS))
    ]
    told = {"merge_method": method, "models": models, "dtype": "bfloat16"}
    if method == "ties":
        told |= {"base_model": story.model}
    file = story.out / f"{method}.yml"
    file.write_text(yaml.safe_dump(told), encoding="utf-8")
    return file


def by_program(story: Story, command: list[str], method: str) -> dict[str, Any]:
    """Merge by running a program, as a user does.

    Return the merge's held-out loss and the program's CPU seconds.
    """
    recipe = recipe_of(story, method)
    with tempfile.TemporaryDirectory(dir=story.out) as folder:
        begin = cpu_seconds()
        subprocess.run([*command, str(recipe), f"{folder}/merged"], check=True, capture_output=True)
        spent = cpu_seconds() - begin
        losses = story.losses(story.load_model(Path(folder, "merged")))
    return {"loss": statistics.mean(losses), "CPU s of the merge": round(spent, 1)}


def beside_mergekit(story: Story) -> None:
    """Merge by the same recipes with both programs; print losses and CPU seconds."""
    bins = Path(sys.executable).parent
    programs = {
        "ours": [str(bins / "mergekit-lite"), "merge"],
        "mergekit": [str(bins / "mergekit-yaml")],
    }
    if importlib.util.find_spec("mergekit") is None:
        print(
            "mergekit is not installed, so its rows are missing; to add them: pip install "
            "'model-components[bench]'"
        )
        programs.pop("mergekit")
    for method in RECIPES:
        for who, command in programs.items():
            story.figure(
                "merge",
                f"{method}, from a recipe, {who}",
                partial(by_program, story, command, method),
            )


def main() -> None:
    story = begin(__doc__)
    if story is None:
        return
    head(story)
    calibration = [part[:128] for part in story.train]
    ways: dict[str, Callable[[], Any]] = {
        "average": lambda: story.merged(story.components, "linear", weight=BOTH),
        "slerp": lambda: story.merged(story.components, "slerp", t=0.5),
        "task_arithmetic": lambda: story.merged(
            story.components, "task_arithmetic", weight=[0.7] * len(KINDS)
        ),
        "ties": lambda: story.merged(story.components, "ties", weight=BOTH, density=0.5),
        "dare_ties": lambda: story.merged(
            story.components, "dare_ties", weight=[0.7] * len(KINDS), density=0.7
        ),
        "regmean": lambda: story.merged(story.components, "regmean", calibration=calibration),
        "learned masks": lambda: masks(story),
    }
    found = {
        name: statistics.mean(story.row(name, make) or [float("inf")])
        for name, make in ways.items()
    }
    best = min(found, key=lambda name: found[name])
    if not (story.out / "models" / "merged").is_dir():
        story.keep_model("merged", ways[best]())
    print(f"best merge: {best}, in {story.out / 'models' / 'merged'}")
    beside_mergekit(story)


if __name__ == "__main__":
    main()
