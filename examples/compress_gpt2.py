r"""Compress a GPT-2 by Kronecker sums, train it back, and write a stock checkpoint again.

    python examples/compress_gpt2.py  # a small GPT-2 that it trains first; 12 minutes on 2 cores
    python examples/compress_gpt2.py --model openai-community/gpt2 --text wiki.txt \
        --preset gpt2-82m --steps 2000

For each start (--init) it converts, evaluates, trains back with the original as a teacher,
evaluates and folds. Prints a table and, with matplotlib, draws the losses. Expect `sequential` to
begin where the original is.
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
    KroneckerConfig,
    KroneckerTrainer,
    convert_,
    fold,
    perplexity,
)


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
        "--preset", choices=kronecker, help="for GPT-2 124M (default: half of the hidden neurons)"
    )
    parser.add_argument("--init", nargs="+", default=["random", "van_loan", "prune", "sequential"])
    parser.add_argument("--steps", type=int, default=300, help="to train back")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--pretrained-learning-rate", type=float, default=3e-4)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--out", type=Path, default=Path("compressed"))
    parser.add_argument("--resume", action="store_true", help="go on from what --out holds")
    parser.add_argument("--smoke", action="store_true", help="a few steps of everything")
    return parser.parse_args()


def original(given: argparse.Namespace):
    """The model to compress, its tokenizer, and rows of tokens to train on and to hold out."""
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


def one(given: argparse.Namespace, init: str, teacher, tokenizer, rows, held) -> dict:
    """Convert by one start, train back, fold."""
    set_seed(0)
    place, begin = given.out / init, time.perf_counter()
    model = AutoModelForCausalLM.from_config(teacher.config).eval()
    model.load_state_dict(teacher.state_dict())
    calibration = rows[torch.randperm(len(rows))[: 12_000 // rows.shape[1]]].split(8)
    config = KroneckerConfig(b_shape=(2, 1), init=init)
    if given.preset:
        config = {name: replace(layer, init=init) for name, layer in PRESETS[given.preset].items()}
    report = convert_(model, config, calibration=calibration, cache=place / "fitted")
    converted, first = time.perf_counter() - begin, perplexity(model, held.split(16))
    saving = {"save_strategy": "steps", "save_steps": 100, "save_total_limit": 1}
    trainer = KroneckerTrainer(
        model,
        arguments(place / "trainer", given.steps, given.learning_rate, given.batch, **saving),
        teacher=teacher,
        distill=DistillConfig(logits=1.0, labels=1.0),
        pretrained_learning_rate=given.pretrained_learning_rate,
        train_dataset=Rows(rows),
    )
    begun = any((place / "trainer").glob("checkpoint-*"))
    trainer.train(resume_from_checkpoint=given.resume and begun)
    curve = [(row["step"], row["loss"]) for row in trainer.state.log_history if "loss" in row]
    made = {
        "init": init,
        "parameters": report.after,
        "before": math.log(first),
        "seconds to convert": converted,
    }
    made |= {
        "after": math.log(perplexity(model.eval(), held.split(16))),
        "seconds": time.perf_counter() - begin,
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
        axes.plot(*zip(*row["curve"], strict=True), label=row["init"])
    axes.set(xlabel="step", ylabel="training loss (cross-entropy + distillation)", yscale="log")
    axes.legend(title="start")
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
    found = [one(given, init, teacher, tokenizer, rows, held) for init in given.init]
    print(
        f"\n{'start':22}{'parameters':>12}{'loss before':>13}"
        f"{f'after {given.steps}':>13}{'convert':>10}{'in all':>9}"
    )
    print(f"{'the original':22}{count:>12,}{goal:>13.3f}")
    for row in found:
        times = f"{row['seconds to convert']:>8.0f} s{row['seconds']:>7.0f} s"
        print(
            f"{row['init']:22}{row['parameters']:>12,}{row['before']:>13.3f}{row['after']:>13.3f}{times}"
        )
    save_plot(plots, given.out / "losses.png", lambda: losses(found))
    (given.out / "table.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
