"""Train a small GPT-2 on text that is on every machine.

The text is the documentation and the sources that come with Python.
"""

import pydoc_data.topics
import sysconfig
from pathlib import Path

import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    set_seed,
)

CONTEXT = 128


def python_text(size: int = 6_000_000) -> str:
    """Return text of the language reference and of the standard library's sources, mixed."""
    parts = [pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics)]
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        parts.append(path.read_text(encoding="utf-8", errors="replace"))
    parts = [p for i in range(16) for p in parts[i::16]]  # prose and code in turn
    return "\n\n".join(parts)[:size]


def make_tokenizer(text: str, vocabulary: int = 2048) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer on the text."""
    made = ByteLevelBPETokenizer()
    made.train_from_iterator(
        [text], vocab_size=vocabulary, special_tokens=["<end>"], show_progress=False
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=made._tokenizer, eos_token="<end>", pad_token="<end>"
    )


def windows(
    tokenizer: PreTrainedTokenizerFast, text: str, context: int = CONTEXT
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows of ``context`` tokens to train on, and about 64 held-out rows.

    The held-out rows are spread evenly over the text.
    """
    ids = torch.tensor(tokenizer(text, verbose=False)["input_ids"])
    rows = ids[: len(ids) // context * context].view(-1, context)
    held = torch.zeros(len(rows), dtype=torch.bool)
    held[:: max(2, len(rows) // 64)] = True
    return rows[~held], rows[held]


class Rows(torch.utils.data.Dataset):
    """A data set whose examples are rows of tokens."""

    def __init__(self, rows: torch.Tensor):
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def arguments(out: Path, steps: int, rate: float, batch: int = 16, **more) -> TrainingArguments:
    """Return training arguments with the options that all runs share."""
    common = {
        "per_device_train_batch_size": batch,
        "max_steps": steps,
        "learning_rate": rate,
        "warmup_steps": steps // 20,
    }
    common |= {
        "lr_scheduler_type": "cosine",
        "report_to": "none",
        "use_cpu": not torch.cuda.is_available(),
    }
    common |= {
        "logging_steps": max(1, steps // 20),
        "save_strategy": "no",
        "weight_decay": 0.1,
        "adam_beta2": 0.95,
    }
    return TrainingArguments(str(out), **common | more)


def train_original(
    out: Path, rows: torch.Tensor, vocabulary: int, steps: int, seed: int = 0
) -> GPT2LMHeadModel:
    """Train a small GPT-2, which the example compresses later.

    The model has 4 blocks of width 128; 900 steps take about three minutes.
    """
    set_seed(seed)
    config = GPT2Config(
        vocab_size=vocabulary,
        n_positions=CONTEXT,
        n_embd=128,
        n_layer=4,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    model = GPT2LMHeadModel(config)
    Trainer(
        model, arguments(out / "trainer", steps, 2e-3, seed=seed), train_dataset=Rows(rows)
    ).train()
    return model.eval()
