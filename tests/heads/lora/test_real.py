"""SmolLM2 under LoRA: our forward is peft's, a short tuning lowers the loss, the merged model
answers a chat."""

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model

from heads.lora import LikelihoodGain, accelerate_lora_, merge_lora, prepare_lora
from tests.support import real

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def smollm2():
    return real.or_skip(real.smollm2)


def adapted(folder, dtype, accelerate):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    model = get_peft_model(
        model, LoraConfig(r=8, target_modules="all-linear"), autocast_adapter_dtype=False
    )
    draw = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        # in float32 and rounded once, so that every dtype has the same numbers
        if ".lora_" in name:
            parameter.data = (0.02 * torch.randn(parameter.shape, generator=draw)).to(
                parameter.dtype
            )
    if accelerate:
        report = accelerate_lora_(model)
        assert len(report.accelerated) == 7 * 30
        assert not report.skipped
    return model.train()


def test_the_accelerated_model_is_pefts(smollm2):
    ids = torch.randint(0, 49_152, (2, 32), generator=torch.Generator().manual_seed(0))
    found = {}
    for name, dtype, fast in (
        ("truth", torch.float64, False),
        ("peft", torch.float32, False),
        ("ours", None, True),
    ):
        model = adapted(smollm2, dtype or torch.float32, fast)
        out = model(input_ids=ids, labels=ids, use_cache=False)
        out.loss.backward()
        found[name] = {
            n: p.grad.double() for n, p in model.named_parameters() if p.grad is not None
        }
        found[name]["logits"] = out.logits.detach().double()
        del model, out
    assert found["ours"].keys() == found["peft"].keys() == found["truth"].keys()
    assert len(found["truth"]) == 2 * 7 * 30 + 1
    truth = found["truth"]

    def error(who):  # of all tensors, by root mean square
        errors = [(found[who][name] - true).norm() / true.norm() for name, true in truth.items()]
        return float(torch.stack(errors).square().mean().sqrt())

    # as the judge has it: twice the plain way's own error in float32
    assert error("ours") <= 2 * error("peft")


def test_a_chat_is_answered_after_tuning_and_merging(smollm2, tmp_path):
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2)
    base = transformers.AutoModelForCausalLM.from_pretrained(smollm2)
    model = prepare_lora(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    batch = tokenizer("Ships sail over the sea at night.", return_tensors="pt")
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(4):
        loss = model(**batch, labels=batch["input_ids"]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    report = merge_lora(
        model,
        tmp_path / "merged",
        tokenizer=tokenizer,
        dtype="float32",
        max_lost=None,
        progress=False,
    )
    assert len(report.layers) == 60
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(
        question, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    said = merged.generate(**prompt, max_new_tokens=12, do_sample=False)[
        0, prompt["input_ids"].shape[1] :
    ]
    answer = tokenizer.decode(said, skip_special_tokens=True)
    assert "Paris" in answer


def test_a_gain_in_likelihood_knows_an_answer_from_noise(smollm2):
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2)
    judge = LikelihoodGain(
        transformers.AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32), tokenizer
    )
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    good = judge(prompt, "The capital of France is Paris.")
    for bad in (
        "The capital of France is Rome.",
        "the the the the the the",
        "Paris is of France capital the.",
    ):
        assert judge(prompt, bad) < good, bad


@pytest.mark.parametrize(("size", "kept"), [(5e-3, True), (5e-4, False)])
def test_a_merge_in_bfloat16_is_refused_by_what_it_loses_and_not_by_noise(
    smollm2, tmp_path, size, kept
):
    """Of updates of a two-hundredth of a weight rounding makes a third noise, and loses 2 % of them;
    a tenth as large, they are mostly lost."""
    model = transformers.AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.bfloat16)
    model = prepare_lora(model, LoraConfig(r=64, target_modules="all-linear"))
    generator = torch.Generator().manual_seed(0)
    for layer in model.modules():
        if "default" in getattr(layer, "lora_B", ()):
            a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
            b.data = torch.randn(b.shape, generator=generator)
            update = (b.float() @ a.float()).norm() * layer.scaling["default"]
            b.data *= size * layer.base_layer.weight.float().norm() / update
    if not kept:
        with pytest.raises(ValueError, match=r"merge_lora: .* loses \d\d% of the updates"):
            merge_lora(model, tmp_path / "out", progress=False)
        return
    report = merge_lora(model, tmp_path / "out", progress=False)
    assert len(report.layers) == 7 * 30
    assert all(one.lost < 0.02 < 0.25 < one.noise for one in report.layers)
