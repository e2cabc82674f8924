"""What a user has who follows README and the how-to pages."""

import json
from pathlib import Path

import pytest

from tests.support.models import save_tokenizer, tiny


@pytest.fixture
def users_files(tmp_path, monkeypatch):
    """A folder with what README and how-to pages name: models, adapters, rows, texts, a judge."""
    from peft import LoraConfig
    from transformers import AutoTokenizer

    from heads.lora import prepare_lora
    from heads.pairwise import PairwiseModel
    from tests.heads.pairwise.support import tokenizer_of

    monkeypatch.chdir(tmp_path)
    words = [f"w{k}" for k in range(96)]
    for seed, name in enumerate(("base", "math", "code", "rewriter", "summarizer")):
        tiny("llama", seed, max_position_embeddings=512).save_pretrained(f"models/{name}")
        save_tokenizer(Path("models", name), words)
        tokenizer = AutoTokenizer.from_pretrained(f"models/{name}", pad_token="w0", eos_token="w1")
        tokenizer.save_pretrained(f"models/{name}")
    for name in ("adapter", "adapter_2"):
        config = LoraConfig(
            target_modules=["q_proj"],
            base_model_name_or_path="models/base",
            init_lora_weights=False,
        )
        prepare_lora(tiny("llama"), config).save_pretrained(f"models/{name}")
    for name in ("rewriting", "summaries"):
        rows = [{"prompt": f"w{k} w1", "completion": f" w2 w{k}"} for k in range(8)]
        Path(f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for name in ("texts", "held_out"):
        Path(f"{name}.txt").write_text(" ".join(words * 60))
    Path("texts.json").write_text(json.dumps([{"text": " ".join(words * 20)}]))
    rows = [{"instruction": f"w{k} w1", "output": f"w2 w{k}"} for k in range(8)]
    Path("rows.json").write_text(json.dumps(rows))
    PairwiseModel.from_encoder(tiny("bert"), tokenizer_of(), link="davidson").save_pretrained(
        "runs/judge/model"
    )
