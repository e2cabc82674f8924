"""Which structure makes the smallest model that works: neurons, low rank, Kronecker sums, at equal
parameters and time.

SmolLM2-135M and MiniLM with 75 %, 50 % and 25 % of their MLPs' parameters, all fitted by the same
walk on the same tokens (12,288), before training and after 300 distilled steps; beside them a model
of that size trained from nothing on the same tokens, and half of the table of embeddings beside as
many parameters less in neurons. At half the best of each structure is trained on three orders of
data. Rows that are there already are not made again; ``--only`` makes some of them. Fits are kept
in ``work``. Skipped where the models' packages or the data are absent.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import math
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BertModel,
    TrainingArguments,
    set_seed,
)

from kronecker import (
    DistillConfig,
    KroneckerConfig,
    KroneckerTrainer,
    LowRankConfig,
    PruneConfig,
    convert_,
    num_parameters,
    perplexity,
    prune_,
)
from kronecker.config import Config
from kronecker.data.text import text_batches
from kronecker.discovery.mlps import find_mlps
from tests.benchmarks.pictures import save_picture
from tests.benchmarks.results import RESULTS, ROOT, commit, put, today
from tests.support import real

FOUND, WORK = RESULTS / "smaller_study.json", Path(__file__).parent / "work" / "smaller_study"
PLOT = ROOT / "docs" / "smaller_models.svg"
STEPS, SEEDS, BATCH, CONTEXT = 300, (0, 1, 2), 2, 128
BUDGETS, TABLE = (0.75, 0.5, 0.25), "table"  # shares of MLPs; half of the embeddings
RATES = {"smollm2": 2e-4, "minilm": 2e-4}
# elsewhere a product takes 50 times as long as in float32
AUTOCAST = torch.ops.mkldnn._is_mkldnn_bf16_supported()


def kronecker(b_shape: tuple[int, int], rank: int) -> KroneckerConfig:
    """A sum of Kronecker products."""
    return KroneckerConfig(b_shape=b_shape, rank=rank)


STRUCTURES: dict[float | str, dict[str, Config | None]] = {
    0.75: {
        "neurons": PruneConfig(keep=0.75),
        "low rank": LowRankConfig(keep=0.75),
        "3 x (4, 1)": kronecker((4, 1), 3),
        "3 x (2, 2)": kronecker((2, 2), 3),
        "7 x (3, 3)": kronecker((3, 3), 7),
    },
    0.5: {
        "neurons": PruneConfig(keep=0.5),
        "low rank": LowRankConfig(keep=0.5),
        "(2, 1)": kronecker((2, 1), 1),
        "(1, 2)": kronecker((1, 2), 1),
        "2 x (4, 1)": kronecker((4, 1), 2),
        "2 x (2, 2)": kronecker((2, 2), 2),
        "4 x (3, 3)": kronecker((3, 3), 4),
        "neurons, from nothing": None,
    },
    0.25: {
        "neurons": PruneConfig(keep=0.25),
        "low rank": LowRankConfig(keep=0.25),
        "(4, 1)": kronecker((4, 1), 1),
        "(2, 2)": kronecker((2, 2), 1),
        "2 x (3, 3)": kronecker((3, 3), 2),
    },
    TABLE: {
        "neurons instead": PruneConfig(),
        "table of low rank, nearest": LowRankConfig(init="svd"),
        "table of low rank": LowRankConfig(),
    },
}


class Language:
    """SmolLM2, judged by its loss on held-out text."""

    unit, table = "loss", "model.embed_tokens"

    def __init__(self) -> None:
        self.folder, rows = real.smollm2(), real.alpaca(5000)
        encode = AutoTokenizer.from_pretrained(self.folder).encode
        seen, unseen = (
            "\n\n".join(
                "\n".join(filter(None, (r["instruction"], r["input"], r["output"]))) for r in part
            )
            for part in (rows[:4000], rows[4000:4200])
        )
        self.calibration = text_batches(seen, encode, tokens=12_288)
        train = text_batches(seen, encode, tokens=STEPS * BATCH * CONTEXT, context=CONTEXT, rows=1)
        self.rows = [{"input_ids": row[0], "labels": row[0]} for row in train]
        self.held_out = text_batches(unseen, encode, tokens=10_240)
        self.distill = DistillConfig(logits=1.0, temperature=1.0)

    def original(self) -> nn.Module:
        """In float32."""
        return AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32).eval()

    def from_nothing(self, keep: float) -> nn.Module:
        """A model of the pruned one's size."""
        config = AutoConfig.from_pretrained(self.folder)
        config.intermediate_size = int(config.intermediate_size * keep)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()

    def judge(self, model: nn.Module) -> float:
        """Mean loss of a held-out token, in nats."""
        return math.log(perplexity(model, self.held_out))


