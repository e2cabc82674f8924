"""LoRA specialists of one real model, and a table of results whose rows are kept on disk.

`train_masks_on_instructions.py` and the field trial merge the specialists.
"""

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from common import remove_earlier
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments, set_seed
from transformers.trainer_callback import PrinterCallback

from heads.lora import prepare_lora
from mergekit_lite import merge_models
from mergekit_lite.learning.tasks import held_out_losses
from mergekit_lite.masks import MaskCollator, TextExamples

KINDS = {
    "edit": (
        "rewrite edit correct fix paraphrase rephrase improve reword modify revise convert change "
        "transform translate rearrange replace reverse combine"
    ),
    "compose": (
        "generate create write compose describe design develop construct come brainstorm suggest "
        "explain tell imagine craft draft make invent"
    ),
}
TUNED = ((90, 1e-3), (100, 2e-3))  # steps and rate of each kind's specialist
LENGTH, HELD_OUT, APART = 128, 120, 0.10  # tokens of an example, held-out examples of a kind, nats


class Trial:
    """The data, the specialists, and the rows of a table; each row is stored when it is done."""

    tuned = TUNED

    def __init__(self, given: argparse.Namespace):
        self.given, self.out, self.model = given, given.out, str(given.model)
        self.tokenizer = AutoTokenizer.from_pretrained(self.model)
        self.collator = MaskCollator(pad_token_id=self.tokenizer.pad_token_id or 0)
        self.train, self.test = zip(*(self.examples(kind) for kind in KINDS), strict=True)
        self.components = [f"{self.model}+{self.out / kind}" for kind in KINDS]
        self.steps, self.seeds = (2, 1) if given.smoke else (40, given.seeds)
        self.settings = {
            "model": given.model.name,
            "steps": self.steps,
            "tuned": [list(one) for one in self.tuned],
            "examples": [len(part) for part in self.train],
        }
        (self.out / "rows").mkdir(parents=True, exist_ok=True)

    def examples(self, kind: str) -> tuple[list[dict], list[dict]]:
        """Return the short examples of a kind, split into training and held-out examples."""
        rows = [
            r
            for path in sorted(self.given.data.glob("*.json"))
            for r in json.loads(path.read_text("utf-8"))
        ]
        unique = {}
        for row in rows:
            if row.get("output") and row["instruction"].strip():
                unique[row["instruction"], row.get("input", "")] = row
        own = []
        for (instruction, extra), row in unique.items():
            first = instruction.split()[0].lower().strip(",.:")
            if first in KINDS[kind].split() and (kind == "edit" or not extra):
                own.append(row)
        random.Random(0).shuffle(own)
        texts = []
        for row in own:
            asked = "\n".join(filter(None, (row["instruction"], row.get("input"))))
            prompt = f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n"
            texts.append({"prompt": prompt, "completion": row["output"]})
        examples = TextExamples(texts, self.tokenizer, max_length=1 << 20).examples
        short = [e for e in examples if len(e["input_ids"]) <= LENGTH]
        held = min(HELD_OUT, len(short) // 4)
        return short[held:], short[:held]

    def losses(self, model: Any, tasks: Sequence[Sequence[dict]] | None = None) -> list[float]:
        """Return the loss on each kind's examples, by default held-out ones, in nats per token."""
        return list(held_out_losses(model, tasks or self.test, self.collator, batch_size=16))

    def row(self, name: str, make: Callable[[], Any]) -> list[float] | None:
        """Print and return a row of the table; ``make`` runs only if the row is not stored.

        Return None if --only excludes the row.
        """
        file = self.out / "rows" / f"{name}.json"
        if not file.is_file():
            if not any(fnmatchcase(name, pattern) for pattern in self.given.only):
                return None
            start = time.process_time()
            model = make()
            seconds = round(time.process_time() - start, 1)
            told = {
                "name": name,
                "losses": self.losses(model),
                "cpu_seconds": seconds,
                "settings": self.settings,
            }
            # renamed when complete, because a killed run may leave it half written
            partial = file.with_suffix(".partial")
            partial.write_text(json.dumps(told) + "\n", encoding="utf-8")
            partial.replace(file)
        told = json.loads(file.read_text(encoding="utf-8"))
        if told["settings"] != self.settings:
            sys.exit(
                f"{file} belongs to a run with other settings ({told['settings']}); choose another "
                "--out"
            )
        values = " ".join(f"{v:8.4f}" for v in [*told["losses"], statistics.mean(told["losses"])])
        print(f"{name:34s} {values}   {told['cpu_seconds']:7.1f}", flush=True)
        return told["losses"]

    def load_model(self, path: str | Path) -> Any:
        """Load a model in float32."""
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)

    def arguments(self, rate: float, steps: int, seed: int, **more: Any) -> TrainingArguments:
        """Return training arguments with the options that all training runs share."""
        options = {
            "output_dir": str(self.out / "trainer"),
            "max_steps": steps,
            "learning_rate": rate,
            "warmup_steps": 5,
            "per_device_train_batch_size": 8,
            "lr_scheduler_type": "cosine",
            "logging_strategy": "no",
            "save_strategy": "no",
            "report_to": "none",
            "train_sampling_strategy": "group_by_length",
            "disable_tqdm": True,
            "seed": seed,
            "remove_unused_columns": False,
            "use_cpu": not torch.cuda.is_available(),
        }
        return TrainingArguments(**{**options, **more})

    def lora(self) -> LoraConfig:
        """Return the config of the specialists' adapters."""
        rank = 4 if self.given.smoke else 16
        return LoraConfig(
            r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM"
        )

    def specialist(self, k: int) -> Any:
        """Return the base model tuned on kind ``k``; its adapter is trained once and stored."""
        folder, (steps, rate) = self.out / list(KINDS)[k], self.tuned[k]
        if not (folder / "adapter_model.safetensors").is_file():
            set_seed(0)
            model = prepare_lora(self.load_model(self.model), self.lora())
            arguments = self.arguments(
                rate, 2 if self.given.smoke else steps, 42, lr_scheduler_type="linear"
            )
            run(
                Trainer(
                    model=model,
                    args=arguments,
                    train_dataset=self.train[k],
                    data_collator=self.collator,
                )
            )
            model.save_pretrained(folder)
        return self.merged([self.components[k]], "linear", weight=[1.0])

    def check_specialists(self, rows: Sequence[Sequence[float]]) -> None:
        """Exit if a specialist is not clearly better than the other on its own kind."""
        for k, kind in enumerate(KINDS):
            gap = min(row[k] for i, row in enumerate(rows) if i != k) - rows[k][k]
            if gap < APART:
                sys.exit(
                    f"{kind}: expected a specialist that is at least {APART} nats better than the "
                    f"other, got {gap:.3f}"
                )

    def merged(self, models: Sequence[str], method: str, **options: Any) -> Any:
        """Merge models by a method of `merge_models`, and return the result."""
        folder = self.out / f"merged {os.getpid()}"
        remove_earlier(folder)
        if method in ("task_arithmetic", "ties", "dare_ties"):
            options["base_model"] = self.model
        elif method == "slerp":  # from the first to the second
            options["base_model"], models = models[0], models[1:]
        merge_models(models, method, out=folder, dtype="float32", progress=False, **options)
        model = self.load_model(folder)
        remove_earlier(folder)
        return model


def run(trainer: Trainer) -> None:
    """Train without printing anything."""
    trainer.remove_callback(PrinterCallback)
    trainer.train()
