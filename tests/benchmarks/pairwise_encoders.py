"""What training the encoder is worth to a judge: MiniLM frozen, with the upper two layers trained,
with all trained, and with LoRA, on the same pairs and tests as in `pairwise_away`; beside other
libraries' ways to train it (`pairwise_rivals`).

Each way's rate is chosen by the log-loss of seed 0 on the pairs that also choose the epoch. Every
judge of ours gets `fit_uncertainty_` and `calibrate_`, as in `train_judge`. CPU seconds are those of
the training alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import set_seed

from heads.pairwise import (
    Pair,
    PairwiseModel,
    PairwiseTrainer,
    baseline_verdicts,
    calibrate_,
    fit_uncertainty_,
    freeze_,
)
from heads.pairwise.data.collate import PairwiseDataset
from heads.pairwise.report.baselines import BASELINES
from tests.benchmarks.pairwise_away import (
    FEATURES,
    GUIDE,
    SEEDS,
    SHORT,
    fewer,
    figures,
    sets,
    verdicts_of,
)
from tests.benchmarks.pairwise_rivals import (
    CROSS,
    REWARD,
    VERDICT,
    calibrated,
    cross_encoder,
    own_verdict,
    reward_trainer,
)
from tests.benchmarks.pairwise_trial import training_arguments
from tests.benchmarks.results import RESULTS, commit, put, today
from tests.support import real

FOUND = RESULTS / "pairwise_encoders.json"
HEAD_RATE = 1e-3
MAX_TOKENS, MOST = 256, 300  # tokens of an answer with its prompt, pairs of each test


@dataclass(frozen=True)
class Way:
    """One way to train a judge."""

    name: str
    freeze: str
    depth: int = 6
    rates: tuple[float, ...] = (HEAD_RATE,)  # of the encoder; of a frozen one the head's
    epochs: int = 2
    rank: int = 0  # of LoRA

    @property
    def trains(self) -> bool:
        """Return whether the encoder trains."""
        return self.freeze != "all" or bool(self.rank)


TUNED = (5e-5, 2e-4)
WAYS = (
    Way("frozen, 4 layers", "all", depth=4, epochs=8),
    Way("frozen, 6 layers", "all", epochs=8),
    Way("2 of 6 layers trained", "bottom:4", rates=TUNED),
    Way("LoRA of rank 16", "all", rates=(5e-4, 2e-3), rank=16),
    Way("all trained", "none", rates=TUNED),
)
RIVALS = {REWARD: reward_trainer, CROSS: cross_encoder}
RIVAL_EPOCHS = 2


def made(way: Way) -> Any:
    """A new judge."""
    # the settings of `JudgeConfig`
    model: Any = PairwiseModel.from_encoder(
        real.minilm(),
        dtype=torch.float32,
        depth=way.depth,
        ties=False,
        dropout=0.3,
        max_tokens=MAX_TOKENS,
    )
    freeze_(model, way.freeze)
    if not way.rank:
        return model
    config = LoraConfig(
        r=way.rank,
        lora_alpha=way.rank,
        target_modules=r".*layer\.\d+\..*(query|key|value|dense)",
        modules_to_save=["head", "pool"],
    )
    return get_peft_model(model, config)


def train(
    way: Way, model: Any, data: dict[str, PairwiseDataset], rate: float, seed: int, epochs: int
) -> float:
    """Train a judge and return the log-loss of its best epoch."""
    with tempfile.TemporaryDirectory() as folder:
        batch = 32 if way.trains else 64
        arguments = training_arguments(folder, epochs=epochs, batch=batch, rate=rate, seed=seed)
        trainer = PairwiseTrainer(
            model=model,
            args=arguments,
            train_dataset=data["train"],
            eval_dataset=data["epoch"],
            head_lr_ratio=HEAD_RATE / rate,
            # a run that learns nothing is a result here
            guard=False,
        )
        trainer.train()
        return trainer.state.best_metric


def row_of(
    name: str,
    pairs: dict[str, list[Pair]],
    verdicts: Callable[[str], Tensor],
    **more: Any,
) -> dict[str, Any]:
    """A row of results, from the verdicts on each test by its name."""
    return {
        "way": name,
        "pairs": len(pairs["train"]),
        "seed": 0,
        **more,
        "tests": {test: figures(verdicts(test), pairs[test]) for test in SHORT},
        "date": today(),
        "commit": commit(),
    }


def trained_row(
    name: str,
    pairs: dict[str, list[Pair]],
    verdicts: Callable[[str], Tensor],
    rate: float,
    seed: int,
    seconds: float,
    chosen_by: float,
) -> dict[str, Any]:
    """A row of what was trained at one rate."""
    return row_of(
        name,
        pairs,
        verdicts,
        rate=rate,
        seed=seed,
        log_loss_by_which_the_rate_is_chosen=round(chosen_by, 4),
        cpu_seconds=round(seconds),
    )


def run(
    way: Way,
    pairs: dict[str, list[Pair]],
    rate: float,
    seed: int,
    *,
    smoke: bool = False,
) -> dict[str, Any]:
    """Train one judge at one rate; its figures on the tests."""
    set_seed(seed)
    model = made(way)
    data = {name: model.dataset(part, progress=False) for name, part in pairs.items()}
    if not way.trains:
        for one in data.values():
            one.encode_(model, cache=FEATURES, progress=False)
    begin = time.process_time()
    chosen_by = train(way, model, data, rate, seed, epochs=1 if smoke else way.epochs)
    seconds = time.process_time() - begin
    fit_uncertainty_(model, data["train"], data["temperature"])
    calibrate_(model, data["temperature"], progress=False)

    def verdicts(test: str) -> Tensor:
        return verdicts_of(model, data[test])

    return trained_row(way.name, pairs, verdicts, rate, seed, seconds, chosen_by)


def run_rival(
    name: str, pairs: dict[str, list[Pair]], rate: float, seed: int, *, epochs: int = RIVAL_EPOCHS
) -> dict[str, Any]:
    """Train another library's judge at one rate; its figures on the tests."""
    scorer, seconds, chosen_by = RIVALS[name](pairs, rate, seed, epochs, MAX_TOKENS)
    judge = calibrated(scorer, pairs["temperature"])
    return trained_row(name, pairs, lambda test: judge(pairs[test]), rate, seed, seconds, chosen_by)


