"""Which of two answers is better: train a head and its encoder, hold pairs out by prompt, report, calibrate, save.

    python examples/train_pairwise.py                                  # made-up pairs, a small encoder; a minute
    python examples/train_pairwise.py --data arena.csv --encoder distilbert/distilbert-base-uncased --freeze bottom:4
    torchrun --nproc_per_node=2 examples/train_pairwise.py --data arena.jsonl --encoder answerdotai/ModernBERT-base

--data is CSV, JSON, JSON lines or parquet in the Chatbot Arena's formats, with chosen and rejected, output_1 and
output_2, or prompt, a, b, label; or a data set's hub id (see `read_pairs`). On the made-up pairs nearly all
verdicts are right in the end. OUT/model loads with `PairwiseModel.from_pretrained`; OUT/report.png (matplotlib, extra
`plot`) shows calibration. Nothing is downloaded unless it is named.
"""

import argparse
import json
import os
import random
import sys
from pathlib import Path

import torch
from common import can_draw, save_plot
from name_a_thing import made_up, own_encoder
from transformers import TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint

from heads.pairwise import (
    DeadRunError,
    PairwiseModel,
    PairwiseTrainer,
    calibrate_,
    freeze_,
    pairwise_report,
    read_pairs,
)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data", help="a file, or a data set's hub id; made-up pairs without it")
    add("--encoder", help="a folder or a hub id; a small one of one's own without it")
    add("--link", default="davidson", choices=["davidson", "rao-kupper", "antisymmetric", "concat"])
    add("--freeze", default="none", help="of the encoder: all, bottom:6 or so, embeddings, none")
    add("--pooling", default="mean", choices=["mean", "first", "max", "attention"])
    add("--append-prompt", default=True, action=argparse.BooleanOptionalAction, help="encode it before each answer")
    add(
        "--length-feature", default=False, action=argparse.BooleanOptionalAction, help="tell the head how long they are"
    )
    add("--max-tokens", type=int, help="of prompt and answer; default what the encoder takes")
    add("--epochs", type=float, default=3.0)
    add("--batch", type=int, default=32, help="pairs of a step, over all processes")
    add("--lr", type=float, help="default 3e-5, and 1e-3 for the small encoder")
    add("--head-lr-ratio", type=float, default=30.0, help="the head's rate over the encoder's")
    add("--layer-decay", type=float, default=1.0, help="of the rate, from layer to layer")
    add("--seed", type=int, default=0)
    add("--out", type=Path, default=Path("runs/pairwise"))
    add("--resume", action="store_true", help="go on from the last checkpoint")
    add("--smoke", action="store_true", help="a run of seconds, to see that it works")
    return parser.parse_args()


def pairs_of(given: argparse.Namespace, main: bool) -> tuple[list, list]:
    """Pairs to train on, and pairs of other prompts; where there are too few prompts for that, other pairs."""
    if given.data is None:
        return made_up(400 if given.smoke else 4000, seed=0), made_up(200 if given.smoke else 1000, seed=1)
    pairs, report = read_pairs(given.data)
    if main:
        print(f"{given.data}: {report}")
    prompts = sorted({pair.prompt for pair in pairs}, key=str)
    random.Random(given.seed).shuffle(prompts)
    held = set(prompts[: len(prompts) // 5])
    test = [k for k, pair in enumerate(pairs) if pair.prompt in held] if held else range(0, len(pairs), 5)
    if len(test) < 4:
        raise ValueError(f"{len(pairs)} pairs are too few: {len(test)} would be held out")
    test = set(test)
    parts = [[pair for k, pair in enumerate(pairs) if (k in test) == which] for which in (False, True)]
    return parts[0], parts[1]


def train(given: argparse.Namespace) -> None:
    world, main = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0)) == 0
    if given.batch < world or given.batch % world:
        raise ValueError(f"--batch {given.batch} cannot be divided over {world} processes")
    set_seed(given.seed)
    plots = main and can_draw()
    arguments = TrainingArguments(
        str(given.out / "checkpoints"), num_train_epochs=given.epochs, max_steps=6 if given.smoke else -1,
        per_device_train_batch_size=given.batch // world, learning_rate=given.lr or (3e-5 if given.encoder else 1e-3),
        warmup_steps=0.1, seed=given.seed, save_strategy="steps", save_steps=3 if given.smoke else 200,
        save_total_limit=1, logging_steps=20, report_to="none", use_cpu=not torch.accelerator.is_available(),
    )  # fmt: skip
    parts = pairs_of(given, main)
    with arguments.main_process_first(desc="the encoder"):
        encoder = given.encoder or own_encoder(given.out)
    model = PairwiseModel.from_encoder(
        encoder, link=given.link, pooling=given.pooling, append_prompt=given.append_prompt,
        length_feature=given.length_feature, max_tokens=given.max_tokens,
        ties=any(pair.label == 2 or isinstance(pair.label, tuple) for part in parts for pair in part),
    )  # fmt: skip
    frozen = freeze_(model, given.freeze)
    data, held = (model.dataset(part, progress=main) for part in parts)
    if main:
        print(f"trained on {data.report}\nheld out {held.report}\n{frozen}\n{model.packing}")
    trainer = PairwiseTrainer(
        model=model, args=arguments, train_dataset=data, layer_decay=given.layer_decay,
        head_lr_ratio=given.head_lr_ratio if given.encoder else 1.0,
    )  # fmt: skip
    folder = Path(arguments.output_dir)
    checkpoint = get_last_checkpoint(folder) if given.resume and folder.is_dir() else None
    if given.resume and main:
        print(f"going on from {checkpoint}" if checkpoint else "there is no checkpoint: starting anew")
    trainer.train(resume_from_checkpoint=checkpoint)
    if not main:
        return
    half = len(held) // 2  # probabilities are fitted on one half and reported on the other
    fitted = calibrate_(model, model.dataset(held.pairs[:half], progress=False))
    model.save_pretrained(given.out / "model")
    report = pairwise_report(model, model.dataset(held.pairs[half:], progress=False), train=data.pairs)
    (given.out / "metrics.json").write_text(json.dumps(report.metrics.to_dict(), indent=2) + "\n")
    drawn = save_plot(plots, given.out / "report.png", report.plot)
    print(f"\n{report}\n{fitted}\n{given.out / 'model'}, {given.out / 'metrics.json'}, {drawn}")


if __name__ == "__main__":
    try:
        train(parse())
    except KeyboardInterrupt:
        sys.exit("\nstopped; the same command with --resume goes on from the last checkpoint")
    except (ValueError, DeadRunError) as error:
        sys.exit(f"train_pairwise: {error}")
