"""Which of two answers is better: train a judge, hold prompts out, and set it beside a ruler and other baselines.

    python examples/train_judge.py                                    # made-up pairs, a small encoder; a minute
    python examples/train_judge.py --data pairs.jsonl --encoder models/SmolLM2-135M-Instruct --depth 20 --max-tokens 512
    python examples/train_judge.py --data arena.csv --encoder answerdotai/ModernBERT-base --freeze none
    torchrun --nproc_per_node=2 examples/train_judge.py --data arena.csv --encoder answerdotai/ModernBERT-base ...

--data is CSV, JSON, JSON lines or parquet in the Chatbot Arena's formats, with chosen and rejected, output_1 and
output_2, or prompt, a, b, label; or a data set's hub id (see `read_pairs`). Prompts are divided into training,
validation and test. The encoder is BERT-like or a causal language model. It stays frozen unless --freeze says less:
then it reads every answer once, and the head trains in a minute; what it read is kept in OUT/features. After each epoch
the log-loss of the validation pairs is measured; the best epoch is kept.

OUT/model loads with `PairwiseModel.from_pretrained`. OUT/report.txt is what is printed: the judge beside the labels'
own shares, a curve of length, words and style, and boosted trees; OUT/calibration.png and OUT/lengths.png are drawn
with matplotlib (extra `plot`). --evaluate judges further files, --submit writes verdicts on a competition's test file.
Nothing is downloaded unless it is named.
"""

import argparse
import csv
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from common import can_draw, save_plot, whole_checkpoint
from name_a_thing import made_up, own_encoder
from transformers import EarlyStoppingCallback, TrainingArguments, set_seed

from heads.pairwise import (
    DeadRunError,
    PairwiseModel,
    PairwiseTrainer,
    calibrate_,
    freeze_,
    pairwise_report,
    predict_pairs,
    read_pairs,
    split_pairs,
)

SURFACE = ["length", "style", "overlap"]


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = made.add_argument
    add("--data", help="a file, or a data set's hub id; made-up pairs without it")
    add("--evaluate", nargs="+", default=[], metavar="FILE", help="further labelled pairs to be judged in the end")
    add("--submit", type=Path, metavar="FILE", help="pairs without labels: verdicts go to OUT/submission.csv")
    add("--split", nargs=3, type=float, default=[0.7, 0.1, 0.2], metavar="SHARE", help="training, validation, test")
    add("--encoder", help="a folder or a hub id; a small one of one's own without it")
    add("--depth", type=int, help="use only so many of its layers, the lowest")
    add("--dtype", default="float32", choices=["float32", "bfloat16"], help="of the encoder")
    add("--freeze", help="of the encoder: all (the default with --encoder), bottom:6 or so, embeddings, none")
    add("--link", default="antisymmetric", choices=["davidson", "rao-kupper", "antisymmetric", "concat"])
    add("--pooling", nargs="+", default=["mean", "last"], choices=["mean", "first", "last", "max", "attention"])
    add("--surface", nargs="*", choices=SURFACE, help="what the head sees beside the encoder; default all of it")
    add("--append-prompt", default=True, action=argparse.BooleanOptionalAction, help="encode it before each answer")
    add("--max-tokens", type=int, help="of prompt and answer; default what the encoder takes")
    add("--epochs", type=float, help="at most; default 8, and 3 where the encoder trains")
    add("--batch", type=int, default=64, help="pairs of a step, over all processes")
    add("--lr", type=float, help="default 1e-3, and 3e-5 where a pretrained encoder trains")
    add("--head-lr-ratio", type=float, default=30.0, help="the head's rate over that of an encoder that trains")
    add("--layer-decay", type=float, default=1.0, help="of the rate, from layer to layer")
    add("--weight-decay", type=float, default=0.05)
    add("--dropout", type=float, default=0.3, help="in the head")
    add("--hidden", type=int, default=0, help="the head's inner width; default a linear head, and 64 in networks")
    add("--seed", type=int, default=0)
    add("--out", type=Path, default=Path("runs/judge"))
    add("--resume", action="store_true", help="go on from the last whole checkpoint")
    add("--smoke", action="store_true", help="a run of seconds, to see that it works")
    return made


