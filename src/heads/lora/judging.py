"""Answers and what they are worth: generation, judges without a service, and the table of runs."""

from __future__ import annotations

import csv
import math
import os
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm.auto import tqdm

from model_components._folders import make_folder
from model_components._modes import evaluating
from model_components._report import Axes, Figure, bars

from .rows import encode_prompt

Judge = Callable[[str, str], float]
"""(prompt, answer) to a score, 0 to 100."""


@torch.no_grad()
def generate_answers(
    model: Any, tokenizer: Any, prompts: Sequence[str], *, max_new_tokens: int = 64, batch_size: int = 8,
    truncation_side: str = "left", progress: bool = True, **options: Any,
) -> list[str]:  # fmt: skip
    """Greedy answers to prompts, without the prompts.

    Args:
        model: A causal language model.
        tokenizer: Its tokenizer.
        prompts: Texts, formatted as in training.
        max_new_tokens: An answer's length at most.
        batch_size: Prompts at once, padded at the left.
        truncation_side: Where prompts lose what is too much for the model's context; a warning counts them.
        progress: Show a bar.
        options: More of `generate`'s, such as ``do_sample``.

    Raises:
        ValueError: One text instead of a list, an empty prompt, no room for a prompt in the model's context.
    """
    if isinstance(prompts, str):
        raise ValueError("generate_answers: prompts is one text, needed a list of them")
    if truncation_side not in ("left", "right"):
        raise ValueError(f"generate_answers: truncation_side is {truncation_side!r}, needed left or right")
    rows = [encode_prompt(tokenizer, text) for text in prompts]
    context = getattr(model.config, "max_position_embeddings", None)
    room = max(map(len, rows), default=0) if context is None else context - max_new_tokens
    if room < 1 or not all(rows):
        raise ValueError(
            f"generate_answers: {max_new_tokens} new tokens in a context of {context}, {sum(not r for r in rows)} "
            "prompts are empty; needed room for a prompt, and one"
        )
    cut = sum(len(row) > room for row in rows)
    if cut:
        warnings.warn(
            f"generate_answers: {cut} prompts were cut to {room} tokens, on the {truncation_side}", stacklevel=2
        )
        rows = [row[-room:] if truncation_side == "left" else row[:room] for row in rows]
    made: list[str] = []
    device, end = next(model.parameters()).device, tokenizer.eos_token_id
    pad = end if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    with evaluating(model):
        for start in tqdm(range(0, len(rows), batch_size), "answering", disable=not progress, leave=False):
            batch = rows[start : start + batch_size]
            width = max(map(len, batch))
            ids = torch.tensor([[pad] * (width - len(row)) + row for row in batch], device=device)
            mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in batch], device=device)
            tokens = model.generate(
                input_ids=ids, attention_mask=mask, max_new_tokens=max_new_tokens, eos_token_id=end, pad_token_id=pad,
                **{"do_sample": False} | options,
            )  # fmt: skip
            made += [tokenizer.decode(row[width:], skip_special_tokens=True).strip() for row in tokens]
    return made


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def _common(a: Sequence[str], b: Sequence[str]) -> int:
    """Length of the longest common subsequence."""
    row = [0] * (len(b) + 1)
    for word in a:
        previous = 0
        for j, other in enumerate(b, 1):
            previous, row[j] = row[j], previous + 1 if word == other else max(row[j], row[j - 1])
    return row[-1]


class ReferenceOverlap:
    """A judge that knows a good answer: 100 times the F1 of the longest common subsequence of words (ROUGE-L).

    >>> ReferenceOverlap({"Capital of France?": "It is Paris."})("Capital of France?", "Paris")
    50.0
    """

    def __init__(self, references: Mapping[str, str]):
        self.references = dict(references)

    def __call__(self, prompt: str, answer: str) -> float:
        """A score, 0 to 100."""
        if prompt not in self.references:
            raise ValueError(f"ReferenceOverlap: there is no reference for the prompt {prompt[:60]!r}")
        said, good = _words(answer), _words(self.references[prompt])
        return 200.0 * _common(said, good) / (len(said) + len(good)) if said or good else 100.0


