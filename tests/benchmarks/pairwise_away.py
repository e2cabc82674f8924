"""How sure a judge is away from home: judges of AlpacaEval pairs on models, and on data, that
training has not seen.

Frozen MiniLM of four layers, the antisymmetric head, three seeds. Away are two models that answer
in no training pair (on prompts that no training pair has), people's choices between harmless
answers (hh-rlhf), and answers beside more or less polite rewrites. The same head's verdicts as they are, divided by a
temperature from held-out pairs, and with `fit_uncertainty_` by the same pairs; with all training
pairs and with a part of them. Beside gradient-boosted trees on surface features, and the mean of both.
Also the judge after `fit_uncertainty_` and `calibrate_` on 100 pairs of each test, with its figures
on the other pairs of that test.
Not timed.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import random
import statistics
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import EarlyStoppingCallback, set_seed

from heads.pairwise import (
    Pair,
    PairwiseModel,
    PairwiseTrainer,
    baseline_verdicts,
    calibrate_,
    fit_uncertainty_,
    freeze_,
    predict_pairs,
    split_pairs,
)
from heads.pairwise.data.collate import PairwiseDataset
from heads.pairwise.report.baselines import BASELINES
from heads.pairwise.report.metrics import pairwise_metrics
from tests.benchmarks.pairwise_trial import EVERYWHERE, real_pairs, training_arguments
from tests.benchmarks.pictures import dot_plot
from tests.benchmarks.results import RESULTS, ROOT, commit, put, today
from tests.support import real

FOUND = RESULTS / "pairwise_away.json"
GUIDE, FEATURES = ROOT / "docs" / "pairwise.md", Path(__file__).parent / "work" / "features"
SEEDS = (0, 1, 2)
HELD_MODELS, HELD_PROMPTS, MOST = 2, 150, 800  # pairs of each foreign set
OWN = 100  # pairs of the test's own source, for `calibrate_`
WAYS = ("plain", "temperature", "fit_uncertainty_", "own pairs", "with trees")
SHORT = {
    "home": "prompts never seen",
    "models": "models never seen",
    "people": "hh-rlhf",
    "polite": "rewrites",
}
DRAWN = {
    "plain": "judge",
    "temperature": "+ calibrate_",
    "fit_uncertainty_": "+ fit_uncertainty_",
    "own pairs": f"+ {OWN} own pairs",
}
PLOT = ROOT / "docs" / "judges.svg"
FEWER = 1200  # training pairs
WORDS = {
    "home": "AlpacaEval, prompts never seen",
    "models": "AlpacaEval, prompts and two models never seen",
    "people": "hh-rlhf, people's choices of the less harmful answer",
    "polite": "an answer and its rewrite, of which the more polite is right",
}


def labeled(rows: Iterable[tuple[str, str, str]]) -> list[Pair]:
    """Rows of prompt, better and worse answer as pairs, each in a drawn order."""
    draw = random.Random(0)
    pairs = []
    for prompt, better, worse in rows:
        if draw.random() < 0.5:
            pairs.append(Pair(prompt, better, worse, 0, (None, None)))
        else:
            pairs.append(Pair(prompt, worse, better, 1, (None, None)))
    return pairs[:MOST]


def of_people() -> list[Pair]:
    """Dialogues that differ in their last answer."""
    rows = []
    with gzip.open(
        real.data("hh-rlhf_harmless-base_test.jsonl.gz"), "rt", encoding="utf-8"
    ) as file:
        for line in file:
            row = json.loads(line)
            before, _, better = row["chosen"].rpartition("\n\nAssistant:")
            other, _, worse = row["rejected"].rpartition("\n\nAssistant:")
            if before == other and better.strip() and worse.strip():
                rows.append((before.strip(), better.strip(), worse.strip()))
    return labeled(rows)


def of_tone() -> list[Pair]:
    """Instructions with the chosen and the rejected rewrite of one answer."""
    text = real.data("rasbt_instruction-data-with-preference.json").read_text(encoding="utf-8")
    rows = []
    for row in json.loads(text):
        prompt = f"{row['instruction']}\n{row['input']}".strip()
        if row["chosen"].strip() != row["rejected"].strip():
            rows.append((prompt, row["chosen"], row["rejected"]))
    return labeled(rows)


def sets() -> dict[str, list[Pair]]:
    """Pairs to train on, to choose the epoch and the temperature, and of each test."""
    pairs = real_pairs()
    writers = sorted({w for pair in pairs for w in pair.writers if w and w != EVERYWHERE})
    unseen = set(random.Random(5).sample(writers, HELD_MODELS))
    prompts = sorted({pair.prompt for pair in pairs}, key=str)
    held = set(random.Random(1).sample(prompts, HELD_PROMPTS))
    rest = [p for p in pairs if p.prompt not in held and not unseen & set(p.writers)]
    train, epoch, temperature = split_pairs(rest, (0.8, 0.1, 0.1), seed=0)
    home = [p for p in pairs if p.prompt in held and not unseen & set(p.writers)]
    models = [p for p in pairs if p.prompt in held and unseen & set(p.writers)]
    return {
        "train": train,
        "epoch": epoch,
        "temperature": temperature,
        "home": home,
        "models": models,
        "people": of_people(),
        "polite": of_tone(),
    }


def train(model: PairwiseModel, data: dict[str, PairwiseDataset], seed: int, epochs: int) -> None:
    """Train the head on features of the frozen encoder."""
    with tempfile.TemporaryDirectory() as folder:
        PairwiseTrainer(
            model=model,
            args=training_arguments(folder, epochs=epochs, batch=64, rate=1e-3, seed=seed),
            train_dataset=data["train"],
            eval_dataset=data["epoch"],
            head_lr_ratio=1.0,
            callbacks=[EarlyStoppingCallback(3)],
        ).train()


def verdicts_of(model: PairwiseModel, data: PairwiseDataset) -> Tensor:
    """Log-probabilities of a model."""
    return predict_pairs(model, data, progress=False).log_probabilities


def figures(verdicts: Tensor, pairs: Sequence[Pair]) -> dict[str, float]:
    """Accuracy, log-loss and calibration error of log-probabilities."""
    metrics = pairwise_metrics(verdicts, [pair.label for pair in pairs])
    return {
        "accuracy": round(metrics.accuracy, 4),
        "log_loss": round(metrics.log_loss, 4),
        "calibration_error": round(metrics.calibration_error, 4),
    }


def on_own_pairs(model: Any, data: PairwiseDataset, seed: int) -> dict[str, float]:
    """The figures on a test's other pairs after `calibrate_` on 100 pairs of the test.

    The temperature is 1 again afterwards.
    """
    order = random.Random(seed).sample(range(len(data)), len(data))
    own, others = ([data.pairs[i] for i in part] for part in (order[:OWN], order[OWN:]))
    sets_of_both = [model.dataset(part, progress=False) for part in (own, others)]
    for one in sets_of_both:
        one.encode_(model, cache=FEATURES, progress=False)
    calibrate_(model, sets_of_both[0], progress=False)
    found = figures(verdicts_of(model, sets_of_both[1]), others)
    model.head.temperature.fill_(1.0)
    return found


def run(
    seed: int, pairs: dict[str, list[Pair]], trees: dict[str, Tensor], *, epochs: int
) -> dict[str, Any]:
    """One head's figures on every test, in every way."""
    set_seed(seed)
    # the settings of `JudgeConfig`
    model: Any = PairwiseModel.from_encoder(
        real.minilm(), dtype=torch.float32, depth=4, ties=False, dropout=0.3, max_tokens=512
    )
    freeze_(model, "all")
    data = {name: model.dataset(part, progress=False) for name, part in pairs.items()}
    for one in data.values():
        one.encode_(model, cache=FEATURES, progress=False)
    train(model, data, seed, epochs)
    rows: dict[str, Any] = {way: dict.fromkeys(WORDS) for way in WAYS}
    for way in WAYS:
        if way == "temperature":
            rows["T"] = round(calibrate_(model, data["temperature"], progress=False).temperature, 3)
        if way == "fit_uncertainty_":
            # instead of the temperature
            model.head.temperature.fill_(1.0)
            rows["precision"] = fit_uncertainty_(
                model, data["train"], data["temperature"]
            ).precision
        for name in WORDS:
            if way == "own pairs":
                rows[way][name] = on_own_pairs(model, data[name], seed)
                continue
            verdicts = verdicts_of(model, data[name])
            # the model is as the way before has left it, after `fit_uncertainty_`
            if way == "with trees":
                verdicts = ((verdicts + trees[name]) / 2).log_softmax(-1)
            rows[way][name] = figures(verdicts, pairs[name])
    return {"seed": seed, **rows}