def pairs_of(given: argparse.Namespace, main: bool) -> list[list]:
    """Training, validation and test pairs, of different prompts where there are enough."""
    if given.data is None:
        return [made_up(count // (8 if given.smoke else 1), seed) for seed, count in enumerate((4000, 400, 1000))]
    pairs, report = read_pairs(given.data)
    if main:
        print(f"{given.data}: {report}")
    if any(pair.label is None for pair in pairs):
        raise ValueError(f"{given.data} has pairs without a label, which cannot be trained on; see --submit")
    return split_pairs(pairs, given.split, seed=given.seed)


def model_of(given: argparse.Namespace, parts: list[list], encoder: str | Path, tell: bool) -> PairwiseModel:
    """A new head on the encoder, of which what --freeze says stays as it is."""
    ties = any(pair.label == 2 or (isinstance(pair.label, tuple) and pair.label[2]) for p in parts for pair in p)
    surface = given.surface if given.surface is not None else SURFACE if given.link != "concat" else []
    model = PairwiseModel.from_encoder(
        encoder, dtype=getattr(torch, given.dtype), depth=given.depth, link=given.link, pooling=given.pooling,
        append_prompt=given.append_prompt, surface=surface, max_tokens=given.max_tokens, dropout=given.dropout,
        hidden_features=given.hidden, ties=ties,
    )  # fmt: skip
    told = freeze_(model, given.freeze)
    if tell:
        print(f"{told}\n{model.packing}")
    return model


def rate_of(given: argparse.Namespace) -> float:
    """The learning rate, of the encoder where a pretrained one trains."""
    return given.lr or (3e-5 if given.freeze != "all" and given.encoder is not None else 1e-3)


def trainer_of(given: argparse.Namespace, data: list, keep: bool = True, **options: Any) -> PairwiseTrainer:
    """A trainer that keeps the best epoch, or, without ``keep``, no checkpoint; ``options`` are the model."""
    world, frozen = int(os.environ.get("WORLD_SIZE", 1)), given.freeze == "all"
    tuned = not frozen and given.encoder is not None
    when = "steps" if given.smoke else "epoch"
    arguments = TrainingArguments(
        str(given.out / "checkpoints"), num_train_epochs=given.epochs or (8 if frozen else 3),
        max_steps=6 if given.smoke else -1, per_device_train_batch_size=given.batch // world,
        learning_rate=rate_of(given), warmup_steps=0.1, lr_scheduler_type="cosine",
        weight_decay=given.weight_decay, seed=given.seed, eval_strategy=when, save_strategy=when if keep else "no",
        eval_steps=3, save_steps=3, save_total_limit=2, load_best_model_at_end=keep, metric_for_best_model="log_loss",
        greater_is_better=False, logging_steps=50, report_to="none", use_cpu=not torch.accelerator.is_available(),
    )  # fmt: skip
    return PairwiseTrainer(
        args=arguments, train_dataset=data[0], eval_dataset=data[1], layer_decay=given.layer_decay,
        head_lr_ratio=given.head_lr_ratio if tuned else 1.0, callbacks=[EarlyStoppingCallback(3)] if keep else [],
        **options,
    )  # fmt: skip


def submit(given: argparse.Namespace, model: PairwiseModel) -> Path:
    """Verdicts on pairs without labels, in the columns of Kaggle's Chatbot Arena; of its WSDM cup, where none tie."""
    with given.submit.open(newline="", encoding="utf-8-sig") as file:
        ids = [row.get("id", str(number)) for number, row in enumerate(csv.DictReader(file))]
    pairs = [pair._replace(label=None) for pair in read_pairs(given.submit, max_bad=0.0)[0]]
    found, path = predict_pairs(model, model.dataset(pairs)), given.out / "submission.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        if model.config.ties:
            writer.writerow(["id", "winner_model_a", "winner_model_b", "winner_tie"])
            writer.writerows(
                [one, *(f"{p:.6f}" for p in row)] for one, row in zip(ids, found.probabilities, strict=True)
            )
        else:
            writer.writerow(["id", "winner"])
            writer.writerows([one, f"model_{v.lower()}"] for one, v in zip(ids, found.verdicts, strict=True))
    return path


def finish(given: argparse.Namespace, model: PairwiseModel, data: list) -> None:
    """Calibrate, save, judge the test pairs and what else was named, draw."""
    draws, train = can_draw(), data[0].pairs
    fitted = calibrate_(model, data[1])
    report = pairwise_report(model, data[2], train=train)
    model.save_pretrained(given.out / "model", report=report)
    told = [f"{report}\n{fitted}"]
    for name in given.evaluate:
        further = model.dataset(read_pairs(name)[0])
        if given.freeze == "all":
            further.encode_(model, cache=given.out / "features")
        told.append(f"{name}: {pairwise_report(model, further, train=train)}")
    (given.out / "report.txt").write_text("\n\n".join(told) + "\n", encoding="utf-8")
    (given.out / "metrics.json").write_text(json.dumps(report.metrics.to_dict(), indent=2) + "\n")
    drawn = [save_plot(draws, given.out / f"{name}.png", plot)
             for name, plot in (("calibration", report.plot), ("lengths", report.plot_lengths))]  # fmt: skip
    if given.submit is not None:
        drawn.append(str(submit(given, model)))
    print("\n" + "\n\n".join(told))
    print(f"\n{given.out / 'model'}, {given.out / 'report.txt'}, {given.out / 'metrics.json'}, {', '.join(drawn)}")


def prepared(given: argparse.Namespace, main: bool) -> tuple[str | Path, list[list], PairwiseModel, list]:
    """The encoder's place, pairs, a model, and the pairs as it reads them; what cannot work is refused."""
    world = int(os.environ.get("WORLD_SIZE", 1))
    if given.batch < world or given.batch % world:
        raise ValueError(f"--batch {given.batch} cannot be divided over {world} processes")
    for path in (given.submit, *map(Path, given.evaluate)):
        if path is not None and not path.is_file():
            raise ValueError(f"there is no file {path}")
    given.freeze = given.freeze or ("all" if given.encoder else "none")
    set_seed(given.seed)
    parts = pairs_of(given, main)
    if world == 1 or main or (given.out / "encoder").exists() or given.encoder:
        encoder = given.encoder or own_encoder(given.out)
    else:
        raise ValueError("several processes need --encoder")
    model = model_of(given, parts, encoder, main)
    data = [model.dataset(part, progress=main) for part in parts]
    if main:
        for name, one in zip(("training", "validation", "test"), data, strict=True):
            print(f"{name}: {one.report}")
    if given.freeze == "all":
        for one in data:
            one.encode_(model, cache=given.out / "features", progress=main)
    return encoder, parts, model, data


def train(given: argparse.Namespace) -> None:
    main = int(os.environ.get("RANK", 0)) == 0
    _, _, model, data = prepared(given, main)
    trainer = trainer_of(given, data, model=model)
    checkpoint = whole_checkpoint(given.out / "checkpoints") if given.resume else None
    if given.resume and main:
        print(f"going on from {checkpoint}" if checkpoint else "there is no checkpoint: starting anew")
    trainer.train(resume_from_checkpoint=checkpoint)
    if main:
        finish(given, model, data)


if __name__ == "__main__":
    try:
        train(parser().parse_args())
    except KeyboardInterrupt:
        sys.exit("\nstopped; the same command with --resume goes on from the last checkpoint")
    except (ValueError, DeadRunError) as error:
        sys.exit(f"train_judge: {error}")
