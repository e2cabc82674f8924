r"""Compress a GPT-2 with Kronecker sums, train it back, and write a stock checkpoint again.

    python examples/compress_gpt2.py  # a small GPT-2 that it trains first; 12 minutes on 2 cores
    python examples/compress_gpt2.py --model openai-community/gpt2 --text wiki.txt \
        --preset gpt2-82m --steps 2000
    python examples/compress_gpt2.py --init van_loan prune --strategy together factors-first

For each initialization (--init) and training strategy (--strategy), the script converts the model,
evaluates it, trains it back, evaluates it again and folds it. Training back recovers part of the
loss; the original model is the teacher, except with the strategy `labels`. Folding turns the model
into a stock checkpoint. The script prints a table and, with matplotlib, plots the losses. Expect
the initialization `sequential` to begin near the original's loss.
"""

import argparse
import json
import math
import time
from dataclasses import replace
from pathlib import Path

import torch
from common import can_draw, save_plot
from small_gpt2 import (
    CONTEXT,
    Rows,
    arguments,
    make_tokenizer,
    python_text,
    train_original,
    windows,
)
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

from kronecker import (
    PRESETS,
    DistillConfig,
    FreezePretrained,
    KroneckerConfig,
    KroneckerTrainer,
    convert_,
    fold,
    perplexity,
)

STRATEGIES = {
    "two-rates": "all parameters, the pretrained ones at --pretrained-learning-rate",
    "together": "all parameters at one rate",
    "labels": "like together, but without the original as a teacher",
    "factors-only": "the factors alone",
    "factors-first": "the factors alone for a third of the steps, then all parameters",
    "in-turns": "alternately the factors alone and all parameters, a sixth of the steps each",
}


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="folder or hub id of a GPT-2 (default: train a small one)")
    parser.add_argument(
        "--text", help="text file (default: Python's own documentation and sources)"
    )
    parser.add_argument(
        "--dataset", help="hub data set with a `text` column, instead of --text (needs `datasets`)"
    )
    kronecker = [name for name, layers in PRESETS.items() if "*.mlp.c_fc" in layers]
    parser.add_argument(
        "--preset",
        choices=kronecker,
        help="a preset for GPT-2 124M (default: keep half of the hidden neurons)",
    )
    parser.add_argument("--init", nargs="+", default=["random", "van_loan", "prune", "sequential"])
    parser.add_argument(
        "--strategy",
        nargs="+",
        choices=STRATEGIES,
        default=["two-rates"],
        help="; ".join(f"{name}: {what}" for name, what in STRATEGIES.items()),
    )
    parser.add_argument("--rank", type=int, default=1, help="number of terms in the default shape")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=300, help="steps of training back")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--pretrained-learning-rate", type=float, default=3e-4)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--out", type=Path, default=Path("compressed"))
    parser.add_argument("--resume", action="store_true", help="continue the run in --out")
    parser.add_argument("--smoke", action="store_true", help="only a few steps, to test the script")
    return parser.parse_args()


def original(given: argparse.Namespace):
    """Return the model to compress, its tokenizer, and training and held-out rows of tokens."""
    text = Path(given.text).read_text(encoding="utf-8") if given.text else None
    if given.dataset:
        from datasets import load_dataset

        text = "\n\n".join(load_dataset(given.dataset, split="train")["text"])
    text = text or python_text(300_000 if given.smoke else 6_000_000)
    folder = given.out / "original"
    name = given.model or (
        str(folder) if given.resume and (folder / "model.safetensors").exists() else None
    )
    if name:
        tokenizer = AutoTokenizer.from_pretrained(name)
        model = AutoModelForCausalLM.from_pretrained(name).eval()
        context = min(512, model.config.n_positions) if given.model else CONTEXT
        return model, tokenizer, *windows(tokenizer, text, context)
    tokenizer = make_tokenizer(text, 512 if given.smoke else 2048)
    rows, held = windows(tokenizer, text)
    model = train_original(given.out, rows, len(tokenizer), steps=8 if given.smoke else 900)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model, tokenizer, rows, held


