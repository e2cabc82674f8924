"""Examples for tuning, and a check that packed examples are independent."""

from __future__ import annotations

from peft import PeftModel
from transformers import PreTrainedModel

from model_components._examples import TextExamples
from model_components._packing import change_of_second

__all__ = ["TextExamples", "check_packed_examples"]


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
    change = change_of_second("check_packed_examples", model)
    if change:
        raise ValueError(
            "check_packed_examples: expected packed examples to be independent, but in "
            f"{type(model).__name__} the logits of the second example change by up to "
            f"{change:.2g} if the first is replaced; use pack=False (in TRL, packing=False)"
        )
