"""Made-up data and a small model: what the fine-tuning example uses where nothing is named.

The task is which of a few words to say, or its opposite. The model is a small GPT-2 that is trained
on the easy part of it (a minute), so that there is something to tune.
"""

import random
from pathlib import Path

from datasets import Dataset
from tokenizers import ByteLevelBPETokenizer
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from heads.lora import read_rows

PAIRS = (
    "hot cold|big small|old new|fast slow|near far|light dark|soft hard|tall short|wet dry|loud "
    "quiet"
)
OPPOSITES = dict(pair.split() for pair in PAIRS.split("|"))
OPPOSITES |= {value: key for key, value in OPPOSITES.items()}
TASKS = {
    "Say the first word.": lambda words: words[0],
    "Say the last word.": lambda words: words[-1],
    "Say the second word.": lambda words: words[1],
    "Say the opposite of the first word.": lambda words: OPPOSITES[words[0]],
    "Say the opposite of the last word.": lambda words: OPPOSITES[words[-1]],
}
EASY = list(TASKS)[:2]


def made_up(count: int, tasks: list[str], seed: int) -> list[dict]:
    """Rows in Alpaca's format whose answers follow from their inputs."""
    rng, rows = random.Random(seed), []
    for _ in range(count):
        task, words = rng.choice(tasks), rng.sample(list(OPPOSITES), rng.randint(2, 4))
        rows.append({"instruction": task, "input": " ".join(words), "output": TASKS[task](words)})
    return rows


def short(row: dict) -> dict:
    """The made-up rows' own template: Alpaca's would be most of what a small model reads."""
    return {"prompt": f"{row['instruction']} {row['input']} >", "completion": f" {row['output']}"}


def own_rows(smoke: bool) -> list[dict]:
    # each once
    rows = {str(row): row for row in made_up(200 if smoke else 2400, list(TASKS), seed=0)}
    return read_rows(rows.values(), short)


def own_base(out: Path, smoke: bool) -> Path:
    """A small GPT-2 and its tokenizer, trained on easy rows."""
    folder = out / ("base-smoke" if smoke else "base")
    if (folder / "config.json").exists():
        return folder
    print("training the base model on the easy tasks")
    tokens = ByteLevelBPETokenizer()
    texts = (row["prompt"] + row["completion"] for row in own_rows(smoke))
    tokens.train_from_iterator(
        texts, vocab_size=1024, special_tokens=["<end>"], show_progress=False
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokens._tokenizer, eos_token="<end>", pad_token="<end>"
    )
    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_positions=256,
        n_embd=128,
        n_layer=4,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
        tie_word_embeddings=False,
    )
    tuned = {row["prompt"] for row in own_rows(smoke)}
    easy = read_rows(made_up(200 if smoke else 8000, EASY, seed=1), short)
    easy = [row for row in easy if row["prompt"] not in tuned]  # nothing that is held out later
    arguments = SFTConfig(
        str(folder),
        max_steps=4 if smoke else 1500,
        learning_rate=1e-3,
        per_device_train_batch_size=32,
        logging_steps=300,
        gradient_checkpointing=False,
        bf16=False,
        save_strategy="no",
        report_to="none",
    )
    trainer = SFTTrainer(
        GPT2LMHeadModel(config),
        args=arguments,
        train_dataset=Dataset.from_list(easy),
        processing_class=tokenizer,
    )
    trainer.train()
    trainer.save_model(folder)
    tokenizer.save_pretrained(folder)
    return folder
