"""Every module of the library, tried in everything that torch's own modules can do."""

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from safetensors.torch import load_model, save_model
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.nn.attention import SDPBackend, sdpa_kernel

import heads.lora
import heads.pairwise
import kronecker
import mergekit_lite.masks
from heads.lora import LoraLinear
from heads.pairwise import PairwiseHead
from kronecker import KroneckerLinear, LowRankEmbedding, LowRankLinear
from mergekit_lite import AccurateMaskedLinear, EfficientMaskedLinear
from mergekit_lite.masks import MaskedEmbedding, MaskedLayer
from model_components.testing import BEHAVIORS, check_module, count_operations
from tests.support import equivalence
from tests.support.equivalence import place
from thinker import LatentThinker

X, Y = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(0))
BALANCED = torch.randn(6, 256, generator=torch.Generator().manual_seed(5))
WIDE = torch.randn(6, 6, generator=torch.Generator().manual_seed(1))
TOKENS = torch.randint(0, 8, (6, 5), generator=torch.Generator().manual_seed(3))
IDS = torch.tensor([0, 3, 5, 7, 1, 2])


def linears():
    return [nn.Linear(4, 3), nn.Linear(4, 3)]


def masked(kind=AccurateMaskedLinear, **options):
    return lambda: kind(linears(), **options)


MODULES = {
    "nn.Linear": (lambda: nn.Linear(4, 3), X),
    "accurate masks, input": (masked(), X),
    "accurate masks, element": (masked(granularity="element", initial="random"), X),
    "accurate masks, output, in 0..1": (
        masked(granularity="output", constraint="unit_interval"),
        X,
    ),
    "efficient masks, input": (masked(EfficientMaskedLinear, constraint="none"), X),
    "efficient masks, output": (
        masked(EfficientMaskedLinear, granularity="output", constraint="sigmoid"),
        X,
    ),
    "masks over a base": (
        lambda: AccurateMaskedLinear([nn.Linear(4, 3)], base=nn.Linear(4, 3)),
        X,
    ),
    "masked norm": (lambda: MaskedLayer([nn.LayerNorm(4), nn.LayerNorm(4)]), X),
    "masked convolution": (
        lambda: MaskedLayer([nn.Conv2d(16, 16, 16, padding="same") for _ in range(2)]),
        torch.randn(6, 16, 3, 3, generator=torch.Generator().manual_seed(4)),
    ),
    "masked embedding": (lambda: MaskedEmbedding([nn.Embedding(9, 4), nn.Embedding(9, 4)]), IDS),
    "Kronecker, B first": (lambda: KroneckerLinear(4, 6, b_shape=(2, 1)), X),
    "Kronecker, A first": (lambda: KroneckerLinear(6, 4, b_shape=(1, 2), bias=False), WIDE),
    "Kronecker, several terms": (
        lambda: KroneckerLinear(4, 6, b_shape=(2, 2), rank=2, scales=True),
        X,
    ),
    "Kronecker, balanced": (lambda: KroneckerLinear(256, 256), BALANCED),
    "low rank": (lambda: LowRankLinear(4, 6, rank=2), X),
    "low-rank embedding": (lambda: LowRankEmbedding(9, 4, rank=2), IDS),
    "LoRA": (lambda: trained(LoraLinear.from_linear(nn.Linear(4, 3), r=2)), X),
    "LoRA of peft": (lambda: peft_layer(), X),
    "pairwise, davidson": (lambda: trained(PairwiseHead(4, hidden_features=5)), X, Y),
    "pairwise, antisymmetric": (
        lambda: trained(PairwiseHead(4, link="antisymmetric", hidden_features=5)),
        X,
        Y,
    ),
    "pairwise, concat": (lambda: trained(PairwiseHead(4, link="concat")), X, Y),
    "attention of torch": (
        lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
        torch.randn(6, 5, 8, generator=torch.Generator().manual_seed(2)),
    ),
    "LatentThinker": (lambda: thinker(), TOKENS),
    "LatentThinker at tokens": (
        lambda: thinker(latent_init="tokens", memory="grow", positions="rotary"),
        TOKENS,
    ),
}
NO_SECOND = {"second_gradients", "gradient_penalty"}
RAISES = {
    # a control: peft's layers have none
    "LoRA of peft": {"parameters_reset"},
    # torch's fused attention has no second derivative on a CPU, and takes that of its plain one on
    # CUDA
    "attention of torch": {*NO_SECOND, "forward_mode", "parameters_reset"},
    "LatentThinker": NO_SECOND,
    "LatentThinker at tokens": NO_SECOND,
}
# torch's attention on CUDA pads a mask, and an offloaded one loses its padding
RAISES_ON_CUDA = {"LatentThinker at tokens": {"saved_tensors_offloaded"}}
# these read sequences
ONE_BATCH_DIMENSION = {
    "masked convolution",
    "attention of torch",
    "LatentThinker",
    "LatentThinker at tokens",
}


def thinker(**options):
    sizes = {"hidden_size": 16, "num_heads": 2, "max_input_length": 5, "max_output_length": 5}
    return LatentThinker(vocab_size=8, n_step=2, step_noise=0.0, **sizes, **options)


def test_a_thinker_has_second_derivatives_with_torch_s_plain_attention():
    with sdpa_kernel(SDPBackend.MATH):
        report = check_module(thinker, TOKENS, output=logits_of, only=sorted(NO_SECOND))
    assert set(report.passed) == NO_SECOND, report


@pytest.mark.slow
@pytest.mark.parametrize("name", MODULES)
def test_compiles_by_inductor(name):
    make, *inputs = MODULES[name]
    only = [behavior for behavior in BEHAVIORS if behavior.startswith("compiled")]
    report = check_module(make, *inputs, output=logits_of, only=only, backend="inductor")
    assert set(report.passed) == set(only), report


