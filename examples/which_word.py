"""What the fine-tuning examples do where nothing is named: made-up data, and a small model to tune on it.

The task is which of a few words to say, or its opposite. The model is a small GPT-2 that is trained on the easy part of
it (a minute), so that there is something to tune.
"""

import random
from pathlib import Path

from tokenizers import ByteLevelBPETokenizer
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from heads import lora

PAIRS = "hot cold|big small|old new|fast slow|near far|light dark|soft hard|tall short|wet dry|loud quiet"
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


def short(row: dict) -> tuple[str, str]:
    """The made-up rows' own template: Alpaca's would be most of what a small model reads."""
    return f"{row['instruction']} {row['input']} >", f" {row['output']}"


def rows_of(data: str | None, smoke: bool) -> list[dict]:
    if data is None:
        return made_up(200 if smoke else 2400, list(TASKS), seed=0)
    if Path(data).exists():
        return lora.read_rows(data)
    import datasets  # only for data sets of the hub: pip install datasets

    return lora.read_rows(datasets.load_dataset(data, split="train"))


def own_base(out: Path, rows: list[dict], smoke: bool, made: bool) -> Path:
    """A small GPT-2 and its tokenizer, trained on easy rows (or, with data given, on nothing yet)."""
    folder = out / ("base-smoke" if smoke else "base")
    if (folder / "config.json").exists():
        return folder
    tokens = ByteLevelBPETokenizer()
    texts = ("".join((short if made else lora.alpaca_template)(row)) for row in rows)
    tokens.train_from_iterator(texts, vocab_size=1024, special_tokens=["<end>"], show_progress=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokens._tokenizer, eos_token="<end>")
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
    model = GPT2LMHeadModel(config)
    if made:
        easy = made_up(200 if smoke else 8000, EASY, seed=1)
        easy = lora.InstructionDataset(easy, tokenizer, template=short, progress=False)
        arguments = lora.instruction_arguments(
            folder,
            max_steps=4 if smoke else 1500,
            learning_rate=1e-3,
            per_device_train_batch_size=32,
            logging_steps=300,
        )
        lora.InstructionTrainer(
            model=model, args=arguments, train_dataset=easy, data_collator=lora.InstructionCollator(pad_token_id=0)
        ).train()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
