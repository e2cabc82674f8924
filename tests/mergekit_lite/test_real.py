"""Real pretrained checkpoints: MiniLM and SmolLM2 merge with tuned copies, and the results speak."""

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file

from mergekit_lite import extract_lora, merge_models
from mergekit_lite.masks import Merger
from tests.mergekit_lite.test_adapters import updates
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
    batch = tokenizer(
        ["A cat sat on the mat.", "Stocks fell sharply today."], padding=True, return_tensors="pt"
    )
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
            models,
            method,
            base_model=folder if needs_base else None,
            out=tmp_path / method,
            progress=False,
            **kwargs,
        )
        merged, info = transformers.BertModel.from_pretrained(
            tmp_path / method, output_loading_info=True
        )
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
        [tuned],
        "ties",
        base_model=smollm2,
        weight=1.0,
        density=0.5,
        out=tmp_path / "out",
        progress=False,
    )
    assert len(report.tensors) == 272
    merged, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    asked = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(
        asked, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    said = merged.generate(**ids, max_new_tokens=12, do_sample=False)[
        0, ids["input_ids"].shape[1] :
    ]
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


@pytest.mark.parametrize(
    ("dtype", "median", "worst"), [("float32", 4e-3, 1e-2), ("bfloat16", 1e-2, 5e-2)]
)
def test_an_adapter_comes_back_out_of_the_model_that_it_made(
    dtype, median, worst, smollm2, tmp_path
):
    """In bfloat16 files; where the model's are too, its rounding is part of the change, and little
    of that is kept.

    How much depends on the size of the change: at a fifth of this learning rate the errors in a
    bfloat16 model are 0.025 in the median and 0.10 at worst.
    """
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2)
    base = transformers.AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.bfloat16)
    base.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    torch.manual_seed(0)
    settings = peft.LoraConfig(
        r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    wrapped = peft.get_peft_model(base, settings)
    optimizer = torch.optim.Adam([p for p in wrapped.parameters() if p.requires_grad], lr=1e-2)
    batch = tokenizer(
        "The sky over Paris was green today, and nobody minded it much.", return_tensors="pt"
    )
    for _ in range(15):
        wrapped(**batch, labels=batch["input_ids"]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    wrapped.save_pretrained(tmp_path / "adapter")
    tuned, extracted = tmp_path / "tuned", tmp_path / "extracted"
    model = f"{tmp_path / 'base'}+{tmp_path / 'adapter'}"
    merge_models([model], "passthrough", dtype=dtype, out=tuned, progress=False)
    report = extract_lora(
        tuned, tmp_path / "base", extracted, rank=8, dtype="bfloat16", progress=False
    )
    assert len(report.modules) == 210
    assert not report.left
    theirs, ours = updates(tmp_path / "adapter"), updates(extracted)
    errors = sorted(
        float((ours[name] - change).norm() / change.norm()) for name, change in theirs.items()
    )
    assert errors[105] < median, f"median {errors[105]:.4f}, worst {errors[-1]:.4f}"
    assert errors[-1] < worst, f"median {errors[105]:.4f}, worst {errors[-1]:.4f}"
    merge_models(
        [f"{tmp_path / 'base'}+{extracted}"], "passthrough", out=tmp_path / "again", progress=False
    )
    before, after = (
        load_file(folder / "model.safetensors") for folder in (tuned, tmp_path / "again")
    )
    first = load_file(tmp_path / "base" / "model.safetensors")
    missed = (
        sum(float((after[n].float() - before[n].float()).square().sum()) for n in before) ** 0.5
    )
    change = (
        sum(float((before[n].float() - first[n].float()).square().sum()) for n in before) ** 0.5
    )
    assert missed < 0.05 * change  # each is rounded to bfloat16 once
