"""`tune` beside TRL's SFTTrainer, on the same tokens of SmolLM2-135M: held-out loss, CPU, peak.

Every run is a process of its own with one thread; CPU seconds are of the training without
evaluations. The held-out loss of all is `answer_loss` over the same rows. Needs SmolLM2 and the
folder of real data.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch

from model_components._devices import peak_memory, reset_peak_memory
from tests.benchmarks.results import RESULTS, ROOT, commit, hardware, put, today, versions
from tests.support import real

FOUND, GUIDE = RESULTS / "lora_tune.json", ROOT / "docs" / "lora.md"
STEPS, BATCH, LENGTH, RATE = 100, 8, 256, 5e-4
WAYS = ("tune", "TRL, the same recipe", "TRL's defaults")
DATA = "rasbt_instruction-data.json"


def run(way: str, seed: int) -> dict[str, Any]:
    """Tune once; return the loss of held-out answers, seconds and the peak."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    measured = _ours(seed) if way == "tune" else _trl(seed, is_default=way == "TRL's defaults")
    row = {"way": way, "seed": seed} | {key: round(value, 4) for key, value in measured.items()}
    return row | {
        "date": today(),
        "commit": commit(),
        "hardware": hardware("cpu"),
        "versions": versions("torch", "transformers", "peft", "trl"),
    }


def _ours(seed: int) -> dict[str, float]:
    from heads.lora import tune
    from heads.lora.training import TuneTrainer

    spent = {"training": 0.0, "evaluations": 0.0}

    def timed(method: Callable[..., Any], what: str) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            start = time.process_time()
            result = method(*given, **named)
            spent[what] += time.process_time() - start
            return result

        return call

    TuneTrainer.train = timed(TuneTrainer.train, "training")
    TuneTrainer.evaluate = timed(TuneTrainer.evaluate, "evaluations")
    with tempfile.TemporaryDirectory() as folder:
        report = tune(
            str(real.smollm2()),
            real.data(DATA),
            out=f"{folder}/run",
            max_steps=STEPS,
            batch_size=BATCH,
            max_length=LENGTH,
            seed=seed,
            answers=0,
            evaluations=2,
            merge=False,
            progress=False,
        )
    seconds = spent["training"] - spent["evaluations"]
    return {"loss": report.loss, "cpu_seconds": seconds, "peak_mb": report.peak_mb}


def _trl(seed: int, *, is_default: bool) -> dict[str, float]:
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForSeq2Seq
    from trl import SFTConfig, SFTTrainer

    from heads.lora import TextExamples, answer_loss
    from model_components._examples import split_examples

    tokenizer = AutoTokenizer.from_pretrained(real.smollm2())
    examples = TextExamples(real.data(DATA), tokenizer, max_length=LENGTH)
    train, held_out = split_examples(examples, 0.1, 200)
    recipe: dict[str, Any] = {}
    if not is_default:
        recipe = {
            "learning_rate": RATE,
            "lr_scheduler_type": "cosine_with_min_lr",
            "lr_scheduler_kwargs": {"min_lr_rate": 0.1},
            "warmup_steps": 0.03,
            "gradient_checkpointing": False,
        }
    with tempfile.TemporaryDirectory() as folder:
        arguments = SFTConfig(
            folder,
            max_steps=STEPS,
            per_device_train_batch_size=BATCH,
            max_length=LENGTH,
            seed=seed,
            bf16=False,
            use_cpu=True,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            **recipe,
        )
        trainer = SFTTrainer(
            AutoModelForCausalLM.from_pretrained(real.smollm2(), dtype=torch.bfloat16),
            args=arguments,
            train_dataset=Dataset.from_list(train),
            processing_class=tokenizer,
            peft_config=LoraConfig(
                r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"
            ),
        )
        reset_peak_memory()
        start = time.process_time()
        trainer.train()
        seconds = time.process_time() - start
        peak = peak_memory() / 2**20
    model: Any = trainer.model
    if hasattr(model.get_base_model(), "fused_lm_head"):
        del model.get_base_model().fused_lm_head
    loss, _ = answer_loss(model, held_out, DataCollatorForSeq2Seq(tokenizer), progress=False)
    return {"loss": loss, "cpu_seconds": seconds, "peak_mb": peak}


def read_found() -> list[dict[str, Any]]:
    """The rows that are there already."""
    return json.loads(FOUND.read_text(encoding="utf-8")) if FOUND.exists() else []


def write_table() -> None:
    """The guide's table, from the committed rows."""
    rows = read_found()
    if {row["way"] for row in rows} != set(WAYS):
        return
    lines = [
        "| | held-out loss, by seed | CPU seconds of 100 steps | peak, MiB |",
        "|---|---|---|---|",
    ]
    for way in WAYS:
        runs = [row for row in rows if row["way"] == way]
        losses = " / ".join(f"{row['loss']:.3f}" for row in runs)
        seconds = statistics.median(row["cpu_seconds"] for row in runs)
        peak = statistics.median(row["peak_mb"] for row in runs)
        lines.append(f"| {way} | {losses} | {seconds:.0f} | {peak:,.0f} |")
    about = (
        f"SmolLM2-135M-Instruct in bfloat16, LoRA of rank 16 on every linear layer but the head, "
        f"{STEPS} steps of {BATCH} of 1,100 rows, {LENGTH} tokens at most; one thread, medians. "
        f"{rows[0]['hardware']}, {rows[0]['versions']}; {rows[0]['date']} at {rows[0]['commit']}."
    )
    put(GUIDE, [*lines, "", about], "tune")


def main(arguments: list[str] | None = None) -> None:
    """Run what is not there yet, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    options, _ = parser.parse_known_args(arguments)
    rows = read_found()
    made = {(row["way"], row["seed"]) for row in rows}
    context = multiprocessing.get_context("spawn")
    for seed in range(options.seeds):
        for way in WAYS:
            if (way, seed) in made:
                continue
            with context.Pool(1) as pool:
                rows.append(pool.apply(run, (way, seed)))
            FOUND.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
            print(rows[-1], flush=True)
    write_table()


if __name__ == "__main__":
    main()
