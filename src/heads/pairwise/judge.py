"""`Judge`: the forward pass of a `PairwiseModel`, from tokens to features and then to logits.

Shapes: T tokens of all sequences, S sequences, P pairs, C classes, W width of the features, F
surface features.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import ModelOutput

from model_components._loading import CompleteModel

from .config import PairwiseConfig
from .functional import pairwise_loss, swapped
from .layers import PairwiseHead, Pool
from .packing import ATTENTION, PackingReport, base_of, encode_packed, encode_padded
from .surface import SURFACE, columns_of


@dataclass
class PairwiseOutput(ModelOutput):
    """The output of a `Judge`.

    Attributes:
        loss: The loss, a scalar; None without labels.
        logits: The logits of A, B and tie, (P, C).
        scores: The scores of A and B, (P, 2); None in training and with links other than
            ``"davidson"``.
        swapped_logits: The logits with A and B swapped, (P, C); None without ``both_orders``.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    scores: Tensor | None = None
    swapped_logits: Tensor | None = None


class Judge(CompleteModel):
    """An encoder, a pooling layer and a head, with their forward pass.

    `PairwiseModel` adds construction, saving and prediction.
    """

    config: PairwiseConfig  # pyrefly: ignore[bad-override]
    encoder: PreTrainedModel
    pool: Pool
    head: PairwiseHead
    packing: PackingReport
    tokenizer: PreTrainedTokenizerBase | None = None

    @property
    def parts(self) -> tuple[str, ...]:
        """The inputs of the head: ``"encoder"`` and the kinds of surface features that it reads."""
        return ("encoder", *(kind for kind in SURFACE if kind in self.config.surface))

    @property
    def packs(self) -> bool:
        """Return whether sequences currently go through the encoder without padding."""
        return self.packing.packed and self._base.config._attn_implementation == ATTENTION

    @property
    def _base(self) -> PreTrainedModel:
        """The encoder, without peft's wrapper if there is one."""
        return base_of(self.encoder)

    def get_input_embeddings(self) -> nn.Module:
        """Return the encoder's input embeddings."""
        return self.encoder.get_input_embeddings()

    def features(
        self,
        input_ids: Tensor,
        lengths: Tensor,
        begins: Tensor | None = None,
        token_type_ids: Tensor | None = None,
    ) -> Tensor:
        """Compute the float32 features, (S, W), of S concatenated sequences.

        Args:
            input_ids: The token ids of all sequences, (T,).
            lengths: The number of tokens in each sequence, (S,), at least 1.
            begins: The index of each answer's first token in its sequence, (S,); default: 0.
            token_type_ids: The token types, (T,); None means zeros. Ignored if the encoder has
                fewer than two types.

        Raises:
            ValueError: A length is below 1, or the lengths do not add up to T.
        """
        sizes = lengths.tolist()
        if sum(sizes) != len(input_ids) or min(sizes, default=0) < 1:
            raise ValueError(
                f"PairwiseModel: lengths are {sizes!r:.60} for {len(input_ids)} tokens; expected "
                "lengths of at least 1 that add up to the number of tokens"
            )
        # RoBERTa has a single token type: type 1, of answers, would be out of range
        if (getattr(self.config.encoder, "type_vocab_size", 0) or 0) > 1:
            kinds = token_type_ids
        else:
            kinds = None
        if self.packs:
            states = encode_packed(self.encoder, input_ids, sizes, kinds, self.packing.offset)
        else:
            states = encode_padded(self.encoder, input_ids, sizes, kinds)
        # autocast would pool in half precision, and verdicts depend on small differences
        with torch.autocast(states.device.type, enabled=False):
            return self.pool(
                states, lengths, torch.zeros_like(lengths) if begins is None else begins
            )

    def forward(
        self,
        input_ids: Tensor | None = None,
        lengths: Tensor | None = None,
        pairs: Tensor | None = None,
        begins: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        surface: Tensor | None = None,
        features: Tensor | None = None,
        labels: Tensor | None = None,
        both_orders: bool = False,
    ) -> PairwiseOutput:
        """Compute the logits of pairs of sequences, as collated by `PairwiseCollator`.

        Args:
            input_ids: The token ids of all sequences, (T,).
            lengths: The number of tokens in each sequence, (S,).
            pairs: The indices of the sequences of A and B, (P, 2).
            begins: The index of each answer's first token, (S,); see `features`.
            token_type_ids: The token types, (T,); see `features`.
            surface: The surface features, (S, F), if the model reads them.
            features: The features of an encoded data set, (S, W), instead of tokens.
            labels: Class indices (P,) or soft labels (P, C).
            both_orders: Whether to also return the logits with A and B swapped.

        Raises:
            ValueError: ``lengths`` or ``labels`` do not match the other arguments, ``pairs`` is
                None, or there are neither features nor tokens with lengths.
        """
        if features is None:
            if input_ids is None or lengths is None:
                raise ValueError(
                    "PairwiseModel: expected features, or both input_ids and lengths, got None for "
                    "features and for at least one of the other two"
                )
            features = self.features(input_ids, lengths, begins, token_type_ids)
        if pairs is None:
            raise ValueError(
                "PairwiseModel: pairs is None, expected indices of sequences, of shape (P, 2)"
            )
        with torch.autocast(features.device.type, enabled=False):
            sides = [features[pairs[:, k]] for k in (0, 1)]
            looks = [None if surface is None else surface[pairs[:, k]] for k in (0, 1)]
            return self.compare(*sides, *looks, labels=labels, both_orders=both_orders)

    def compare(
        self,
        a: Tensor,
        b: Tensor,
        surface_a: Tensor | None = None,
        surface_b: Tensor | None = None,
        *,
        labels: Tensor | None = None,
        both_orders: bool = False,
        alike: str | None = None,
    ) -> PairwiseOutput:
        """Compute the logits of pairs from (P, W) features and (P, F) surface features.

        Args:
            a: The features of A.
            b: The features of B.
            surface_a: The surface features of A.
            surface_b: The surface features of B.
            labels: Class indices (P,) or soft labels (P, C).
            both_orders: Whether to also return the logits with A and B swapped.
            alike: The input of the head in which both answers' values are replaced by their mean:
                ``"encoder"``, ``"length"``, ``"style"`` or ``"overlap"``. None replaces nothing.
        """
        # features are float32; the head is not if the whole model was cast
        dtype = self.head.outer.weight.dtype
        a = a.to(dtype)
        b = b.to(dtype)
        if surface_a is not None and surface_b is not None:
            surface_a = surface_a.to(dtype)
            surface_b = surface_b.to(dtype)
        if alike == "encoder":
            a = b = (a + b) / 2
        elif alike is not None and surface_a is not None and surface_b is not None:
            surface_a, surface_b = _average_columns(surface_a, surface_b, columns_of([alike]))
        # 1 in training, because a calibrated model would learn to undo its temperature
        divisor = 1.0 if self.training else self.head.temperature
        loss = scores = other = None
        if self.config.link == "davidson":
            scores = torch.stack([self.head.score(a, surface_a), self.head.score(b, surface_b)], -1)
            logits = self.head.linked(*scores.unbind(-1)) / divisor
            # single scores do not depend on the order, so no second pass is needed
            other = swapped(logits) if both_orders else None
        else:
            logits = self.head(a, b, surface_a, surface_b) / divisor
            if both_orders:
                other = self.head(b, a, surface_b, surface_a) / divisor
        if labels is not None:
            smoothing = self.config.label_smoothing
            loss = pairwise_loss(logits, labels, label_smoothing=smoothing)
        return PairwiseOutput(loss, logits, None if self.training else scores, other)


def _average_columns(a: Tensor, b: Tensor, columns: Any) -> tuple[Tensor, Tensor]:
    """Return copies of ``a`` and ``b`` whose given columns are replaced by the mean of the two."""
    a = a.clone()
    b = b.clone()
    a[:, columns] = b[:, columns] = (a[:, columns] + b[:, columns]) / 2
    return a, b