def ways(given: argparse.Namespace, strategy: str) -> dict:
    """Return the trainer's arguments for a strategy."""
    rate = {"two-rates": given.pretrained_learning_rate, "factors-only": 0.0}.get(strategy)
    callbacks = []
    if strategy == "factors-first":
        callbacks.append(FreezePretrained(max(1, given.steps // 3)))
    if strategy == "in-turns":
        callbacks.append(FreezePretrained(max(1, given.steps // 6), repeat=True))
    return {"pretrained_learning_rate": rate, "callbacks": callbacks}


def distance(model, teacher, names: list[str]) -> float:
    """Return the mean relative distance of the compressed layers' weights from the original's."""
    distances = []
    for name in names:
        # GPT-2's layers store their weights transposed
        weight = teacher.get_submodule(name).weight.detach().T
        ours = model.get_submodule(name).dense_weight().detach()
        distances.append(float((ours - weight).norm() / weight.norm()))
    return sum(distances) / len(distances)


def one(
    given: argparse.Namespace, init: str, strategy: str, teacher, tokenizer, rows, held
) -> dict:
    """Convert with one initialization, train back with one strategy and fold; return results."""
    set_seed(given.seed)
    name = init if len(given.strategy) == 1 else f"{init}, {strategy}"
    if given.rank > 1:
        name += f", rank {given.rank}"
    if given.seed:
        name += f", seed {given.seed}"
    place, begin = given.out / name, time.perf_counter()
    model = AutoModelForCausalLM.from_config(teacher.config).eval()
    model.load_state_dict(teacher.state_dict())
    calibration = rows[torch.randperm(len(rows))[: 12_000 // rows.shape[1]]].split(8)
    config = KroneckerConfig(b_shape=(2, 1), rank=given.rank, init=init)
    if given.preset:
        config = {name: replace(layer, init=init) for name, layer in PRESETS[given.preset].items()}
    report = convert_(
        model,
        config,
        calibration=calibration,
        cache=place / "fitted",
    )
    names = [layer.name for layer in report.layers]
    converted, first = time.perf_counter() - begin, perplexity(model, held.split(16))
    near = distance(model, teacher, names)
    saving = {"save_strategy": "steps", "save_steps": 100, "save_total_limit": 1}
    trainer = KroneckerTrainer(
        model,
        arguments(
            place / "trainer",
            given.steps,
            given.learning_rate,
            given.batch,
            seed=given.seed,
            **saving,
        ),
        teacher=None if strategy == "labels" else teacher,
        distill=None if strategy == "labels" else DistillConfig(logits=1.0, labels=1.0),
        train_dataset=Rows(rows),
        **ways(given, strategy),
    )
    begun = any((place / "trainer").glob("checkpoint-*"))
    trainer.train(resume_from_checkpoint=given.resume and begun)
    curve = [(row["step"], row["loss"]) for row in trainer.state.log_history if "loss" in row]
    made = {
        "name": name,
        "init": init,
        "strategy": strategy,
        "seed": given.seed,
        "rank": given.rank,
        "parameters": report.after,
        "before": math.log(first),
        "seconds to convert": converted,
        "after": math.log(perplexity(model.eval(), held.split(16))),
        "seconds": time.perf_counter() - begin,
        "distance before": near,
        "distance after": distance(model, teacher, names),
    }
    if not (place / "folded").exists():
        fold(model, place / "folded")
        tokenizer.save_pretrained(place / "folded")
    return made | {"curve": curve}


def losses(found: list[dict]):
    from matplotlib.figure import Figure

    figure = Figure((6, 4), layout="constrained", dpi=150)
    axes = figure.add_subplot()
    for row in found:
        axes.plot(*zip(*row["curve"], strict=True), label=row["name"])
    axes.set(xlabel="step", ylabel="training loss (cross-entropy + distillation)", yscale="log")
    axes.legend(title="initialization")
    return figure


def main() -> None:
    given, plots = options(), can_draw()
    if given.smoke:
        given.steps = min(given.steps, 4)
    teacher, tokenizer, rows, held = original(given)
    goal, count = (
        math.log(perplexity(teacher, held.split(16))),
        sum(p.numel() for p in teacher.parameters()),
    )
    found = []
    for init in given.init:
        for strategy in given.strategy:
            found.append(one(given, init, strategy, teacher, tokenizer, rows, held))
    print(
        f"\n{'initialization':26}{'parameters':>12}{'loss before':>13}"
        f"{f'after {given.steps}':>13}{'convert':>10}{'in all':>9}"
    )
    print(f"{'the original':26}{count:>12,}{goal:>13.3f}")
    for row in found:
        times = f"{row['seconds to convert']:>8.0f} s{row['seconds']:>7.0f} s"
        print(
            f"{row['name']:26}{row['parameters']:>12,}{row['before']:>13.3f}{row['after']:>13.3f}{times}"
        )
    save_plot(plots, given.out / "losses.png", lambda: losses(found))
    (given.out / "table.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
