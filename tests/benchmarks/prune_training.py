"""Training SmolLM2 after `prune_`: its three methods, two sizes, all weights or LoRA.

Each model is distilled for 300 steps from the original, on text of the calibration set's kind. The
loss is measured on that kind of text and on another, beside the share of tokens that the model
predicts first and the share of instructions whose own answer it prefers to three others. The
original, trained on the same text for as long, shows what the text alone is worth. Learning rates
are chosen by short runs on text that is in neither set. Existing rows are kept; ``--only`` selects
starts. Skipped where the model's package or the data are absent.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainingArguments

from heads.lora import inject_lora_
from kronecker import DistillConfig, KroneckerTrainer, PruneConfig, num_parameters, prune_
from kronecker.data.text import text_batches
from tests.benchmarks.prune_model import CONTEXT, HELD_OUT, TOKENS, difference, texts
from tests.benchmarks.results import KRONECKER_GUIDE, RESULTS, commit, hardware, put, today
from tests.support import real

FOUND, WORK = RESULTS / "prune_training.json", Path(__file__).parent / "work" / "prune_training"
STEPS, SHORT, ROWS, LENGTH = 300, 40, 2, 128
"""Steps of a run and of one that chooses a rate; rows of a step, and tokens of a row."""
RANK = 16
RATES = {"all": (1e-4, 2e-4, 4e-4), "LoRA": (1e-3, 2e-3, 4e-3)}
QUESTIONS, OPTIONS, ANSWER = 100, 4, 20
"""Instructions, answers to choose from, and tokens of an answer that are compared."""
ORIGINAL = "original"
BEST = "best"
STARTS = (BEST, "fast", "blocks")
RUNS = [(0.7, start, "all") for start in STARTS]
RUNS += [(0.7, BEST, "LoRA"), (1.0, ORIGINAL, "all")]
RUNS += [(0.9, start, "all") for start in STARTS]
RUNS += [(0.7, "fast", "LoRA"), (0.7, "blocks", "LoRA"), (0.9, BEST, "LoRA")]


class Study:
    """The model, its text, and what is measured of it."""

    def __init__(self) -> None:
        self.folder = real.smollm2()
        self.tokenizer = AutoTokenizer.from_pretrained(self.folder)
        found, encode = texts(), self.tokenizer.encode
        self.calibration = text_batches(
            found["calibration"], encode, tokens=TOKENS, context=CONTEXT
        )
        self.held_out = {
            name: text_batches(found[name], encode, tokens=HELD_OUT, context=CONTEXT)
            for name in ("in_domain", "out_of_domain")
        }
        rows = real.alpaca(5000)
        tokens = STEPS * ROWS * LENGTH
        self.train = text_batches(
            _running(rows[:3500]), encode, tokens=tokens, context=LENGTH, rows=1
        )
        # neither trained on nor held out: rates are chosen on these
        self.choosing = text_batches(
            _running(rows[3500:4000]), encode, tokens=HELD_OUT, context=CONTEXT
        )
        self.questions = [row for row in rows[4000:] if len(row["output"]) > 120][:QUESTIONS]

    def original(self) -> Any:
        """Return the model in float32."""
        return AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32).eval()

    def smaller(self, size: float, start: str) -> Any:
        """Return the model with a share of its parameters; its fit is kept."""
        model = self.original()
        if start != ORIGINAL:
            config = PruneConfig.from_dict({"size": size, "method": start})
            place = WORK / f"{size} {start}"
            prune_(model, config, calibration=self.calibration, cache=place, progress=False)
        return model

    def measured(self, model: Any) -> dict[str, Any]:
        """Return the losses of each row of held-out text, and the shares that are right."""
        found: dict[str, Any] = {}
        for name, batches in self.held_out.items():
            losses, right = predictions(model, batches)
            found |= {name: losses, f"{name}_right": right}
        return found | {"choice": self.choice(model)}

    @torch.no_grad()
    def choice(self, model: Any) -> float:
        """Return the share of instructions whose own answer is the most probable of four."""
        encode = self.tokenizer.encode
        # all of them are longer than that, so that the options of a question are one batch
        answers = torch.tensor([encode(row["output"])[:ANSWER] for row in self.questions])
        right = 0
        for index, row in enumerate(self.questions):
            prompt = encode("\n".join(filter(None, (row["instruction"], row["input"]))) + "\n")
            options = answers.roll(-index, 0)[:OPTIONS]
            ids = torch.cat((torch.tensor(prompt).expand(OPTIONS, -1), options), 1)
            logits = model(input_ids=ids, use_cache=False).logits[:, len(prompt) - 1 : -1]
            losses = F.cross_entropy(logits.transpose(1, 2), options, reduction="none").mean(1)
            right += int(losses.argmin() == 0)
        return round(right / len(self.questions), 4)


def _running(rows: list[dict[str, str]]) -> str:
    return "\n\n".join(
        "\n".join(filter(None, (row["instruction"], row["input"], row["output"]))) for row in rows
    )


@torch.no_grad()
def predictions(model: Any, batches: Sequence[Tensor]) -> tuple[list[float], float]:
    """Return the mean loss of each row of tokens, and the share of tokens that are ranked first."""
    losses: list[float] = []
    right: list[float] = []
    for batch in batches:
        logits = model(input_ids=batch, use_cache=False).logits[:, :-1]
        labels = batch[:, 1:]
        each = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        losses += [round(loss, 4) for loss in each.view(labels.shape).mean(1).tolist()]
        right += (logits.argmax(-1) == labels).float().mean(1).tolist()
    return losses, round(statistics.mean(right), 4)


def train(study: Study, model: nn.Module, what: str, steps: int, rate: float) -> nn.Module:
    """Return the model after distilled steps."""
    if what == "LoRA":
        inject_lora_(
            model, r=RANK, alpha=2 * RANK, filter_fn=lambda module, name: name != "lm_head"
        )
    rows = [{"input_ids": row[0], "labels": row[0]} for row in study.train]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=steps,
            per_device_train_batch_size=ROWS,
            learning_rate=rate,
            lr_scheduler_type="cosine",
            warmup_steps=steps // 20,
            weight_decay=0.0,
            adam_beta2=0.95,
            use_cpu=True,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            logging_strategy="no",
        )
        KroneckerTrainer(
            model,
            arguments,
            train_dataset=rows,
            teacher=study.original(),
            distill=DistillConfig(logits=1.0, labels=1.0, temperature=1.0),
        ).train()
    return model.eval()


def measure_rates(study: Study, what: str) -> None:
    """Measure the learning rates that have no result yet, by short runs from the first start."""
    size, start, _ = RUNS[0]
    for rate in RATES[what]:
        key = f"{what} {rate:g}"
        if key in read_found()["short"]:
            continue
        model = train(study, study.smaller(size, start), what, SHORT, rate)
        losses, _ = predictions(model, study.choosing)
        found = read_found()
        found["short"][key] = round(statistics.mean(losses), 4)
        save(found)


def best_rate(found: dict[str, Any], what: str) -> float:
    """Return the rate with the lowest loss after a short run."""
    return min(RATES[what], key=lambda rate: found["short"][f"{what} {rate:g}"])


def read_found() -> dict[str, Any]:
    """Read the results so far."""
    if not FOUND.exists():
        return {"short": {}, "rows": []}
    return json.loads(FOUND.read_text(encoding="utf-8"))


def save(found: dict[str, Any]) -> None:
    """Write the results."""
    FOUND.write_text(json.dumps(found) + "\n", encoding="utf-8")


def write_table() -> None:
    """Write the guide's table from the committed results."""
    if not FOUND.exists():
        return
    found = json.loads(FOUND.read_text(encoding="utf-8"))
    original = found["original"]
    by_run = {(row["size"], row["start"], row["what"]): row for row in found["rows"]}
    titles = ("same kind of text", "other text", "next token right", "own answer preferred")
    lines = [
        f"| parameters | start | trained | {' | '.join(titles)} |",
        "|---" * (3 + len(titles)) + "|",
        f"| 100% | original | | {_cells(original)} |",
    ]
    for size in (1.0, 0.9, 0.7):
        for start in (ORIGINAL, *STARTS):
            rows = [row for row in found["rows"] if (row["size"], row["start"]) == (size, start)]
            for row in rows[:1]:
                if start != ORIGINAL:
                    share = row["parameters"] / original["parameters"]
                    lines.append(f"| {share:.0%} | `{start}` | | {_cells(row['before'])} |")
            for row in rows:
                what = {"all": "all weights", "LoRA": "LoRA"}[row["what"]]
                best = by_run.get((size, BEST, "all"))
                other = None if best in (None, row) else best["after"]
                lines.append(f"| | {start} | {what} | {_cells(row['after'], other)} |")
    rates = []
    for what, tried in RATES.items():
        used = {row["rate"] for row in found["rows"] if row["what"] == what}
        losses = [f"{rate:g}: {found['short'][f'{what} {rate:g}']:.3f}" for rate in tried]
        rates.append(f"{what} {', '.join(f'{rate:g}' for rate in used)} ({', '.join(losses)})")
    about = (
        f"SmolLM2-135M-Instruct, pruned with {TOKENS:,} tokens, before and after {STEPS} steps of "
        f"{ROWS} x {LENGTH} tokens; LoRA of rank {RANK}. Nats a token of {HELD_OUT:,} held-out "
        "tokens each of Alpaca, on which it trains, and of hh-rlhf's dialogs; the share of these "
        f"tokens that the model ranks first; the share of {QUESTIONS} held-out instructions of "
        f"which it prefers the own answer to {OPTIONS - 1} others. In parentheses the difference from "
        f"the model that began at `{BEST}`, ± its standard error over rows of text; shares of 100 have a standard error of 4 points. Learning rates, of those in "
        f"parentheses after {SHORT} steps on other rows: {'; '.join(rates)}. One order of the data. "
        f"{hardware('cpu')}, one thread; {found['date']} at "
        + ", ".join(dict.fromkeys(row["commit"] for row in found["rows"]))
        + "."
    )
    put(KRONECKER_GUIDE, [*lines, "", about], "training")


