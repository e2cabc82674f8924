"""Which of two answers is better, on real verdicts: pairwise_trial.json to a JSON of results and the guide's table.

Pairs of AlpacaEval's sample, judged by GPT-4, one answer always text-davinci-003's: which one is called A is drawn by
lot. Prompts are held out whole. Not timed: what is compared are verdicts. Needs the folder of real data and the MiniLM
encoder of the extra `bench`.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from heads.pairwise import (
    DeadRunError,
    Pair,
    PairwiseMetrics,
    PairwiseModel,
    PairwiseTrainer,
    davidson,
    freeze_,
    log_probabilities,
    pairwise_loss,
    pairwise_metrics,
    pairwise_report,
    read_pairs,
    swapped,
)
from tests.benchmarks.ablations import settings
from tests.benchmarks.results import RESULTS, ROOT, commit, put, today
from tests.support import real

CONFIG, FOUND = Path(__file__).parent / "pairwise_trial.json", RESULTS / "pairwise_trial.json"
GUIDE = ROOT / "docs" / "pairwise.md"
DATA = "alpaca_eval_pairs.jsonl.gz"


def real_pairs() -> list[Pair]:
    """All pairs with two answers, in a drawn order, each with A and B in a drawn order."""
    draw, found = random.Random(0), []
    for pair in read_pairs(real.data(DATA))[0]:
        if draw.random() < 0.5:
            pair = Pair(pair.prompt, pair.b, pair.a, (1, 0, 2)[pair.label], pair.writers[::-1])
        if pair.a.strip() and pair.b.strip():
            found.append(pair)
    draw.shuffle(found)
    return found


def split(pairs: list[Pair], config: dict[str, Any]) -> tuple[list[Pair], list[Pair]]:
    """Training pairs, and test pairs of other prompts."""
    prompts = sorted({pair.prompt for pair in pairs})
    held = set(random.Random(1).sample(prompts, config["held_out_prompts"]))
    train, test = ([p for p in pairs if (p.prompt in held) == which] for which in (False, True))
    return train[: config["train_pairs"]], test[: config["test_pairs"]]


def baselines(train: list[Pair], test: list[Pair]) -> list[dict[str, Any]]:
    """Verdicts from the labels' own shares, and from the answers' lengths alone, both fitted on the training pairs."""
    labels = [torch.tensor([pair.label for pair in part]) for part in (train, test)]
    shares = torch.bincount(labels[0], minlength=3).double() / len(train)
    longer = [
        torch.tensor([math.log(len(p.a)) - math.log(len(p.b)) for p in part], dtype=torch.float64)
        for part in (train, test)
    ]
    weights = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([weights], max_iter=200, line_search_fn="strong_wolfe")

    def verdicts(difference: Tensor) -> Tensor:
        return log_probabilities(davidson(weights[0] * difference, torch.zeros_like(difference), weights[1]))

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = pairwise_loss(verdicts(longer[0]), labels[0])
        loss.backward()
        return loss

    optimizer.step(closure)
    prior = shares.log().expand(len(test), 3)
    rows = []
    for name, found in (("the labels' own shares", prior), ("length alone", verdicts(longer[1]).detach())):
        turned = swapped(found) if name.startswith("the labels") else found
        made = pairwise_metrics(found, labels[1], swapped_log_probabilities=turned, length_difference=longer[1])
        rows.append({"baseline": name} | told(made))
    return rows


def told(made: PairwiseMetrics) -> dict[str, float | None]:
    """A row's numbers."""
    names = ("accuracy", "log_loss", "calibration_error", "flip_rate", "length_correlation")
    found = {name: round(getattr(made, name), 4) for name in names}
    return {name: None if math.isnan(value) else value for name, value in found.items()}


