"""Tiny models of real architectures, from configs, with fixed seeds; nothing is downloaded."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast


def _gpt2(**changes):
    config = {"vocab_size": 96, "n_positions": 32, "n_embd": 16, "n_layer": 3, "n_head": 2}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**config | changes))


def _llama(**changes):
    config = {
        "vocab_size": 96,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**config | changes))


def _bert(**changes):
    config = {
        "vocab_size": 96,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 32,
    }
    return transformers.BertModel(transformers.BertConfig(**config | changes))


def _mixtral(**changes):
    config = {
        "vocab_size": 96,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_local_experts": 3,
        "max_position_embeddings": 64,
    }
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**config | changes))


MAKERS = {
    "gpt2": _gpt2,
    "llama": _llama,
    "llama-tied": lambda **changes: _llama(**{"tie_word_embeddings": True} | changes),
    "bert": _bert,
    "mixtral": _mixtral,
}


def tiny(kind: str, seed: int = 0, **changes) -> PreTrainedModel:
    """A tiny random model in evaluation mode; ``changes`` go to its config."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = MAKERS[kind](**changes)
        with torch.no_grad():  # norms start at exactly one, which would hide mistakes
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.02)
    return model.eval()


def save(model: PreTrainedModel, folder: Path, dtype: torch.dtype = torch.float32, shard: str = "5GB") -> str:
    """Write a checkpoint and return its path as text."""
    model.to(dtype).save_pretrained(folder, max_shard_size=shard)
    return str(folder)


def save_tokenizer(
    folder: Path, words: list[str], special: list[str] | None = None, template: str | None = None
) -> None:
    """Write a word-level tokenizer whose ids are the positions in ``words``."""
    made = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token=words[0]))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=made, unk_token=words[0])
    if special:
        fast.add_special_tokens({"additional_special_tokens": special})
    if template:
        fast.chat_template = template
    fast.save_pretrained(folder)
