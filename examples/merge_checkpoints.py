"""Train two small specialists of one ancestor, merge them in five ways, and see what each merge can do.

Command   python examples/merge_checkpoints.py            (this is what `make demo` runs)
Time      about 1 minute on 2 CPU cores; nothing is downloaded
Result    a table of accuracy on both tasks: each specialist does its own task and not the other's; averages keep one
          whole and most of the other; sign election (ties, dare_ties) hurts, since each had to unlearn the other's

The ancestor is trained on three tasks for a while, not to the end: to copy a six-letter word, to reverse it, and to put
it into upper case (`reverse:fadbce>ecbdaf`, `upper:fadbce>FADBCE`). All checkpoints stay in the output folder.
"""

import argparse
import random
import shutil
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, Trainer, TrainingArguments, set_seed
from transformers.utils import logging

from mergekit_lite import merge_models

LETTERS = "abcdefgh"
LENGTH = 6
TASKS = {"copy": lambda word: word, "reverse": lambda word: word[::-1], "upper": str.upper}
MERGES = {
    "linear": {"weight": [0.5, 0.5]},
    "slerp": {"t": 0.5},
    "task_arithmetic": {"weight": [1.0, 1.0], "lambda_": 0.6},
    "ties": {"weight": [1.0, 1.0], "density": 0.9, "lambda_": 0.6},
    "dare_ties": {"weight": [1.0, 1.0], "density": 0.9, "lambda_": 0.6},
}


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a letter, one a task."""
    words = ["<pad>", ">", *(f"{task}:" for task in TASKS), *LETTERS, *LETTERS.upper()]
    made = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r"\w+:|."), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", padding_side="left")


def examples(task: str, count: int, seed: int) -> list[tuple[str, str]]:
    """Prompts and answers."""
    rng = random.Random(f"{task} {seed}")
    words = ["".join(rng.choices(LETTERS, k=LENGTH)) for _ in range(count)]
    return [(f"{task}:{word}>", TASKS[task](word)) for word in words]


def train(model: GPT2LMHeadModel, tokenizer, tasks: list[str], steps: int, rate: float, out: Path) -> None:
    """Train on some tasks and save; only the answer counts in the loss."""
    rows = []
    for prompt, answer in (pair for task in tasks for pair in examples(task, 20_000 // len(tasks), seed=1)):
        ids = tokenizer(prompt + answer)["input_ids"]
        rows.append({"input_ids": ids, "labels": [-100] * (len(ids) - LENGTH) + ids[-LENGTH:]})
    arguments = TrainingArguments(
        output_dir=str(out),
        max_steps=steps,
        per_device_train_batch_size=128,
        learning_rate=rate,
        lr_scheduler_type="cosine",
        warmup_steps=20,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        use_cpu=True,
    )
    Trainer(model=model, args=arguments, train_dataset=rows).train()
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def accuracy(folder: Path, task: str, count: int = 200) -> float:
    """Share of held-out words that greedy decoding gets wholly right."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    model = GPT2LMHeadModel.from_pretrained(folder).eval()
    prompts, answers = zip(*examples(task, count, seed=2), strict=True)
    batch = tokenizer(list(prompts), return_tensors="pt")["input_ids"]
    made = model.generate(
        batch, attention_mask=torch.ones_like(batch), max_new_tokens=LENGTH, do_sample=False, pad_token_id=0
    )
    texts = ["".join(tokenizer.convert_ids_to_tokens(row)) for row in made[:, batch.shape[1] :]]
    return sum(text == answer for text, answer in zip(texts, answers, strict=True)) / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/merge_checkpoints"), help="folder for checkpoints")
    parser.add_argument("--smoke", action="store_true", help="a few steps, to see that it runs")
    options = parser.parse_args()
    set_seed(0)
    logging.disable_progress_bar()  # of loading; training keeps its own
    tokenizer = make_tokenizer()
    config = GPT2Config(
        vocab_size=len(tokenizer), n_positions=2 * LENGTH + 3, n_embd=64, n_layer=3, n_head=4, bos_token_id=0,
        eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    ancestor = options.out / "ancestor"
    folders = {"ancestor": ancestor}
    train(GPT2LMHeadModel(config), tokenizer, list(TASKS), 5 if options.smoke else 180, 3e-3, ancestor)
    for task in ("reverse", "upper"):
        folders[f"{task} specialist"] = options.out / task
        model = GPT2LMHeadModel.from_pretrained(ancestor)
        train(model, tokenizer, [task], 5 if options.smoke else 300, 1e-3, options.out / task)
    for method, parameters in MERGES.items():
        base = {"linear": None, "slerp": options.out / "reverse"}.get(method, ancestor)
        out = options.out / f"merged-{method}"
        shutil.rmtree(out, ignore_errors=True)  # an earlier demo's
        models = [options.out / "reverse", options.out / "upper"]
        merge_models(models, method, base_model=base, out=out, progress=False, **parameters)
        folders[method] = out
    scores = {name: [accuracy(folder, task) for task in ("reverse", "upper")] for name, folder in folders.items()}
    print(f"\n{'model':20s} {'reverse':>8s} {'upper':>8s}   checkpoint")
    for name, (reverse, upper) in scores.items():
        print(f"{name:20s} {reverse:8.1%} {upper:8.1%}   {folders[name]}")


if __name__ == "__main__":
    main()
