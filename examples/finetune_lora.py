"""Tune a language model on instructions with TRL, by LoRA or whole, and watch it.

Curves, spikes, overfitting, a judge.

    python examples/finetune_lora.py                    # a small GPT-2, made-up rows; 3 minutes
    python examples/finetune_lora.py --rank 64 --merge  # the same rate serves every rank
    python examples/finetune_lora.py --full             # all parameters, to compare with
    python examples/finetune_lora.py --data rows.json --model openai-community/gpt2-medium

Needs the extras `trl` and `judge` (and `plot` for the curves). The rate is 2e-3 for the small model
and 2e-4 for others, with --full 5e-4 and 2e-5; --loraplus and --rslora want less. OUT/NAME/model
loads with `load_lora` and in plain peft; --merge writes OUT/NAME/merged. OUT/NAME/log.json and
curves.png are the run's, OUT/runs.csv the table of all runs; sweep_lora.py makes many. Nothing is
downloaded unless it is named.
"""

import argparse
import csv
import json
import random
import re
import resource
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from common import can_draw, remove_earlier, save_plot

try:
    from datasets import Dataset, load_dataset
    from trl import SFTConfig, SFTTrainer
    from which_word import own_base, own_rows
except ImportError as error:
    sys.exit(f"this example needs {error.name}: pip install 'model-components[trl,judge]'")
from peft import LoraConfig
from peft.optimizers import create_loraplus_optimizer
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline, set_seed
from transformers.trainer_utils import get_last_checkpoint

from heads import lora

COLUMNS = (
    "name",
    "model",
    "data",
    "batch",
    "steps",
    "epochs",
    "optimizer",
    "lr",
    "min_lr",
    "schedule",
    "warmup",
    "clip",
    "weight_decay",
    "rank",
    "alpha",
    "trained",
    "seed",
    "loss",
    "perplexity",
    "judge",
    "overfits_from",
    "spikes",
    "seconds",
    "tokens_per_second",
    "peak_mb",
    "notes",
)
NOTED = (
    "judge",
    "pack",
    "dtype",
    "dropout",
    "rslora",
    "loraplus",
    "targets",
    "last",
    "freeze",
    "smoke",
)


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--data",
        help=(
            "JSON or JSON lines in Alpaca's format or with messages, or a data set's hub id; needs "
            "--model"
        ),
    )
    add(
        "--model",
        help=(
            "a causal model's folder or hub id; without --data and --model a small GPT-2 of one's "
            "own"
        ),
    )
    add("--name", help="of the run; default: lora or full")
    add("--full", action="store_true", help="train all parameters, no adapters")
    add("--rank", type=int, help="default: 16")
    add("--alpha", type=float, help="default: twice the rank")
    add("--dropout", type=float, default=0.0, help="of what adapters read (default: 0)")
    add(
        "--targets",
        nargs="*",
        help="names of layers (default: all linear ones but the head, which TRL does not tune)",
    )
    add("--rslora", action="store_true", help="scale by alpha / sqrt(rank)")
    add("--loraplus", type=float, help="B's learning rate over A's, such as 16")
    add("--last", type=int, help="train only so many of the last blocks")
    add("--freeze", help="a pattern of parameters that are not trained, such as 'embed|lm_head'")
    add("--epochs", type=float, default=3.0, help="default: 3")
    add("--steps", type=int, help="instead of --epochs; 6 with --smoke")
    add("--batch", type=int, default=8, help="rows in a step (default: 8)")
    add(
        "--lr",
        type=float,
        help="default: 2e-4, with --full 2e-5; 2e-3 and 5e-4 for the small GPT-2",
    )
    add("--min-lr", type=float, help="of the cosine; default: a tenth of --lr")
    add(
        "--schedule",
        default="cosine_with_min_lr",
        help="any of transformers', such as linear or constant",
    )
    add("--warmup", type=float, default=0.03, help="share of the steps")
    add("--clip", type=float, default=1.0, help="the gradient's norm at most; 0: never")
    add("--optimizer", default="adamw_torch", help="any of transformers', such as sgd or adafactor")
    add("--weight-decay", type=float, default=0.0, help="default: 0")
    add("--max-length", type=int, default=256, help="tokens; longer rows are cut (default: 256)")
    add("--pack", action="store_true", help="rows share a sequence instead of being padded")
    add(
        "--held-out",
        type=int,
        default=200,
        help="rows that are not trained, a tenth of all at most",
    )
    add(
        "--looks",
        type=int,
        default=20,
        help="how often the loss of up to 64 held-out rows is taken on the way",
    )
    add(
        "--judge",
        choices=["overlap", "gain"],
        default="overlap",
        help="gain: of the base model's likelihood",
    )
    add("--dtype", default="float32", choices=["float32", "bfloat16"])
    add("--seed", type=int, default=0)
    add("--out", type=Path, default=Path("runs/finetuning"))
    add("--merge", action="store_true", help="also write a full checkpoint")
    add("--resume", action="store_true", help="go on from the run's last checkpoint")
    add("--smoke", action="store_true", help="a run of seconds, to see that it works")
    return parser


