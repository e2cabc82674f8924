"""Compare learned masks with other merges, on a real language model.

Two LoRA specialists of one base are merged by every method.

Command   make real, then: python examples/train_masks_on_instructions.py
Data      *.json in --data: lists of {"instruction", "input", "output"}, as in Alpaca; not part of
          this repository. If the data or the model (SmolLM2-135M-Instruct: `make real`) are
          missing, the example prints what is missing and ends.
Time      two hours on 2 CPU cores; finished rows are kept in OUT/rows, and the same command
          continues from there
Result    the loss on held-out answers of each kind, in nats per token, and a few answers;
          docs/masks.md has our results

The first word of an instruction decides its kind: editing a text, or writing one (rows without
input). One specialist is tuned on each kind. Each must be better than the other on its own kind, or
there is nothing to merge. The formulas' parameters are chosen on training examples. For comparison,
a model with all weights trained minimizes the same divergence as the masks, on the same examples
and for the same number of steps.
"""

import argparse
import statistics
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from specialists import KINDS, Trial, run
from transformers import Trainer
from transformers.utils import logging

from mergekit_lite.masks import KLConfig, MaskTrainer, Merger, TaskMixture, masked_kl

BOTH = [1.0] * len(KINDS)


def searched(trial: Trial, method: str, choices: Sequence[dict[str, Any]]) -> Any:
    """Merge by a formula, with the best of several parameters on training examples."""
    sample = [part[: 2 if trial.given.smoke else 40] for part in trial.train]
    found = [
        statistics.mean(trial.losses(trial.merged(trial.components, method, **c), sample))
        for c in choices
    ]
    best = choices[found.index(min(found))]
    print(f"  {method}: {', '.join(f'{k} {v}' for k, v in best.items())}")
    return trial.merged(trial.components, method, **best)


def masks(
    trial: Trial, seed: int, rate: float, *, coefficients: str = "evidence", **options: Any
) -> Any:
    """Train masks, by default over the base, and return the folded model."""
    # one value per input column, as in the table of docs/masks.md
    usual = {"base": trial.model, "dtype": "float32", "granularity": "input"}
    merger = Merger.from_pretrained(trial.components, **usual | options)
    trainer = MaskTrainer(
        merger,
        trial.arguments(rate, trial.steps, seed),
        kl=KLConfig(coefficients=coefficients),
        train_dataset=TaskMixture(trial.train, weights="tokens", seed=seed),
        data_collator=trial.collator,
    )
    run(trainer)
    if coefficients == "evidence" and not options and seed == 0:
        merger.save_masks(trial.out / "masks, evidence.safetensors")
    return merger.eval().fold_()


def all_weights(trial: Trial, seed: int, rate: float) -> Any:
    """Train all weights of the average, with the loss that trains the masks."""
    model = trial.merged(trial.components, "linear", weight=BOTH)
    mixture = TaskMixture(trial.train, weights="tokens", seed=seed)
    arguments = trial.arguments(rate, trial.steps, seed)
    trainer = AllWeights(
        model=model, args=arguments, train_dataset=mixture, data_collator=trial.collator
    )
    trainer.teachers = Merger.from_pretrained(trial.components, base=trial.model, dtype="float32")
    run(trainer)
    return model


class AllWeights(Trainer):
    """A trainer of a plain model with the masks' loss."""

    teachers: Any = None

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return the divergence from the component of each example's task."""
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


def formulas(trial: Trial) -> None:
    """Print the rows of merges without training."""
    weights, calibration = [0.4, 0.5, 0.6, 0.7, 0.85, 1.0], [part[:128] for part in trial.train]
    alike = [{"weight": [w] * len(KINDS)} for w in weights]
    sparse = [
        {"weight": BOTH, "density": d, "lambda_": w} for d in (0.3, 0.7) for w in (0.5, 1.0, 1.5)
    ]
    ways = {"slerp": [{"t": w} for w in weights[:4]], "task_arithmetic": alike, "ties": sparse}
    ways |= {"dare_ties": [{**choice, "density": 0.7} for choice in alike]}
    trial.row("average", lambda: trial.merged(trial.components, "linear", weight=BOTH))
    for method, choices in ways.items():
        given = choices[:1] if trial.given.smoke else choices
        trial.row(method, lambda m=method, c=given: searched(trial, m, c))
    for method in ("regmean", "regmean++"):
        trial.row(
            method, lambda m=method: trial.merged(trial.components, m, calibration=calibration)
        )


