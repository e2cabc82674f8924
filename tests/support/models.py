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


_BERT = {
    "vocab_size": 96,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
}


def _bert(**changes):
    return transformers.BertModel(transformers.BertConfig(**_BERT | changes))


def _encoder(kind: str, **own):
    """An encoder of a BERT-like family."""

    def make(**changes):
        config = getattr(transformers, f"{kind}Config")(
            **_BERT | {"max_position_embeddings": 64} | own | changes
        )
        return getattr(transformers, f"{kind}Model")(config)

    return make


def _decoder(kind: str, **own):
    """A decoder of a Llama-like family."""

    def make(**changes):
        config = {
            "vocab_size": 96,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 4,
            "max_position_embeddings": 64,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
        }
        config_class = getattr(transformers, f"{kind}Config")
        return getattr(transformers, f"{kind.removesuffix('Text')}ForCausalLM")(
            config_class(**config | own | changes)
        )

    return make


# loaded by AutoModel; `tests/heads/pairwise` tests each as a judge's backbone
ENCODERS = {
    "bert": _bert,
    "distilbert": _encoder("DistilBert", dim=16, hidden_dim=24, n_layers=2, n_heads=2),
    "roberta": _encoder("Roberta"),
    "xlm-roberta": _encoder("XLMRoberta"),
    "electra": _encoder("Electra", embedding_size=8),
    "albert": _encoder("Albert", embedding_size=8),
    "modernbert": _encoder(
        "ModernBert",
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        cls_token_id=1,
        sep_token_id=2,
        local_attention=4,
        num_hidden_layers=4,
    ),
    "mpnet": _encoder("MPNet"),
    "deberta": _encoder(
        "DebertaV2", relative_attention=True, position_buckets=8, pos_att_type=["p2c", "c2p"]
    ),
}
MAKERS = {
    **ENCODERS,
    "gpt2": _gpt2,
    "llama": _llama,
    "llama-tied": lambda **changes: _llama(**{"tie_word_embeddings": True} | changes),
    "classifier": lambda **changes: transformers.BertForSequenceClassification(
        transformers.BertConfig(**_BERT | {"num_labels": 3} | changes)
    ),
    "qwen2": _decoder("Qwen2"),
    "qwen3": _decoder("Qwen3"),
    "mistral": _decoder("Mistral"),
    "gemma": _decoder("Gemma"),
    "gemma2": _decoder("Gemma2", final_logit_softcapping=0.5),
    "gemma3": _decoder("Gemma3Text", sliding_window=8),
    "bloom": lambda **changes: transformers.BloomForCausalLM(  # blocks that return tuples
        transformers.BloomConfig(
            **{"vocab_size": 96, "hidden_size": 16, "n_layer": 3, "n_head": 2} | changes
        )
    ),
    "t5": lambda **changes: transformers.T5EncoderModel(
        transformers.T5Config(
            **{"vocab_size": 96, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_heads": 2}
            | {"num_layers": 2}
            | changes
        )
    ),
    "mixtral": _decoder("Mixtral", num_local_experts=3),
    "gpt-oss": _decoder(
        "GptOss",
        num_local_experts=3,
        num_experts_per_tok=2,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    ),
    "nemotron-h": _decoder(
        "NemotronH",
        layers_block_type=["attention", "moe"],
        moe_intermediate_size=24,
        moe_shared_expert_intermediate_size=20,
        n_routed_experts=3,
        num_hidden_layers=None,
    ),
}
MIXTURES = ("mixtral", "gpt-oss", "nemotron-h")


def auto_class(kind: str):
    """The Auto class that loads a tiny model's checkpoint."""
    own = dict.fromkeys(ENCODERS, "AutoModel") | {
        "classifier": "AutoModelForSequenceClassification",
        "t5": "AutoModelForTextEncoding",
    }
    return getattr(transformers, own.get(kind, "AutoModelForCausalLM"))


def tiny(kind: str, seed: int = 0, **changes) -> PreTrainedModel:
    """A tiny random model in evaluation mode; ``changes`` go to its config."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = MAKERS[kind](**changes)
        with torch.no_grad():  # norms start at exactly one, which would hide mistakes
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.02)
    return model.eval()


def save(
    model: PreTrainedModel, folder: Path, dtype: torch.dtype = torch.float32, shard: str = "5GB"
) -> str:
    """Write a checkpoint and return its path as text."""
    model.to(dtype).save_pretrained(folder, max_shard_size=shard)
    return str(folder)


def save_tokenizer(
    folder: Path,
    words: list[str],
    special: list[str] | None = None,
    template: str | None = None,
    **options,
) -> None:
    """Write a word-level tokenizer whose ids are the positions in ``words``."""
    made = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token=words[0]))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=made, unk_token=words[0], **options)
    if special:
        fast.add_special_tokens({"additional_special_tokens": special})
    if template:
        fast.chat_template = template
    fast.save_pretrained(folder)