class ModelLikelihood:
    """A judge that is a language model: 100 times the geometric mean of its probabilities of an answer's tokens.

    Args:
        model: A causal language model, better than the one that is judged.
        tokenizer: Its tokenizer.
    """

    def __init__(self, model: nn.Module, tokenizer: Any):
        self.model, self.tokenizer = model.eval(), tokenizer

    @torch.no_grad()
    def __call__(self, prompt: str, answer: str) -> float:
        """A score, 0 to 100; an empty answer scores 0."""
        before = encode_prompt(self.tokenizer, prompt)
        own = list(self.tokenizer(answer, add_special_tokens=False)["input_ids"])
        if not own or not before:
            return 0.0
        ids = torch.tensor([before + own], device=next(self.model.parameters()).device)
        logits = self.model(input_ids=ids).logits[0, len(before) - 1 : -1].float()
        chosen = torch.log_softmax(logits, -1).gather(1, ids[0, len(before) :, None])
        return 100.0 * math.exp(float(chosen.mean()))


def judge_answers(judge: Judge, prompts: Sequence[str], answers: Sequence[str], *, progress: bool = True) -> float:
    """The mean score of answers.

    Raises:
        ValueError: As many prompts as answers are needed, one at least, and scores from 0 to 100.

    >>> judge_answers(lambda prompt, answer: 100.0 * (prompt == answer), ["a", "b"], ["a", "c"], progress=False)
    50.0
    """
    if len(prompts) != len(answers) or not prompts:
        raise ValueError(f"judge_answers: {len(prompts)} prompts and {len(answers)} answers; needed as many, and some")
    scores = []
    pairs = zip(prompts, answers, strict=True)
    for prompt, answer in tqdm(pairs, "judging", len(prompts), disable=not progress, leave=False):
        score = float(judge(prompt, answer))
        if not 0 <= score <= 100:
            raise ValueError(f"judge_answers: the judge gave {score} to {answer[:60]!r}, needed 0 to 100")
        scores.append(score)
    return sum(scores) / len(scores)


@dataclass(frozen=True, kw_only=True)
class Run:
    """A line of the table of runs. ``rank`` and ``alpha`` are empty for full fine-tuning."""

    name: str
    model: str
    data: str
    batch: int
    epochs: float
    optimizer: str
    lr: float
    min_lr: float
    warmup: float
    weight_decay: float
    rank: int | None
    alpha: float | None
    loss: float
    perplexity: float
    judge: float | None
    seconds: float
    notes: str = ""


def append_run(path: str | Path, run: Run) -> None:
    """Add a line to a CSV of runs; a file of other columns is refused.

    Raises:
        ValueError: The file exists and has other columns.

    >>> import tempfile
    >>> run = Run(name="a", model="m", data="d", batch=8, epochs=1, optimizer="adamw", lr=2e-4, min_lr=2e-5,
    ...           warmup=0.03, weight_decay=0, rank=16, alpha=32, loss=1.0, perplexity=2.718, judge=None, seconds=60)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     append_run(f"{folder}/runs.csv", run)
    ...     read_runs(f"{folder}/runs.csv")[0]["perplexity"]
    '2.718'
    """
    path, names = Path(path), [field.name for field in fields(Run)]
    if path.exists():
        with path.open(newline="", encoding="utf-8") as file:
            held = next(csv.reader(file), [])
        if held != names:
            raise ValueError(f"append_run: {path} has the columns {held}, needed {names}")
    make_folder(path.parent, "append_run")
    new = not path.exists()
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, names, lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerow(asdict(run))
        file.flush()
        os.fsync(file.fileno())


def read_runs(path: str | Path) -> list[dict[str, str]]:
    """The lines of a table of runs, as text."""
    with Path(path).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def plot_runs(path: str | Path, ax: Axes | None = None) -> Figure:
    """A table of runs as bars of perplexity, with the judge's score in their names (extra ``plot``).

    Args:
        path: The CSV.
        ax: Where to; default a new figure.

    Raises:
        ImportError: matplotlib is not installed.
    """
    values = {}
    for number, row in enumerate(read_runs(path), 1):
        judged = f", judged {float(row['judge']):.1f}" if row["judge"] else ""
        kind = f"r {row['rank']}" if row["rank"] else "full"
        values[f"{number}: {row['name']}, {kind}, {row['data']}{judged}"] = float(row["perplexity"])
    return bars(ax, "plot_runs", values, "perplexity of held-out answers")
