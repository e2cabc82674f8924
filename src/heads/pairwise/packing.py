"""Run the concatenated sequences of a batch through an encoder of transformers, without padding.

No sequence attends to another.

transformers' encoders take position ids of packed examples, but with sdpa or eager attention they
silently let the examples attend to each other. This module registers an attention function that
takes the boundaries of sequences. `check_packing` tests whether an encoder passes the boundaries to
this function. If it does not, its sequences are padded. Causal models can be packed, too.

Shapes: T tokens of all sequences, S sequences, W width of the encoder, V tokens of the vocabulary,
H heads, d width of a head.
"""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from model_components._modes import evaluating
from model_components._report import Report

from .functional import packed_attention

ATTENTION = "heads_packed"
_ENDS = "cu_seq_lens_q"  # transformers' name for the boundaries of packed sequences
# fields of a config that do not change an encoder's outputs
_IGNORED_FIELDS = ("_name_or_path", "architectures", "dtype", "transformers_version")
# whether `encode_packed` is running
_PACKED: ContextVar[bool] = ContextVar("_PACKED", default=False)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Compute attention with the signature that transformers expects.

    Inputs are (1, H, T, d), and the output is (1, T, H, d). If no boundaries of sequences are
    passed, this is transformers' sdpa attention.
    """
    if options.get(_ENDS) is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **options
        )
    # check_packing catches this error and pads such encoders (Gemma 2, gpt-oss)
    if options.get("softcap") is not None or options.get("s_aux") is not None:
        raise ValueError("its attention has a soft cap or sinks")
    causal = options.get("is_causal")
    # the same rule as in transformers
    if causal is None:
        causal = getattr(module, "is_causal", True)
    # transformers' window counts the token itself
    window = None if sliding_window is None else sliding_window - 1
    q, k, v = (part[0].transpose(0, 1) for part in (query, key, value))
    output = packed_attention(
        q,
        k,
        v,
        options[_ENDS],
        scale=scaling,
        dropout_p=dropout,
        window=window,
        causal=bool(causal),
    )
    return output[None], None


def _mask(*args: Any, **options: object) -> Tensor | None:
    """Return None for packed sequences, whose mask would be T x T, otherwise sdpa's mask."""
    if _PACKED.get():
        return None
    return sdpa_mask(*args, **options)


AttentionInterface.register(ATTENTION, _attention)
AttentionMaskInterface.register(ATTENTION, _mask)


@dataclass(frozen=True)
class PackingReport(Report):
    """The result of `check_packing`: whether an encoder is packed, and if not, why.

    Attributes:
        encoder: The name of the encoder's class.
        packed: Whether the encoder runs without padding.
        reason: Why the encoder is padded; empty if it is packed.
        offset: The position id of a sequence's first token.
    """

    encoder: str
    packed: bool
    reason: str
    offset: int = 0

    def summary(self) -> list[str]:
        """Return a line with the result."""
        return [
            f"{self.encoder}: packed, no padding"
            if self.packed
            else f"{self.encoder}: padded, because {self.reason}"
        ]


_CHECKED: dict[tuple, PackingReport] = {}


def encode_packed(
    encoder: PreTrainedModel,
    input_ids: Tensor,
    lengths: Sequence[int],
    token_type_ids: Tensor | None,
    offset: int = 0,
) -> Tensor:
    """Encode S concatenated sequences in one pass; return the last hidden states, (T, W)."""
    ends = [0]
    for length in lengths:
        ends.append(ends[-1] + length)
    sizes = torch.tensor(lengths, device=input_ids.device)
    starts = torch.tensor(ends[:-1], device=input_ids.device)
    # positions restart with each sequence; output_size avoids waiting for the GPU
    places = torch.arange(len(input_ids), device=input_ids.device) - starts.repeat_interleave(
        sizes, output_size=ends[-1]
    )
    options: dict[str, object] = {"position_ids": (places + offset)[None], _ENDS: ends}
    if token_type_ids is not None:
        options["token_type_ids"] = token_type_ids[None]
    # transformers passes none of these options to _mask
    before = _PACKED.set(True)
    try:
        return _states(encoder, encoder(input_ids=input_ids[None], **options))[0]
    finally:
        _PACKED.reset(before)


def encode_padded(
    encoder: nn.Module, input_ids: Tensor, lengths: Sequence[int], token_type_ids: Tensor | None
) -> Tensor:
    """Return the last hidden states as `encode_packed` does, but pad to the longest sequence."""
    sizes = list(lengths)
    mask = pad_sequence(
        [torch.ones(n, dtype=torch.bool, device=input_ids.device) for n in sizes], batch_first=True
    )
    # the mask hides the padding, but RoBERTa computes positions from the padding id
    fill = getattr(encoder.config, "pad_token_id", None) or 0
    options: dict[str, object] = {}
    if token_type_ids is not None:
        options["token_type_ids"] = pad_sequence(
            list(token_type_ids.split(sizes)), batch_first=True
        )
    ids = pad_sequence(list(input_ids.split(sizes)), batch_first=True, padding_value=fill)
    # the mask selects the tokens row by row, which removes the padding
    return _states(encoder, encoder(input_ids=ids, attention_mask=mask.long(), **options))[mask]