def fewer(pairs: dict[str, list[Pair]]) -> dict[str, list[Pair]]:
    """Pairs of which only a part trains and calibrates."""
    share = FEWER // 8
    few = {"train": FEWER, "epoch": share, "temperature": share}
    return {name: part[: few.get(name, len(part))] for name, part in pairs.items()}


def write_table() -> None:
    """Write the guide's table."""
    found = json.loads(FOUND.read_text(encoding="utf-8"))
    lines = [
        "| judged | pairs | trained on | accuracy | plain | temperature | `fit_uncertainty_` | "
        f"`calibrate_` on {OWN} own pairs | with trees | trees |",
        "|---" * 10 + "|",
    ]
    for name, words in WORDS.items():
        for size, part in found["sizes"].items():
            runs = part["runs"]
            shares = [one["plain"][name]["accuracy"] for one in runs]
            cells = [words, str(found["pairs"][name]), f"{int(size):,}"]
            cells.append(f"{statistics.median(shares):.1%}")
            for way in WAYS:
                losses = [one[way][name]["log_loss"] for one in runs]
                span = f"{min(losses):.3f} to {max(losses):.3f}"
                cells.append(f"{statistics.median(losses):.3f} ({span})")
            cells.append(f"{part['trees'][name]:.3f}")
            lines.append(f"| {' | '.join(cells)} |")
    note = (
        "The last six columns are log-losses; always saying one half has 0.693. Of the judge: the "
        f"median (and range) of {len(SEEDS)} seeds, as trained, after `calibrate_`, and after "
        "`fit_uncertainty_` without `calibrate_`; the accuracy is the median of the seeds, and is the "
        f"same in these three columns. `calibrate_` on {OWN} own pairs: after `fit_uncertainty_`, the "
        f"temperature is fitted to {OWN} pairs of the row's test set, drawn anew for each seed; the "
        "log-loss is that on the test set's other pairs. Trees: boosted "
        "trees on style, one fit. With trees: the mean of the log-probabilities of the judge after "
        "`fit_uncertainty_` and of the trees, normalized. Frozen MiniLM, four layers. Measured "
        f"{found['date']} at {found['commit']}."
    )
    put(GUIDE, [*lines, "", note], "away")
    draw(found)


