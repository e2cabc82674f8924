r"""Train a judge of which of two answers is better.

Prompts are held out; a ruler and other baselines stand beside it.

    python examples/train_judge.py                     # made-up pairs, a small encoder; a minute
    python examples/train_judge.py --data pairs.jsonl --encoder models/SmolLM2-135M-Instruct \
        --depth 20 --max-tokens 512
    python examples/train_judge.py --data arena.csv --encoder answerdotai/ModernBERT-base \
        --freeze none
    torchrun --nproc_per_node=2 examples/train_judge.py --data arena.csv ...

--data is CSV, JSON, JSON lines or parquet in the Chatbot Arena's formats, with chosen and rejected,
output_1 and output_2, or prompt, a, b, label; or a data set's hub id (see `read_pairs`). Prompts
are divided into training, validation and test. The encoder is BERT-like or a causal language model.
It stays frozen unless --freeze says less: then it reads every answer once, and the head trains in a
minute; what it read is kept in OUT/features. After each epoch the log-loss of the validation pairs
is measured; the best epoch is kept.

OUT/model loads with `PairwiseModel.from_pretrained`. OUT/report.txt is what is printed: the judge
beside the training labels' shares, a curve of length, words and style, and boosted trees;
OUT/calibration.png and OUT/lengths.png are drawn with matplotlib (extra `plot`). --evaluate judges
further files, --submit writes verdicts on a competition's test file. Nothing is downloaded unless
it is named.
"""

import argparse
import csv
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from common import can_draw, save_plot
from name_a_thing import made_up, own_encoder
from transformers import EarlyStoppingCallback, TrainingArguments, set_seed

from heads.pairwise import (
    PairwiseModel,
    PairwiseTrainer,
    calibrate_,
    freeze_,
    pairwise_report,
    predict_pairs,
    read_pairs,
    split_pairs,
)
from heads.pairwise.data.rows import each_pair
from model_components import DeadRunError

SURFACE = ["length", "style", "overlap"]
# flags that what is in OUT does not depend on
MAY_CHANGE = ("out", "trials", "resume", "submit", "evaluate")


class Asked(NamedTuple):
    """What else is to be judged in the end."""

    evaluate: dict[str, Any]  # data sets by file
    ids: list[str]  # of the rows of --submit
    pairs: list[Any]  # of these rows; None for a row that is none


def column(text: str) -> tuple[str, str]:
    """Parse NAME=OWN, for argparse."""
    name, sign, own = text.partition("=")
    if not sign:
        raise ValueError
    return name, own


def above_zero(text: str) -> float:
    """A number above 0, for argparse."""
    if not (value := float(text)) > 0:
        raise ValueError
    return value


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = made.add_argument
    add("--data", help="a file, or a data set's hub id; made-up pairs without it")
    add(
        "--columns",
        nargs="+",
        default=[],
        metavar="NAME=OWN",
        type=column,
        help="where --data has other names: prompt=question a=first b=second label=better",
    )
    add(
        "--evaluate",
        nargs="+",
        default=[],
        metavar="FILE",
        help="further labeled pairs to be judged in the end",
    )
    add(
        "--submit",
        type=Path,
        metavar="FILE",
        help="pairs without labels: verdicts go to OUT/submission.csv",
    )
    add(
        "--split",
        nargs=3,
        type=float,
        default=[0.7, 0.1, 0.2],
        metavar="SHARE",
        help="training, validation, test",
    )
    add("--encoder", help="a folder or a hub id; a small one of one's own without it")
    add("--depth", type=int, help="use only so many of its layers, the lowest")
    add("--dtype", default="float32", choices=["float32", "bfloat16"], help="of the encoder")
    add(
        "--freeze",
        help="of the encoder: all (the default with --encoder), bottom:6 or so, embeddings, none",
    )
    add("--link", default="antisymmetric", choices=["davidson", "antisymmetric", "concat"])
    add("--pooling", nargs="+", default=["mean", "last"], choices=["mean", "first", "last"])
    add(
        "--surface",
        nargs="*",
        choices=SURFACE,
        help="what the head sees beside the encoder; default all of it",
    )
    add(
        "--append-prompt",
        default=True,
        action=argparse.BooleanOptionalAction,
        help="encode it before each answer",
    )
    add("--max-tokens", type=int, help="of prompt and answer; default what the encoder takes")
    add("--epochs", type=above_zero, help="at most; default 8, and 3 where the encoder trains")
    add("--batch", type=int, default=64, help="pairs of a step, over all processes")
    add("--lr", type=above_zero, help="default 1e-3, and 3e-5 where a pretrained encoder trains")
    add(
        "--head-lr-ratio",
        type=float,
        default=30.0,
        help="the head's rate over that of an encoder that trains",
    )
    add("--layer-decay", type=float, default=1.0, help="of the rate, from layer to layer")
    add("--weight-decay", type=float, default=0.05)
    add("--dropout", type=float, default=0.3, help="in the head")
    add(
        "--hidden",
        type=int,
        default=0,
        help="the head's inner width; default a linear head, and 64 in networks",
    )
    add("--seed", type=int, default=0)
    add("--out", type=Path, default=Path("runs/judge"))
    add("--resume", action="store_true", help="go on from the last whole checkpoint")
    add("--smoke", action="store_true", help="a run of seconds, to see that it works")
    return made


