"""Examples for tuning, and a check that packed examples are independent."""

from __future__ import annotations

import torch
from peft import PeftModel
from transformers import PreTrainedModel

from model_components._examples import TextExamples
from model_components._modes import evaluating

__all__ = ["TextExamples", "check_packed_examples"]


@torch.no_grad()
def check_packed_examples(model: PreTrainedModel | PeftModel) -> None:
    """Raise if packed examples influence each other.

    The check packs two examples and replaces the first: the logits of the second must stay the
    same, bit by bit. TRL warns about every attention but flash attention. The decoders of
    transformers also separate packed examples, by their position ids, with eager and SDPA
    attention.

    Args:
        model: A causal language model.

    Raises:
        ValueError: Packed examples influence each other, or the model does not return logits for
            every token.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> check_packed_examples(
    ...     GPT2LMHeadModel(
    ...         GPT2Config(vocab_size=32, n_positions=16, n_embd=4, n_layer=1, n_head=1)
    ...     )
    ... )
    """
    # tokens of each of the two examples
    length = 8
    device = next(model.parameters()).device
    vocabulary = next(model.get_input_embeddings().parameters()).shape[0]
    first = torch.arange(2 * length, device=device).remainder(vocabulary)[None]
    other = first.clone()
    other[:, :length] = (other[:, :length] + vocabulary // 2).remainder(vocabulary)
    # only the position 0 in the middle marks the start of the second example
    positions = torch.arange(length, device=device).repeat(2)[None]
    with evaluating(model):
        runs = [
            model(input_ids=ids, position_ids=positions, use_cache=False)[0]
            for ids in (first, other)
        ]
    if runs[0].dim() != 3 or runs[0].shape[1] != 2 * length:
        raise ValueError(
            f"check_packed_examples: {type(model).__name__} returns {list(runs[0].shape)} for "
            f"{2 * length} tokens; expected logits for every token, as from a causal language model"
        )
    logits = [run[:, length:] for run in runs]
    if not torch.equal(*logits):
        raise ValueError(
            "check_packed_examples: expected packed examples to be independent, but in "
            f"{type(model).__name__} the logits of the second change with the first by up to "
            f"{float((logits[0] - logits[1]).abs().max()):.2g}; use pack=False (TRL: packing=False)"
        )
