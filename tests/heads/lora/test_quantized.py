"""LoRA over quantized base layers: ours gives what peft gives. `make test-peers` installs the
quantizers."""

import importlib
import warnings

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora.layer import LoraLayer
from torch import nn

from heads.lora import accelerate_lora_, restore_lora_

pytestmark = pytest.mark.peers


def bitsandbytes(model, bits):
    bnb = importlib.import_module("bitsandbytes")
    for i in (0, 2):
        sizes = (model[i].in_features, model[i].out_features)
        if bits == 4:
            layer = bnb.nn.Linear4bit(*sizes, compute_dtype=torch.float32, quant_type="nf4")
        else:
            layer = bnb.nn.Linear8bitLt(*sizes, has_fp16_weights=False)
        layer.load_state_dict(model[i].state_dict(), strict=False)
        model[i] = layer
    model.is_loaded_in_4bit, model.is_loaded_in_8bit = bits == 4, bits == 8  # what peft asks
    return model.to("cpu")


def torchao(model, _):
    quantization = importlib.import_module("torchao.quantization")
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    return model


def hqq(model, bits):
    quantize = importlib.import_module("hqq.core.quantize")
    for i in (0, 2):
        config = quantize.BaseQuantizeConfig(nbits=bits, group_size=32)
        model[i] = quantize.HQQLinear(model[i], config, compute_dtype=torch.float32, device="cpu")
    return model


@pytest.mark.parametrize(
    ("quantize", "bits", "kind"),
    [
        (bitsandbytes, 4, "Linear4bit"),
        (bitsandbytes, 8, "Linear8bitLt"),
        (torchao, 8, "TorchaoLoraLinear"),
        (hqq, 4, "HqqLoraLinear"),
    ],
)
def test_over_a_quantized_base_it_is_pefts(quantize, bits, kind):
    pytest.importorskip(quantize.__name__, reason=f"{quantize.__name__} is not installed")
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        base = quantize(nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64)), bits)
        model = get_peft_model(base, LoraConfig(r=4, lora_alpha=8, target_modules=["0", "2"]))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter, std=0.2)
    x = torch.randn(40, 64, requires_grad=True)

    def run():
        model.zero_grad()
        y = model(x)
        dx = torch.autograd.grad(
            y.square().mean(), [x, *(p for p in model.parameters() if p.requires_grad)]
        )
        with torch.no_grad():
            return [y.detach(), model(x[:1]), *dx]

    layer = next(m for m in model.modules() if isinstance(m, LoraLayer))
    assert type(layer).__name__ == kind
    expected = run()
    assert len(accelerate_lora_(model).accelerated) == 2
    assert type(layer).__name__ == f"Lean{kind}"
    for found, wanted in zip(run(), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    assert restore_lora_(model) == 2
    assert type(layer).__name__ == kind