def _cells(measured: dict[str, Any], other: dict[str, Any] | None = None) -> str:
    """Return a line's figures, and how far its losses are from those of another line."""
    losses = []
    for name in ("in_domain", "out_of_domain"):
        cell = f"{statistics.mean(measured[name]):.3f}"
        losses.append(cell if other is None else f"{cell} ({difference(measured, other, name)})")
    right = [f"{measured[f'{name}_right']:.1%}" for name in ("in_domain", "out_of_domain")]
    return " | ".join([*losses, " / ".join(right), f"{measured['choice']:.1%}"])


def main(arguments: list[str] | None = None) -> None:
    """Make the rows that are missing, and the guide's table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", help="not looked at")
    parser.add_argument("--only", nargs="+", default=[ORIGINAL, *STARTS], help="starts to train")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    try:
        study = Study()
    except real.AbsentError as error:
        print(f"prune_training: skipped, {error}")
        return
    if "original" not in read_found():
        model = study.original()
        measured = study.measured(model) | {"parameters": num_parameters(model)}
        save(read_found() | {"original": measured})
    for size, start, what in RUNS:
        # read again each time: a second process may make the rows of other starts
        made = {(row["size"], row["start"], row["what"]) for row in read_found()["rows"]}
        if (size, start, what) in made or start not in options.only:
            continue
        measure_rates(study, what)
        rate = best_rate(read_found(), what)
        model = study.smaller(size, start)
        row: dict[str, Any] = {"size": size, "start": start, "what": what, "rate": rate}
        row |= {"parameters": num_parameters(model), "before": study.measured(model)}
        begin = time.process_time()
        model = train(study, model, what, STEPS, rate)
        row["train_cpu_seconds"] = round(time.process_time() - begin, 1)
        row |= {"after": study.measured(model), "commit": commit()}
        found = read_found()
        found["rows"].append(row)
        save(found | {"date": today()})
        losses = [statistics.mean(row[when]["in_domain"]) for when in ("before", "after")]
        print(size, start, what, *(round(loss, 3) for loss in losses), flush=True)
    write_table()


if __name__ == "__main__":
    main()
