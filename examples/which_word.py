"""A made-up task for `finetune_lora.py` and `sweep_lora.py`, and a small GPT-2 to tune on it.

A prompt names a position in a list of words; the answer is the word at that position, or the
opposite of this word. The model first learns the two easiest questions, which takes a minute, so
that tuning has something left to teach.
"""

import random
from collections.abc import Sequence
from pathlib import Path

from tokenizers import ByteLevelBPETokenizer
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, set_seed

from heads.lora import tune

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
ROWS = 2400  # prompts that are drawn for tuning


def make_rows(count: int = ROWS, tasks: Sequence[str] = tuple(TASKS), seed: int = 0) -> list[dict]:
    """Draw prompts, and return them without duplicates, each with its answer."""
    rng = random.Random(seed)
    rows = {}
    for _ in range(count):
        task = rng.choice(tasks)
        words = rng.sample(list(OPPOSITES), rng.randint(2, 4))
        rows[f"{task} {' '.join(words)} >"] = f" {TASKS[task](words)}"
    return [{"prompt": prompt, "completion": answer} for prompt, answer in rows.items()]


def make_base(folder: Path, steps: int) -> Path:
    """Train a small GPT-2 on easy rows, without the prompts to tune on; return its folder."""
    tuning_rows = make_rows()
    prompts = {row["prompt"] for row in tuning_rows}
    easy = [row for row in make_rows(8000, EASY, seed=1) if row["prompt"] not in prompts]
    bpe = ByteLevelBPETokenizer()
    texts = [row["prompt"] + row["completion"] for row in tuning_rows]
    bpe.train_from_iterator(texts, vocab_size=1024, special_tokens=["<end>"], show_progress=False)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe._tokenizer, eos_token="<end>", pad_token="<end>"
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
    set_seed(0)
    GPT2LMHeadModel(config).save_pretrained(folder / "untrained")
    tokenizer.save_pretrained(folder / "untrained")
    print("training the base model on the easy tasks")
    report = tune(
        folder / "untrained",
        easy,
        out=folder,
        r=0,
        learning_rate=1e-3,
        batch_size=32,
        max_steps=steps,
    )
    return report.out / "model"
