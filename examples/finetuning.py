"""What the fine-tuning examples share: their options, training, and what came of it.

Without --data or --model, `which_word` makes them.
"""

import argparse
import math
import os
import random
import resource
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import can_draw, save_plot
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed
from transformers.trainer_utils import get_last_checkpoint
from which_word import own_base, rows_of, short

from heads import lora

NOTED = ("judge", "pack", "dtype", "seed", "resume", "dropout", "rslora", "loraplus", "targets")


def parse(description: str, **defaults: Any) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data", help="JSON or JSON lines in Alpaca's format or with messages, or a data set's hub id")
    add("--model", help="a causal model's folder or hub id; a small GPT-2 of one's own without it")
    add("--name", default=defaults["name"], help="of the run")
    add("--epochs", type=float, default=3.0)
    add("--batch", type=int, default=8)
    add("--lr", type=float, default=defaults["lr"])
    add("--min-lr", type=float, help="default: a tenth of --lr")
    add("--warmup", type=float, default=0.03, help="share of the steps")
    add("--weight-decay", type=float, default=0.0)
    add("--max-length", type=int, default=256)
    add("--pack", action="store_true", help="no padding: examples of a batch share one row")
    add("--judge", choices=["overlap", "likelihood"], default="overlap", help="likelihood: the base model's")
    add("--dtype", default="float32", choices=["float32", "bfloat16"])
    add("--seed", type=int, default=0)
    add("--out", type=Path, default=Path("runs/finetuning"))
    add("--resume", action="store_true", help="go on from the run's last checkpoint")
    add("--smoke", action="store_true", help="a run of seconds, to see that it works")
    return parser


def finetune(given: argparse.Namespace, prepare: Callable[[Any], Any]) -> None:
    """Train what ``prepare`` makes of the base model; print, save and table what came of it."""
    set_seed(given.seed)
    plots = can_draw()
    for text in (".*save_embedding_layers.*", ".*tie_word_embeddings.*", ".*is deprecated.*"):
        warnings.filterwarnings("ignore", message=text)  # peft's and transformers' own affairs
    rows = rows_of(given.data, given.smoke)
    random.Random(0).shuffle(rows)
    count = min(200, max(1, len(rows) // 10))
    folder = given.model or own_base(given.out, rows[count:], given.smoke, given.data is None)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=given.dtype)
    template: Any = lora.ChatTemplate(tokenizer) if tokenizer.chat_template else lora.alpaca_template
    template = short if given.data is None else template
    length = min(given.max_length, getattr(base.config, "max_position_embeddings", given.max_length))
    trained, held = (
        lora.InstructionDataset(part, tokenizer, template=template, max_length=length)
        for part in (rows[count:], rows[:count])
    )
    print(f"trained: {trained.report}\nheld out: {held.report}")
    judge: Any = lora.ReferenceOverlap(dict(held.texts))
    if given.judge == "likelihood":
        judge = lora.ModelLikelihood(AutoModelForCausalLM.from_pretrained(folder), tokenizer)
    model = prepare(base)
    collator = lora.InstructionCollator(pad_token_id=tokenizer.eos_token_id, pack=given.pack)
    if given.pack:
        lora.check_packing(model)
    out = given.out / given.name
    steps = math.ceil(given.epochs * len(trained) / given.batch / int(os.environ.get("WORLD_SIZE", 1)))
    steps = 6 if given.smoke else steps
    least = given.lr / 10 if given.min_lr is None else given.min_lr
    arguments = lora.instruction_arguments(
        out / "checkpoints", max_steps=steps, per_device_train_batch_size=given.batch, learning_rate=given.lr,
        lr_scheduler_kwargs={"min_lr": least}, warmup_steps=given.warmup, weight_decay=given.weight_decay,
        save_steps=max(2, steps // 4), save_total_limit=1, seed=given.seed,
    )  # fmt: skip
    prompts = [prompt for prompt, _ in held.texts][: 4 if given.smoke else 100]
    new = min(8 if given.smoke else 64, length // 2)

    def measured() -> tuple[float, float, float, list[str]]:
        answers = lora.generate_answers(model, tokenizer, prompts, max_new_tokens=new)
        return *lora.answer_loss(model, held, collator), lora.judge_answers(judge, prompts, answers), answers

    before = measured()
    trainer = lora.InstructionTrainer(
        model=model, args=arguments, train_dataset=trained, data_collator=collator,
        loraplus_lr_ratio=getattr(given, "loraplus", None),
    )  # fmt: skip
    checkpoint = None
    if given.resume:
        folder = out / "checkpoints"
        checkpoint = get_last_checkpoint(folder) if folder.is_dir() else None
        print(f"going on from {checkpoint}" if checkpoint else f"{folder} has no checkpoint: starting anew")
    seconds = time.perf_counter()
    try:
        trainer.train(resume_from_checkpoint=checkpoint)
    except KeyboardInterrupt:
        sys.exit("\nstopped; the same command with --resume goes on from the last checkpoint")
    seconds = time.perf_counter() - seconds
    if not trainer.is_world_process_zero():
        return
    model.save_pretrained(out / "model")
    tokenizer.save_pretrained(out / "model")
    loss, perplexity, score, answers = measured()
    for prompt, answer, (_, good) in list(zip(prompts, answers, held.texts, strict=False))[:3]:
        print(f"\n{prompt}\n  said: {answer}\n  good: {good}")
    if torch.cuda.is_available():
        memory = torch.cuda.max_memory_allocated() / 2**20
    else:
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"\nbefore: loss {before[0]:.3f}, perplexity {before[1]:.2f}, judge {before[2]:.1f} of 100")
    print(f"after:  loss {loss:.3f}, perplexity {perplexity:.2f}, judge {score:.1f} of 100")
    print(f"{seconds:.0f} s of training, {memory:.0f} MB at most")
    run = lora.Run(
        name=given.name, model=str(given.model or "own GPT-2"), data=Path(given.data or "made up").name,
        batch=given.batch, epochs=given.epochs, optimizer="adamw", lr=given.lr, min_lr=least, warmup=given.warmup,
        weight_decay=given.weight_decay, rank=getattr(given, "rank", None), alpha=getattr(given, "alpha", None),
        loss=round(loss, 4), perplexity=round(perplexity, 3), judge=round(score, 2), seconds=round(seconds, 1),
        notes=" ".join(f"{k}={v}" for k, v in vars(given).items() if k in NOTED and v),
    )  # fmt: skip
    lora.append_run(given.out / "runs.csv", run)
    drawn = save_plot(plots, given.out / "runs.png", lambda: lora.plot_runs(given.out / "runs.csv"))
    print(f"{out / 'model'}; {given.out / 'runs.csv'}; {drawn}")