def test_a_thinker_with_noise_compiles_for_batches_of_any_size():
    """Noise in the first latents, and in those of every step."""
    sizes = {"hidden_size": 16, "num_heads": 2, "max_input_length": 5, "max_output_length": 5}
    model = LatentThinker(vocab_size=8, latent_init="noise", **sizes).train()
    compiled = torch.compile(model, backend="aot_eager")
    for rows in (2, 4, 6):
        assert compiled(TOKENS[:rows], n_step=2).logits.isfinite().all()


@pytest.mark.parametrize("name", [name for name in MODULES if "torch" not in name])
def test_a_state_goes_through_safetensors(name, tmp_path):
    """Which saves no views."""
    module = MODULES[name][0]()
    save_model(module, tmp_path / "m.safetensors")
    twin = MODULES[name][0]()
    load_model(twin, tmp_path / "m.safetensors")
    for key, value in module.state_dict().items():
        assert torch.equal(twin.state_dict()[key], value)


def trained(module):
    """Take a module away from its start, where updates are zero."""
    for parameter in module.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.5)
    return module


def peft_layer():
    config = LoraConfig(target_modules=["linear"], r=2, init_lora_weights=False)
    holder = nn.ModuleDict({"linear": nn.Linear(4, 3)})
    return inject_adapter_in_model(config, holder)["linear"]


def logits_of(output):
    return getattr(output, "logits", output)


MODELS = (heads.pairwise.PairwiseModel, mergekit_lite.masks.Merger)  # whole ones


def test_every_public_layer_is_here():
    tested = {type(make()) for make, *_ in MODULES.values()}
    for package in (
        heads.lora,
        heads.pairwise,
        kronecker,
        mergekit_lite,
        mergekit_lite.masks,
    ):
        for name in package.__all__:
            kind = getattr(package, name)
            if isinstance(kind, type) and issubclass(kind, nn.Module) and kind not in MODELS:
                assert kind in tested, kind


@pytest.mark.parametrize("name", MODULES)
def test_behaves_as_a_module_of_torch(name):
    make, *inputs = MODULES[name]
    skip = {"leading_dimensions"} if name in ONE_BATCH_DIMENSION else set()
    report = check_module(lambda: place(make()), *place(inputs), output=logits_of, skip=skip)
    assert not report.wrong, report
    raises = RAISES.get(name, set())
    if equivalence.DEVICE == "cuda":
        raises = RAISES_ON_CUDA.get(name, raises - {*NO_SECOND, "forward_mode"})
    assert set(report.raised) == raises, report
    assert len(report.passed) == len(BEHAVIORS) - len(report.raised) - len(skip)


@pytest.mark.parametrize("name", MODULES)
def test_peft_adapts_what_it_calls_or_says_why_not(name):
    make, *inputs = MODULES[name]
    model = make()
    if any(".components." in f".{inner}" for inner, _ in model.named_modules()):
        targets = ["0", "1"]
        with pytest.raises(ValueError, match=r"cannot be replaced|not supported"):
            inject_adapter_in_model(LoraConfig(target_modules=targets, r=2), model)
        return
    linear = {n.split(".")[-1] for n, m in model.named_modules() if n and type(m) is nn.Linear}
    if not linear or "LoRA" in name or name == "attention of torch":
        return  # nothing to adapt, adapted already, or torch's attention, which calls no layer
    inject_adapter_in_model(LoraConfig(target_modules=sorted(linear), r=2), model)
    logits_of(model(*inputs)).sum().backward()
    adapters = [p for n, p in model.named_parameters() if "lora_B" in n]
    assert adapters
    assert all(p.grad is not None for p in adapters)


def test_wrappers_may_stand_around_a_component():
    """Torch's own tools set every child again, wrapped or not."""
    model = nn.Sequential(AccurateMaskedLinear(linears()), nn.ReLU(), nn.Linear(3, 3))
    expected = model(X)
    apply_activation_checkpointing(model, check_fn=lambda m: type(m) is nn.Linear)
    torch.testing.assert_close(model(X), expected)


TOKENS_AND_WIDTH = (1024, 256)


def wide():
    return nn.Linear(256, 256)


# operations of one training step: what the layer has today, and a little room. A plain nn.Linear
# has 7; a loop over rows or blocks would add dozens.
MOST_OPERATIONS = {
    "accurate masks": (lambda: AccurateMaskedLinear([wide(), wide()]), 55),
    "efficient masks": (lambda: EfficientMaskedLinear([wide(), wide()]), 45),
    "Kronecker": (lambda: KroneckerLinear(256, 256, b_shape=(1, 2)), 25),
    "balanced Kronecker": (lambda: KroneckerLinear(256, 256), 35),
    "low rank": (lambda: LowRankLinear(256, 256, rank=32), 15),
    "LoRA": (lambda: LoraLinear.from_linear(wide(), r=8), 20),
    "LoRA with dropout": (lambda: LoraLinear.from_linear(wide(), r=8, dropout=0.1), 25),
}


@pytest.mark.parametrize("name", MOST_OPERATIONS)
def test_a_training_step_has_few_operations(name, monkeypatch):
    """Each is a launch on a GPU, whose path is taken where it is not the CPU's."""
    monkeypatch.setattr("heads.lora.layers._DROPS_AGAIN", ())
    make, most = MOST_OPERATIONS[name]
    layer = make().train()
    x = torch.randn(TOKENS_AND_WIDTH, requires_grad=True)

    def step():
        layer(x).sum().backward()

    step()  # gradients are there, and are added to from now on
    found = count_operations(step)
    assert found.operations <= most, found
    assert found.largest <= 4 * x.nbytes, found