def trees(pairs: dict[str, list[Pair]]) -> dict[str, Any]:
    """The row of boosted trees on surface features, fitted on all pairs that a judge gets."""
    seen = [*pairs["train"], *pairs["epoch"], *pairs["temperature"]]
    begin = time.process_time()
    verdicts = {
        name: baseline_verdicts(seen, pairs[name], classes=2)[BASELINES[-1]] for name in SHORT
    }
    seconds = round(time.process_time() - begin)
    return row_of(BASELINES[-1], pairs, verdicts.__getitem__, cpu_seconds=seconds)


def untrained(pairs: dict[str, list[Pair]]) -> dict[str, Any]:
    """The row of a language model's own verdict."""
    judge = calibrated(own_verdict(MAX_TOKENS), pairs["temperature"])
    return row_of(VERDICT, pairs, lambda test: judge(pairs[test]))


def read_found() -> list[dict[str, Any]]:
    """The rows that are there already."""
    return json.loads(FOUND.read_text(encoding="utf-8"))["rows"] if FOUND.exists() else []


def keep(row: dict[str, Any]) -> None:
    """Add a row to the results."""
    print(json.dumps(row), flush=True)
    FOUND.write_text(json.dumps({"rows": [*read_found(), row]}, indent=1) + "\n", encoding="utf-8")


def best_rate(way: str, count: int) -> float | None:
    """The rate whose log-loss of seed 0 is lowest; None of baselines."""
    tried = [
        row
        for row in read_found()
        if (row["way"], row["pairs"], row["seed"]) == (way, count, 0) and "rate" in row
    ]
    best = min(tried, key=lambda row: row["log_loss_by_which_the_rate_is_chosen"], default={})
    return best.get("rate")