class Encoder:
    """MiniLM, judged by how near its sentence embeddings are to the original's on held-out texts."""

    unit, table = "cosine", "embeddings.word_embeddings"

    def __init__(self) -> None:
        self.folder, rows = real.minilm(), real.alpaca(5000)
        tokenizer = AutoTokenizer.from_pretrained(self.folder)
        texts = [t for r in rows if len(t := r["output"]) > 200]

        def batches(chosen: list[str], rows: int) -> list[dict[str, Tensor]]:
            parts = [chosen[i : i + rows] for i in range(0, len(chosen), rows)]
            made = [
                tokenizer(p, padding=True, truncation=True, max_length=128, return_tensors="pt")
                for p in parts
            ]
            return [{k: b[k] for k in ("input_ids", "attention_mask")} for b in made]

        self.held_out, self.calibration = batches(texts[:192], 16), batches(texts[200:332], 16)
        full = tokenizer(texts[200:], padding="max_length", truncation=True, max_length=CONTEXT)
        both = zip(full["input_ids"], full["attention_mask"], strict=True)
        self.rows = [
            {"input_ids": torch.tensor(i), "attention_mask": torch.tensor(m)} for i, m in both
        ]
        self.distill = DistillConfig(logits=0.0, hidden=1.0)
        self._truth = self._embed(self.original())

    def original(self) -> nn.Module:
        """In float32."""
        return BertModel.from_pretrained(self.folder, dtype=torch.float32).eval()

    def from_nothing(self, keep: float) -> nn.Module:
        """A model of the pruned one's size."""
        config = AutoConfig.from_pretrained(self.folder)
        config.intermediate_size = int(config.intermediate_size * keep)
        return BertModel(config).eval()

    @torch.no_grad()
    def _embed(self, model: nn.Module) -> Tensor:
        found = []
        for batch in self.held_out:
            states, mask = model(**batch).last_hidden_state, batch["attention_mask"][..., None]
            found.append((states * mask).sum(1) / mask.sum(1))
        return torch.cat(found)

    def judge(self, model: nn.Module) -> float:
        """Mean cosine to the original's embeddings."""
        return float(torch.cosine_similarity(self._embed(model), self._truth, dim=-1).mean())


TASKS: dict[str, Callable[[], Any]] = {"smollm2": Language, "minilm": Encoder}
NAMES = {"smollm2": "SmolLM2-135M", "minilm": "MiniLM"}


def make_smaller(task: Any, name: str, budget: float | str, structure: str) -> nn.Module:
    """The original with its MLPs, or its embeddings, as the structure says; its fit is kept."""
    config = STRUCTURES[budget][structure]
    if config is None:
        set_seed(0)
        return task.from_nothing(budget)
    model, place = task.original(), WORK / name / f"{budget} {structure}"
    if isinstance(config, PruneConfig):
        if budget == TABLE:  # as many parameters as half of the table
            left = num_parameters(model) - num_parameters(model.get_submodule(task.table)) // 2
            config = PruneConfig(size=left / num_parameters(model), method="best")
        prune_(model, config, calibration=task.calibration, cache=place, progress=False)
    elif budget == TABLE:
        convert_(model, {task.table: config}, calibration=task.calibration, progress=False)
    else:
        convert_(model, config, calibration=task.calibration, cache=place, progress=False)
    return model


def trained(
    task: Any, name: str, model: nn.Module, seed: int, steps: int, rate: float
) -> nn.Module:
    """After distilled steps, in bfloat16 autocast where the processor computes in it."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=steps,
            per_device_train_batch_size=BATCH if name == "smollm2" else 8,
            learning_rate=rate,
            lr_scheduler_type="cosine",
            warmup_steps=steps // 20,
            weight_decay=0.0,
            adam_beta2=0.95,
            bf16=AUTOCAST,
            use_cpu=True,
            seed=seed,
            data_seed=seed,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            logging_strategy="no",
        )
        teacher = task.original()
        KroneckerTrainer(
            model, arguments, train_dataset=task.rows, teacher=teacher, distill=task.distill
        ).train()
    return model.eval()


@torch.no_grad()
def time_ratio(task: Any, model: nn.Module) -> float:
    """Forward of 512 tokens against the original's, in turns."""
    pair, times = (task.original(), model), ([], [])
    batch = {
        "input_ids": torch.randint(
            100, 20_000, (4, 128), generator=torch.Generator().manual_seed(0)
        )
    }
    for run in range(12):
        for one, seconds in zip(pair, times, strict=True):
            begin = time.perf_counter()
            getattr(one, "base_model", one)(**batch)
            if run > 1:
                seconds.append(time.perf_counter() - begin)
    return statistics.median(times[1]) / statistics.median(times[0])


