"""Tuning SmolLM2 by LoRA and whole, and why old LoRA runs spiked: lora_recipes.json to results,
curves and two tables.

The old recipe scales by alpha instead of alpha / r, draws A sqrt(in / r) larger, clips gradients
only after the warm-up, and warms up over a fifth of the steps. The base weights are the instruct
model's, tuned on Alpaca's rows. Not timed but for the CPU seconds of a run. Rows that are there
already are not made again; ``--only`` makes some of them. Needs SmolLM2 and the folder of real
data.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from sacrebleu.metrics import CHRF

from heads.lora import (
    answer_loss,
    judge_answers,
    lora_report,
    prepare_lora,
    tuning_report,
)
from tests.benchmarks.ablations import settings
from tests.benchmarks.pictures import save_picture
from tests.benchmarks.results import RESULTS, ROOT, commit, put, today
from tests.support import real

CONFIG, FOUND = Path(__file__).parent / "lora_recipes.json", RESULTS / "lora_recipes.json"
GUIDE, PLOT = ROOT / "docs" / "lora.md", ROOT / "docs" / "lora_recipes.svg"
OLD_WARMUP, SOUND_WARMUP = 0.2, 0.03


def rows_of(config: dict[str, Any]) -> tuple[list[dict], list[dict]]:
    """Rows to train, and held-out ones."""
    rows = []
    for row in real.alpaca(5000):
        if row["output"].strip():
            question = "\n\n".join(filter(None, (row["instruction"], row["input"])))
            prompt = [{"role": "user", "content": question}]
            completion = [{"role": "assistant", "content": row["output"]}]
            rows.append({"prompt": prompt, "completion": completion})
    random.Random(0).shuffle(rows)
    return rows[config["held_out"] :], rows[: config["held_out"]]


def model_of(setting: dict[str, Any]) -> Any:
    """The base model in bfloat16 with float32 adapters, as peft makes them; tuned whole, it is in
    float32."""
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM

    rank = setting["rank"]
    dtype = torch.bfloat16 if rank else torch.float32
    model: Any = AutoModelForCausalLM.from_pretrained(real.smollm2(), dtype=dtype)
    if not rank:
        return model
    # peft divides by r
    alpha = rank * (rank if setting["scaling"] == "alpha" else float(setting["scaling"]))
    config = LoraConfig(
        r=rank, lora_alpha=alpha, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    model = prepare_lora(model, config)
    if setting["init"] != "peft":
        for name, parameter in model.named_parameters():
            if ".lora_A." in name:
                parameter.data *= (parameter.shape[1] / rank) ** 0.5
    return model


def answers_to(model: Any, tokenizer: Any, prompts: list[str]) -> list[str]:
    """Greedy answers of 64 tokens at most."""
    made: list[str] = []
    tokenizer.padding_side = "left"
    for start in range(0, len(prompts), 10):
        batch = tokenizer(
            prompts[start : start + 10], return_tensors="pt", padding=True, add_special_tokens=False
        )
        found = model.generate(
            **batch, max_new_tokens=64, do_sample=False, pad_token_id=tokenizer.pad_token_id
        )
        made += tokenizer.batch_decode(
            found[:, batch["input_ids"].shape[1] :], skip_special_tokens=True
        )
    return made


def run(
    setting: dict[str, Any], config: dict[str, Any], data: tuple[list[dict], list[dict]]
) -> dict[str, Any]:
    """Tune under one setting: loss and judge of held-out rows, and what was seen on the way."""
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback, set_seed
    from trl import SFTConfig, SFTTrainer

    set_seed(setting["seed"])
    tokenizer, model = AutoTokenizer.from_pretrained(real.smollm2()), model_of(setting)
    adapted = bool(setting["rank"])
    step = (
        statistics.median(row.first_step for row in lora_report(model).adapters)
        if adapted
        else None
    )

    class ClipLate(TrainerCallback):
        def on_step_begin(self, args, state, control, **_):
            args.max_grad_norm = (
                1.0 if state.global_step > args.get_warmup_steps(state.max_steps) else 0.0
            )

    old = setting["recipe"].startswith("old")
    trained, held = (Dataset.from_list(part) for part in data)
    prompts = [
        tokenizer.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True)
        for row in data[1][: config["answers"]]
    ]
    good = [row["completion"][0]["content"] for row in data[1][: config["answers"]]]
    references = dict(zip(prompts, good, strict=True))

    def judge(prompt: str, answer: str) -> float:
        return CHRF().sentence_score(answer, [references[prompt]]).score

    with tempfile.TemporaryDirectory() as out:
        arguments = SFTConfig(
            out,
            max_steps=config["steps"],
            per_device_train_batch_size=config["batch"],
            per_device_eval_batch_size=8,
            use_cpu=True,
            learning_rate=setting["lr"],
            warmup_steps=OLD_WARMUP if old else SOUND_WARMUP,
            lr_scheduler_type="cosine_with_min_lr",
            seed=setting["seed"],
            weight_decay=0.1 if old else 0.0,
            lr_scheduler_kwargs={"min_lr": 1e-5} if old else {"min_lr_rate": 0.1},
            max_length=config["max_length"],
            logging_steps=1,
            eval_strategy="steps",
            eval_steps=config["every"],
            eval_on_start=True,
            gradient_checkpointing=False,
            bf16=not adapted,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
        )
        trainer = SFTTrainer(
            model,
            args=arguments,
            train_dataset=trained,
            eval_dataset=held,
            processing_class=tokenizer,
            callbacks=[ClipLate()] if setting["clip"] != "always" else [],
        )
        whole: Any = trainer.eval_dataset
        trainer.eval_dataset = whole.select(range(config["watched"]))

        seconds = time.process_time()
        if setting["recipe"] != "not tuned":
            trainer.train()
        seconds = time.process_time() - seconds
        loss = answer_loss(trainer.model, whole, trainer.data_collator, progress=False)[0]
        judged = judge_answers(
            judge, prompts, answers_to(trainer.model, tokenizer, prompts), progress=False
        )
    row = _made(setting, config) | {
        "loss": round(loss, 4),
        "judge": round(judged, 2),
        "date": today(),
        "commit": commit(),
    }
    if setting["recipe"] == "not tuned":
        return row
    seen = tuning_report(trainer.state.log_history)
    return row | {
        "largest rise": round(seen.largest_rise, 4),
        "overfits from": seen.overfits_from,
        "diverges from": seen.diverges_from,
        "spikes": [list(spike) for spike in seen.spikes],
        "first step": None if step is None else round(step, 2),
        "cpu_seconds": round(seconds, 1),
        "train": [round(loss, 4) for _, loss in seen.train],
        "held out": [round(loss, 4) for _, loss in seen.held_out],
    }


def _made(setting: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """What a row is found by."""
    return setting | {key: config[key] for key in ("steps", "batch")}


def read_found() -> list[dict[str, Any]]:
    """The rows that are there already."""
    return json.loads(FOUND.read_text(encoding="utf-8"))["rows"] if FOUND.exists() else []


def grouped(rows: list[dict], *keys: str) -> dict[tuple, list[dict]]:
    """Rows that differ by their seed alone."""
    found: dict[tuple, list[dict]] = {}
    for row in sorted(rows, key=lambda row: row["seed"]):
        found.setdefault(tuple(row[key] for key in keys), []).append(row)
    return found


def seeds(rows: list[dict], key: str, digits: int) -> str:
    """A figure of every seed."""
    return " / ".join(f"{row[key]:.{digits}f}" for row in rows)


def _end(row: dict[str, Any]) -> str:
    told = (("", row["overfits from"]), ("diverges ", row["diverges from"]))
    return next((f"{what}{step}" for what, step in told if step is not None), "-")


def write_table() -> None:
    """The guide's tables, from the committed results."""
    rows, config = read_found(), json.loads(CONFIG.read_text(encoding="utf-8"))
    order = [(s["table"], s["recipe"], s["rank"], s["lr"]) for s in settings(config)]
    rows.sort(key=lambda row: order.index((row["table"], row["recipe"], row["rank"], row["lr"])))
    parts = {name: [row for row in rows if row["table"] == name] for name in ("tuning", "recipes")}
    if not all(parts.values()):  # as long as the first of a kind is not there
        return
    about = (
        f"SmolLM2-135M-Instruct, {config['steps']} steps of {config['batch']} of Alpaca's rows. "
        f"Two numbers are two seeds. Measured {max(row['date'] for row in rows)} at "
        f"{', '.join(dict.fromkeys(row['commit'] for row in rows))}."
    )
    bare = next(row for row in parts["tuning"] if row["recipe"] == "not tuned")
    tuned = [row for row in parts["tuning"] if row is not bare]
    lines = [
        "| tuned | learning rate | held-out loss | judge | overfits from step | CPU minutes |",
        "|---" * 6 + "|",
        f"| nothing | | {bare['loss']:.3f} | {bare['judge']:.1f} | | |",
    ]
    for (rank, rate), held in grouped(tuned, "rank", "lr").items():
        ends = " / ".join(_end(row) for row in held)
        name = f"LoRA, r {rank}" if rank else "all parameters"
        minutes = statistics.median(row["cpu_seconds"] for row in held) / 60
        losses, judged = seeds(held, "loss", 3), seeds(held, "judge", 1)
        lines.append(f"| {name} | {rate:g} | {losses} | {judged} | {ends} | {minutes:.0f} |")
    told = (
        f"Loss of {config['held_out']} held-out answers, nats a token; the judge is chrF of "
        f"{config['answers']} greedy answers against the references. "
    )
    put(GUIDE, [*lines, "", told + about], "tuning")
    lines = [
        "| recipe | r | first step | held-out loss | largest rise on the way | spikes |",
        "|---" * 6 + "|",
    ]
    sound = [row for row in tuned if row["rank"] in (16, 64) and row["lr"] == config["base"]["lr"]]
    for (recipe, rank), held in grouped(sound + parts["recipes"], "recipe", "rank").items():
        step, spikes = (
            held[0]["first step"] * held[0]["lr"],
            " / ".join(str(len(row["spikes"])) for row in held),
        )
        losses, rises = seeds(held, "loss", 3), seeds(held, "largest rise", 2)
        lines.append(f"| {recipe} | {rank} | {step:.3f} | {losses} | {rises} | {spikes} |")
    told = (
        "First step: how far Adam's first step moves an output at the peak learning rate (5e-4 in "
        "the sound recipe, 5e-5 in the old one). Largest rise: how far the loss of "
        f"{config['watched']} held-out answers, measured every {config['every']} steps, rose above "
        "its earlier minimum, in nats. Spikes are in the training loss, as `tuning_report` counts "
        "them. "
    )
    put(GUIDE, [*lines, "", told + about], "recipes")


