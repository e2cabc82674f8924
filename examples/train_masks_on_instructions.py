"""Learned masks on a real language model: two LoRA specialists of one base, merged by every way there is.

Command   make real, then: python examples/train_masks_on_instructions.py
Data      *.json in --data: lists of {"instruction", "input", "output"}, as Alpaca's; not part of this repository.
          Without it, or without the model (SmolLM2-135M-Instruct: `make real`), the example says so and ends.
Time      two hours on 2 CPU cores; a row that is done is kept in OUT/table.json, and the same command goes on
Result    nats a token of held-out answers of each kind; then a few answers. Our run's table is in docs/masks.md

The kinds: editing a text that is given, and writing one that is asked for. A specialist is tuned on each, and each must
be better than the other on its own kind, or there is nothing to merge. Formulas' weights are chosen on training
examples. Masks, and all weights, learn by the same divergence, from the same examples, in as many steps.
"""

import argparse
import json
import os
import random
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from common import remove_earlier
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments, set_seed
from transformers.trainer_callback import PrinterCallback
from transformers.utils import logging

from heads.lora import prepare_lora
from mergekit_lite import merge_models
from mergekit_lite.masks import (
    KLConfig,
    MaskCollator,
    MaskTrainer,
    Merger,
    TaskMixture,
    TextExamples,
    masked_kl,
)
from mergekit_lite.masks.layerwise import LayerwiseTraining, train_layerwise
from mergekit_lite.masks.run import held_out_losses

KINDS = {
    "edit": "rewrite edit correct fix paraphrase rephrase improve reword modify revise convert change transform "
    "translate rearrange replace reverse combine",
    "compose": "generate create write compose describe design develop construct come brainstorm suggest explain tell "
    "imagine craft draft make invent",
}
TUNED = ((90, 1e-3), (100, 2e-3))  # steps and rate of each kind's specialist
LENGTH, HELD_OUT, APART = 128, 120, 0.10  # tokens of an example, examples of a kind, nats