def mlp_share(task: Any, model: nn.Module) -> float:
    """Parameters of the MLPs against the original's."""
    original = task.original()
    names = [n for m in find_mlps(original) for n in (*m.ups, m.down)]
    return sum(num_parameters(model.get_submodule(n)) for n in names) / sum(
        num_parameters(original.get_submodule(n)) for n in names
    )


def cells(found: Mapping[str, Any]) -> list[tuple[str, float | str, str, int]]:
    """What is missing, half of the parameters and the first order of data first: (model, budget,
    structure, seed)."""
    done = {(r["model"], r["budget"], r["structure"], r["seed"]) for r in found["rows"]}
    every = [
        (name, budget, structure, seed)
        for seed in SEEDS
        for budget in (0.5, 0.25, 0.75, TABLE)
        for name in TASKS
        for structure in STRUCTURES[budget]
    ]
    return [cell for cell in every if cell not in done]


def run_cell(
    task: Any, name: str, budget: float | str, structure: str, seed: int, steps: int
) -> dict[str, Any]:
    """One row."""
    begin = time.process_time()
    model = make_smaller(task, name, budget, structure)
    fitted = time.process_time() - begin
    row: dict[str, Any] = {
        "model": name,
        "budget": budget,
        "structure": structure,
        "seed": seed,
        "steps": steps,
    }
    row |= {} if AUTOCAST else {"autocast": False}
    row |= {"share": round(mlp_share(task, model), 4), "time": round(time_ratio(task, model), 3)}
    row["before"] = round(task.judge(model), 4)
    begin = time.process_time()
    rate = RATES[name] if STRUCTURES[budget][structure] is not None else 1e-3
    after = trained(task, name, copy.deepcopy(model), seed, steps, rate)
    row |= {"after": round(task.judge(after), 4), "rate": rate, "fit_cpu_seconds": round(fitted, 1)}
    return row | {
        "train_cpu_seconds": round(time.process_time() - begin, 1),
        "date": today(),
        "commit": commit(),
    }


def write_table() -> None:
    """Write the tables of what did not win, and the plot, from the committed results."""
    if not FOUND.exists():
        return
    found, lines = json.loads(FOUND.read_text(encoding="utf-8")), []
    for name in TASKS:
        rows = [r for r in found["rows"] if r["model"] == name]
        if not rows:
            continue
        unit = TASKS[name].unit
        measure = {"loss": "held-out loss", "cosine": "cosine to the original's embeddings"}[unit]
        original = f", the original's {found['originals'][name]:.3f}" if unit == "loss" else ""
        lines += ["", f"**{NAMES[name]}: {measure}**{original}", ""]
        lines += [
            "| parameters | structure | time | before training | after 300 steps | at equal time |"
        ]
        lines += ["|---" * 6 + "|"]
        for budget in (*BUDGETS, TABLE):
            # also structures that the library no longer has
            others = (r["structure"] for r in rows if r["budget"] == budget)
            for structure in dict.fromkeys([*STRUCTURES[budget], *others]):
                same = [r for r in rows if (r["budget"], r["structure"]) == (budget, structure)]
                if same:
                    lines.append(_line(rows, budget, structure, same))
    rows = found["rows"]
    others = Counter((r["structure"], r["model"]) for r in rows if not r.get("autocast", True))
    told = ", ".join(
        f"{count} of {structure}, {NAMES[model]}" for (structure, model), count in others.items()
    )
    exact = f" (in float32, on a processor without bfloat16: {told})" if others else ""
    text = (
        "Parameters: of the MLPs, or half of the table of embeddings. Fitted on 12,288 tokens by "
        "the same walk (a table's Kronecker sums, and the low rank called nearest: to its weight "
        f"alone), then distilled in bfloat16 autocast{exact}, {BATCH} x {CONTEXT} tokens a step "
        "(MiniLM: 8 x 128); mean, range and number of orders of data. Time: a forward pass of "
        "512 tokens divided by the original's, measured in turn on one thread while other programs ran. At equal time: what "
        "dropped neurons give at the row's time, between the budgets measured. Measured to "
        f"{max(r['date'] for r in rows)} at {', '.join(dict.fromkeys(r['commit'] for r in rows))}."
    )
    put(ROOT / "docs" / "what_did_not_win.md", [*lines[1:], "", text], "study")