def draw() -> None:
    """Held-out loss on the way, of both recipes, and of the old one with one thing mended."""
    from matplotlib.figure import Figure

    every = json.loads(CONFIG.read_text(encoding="utf-8"))["every"]
    rows = [row for row in read_found() if row["seed"] == 0 and "held out" in row]
    figure = Figure((9, 3.4), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    tuned = [row for row in rows if row["table"] == "tuning"]
    old = [row for row in rows if row["table"] == "recipes" and row["rank"] == 64]
    for axes, title, held in zip(
        panels, ("sound, and all parameters", "old, r 64"), (tuned, old), strict=True
    ):
        for row in held:
            name = (
                row["recipe"]
                if row["table"] == "recipes"
                else f"r {row['rank']}"
                if row["rank"]
                else "all"
            )
            label = f"{name}, {row['lr']:g}" if row["table"] == "tuning" else name
            steps = range(0, every * len(row["held out"]), every)
            axes.plot(steps, row["held out"], label=label, linewidth=1.2)
        axes.set(title=title, xlabel="step")
        axes.title.set_fontsize(9)
        axes.legend(fontsize=7)
    panels[0].set_ylabel("loss of held-out answers")
    save_picture(figure, PLOT)


def main(arguments: list[str] | None = None) -> None:
    """Run every setting that has no row; write the results, the tables and the plot."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", help="not looked at")
    parser.add_argument(
        "--only",
        nargs="+",
        help="words that 'table recipe rank lr seed' of a setting must all have",
    )
    options = parser.parse_args(arguments)
    config = json.loads(CONFIG.read_text(encoding="utf-8"))
    try:
        real.smollm2()
        data = rows_of(config)
    except real.AbsentError as error:
        print(f"lora_recipes: skipped, {error}")
        return
    for setting in settings(config):
        words = "{table} {recipe} r{rank} {lr:g} seed{seed}".format(**setting)
        rows = read_found()
        if any(_made(setting, config).items() <= row.items() for row in rows):
            continue
        if options.only and not all(word in words for word in options.only):
            continue
        row = run(setting, config, data)
        print(
            words,
            {k: row[k] for k in ("loss", "judge", "largest rise", "cpu_seconds") if k in row},
            flush=True,
        )
        rows = read_found()  # again: other processes may have added some
        FOUND.write_text(json.dumps({"rows": [*rows, row]}) + "\n", encoding="utf-8")
    write_table()
    if FOUND.exists():
        draw()


if __name__ == "__main__":
    main()
