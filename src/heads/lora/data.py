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
    """Raise ValueError if packed examples influence each other.

    The check packs two examples into one sequence and then replaces the first. The logits of the
    second must be exactly the same as before. TRL warns about packing with any attention
    implementation except flash attention. However, the decoders of transformers also keep packed
    examples apart with eager and SDPA attention, by means of the position ids.

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
    # number of tokens of each example
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
            f"check_packed_examples: {type(model).__name__} returns a tensor of shape "
            f"{list(runs[0].shape)} for {2 * length} tokens; expected a causal language model, "
            "which returns logits for every token"
        )
    logits = [run[:, length:] for run in runs]
    if not torch.equal(*logits):
        raise ValueError(
            "check_packed_examples: expected packed examples to be independent, but in "
            f"{type(model).__name__} the logits of the second example change by up to "
            f"{float((logits[0] - logits[1]).abs().max()):.2g} if the first is replaced; use "
            "pack=False (in TRL, packing=False)"
        )
