"""Commands: judge pairs, judge rank, judge report."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from model_components._cli import ON_TERMINAL
from model_components._devices import find_device
from model_components._folders import new_file
from model_components._hub import find_folder
from model_components._report import Report

from .choices import CLASSES

if TYPE_CHECKING:
    from .model import PairwiseModel

Row = dict[str, Any]


def pairs(
    model: str,
    file: Path,
    /,
    *,
    out: Path | None = None,
    columns: tuple[str, ...] = (),
    batch_size: int = 32,
    device: str = "cpu",
    progress: bool = ON_TERMINAL,
) -> Iterator[Row] | None:
    """Judge pairs of answers: A, B or tie with probabilities for each row, as JSON lines.

    Args:
        model: Folder or hub id of a judge.
        file: Pairs in any format of `read_pairs`, with labels or without.
        out: File to write; default: print.
        columns: Names in the file, as NAME=OWN: prompt=question a=first b=second.
        batch_size: Pairs at once.
        device: Where to compute.
        progress: Show a progress bar.
    """
    names = _columns(columns)
    judge = _judge(model, out, device, "judge pairs")
    return _written(_verdicts(judge, file, names, batch_size, progress), out, "judge pairs")


def rank(
    model: str,
    file: Path,
    /,
    *,
    out: Path | None = None,
    batch_size: int = 32,
    device: str = "cpu",
    progress: bool = ON_TERMINAL,
) -> Iterator[Row] | None:
    """Put the answers of each row in order, the best first, as JSON lines.

    Args:
        model: Folder or hub id of a judge.
        file: Rows with a prompt and a list of answers.
        out: File to write; default: print.
        batch_size: Pairs at once.
        device: Where to compute.
        progress: Show a progress bar.
    """
    judge = _judge(model, out, device, "judge rank")
    return _written(_orders(judge, file, batch_size, progress), out, "judge rank")


def report(
    model: str,
    file: Path,
    /,
    *,
    train: Path | None = None,
    columns: tuple[str, ...] = (),
    batch_size: int = 32,
    device: str = "cpu",
    progress: bool = ON_TERMINAL,
) -> Report:
    """Report what a judge's verdicts on labeled pairs are worth.

    Args:
        model: Folder or hub id of a judge.
        file: Labeled pairs in any format of `read_pairs`.
        train: The pairs that it was trained on; baselines are fitted on them.
        columns: Names in the file, as NAME=OWN: prompt=question a=first b=second.
        batch_size: Pairs at once.
        device: Where to compute.
        progress: Show a progress bar.
    """
    from .data.rows import read_pairs
    from .report.evaluation import pairwise_report

    names = _columns(columns)
    judge = _judge(model, None, device, "judge report")
    labeled, read = read_pairs(file, columns=names)
    print(f"{file}: {read}")
    baseline = None if train is None else read_pairs(train, columns=names)[0]
    data = judge.dataset(labeled, progress=progress)
    return pairwise_report(judge, data, train=baseline, batch_size=batch_size, progress=progress)


def _columns(columns: Sequence[str]) -> dict[str, str]:
    """Return the names and values of NAME=OWN.

    Raises:
        ValueError: One has no equals sign.
    """
    if wrong := [text for text in columns if "=" not in text]:
        raise ValueError(f"judge: --columns expects NAME=OWN, got {wrong[0]!r}")
    return dict(text.split("=", 1) for text in columns)


def _judge(model: str, out: Path | None, device: str, operation: str) -> PairwiseModel:
    """Load a judge once the output's place and the device are known to be good."""
    if out is not None and out.exists():
        raise ValueError(f"{operation}: {out} is there already; expected another --out")
    where = find_device(device, operation)
    folder = find_folder(model, operation=operation)
    from .model import PairwiseModel

    return PairwiseModel.from_pretrained(folder).eval().to(where)


def _written(rows: Iterable[Row], out: Path | None, operation: str) -> Iterator[Row] | None:
    """Write rows to a file as JSON lines; return them where there is none."""
    if out is None:
        return iter(rows)
    with new_file(out, operation) as part, part.open("w", encoding="utf-8") as file:
        file.writelines(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows)
    return None


def _verdicts(
    model: PairwiseModel, file: Path, columns: Mapping[str, str], batch_size: int, progress: bool
) -> Iterator[Row]:
    """Yield each row's verdict, or why there is none."""
    from .data.rows import each_pair
    from .inference import predict_pairs

    readable = []
    rows: list[Row] = []
    for line, row, pair in each_pair(file, columns=columns):
        rows.append({"line": line})
        if isinstance(row, Mapping) and "id" in row:
            rows[-1]["id"] = row["id"]
        if isinstance(pair, ValueError):
            rows[-1]["error"] = str(pair)
        else:
            readable.append(pair._replace(label=None))
    if not readable:
        why = f" (line {rows[0]['line']}: {rows[0]['error']})" if rows else ""
        raise ValueError(
            f"judge: {file} has no pair in {len(rows)} rows; expected prompt, a and b in each{why}"
        )
    data = model.dataset(readable, progress=progress)
    predictions = predict_pairs(model, data, batch_size=batch_size, progress=progress)
    verdicts = iter(zip(predictions.verdicts, predictions.probabilities.tolist(), strict=True))
    for row in rows:
        if "error" not in row:
            verdict, shares = next(verdicts)
            row["verdict"] = verdict
            # a judge without ties has two classes
            row |= {name: round(share, 6) for name, share in zip(CLASSES, shares, strict=False)}
        yield row


def _orders(model: PairwiseModel, file: Path, batch_size: int, progress: bool) -> Iterator[Row]:
    """Yield the places of each row's answers, the best first, and scores; or why there are none."""
    from tqdm.auto import tqdm

    from model_components._rows import each_row

    first = ""
    ranked = False
    for line, row in tqdm(
        each_row(file, "judge rank"), "ranking", disable=not progress, leave=False, delay=1
    ):
        answers = row.get("answers") if isinstance(row, Mapping) else None
        try:
            if not isinstance(answers, list) or "prompt" not in row:
                raise ValueError("no prompt and list of answers; expected both")
            ranking = model.rank(row["prompt"], answers, batch_size=batch_size)
        except ValueError as error:
            first = first or f" (line {line}: {error})"
            yield {"line": line, "error": str(error)}
            continue
        ranked = True
        scores = [round(score, 4) for score in ranking.scores.tolist()]
        yield {"line": line, "order": list(ranking.order), "scores": scores}
    if not ranked:
        raise ValueError(
            f"judge rank: {file} has no row with a prompt and a list of answers{first}"
        )