class Trial:
    """Data, specialists, and rows of the table as they come."""

    def __init__(self, given: argparse.Namespace):
        self.given, self.out, self.model = given, given.out, str(given.model)
        self.tokenizer = AutoTokenizer.from_pretrained(self.model)
        self.collator = MaskCollator(pad_token_id=self.tokenizer.pad_token_id or 0)
        self.train: list[list[dict]] = []
        self.test: list[list[dict]] = []
        self.load()
        self.components = [f"{self.model}+{self.out / kind}" for kind in KINDS]
        self.steps, self.seeds = (2, 1) if given.smoke else (40, given.seeds)
        self.settings = {"model": given.model.name, "steps": self.steps, "examples": [len(part) for part in self.train]}
        (self.out / "rows").mkdir(parents=True, exist_ok=True)

    def load(self) -> None:
        """Examples of each kind that are short enough, apart for training and for the table."""
        rows = [r for path in sorted(self.given.data.glob("*.json")) for r in json.loads(path.read_text("utf-8"))]
        once = {(r["instruction"], r["input"]): r for r in rows if r.get("output")}.values()
        for kind, verbs in KINDS.items():
            own = [r for r in once if r["instruction"].split()[0].lower().strip(",.:") in verbs.split()]
            if kind == "compose":
                own = [r for r in own if not r["input"]]
            random.Random(0).shuffle(own)
            asked = ("\n".join(filter(None, (r["instruction"], r["input"]))) for r in own)
            texts = [
                {"prompt": f"<|im_start|>user\n{a}<|im_end|>\n<|im_start|>assistant\n", "completion": r["output"]}
                for a, r in zip(asked, own, strict=True)
            ]
            examples = TextExamples(texts, self.tokenizer, max_length=1 << 20)
            short = [e for e in examples.examples if len(e["input_ids"]) <= LENGTH]
            held = min(HELD_OUT, len(short) // 4)
            self.test.append(short[:held])
            self.train.append(short[held:])

    def losses(self, model: Any, tasks: Sequence[Sequence[dict]] | None = None) -> list[float]:
        """Nats a token of the answers of each kind, of those held out unless others are given."""
        return list(held_out_losses(model, tasks or self.test, self.collator, batch_size=16))

    def row(self, name: str, make: Callable[[], Any]) -> list[float] | None:
        """A row of the table, of what ``make`` gives, unless it is there; None where it is not asked for."""
        file = self.out / "rows" / f"{name}.json"
        if not file.is_file():
            if not any(fnmatchcase(name, pattern) for pattern in self.given.only):
                return None
            start = time.process_time()
            model = make()
            seconds = round(time.process_time() - start, 1)
            told = {"name": name, "losses": self.losses(model), "cpu_seconds": seconds, "settings": self.settings}
            file.write_text(json.dumps(told) + "\n", encoding="utf-8")
        told = json.loads(file.read_text(encoding="utf-8"))
        if told["settings"] != self.settings:
            sys.exit(f"{file} is of a run with other settings ({told['settings']}); name another --out")
        values = " ".join(f"{v:8.4f}" for v in [*told["losses"], statistics.mean(told["losses"])])
        print(f"{name:34s} {values}   {told['cpu_seconds']:7.1f}", flush=True)
        return told["losses"]

    def load_model(self, path: str | Path) -> Any:
        """A model in float32."""
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)

    def arguments(self, rate: float, steps: int, seed: int, **more: Any) -> TrainingArguments:
        """What all trainings have in common."""
        options = {
            "output_dir": str(self.out / "trainer"), "max_steps": steps, "learning_rate": rate, "warmup_steps": 5,
            "per_device_train_batch_size": 8, "lr_scheduler_type": "cosine", "logging_strategy": "no",
            "save_strategy": "no", "report_to": "none", "train_sampling_strategy": "group_by_length",
            "disable_tqdm": True, "seed": seed, "remove_unused_columns": False,
            "use_cpu": not torch.cuda.is_available(),
        }  # fmt: skip
        return TrainingArguments(**{**options, **more})

    # -- what is merged ----------------------------------------------------------------------------------------

    def specialist(self, k: int) -> Any:
        """The base, tuned on kind ``k``; its adapter is kept."""
        folder = self.out / list(KINDS)[k]
        if not (folder / "adapter_model.safetensors").is_file():
            set_seed(0)
            rank = 4 if self.given.smoke else 16
            settings = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
            model = prepare_lora(self.load_model(self.model), settings)
            steps, rate = TUNED[k]
            arguments = self.arguments(rate, 2 if self.given.smoke else steps, seed=42, lr_scheduler_type="linear")
            run(Trainer(model=model, args=arguments, train_dataset=self.train[k], data_collator=self.collator))
            model.save_pretrained(folder)
        return self.merged([self.components[k]], "linear", weight=[1.0])

    def merged(self, models: Sequence[str], method: str, **options: Any) -> Any:
        """A merge by a method of `merge_models`."""
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

    def searched(self, method: str, choices: Sequence[dict[str, Any]]) -> Any:
        """A formula with the parameters that are best on training examples."""
        sample = [part[: 2 if self.given.smoke else 40] for part in self.train]
        found = [statistics.mean(self.losses(self.merged(self.components, method, **c), sample)) for c in choices]
        best = choices[found.index(min(found))]
        print(f"  {method}: {', '.join(f'{k} {v}' for k, v in best.items())}")
        return self.merged(self.components, method, **best)

    # -- what learns -------------------------------------------------------------------------------------------

    def mixture(self, seed: int) -> TaskMixture:
        """Examples of both kinds, with alike many tokens of answers."""
        return TaskMixture(self.train, weights="tokens", seed=seed)

    def masks(self, seed: int, rate: float, *, coefficients: str = "evidence", **options: Any) -> Any:
        """A merger, trained end to end; over the base unless said otherwise."""
        merger = Merger.from_pretrained(self.components, **{"base": self.model, "dtype": "float32"} | options)
        trainer = MaskTrainer(
            merger, self.arguments(rate, self.steps, seed), kl=KLConfig(coefficients=coefficients),
            train_dataset=self.mixture(seed), data_collator=self.collator,
        )  # fmt: skip
        run(trainer)
        return merger.eval().fold_()

    def all_weights(self, seed: int, rate: float) -> Any:
        """The average, of which every weight learns by the divergence that masks learn by."""
        model = self.merged(self.components, "linear", weight=[1.0] * len(KINDS))
        teachers = Merger.from_pretrained(self.components, base=self.model, dtype="float32")
        trainer = AllWeights(
            model=model, args=self.arguments(rate, self.steps, seed), train_dataset=self.mixture(seed),
            data_collator=self.collator,
        )  # fmt: skip
        trainer.teachers = teachers
        run(trainer)
        return model

    def layerwise(self, seed: int) -> Any:
        """Masks that learn block by block."""
        folder = self.out / f"layerwise {seed}"
        if folder.is_dir():  # made, and its row was not written any more
            return self.load_model(folder)
        training = LayerwiseTraining(steps=2 if self.given.smoke else 20, max_length=LENGTH, seed=seed)
        data = [random.Random(seed).sample(part, min(128, len(part))) for part in self.train]
        train_layerwise(
            self.components, data, folder, base=self.model, training=training, progress=False, dtype="float32"
        )
        return self.load_model(folder)


def run(trainer: Trainer) -> None:
    """Train, and print nothing."""
    trainer.remove_callback(PrinterCallback)
    trainer.train()


