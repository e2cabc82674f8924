"""The loss without logits is the loss: values and all gradients, for every kind of head."""

import copy
import functools

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import nn

import model_components._head_loss
from heads.lora import fuse_cross_entropy_, prepare_lora
from model_components._head_loss import head_loss
from tests.support.equivalence import judge
from tests.support.models import tiny
from tests.support.ranks import in_two_processes

SIZES = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
KINDS = {
    "llama": (transformers.LlamaForCausalLM, transformers.LlamaConfig(**SIZES)),
    "tied": (
        transformers.LlamaForCausalLM,
        transformers.LlamaConfig(**SIZES, tie_word_embeddings=True),
    ),
    "soft cap": (
        transformers.Gemma2ForCausalLM,
        transformers.Gemma2Config(**SIZES, final_logit_softcapping=3.0),
    ),
    "divided": (
        transformers.GraniteForCausalLM,
        transformers.GraniteConfig(**SIZES, logits_scaling=4.0),
    ),
    "multiplied": (
        transformers.CohereForCausalLM,
        transformers.CohereConfig(**{k: v for k, v in SIZES.items() if k != "head_dim"}),
    ),
    "gpt2": (
        transformers.GPT2LMHeadModel,
        transformers.GPT2Config(n_embd=16, n_head=2, n_layer=2, n_positions=32, vocab_size=40),
    ),
}


def model_of(kind):
    torch.manual_seed(0)
    made, config = KINDS[kind]
    return made(config).double().eval()


def batch(seed=0, ignored=0.5):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 40, (3, 9), generator=generator)
    labels = torch.where(torch.rand(ids.shape, generator=generator) < ignored, -100, ids)
    return {"input_ids": ids, "labels": labels}


def by_logits(model, input_ids, labels, num_items_in_batch=None):
    """The definition; transformers' own loss is in float32."""
    logits = model(input_ids=input_ids).logits[:, :-1].flatten(0, 1)
    total = nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum")
    return total / (num_items_in_batch or (labels[:, 1:] != -100).sum())


def gradients_of(model, loss):
    loss.backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def adapted(kind, head):
    """A model whose head is frozen, trained, has an adapter, or is trained as part of the model."""
    model = model_of(kind)
    body = ["c_attn"] if kind == "gpt2" else ["q_proj", "v_proj"]
    if head == "trained":
        return model
    targets = [*body, "lm_head"] if head == "adapter" else body
    saved = ["lm_head"] if head == "saved" else None
    config = LoraConfig(r=2, target_modules=targets, modules_to_save=saved, init_lora_weights=False)
    return get_peft_model(model, config, autocast_adapter_dtype=False).double()


@pytest.mark.parametrize("head", ["frozen", "adapter", "saved", "trained"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 1 << 22])
@pytest.mark.filterwarnings("ignore")
def test_loss_and_gradients_are_those_of_the_logits(kind, head, size, monkeypatch):
    monkeypatch.setitem(model_components._head_loss._ELEMENTS, "cpu", size)
    monkeypatch.setattr(model_components._head_loss, "_FEWEST", 5)
    model = adapted(kind, head)
    for inputs in (batch(), batch(1, ignored=0.0), batch(2) | {"num_items_in_batch": 7}):
        plain = copy.deepcopy(model)
        expected = by_logits(plain, **inputs)
        gradients = gradients_of(plain, expected)
        fused = copy.deepcopy(model)
        fuse_cross_entropy_(fused)
        loss = fused(**inputs).loss
        torch.testing.assert_close(loss, expected)
        found = gradients_of(fused, loss)
        assert found.keys() == gradients.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(found[name], gradient, msg=name)


def test_no_logits_are_made_and_all_else_stays():
    model = prepare_lora(tiny("llama"), LoraConfig(r=2, target_modules=["q_proj"]))
    plain = copy.deepcopy(model)
    fuse_cross_entropy_(model)
    fuse_cross_entropy_(model)  # again is nothing new
    inputs = {"input_ids": torch.arange(6)[None], "labels": torch.arange(6)[None]}
    assert model(**inputs).logits is None
    with torch.no_grad():
        torch.testing.assert_close(model(**inputs).loss, plain(**inputs).loss)
        logits = model(input_ids=inputs["input_ids"]).logits
        assert torch.equal(logits, plain(input_ids=inputs["input_ids"]).logits)
    generated = [
        m.generate(input_ids=inputs["input_ids"], max_new_tokens=4, do_sample=False)
        for m in (model, plain)
    ]
    assert torch.equal(*generated)
    assert model.state_dict().keys() == plain.state_dict().keys()
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        assert torch.equal(copied(input_ids=inputs["input_ids"]).logits, logits)


def test_a_batch_without_trained_tokens_gives_zero_with_a_graph():
    model = prepare_lora(tiny("llama"), LoraConfig(r=2, target_modules=["q_proj"]))
    fuse_cross_entropy_(model)
    loss = model(input_ids=torch.arange(6)[None], labels=torch.full((1, 6), -100)).loss
    loss.backward()
    assert float(loss.detach()) == 0