def checked(words: list[str] | None) -> argparse.Namespace:
    """The options, without contradictions, and with what others decide filled in."""
    parser = options()
    given = parser.parse_args(words)
    if (given.data is None) != (given.model is None):
        parser.error(
            "--data and --model go together: rows for a model of yours, or neither for the made-up "
            "task"
        )
    for name in ("rank", "alpha", "dropout", "targets", "rslora", "loraplus", "merge"):
        if given.full and getattr(given, name):
            parser.error(f"--{name} is for adapters, and --full trains without")
    small, large = (5e-4, 2e-5) if given.full else (2e-3, 2e-4)
    given.lr = given.lr or (small if given.model is None else large)
    given.rank = given.rank or 16
    given.alpha = given.alpha or 2.0 * given.rank
    given.steps = given.steps or (6 if given.smoke else None)
    given.name = given.name or ("full" if given.full else "lora")
    return given


def rows_and_base(given: argparse.Namespace) -> tuple[list[dict], str, Any]:
    """Rows with prompt and completion, the base model's folder or id, and its tokenizer."""
    if given.data is None:
        folder = str(own_base(given.out, given.smoke))
        return own_rows(given.smoke), folder, AutoTokenizer.from_pretrained(folder)
    source: Any = given.data
    if not Path(source).is_file():
        if Path(source).suffix or not re.fullmatch(r"[\w.-]+/[\w.-]+", source):
            sys.exit(f"--data: there is no file {source}")
        try:
            source = load_dataset(source, split="train")
        except Exception as error:  # of the network, the hub or the data: all are told the same way
            sys.exit(f"--data: {source} is neither a file nor a data set of the hub: {error}")
    try:
        tokenizer = AutoTokenizer.from_pretrained(given.model)
    except (OSError, ValueError) as error:
        sys.exit(
            f"--model {given.model} is no model's folder, nor found on the hub "
            f"({str(error).splitlines()[0]})"
        )
    template = lora.chat_template if tokenizer.chat_template else lora.alpaca_template
    rows = lora.read_rows(source, template)
    if len(rows) < 2:
        raise ValueError("--data has one row; expected one to train and one to hold out, at least")
    return rows, given.model, tokenizer


def trainable(given: argparse.Namespace, base: Any) -> Any:
    """The model with adapters, or itself, with what is asked for frozen."""
    blocks = base.config.num_hidden_layers
    if given.last is not None and not 0 < given.last <= blocks:
        raise ValueError(f"--last is {given.last}; the model has {blocks} blocks")
    last = None if given.last is None else list(range(blocks - given.last, blocks))
    model = base
    if not given.full:
        targets = given.targets or "all-linear"
        config = LoraConfig(
            r=given.rank,
            lora_alpha=given.alpha,
            lora_dropout=given.dropout,
            use_rslora=given.rslora,
            target_modules=targets,
            layers_to_transform=last,
            task_type="CAUSAL_LM",
        )
        model = lora.prepare_lora(base, config)
        print(lora.lora_report(model, batch=given.batch, context=given.max_length))
    elif last is not None:
        kept = re.compile(rf"\.({'|'.join(map(str, last))})\.")
        for name, parameter in base.named_parameters():
            parameter.requires_grad_(bool(kept.search(name)))
    if given.freeze:
        named = [
            p
            for name, p in model.named_parameters()
            if re.search(given.freeze, name) and p.requires_grad
        ]
        if not named:
            raise ValueError(
                f"--freeze {given.freeze} is no parameter's name that would be trained"
            )
        for parameter in named:
            parameter.requires_grad_(False)
    count = sum(p.numel() for p in model.parameters() if p.requires_grad)
    print(f"trainable: {count:,} of {sum(p.numel() for p in model.parameters()):,} parameters")
    if not count:
        raise ValueError("--freeze leaves nothing to train")
    return model


