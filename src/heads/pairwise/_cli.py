"""The commands ``judge train``, ``judge pairs``, ``judge rank`` and ``judge report``."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from model_components._cli import RunFlags, json_line
from model_components._devices import find_device
from model_components._folders import new_file
from model_components._hub import find_folder
from model_components._report import Report
from model_components._rows import each_row

from .choices import CLASSES
from .judge_config import JudgeConfig

if TYPE_CHECKING:
    from .data.rows import Pair
    from .model import PairwiseModel

Row = dict[str, Any]


def train(
    file: str,
    out: Path,
    /,
    *,
    encoder: str,
    judge_config: JudgeConfig,
    columns: tuple[str, ...] = (),
    run_flags: RunFlags,
) -> Report | None:
    """Train a judge on labeled pairs, save it, and compare it with baselines in a report.

    To continue an interrupted run, run the same command again.

    Args:
        file: File or hub id of labeled pairs, as JSON, JSON Lines, CSV, TSV or Parquet. The columns
            are prompt, a, b and label, or the columns of Chatbot Arena, preference data (chosen
            and rejected) or AlpacaEval.
        out: Output folder: a new path, or the folder of a run to continue.
        encoder: Folder or hub id of an encoder or a language model.
        judge_config: Settings of the run.
        columns: Column names of FILE if they are not prompt, a, b and label, each as FIELD=COLUMN.
            Example: prompt=question a=first b=second label=better.
        run_flags: The device, and whether to show progress.
    """
    from .training.run import train_judge

    return train_judge(
        file,
        encoder,
        out=out,
        columns=_columns(columns),
        device=run_flags.device,
        progress=run_flags.progress,
        **judge_config.to_dict(),
    )


def pairs(
    model: str,
    file: Path,
    out: Path | None = None,
    /,
    *,
    columns: tuple[str, ...] = (),
    batch_size: int = 32,
    run_flags: RunFlags,
) -> Iterator[Row] | None:
    """Judge pairs of answers; write each row's verdict and probabilities as a line of JSON.

    Args:
        model: Folder or hub id of a judge.
        file: File of pairs with the columns prompt, a and b, as JSON, JSON Lines, CSV, TSV or
            Parquet. Labels are ignored.
        out: Output file, which must not exist; default: standard output.
        columns: Column names of FILE if they are not prompt, a and b, each as FIELD=COLUMN.
            Example: prompt=question a=first b=second.
        batch_size: Number of pairs per batch.
        run_flags: The device, and whether to show progress.
    """
    from .data.rows import each_pair

    where = _checked_device(out, run_flags.device, batch_size, "judge pairs")
    rows, readable = _readable(each_pair(file, columns=_columns(columns), labels=False), file)
    # read the file before loading the model, so that a wrong column name fails early
    judge = _load(model, where, "judge pairs")
    verdicts = _verdicts(judge, rows, readable, batch_size, run_flags.progress)
    return _write_or_return(verdicts, out, "judge pairs")


def rank(
    model: str,
    file: Path,
    out: Path | None = None,
    /,
    *,
    batch_size: int = 32,
    run_flags: RunFlags,
) -> Iterator[Row] | None:
    """Rank the answers in each row from best to worst; write a line of JSON for each row.

    Args:
        model: Folder or hub id of a judge.
        file: File of rows with the fields prompt and answers (a list).
        out: Output file, which must not exist; default: standard output.
        batch_size: Number of pairs per batch.
        run_flags: The device, and whether to show progress.
    """
    where = _checked_device(out, run_flags.device, batch_size, "judge rank")
    # read all rows now, so that an unreadable file fails before the model is loaded
    rows = list(each_row(file, "judge rank"))
    # if no row has both fields, one error is better than an error for each row
    if not any(isinstance(row, Mapping) and {"prompt", "answers"} <= set(row) for _, row in rows):
        came = f"{rows[0][1]!r:.80} in line {rows[0][0]}" if rows else "no rows"
        raise ValueError(
            f"judge rank: expected the fields prompt and answers (a list) in each row of {file}, "
            f"got {came}"
        )
    judge = _load(model, where, "judge rank")
    orders = _orders(judge, rows, batch_size, run_flags.progress)
    return _write_or_return(orders, out, "judge rank")


def report(
    model: str,
    file: Path,
    /,
    *,
    train: Path | None = None,
    columns: tuple[str, ...] = (),
    batch_size: int = 32,
    run_flags: RunFlags,
) -> Report:
    """Evaluate a judge on labeled pairs, and compare it with simple baselines.

    Args:
        model: Folder or hub id of a judge.
        file: File of labeled pairs, in a format that judge train reads.
        train: File of the judge's training pairs, on which the baselines are fitted; default: no
            baselines.
        columns: Column names of both files if they are not prompt, a, b and label, each as
            FIELD=COLUMN. Example: prompt=question a=first b=second label=better.
        batch_size: Number of pairs per batch.
        run_flags: The device, and whether to show progress.
    """
    from .data.rows import read_pairs
    from .report.evaluation import pairwise_report

    where = _checked_device(None, run_flags.device, batch_size, "judge report")
    names = _columns(columns)
    baseline = None if train is None else read_pairs(train, columns=names)[0]
    labeled, read = read_pairs(file, columns=names)
    print(f"{file}: {read}")
    judge = _load(model, where, "judge report")
    progress = run_flags.progress
    data = judge.dataset(labeled, progress=progress)
    return pairwise_report(judge, data, train=baseline, batch_size=batch_size, progress=progress)


def _columns(columns: Sequence[str]) -> dict[str, str]:
    """Parse strings of the form ``FIELD=COLUMN`` into a dictionary from fields to columns.

    Raises:
        ValueError: A string has no equals sign.
    """
    if wrong := [text for text in columns if "=" not in text]:
        raise ValueError(f"judge: expected --columns of the form FIELD=COLUMN, got {wrong[0]!r}")
    return dict(text.split("=", 1) for text in columns)


def _checked_device(out: Path | None, device: str, batch_size: int, operation: str) -> str:
    """Check device, output path and batch size before any file is read; return the device.

    Raises:
        ValueError: The device cannot be used, the output file exists, or the batch size is below 1.
    """
    where = find_device(device, operation)
    if batch_size < 1:
        raise ValueError(f"{operation}: --batch-size is {batch_size}, expected 1 or more")
    if out is not None and out.exists():
        raise ValueError(f"{operation}: expected the path of a new file, but {out} exists")
    return where


def _load(model: str, device: str, operation: str) -> PairwiseModel:
    """Load a judge onto a device."""
    folder = find_folder(model, operation=operation)
    # import this only after the folder is found, because importing transformers takes seconds
    from .model import PairwiseModel

    return PairwiseModel.from_pretrained(folder).eval().to(device)


def _write_or_return(rows: Iterable[Row], out: Path | None, operation: str) -> Iterator[Row] | None:
    """Write rows to a file as JSON lines, or return them if no file is given."""
    if out is None:
        return iter(rows)
    # the file appears only when all rows are written, so a partial file never looks complete
    with new_file(out, operation) as part, part.open("w", encoding="utf-8") as file:
        file.writelines(f"{json_line(row, 'utf-8')}\n" for row in rows)
    return None


def _readable(
    pairs: Iterable[tuple[int, object, Pair | ValueError]], file: Path
) -> tuple[list[Row], list[Pair]]:
    """Return an output row for each row of a file, and the pairs that could be read.

    If a row cannot be read as a pair, its output row has an error instead of a verdict.

    Raises:
        ValueError: No row can be read as a pair.
    """
    rows: list[Row] = []
    readable = []
    for line, row, pair in pairs:
        rows.append({"line": line})
        if isinstance(row, Mapping) and "id" in row:
            rows[-1]["id"] = row["id"]
        if isinstance(pair, ValueError):
            rows[-1]["error"] = str(pair)
        else:
            readable.append(pair)
    if not readable:
        why = f" (line {rows[0]['line']}: {rows[0]['error']})" if rows else ""
        raise ValueError(
            f"judge pairs: expected rows with a prompt and two answers, got none in the "
            f"{len(rows)} rows of {file}{why}"
        )
    if len(readable) < len(rows):
        print(
            f"{file}: {len(rows) - len(readable)} of {len(rows)} rows could not be read as pairs; "
            "the output gives the reasons"
        )
    return rows, readable


def _verdicts(
    model: PairwiseModel,
    rows: Sequence[Row],
    readable: Sequence[Pair],
    batch_size: int,
    progress: bool,
) -> Iterator[Row]:
    """Yield the output rows, with a verdict in each row that has no error."""
    from .inference import predict_pairs

    data = model.dataset(readable, progress=progress)
    predictions = predict_pairs(model, data, batch_size=batch_size, progress=progress)
    verdicts = iter(zip(predictions.verdicts, predictions.probabilities.tolist(), strict=True))
    for row in rows:
        if "error" not in row:
            verdict, probabilities = next(verdicts)
            row["verdict"] = verdict
            # not strict: a judge without ties has two classes
            named = zip(CLASSES, probabilities, strict=False)
            row |= {name: round(probability, 6) for name, probability in named}
        yield row


def _answers_of(value: object) -> list[Any]:
    """Return a list of answers; a string, such as a CSV cell, is parsed as JSON.

    Raises:
        ValueError: The value is not a list.
    """
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            value = json.loads(value)
    if not isinstance(value, list):
        raise ValueError(f"expected the field answers to be a list, got {value!r:.60}")
    return value


def _orders(
    model: PairwiseModel,
    rows: Sequence[tuple[int, Any]],
    batch_size: int,
    progress: bool,
) -> Iterator[Row]:
    """Yield the order and the scores of each row's answers, or an error with the reason."""
    from tqdm.auto import tqdm

    for line, row in tqdm(rows, "ranking", disable=not progress, leave=False, delay=1):
        try:
            if not isinstance(row, Mapping) or "prompt" not in row:
                raise ValueError(
                    f"expected the fields prompt and answers (a list), got {row!r:.80}"
                )
            answers = _answers_of(row.get("answers"))
            ranking = model.rank(row["prompt"], answers, batch_size=batch_size)
        except ValueError as error:
            yield {"line": line, "error": str(error)}
            continue
        scores = [round(score, 4) for score in ranking.scores.tolist()]
        yield {"line": line, "order": list(ranking.order), "scores": scores}