def _line(rows: list[dict], budget: float | str, structure: str, same: list[dict]) -> str:
    after = [r["after"] for r in same]
    spread = f" ({min(after):.3f} to {max(after):.3f}, {len(after)})" if len(after) > 1 else " (1)"
    seconds = statistics.median(r["time"] for r in same)
    share = "half a table" if budget == TABLE else f"{same[0]['share']:.0%}"
    rival = "" if structure.startswith("neurons") else _at_time(rows, seconds)
    return (
        f"| {share} | {structure} | {seconds:.2f} | {same[0]['before']:.3f} "
        f"| {statistics.mean(after):.3f}{spread} | {rival} |"
    )


def _at_time(rows: list[dict], seconds: float) -> str:
    """What dropped neurons give after training in the same time, on straight lines between budgets."""
    points = []
    for budget in BUDGETS:
        same = [r for r in rows if (r["budget"], r["structure"]) == (budget, "neurons")]
        if same:
            points.append(
                (
                    statistics.median(r["time"] for r in same),
                    statistics.mean(r["after"] for r in same),
                )
            )
    points.sort()
    for (t0, v0), (t1, v1) in itertools.pairwise(points):
        if t0 <= seconds <= t1:
            return f"{v0 + (v1 - v0) * (seconds - t0) / (t1 - t0):.3f}"
    return ""


def draw(found: dict) -> None:
    """Before and after training against parameters, a line a structure."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, every = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for axes, name in zip(every, TASKS, strict=True):
        kinds = {"neurons": "o-", "low rank": "s--", "Kronecker": "^:"}
        for kind, style in kinds.items():
            points = []
            for budget in BUDGETS:
                means = []
                for structure in STRUCTURES[budget]:
                    same = [
                        r
                        for r in found["rows"]
                        if (r["model"], r["budget"], r["structure"]) == (name, budget, structure)
                    ]
                    if same and (
                        structure == kind or (kind == "Kronecker" and structure[-1] == ")")
                    ):
                        means.append(statistics.mean(r["after"] for r in same))
                if means:
                    points.append((100 * budget, min(means) if name == "smollm2" else max(means)))
            axes.plot(*zip(*points, strict=True), style, label=kind) if points else None
        if name == "smollm2" and name in found["originals"]:
            axes.axhline(found["originals"][name], color="0.6", linewidth=0.8)
        axes.set(
            xlabel="parameters of the MLPs, %",
            ylabel={"smollm2": "held-out loss", "minilm": "cosine"}[name],
        )
        axes.set_title(NAMES[name], fontsize=10)
        axes.legend(frameon=False)
    save_picture(figure, PLOT)


def main(arguments: list[str] | None = None) -> None:
    """Make the rows that are missing, the guide's table and the plot."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", help="not looked at")
    parser.add_argument(
        "--only", nargs="+", help="words that a cell's 'model budget structure seed' must all have"
    )
    parser.add_argument("--steps", type=int, default=STEPS)
    options = parser.parse_args(arguments)
    found: dict[str, Any] = {"originals": {}, "rows": []}
    if FOUND.exists():
        found = json.loads(FOUND.read_text(encoding="utf-8"))
    tasks: dict[str, Any] = {}
    try:
        for name, budget, structure, seed in cells(found):
            if options.only and not all(
                w in f"{name} {budget} {structure} seed{seed}" for w in options.only
            ):
                continue
            if name not in tasks:
                tasks[name] = TASKS[name]()
                found["originals"].setdefault(
                    name, round(tasks[name].judge(tasks[name].original()), 4)
                )
            row = run_cell(tasks[name], name, budget, structure, seed, options.steps)
            print(row, flush=True)
            if options.steps == STEPS:
                if FOUND.exists():  # another process may have added rows
                    stored = json.loads(FOUND.read_text(encoding="utf-8"))
                    found = {
                        "originals": stored["originals"] | found["originals"],
                        "rows": stored["rows"],
                    }
                found["rows"].append(row)
                FOUND.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    except real.AbsentError as error:
        print(f"smaller_study: skipped, {error}")
        return
    write_table()
    if found["rows"]:
        draw(found)


if __name__ == "__main__":
    main()
