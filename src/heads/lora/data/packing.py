"""`check_packed_examples`: whether examples that are packed into one row see each other."""

from __future__ import annotations

import torch
from peft import PeftModel
from transformers import PreTrainedModel

from model_components._modes import evaluating


@torch.no_grad()
def check_packed_examples(model: PreTrainedModel | PeftModel) -> None:
    """Refuse a model in which packed examples see each other.

    Two examples are packed and the first one is replaced: no bit of the second's logits may change.
    TRL warns of every attention but flash attention, but transformers' decoders tell packed
    examples apart by position ids in others, too.

    Args:
        model: A causal language model.

    Raises:
        ValueError: They see each other, or the model does not give logits for every token.

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
    positions = torch.arange(length, device=device).repeat(2)[None]
    with evaluating(model):
        runs = [
            model(input_ids=ids, position_ids=positions, use_cache=False)[0]
            for ids in (first, other)
        ]
    if runs[0].dim() != 3 or runs[0].shape[1] != 2 * length:
        raise ValueError(
            f"check_packed_examples: {type(model).__name__} gives {list(runs[0].shape)} for "
            f"{2 * length} tokens; expected logits of every token, as of a causal language model"
        )
    logits = [run[:, length:] for run in runs]
    if not torch.equal(*logits):
        raise ValueError(
            f"check_packed_examples: in {type(model).__name__} packed examples see each other "
            f"(logits move by {float((logits[0] - logits[1]).abs().max()):.2g}); expected "
            "packing=False"
        )
