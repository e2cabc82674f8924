"""Under TRL's trainer accelerated layers learn what peft's own learn. `make test-peers` installs TRL."""

import pytest
import torch
from peft import LoraConfig
from transformers import AutoTokenizer

from heads.lora import prepare_lora
from tests.support.models import save_tokenizer, tiny

trl = pytest.importorskip("trl", reason="the extra trl is not installed")
pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]
WORDS = ["<unk>", "<end>", *"abcdefghijklmnopqrstuvwxyz"]


def losses(folder, *, accelerate, **options):
    """Of every step."""
    from datasets import Dataset

    save_tokenizer(folder, WORDS)
    tokenizer = AutoTokenizer.from_pretrained(folder, eos_token="<end>", pad_token="<end>")
    rows = [{"prompt": f"{a} {b} ", "completion": f"{b} {a}"} for a, b in zip("abcdefgh", "hgfedcba", strict=True)]
    config = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", lora_dropout=options.pop("dropout", 0))
    torch.manual_seed(0)
    model = prepare_lora(tiny("llama"), config, accelerate=accelerate)
    arguments = trl.SFTConfig(
        str(folder), max_steps=6, per_device_train_batch_size=4, learning_rate=1e-2, logging_steps=1, max_length=16,
        bf16=False, use_cpu=True, report_to="none", save_strategy="no", disable_tqdm=True, **options,
    )  # fmt: skip
    trainer = trl.SFTTrainer(model, args=arguments, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)
    trainer.train()
    return [log["loss"] for log in trainer.state.log_history if "loss" in log]


@pytest.mark.parametrize(
    "options", [{}, {"gradient_accumulation_steps": 2}, {"gradient_checkpointing": True}, {"dropout": 0.2}], ids=str
)
def test_a_run_is_what_it_is_with_pefts_own_forward(options, tmp_path):
    """Few tokens: dropout is torch's in both."""
    ours = losses(tmp_path / "ours", accelerate=True, **options)
    theirs = losses(tmp_path / "theirs", accelerate=False, **options)
    assert len(ours) == 6
    assert ours[-1] < ours[0]
    assert ours == pytest.approx(theirs, rel=1e-4)