class AllWeights(Trainer):
    """The masks' loss, for a plain model."""

    teachers: Any = None

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The divergence from the components that the examples' tasks name."""
        inputs = dict(inputs)
        task, labels = inputs.pop("task"), inputs.pop("labels")
        where = labels[:, 1:] != -100
        student = model(**inputs).logits[:, :-1][where]
        target = torch.empty_like(student)
        with torch.no_grad():
            for k in task.unique().tolist():
                own = task == k
                with self.teachers.component(k):
                    logits = self.teachers(**{n: v[own] for n, v in inputs.items()}).logits[:, :-1]
                target[own[where.nonzero()[:, 0]]] = logits[where[own]]
        loss = masked_kl(student, [target], coefficients=torch.ones(1))
        return (loss, {}) if return_outputs else loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("build/real/smollm2"), help="folder of the base")
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="folder of instruction data")
    parser.add_argument("--out", type=Path, default=Path("runs/instructions"), help="folder for all that is made")
    parser.add_argument("--seeds", type=int, default=3, help="of what learns")
    parser.add_argument("--only", nargs="+", default=["*"], help="patterns of rows: several processes may share --out")
    parser.add_argument("--smoke", action="store_true", help="a few steps, to see that it runs")
    given = parser.parse_args()
    logging.disable_progress_bar()
    warnings.filterwarnings("ignore", message=".*is deprecated.*")  # transformers' and peft's own affair
    if not any(given.data.glob("*.json")):
        print(f"skipped: {given.data} holds no *.json of instructions; name a folder that does with --data")
        return
    if not (given.model / "config.json").is_file():
        print(f"skipped: {given.model} is no model; run `make real`, or name one with --model")
        return
    trial = Trial(given)
    print(
        f"{'nats a token, held out':34s} {' '.join(f'{kind:>8s}' for kind in KINDS)}     mean   CPU seconds to make it"
    )
    trial.row("base", lambda: trial.load_model(trial.model))
    own = [trial.row(f"specialist {kind}", lambda k=k: trial.specialist(k)) for k, kind in enumerate(KINDS)]
    if None not in own and not given.smoke:
        for k, kind in enumerate(KINDS):
            gap = min(row[k] for i, row in enumerate(own) if i != k) - own[k][k]
            if gap < APART:
                sys.exit(
                    f"{kind}: its specialist is {gap:.3f} nats better than the other; needed {APART}, or other kinds"
                )
    formulas(trial)
    learnt(trial)


def formulas(trial: Trial) -> None:
    """Rows of merges without learning."""
    both, parts = [1.0] * len(KINDS), [part[:128] for part in trial.train]
    weights = [0.6] if trial.given.smoke else [0.4, 0.5, 0.6, 0.7, 0.85, 1.0]
    alike = [{"weight": [w] * len(KINDS)} for w in weights]
    sparse = [{"weight": both, "density": d, "lambda_": w} for d in (0.3, 0.7) for w in (0.5, 1.0, 1.5)]
    trial.row("average", lambda: trial.merged(trial.components, "linear", weight=both))
    trial.row("slerp", lambda: trial.searched("slerp", [{"t": w} for w in weights[:4]]))
    trial.row("task_arithmetic", lambda: trial.searched("task_arithmetic", alike))
    trial.row("ties", lambda: trial.searched("ties", sparse[: len(weights)]))
    trial.row("dare_ties", lambda: trial.searched("dare_ties", [{**c, "density": 0.7} for c in alike]))
    for method in ("fisher", "regmean", "regmean++"):
        trial.row(method, lambda m=method: trial.merged(trial.components, m, calibration=parts))


def learnt(trial: Trial) -> None:
    """Rows of what learns, the first few of them for every seed; and their means."""
    ways: dict[str, Callable[[int], Any]] = {
        "masks, evidence": lambda s: trial.masks(s, 1e-1),
        "masks, labels": lambda s: trial.masks(s, 1e-1, coefficients="task"),
        "masks, element": lambda s: trial.masks(s, 1e-2, granularity="element"),
        "masks, layerwise": trial.layerwise,
        "all weights": lambda s: trial.all_weights(s, 2e-5),
    }
    more: dict[str, Callable[[int], Any]] = {
        "masks, output": lambda s: trial.masks(s, 1e-1, granularity="output"),
        "masks, scalar": lambda s: trial.masks(s, 1e-1, granularity="scalar"),
        "masks, whole weights": lambda s: trial.masks(s, 1e-2, base=None, constraint="none"),
        "masks, whole weights, sum to one": lambda s: trial.masks(s, 1e-1, base=None, constraint="sum_to_one"),
    }
    rows = {
        name: [trial.row(f"{name}, seed {s}", lambda m=make, s=s: m(s)) for s in range(trial.seeds if n < 5 else 1)]
        for n, (name, make) in enumerate((ways | more).items())
    }
    print("\nmeans over seeds; how far the means of seeds are apart")
    for name, own in rows.items():
        found = [row for row in own if row is not None]
        if len(found) > 1:
            means = [statistics.mean(row) for row in found]
            columns = " ".join(f"{statistics.mean(column):8.4f}" for column in zip(*found, strict=True))
            print(f"{name:34s} {columns} {statistics.mean(means):8.4f}   {max(means) - min(means):.4f}")


if __name__ == "__main__":
    main()