def _states(encoder: nn.Module, output: object) -> Tensor:
    states = getattr(output, "last_hidden_state", None)
    if states is None:
        if isinstance(output, Mapping):
            fields = sorted(output)
        else:
            fields = type(output).__name__
        raise ValueError(
            f"PairwiseModel: expected an output of {type(encoder).__name__} with a "
            f"last_hidden_state, got {fields}"
        )
    return states


def base_of(encoder: PreTrainedModel) -> PreTrainedModel:
    """Return an encoder without peft's wrapper, if it has one."""
    base = getattr(encoder, "get_base_model", None)
    return encoder if base is None else base()


def embedding_weight(encoder: PreTrainedModel) -> Tensor:
    """Return the token embeddings, (V, W)."""
    weight = encoder.get_input_embeddings().weight
    assert isinstance(weight, Tensor)
    return weight


@torch.no_grad()
def check_packing(encoder: PreTrainedModel) -> PackingReport:
    """Test on three short sequences whether packing changes an encoder's outputs.

    The test runs once for each encoder class, device type and config; later calls reuse the result.

    The packed hidden states must equal the hidden states of each sequence alone up to rounding, and
    must not change by a single bit if another sequence changes. If both hold, the encoder's
    attention is replaced by `packed_attention`, in place. Otherwise it does not change.

    Args:
        encoder: A transformers model whose output has a ``last_hidden_state``.

    Returns:
        A report that says whether the encoder is packed, and if not, why.

    >>> from transformers import BertConfig, BertModel
    >>> config = BertConfig(
    ...     hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8
    ... )
    >>> print(check_packing(BertModel(config)))
    BertModel: packed, no padding
    """
    base = base_of(encoder)
    before = base.config._attn_implementation
    kind = (type(base), base.device.type, config_text(base.config))
    if kind not in _CHECKED:
        _CHECKED[kind] = _tried(base)
    if _CHECKED[kind].packed:
        base.config._attn_implementation = ATTENTION
    else:
        base.config._attn_implementation = before
    return _CHECKED[kind]


def config_text(config: PreTrainedConfig) -> str:
    """Return an encoder's config as JSON, without fields that do not change its outputs."""
    fields = {
        name: value for name, value in config.to_dict().items() if name not in _IGNORED_FIELDS
    }
    return json.dumps(fields, sort_keys=True, default=str)


def _tried(encoder: PreTrainedModel) -> PackingReport:
    name = type(encoder).__name__
    if "position_ids" not in inspect.signature(encoder.forward).parameters:
        return PackingReport(name, False, "it takes no position ids")
    if not getattr(encoder, "_supports_attention_backend", False) and not getattr(
        encoder, "_supports_sdpa", False
    ):
        return PackingReport(
            name, False, "its custom attention does not take the boundaries of sequences"
        )
    if encoder.dtype != torch.float32:  # half precision could hide wrong positions
        encoder = copy.deepcopy(encoder).float()
    before = encoder.config._attn_implementation
    weight = embedding_weight(encoder)
    most = getattr(encoder.config, "max_position_embeddings", None)
    window = getattr(encoder.config, "sliding_window", None)
    # the third is longer than a sliding window, so that the window matters
    lengths = (5, 3, min((window or 0) + 7, (most or 512) // 2))
    device = weight.device
    fill = getattr(encoder.config, "pad_token_id", None) or 0
    # no padding ids, because RoBERTa gives all of them the same position
    usual = [token for token in range(min(len(weight), 64)) if token != fill]
    ids = torch.tensor((usual * sum(lengths))[: sum(lengths)], device=device)
    # only the first sequence changes: later states that change have attended to it
    other = torch.cat([ids[:5].flip(0), ids[5:]])
    try:
        with evaluating(encoder), torch.autocast(device.type, enabled=False):
            return _compared(encoder, ids, other, lengths, fill)
    except (
        TypeError,
        ValueError,
        IndexError,
        RuntimeError,
    ) as error:  # a forward pass without support for packing may raise any of these
        return PackingReport(
            name, False, f"it fails on packed sequences ({str(error).splitlines()[0]:.80})"
        )
    finally:
        encoder.config._attn_implementation = before


def _compared(
    encoder: PreTrainedModel, ids: Tensor, other: Tensor, lengths: Sequence[int], fill: int
) -> PackingReport:
    name = type(encoder).__name__
    alone = torch.cat(
        [encode_padded(encoder, part, [len(part)], None) for part in ids.split(list(lengths))]
    )
    encoder.config._attn_implementation = ATTENTION
    for offset in (0, fill + 1):  # the second is RoBERTa's first position
        made, moved = (encode_packed(encoder, one, lengths, None, offset) for one in (ids, other))
        # sums over other shapes round differently; a leak or a wrong position changes far more
        near = (made - alone).abs().max() <= 64 * torch.finfo(made.dtype).eps * alone.abs().max()
        if near and torch.equal(made[5:], moved[5:]):
            return PackingReport(name, True, "", offset)
    return PackingReport(name, False, "packed states differ from the states of each sequence alone")