def pairs_of(given: argparse.Namespace, main: bool) -> list[list]:
    """Training, validation and test pairs, of different prompts where there are enough."""
    if given.data is None:
        return [
            made_up(count // (8 if given.smoke else 1), seed)
            for seed, count in enumerate((4000, 400, 1000))
        ]
    pairs, report = read_pairs(given.data, columns=dict(given.columns))
    if main:
        print(f"{given.data}: {report}")
    if any(pair.label is None for pair in pairs):
        raise ValueError(
            f"{given.data} has pairs without a label, which cannot be trained on; see --submit"
        )
    return split_pairs(pairs, given.split, seed=given.seed)


def model_of(
    given: argparse.Namespace, parts: list[list], encoder: str | Path, tell: bool
) -> PairwiseModel:
    """A new head on the encoder, of which what --freeze says stays as it is."""
    ties = any(
        pair.label == 2 or (isinstance(pair.label, tuple) and pair.label[2])
        for p in parts
        for pair in p
    )
    surface = (
        given.surface if given.surface is not None else SURFACE if given.link != "concat" else []
    )
    model = PairwiseModel.from_encoder(
        encoder,
        dtype=getattr(torch, given.dtype),
        depth=given.depth,
        link=given.link,
        pooling=given.pooling,
        append_prompt=given.append_prompt,
        surface=surface,
        max_tokens=given.max_tokens,
        dropout=given.dropout,
        hidden_features=given.hidden,
        ties=ties,
    )
    told = freeze_(model, given.freeze)
    if tell:
        print(f"{told}\n{model.packing}")
    return model


def rate_of(given: argparse.Namespace) -> float:
    """The learning rate, of the encoder where a pretrained one trains."""
    return given.lr or (3e-5 if given.freeze != "all" and given.encoder is not None else 1e-3)


def trainer_of(
    given: argparse.Namespace, data: list, keep: bool = True, **options: Any
) -> PairwiseTrainer:
    """A trainer that keeps the best epoch, or, without ``keep``, no checkpoint.

    ``options`` are the model.
    """
    world, frozen = int(os.environ.get("WORLD_SIZE", 1)), given.freeze == "all"
    tuned = not frozen and given.encoder is not None
    when = "steps" if given.smoke else "epoch"
    arguments = TrainingArguments(
        str(given.out / "checkpoints"),
        num_train_epochs=given.epochs or (8 if frozen else 3),
        max_steps=6 if given.smoke else -1,
        per_device_train_batch_size=given.batch // world,
        learning_rate=rate_of(given),
        warmup_steps=0.1,
        lr_scheduler_type="cosine",
        weight_decay=given.weight_decay,
        seed=given.seed,
        eval_strategy=when,
        save_strategy=when if keep else "no",
        eval_steps=3,
        save_steps=3,
        save_total_limit=2,
        load_best_model_at_end=keep,
        metric_for_best_model="log_loss",
        greater_is_better=False,
        logging_steps=50,
        report_to="none",
        use_cpu=not torch.accelerator.is_available(),
    )
    return PairwiseTrainer(
        args=arguments,
        train_dataset=data[0],
        eval_dataset=data[1],
        layer_decay=given.layer_decay,
        head_lr_ratio=given.head_lr_ratio if tuned else 1.0,
        callbacks=[EarlyStoppingCallback(3)] if keep else [],
        **options,
    )


def asked_for(given: argparse.Namespace, model: PairwiseModel) -> Asked:
    """What --evaluate and --submit name, read before anything is trained.

    Raises:
        ValueError: A file that cannot be read, or further pairs without labels or with such as the
            model does not know.
    """
    evaluate, ids, pairs = {}, [], []
    for name in given.evaluate:
        found, _ = read_pairs(name)
        if any(pair.label is None for pair in found):
            raise ValueError(f"--evaluate {name} has pairs without a label; see --submit")
        try:
            evaluate[name] = model.dataset(found)
        except ValueError as error:
            raise ValueError(f"--evaluate {name}: {error}") from error
    for line, row, pair in each_pair(given.submit) if given.submit else ():
        ids.append(str(row.get("id", line)) if isinstance(row, Mapping) else str(line))
        if isinstance(pair, ValueError):
            print(f"--submit {given.submit}: row {line} gets the mean of the others: {pair}")
        pairs.append(None if isinstance(pair, ValueError) else pair._replace(label=None))
    if given.submit and not any(pairs):
        raise ValueError(f"--submit {given.submit}: no row is a pair")
    return Asked(evaluate, ids, pairs)


def submit(given: argparse.Namespace, model: PairwiseModel, asked: Asked) -> Path:
    """Verdicts on pairs without labels, in the columns of Kaggle's Chatbot Arena.

    Of its WSDM cup, where none tie.
    """
    found = predict_pairs(
        model, model.dataset([pair for pair in asked.pairs if pair])
    ).probabilities
    mean, held, path = found.mean(0), iter(found), given.out / "submission.csv"
    columns = (
        [f"winner_{name}" for name in ("model_a", "model_b", "tie")]
        if model.config.ties
        else ["winner"]
    )
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["id", *columns])
        for one, pair in zip(asked.ids, asked.pairs, strict=True):
            shares = mean if pair is None else next(held)
            told = (
                [f"{p:.6f}" for p in shares]
                if model.config.ties
                else [("model_a", "model_b")[int(shares.argmax())]]
            )
            writer.writerow([one, *told])
    return path


