r"""Train a judge that predicts the better of two answers, and write a file for a competition.

    python examples/train_judge.py                     # made-up pairs, a small encoder; a minute
    python examples/train_judge.py --data train.csv --encoder models/SmolLM2-135M-Instruct \
        --settings max_tokens=512 dtype=bfloat16 --submit test.csv

The script calls `heads.pairwise.train_judge`, like the command `model-components judge train`:
prompts are held out, the best epoch is kept, and the report compares the judge with baselines that
need no encoder. --data is a file in a format of `read_pairs`, such as the Chatbot Arena's, or a
data set's hub id. OUT receives the judge, its report and, with --submit, submission.csv. This file
has the columns of Kaggle's Chatbot Arena or, if no pair ties, of Kaggle's WSDM Cup. The same
command continues an interrupted run.
"""

import argparse
import csv
import sys
from collections.abc import Mapping
from pathlib import Path

import yaml
from name_a_thing import made_up, own_encoder

from heads.pairwise import Pair, PairwiseModel, each_pair, predict_pairs, train_judge
from model_components import DeadRunError

SMOKE = {"epochs": 1, "batch_size": 16}


def submitted(path: Path) -> tuple[list[str], list[Pair | None]]:
    """Return the ids and the pairs of a file, with None for an invalid row."""
    ids, pairs = [], []
    for line, row, pair in each_pair(path, labels=False):
        ids.append(str(row.get("id", line)) if isinstance(row, Mapping) else str(line))
        if isinstance(pair, ValueError):
            print(f"--submit {path}: row {line} is invalid and gets the mean verdict: {pair}")
        pairs.append(pair if isinstance(pair, Pair) else None)
    if not any(pairs):
        raise ValueError(f"--submit {path}: expected rows with pairs, got no valid row")
    return ids, pairs


def submit(judge: PairwiseModel, ids: list[str], pairs: list[Pair | None], path: Path) -> None:
    """Write the judge's verdicts on pairs; an invalid row gets the mean verdict."""
    data = judge.dataset([pair for pair in pairs if pair])
    found = predict_pairs(judge, data).probabilities
    mean = found.mean(0)
    held = iter(found)
    columns = ["winner"]
    if judge.config.ties:
        columns = ["winner_model_a", "winner_model_b", "winner_tie"]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["id", *columns])
        for one, pair in zip(ids, pairs, strict=True):
            shares = mean if pair is None else next(held)
            if judge.config.ties:
                told = [f"{share:.6f}" for share in shares]
            else:
                told = [("model_a", "model_b")[int(shares.argmax())]]
            writer.writerow([one, *told])


def main() -> None:
    """Train the judge, print its report, and write the submission."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data", help="labeled pairs: a file or a hub id; default: made-up pairs")
    add("--encoder", help="a folder or a hub id; default: a small encoder, trained from scratch")
    add("--settings", nargs="+", default=[], metavar="NAME=VALUE", help="fields of JudgeConfig")
    add("--device", default="cpu", help="device to compute on, such as cuda")
    add("--submit", type=Path, metavar="FILE", help="file of pairs without labels, to judge")
    add("--out", type=Path, default=Path("runs/judge"))
    add("--smoke", action="store_true", help="run for a few seconds, to test the script")
    given = parser.parse_args()
    settings = SMOKE.copy() if given.smoke else {}
    for setting in given.settings:
        name, _, value = setting.partition("=")
        settings[name] = yaml.safe_load(value)
    if given.encoder is None:
        settings.setdefault("freeze", "none")  # its weights are random
        settings.setdefault("learning_rate", 1e-3)
    asked = None if given.submit is None else submitted(given.submit)
    report = train_judge(
        given.data or made_up(600 if given.smoke else 5000, seed=0),
        given.encoder or own_encoder(given.out.with_name(f"{given.out.name}-encoder")),
        out=given.out,
        device=given.device,
        **settings,
    )
    if report is None:  # a process other than the first
        return
    print(report)
    if asked is not None:
        judge = PairwiseModel.from_pretrained(given.out / "model").eval()
        submit(judge, *asked, given.out / "submission.csv")
        print(given.out / "submission.csv")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("\nstopped; the same command continues from the last checkpoint")
    except DeadRunError as error:  # a progress bar may be unfinished
        sys.exit(f"\ntrain_judge: {error}")
    except (OSError, ValueError) as error:
        sys.exit(f"train_judge: {error}")
