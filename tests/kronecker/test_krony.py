"""Krony-PT's checkpoints: written here as that project's model has them, and read."""

import copy

import pytest
import torch
import torch.nn.functional as F
from transformers import GPT2LMHeadModel

from kronecker import KroneckerConfig, convert_, fold, from_pretrained, load_krony, save_pretrained
from tests.kronecker.test_convert import output
from tests.support.models import tiny


def checkpoint(scales=True, prefix=""):
    """A small compressed GPT-2 and its state under the names, and in the layouts, of Krony-PT."""
    model = tiny("gpt2")
    convert_(model, KroneckerConfig(b_shape=(2, 2), rank=2, init="van_loan", scales=scales), progress=False)
    state = {}
    for name, tensor in ((n, t) for n, t in model.state_dict().items() if t.numel()):
        tensor = tensor.clone()
        if ".mlp." in name:
            layer, _, kind = name.rpartition(".")
            other = {"a": "_0", "b": "_1", "bias": "_bias"}.get(kind)
            if kind == "scales":
                block, _, last = layer.rpartition(".")
                state[f"{block}.{'scalers_fc' if last == 'c_fc' else 'scalers_proj'}"] = tensor
            else:
                state[layer + other] = tensor.transpose(-1, -2) if kind in "ab" else tensor
        else:
            state[name] = tensor.T if name.endswith(("c_attn.weight", "c_proj.weight")) else tensor
    state["transformer.h.0.attn.bias"] = torch.ones(1, 1, 32, 32)  # nanoGPT's mask
    return model, {prefix + n: t for n, t in state.items()}


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.module."])
@pytest.mark.parametrize("scales", [False, True])
def test_a_checkpoint_is_the_model(scales, prefix, tmp_path):
    model, state = checkpoint(scales, prefix)
    torch.save({"model": state} if prefix else state, tmp_path / "check.pt")
    loaded = load_krony(tmp_path / "check.pt", n_head=model.config.n_head)
    torch.testing.assert_close(output(loaded), output(model), rtol=1e-5, atol=1e-5)
    save_pretrained(loaded, tmp_path / "small")
    assert torch.equal(output(from_pretrained(tmp_path / "small")), output(loaded))
    assert loaded.lm_head.weight is loaded.transformer.wte.weight
    assert sum(p.numel() for p in loaded.parameters()) == sum(p.numel() for p in model.parameters())
    fold(loaded, tmp_path / "dense")
    dense = GPT2LMHeadModel.from_pretrained(tmp_path / "dense").eval()
    torch.testing.assert_close(output(dense), output(model), rtol=1e-4, atol=1e-5)


def test_a_head_of_its_own_stays_one(tmp_path):
    _, state = checkpoint()
    state["lm_head.weight"] = 2 * state["lm_head.weight"]
    torch.save(state, tmp_path / "check.pt")
    loaded = load_krony(tmp_path / "check.pt", n_head=2)
    fold(loaded, tmp_path / "dense")
    dense = GPT2LMHeadModel.from_pretrained(tmp_path / "dense").eval()
    torch.testing.assert_close(output(dense), output(loaded), rtol=1e-4, atol=1e-5)


def test_a_layer_is_what_krony_computes(tmp_path):
    """x @ Σ_f s_f (c_fc_0[f] ⊗ c_fc_1[f]) + bias, with torch.kron."""
    model, state = checkpoint()
    torch.save(state, tmp_path / "check.pt")
    x, mlp = torch.randn(5, model.config.n_embd), "transformer.h.1.mlp"
    terms = zip(state[f"{mlp}.c_fc_0"], state[f"{mlp}.c_fc_1"], state[f"{mlp}.scalers_fc"], strict=True)
    expected = F.linear(x, sum(s * torch.kron(a, b) for a, b, s in terms).T, state[f"{mlp}.c_fc_bias"])
    layer = load_krony(tmp_path / "check.pt", n_head=model.config.n_head).get_submodule(f"{mlp}.c_fc")
    torch.testing.assert_close(layer(x), expected, rtol=1e-4, atol=1e-5)


def test_other_files_are_refused(tmp_path):
    model, state = checkpoint()
    torch.save(tiny("gpt2").state_dict(), tmp_path / "dense.pt")
    with pytest.raises(ValueError, match=r"has no transformer\.h\.0\.mlp\.c_fc_0, needed a state dict of Krony-PT"):
        load_krony(tmp_path / "dense.pt")
    torch.save({"model": model}, tmp_path / "code.pt")
    with pytest.raises(ValueError, match="cannot be read as tensors alone"):
        load_krony(tmp_path / "code.pt")
    (tmp_path / "text.pt").write_text("no tensors")
    with pytest.raises(ValueError, match="cannot be read as tensors alone"):
        load_krony(tmp_path / "text.pt")
    first, factor = "transformer.wte.weight", "transformer.h.1.mlp.c_fc_0"
    for change, message in (
        ({factor: None}, r"has no transformer\.h\.1\.mlp\.c_fc_0"),
        ({factor: state[factor][0]}, "needed 3 dimensions of finite numbers"),
        ({first: torch.full((4, 4), float("nan"))}, "needed 2 dimensions of finite numbers"),
        ({first: torch.ones(4, 4, dtype=torch.int64)}, "needed 2 dimensions of finite numbers"),
    ):
        torch.save({n: t for n, t in (state | change).items() if t is not None}, tmp_path / "other.pt")
        with pytest.raises(ValueError, match=message):
            load_krony(tmp_path / "other.pt")
    torch.save({"model": torch.ones(2)}, tmp_path / "tensor.pt")
    with pytest.raises(ValueError, match="needed a state dict of Krony-PT"):
        load_krony(tmp_path / "tensor.pt")
    (tmp_path / "empty.pt").write_bytes(b"")
    with pytest.raises(ValueError, match="cannot be read as tensors alone"):
        load_krony(tmp_path / "empty.pt")
    torch.save(state, tmp_path / "check.pt")
    with pytest.raises(ValueError, match="n_head is -1, needed 1 or more"):
        load_krony(tmp_path / "check.pt", n_head=-1)
    with pytest.raises(ValueError, match="n_head is 5, needed a divisor of the width 16"):
        load_krony(tmp_path / "check.pt", n_head=5)
    for change in ({"transformer.ln_f.weight": None}, {"transformer.extra": torch.ones(2)}):
        other = {n: t for n, t in (copy.copy(state) | change).items() if t is not None}
        torch.save(other, tmp_path / "other.pt")
        with pytest.raises(ValueError, match=r"lacks .* and has .*, needed a Krony-PT model"):
            load_krony(tmp_path / "other.pt", n_head=2)
    torch.save(state | {"transformer.ln_f.weight": torch.ones(3)}, tmp_path / "other.pt")
    with pytest.raises(ValueError, match="has tensors that do not fit: size mismatch"):
        load_krony(tmp_path / "other.pt", n_head=2)