def arguments_of(given: argparse.Namespace, out: Path, length: int) -> SFTConfig:
    """The recipe: clipped from the first step on, a short warm-up, a cosine to a tenth."""
    floor = {"min_lr": given.lr / 10 if given.min_lr is None else given.min_lr}
    return SFTConfig(
        str(out / "checkpoints"),
        max_steps=given.steps or -1,
        num_train_epochs=given.epochs,
        per_device_train_batch_size=given.batch,
        per_device_eval_batch_size=given.batch,
        learning_rate=given.lr,
        lr_scheduler_type=given.schedule,
        lr_scheduler_kwargs=floor if given.schedule == "cosine_with_min_lr" else {},
        warmup_steps=given.warmup,
        weight_decay=given.weight_decay,
        max_grad_norm=given.clip,
        optim=given.optimizer,
        max_length=length,
        packing=given.pack,
        eval_packing=False,
        logging_steps=1,
        eval_strategy="steps",
        eval_on_start=True,
        eval_steps=1 / max(2, given.looks),
        save_steps=0.25,
        save_total_limit=1,
        seed=given.seed,
        gradient_checkpointing=False,
        bf16=False,
        report_to="none",
        dataloader_pin_memory=torch.cuda.is_available(),
    )


def answers_to(model: Any, tokenizer: Any, prompts: list, length: int) -> list[str]:
    """Greedy answers."""
    held = model.get_base_model() if hasattr(model, "get_base_model") else model
    say = pipeline("text-generation", model=held, tokenizer=tokenizer)
    found = say(
        prompts, return_full_text=False, max_new_tokens=length, do_sample=False, batch_size=8
    )
    return [one[0]["generated_text"].strip() for one in found]


def as_text(tokenizer: Any, prompt: Any) -> str:
    if isinstance(prompt, str):
        return prompt
    return tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)


