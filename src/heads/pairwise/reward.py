"""`PairwiseForSequenceClassification`: a judge's score of single answers, as other libraries take reward models.

Shapes: S sequences, T tokens of the longest.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification, PreTrainedModel
from transformers.modeling_outputs import SequenceClassifierOutput

from .config import PairwiseConfig
from .layers import SCORED
from .model import PairwiseModel


class PairwiseForSequenceClassification(PairwiseModel):
    """A `PairwiseModel` that gives each sequence of a padded batch its score, one logit.

    Weights and folders are those of a `PairwiseModel`: a folder that one saved loads as the other.
    ``AutoModelForSequenceClassification.from_pretrained`` loads it, and TRL's ``RewardTrainer`` trains it: give it
    ``model.dataset(pairs).reward_rows()``, since TRL would join texts otherwise than the judge does. By
    ``"davidson"``, and by either link without ties, a difference of two logits is the log-odds of the first answer
    against the second.

    Args:
        config: Of a link with scores, ``pooling`` of ``"first"``, ``"last"`` or both, and no ``surface``, which token
            ids do not show.
        encoder: As in `PairwiseModel`; see ``from_encoder``.

    Raises:
        ValueError: Another link, pooling over the answer, whose beginning nobody tells here, or surface features.

    >>> from transformers import BertConfig
    >>> small = BertConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)
    >>> model = PairwiseForSequenceClassification(PairwiseConfig(encoder=small, pooling="first")).eval()
    >>> model(torch.tensor([[2, 3, 4], [5, 6, 0]]), torch.tensor([[1, 1, 1], [1, 1, 0]])).logits.shape
    torch.Size([2, 1])
    """

    def __init__(self, config: PairwiseConfig, encoder: PreTrainedModel | None = None):
        for what, value, right, needed in (
            ("link", config.link, config.link in SCORED, f"one that has scores: {' or '.join(SCORED)}"),
            ("pooling", config.pooling, {*config.pooling} <= {"first", "last"}, "first, last or both"),
            ("surface", config.surface, not config.surface, "none, as it is not in token ids"),
        ):
            if not right:
                raise ValueError(f"PairwiseForSequenceClassification: {what} is {value!r}; needed {needed}")
        config.num_labels = 1
        super().__init__(config, encoder)

    def forward(  # pyrefly: ignore[bad-override]
        self, input_ids: Tensor, attention_mask: Tensor | None = None, token_type_ids: Tensor | None = None,
        **ignored: object,
    ) -> SequenceClassifierOutput:  # fmt: skip
        """(S, 1) scores of sequences.

        Args:
            input_ids: (S, T), padded on either side.
            attention_mask: (S, T), 0 for padding; default all ones.
            token_type_ids: (S, T), for encoders that have them.
            **ignored: What trainers add, such as ``use_cache``.

        Raises:
            ValueError: A sequence without tokens.
        """
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        seen = mask.bool()
        kinds = None if token_type_ids is None else token_type_ids[seen]
        features = self.features(input_ids[seen], seen.sum(1), token_type_ids=kinds)
        with torch.autocast(features.device.type, enabled=False):
            scores = self.head.score(features.to(self.head.outer.weight.dtype))
        divisor = 1.0 if self.training else self.head.temperature
        return SequenceClassifierOutput(logits=(scores / divisor)[:, None])  # pyrefly: ignore[bad-argument-type]


AutoModelForSequenceClassification.register(PairwiseConfig, PairwiseForSequenceClassification, exist_ok=True)
