"""Why old LoRA runs spiked: lora_recipes.json to a JSON of results, loss curves and the guide's table.

The old recipe scales by alpha instead of alpha / r, draws A sqrt(in / r) larger, clips gradients only after the
warm-up, and warms up over a fifth of the steps. A small GPT-2 is first trained on plain text of part of the data and
then tuned on instructions from the rest. Not timed: what is compared is the loss. Needs the folder of real data.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from heads.lora import (
    InstructionCollator,
    InstructionDataset,
    answer_loss,
    instruction_arguments,
    lora_report,
    prepare_lora,
)
from tests.benchmarks.ablations import settings
from tests.benchmarks.results import RESULTS, ROOT, commit, put, today
from tests.support import real

CONFIG, FOUND = Path(__file__).parent / "lora_recipes.json", RESULTS / "lora_recipes.json"
GUIDE, PLOT = ROOT / "docs" / "lora.md", ROOT / "docs" / "lora_recipes.svg"
WORK = Path(__file__).parent / "work" / "lora_recipes"
OLD_WARMUP, SOUND_WARMUP = 0.2, 0.03
EVERY, WATCHED = 10, 64  # steps between looks at the loss, and how many held-out answers it is of


def tokenizer_of(rows: list[dict[str, str]], size: int) -> Any:
    """Byte-level BPE of the rows' own text."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    made = ByteLevelBPETokenizer()
    texts = (f"{r['instruction']}\n{r['input']}\n{r['output']}" for r in rows)
    made.train_from_iterator(texts, vocab_size=size, special_tokens=["<end>"], show_progress=False)
    return PreTrainedTokenizerFast(tokenizer_object=made._tokenizer, eos_token="<end>")


