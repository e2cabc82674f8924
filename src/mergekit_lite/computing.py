"""Find the settings in a model's config that change its computation."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

# fields that do not change what a model computes in evaluation mode
_COSMETIC = re.compile(
    r"(?:.*_)?(?:dropout|pdrop|drop_rate|dropout_prob|dropout_rate|layerdrop)"
    r"|summary_.*|output_(?!size|dim).*|.*_token_id"
    r"|_?name_or_path|architectures|auto_map|(?:torch_)?dtype|transformers_version|use_cache"
    r"|id2label|label2id|initializer_(?:range|factor)|problem_type|task_specific_params"
    r"|tokenizer_class|finetuning_task|return_.*|keys_to_ignore_at_inference"
    r"|router_aux_loss_coef|router_jitter_noise|.*_version|pretraining_tp"
)
LENGTHS = ("max_position_embeddings", "max_seq_len_cached", "original_max_seq_len")
"""Config fields that only limit the input length, unless the model's positions depend on them."""
_FROM_PADDING = {"roberta", "xlm-roberta", "camembert", "mpnet", "xmod", "data2vec-text"}
# rotary types that do not depend on max_position_embeddings, unlike dynamic, yarn and longrope
_ANY_LENGTH = {"default", "linear", "llama3"}


def settings_of(config: Any) -> dict[str, object]:
    """Return the fields of a `PreTrainedConfig` that change what the model computes."""
    ignored = LENGTHS if is_of_any_length(config) else ()
    return {
        name: value
        for name, value in config.to_dict().items()
        if name not in ignored and not _COSMETIC.fullmatch(name)
    }


def readable_tokens(config: Any, most: int) -> int:
    """Return the number of tokens that a model has positions for, but at most ``most``.

    Args:
        config: The model's `PreTrainedConfig`.
        most: The largest number to return.
    """
    text = config.get_text_config()
    positions = getattr(text, "max_position_embeddings", None)
    # XLNet has -1, since it has no limit
    if not isinstance(positions, int) or positions < 1 or is_of_any_length(text):
        return most
    # in these models, the first position is the padding index plus 1
    if text.model_type in _FROM_PADDING:
        positions -= (text.pad_token_id or 0) + 1
    return min(most, positions)


def is_of_any_length(config: object) -> bool:
    """Return whether a model's positions are rotary and independent of the maximum input length."""
    rope = getattr(config, "rope_parameters", None)
    # learned positions, such as GPT-2's, are a table with one row per position
    if not isinstance(rope, Mapping) or not rope:
        return False
    # some configs have rotary settings for each layer type
    parts = [rope, *(part for part in rope.values() if isinstance(part, Mapping))]
    return {part["rope_type"] for part in parts if "rope_type" in part} <= _ANY_LENGTH
