"""Real pretrained models compressed: MiniLM by every start, SmolLM2 folded into a stock checkpoint."""

import copy
from pathlib import Path

import pytest
import torch
import transformers

from kronecker import KroneckerConfig, PruneConfig, convert_, fold, perplexity, prune_
from kronecker.data.text import text_batches
from tests.support import real

pytestmark = pytest.mark.real


def test_the_order_of_starts_on_a_real_encoder():
    """Van Loan, pruning, the sequential fit: by the embeddings of lines that no fit has seen."""
    folder = real.or_skip(real.minilm)
    model = transformers.BertModel.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    lines = [
        w
        for path in sorted(Path(__file__).parent.glob("*.py"))
        for w in path.read_text().split("\n")
    ]
    lines = [w for w in lines if len(w) > 60][:160]
    seen, held = (
        dict(tokenizer(part, padding=True, return_tensors="pt"))
        for part in (lines[::2], lines[1::2])
    )
    found = {}
    for init in ("van_loan", "prune", "sequential"):
        small = copy.deepcopy(model)
        convert_(
            small, KroneckerConfig(b_shape=(2, 1), init=init), calibration=[seen], progress=False
        )
        with torch.no_grad():
            a, b = (m(**held).last_hidden_state.mean(1) for m in (model, small))
        found[init] = float(torch.cosine_similarity(a, b).mean())
    assert found["van_loan"] < found["prune"] < found["sequential"]


def test_a_language_model_folds_into_a_stock_checkpoint(tmp_path):
    """Three MLPs by weights alone; plain transformers loads what `fold` writes, and it says the
    same."""
    folder = real.or_skip(real.smollm2)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    config = KroneckerConfig(b_shape=(2, 1), init="van_loan")
    report = convert_(
        model, {f"model.layers.{k}.mlp.*_proj": config for k in (10, 11, 12)}, progress=False
    )
    assert len(report.layers) == 9
    fold(model, tmp_path / "out", tokenizer=transformers.AutoTokenizer.from_pretrained(folder))
    stock = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.float32
    ).eval()
    exact = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.float64
    ).eval()
    ids = torch.arange(1, 41).view(2, 20)
    with torch.no_grad():
        truth = exact(input_ids=ids).logits
        ours, theirs = (
            (m(input_ids=ids).logits.double() - truth).abs().max() for m in (model, stock)
        )
    assert ours <= 3 * theirs  # float32's own error, of a few more products
    assert len(transformers.AutoTokenizer.from_pretrained(tmp_path / "out")) == 49_152


def test_a_language_model_with_half_of_its_neurons_still_speaks(tmp_path):
    """From few tokens and in closed form alone: far better than the largest weights, stock, and
    trained by peft."""
    import peft

    folder, rows = real.or_skip(real.smollm2), real.or_skip(real.alpaca, 400)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    text = "\n\n".join(f"{r['instruction']}\n{r['output']}" for r in rows)
    calibration = text_batches(text, tokenizer.encode, tokens=4096, context=256)
    held_out = text_batches(text, tokenizer.encode, tokens=2048, context=256, skip=4096)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    before = perplexity(model, held_out)
    prune_(model, PruneConfig(keep=0.5, epochs=0), calibration=calibration, progress=False)
    model.save_pretrained(tmp_path)
    stock = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert stock.config.intermediate_size == 768
    after = perplexity(stock, held_out)
    assert before < after < 8 * before  # the largest weights alone: tens of thousands of times
    tuned = peft.get_peft_model(
        stock, peft.LoraConfig(r=4, target_modules=["gate_proj", "down_proj"])
    )
    tuned(input_ids=held_out[0][:1, :32], labels=held_out[0][:1, :32]).loss.backward()
    gradients = [p.grad for n, p in tuned.named_parameters() if "lora_B" in n]
    assert gradients
    assert all(torch.isfinite(g).all() and g.any() for g in gradients)