def base_model(config: dict[str, Any]) -> tuple[Path, Any, list[dict[str, str]]]:
    """A GPT-2 trained on plain text, once for all runs; its tokenizer; the rows that it has not seen."""
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

    size = config["base_model"]
    rows = real.alpaca(5000)
    rows = [row for row in rows if row["output"].strip()]
    seen, rest = rows[:3500], rows[3500:]
    tokenizer = tokenizer_of(seen, size["vocab_size"])
    folder = WORK / "base"
    if not (folder / "config.json").exists():
        set_seed(0)
        stream: list[int] = []
        for row in seen:
            text = "\n".join(filter(None, (row["instruction"], row["input"], row["output"])))
            stream += [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
        length = size["context"]
        chunks = [stream[i : i + length] for i in range(0, len(stream) - length, length)]
        data = [{"input_ids": chunk, "labels": chunk} for chunk in chunks]
        shape = {k: size[k] for k in ("n_embd", "n_layer", "n_head", "vocab_size")}
        model = GPT2LMHeadModel(GPT2Config(n_positions=length, bos_token_id=0, eos_token_id=0, **shape))
        with tempfile.TemporaryDirectory() as out:
            arguments = TrainingArguments(
                out, max_steps=size["steps"], per_device_train_batch_size=size["batch"], use_cpu=True, warmup_steps=100,
                learning_rate=size["learning_rate"], lr_scheduler_type="cosine", save_strategy="no", report_to="none",
                logging_steps=100, disable_tqdm=True,
            )  # fmt: skip
            Trainer(model=model, args=arguments, train_dataset=data).train()
        model.save_pretrained(folder)
    return folder, tokenizer, rest


def run(setting: dict[str, Any], config: dict[str, Any], base: Path, data: tuple[Any, Any]) -> dict[str, Any]:
    """Tune under one setting; the loss of held-out answers, while it trains on some and in the end on all."""
    from peft import LoraConfig
    from transformers import GPT2LMHeadModel, TrainerCallback, set_seed

    from heads.lora import InstructionTrainer

    rank = setting["rank"]
    alpha = rank if setting["alpha"] == "r" else float(setting["alpha"])
    set_seed(setting["seed"])
    told = alpha * rank if setting["scaling"] == "alpha" else alpha  # peft divides by r
    targets = ["c_attn", "c_proj", "c_fc", "lm_head"]
    model = prepare_lora(
        GPT2LMHeadModel.from_pretrained(base),
        LoraConfig(r=rank, lora_alpha=told, target_modules=targets),
        split_fused_qkv=True,
    )
    if setting["init"] != "peft":
        for name, parameter in model.named_parameters():
            if ".lora_A." in name:
                parameter.data *= (parameter.shape[1] / rank) ** 0.5
    step = statistics.median(row.first_step for row in lora_report(model).adapters)

    class ClipLate(TrainerCallback):
        def on_step_begin(self, args, state, control, **_):
            args.max_grad_norm = 1.0 if state.global_step > args.get_warmup_steps(state.max_steps) else 0.0

    old = setting["recipe"].startswith("old")
    trained, held = data
    collator, losses = InstructionCollator(pad_token_id=0), []
    watched = [held[i] for i in range(WATCHED)]

    class Watch(TrainerCallback):
        def on_step_begin(self, args, state, control, **_):
            if state.global_step % EVERY == 0:
                losses.append(round(answer_loss(model, watched, collator, progress=False)[0], 4))

    with tempfile.TemporaryDirectory() as out:
        arguments = instruction_arguments(
            out, max_steps=config["steps"], per_device_train_batch_size=config["batch"], use_cpu=True,
            disable_tqdm=True, learning_rate=setting["lr"], warmup_steps=OLD_WARMUP if old else SOUND_WARMUP,
            seed=setting["seed"],
            weight_decay=0.1 if old else 0.0, logging_strategy="no",
            lr_scheduler_kwargs={"min_lr": 1e-5} if old else {"min_lr_rate": 0.1},
        )  # fmt: skip
        callbacks = [Watch(), *([ClipLate()] if setting["clip"] != "always" else [])]
        before = answer_loss(model, held, collator, progress=False)[0]
        trainer = InstructionTrainer(
            model=model, args=arguments, train_dataset=trained, data_collator=collator, callbacks=callbacks
        )
        seconds = time.process_time()
        trainer.train()
        seconds = time.process_time() - seconds
    losses.append(round(answer_loss(model, watched, collator, progress=False)[0], 4))
    loss, perplexity = answer_loss(model, held, collator, progress=False)
    return setting | {
        "held-out loss before": round(before, 4), "held-out loss": round(loss, 4), "perplexity": round(perplexity, 3),
        "largest rise": round(largest_rise(losses), 4), "first step": round(step, 2),
        "cpu_seconds": round(seconds, 1), "losses": losses,
    }  # fmt: skip


def largest_rise(losses: list[float]) -> float:
    """How far a loss ever climbs above the least that it had been."""
    least, rise = losses[0], 0.0
    for value in losses:
        least, rise = min(least, value), max(rise, value - least)
    return rise


def write_table() -> None:
    """The guide's table, from the committed results."""
    if not FOUND.exists():
        return
    found = json.loads(FOUND.read_text(encoding="utf-8"))
    lines = [
        "| recipe | r | learning rate | first step | held-out loss | largest rise on the way |",
        "|---" * 6 + "|",
    ]
    rows: dict[tuple, list[dict]] = {}
    for row in found["rows"]:
        rows.setdefault((row["recipe"], row["rank"], row["lr"]), []).append(row)
    for (recipe, rank, lr), held in rows.items():
        losses = " / ".join(f"{r['held-out loss']:.3f}" for r in held)
        rises = " / ".join(f"{r['largest rise']:.2f}" for r in held)
        lines.append(f"| {recipe} | {rank} | {lr:g} | {held[0]['first step'] * lr:.3f} | {losses} | {rises} |")
    size = found["config"]["base_model"]
    text = (
        f"GPT-2 of {size['n_layer']} layers, width {size['n_embd']}, trained on plain text to a held-out loss of "
        f"{found['rows'][0]['held-out loss before']:.3f} on instructions; {found['config']['steps']} steps of "
        f"{found['config']['batch']} instructions. Two numbers are two seeds. First step: how far an output moves in "
        f"Adam's first step at the peak learning rate. The rise is of the loss of {WATCHED} held-out answers, every "
        f"{EVERY} steps, above the least that it had been. Measured "
        f"{found['date']} at {found['commit']}."
    )
    put(GUIDE, [*lines, "", text], "recipes")


def draw(found: dict[str, Any]) -> None:
    """Held-out loss on the way, of both recipes at each rank, and of the old one with one thing mended."""
    import matplotlib

    matplotlib.rcParams["svg.hashsalt"] = "lora"
    from matplotlib.figure import Figure

    figure = Figure((9, 3.4), layout="constrained")
    panels = figure.subplots(1, 3, sharey=True)
    first = [r for r in found["rows"] if r["seed"] == 0]
    old = [r for r in first if r["recipe"].startswith("old")]

    def rank(row: dict[str, Any]) -> str:
        return f"r {row['rank']}"

    def change(row: dict[str, Any]) -> str:
        return row["recipe"].removeprefix("old, ") + (", 1e-4" if row["lr"] == 1e-4 else "")

    groups = (
        ("sound recipe", [r for r in first if r["recipe"] == "sound"], rank),
        ("old recipe, 5e-5", [r for r in old if r["recipe"] == "old" and r["lr"] == 5e-5], rank),
        ("old recipe at r 64, one thing changed", [r for r in old if r["rank"] == 64], change),
    )
    for axes, (title, rows, label) in zip(panels, groups, strict=True):
        for row in rows:
            steps = range(0, EVERY * len(row["losses"]), EVERY)
            axes.plot(steps, row["losses"], label=label(row), linewidth=1.2)
        axes.set(title=title, xlabel="step")
        axes.title.set_fontsize(9)
        axes.legend(fontsize=7)
    panels[0].set_ylabel("loss of held-out answers")
    figure.savefig(PLOT, metadata={"Date": None})


def main(arguments: list[str] | None = None) -> None:
    """Run every setting; write the results, the table and the plot."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", help="not looked at: it is not timed")
    options = parser.parse_args(arguments)
    del options
    try:
        real.alpaca(1)
    except real.AbsentError as error:
        print(f"lora_recipes: skipped, {error}")
        return
    config = json.loads(CONFIG.read_text(encoding="utf-8"))
    torch.set_num_threads(1)
    base, tokenizer, rows = base_model(config)
    length, held = config["base_model"]["context"], config["held_out"]
    data = [
        InstructionDataset(part, tokenizer, max_length=length, progress=False) for part in (rows[held:], rows[:held])
    ]
    found: dict[str, Any] = {"date": today(), "commit": commit(), "config": config, "rows": []}
    for setting in settings(config):
        found["rows"].append(run(setting, config, base, (data[0], data[1])))
        print({k: v for k, v in found["rows"][-1].items() if k != "losses"}, flush=True)
    FOUND.write_text(json.dumps(found) + "\n", encoding="utf-8")
    draw(found)
    write_table()


if __name__ == "__main__":
    main()
