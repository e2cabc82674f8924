"""Merge two specialists by learned masks; no formula keeps both of their tasks.

Then bake the masks into an ordinary checkpoint.

Command   python examples/train_masks.py                  (this is what `make demo` runs)
Time      about 2 minutes on 2 CPU cores; nothing is downloaded
Result    the table of `merge_checkpoints.py`, whose averages keep one task and most of the
          other; below them, the masked merges in the modes accurate and efficient and the baked
          checkpoint, which keep both tasks completely; and a plot of the masks

Each example names the specialist to follow: `task` 0 is the first component. Only the masks are
trained, on the specialists' distributions over the next letter; no answer is used as a target.
"""

from pathlib import Path

from common import can_draw, remove_earlier, run_named, save_plot
from merge_checkpoints import MERGES, merge_by_formulas
from two_tasks import arguments, dataset, make_specialists, make_tokenizer, options, show

from mergekit_lite.masks import KLConfig, MaskCollator, MaskTrainer, Merger, TaskMixture


def train_masks(
    components: list[Path], data: TaskMixture, steps: int, out: Path, **config
) -> Merger:
    """Add masks to the components, and train the masks."""
    merger = Merger.from_pretrained(components, **config)
    collator = MaskCollator(pad_token_id=0)
    rate = 1e-2  # for masks: about ten times the rate for weights
    trainer = MaskTrainer(
        merger,
        arguments(out, steps, rate),
        kl=KLConfig(),
        train_dataset=data,
        data_collator=collator,
    )
    run_named(trainer, out.name)
    merger.save_masks(out / "masks.safetensors")
    return merger


def main() -> None:
    given, plots = options(__doc__), can_draw()
    print("An ancestor learns three tasks on words; two specialists of it learn one task each.")
    print(
        "They are merged by five formulas, and by masks that learn from the specialists' outputs."
    )
    models = make_specialists(given.out, given.smoke) | merge_by_formulas(given.out)
    components, tokenizer = [given.out / "reverse", given.out / "upper"], make_tokenizer()
    data = TaskMixture([dataset(tokenizer, task, 10_000) for task in ("reverse", "upper")])
    for mode in ("accurate", "efficient"):
        out = given.out / f"masks-{mode}"
        merger = train_masks(components, data, 5 if given.smoke else 200, out, mode=mode)
        models[f"masks, {mode}"] = merger, tokenizer
        if mode == "accurate":
            baked = given.out / "merged-masks"
            remove_earlier(baked)
            merger.bake(baked, progress=False)
            heat_map = save_plot(plots, out / "masks.png", merger.report().plot)
    scores = show(models | {"masks, baked": baked})
    specialists = [scores["reverse specialist"][0], scores["upper specialist"][1]]
    kept = [
        own / best if best else 0.0
        for own, best in zip(scores["masks, baked"], specialists, strict=True)
    ]
    formulas = {name: scores[name] for name in models if name in MERGES}
    best = max(formulas, key=lambda name: min(formulas[name]))
    print(
        f"\nThe formula that keeps the most of both tasks is {best}: {formulas[best][0]:.0%} and "
        f"{formulas[best][1]:.0%} accuracy."
    )
    print(f"The baked masks keep {kept[0]:.1%} and {kept[1]:.1%} of the specialists' accuracy.")
    print(
        f"The baked masks are an ordinary checkpoint in {baked}. The plot of the masks: {heat_map}."
    )
    print(
        "Next: merge your own models by formulas (docs/howto/recipe.md) or masks (docs/masks.md); "
        "for everything else see docs/which.md."
    )


if __name__ == "__main__":
    main()
