"""Chapter 1. Tune two LoRA specialists, and measure the time that our LoRA forward saves.

    python examples/field_trial/tune.py

One specialist is tuned to edit a text, the other to write one. The baseline is peft. Our model is
peft's with another forward, so the losses are the same and only the time differs. The steps of the
two are timed alternately.
"""

import statistics
from typing import Any

from peft import get_peft_model
from story import KINDS, Story, begin, head, seconds_of

from heads.lora import prepare_lora


def steps_in_turn(story: Story) -> dict[str, Any]:
    """Time training steps of peft's forward and of ours, with the same adapter and batches."""
    ways = {"peft": get_peft_model, "ours": prepare_lora}
    models = {
        name: make(story.load_model(story.model), story.lora()) for name, make in ways.items()
    }
    models["ours"].load_state_dict(models["peft"].state_dict())
    times: dict[str, list[float]] = {name: [] for name in ways}
    losses: dict[str, list[float]] = {name: [] for name in ways}
    for batch in story.batches(2 if story.given.smoke else 9):
        for name, model in models.items():
            model.zero_grad()
            kept: list[Any] = []

            def step(model: Any = model, batch: Any = batch, kept: list[Any] = kept) -> None:
                kept.append(model(**batch).loss)
                kept[0].backward()

            times[name].append(seconds_of(step))
            losses[name].append(float(kept[0].detach()))
    ours, theirs = (statistics.median(times[name][1:]) for name in ("ours", "peft"))
    apart = max(abs(a - b) for a, b in zip(losses["ours"], losses["peft"], strict=True))
    return {
        "seconds a step": round(ours, 3),
        "of peft's": round(ours / theirs, 3),
        "losses apart": float(apart),
    }


def main() -> None:
    story = begin(__doc__)
    if story is None:
        return
    head(story)
    story.row("base", lambda: story.load_model(story.model))
    rows = [
        story.row(f"specialist {kind}", lambda k=k: story.specialist(k))
        for k, kind in enumerate(KINDS)
    ]
    if not story.given.smoke:
        story.check_specialists([row for row in rows if row is not None])
    story.figure("tune", "a step of training", lambda: steps_in_turn(story))


if __name__ == "__main__":
    main()