def run(setting: dict[str, Any], config: dict[str, Any], train: list[Pair], test: list[Pair]) -> dict[str, Any]:
    """Train under one setting and judge the pairs of held-out prompts."""
    from transformers import TrainingArguments, set_seed

    set_seed(setting["seed"])
    names = ("link", "append_prompt", "length_feature", "pooling")
    model = PairwiseModel.from_encoder(
        real.minilm(), max_tokens=config["max_tokens"], **{name: setting[name] for name in names}
    )
    freeze_(model, setting["freeze"])
    frozen = setting["freeze"] == "all"
    data = [model.dataset(part, progress=False) for part in (train, test)]
    with tempfile.TemporaryDirectory() as out:
        arguments = TrainingArguments(
            out, num_train_epochs=config["frozen_epochs" if frozen else "epochs"], use_cpu=True, save_strategy="no",
            per_device_train_batch_size=config["batch"], report_to="none", disable_tqdm=True, seed=setting["seed"],
            learning_rate=config["frozen_learning_rate" if frozen else "learning_rate"], logging_strategy="no",
            warmup_steps=config["warmup"],
        )  # fmt: skip
        trainer = PairwiseTrainer(
            model=model, args=arguments, train_dataset=data[0], head_lr_ratio=1.0 if frozen else config["head_lr_ratio"]
        )
        seconds, dead = time.process_time(), ""
        try:
            trainer.train()
        except DeadRunError as error:
            dead = str(error)
        seconds = time.process_time() - seconds
    made = pairwise_report(model, data[1], progress=False).metrics
    return setting | told(made) | {"dead": dead, "cpu_seconds": round(seconds), "confusion": made.confusion}


def write_table() -> None:
    """The guide's table, from the committed results."""
    if not FOUND.exists():
        return
    found = json.loads(FOUND.read_text(encoding="utf-8"))
    config = found["config"]
    lines = [
        "| link | trained | prompt | length feature | accuracy | log-loss | calibration error | flips | correlation "
        "with length |",
        "|---" * 9 + "|",
    ]

    def cells(row: dict[str, Any]) -> str:
        names = {"accuracy": ".1%", "log_loss": ".3f", "calibration_error": ".3f", "flip_rate": ".1%"}
        names |= {"length_correlation": ".2f"}
        return " | ".join("–" if row[n] is None else format(row[n], kind) for n, kind in names.items()) + " |"

    for row in found["baselines"]:
        lines.append(f"| *{row['baseline']}* | | | | {cells(row)}")
    kinds = {"none": "all", "all": "head"}
    for row in found["rows"]:
        trained = kinds.get(row["freeze"], f"above {row['freeze']}")
        choices = " | ".join("yes" if row[name] else "no" for name in ("append_prompt", "length_feature"))
        lines.append(f"| {row['link']} | {trained} | {choices} | {cells(row)}")
    error = (0.7 * 0.3 / config["test_pairs"]) ** 0.5
    text = (
        f"{config['train_pairs']} training pairs, {config['test_pairs']} pairs of {config['held_out_prompts']} other "
        f"prompts (so that one standard error of an accuracy is about {error:.1%}), "
        f"{config['max_tokens']} tokens, one seed; {config['epochs']} epoch at {config['learning_rate']:g}, and at "
        f"{config['head_lr_ratio']} times that for the head; with a frozen encoder {config['frozen_epochs']} epochs at "
        f"{config['frozen_learning_rate']:g}. Measured {found['date']} at {found['commit']}."
    )
    put(GUIDE, [*lines, "", text], "trial")


def main(arguments: list[str] | None = None) -> None:
    """Run every setting that has no result yet; write the results after each, and the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", help="not looked at: it is not timed")
    parser.parse_args(arguments)
    try:
        real.data(DATA), real.minilm()
    except real.AbsentError as error:
        print(f"pairwise_trial: skipped, {error}")
        return
    config = json.loads(CONFIG.read_text(encoding="utf-8"))
    torch.set_num_threads(1)
    train, test = split(real_pairs(), config)
    found: dict[str, Any] = {"date": today(), "commit": commit(), "config": config, "rows": []}
    held = json.loads(FOUND.read_text(encoding="utf-8")) if FOUND.exists() else found
    if held["config"] == config and held["commit"] == found["commit"]:
        found["rows"] = held["rows"]  # go on where it was interrupted
    found["baselines"] = baselines(train, test)
    for setting in settings(config):
        if not any(setting.items() <= row.items() for row in found["rows"]):
            found["rows"].append(run(setting, config, train, test))
            print(found["rows"][-1], flush=True)
            FOUND.write_text(json.dumps(found) + "\n", encoding="utf-8")
    write_table()


if __name__ == "__main__":
    main()
