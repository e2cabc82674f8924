"""Chapter 3. Halve every MLP of the merge by pruning, and train the smaller models back.

    python examples/field_trial/shrink.py       # after merge.py

Fitted pruning is compared with a baseline that drops the neurons with the smallest weights. Both
models are then trained back, that is, trained to recover the loss of the merge: on the merge's
logits, with the same batches and the same number of steps.
"""

from typing import Any

import torch
from story import Story, begin, head, tokens_a_second
from transformers import Trainer
from transformers.trainer_callback import PrinterCallback

from kronecker import KroneckerTrainer, PruneConfig, num_parameters, prune_
from kronecker.discovery.finding import find_mlps


def merged(story: Story) -> Any:
    """Load the merged model, which is to become smaller."""
    return story.load_model(story.models()["merged"]).eval()


def fitted(story: Story) -> Any:
    """Drop the neurons that the model needs least, and fit the others to make up for them."""
    model = merged(story)
    data = [
        {n: b[n] for n in ("input_ids", "attention_mask")}
        for b in story.batches(2 if story.given.smoke else 60)
    ]
    prune_(
        model, PruneConfig(keep=0.5), calibration=data, cache=story.out / "prune", progress=False
    )
    return model


@torch.no_grad()
def by_weights(story: Story) -> Any:
    """Keep the half of the neurons with the largest weights, without a fit."""
    model = merged(story)
    for mlp in find_mlps(model):
        *ups, down = (model.get_submodule(n) for n in (*mlp.ups, mlp.down))
        sizes = torch.stack([down.weight.norm(dim=0), *(up.weight.norm(dim=1) for up in ups)]).prod(
            0
        )
        kept = sizes.argsort()[len(sizes) // 2 :].sort().values
        down.weight = torch.nn.Parameter(down.weight[:, kept])
        for up in ups:
            up.weight = torch.nn.Parameter(up.weight[kept])
    return model


def trained_back(story: Story, model: Any) -> Any:
    """Train a model on the logits of the merged model, and return the trained model."""
    steps = 2 if story.given.smoke else 50
    rows = [{n: row[n] for n in ("input_ids", "labels")} for part in story.train for row in part]
    arguments = story.arguments(2e-4, steps, 0, weight_decay=0.0, adam_beta2=0.95)
    trainer: Trainer = KroneckerTrainer(
        model, arguments, train_dataset=rows, data_collator=story.collator, teacher=merged(story)
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return model.eval()


def main() -> None:
    story = begin(__doc__)
    if story is None:
        return
    if "merged" not in story.models():
        raise SystemExit(f"shrink: {story.out} has no merged model; run merge.py first")
    head(story)
    story.row("merged", lambda: merged(story))
    rows = {
        "half pruned": lambda: story.load_model(story.keep_model("half pruned", fitted(story))),
        "half pruned, trained back": lambda: story.load_model(
            story.keep_model(
                "half pruned, trained back", trained_back(story, loaded(story, "half pruned"))
            )
        ),
        "half by largest weights": lambda: by_weights(story),
        "half by largest weights, trained back": lambda: trained_back(story, by_weights(story)),
    }
    for name, make in rows.items():
        story.row(name, make)
    batch = next(story.batches(1))

    def worth() -> dict[str, Any]:
        whole, half = merged(story), loaded(story, "half pruned")
        counts = num_parameters(half), num_parameters(whole)
        times = tokens_a_second(half, batch), tokens_a_second(whole, batch)
        return {
            "parameters": counts[0],
            "of": counts[1],
            "tokens a second, times": round(times[0] / times[1], 2),
        }

    story.figure("shrink", "what is saved", worth)


def loaded(story: Story, stage: str) -> Any:
    """Load a stage's model."""
    return story.load_model(story.models()[stage]).eval()


if __name__ == "__main__":
    main()