def learned(trial: Trial) -> None:
    """Print the rows of merges with training, and their means over seeds."""
    ways: dict[str, Callable[[int], Any]] = {
        "masks, evidence": lambda s: masks(trial, s, 1e-1),
        "masks, labels": lambda s: masks(trial, s, 1e-1, coefficients="task"),
        "masks, element": lambda s: masks(trial, s, 1e-2, granularity="element"),
        "all weights": lambda s: all_weights(trial, s, 2e-5),
        "masks, whole weights": lambda s: masks(trial, s, 1e-2, base=None, constraint="none"),
        "masks, whole weights, sum to one": lambda s: masks(
            trial, s, 1e-1, base=None, constraint="sum_to_one"
        ),
    }
    rows = {}
    for name, make in ways.items():
        seeds = 1 if "whole" in name else trial.seeds
        rows[name] = [
            trial.row(f"{name}, seed {s}", lambda m=make, s=s: m(s)) for s in range(seeds)
        ]
    if trial.seeds > 1:
        print("\nmeans over the seeds, and the range of the means of single seeds")
    for name, own in rows.items():
        found = [row for row in own if row is not None]
        if len(found) > 1:
            means = [statistics.mean(row) for row in found]
            columns = " ".join(
                f"{statistics.mean(column):8.4f}" for column in zip(*found, strict=True)
            )
            print(
                f"{name:34s} {columns} {statistics.mean(means):8.4f}   "
                f"{max(means) - min(means):.4f}"
            )


def answers(trial: Trial) -> None:
    """Print a held-out example of each kind, and the masked model's answer."""
    file = trial.out / "masks, evidence.safetensors"
    if not file.is_file():
        return
    merger = Merger.from_pretrained(trial.components, base=trial.model, dtype="float32", masks=file)
    for kind, examples in zip(KINDS, trial.test, strict=True):
        ids, labels = examples[0]["input_ids"], examples[0]["labels"]
        asked = sum(label == -100 for label in labels)
        made = merger.generate(
            input_ids=torch.tensor([ids[:asked]]),
            max_new_tokens=40,
            do_sample=False,
            pad_token_id=trial.collator.pad_token_id,
        )[0, asked:]
        texts = [
            trial.tokenizer.decode(part, skip_special_tokens=True)
            for part in (ids[:asked], ids[asked:], made)
        ]
        print(
            f"\n{kind}: {texts[0].strip()}\n  held out: {texts[1].strip()}\n  the merge: "
            f"{texts[2].strip()}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", type=Path, default=Path("build/real/smollm2"), help="folder of the base model"
    )
    parser.add_argument(
        "--data", type=Path, default=Path("../shared/data"), help="folder of instruction data"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("runs/instructions"), help="folder for all outputs"
    )
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds of trained merges")
    parser.add_argument(
        "--only",
        nargs="+",
        default=["*"],
        help="patterns of the rows to compute; several processes may share --out",
    )
    parser.add_argument("--smoke", action="store_true", help="only a few steps, to test the script")
    given = parser.parse_args()
    logging.disable_progress_bar()
    # warnings inside transformers and peft
    warnings.filterwarnings("ignore", message=".*is deprecated.*")
    if not any(given.data.glob("*.json")):
        print(
            f"skipped: {given.data} has no *.json files of instructions; name a folder with --data"
        )
        return
    if not (given.model / "config.json").is_file():
        print(f"skipped: {given.model} is not a model folder; run `make real`, or use --model")
        return
    trial = Trial(given)
    print(
        f"{'nats per token, held out':34s} {' '.join(f'{kind:>8s}' for kind in KINDS)}     mean   "
        "CPU s to make the model"
    )
    trial.row("base", lambda: trial.load_model(trial.model))
    own = [
        trial.row(f"specialist {kind}", lambda k=k: trial.specialist(k))
        for k, kind in enumerate(KINDS)
    ]
    made = [row for row in own if row is not None]
    if len(made) == len(KINDS) and not given.smoke:
        trial.check_specialists(made)
    formulas(trial)
    learned(trial)
    answers(trial)


if __name__ == "__main__":
    main()
