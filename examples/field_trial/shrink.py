"""Chapter 3. Make the merged model smaller, and train the smaller model back.

    python examples/field_trial/shrink.py       # after merge.py

`prune_` drops neurons until 70 % of all parameters are left, and fits the remaining neurons to
compensate. Then the smaller model is trained back, that is, trained on the logits of
the merge to recover its loss.
"""

from typing import Any

from story import Story, begin, head, tokens_a_second
from transformers import Trainer
from transformers.trainer_callback import PrinterCallback

from kronecker import KroneckerTrainer, PruneConfig, num_parameters, prune_

SIZE = 0.7  # of all parameters


def merged(story: Story) -> Any:
    """Load the merged model, which is to become smaller."""
    return story.load_model(story.models()["merged"]).eval()


def calibration(story: Story) -> list[dict[str, Any]]:
    """Return 16 batches of 8 training examples (2 with --smoke), about 12,000 tokens in all."""
    return [
        {n: b[n] for n in ("input_ids", "attention_mask")}
        for b in story.batches(2 if story.given.smoke else 16)
    ]


def pruned(story: Story) -> Any:
    """Drop the neurons that the others can best replace, and fit the others to compensate."""
    model = merged(story)
    config = PruneConfig(size=SIZE, method="best")
    prune_(model, config, calibration=calibration(story), cache=story.out / "prune", progress=False)
    return model


def trained_back(story: Story, model: Any) -> Any:
    """Train a model on the logits of the merged model, and return the trained model."""
    steps = 2 if story.given.smoke else 30
    rows = [{n: row[n] for n in ("input_ids", "labels")} for part in story.train for row in part]
    arguments = story.arguments(2e-4, steps, 0, weight_decay=0.0, adam_beta2=0.95)
    trainer: Trainer = KroneckerTrainer(
        model, arguments, train_dataset=rows, data_collator=story.collator, teacher=merged(story)
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return model.eval()


def loaded(story: Story, stage: str) -> Any:
    """Load a stage's model."""
    return story.load_model(story.models()[stage]).eval()


def kept(story: Story, stage: str, model: Any) -> Any:
    """Store a stage's model, and load what was stored."""
    story.keep_model(stage, model)
    return loaded(story, stage)


def worth(story: Story) -> dict[str, Any]:
    """Return the size and the speed of the pruned model."""
    whole, small = merged(story), loaded(story, "pruned")
    batch = next(story.batches(1))
    speeds = tokens_a_second(small, batch), tokens_a_second(whole, batch)
    return {
        "parameters": num_parameters(small),
        "of": num_parameters(whole),
        "tokens a second, times": round(speeds[0] / speeds[1], 2),
    }


def main() -> None:
    story = begin(__doc__)
    if story is None:
        return
    if "merged" not in story.models():
        raise SystemExit(f"shrink: {story.out} has no merged model; run merge.py first")
    head(story)
    story.row("merged", lambda: merged(story))
    story.row("pruned", lambda: kept(story, "pruned", pruned(story)))
    after = "pruned, trained back"
    story.row(after, lambda: kept(story, after, trained_back(story, loaded(story, "pruned"))))
    story.figure("shrink", "what is saved", lambda: worth(story))


if __name__ == "__main__":
    main()