def measure(
    name: str,
    rates: Sequence[float],
    count: int,
    run_at: Callable[[float, int], dict[str, Any]],
) -> None:
    """Run seed 0 at every rate, and the other seeds at the best."""

    def run_once(rate: float, seed: int) -> None:
        run_already = any(
            (row["way"], row["pairs"], row.get("rate"), row["seed"]) == (name, count, rate, seed)
            for row in read_found()
        )
        if not run_already:
            keep(run_at(rate, seed))

    for rate in rates:
        run_once(rate, 0)
    best = best_rate(name, count)
    assert best is not None  # seed 0 has run
    for seed in SEEDS[1:]:
        run_once(best, seed)


def write_table() -> None:
    """Write the guide's table."""
    rows = read_found()
    groups: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for row in rows:
        if row.get("rate") == best_rate(row["way"], row["pairs"]):
            groups.setdefault((row["pairs"], row["way"]), []).append(row)
    header = ["encoder", "pairs", "rate", "accuracy", *SHORT.values(), "CPU s"]
    lines = [f"| {' | '.join(header)} |", "|---" * len(header) + "|"]
    order = [BASELINES[-1], VERDICT, *(way.name for way in WAYS), *RIVALS]
    for (count, name), found in sorted(
        groups.items(), key=lambda g: (g[0][0], order.index(g[0][1]))
    ):
        cells = [name, f"{count:,}", f"{found[0]['rate']:g}" if "rate" in found[0] else ""]
        shares = [row["tests"]["home"]["accuracy"] for row in found]
        cells.append(f"{statistics.median(shares):.1%}")
        for test in SHORT:
            losses = [row["tests"][test]["log_loss"] for row in found]
            span = f" ({min(losses):.3f} to {max(losses):.3f})" if len(losses) > 1 else ""
            cells.append(f"{statistics.median(losses):.3f}{span}")
        # the rate does not change the time; rows that were measured beside other work have none
        seconds = [
            row["cpu_seconds"]
            for row in rows
            if (row["pairs"], row["way"]) == (count, name) and "cpu_seconds" in row
        ]
        cells.append(str(round(statistics.median(seconds))) if seconds else "")
        lines.append(f"| {' | '.join(cells)} |")
    note = (
        f"MiniLM-L6, {MAX_TOKENS} tokens, log-losses on at most {MOST} pairs of each test: the median "
        f"(and range) of the seeds 0 to {len(SEEDS) - 1}; CrossEncoder has seeds 0 and 1 only, and trees "
        "have one fit. The accuracy is on prompts never seen. "
        "A frozen encoder's head has 8 epochs, and the rate is the head's; elsewhere there are 2 epochs, "
        "the rate is the encoder's, and the head has 0.001. The other libraries train all weights at "
        "the rate, and get the temperature that is best on the pairs that ours comes from. "
        "CPU seconds of one training, without what a frozen encoder reads once. Measured "
        f"{max(row['date'] for row in rows)} at "
        f"{', '.join(dict.fromkeys(row['commit'] for row in rows))}."
    )
    put(GUIDE, [*lines, "", note], "encoders")


def main(arguments: list[str] | None = None) -> None:
    """Run what has no row yet; write results after each run, and the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", help="not looked at")
    parser.add_argument("--only", nargs="+", help="names of ways")
    parser.add_argument("--smoke", action="store_true", help="few pairs; nothing is written")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    every = sets()
    few = fewer(every)
    for name in SHORT:
        few[name] = few[name][:MOST]
    if options.smoke:
        some = {name: part[:40] for name, part in few.items()}
        for way in WAYS:
            print(run(way, some, way.rates[0], 0, smoke=True))
        for name in RIVALS:
            print(run_rival(name, some, TUNED[0], 0, epochs=1))
        return
    count = len(few["train"])
    for name, one in ((BASELINES[-1], trees), (VERDICT, untrained)):
        wanted = options.only is None or name in options.only
        if wanted and not any(row["way"] == name for row in read_found()):
            keep(one(few))
    for way in WAYS:
        if options.only is None or way.name in options.only:
            measure(way.name, way.rates, count, partial(run, way, few))
    for name in RIVALS:
        if options.only is None or name in options.only:
            measure(name, TUNED, count, partial(run_rival, name, few))
    write_table()


if __name__ == "__main__":
    main()
