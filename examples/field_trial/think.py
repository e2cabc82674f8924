"""Chapter 5. Learn to add five-digit numbers, and add hundred-digit numbers by thinking longer.

    python examples/field_trial/think.py

Thinking longer means running more steps of the same small model. A stock transformer of about the
same size is trained on the same batches, for comparison.
"""

from typing import Any

import torch
from story import Story, begin
from transformers import LlamaConfig, LlamaForTokenClassification, set_seed

import thinker as th

LENGTHS = (5, 20, 100)


def data_of(longest: int) -> th.CurriculumDataset:
    """Return a data set of sums; an input is a row of digit pairs, the last digits first."""
    task = th.AtTokens(th.make_task("add_columns", base=10))
    return th.CurriculumDataset(
        task,
        th.Frontier(max_length=longest),
        n_step=lambda length: (1, length + 6),
        holdout=0.0,
        seed=11,
    )


def columns(batch: dict[str, Any]) -> dict[str, Any]:
    """Return the inputs of a batch that a stock model takes."""
    return {
        name: torch.as_tensor(batch[name]) for name in ("input_ids", "attention_mask", "labels")
    }


def thinks(story: Story) -> dict[str, Any]:
    """Train a `LatentThinker`, and test it with two steps for each pair of digits."""
    set_seed(11)
    data, steps = data_of(5), 20 if story.given.smoke else 2000
    config = th.ThinkerConfig(
        **data.sizes(max(LENGTHS)),
        causal=True,
        window=2,
        positions="rotary",
        hidden_size=32,
        num_heads=2,
    )
    model = th.LatentThinker(config)
    arguments = th.thinker_arguments(
        story.out / "thinker",
        max_steps=steps,
        learning_rate=4e-3,
        warmup_steps=50,
        seed=11,
        use_cpu=True,
    )
    th.ThinkerTrainer(model, arguments, train_dataset=data, step_loss=th.Reach(window=2)).train()
    found = th.evaluate_steps(
        model, data, list(LENGTHS), n_steps=lambda length: [2 * length], samples=64
    )
    rights = {row["length"]: row["symbols"] for row in found.rows()}
    return {
        "parameters": model.num_parameters(),
        **{f"right at {n}": round(rights[n], 4) for n in LENGTHS},
    }


def reads(story: Story) -> dict[str, Any]:
    """Train and test a stock transformer, which predicts all digits in one pass."""
    set_seed(11)
    data, steps = data_of(5), 20 if story.given.smoke else 2000
    sizes = data.sizes(max(LENGTHS))
    model = LlamaForTokenClassification(
        LlamaConfig(
            vocab_size=sizes["vocab_size"],
            num_labels=sizes["output_size"],
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=3,
            num_attention_heads=2,
            max_position_embeddings=128,
            pad_token_id=None,
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=steps + 1)
    for step in range(steps):
        model(**columns(data.batch(step))).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    model.eval()
    found = {}
    for length in LENGTHS:
        batch = columns(data.held_out(64, length))
        with torch.no_grad():
            said = model(batch["input_ids"], batch["attention_mask"]).logits.argmax(-1)
        asked = batch["labels"] != -100
        found[f"right at {length}"] = round(
            float((said == batch["labels"])[asked].double().mean()), 4
        )
    return {"parameters": model.num_parameters(), **found}


def main() -> None:
    story = begin(__doc__)
    if story is None:
        return
    story.figure("think", "thinks as long as it needs", lambda: thinks(story))
    story.figure("think", "a stock transformer", lambda: reads(story))


if __name__ == "__main__":
    main()
