"""Chapter 2. Merge both specialists: without data, by RegMean, by training, and by mergekit.

    python examples/field_trial/merge.py        # after tune.py

Each method has the parameters that a user would try first; no parameter is tuned on the held-out
examples. If mergekit is installed (extra `bench`), both programs merge the same checkpoints by the
same TIES recipe. The next chapters use the merge with the lowest mean loss on the held-out
examples.
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

from mergekit_lite import learn_merge

BOTH = [1.0] * len(KINDS)
TIES = {"weight": 1.0, "density": 0.5}


def learned(story: Story) -> Any:
    """Train LoRA adapters of the RegMean merge on the specialists' logits; return the result."""
    folder = story.out / "models" / "learned"
    start = story.out / "models" / "regmean"
    if not start.is_dir():
        regmean(story)
    if not folder.is_dir():
        learn_merge(
            story.components,
            [story.texts(part) for part in story.train],
            out=folder,
            base=story.model,
            start=str(start),
            train="lora",
            max_steps=story.steps,
            compare=(),
            dtype="float32",
            progress=False,
        )
    return story.load_model(folder)


def regmean(story: Story) -> Any:
    """Merge in closed form, with 128 training examples of each kind."""
    calibration = [part[:128] for part in story.train]
    merged = story.merged(story.components, "regmean", calibration=calibration)
    story.keep_model("regmean", merged)
    return merged


def by_program(story: Story, command: list[str]) -> dict[str, Any]:
    """Merge both specialists by a TIES recipe, by running a program, as a user does.

    Return the mean held-out loss, in nats per token, and the program's CPU seconds.
    """
    models = [{"model": str(story.checkpoint_of(k)), "parameters": TIES} for k in range(len(KINDS))]
    told = {
        "merge_method": "ties",
        "models": models,
        "base_model": story.model,
        "dtype": "bfloat16",
    }
    recipe = story.out / "ties.yml"
    recipe.write_text(yaml.safe_dump(told), encoding="utf-8")
    with tempfile.TemporaryDirectory(dir=story.out) as folder:
        begin = cpu_seconds()
        subprocess.run([*command, str(recipe), f"{folder}/merged"], check=True, capture_output=True)
        spent = cpu_seconds() - begin
        losses = story.losses(story.load_model(Path(folder, "merged")))
    return {"loss": statistics.mean(losses), "CPU s of the merge": round(spent, 1)}


def beside_mergekit(story: Story) -> None:
    """Merge by the same recipe with both programs; print losses and CPU seconds."""
    bins = Path(sys.executable).parent
    programs = {
        "ours": [str(bins / "mergekit-lite"), "merge"],
        "mergekit": [str(bins / "mergekit-yaml")],
    }
    if importlib.util.find_spec("mergekit") is None:
        print(
            "mergekit is not installed, so its row is missing; to add it: pip install "
            "'model-components[bench]'"
        )
        programs.pop("mergekit")
    for who, command in programs.items():
        story.figure("merge", f"ties, from a recipe, {who}", partial(by_program, story, command))


def main() -> None:
    story = begin(__doc__)
    if story is None:
        return
    head(story)
    ways: dict[str, Callable[[], Any]] = {
        "average": lambda: story.merged(story.components, "linear", weight=BOTH),
        "task_arithmetic": lambda: story.merged(
            story.components, "task_arithmetic", weight=[0.7] * len(KINDS)
        ),
        "ties": lambda: story.merged(story.components, "ties", weight=BOTH, density=0.5),
        "regmean": lambda: regmean(story),
        "learn_merge": lambda: learned(story),
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
