"""Losses of language models for training and evaluation, without storing all logits."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from model_components._head_loss import IGNORED, head_loss
from model_components._modes import evaluating, in_mode

from .report.training import perplexity

_PROBED = 8  # number of tokens on which the fused loss is compared with the model's own
_NEAR = 1e-3  # relative tolerance: above rounding errors, below the effect of another formula
_MORE = ("shift_labels", "return_dict", "output_hidden_states", "output_attentions")
_MARK = "is_fused_cross_entropy"
# names in configs (of Cohere, Muse and Falcon-H1) of the factor by which logits are multiplied
_FACTORS = ("logit_scale", "output_multiplier", "lm_head_multiplier")


def fuse_cross_entropy_(model: nn.Module) -> None:
    """Make a causal language model compute its loss without storing all logits, in place.

    If labels are given, the model's forward then returns the loss and no logits. The head runs on
    one chunk of the labeled positions at a time, and the forward pass computes the gradients of
    each chunk before it starts the next one. Therefore, training on answers to long prompts needs
    little more memory than the layers alone. The original forward still runs if there are no
    labels, or if ``shift_labels``, ``return_dict``, ``output_hidden_states`` or
    ``output_attentions`` is given.
    Trainers and training loops need no change. ``trl.SFTTrainer`` has its own fused head and does
    not need this function. Call the function again after unpickling a model.

    Args:
        model: A transformers model, or a peft model around one. The head may be frozen, trainable
            or tied, and may have an adapter.

    Raises:
        ValueError: The model has no separate head, adds a router's loss, or computes a loss other
            than the mean next-token cross-entropy of its head's logits, with the scale and soft cap
            of its config.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> model = LlamaForCausalLM(
    ...     LlamaConfig(
    ...         hidden_size=8,
    ...         intermediate_size=8,
    ...         num_hidden_layers=1,
    ...         num_attention_heads=2,
    ...         vocab_size=16,
    ...     )
    ... )
    >>> ids = torch.arange(6)[None]
    >>> plain = model(input_ids=ids, labels=ids).loss
    >>> fuse_cross_entropy_(model)
    >>> fused = model(input_ids=ids, labels=ids)
    >>> fused.logits is None, torch.allclose(fused.loss, plain)
    (True, True)
    """
    base = _language_model(model, "fuse_cross_entropy_")
    if _is_fused(base):
        return
    config = base.config.get_text_config()
    if getattr(config, "output_router_logits", False):
        raise ValueError(
            "fuse_cross_entropy_: output_router_logits is True in the model's config, but the "
            "fused loss does not include the router's loss; expected False"
        )
    _check_loss(base, "fuse_cross_entropy_")

    @functools.wraps(type(base).forward)  # trainers and generate inspect this signature
    def forward(
        self: Any,
        *arguments: Any,
        labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **options: Any,
    ) -> object:
        if labels is None:
            return self.forward_with_logits(*arguments, **options)
        if any(options.get(name) is not None for name in _MORE):
            options |= {"labels": labels, "num_items_in_batch": num_items_in_batch}
            return self.forward_with_logits(*arguments, **options)
        total, count = _summed_loss(self, labels, *arguments, **options)
        # a trainer's count covers the whole step: all accumulated batches, all processes
        if num_items_in_batch is not None:
            count = torch.as_tensor(num_items_in_batch, device=total.device)
        # for a batch without supervised tokens, the loss is 0 and not NaN
        return CausalLMOutput(loss=total / count.clamp(min=1))

    setattr(forward, _MARK, True)
    # bound methods, because a copy of the model then gets methods that are bound to the copy
    base.forward_with_logits = base.forward
    base.forward = types.MethodType(forward, base)


def _is_fused(base: Any) -> bool:
    return hasattr(vars(base).get("forward"), _MARK)


def _language_model(model: nn.Module, operation: str) -> Any:
    """Return the language model inside ``model``.

    Raises:
        ValueError: There is no such model, or it has no head.
    """
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    if not isinstance(base, PreTrainedModel) or base.base_model is base:
        raise ValueError(
            f"{operation}: expected a causal language model of transformers, got "
            f"{type(base).__name__}"
        )
    if base.get_output_embeddings() is None:
        raise ValueError(f"{operation}: expected a model with a head, got {type(base).__name__}")
    return base


def _logits_of(base: Any) -> Callable[[Tensor], Tensor]:
    """Return a function from hidden states, (n, H), to logits, (n, V).

    That function applies the scale and the soft cap of the config.
    """
    head = base.get_output_embeddings()
    config = base.config.get_text_config()
    factor = 1.0
    for name in _FACTORS:  # the name depends on the model family
        value = getattr(config, name, None)
        if value is not None:
            factor = value
            break
    # Granite divides its logits, and Gemma 2 caps them
    divisor = getattr(config, "logits_scaling", None) or 1.0
    cap = getattr(config, "final_logit_softcapping", None)

    def logits(hidden: Tensor) -> Tensor:
        made = head(hidden)
        if factor != 1 or divisor != 1:
            made = made * (factor / divisor)
        return made if cap is None else torch.tanh(made / cap) * cap

    return logits


@torch.no_grad()
def _check_loss(base: Any, operation: str) -> None:
    """Raise ValueError if a model's loss is not the one that `_summed_loss` computes."""
    device = base.get_input_embeddings().weight.device
    ids = torch.arange(_PROBED, device=device)[None]
    try:
        with in_mode(base, training=False):
            expected = base(input_ids=ids, labels=ids, use_cache=False).loss
            total, count = _summed_loss(base, ids, input_ids=ids)
        near = abs(float(total / count) - float(expected)) <= _NEAR * abs(float(expected))
    except RuntimeError:  # the head expects hidden states of another size
        near = False
    if not near:
        raise ValueError(
            f"{operation}: expected a model whose loss is the next-token cross-entropy of "
            f"its head's logits, but {type(base).__name__} computes another loss"
        )