def read_runs(path: Path) -> list[dict]:
    """The table of runs, so far."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def append_run(path: Path, run: dict) -> None:
    """A line of the table of runs; a file with other columns is left alone."""
    held = (
        path.read_text(encoding="utf-8").partition("\n")[0].split(",")
        if path.exists()
        else list(COLUMNS)
    )
    if held != list(COLUMNS):
        sys.exit(f"{path} has the columns {held}, which are not these runs'")
    new = not path.exists()
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerow(run)


def split(rows: list[dict], most: int) -> tuple[list[dict], list[dict]]:
    """Rows to train, and held-out ones, whose prompts no trained row has."""
    random.Random(0).shuffle(rows)
    count = max(1, min(most, len(rows) // 10))
    held, rest = rows[:count], rows[count:]
    asked = {json.dumps(row["prompt"]) for row in held}
    return [row for row in rest if json.dumps(row["prompt"]) not in asked], held


def checkpoint_of(given: argparse.Namespace, out: Path) -> str | None:
    """The last checkpoint, if it is of a run with these settings; exits where that is finished."""
    told = {
        k: str(v)
        for k, v in vars(given).items()
        if k not in ("resume", "out", "looks", "judge", "merge")
    }
    place = out / "settings.json"
    last = (
        get_last_checkpoint(out / "checkpoints")
        if given.resume and (out / "checkpoints").is_dir()
        else None
    )
    if given.resume and last is None:
        print(f"{out} has no checkpoint: starting anew")
    if last is not None or (place.is_file() and (out / "model").is_dir()):
        before = json.loads(place.read_text(encoding="utf-8"))
        other = [f"{key} {before.get(key)}" for key in told if before.get(key) != told[key]]
        if other:
            raise ValueError(
                f"the run in {out} has {', '.join(other)}; expected the same, or another --name"
            )
    if last is not None:
        state = json.loads((Path(last) / "trainer_state.json").read_text(encoding="utf-8"))
        if state["global_step"] < state["max_steps"]:
            print(f"going on from {last}")
        elif given.name in {row["name"] for row in read_runs(given.out / "runs.csv")}:
            print(f"{out} is finished")
            sys.exit()
        else:
            print(f"{out} was trained and not measured: starting anew")
            last = None
    out.mkdir(parents=True, exist_ok=True)
    place.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    return last


def tune(given: argparse.Namespace) -> None:
    out, plots = given.out / given.name, can_draw()
    for text in (".*save_embedding_layers.*", ".*tie_word_embeddings.*", ".*is deprecated.*"):
        warnings.filterwarnings("ignore", message=text)  # peft's and transformers' own affairs
    set_seed(given.seed)
    rows, folder, tokenizer = rows_and_base(given)
    rows, held_rows = split(rows, given.held_out)
    checkpoint = checkpoint_of(given, out)
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=given.dtype)
    length = min(
        given.max_length, getattr(base.config, "max_position_embeddings", given.max_length)
    )
    model = trainable(given, base)
    if given.pack:
        lora.check_packed_examples(model)
    optimizer = None
    if given.loraplus is not None:
        optimizer = create_loraplus_optimizer(
            model,
            torch.optim.AdamW,
            lr=given.lr,
            loraplus_lr_ratio=given.loraplus,
            loraplus_weight_decay=given.weight_decay,
        )
    trainer = SFTTrainer(
        model,
        args=arguments_of(given, out, length),
        train_dataset=Dataset.from_list(rows),
        eval_dataset=Dataset.from_list(held_rows),
        processing_class=tokenizer,
        optimizers=(optimizer, None),
    )
    held: Any = trainer.eval_dataset
    trainer.eval_dataset = held.select(range(min(64, len(held))))
    if not given.pack:
        print(lora.row_report(rows, trainer))
    asked = held_rows[: 4 if given.smoke else 100]
    prompts = [as_text(tokenizer, row["prompt"]) for row in asked]
    good = [
        one if isinstance(one, str) else one[0]["content"]
        for one in (row["completion"] for row in asked)
    ]
    judge: Any = lora.ReferenceOverlap(dict(zip(prompts, good, strict=True)))
    if given.judge == "gain":
        judge = lora.LikelihoodGain(AutoModelForCausalLM.from_pretrained(folder), tokenizer)

    def measured() -> tuple[float, float, float, list[str]]:
        answers = answers_to(
            trainer.model, tokenizer, [row["prompt"] for row in asked], 8 if given.smoke else 64
        )
        loss = lora.answer_loss(trainer.model, held, trainer.data_collator, batch_size=given.batch)
        return *loss, lora.judge_answers(judge, prompts, answers), answers

    before = measured()
    seconds = time.perf_counter()
    trainer.train(resume_from_checkpoint=checkpoint)
    seconds = time.perf_counter() - seconds
    if not trainer.is_world_process_zero():
        return
    trainer.save_model(out / "model")
    tokenizer.save_pretrained(out / "model")
    log = trainer.state.log_history
    (out / "log.json").write_text(json.dumps(log) + "\n", encoding="utf-8")
    report = lora.tuning_report(log)
    loss, perplexity, score, answers = measured()
    for prompt, answer, right in list(zip(prompts, answers, good, strict=True))[:3]:
        print(f"\n{prompt}\n  said: {answer}\n  good: {right}")
    print(f"\n{report}\nof all held-out rows, and {len(asked)} answers to them:")
    print(f"before: loss {before[0]:.3f}, perplexity {before[1]:.2f}, judge {before[2]:.1f}")
    print(f"after:  loss {loss:.3f}, perplexity {perplexity:.2f}, judge {score:.1f}")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    if torch.cuda.is_available():
        peak = torch.cuda.max_memory_allocated() / 2**20
    # looks cost what --looks says
    trained = seconds - sum(entry.get("eval_runtime", 0.0) for entry in log)
    tokens = max(entry.get("num_tokens", 0) for entry in log)
    timed = {"seconds": "", "tokens_per_second": ""}  # of a part of a run they would mislead
    if checkpoint is None:
        timed = {"seconds": round(seconds, 1), "tokens_per_second": round(tokens / trained)}
        print(
            f"{seconds:.0f} s, {tokens / trained:.0f} tokens a second without the looks, "
            f"{peak:.0f} MB at most"
        )
    least = given.lr / 10 if given.min_lr is None else given.min_lr
    append_run(
        given.out / "runs.csv",
        timed
        | {
            "name": given.name,
            "model": given.model or "own GPT-2",
            "data": Path(given.data or "made up").name,
            "batch": given.batch,
            "steps": trainer.state.global_step,
            "epochs": round(trainer.state.epoch or 0.0, 3),
            "optimizer": given.optimizer,
            "lr": given.lr,
            "min_lr": least if given.schedule == "cosine_with_min_lr" else "",
            "schedule": given.schedule,
            "warmup": given.warmup,
            "clip": given.clip,
            "weight_decay": given.weight_decay,
            "rank": "" if given.full else given.rank,
            "alpha": "" if given.full else given.alpha,
            "trained": sum(p.numel() for p in model.parameters() if p.requires_grad),
            "seed": given.seed,
            "loss": round(loss, 4),
            "perplexity": round(perplexity, 3),
            "judge": round(score, 2),
            "overfits_from": report.overfits_from if report.overfits_from is not None else "",
            "spikes": len(report.spikes),
            "peak_mb": round(peak),
            "notes": " ".join(f"{k}={v}" for k, v in vars(given).items() if k in NOTED and v),
        },
    )
    drawn = save_plot(plots, out / "curves.png", report.plot)
    print(f"{out / 'model'}; {given.out / 'runs.csv'}; {drawn}")
    remove_earlier(out / "merged")
    if given.merge:
        print(lora.merge_lora(model, out / "merged"))


def main(words: list[str] | None = None) -> None:
    given = checked(words)
    try:
        tune(given)
    except KeyboardInterrupt:
        sys.exit("\nstopped; the same command with --resume goes on from the last checkpoint")
    except ValueError as error:
        sys.exit(f"finetune_lora: {error}")


if __name__ == "__main__":
    main()