def draw(found: dict[str, Any]) -> None:
    """Draw the log-losses of the judge and of the trees on each test, of the most training pairs."""
    part = found["sizes"][max(found["sizes"], key=int)]
    cells: dict[str, dict[str, float]] = {}
    for name in WORDS:
        losses = {
            label: statistics.median(one[way][name]["log_loss"] for one in part["runs"])
            for way, label in DRAWN.items()
        }
        cells[SHORT[name]] = losses | {"trees on style and length": part["trees"][name]}
    dot_plot(PLOT, {"log-loss (dotted: always saying one half)": cells}, line=math.log(2))


def measured(pairs: dict[str, list[Pair]], *, smoke: bool) -> dict[str, Any]:
    """Every seed's figures, and the trees'."""
    seen = [*pairs["train"], *pairs["epoch"], *pairs["temperature"]]
    verdicts = {
        name: baseline_verdicts(seen, pairs[name], classes=2)[BASELINES[-1]] for name in WORDS
    }
    trees = {name: figures(one, pairs[name])["log_loss"] for name, one in verdicts.items()}
    seeds = SEEDS[:1] if smoke else SEEDS
    runs = [run(seed, pairs, verdicts, epochs=1 if smoke else 8) for seed in seeds]
    print(json.dumps({"trees": trees, "runs": runs}, indent=1), flush=True)
    return {"trees": trees, "runs": runs}


def main(arguments: list[str] | None = None) -> None:
    """Run every seed with all pairs and with fewer; write results and the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", help="not looked at: it is not timed")
    parser.add_argument("--smoke", action="store_true", help="few pairs; nothing is written")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    pairs = sets()
    if options.smoke:
        measured({name: part[:40] for name, part in pairs.items()}, smoke=True)
        return
    sizes = {}
    for part in (pairs, fewer(pairs)):
        sizes[str(len(part["train"]))] = measured(part, smoke=False)
    found = {
        "date": today(),
        "commit": commit(),
        "pairs": {name: len(part) for name, part in pairs.items()},
        "sizes": sizes,
    }
    FOUND.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    write_table()


if __name__ == "__main__":
    main()