def _summed_loss(
    base: Any, labels: Tensor, *arguments: Any, **options: Any
) -> tuple[Tensor, Tensor]:
    """Return the sum of the losses of all supervised tokens, and the number of these tokens."""
    options["use_cache"] = False
    hidden = base.base_model(*arguments, **options)[0][:, :-1].flatten(0, 1)
    head = base.get_output_embeddings()
    labels = labels[:, 1:].flatten().to(hidden.device)
    parameters = [p for p in head.parameters() if p.requires_grad]
    total = head_loss(
        hidden,
        labels,
        _logits_of(base),
        parameters,
        vocabulary=base.config.get_text_config().vocab_size,
    )
    return total, (labels != IGNORED).sum()


@torch.no_grad()
def answer_loss(
    model: nn.Module,
    dataset: Any,
    collator: Callable[[Sequence[object]], Mapping[str, object]],
    *,
    batch_size: int = 8,
    progress: bool = True,
) -> tuple[float, float]:
    """Return the mean loss over all supervised tokens, and its perplexity.

    Supervised tokens are tokens with a label other than -100. The result does not depend on the
    batch size. A trainer's ``eval_loss`` does, because it is a mean of the means of batches. Only
    the logits of one chunk of tokens are in memory at a time.

    Args:
        model: A causal language model.
        dataset: Examples with ``input_ids`` and ``labels``, such as ``trainer.eval_dataset``.
        collator: A function from examples to a batch of tensors, such as
            ``trainer.data_collator``.
        batch_size: Number of examples per batch.
        progress: Show a progress bar.

    Returns:
        The loss in nats per token, and the perplexity, which is e to the power of that loss.

    Raises:
        ValueError: No token is supervised, or `fuse_cross_entropy_` would reject the model.
    """
    base = _language_model(model, "answer_loss")
    if not _is_fused(base):
        _check_loss(base, "answer_loss")
    device = next(model.parameters()).device
    total = 0.0
    count = 0
    starts = range(0, len(dataset), batch_size)
    with evaluating(model):
        for start in tqdm(starts, "evaluating", disable=not progress, leave=False):
            stop = min(start + batch_size, len(dataset))
            inputs = {}
            for name, value in collator([dataset[i] for i in range(start, stop)]).items():
                if isinstance(value, Tensor):
                    inputs[name] = value.to(device)
            loss, tokens = _summed_loss(base, inputs.pop("labels"), **inputs)
            total += float(loss)
            count += int(tokens)
    if not count:
        raise ValueError(
            "answer_loss: expected at least one supervised token, got only labels of -100"
        )
    loss = total / count
    # `perplexity` does not overflow, whereas math.exp does from 710 on
    return loss, perplexity(loss)
