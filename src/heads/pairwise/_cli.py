"""Commands: judge pairs, judge rank, judge report."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from model_components._cli import Running
from model_components._devices import find_device
from model_components._folders import new_file
from model_components._hub import find_folder
from model_components._report import Report
from model_components._rows import each_row

from .choices import CLASSES

if TYPE_CHECKING:
    from .model import PairwiseModel

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Judging(Running):
    """How a judge runs.

    Args:
        batch_size: Number of pairs computed at once.
        device: Device that computes, such as cpu or cuda.
        progress: Show a progress bar; default: only on a terminal.
    """

    batch_size: int = 32


def pairs(
    model: str,
    file: Path,
    out: Path | None = None,
    /,
    *,
    columns: tuple[str, ...] = (),
    judging: Judging,
) -> Iterator[Row] | None:
    """Judge pairs of answers: A, B or tie with probabilities for each row, as JSON lines.

    Args:
        model: Folder or hub id of a judge.
        file: Pairs with prompt, a and b: JSON, JSON lines, CSV, TSV or parquet. Labels are
            optional.
        out: Output file: a new path; default: print.
        columns: Columns with other names, as FIELD=COLUMN: prompt=question a=first b=second.
        judging: How it runs.
    """
    names = _columns(columns)
    judge = _judge(model, file, out, judging.device, "judge pairs")
    return _write_or_return(_verdicts(judge, file, names, judging), out, "judge pairs")


def rank(
    model: str,
    file: Path,
    out: Path | None = None,
    /,
    *,
    judging: Judging,
) -> Iterator[Row] | None:
    """Rank the answers of each row, the best first; write JSON lines.

    Args:
        model: Folder or hub id of a judge.
        file: Rows with a prompt and a list of answers.
        out: Output file: a new path; default: print.
        judging: How it runs.
    """
    judge = _judge(model, file, out, judging.device, "judge rank")
    return _write_or_return(_orders(judge, file, judging), out, "judge rank")


def report(
    model: str,
    file: Path,
    /,
    *,
    train: Path | None = None,
    columns: tuple[str, ...] = (),
    judging: Judging,
) -> Report:
    """Compare a judge's verdicts with labels and with simple baselines.

    Args:
        model: Folder or hub id of a judge.
        file: Labeled pairs, in the formats of judge pairs.
        train: The judge's training pairs, to which the baselines are fitted.
        columns: Columns with other names, as FIELD=COLUMN: prompt=question a=first b=second.
        judging: How it runs.
    """
    from .data.rows import read_pairs
    from .report.evaluation import pairwise_report

    names = _columns(columns)
    baseline = None if train is None else read_pairs(train, columns=names)[0]
    labeled, read = read_pairs(file, columns=names)
    print(f"{file}: {read}")
    judge = _judge(model, file, None, judging.device, "judge report")
    data = judge.dataset(labeled, progress=judging.progress)
    return pairwise_report(
        judge,
        data,
        train=baseline,
        batch_size=judging.batch_size,
        progress=judging.progress,
    )


def _columns(columns: Sequence[str]) -> dict[str, str]:
    """Return fields and columns of FIELD=COLUMN.

    Raises:
        ValueError: One has no equals sign.
    """
    if wrong := [text for text in columns if "=" not in text]:
        raise ValueError(f"judge: --columns must be FIELD=COLUMN, got {wrong[0]!r}")
    return dict(text.split("=", 1) for text in columns)


def _judge(model: str, file: Path, out: Path | None, device: str, operation: str) -> PairwiseModel:
    """Load a judge. The device and the files are checked first, as loading is slow.

    Raises:
        ValueError: The device cannot be used, the output exists, or the input cannot be read.
    """
    where = find_device(device, operation)
    if out is not None and out.exists():
        raise ValueError(f"{operation}: expected a new file, but {out} exists")
    next(iter(each_row(file, operation)), None)
    folder = find_folder(model, operation=operation)
    from .model import PairwiseModel

    return PairwiseModel.from_pretrained(folder).eval().to(where)


def _write_or_return(rows: Iterable[Row], out: Path | None, operation: str) -> Iterator[Row] | None:
    """Write rows to a file as JSON lines, or return them if no file is given."""
    if out is None:
        return iter(rows)
    with new_file(out, operation) as part, part.open("w", encoding="utf-8") as file:
        file.writelines(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows)
    return None


def _verdicts(
    model: PairwiseModel, file: Path, columns: Mapping[str, str], judging: Judging
) -> Iterator[Row]:
    """Yield each row's verdict, or an error with the reason."""
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
            f"judge pairs: expected prompt, a and b in each row, got no pair in {len(rows)} rows "
            f"of {file}{why}"
        )
    data = model.dataset(readable, progress=judging.progress)
    predictions = predict_pairs(
        model, data, batch_size=judging.batch_size, progress=judging.progress
    )
    verdicts = iter(zip(predictions.verdicts, predictions.probabilities.tolist(), strict=True))
    for row in rows:
        if "error" not in row:
            verdict, probabilities = next(verdicts)
            row["verdict"] = verdict
            # not strict: a judge without ties has two classes
            named = zip(CLASSES, probabilities, strict=False)
            row |= {name: round(probability, 6) for name, probability in named}
        yield row


def _orders(model: PairwiseModel, file: Path, judging: Judging) -> Iterator[Row]:
    """Yield the order and the scores of each row's answers, or an error with the reason."""
    from tqdm.auto import tqdm

    first = ""
    ranked = False
    for line, row in tqdm(
        each_row(file, "judge rank"), "ranking", disable=not judging.progress, leave=False, delay=1
    ):
        answers = row.get("answers") if isinstance(row, Mapping) else None
        try:
            if not isinstance(answers, list) or "prompt" not in row:
                raise ValueError("no prompt and list of answers; expected both")
            ranking = model.rank(row["prompt"], answers, batch_size=judging.batch_size)
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
