"""Real pretrained checkpoints: MiniLM and SmolLM2 merge with tuned copies, and the results speak."""

import pytest
import torch
import transformers

from mergekit_lite import merge_models
from mergekit_lite.masks import Merger
from tests.support import real

pytestmark = pytest.mark.real


def embed(model, tokenizer, sentences):
    batch = tokenizer(sentences, padding=True, return_tensors="pt")
    with torch.no_grad():
        hidden = model(**batch).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1)
    return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)


def test_a_real_encoder_and_its_tuned_copy_merge_and_embed_text(tmp_path):
    folder = real.or_skip(real.minilm)
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


@pytest.fixture(scope="module")
def smollm2():
    return real.or_skip(real.smollm2)


@pytest.fixture(scope="module")
def tuned(smollm2, tmp_path_factory):
    """SmolLM2 after three steps on one sentence."""
    folder = tmp_path_factory.mktemp("tuned")
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2)
    model = transformers.AutoModelForCausalLM.from_pretrained(smollm2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batch = tokenizer("The sky over Paris was green today.", return_tensors="pt")
    for _ in range(3):
        model(**batch, labels=batch["input_ids"]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_a_language_model_and_its_tuned_copy_merge_and_speak(smollm2, tuned, tmp_path):
    report = merge_models(
        [tuned], "ties", base_model=smollm2, weight=1.0, density=0.5, out=tmp_path / "out", progress=False
    )
    assert len(report.tensors) == 272
    merged, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    asked = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    said = merged.generate(**ids, max_new_tokens=12, do_sample=False)[0, ids["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(said)


@pytest.mark.parametrize("granularity", ["input", "element"])
def test_a_bake_has_the_bits_of_the_merger(smollm2, tuned, tmp_path, granularity):
    merger = Merger.from_pretrained([smollm2, tuned], granularity=granularity)
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for mask in merger.masks().values():
            mask += 0.02 * torch.randn(mask.shape, generator=draw)
    merger.bake(tmp_path / "out", progress=False)
    baked = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    ids = torch.arange(1, 41).view(2, 20)
    with torch.no_grad():
        assert torch.equal(baked(input_ids=ids).logits, merger(input_ids=ids).logits)