def finish(given: argparse.Namespace, model: PairwiseModel, data: list, asked: Asked) -> None:
    """Calibrate, save, judge the test pairs and what else was named, draw."""
    draws, train = can_draw(), data[0].pairs
    fitted = calibrate_(model, data[1])
    report = pairwise_report(model, data[2], train=train)
    model.save_pretrained(given.out / "model", report=report)
    told = [f"{report}\n{fitted}"]
    for name, further in asked.evaluate.items():
        if given.freeze == "all":
            further.encode_(model, cache=given.out / "features")
        told.append(f"{name}: {pairwise_report(model, further, train=train)}")
    (given.out / "report.txt").write_text("\n\n".join(told) + "\n", encoding="utf-8")
    (given.out / "metrics.json").write_text(json.dumps(report.metrics.to_dict(), indent=2) + "\n")
    drawn = [
        save_plot(draws, given.out / f"{name}.png", plot)
        for name, plot in (("calibration", report.plot), ("lengths", report.plot_lengths))
    ]
    print("\n" + "\n\n".join(told))
    if given.submit is not None:
        drawn.append(str(submit(given, model, asked)))
    print(
        f"\n{given.out / 'model'}, {given.out / 'report.txt'}, {given.out / 'metrics.json'}, "
        f"{', '.join(drawn)}"
    )


def prepared(
    given: argparse.Namespace, main: bool
) -> tuple[str | Path, list[list], PairwiseModel, list]:
    """The encoder's place, pairs, a model, and the pairs as it reads them.

    What cannot work is refused.
    """
    world = int(os.environ.get("WORLD_SIZE", 1))
    if given.batch < world or given.batch % world:
        raise ValueError(f"--batch {given.batch} cannot be divided over {world} processes")
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


def flags_of(given: argparse.Namespace) -> dict[str, str]:
    """Return the flags that a run has to have in common with the one in OUT, by its flags.json.

    Raises:
        ValueError: Other flags than those, and --resume, or a judge that would be lost.
    """
    flags = {name: str(value) for name, value in vars(given).items() if name not in MAY_CHANGE}
    place, judge = given.out / "flags.json", given.out / "model" / "config.json"
    if place.is_file() and (given.resume or judge.is_file()):
        before = json.loads(place.read_text(encoding="utf-8"))
        if other := [
            f"--{n.replace('_', '-')} {before.get(n)}" for n in flags if flags[n] != before.get(n)
        ]:
            last = "no --resume" if not judge.is_file() else "another --out"
            raise ValueError(
                f"{given.out} was begun with {', '.join(other)}; expected the same, or {last}"
            )
    return flags


def train(given: argparse.Namespace) -> None:
    main = int(os.environ.get("RANK", 0)) == 0
    flags = flags_of(given)
    _, _, model, data = prepared(given, main)
    asked = asked_for(given, model) if main else None
    trainer = trainer_of(given, data, model=model)
    begun = any((given.out / "checkpoints").glob("checkpoint-*"))
    if given.resume and main and not begun:
        print("there is no checkpoint: starting anew")
    if main:
        (given.out / "flags.json").write_text(json.dumps(flags, indent=1) + "\n", encoding="utf-8")
    trainer.train(resume_from_checkpoint=given.resume and begun)
    if trainer.resumed_from and main:
        print(f"went on from {trainer.resumed_from}")
    if asked is not None:
        finish(given, model, data, asked)


if __name__ == "__main__":
    try:
        train(parser().parse_args())
    except KeyboardInterrupt:
        sys.exit("\nstopped; the same command with --resume goes on from the last checkpoint")
    except DeadRunError as error:  # in the middle of a bar
        sys.exit(f"\ntrain_judge: {error}")
    except (OSError, ValueError) as error:
        sys.exit(f"train_judge: {error}")
