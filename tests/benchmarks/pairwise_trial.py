"""Judges of real answers beside a ruler: pairwise_trial.json to a JSON of results and the guide's
tables.

Pairs of AlpacaEval's sample that GPT-4 judged, without the few ties; one answer of each is
text-davinci-003's. Prompts are held out whole, the same for every seed; a seed draws the validation
prompts and the head. Baselines are fitted on training and validation pairs. Frozen encoders read
each answer once (``work/features`` keeps it). Not timed but for CPU seconds. Needs the folder of
real data, SmolLM2, and the MiniLM encoder of the extra `bench`.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import EarlyStoppingCallback, TrainingArguments, set_seed

from heads.pairwise import (
    Pair,
    PairwiseModel,
    PairwiseTrainer,
    calibrate_,
    freeze_,
    pairwise_report,
    read_pairs,
    split_pairs,
)
from tests.benchmarks.ablations import settings
from tests.benchmarks.results import RESULTS, ROOT, commit, put, today
from tests.support import real

CONFIG, FOUND = Path(__file__).parent / "pairwise_trial.json", RESULTS / "pairwise_trial.json"
GUIDE, FEATURES = ROOT / "docs" / "pairwise.md", Path(__file__).parent / "work" / "features"
DATA = "alpaca_eval_pairs.jsonl.gz"
EVERYWHERE = "text_davinci_003"  # who wrote one answer of each pair
ENCODERS = {"smollm2": "SmolLM2-135M-Instruct", "minilm": "MiniLM-L6"}


def real_pairs() -> list[Pair]:
    """All pairs but ties, in a drawn order, each with A and B in a drawn order."""
    draw, found = random.Random(0), []
    for pair in read_pairs(real.data(DATA))[0]:
        if draw.random() < 0.5:
            label = {0: 1, 1: 0}.get(pair.label, 2) if isinstance(pair.label, int) else pair.label
            pair = Pair(pair.prompt, pair.b, pair.a, label, pair.writers[::-1])
        if pair.a.strip() and pair.b.strip() and pair.label != 2:
            found.append(pair)
    draw.shuffle(found)
    return found


def fresh_prompts(prompts: list[Any], looked_at: set[Any], count: int) -> set[Any]:
    """Prompts by which nothing about the head was chosen: neither of the test nor of the 120 it was
    tuned on."""
    rest = [number for number, prompt in enumerate(prompts) if prompt not in looked_at]
    tuned_on = {prompts[k] for k in np.random.default_rng(7).choice(rest, 120, replace=False)}
    fresh = [prompt for prompt in prompts if prompt not in looked_at | tuned_on]
    return set(random.Random(3).sample(fresh, count))


def split(
    pairs: list[Pair], config: dict[str, Any], setting: dict[str, Any]
) -> tuple[list[Pair], ...]:
    """Training, validation and test pairs, of different prompts; models held out are judged and not
    seen."""
    seed, models = setting["seed"], setting["models_held_out"]
    prompts = sorted({pair.prompt for pair in pairs}, key=str)
    held = set(random.Random(1).sample(prompts, config["held_out_prompts"]))
    if setting["prompts"] == "fresh":
        held = fresh_prompts(prompts, held, config["held_out_prompts"])
    rest, test = ([p for p in pairs if (p.prompt in held) == which] for which in (False, True))
    if models:
        writers = sorted(
            {name for pair in pairs for name in pair.writers if name != EVERYWHERE}, key=str
        )
        unseen = set(random.Random(2).sample(writers, models))
        rest = [pair for pair in rest if not unseen & set(pair.writers)]
        test = [pair for pair in test if unseen & set(pair.writers)]
    share = config["validation"]
    train, validation = split_pairs(rest, (1 - share, share), seed=seed)
    return train, validation, test


def training_arguments(
    out: str,
    *,
    epochs: int,
    batch: int,
    rate: float,
    seed: int,
    kind: Any = TrainingArguments,
    metric: str = "log_loss",
    **others: Any,
) -> Any:
    """The arguments of a run on the CPU that keeps the epoch of the lowest log-loss."""
    return kind(
        output_dir=out,
        num_train_epochs=epochs,
        per_device_train_batch_size=batch,
        use_cpu=True,
        learning_rate=rate,
        warmup_steps=0.1,
        lr_scheduler_type="cosine",
        weight_decay=0.05,
        seed=seed,
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=2,
        load_best_model_at_end=True,
        metric_for_best_model=metric,
        greater_is_better=False,
        report_to="none",
        disable_tqdm=True,
        **others,
    )


def run(setting: dict[str, Any], parts: tuple[list[Pair], ...]) -> dict[str, Any]:
    """Train under one setting, keep the best epoch, calibrate on the validation pairs, judge the
    test pairs."""
    set_seed(setting["seed"])
    folder = {"smollm2": real.smollm2, "minilm": real.minilm}[setting["encoder"]]()
    names = ("link", "surface", "pooling", "dropout", "max_tokens", "depth")
    model = PairwiseModel.from_encoder(
        folder, dtype=torch.bfloat16, ties=False, **{name: setting[name] for name in names}
    )
    freeze_(model, "all")
    data = [model.dataset(part, progress=False) for part in parts]
    read = time.process_time()
    for one in data:
        one.encode_(model, cache=FEATURES, progress=True)
    begin = time.process_time()
    with tempfile.TemporaryDirectory() as out:
        trainer = PairwiseTrainer(
            model=model,
            args=training_arguments(
                out,
                epochs=setting["epochs"],
                batch=setting["batch"],
                rate=setting["learning_rate"],
                seed=setting["seed"],
            ),
            train_dataset=data[0],
            eval_dataset=data[1],
            head_lr_ratio=1.0,
            callbacks=[EarlyStoppingCallback(3)],
        )
        trainer.train()
    calibrate_(model, data[1], progress=False)
    seconds = time.process_time() - begin
    report = pairwise_report(model, data[2], train=[*parts[0], *parts[1]], progress=False)
    made = report.metrics
    row = setting | {
        "pairs": [len(part) for part in parts],
        "accuracy": made.accuracy,
        "near_accuracy": report.near_accuracy,
        "log_loss": made.log_loss,
        "calibration_error": made.calibration_error,
        "flip_rate": made.flip_rate,
        "owed": dict(report.owed),
        "head_cpu_seconds": round(seconds),
        "date": today(),
        "commit": commit(),
        "rivals": [vars(rival) for rival in report.rivals],
    }
    if begin - read > 60:  # the answers were not there yet
        row["encoding_cpu_seconds"] = round(begin - read)
    return json.loads(json.dumps(row), parse_float=lambda text: round(float(text), 5))


def read_found() -> list[dict[str, Any]]:
    """The rows that are there already."""
    rows = json.loads(FOUND.read_text(encoding="utf-8"))["rows"] if FOUND.exists() else []
    return [{"models_held_out": 0, "prompts": "first"} | row for row in rows]


def _told(rows: list[dict], key: str, form: str) -> str:
    """The mean over seeds, and how far they are apart."""
    values = [row[key] for row in rows]
    spread = f" ± {format(statistics.stdev(values), form)}" if len(values) > 1 else ""
    return f"{format(statistics.mean(values), form)}{spread}"


def _table(rows: list[dict]) -> list[str]:
    """Baselines and judges on the same pairs."""
    groups: dict[tuple, list[dict]] = {}
    for row in rows:
        key = (
            ENCODERS[row["encoder"]],
            row["depth"],
            row["link"],
            ", ".join(row["surface"]) or "none",
        )
        groups.setdefault(key, []).append(row)
    lines = [
        "| verdicts of | layers | link | surface | log-loss | accuracy | within 20 % length | "
        "calibration error | gain over the trees |",
        "|---" * 9 + "|",
    ]
    digits = (
        ("log_loss", ".3f"),
        ("accuracy", ".1%"),
        ("near_accuracy", ".1%"),
        ("calibration_error", ".3f"),
    )
    for one in rows[0]["rivals"]:
        same = [rival for row in rows for rival in row["rivals"] if rival["name"] == one["name"]]
        cells = " | ".join(
            format(statistics.mean(rival[name] for rival in same), form) for name, form in digits
        )
        lines.append(f"| *{one['name']}* | | | | {cells} | |")
    for (encoder, depth, link, surface), held in groups.items():
        cells = " | ".join(_told(held, name, form) for name, form in digits)
        trees = [
            next(rival for rival in row["rivals"] if rival["name"].endswith("trees"))
            for row in held
        ]
        gain, error = (statistics.mean(one[key] for one in trees) for key in ("gain", "error"))
        lines.append(
            f"| {encoder} | {depth} | {link} | {surface} | {cells} | {gain:+.4f} ± {error:.4f} |"
        )
    return lines


def write_table() -> None:
    """The guide's tables, from the committed results."""
    rows, config = read_found(), json.loads(CONFIG.read_text(encoding="utf-8"))
    if not rows:
        return
    fresh = [row for row in rows if row["prompts"] == "fresh"]
    first = [row for row in rows if row["prompts"] == "first"]
    same, others = (
        [row for row in first if bool(row["models_held_out"]) == held] for held in (False, True)
    )
    pairs = same[0]["pairs"]
    lines = [*_table(same), ""]
    if fresh:
        count = config["held_out_prompts"]
        lines += [
            f"{fresh[0]['pairs'][2]:,} pairs of {count} prompts by which nothing was chosen:",
            "",
        ]
        lines += [*_table(fresh), ""]
    if others:
        held = others[0]["models_held_out"]
        lines += [
            f"And {others[0]['pairs'][2]:,} pairs of {held} of the 12 models, which no training "
            "pair is of:",
            "",
        ]
        lines += [*_table(others), ""]
    read = [row for row in same if "encoding_cpu_seconds" in row]
    told = dict.fromkeys(
        f"{ENCODERS[row['encoder']]}'s {row['depth']} layers {row['encoding_cpu_seconds'] / 60:.0f}"
        for row in read
    )
    lines.append(
        f"AlpacaEval's pairs without ties: {pairs[0]:,} or so to train, {pairs[1]:,} to choose the "
        f"epoch and the temperature, {pairs[2]:,} of {config['held_out_prompts']} other prompts to "
        "judge. Encoders are frozen, in bfloat16, 512 tokens; reading all answers took "
        f"{' and '.join(told)} CPU minutes. ± is the spread of three seeds; that of a gain its "
        "standard error, pairs of one prompt taken as one. Measured "
        f"{max(row['date'] for row in rows)} at "
        f"{', '.join(dict.fromkeys(row['commit'] for row in rows))}."
    )
    put(GUIDE, lines, "trial")


def main(arguments: list[str] | None = None) -> None:
    """Run every setting that has no result yet; write the results after each, and the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", help="not looked at: it is not timed")
    parser.add_argument(
        "--only",
        nargs="+",
        help="words that 'encoder depth link surface seed models prompts' of a setting must have",
    )
    options = parser.parse_args(arguments)
    config = json.loads(CONFIG.read_text(encoding="utf-8"))
    try:
        real.data(DATA), real.minilm(), real.smollm2()
    except real.AbsentError as error:
        print(f"pairwise_trial: skipped, {error}")
        return
    pairs = real_pairs()
    for setting in settings(config):
        words = "{encoder} {depth} {link} {surface} seed{seed} models{models_held_out} {prompts}".format(
            **setting
        )
        if any(setting.items() <= row.items() for row in read_found()):
            continue
        if options.only and not all(word in words for word in options.only):
            continue
        row = run(setting, split(pairs, config, setting))
        print(
            words,
            {k: row[k] for k in ("log_loss", "accuracy", "near_accuracy", "owed")},
            flush=True,
        )
        FOUND.write_text(
            json.dumps({"rows": [*read_found(), row]}, indent=1) + "\n", encoding="utf-8"
        )
    write_table()


if __name__ == "__main__":
    main()
