"""The checkpoints that the recipes of recipes.yaml name: tiny, drawn from fixed seeds, with
tokenizers of 64 words.

base: the ancestor; a b c: dense fine-tunes of it; s1 s2: sparse ones; deep: 6 layers where others
have 4; big: two tokens more; perm: the tokens in another order; rows: 72 rows for 64 tokens;
padtok: 64 rows for 68; tied tied2: tied embeddings; notok: no tokenizer; same: a copy of base;
zero: zeros; neg: -a; anti: 2 base - a; hbase ha hb: bfloat16; g1 g2: GPT-2; opt1 opt2: OPT; v1 v2:
LLaVA; q1 q2: Qwen2; e1 e2: BERT; adapter: LoRA on base.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import peft
import tokenizers
import torch
import transformers as t
from safetensors.torch import load_file, save_file

WORDS = ["<unk>", "<s>", "</s>", *(f"_tok_{i}" for i in range(3, 64))]
TEMPLATES = {
    name: "{% for m in messages %}<" + name + ">{{m.content}}{% endfor %}" for name in "AB"
}
SMALL = {"hidden_size": 16, "intermediate_size": 32}


def tokenizer(folder: Path, words=WORDS, added=(), template=None) -> None:
    model = tokenizers.models.BPE({word: row for row, word in enumerate(words)}, [])
    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    fast = t.PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(model), **special)
    fast.add_tokens(list(added))
    if template:
        fast.chat_template = template
    fast.save_pretrained(folder)


def llama(
    root: Path,
    name: str,
    seed: int,
    *,
    rows=64,
    layers=4,
    tied=False,
    origin=None,
    dtype=torch.float32,
    share=1.0,
):
    """A model, or a fine-tune of ``origin`` in which a share of the elements moved."""
    torch.manual_seed(seed)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    config = t.LlamaConfig(
        vocab_size=rows, num_hidden_layers=layers, tie_word_embeddings=tied, **heads, **SMALL
    )
    model = t.LlamaForCausalLM(config)
    before = load_file(root / origin / "model.safetensors") if origin else {}
    state = model.state_dict()
    for key, value in state.items():
        noise, old = torch.randn(value.shape), before.get(key)
        if old is None:
            state[key] = (1 if "norm" in key else 0) + 0.1 * noise
        elif old.shape == value.shape:
            moved = torch.rand(value.shape) < share if share < 1 else 1
            state[key] = old.float() + 0.05 * noise * moved
        else:
            state[key] = 0.1 * noise
            state[key][: len(old)] = old.float() + 0.05 * noise[: len(old)]
    if tied:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state)
    model.to(dtype).save_pretrained(root / name)


def derived(root: Path, name: str, source: str, change) -> None:
    shutil.copytree(root / source, root / name)
    state = load_file(root / source / "model.safetensors")
    changed = {key: change(key, value).contiguous() for key, value in state.items()}
    save_file(changed, root / name / "model.safetensors", metadata={"format": "pt"})


def others(root: Path) -> None:
    """Two models of each of some other architectures."""
    vision = t.CLIPVisionConfig(
        image_size=32,
        patch_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        projection_dim=16,
        **SMALL,
    )
    text = t.LlamaConfig(vocab_size=64, num_attention_heads=4, num_hidden_layers=3, **SMALL)
    short = {
        "vocab_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "max_position_embeddings": 32,
    }
    kinds = {
        "g": (
            t.GPT2LMHeadModel,
            t.GPT2Config(n_embd=16, n_head=2, n_layer=3, n_positions=32, vocab_size=64),
        ),
        "opt": (
            t.OPTForCausalLM,
            t.OPTConfig(
                hidden_size=16,
                ffn_dim=32,
                word_embed_proj_dim=16,
                pad_token_id=1,
                bos_token_id=1,
                **short,
            ),
        ),
        "v": (
            t.LlavaForConditionalGeneration,
            t.LlavaConfig(
                vision_config=vision, text_config=text, image_seq_length=16, image_token_index=5
            ),
        ),
        "q": (t.Qwen2ForCausalLM, t.Qwen2Config(num_key_value_heads=2, **short, **SMALL)),
        "e": (t.BertForMaskedLM, t.BertConfig(**short, **SMALL)),
    }
    for seed, (kind, (model_class, config)) in enumerate(kinds.items()):
        for number in (1, 2):
            torch.manual_seed(100 * seed + number)
            model = model_class(config)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(0.05 * torch.randn_like(parameter))
            model.save_pretrained(root / f"{kind}{number}")
            if kind == "g":
                tokenizer(root / f"{kind}{number}")


def build(root: Path) -> None:
    """All of them, into an empty folder."""
    fine_tunes = {"a": (1, "B"), "b": (2, "B"), "c": (3, None), "notok": (13, None)}
    llama(root, "base", 0)
    tokenizer(root / "base", template=TEMPLATES["A"])
    for name, (seed, template) in fine_tunes.items():
        llama(root, name, seed, origin="base")
        if name != "notok":
            tokenizer(root / name, template=TEMPLATES.get(template or ""))
    for name, seed in (("s1", 11), ("s2", 12)):
        llama(root, name, seed, origin="base", share=0.3)
        tokenizer(root / name)
    llama(root, "deep", 4, layers=6, origin="base")
    llama(root, "big", 5, rows=66, origin="base")
    llama(root, "padtok", 6, origin="base")
    llama(root, "perm", 7, origin="base")
    llama(root, "rows", 8, rows=72, origin="base")
    llama(root, "tied", 9, tied=True, origin="base")
    llama(root, "tied2", 10, tied=True, origin="tied")
    tokenizer(root / "big", added=["<|im_start|>", "<|im_end|>"])
    tokenizer(root / "padtok", added=[f"<UNUSED_{i}>" for i in range(4)])
    tokenizer(root / "perm", words=WORDS[:3] + WORDS[3:][::-1])
    for name in ("deep", "rows", "tied", "tied2"):
        tokenizer(root / name)
    for name, seed, origin in (("hbase", 0, None), ("ha", 21, "base"), ("hb", 22, "base")):
        llama(root, name, seed, origin=origin, dtype=torch.bfloat16)
        tokenizer(root / name)
    others(root)
    base = load_file(root / "base" / "model.safetensors")
    derived(root, "same", "base", lambda _, value: value)
    derived(root, "zero", "base", lambda _, value: torch.zeros_like(value))
    derived(root, "neg", "a", lambda _, value: -value)
    derived(root, "anti", "a", lambda key, value: 2 * base[key] - value)
    torch.manual_seed(40)
    settings = peft.LoraConfig(
        r=2, lora_alpha=4, target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM"
    )
    adapted = peft.get_peft_model(t.LlamaForCausalLM.from_pretrained(root / "base"), settings)
    for key, parameter in adapted.named_parameters():
        if "lora_B" in key:
            torch.nn.init.normal_(parameter, std=0.1)
    adapted.save_pretrained(root / "adapter")
    written = json.loads((root / "adapter" / "adapter_config.json").read_text())
    (root / "adapter" / "adapter_config.json").write_text(
        json.dumps(written | {"base_model_name_or_path": "base"})
    )