def test_label_smoothing_is_torchs():
    torch.manual_seed(0)
    hidden = torch.randn(7, 5, dtype=torch.float64, requires_grad=True)
    head = nn.Linear(5, 11, dtype=torch.float64)
    labels = torch.tensor([1, -100, 3, 0, 10, -100, 2])
    expected = nn.functional.cross_entropy(
        head(hidden), labels, reduction="sum", label_smoothing=0.1
    )
    parameters = list(head.parameters())
    loss = head_loss(hidden, labels, head, parameters, vocabulary=11, label_smoothing=0.1)
    torch.testing.assert_close(loss, expected)
    inputs = [hidden, *parameters]
    for found, wanted in zip(
        torch.autograd.grad(loss, inputs), torch.autograd.grad(expected, inputs), strict=True
    ):
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("trained", [True, False])
def test_it_is_as_near_to_float64_as_the_logits_are(dtype, trained, monkeypatch):
    for device in ("cpu", "cuda"):
        monkeypatch.setitem(model_components._head_loss._ELEMENTS, device, 1)
    generator = torch.Generator().manual_seed(0)
    inputs = {
        "hidden": torch.randn(200, 48, generator=generator),
        "weight": torch.randn(300, 48, generator=generator) / 7,
    }
    labels = torch.randint(300, (200,), generator=generator)
    labels[::3] = -100

    def fused(hidden, weight):
        weight = weight if trained else weight.detach()
        head = functools.partial(nn.functional.linear, weight=weight)
        parameters = [weight] if trained else []
        place = hidden.device
        loss = head_loss(hidden, labels.to(place), head, parameters, vocabulary=300)
        return loss.to(hidden.dtype)  # as the judge wants it

    def by_logits(hidden, weight):
        logits = hidden @ (weight if trained else weight.detach()).T
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        loss = nn.functional.cross_entropy(logits, labels.to(logits.device), reduction="sum")
        return loss.to(hidden.dtype)

    judge("head_loss", "eager", fused, by_logits, inputs, dtype=dtype, case=f"trained {trained}")


def trained_losses(folder, fused, accumulation, **options):
    """The losses that a trainer logs, and the held-out loss after them."""
    torch.manual_seed(0)
    model = prepare_lora(tiny("llama"), LoraConfig(r=2, target_modules="all-linear"))
    if fused:
        fuse_cross_entropy_(model)
    rows = [
        {"input_ids": ids.tolist(), "labels": labels.tolist()}
        for seed in range(4)
        for ids, labels in zip(*batch(seed).values(), strict=True)
    ]
    arguments = transformers.TrainingArguments(
        folder,
        max_steps=4,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=accumulation,
        learning_rate=1e-2,
        logging_steps=1,
        report_to=[],
        seed=3,
        use_cpu=True,
        disable_tqdm=True,
        **options,
    )
    trainer = transformers.Trainer(model, arguments, train_dataset=rows, eval_dataset=rows)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return [*losses, trainer.evaluate()["eval_loss"]]


@pytest.mark.parametrize("accumulation", [1, 3])
def test_a_trainer_trains_as_with_logits(accumulation, tmp_path):
    plain = trained_losses(tmp_path, False, accumulation)
    assert len(plain) == 5
    assert trained_losses(tmp_path, True, accumulation) == pytest.approx(plain, rel=1e-4)


RANK = """
from tests.heads.lora.test_losses import trained_losses
found = [trained_losses(out, fused, 2, ddp_backend="gloo") for fused in (False, True)]
torch.save(found, f"{out}/{os.environ['RANK']}.pt")
"""


def test_two_processes_train_as_with_logits(tmp_path):
    in_two_processes(RANK, tmp_path)
    alone = trained_losses(tmp_path, False, 4)  # as many examples a step
    for rank in range(2):
        plain, fused = torch.load(tmp_path / f"{rank}.pt")
        assert fused == pytest.approx(plain, rel=1e-4)
        # but for the held-out loss, which is a mean of the batches' means
        assert fused[:-1] == pytest.approx(alone[:-1], rel=1e-4)


def test_models_whose_loss_is_more_than_their_heads_are_refused():
    with pytest.raises(ValueError, match=r"fuse_cross_entropy_: expected .*, got Linear"):
        fuse_cross_entropy_(nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"fuse_cross_entropy_: expected a model with a head"):
        fuse_cross_entropy_(tiny("classifier"))
    experts = tiny("mixtral")
    experts.config.output_router_logits = True
    with pytest.raises(ValueError, match=r"output_router_logits.*expected False"):
        fuse_cross_entropy_(experts)
    odd = tiny("llama")
    stock = odd.forward

    def forward(**inputs):
        output = stock(**inputs)
        output.loss = output.loss * 2
        return output

    odd.forward = forward
    with pytest.raises(ValueError, match=r"whose loss is the next-token cross-entropy .* Llama"):
        fuse_cross_entropy_(odd)
    unshifted = transformers.XLNetLMHeadModel(
        transformers.XLNetConfig(vocab_size=40, d_model=16, n_layer=2, n_head=2, d_inner=32)
    )
    with pytest.raises(ValueError, match=r"XLNetLMHeadModel computes another loss"):
        fuse_cross_entropy_(unshifted)


def test_heads_that_take_no_part_and_modes_without_gradients():
    inputs = {"input_ids": torch.arange(6)[None], "labels": torch.arange(6)[None]}
    config = LoraConfig(r=2, target_modules=["lm_head", "q_proj"])
    model = get_peft_model(tiny("llama"), config)
    model.add_adapter("other", config)
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    fuse_cross_entropy_(model)
    model(**inputs).loss.backward()
    model.merge_adapter()
    model(**inputs).loss.backward()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert not model(**inputs).loss.requires_grad


def test_more_than_a_loss_comes_with_logits_and_pickled_models_are_fused_again(tmp_path):
    inputs = {"input_ids": torch.arange(6)[None], "labels": torch.arange(6)[None]}
    model = tiny("llama")
    fuse_cross_entropy_(model)
    torch.save(model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    fuse_cross_entropy_(loaded)
    assert loaded(**inputs).logits is None
    assert torch.equal(loaded(**inputs).loss, model(**inputs).loss)
    assert isinstance(model(**inputs, return_dict=False), tuple)
    assert model(**inputs, output_hidden_states=True).hidden_states is not None
