"""Two small specialists of one ancestor, and the accuracy of their merges.

`merge_checkpoints.py` and `train_masks.py` use them.

The ancestor is trained briefly on three tasks: to copy a six-letter word, to reverse it, and to
convert it to upper case (`reverse:fadbce>ecbdaf`, `upper:fadbce>FADBCE`). Each specialist is then
trained on one of the last two.
"""

import argparse
import random
from pathlib import Path

import torch
from common import run_named
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    set_seed,
)
from transformers.utils import logging

LETTERS = "abcdefgh"
LENGTH = 6
TASKS = {"copy": lambda word: word, "reverse": lambda word: word[::-1], "upper": str.upper}


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per letter and one per task."""
    words = ["<pad>", ">", *(f"{task}:" for task in TASKS), *LETTERS, *LETTERS.upper()]
    made = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r"\w+:|."), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", padding_side="left")


def examples(task: str, count: int, seed: int) -> list[tuple[str, str]]:
    """Return prompts and answers of a task."""
    rng = random.Random(f"{task} {seed}")
    words = ["".join(rng.choices(LETTERS, k=LENGTH)) for _ in range(count)]
    return [(f"{task}:{word}>", TASKS[task](word)) for word in words]


def arguments(out: Path, steps: int, rate: float) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(out),
        max_steps=steps,
        learning_rate=rate,
        per_device_train_batch_size=128,
        warmup_steps=20,
        lr_scheduler_type="cosine",
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        use_cpu=True,
    )


def dataset(tokenizer, task: str, count: int) -> list[dict]:
    """Return examples of a task, with labels for the answers only."""
    rows = [
        tokenizer(prompt + answer)["input_ids"] for prompt, answer in examples(task, count, seed=1)
    ]
    return [
        {"input_ids": ids, "labels": [-100] * (len(ids) - LENGTH) + ids[-LENGTH:]} for ids in rows
    ]


def train(
    model: GPT2LMHeadModel, tokenizer, tasks: list[str], steps: int, rate: float, out: Path
) -> None:
    rows = [row for task in tasks for row in dataset(tokenizer, task, 20_000 // len(tasks))]
    run_named(Trainer(model=model, args=arguments(out, steps, rate), train_dataset=rows), out.name)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def accuracy(model, tokenizer, task: str, count: int = 200) -> float:
    """Return the fraction of held-out words that greedy decoding gets entirely right."""
    prompts, answers = zip(*examples(task, count, seed=2), strict=True)
    batch = tokenizer(list(prompts), return_tensors="pt")["input_ids"]
    made = model.eval().generate(
        batch,
        attention_mask=torch.ones_like(batch),
        max_new_tokens=LENGTH,
        do_sample=False,
        pad_token_id=0,
    )
    texts = ["".join(tokenizer.convert_ids_to_tokens(row)) for row in made[:, batch.shape[1] :]]
    return sum(text == answer for text, answer in zip(texts, answers, strict=True)) / count


def make_specialists(out: Path, smoke: bool) -> dict[str, Path]:
    """Train the ancestor and, from it, a specialist for each of two tasks; return their folders."""
    tokenizer = make_tokenizer()
    sizes = {"n_positions": 2 * LENGTH + 3, "n_embd": 64, "n_layer": 3, "n_head": 4}
    none = {
        "bos_token_id": 0,
        "eos_token_id": 0,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    }
    config = GPT2Config(vocab_size=len(tokenizer), **sizes, **none)
    train(
        GPT2LMHeadModel(config), tokenizer, list(TASKS), 5 if smoke else 180, 3e-3, out / "ancestor"
    )
    for task in ("reverse", "upper"):
        model = GPT2LMHeadModel.from_pretrained(out / "ancestor")
        train(model, tokenizer, [task], 5 if smoke else 300, 1e-3, out / task)
    return {
        "ancestor": out / "ancestor",
        **{f"{task} specialist": out / task for task in ("reverse", "upper")},
    }


def show(models: dict[str, Path | tuple]) -> dict[str, list[float]]:
    """Print and return each model's accuracy; a model is a folder, or (model, tokenizer)."""
    print(f"\n{'model':24s} {'reverse':>8s} {'upper':>8s}   checkpoint")
    scores, kinds = {}, (GPT2LMHeadModel, PreTrainedTokenizerFast)
    for name, model in models.items():
        loaded = (
            model if isinstance(model, tuple) else [kind.from_pretrained(model) for kind in kinds]
        )
        where = "in memory" if isinstance(model, tuple) else model
        scores[name] = [accuracy(*loaded, task) for task in ("reverse", "upper")]
        print(f"{name:24s} {scores[name][0]:8.1%} {scores[name][1]:8.1%}   {where}", flush=True)
    return scores


def options(description: str) -> argparse.Namespace:
    """Set up torch and transformers, and return the options of the command line."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=Path("runs/two_tasks"), help="folder for checkpoints"
    )
    parser.add_argument("--smoke", action="store_true", help="only a few steps, to test the script")
    set_seed(0)
    # matrices of 64 columns gain nothing from more threads, and lose much on a busy machine
    torch.set_num_threads(1)
    logging.disable_progress_bar()  # of loading; training has its own
    logging.set_verbosity_error()
    return parser.parse_args()
