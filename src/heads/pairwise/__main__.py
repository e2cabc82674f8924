"""The command line: ``python -m heads.pairwise judge|report|rank``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tqdm.auto import tqdm

from model_components._commands import run_command
from model_components._devices import find_device
from model_components._folders import new_file
from model_components._hub import find_folder

from .choices import CLASSES
from .data.rows import each_pair, raw_rows, read_pairs
from .inference import predict_pairs
from .model import PairwiseModel
from .report.evaluation import pairwise_report


def column(text: str) -> tuple[str, str]:
    """Parse ``NAME=OWN`` for argparse."""
    name, sign, own = text.partition("=")
    if not sign:
        raise argparse.ArgumentTypeError(f"{text!r} has no sign; expected NAME=OWN")
    return name, own


def parser() -> argparse.ArgumentParser:
    """The arguments."""
    top = argparse.ArgumentParser(
        prog="python -m heads.pairwise", description="Judge answers by a trained model."
    )
    commands = top.add_subparsers(dest="command", required=True)
    judging = commands.add_parser(
        "judge", help="A, B or tie for each row of pairs, with probabilities, as JSON lines"
    )
    ranking = commands.add_parser(
        "rank", help="the order of each row's answers, the best first, as JSON lines"
    )
    reporting = commands.add_parser("report", help="what verdicts on labelled pairs are worth")
    files = {
        judging: "pairs in any format of `read_pairs`, with labels or without",
        ranking: "rows with a prompt and a list of answers",
        reporting: "labelled pairs",
    }
    for command, description in files.items():
        command.add_argument("model", help="folder or hub id of a judge")
        command.add_argument("file", help=description)
        command.add_argument("--device", default="cpu", help="to run on (default: cpu)")
        command.add_argument(
            "--batch-size", type=int, default=32, help="pairs at once (default: 32)"
        )
        command.add_argument("--out", type=Path, help="file to write (default: print)")
        command.add_argument("--no-progress", action="store_true", help="no progress bar")
    for command in (judging, reporting):
        command.add_argument(
            "--columns",
            nargs="+",
            default=[],
            metavar="NAME=OWN",
            type=column,
            help="where the file has other names: prompt=question a=first b=second",
        )
    reporting.add_argument(
        "--train", metavar="FILE", help="the pairs it was trained on: baselines are fitted on them"
    )
    return top


def judged(model: PairwiseModel, options: argparse.Namespace) -> Iterator[str]:
    """A line for each row: its verdict, or why there is none."""
    pairs = []
    told = []
    for line, row, pair in each_pair(options.file, columns=dict(options.columns)):
        if isinstance(row, Mapping) and "id" in row:
            known = {"id": row["id"]}
        else:
            known = {}
        told.append({"line": line, **known})
        if isinstance(pair, ValueError):
            told[-1]["error"] = str(pair)
        else:
            pairs.append(pair._replace(label=None))
    if not pairs:
        why = f" (line {told[0]['line']}: {told[0]['error']})" if told else ""
        raise ValueError(
            f"judge: {options.file} has no pair in {len(told)} rows; expected prompt, a and b in "
            f"each{why}"
        )
    data = model.dataset(pairs, progress=not options.no_progress)
    predictions = predict_pairs(
        model, data, batch_size=options.batch_size, progress=not options.no_progress
    )
    verdicts = iter(zip(predictions.verdicts, predictions.probabilities.tolist(), strict=True))
    for row in told:
        if "error" not in row:
            verdict, shares = next(verdicts)
            row |= {"verdict": verdict} | {
                n: round(p, 6) for n, p in zip(CLASSES, shares, strict=False)
            }
        yield json.dumps(row, ensure_ascii=False)


def ranked(model: PairwiseModel, options: argparse.Namespace) -> Iterator[str]:
    """A line for each row: places of its answers, the best first, and their scores.

    A row without them says why.
    """
    first = None
    good = False
    for line, row in tqdm(
        raw_rows(options.file), "ranking", disable=options.no_progress, leave=False, delay=1
    ):
        answers = row.get("answers") if isinstance(row, Mapping) else None
        try:
            if not isinstance(answers, list) or "prompt" not in row:
                raise ValueError("no prompt and list of answers; expected both")
            ranking = model.rank(row["prompt"], answers, batch_size=options.batch_size)
        except ValueError as error:
            first = first or f" (line {line}: {error})"
            yield json.dumps({"line": line, "error": str(error)}, ensure_ascii=False)
            continue
        good = True
        scores = [round(score, 4) for score in ranking.scores.tolist()]
        yield json.dumps({"line": line, "order": list(ranking.order), "scores": scores})
    if not good:
        raise ValueError(
            f"rank: {options.file} has no row with a prompt and a list of answers{first or ''}"
        )


def reported(model: PairwiseModel, options: argparse.Namespace) -> Iterator[str]:
    """The report."""
    columns = dict(options.columns)
    pairs, read = read_pairs(options.file, columns=columns)
    if options.train:
        train = read_pairs(options.train, columns=columns)[0]
    else:
        train = None
    progress = not options.no_progress
    data = model.dataset(pairs, progress=progress)
    yield f"{options.file}: {read}"
    yield str(
        pairwise_report(model, data, train=train, batch_size=options.batch_size, progress=progress)
    )


COMMANDS = {"judge": judged, "rank": ranked, "report": reported}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    options = parser().parse_args(arguments)
    return run_command("heads.pairwise", lambda: _run(options))


def _run(options: argparse.Namespace) -> None:
    if options.out is not None and options.out.exists():
        raise ValueError(
            f"{options.command}: {options.out} is there already; expected another --out"
        )
    device = find_device(options.device, options.command)
    model = PairwiseModel.from_pretrained(find_folder(options.model)).eval().to(device)
    lines = COMMANDS[options.command](model, options)
    if options.out is None:
        for line in lines:
            print(line, flush=True)
        return
    with new_file(options.out, options.command) as part, part.open("w", encoding="utf-8") as file:
        file.writelines(f"{line}\n" for line in lines)


if __name__ == "__main__":
    sys.exit(main())
