"""`PairwiseModel`: a BERT-like encoder and a head that says which of two answers is better, or that they tie.

Shapes: T tokens of all sequences, S sequences, P pairs, C classes, W width of the encoder.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoTokenizer, PreTrainedModel
from transformers.utils import ModelOutput

from model_components._modes import evaluating

from .checks import check_encoder, check_tokenizer, most_tokens
from .collate import PairwiseDataset, Template, answers_to, flat_batch
from .config import PairwiseConfig
from .functional import log_probabilities, pairwise_loss, swap_divergence, swapped
from .inference import Predictions, Ranking, predict_pairs, ranking_of
from .links import PairwiseHead, Pool
from .packing import PackingReport, check_packing, encode_packed, encode_padded

_USUAL_LENGTH = 5.0  # log of some 150 tokens


@dataclass
class PairwiseOutput(ModelOutput):
    """Logits of A, B and tie, (P, C), and with labels the loss; scores (P, 2) and the other order's logits, if any."""

    loss: Tensor | None = None
    logits: Tensor | None = None
    scores: Tensor | None = None
    swapped_logits: Tensor | None = None


class PairwiseModel(PreTrainedModel):
    """An encoder with a `PairwiseHead`: prompts and two answers to probabilities of A, B and tie.

    All answers of a batch go through the encoder in one pass, without padding where `check_packing` finds that this
    changes nothing. Features and head are float32, whatever the encoder is.

    Args:
        config: Of encoder and head; see `from_encoder` for a pretrained one.

    Attributes:
        tokenizer: What `predict` and `rank` use; saved and loaded with the model.

    >>> from transformers import BertConfig
    >>> small = BertConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)
    >>> model = PairwiseModel(PairwiseConfig(encoder=small)).eval()
    >>> ids, lengths = torch.tensor([2, 3, 4, 5, 6]), torch.tensor([2, 3])
    >>> model(input_ids=ids, lengths=lengths, pairs=torch.tensor([[0, 1]])).logits.shape
    torch.Size([1, 3])
    """

    config: PairwiseConfig  # pyrefly: ignore[bad-override]
    config_class = PairwiseConfig
    base_model_prefix = "pairwise"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _keep_in_fp32_modules_strict = ["pool", "head"]  # noqa: RUF012, the base class's own way

    def __init__(self, config: PairwiseConfig, encoder: PreTrainedModel | None = None):
        super().__init__(config)
        if config.encoder is None:
            raise ValueError("PairwiseModel: config.encoder is None; needed an encoder's config, or from_encoder")
        own = {"dtype": torch.get_default_dtype()}  # what from_pretrained was asked for, not what was saved
        made: Any = AutoModel.from_config(config.encoder, **own) if encoder is None else encoder
        for module in () if encoder is None else made.modules():
            module._is_hf_initialized = True  # its weights are not to be drawn again
        if getattr(made, "pooler", None) is not None:
            made.pooler = None  # what pools here is ours, and parameters without gradients stop DDP
        self.encoder = made
        width = config.encoder.hidden_size
        self.pool = Pool(width, config.pooling)
        width += config.length_feature
        self.head = PairwiseHead(
            width, link=config.link, ties=config.ties, hidden_features=config.hidden_features, dropout=config.dropout
        )
        self.tokenizer: Any = None
        self.post_init()

    def _init_weights(self, module: Any) -> None:
        if isinstance(module, (Pool, PairwiseHead)):
            module.reset_parameters()

    @classmethod
    def from_encoder(
        cls, encoder: str | Path | PreTrainedModel, tokenizer: Any = None, *, dtype: torch.dtype | None = torch.float32,
        **options: Any,
    ) -> PairwiseModel:  # fmt: skip
        """A new head on a pretrained encoder.

        Args:
            encoder: A folder, a hub id, or a model, which is taken over: of one with a head of its own the encoder
                inside, without its pooler, in ``dtype`` and with our attention.
            tokenizer: The encoder's, or where it is; loaded from the encoder's place when None and a place is given.
            dtype: Of the encoder's weights; None keeps the checkpoint's. Half precision is for those who know that the
                encoder can be trained in it.
            **options: Fields of `PairwiseConfig`.

        Raises:
            ValueError: A tokenizer that is not the encoder's, an encoder without hidden states, an unknown option.
        """
        fields = [name for name in inspect.signature(PairwiseConfig).parameters if name not in ("encoder", "rest")]
        if not set(options) <= set(fields):
            unknown = ", ".join(sorted(set(options) - set(fields)))
            raise ValueError(f"from_encoder: there is no option {unknown}; there are {', '.join(fields)}")
        if isinstance(encoder, (str, Path)):
            place = str(encoder)
            encoder = AutoModel.from_pretrained(place, dtype="auto" if dtype is None else dtype)
            tokenizer = AutoTokenizer.from_pretrained(place) if tokenizer is None else tokenizer
        if isinstance(tokenizer, (str, Path)):
            tokenizer = AutoTokenizer.from_pretrained(str(tokenizer))
        if not isinstance(encoder, PreTrainedModel):
            raise ValueError(f"from_encoder: encoder is a {type(encoder).__name__}; needed a transformers model")
        inner: Any = getattr(encoder, encoder.base_model_prefix, encoder)
        inner = inner if dtype is None else inner.to(dtype)
        if getattr(inner.config, "is_encoder_decoder", False) or not hasattr(inner.config, "hidden_size"):
            raise ValueError(f"from_encoder: {type(inner).__name__} is no encoder that gives hidden states of a text")
        check_encoder(inner)
        packing = check_packing(inner)
        if tokenizer is not None:
            check_tokenizer(tokenizer, inner)
        config = PairwiseConfig(encoder=copy.deepcopy(inner.config), **options)
        config.max_tokens = most_tokens(config.max_tokens, inner, packing, tokenizer)
        model = cls(config, inner)
        model.tokenizer = tokenizer
        if tokenizer is not None:
            Template(tokenizer, config)  # refuses what leaves no room for text
        return model

    @classmethod
    def from_pretrained(cls, place: Any, *args: Any, **kwargs: Any) -> PairwiseModel:
        """A model that `save_pretrained` wrote, in float32 unless ``dtype`` says otherwise, with its tokenizer."""
        if "torch_dtype" not in kwargs:
            kwargs.setdefault("dtype", torch.float32)
        made = super().from_pretrained(place, *args, **kwargs)
        model = made[0] if isinstance(made, tuple) else made
        names = ("revision", "token", "cache_dir", "local_files_only", "subfolder", "trust_remote_code")
        kept = {k: v for k, v in kwargs.items() if k in names}
        try:
            model.tokenizer = AutoTokenizer.from_pretrained(place, **kept)
        except (OSError, ValueError, KeyError):  # a model that was saved without one
            model.tokenizer = None
        return made

    def save_pretrained(self, save_directory: Any, is_main_process: bool = True, *args: Any, **kwargs: Any) -> None:
        """Config, safetensors and, where the model has one, the tokenizer."""
        if self.tokenizer is not None and is_main_process:
            self.tokenizer.save_pretrained(save_directory)
        super().save_pretrained(save_directory, is_main_process, *args, **kwargs)

    @property
    def packing(self) -> PackingReport:
        """Whether the encoder runs without padding, and if not, why."""
        return check_packing(self.encoder)

    def get_input_embeddings(self) -> Any:
        """The encoder's."""
        return self.encoder.get_input_embeddings()

    def features(
        self, input_ids: Tensor, lengths: Tensor, token_type_ids: Tensor | None = None,
        answer_tokens: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """(S, W) float32 features of S sequences, whose T tokens are one flat run; W + 1 with a length feature.

        Args:
            input_ids: (T,).
            lengths: (S,) tokens of each, at least 1.
            token_type_ids: (T,); None for encoders that have no types, or zeros.
            answer_tokens: (S,) tokens of each answer before it was cut, for the length feature.

        Raises:
            ValueError: Lengths that do not add up to T; no ``answer_tokens`` with a length feature.
        """
        sizes = lengths.tolist()
        if sum(sizes) != len(input_ids) or min(sizes, default=0) < 1:
            raise ValueError(f"PairwiseModel: lengths are {sizes!r:.60} for {len(input_ids)} tokens; needed their sum")
        kinds = token_type_ids if (getattr(self.config.encoder, "type_vocab_size", 0) or 0) > 1 else None
        if self.config.length_feature and answer_tokens is None:
            raise ValueError("PairwiseModel: answer_tokens is None; needed with length_feature=True")
        packing = self.packing
        if packing.packed:
            states = encode_packed(self.encoder, input_ids, sizes, kinds, packing.offset)
        else:
            states = encode_padded(self.encoder, input_ids, sizes, kinds)
        with torch.autocast(states.device.type, enabled=False):
            features = self.pool(states, lengths)
            if self.config.length_feature and answer_tokens is not None:
                features = torch.cat([features, answer_tokens.float().log1p()[:, None] - _USUAL_LENGTH], -1)
            return features

    def forward(
        self, input_ids: Tensor, lengths: Tensor, pairs: Tensor, token_type_ids: Tensor | None = None,
        answer_tokens: Tensor | None = None, labels: Tensor | None = None, both_orders: bool = False,
    ) -> PairwiseOutput:  # fmt: skip
        """Logits of pairs of sequences; `PairwiseCollator` makes the arguments.

        Args:
            input_ids: (T,) tokens of all sequences.
            lengths: (S,).
            pairs: (P, 2), which sequences are A and B.
            token_type_ids: (T,).
            answer_tokens: (S,); see `features`.
            labels: (P,) classes or (P, C) shares.
            both_orders: Also give the logits with A and B exchanged.

        Raises:
            ValueError: Lengths or labels that do not fit; no ``answer_tokens`` with a length feature.
        """
        features = self.features(input_ids, lengths, token_type_ids, answer_tokens)
        with torch.autocast(features.device.type, enabled=False):
            return self.compare(features[pairs[:, 0]], features[pairs[:, 1]], labels, both_orders)

    def compare(self, a: Tensor, b: Tensor, labels: Tensor | None = None, both_orders: bool = False) -> PairwiseOutput:
        """The same from (P, W) features of A and of B, which need no encoder."""
        a, b = (part.to(self.head.outer.weight.dtype) for part in (a, b))
        divisor = 1.0 if self.training else self.head.temperature
        logits = self.head(a, b) / divisor
        consistent = self.config.swap_consistency if self.config.link == "concat" and labels is not None else 0.0
        other = self.head(b, a) / divisor if both_orders or consistent else None
        loss = scores = None
        if self.config.link in ("davidson", "rao-kupper") and not self.training:
            scores = torch.stack([self.head.score(a), self.head.score(b)], -1)
        if labels is not None:
            smoothing = self.config.label_smoothing
            loss = pairwise_loss(logits, labels, label_smoothing=smoothing)
            if consistent and other is not None:
                turned = pairwise_loss(swapped(other), labels, label_smoothing=smoothing)
                loss = (loss + turned) / 2 + consistent * swap_divergence(logits, other)
        return PairwiseOutput(loss, logits, scores, other if both_orders else None)

    def dataset(self, pairs: Sequence[Any], *, progress: bool = True) -> PairwiseDataset:
        """Pairs as this model reads them."""
        return PairwiseDataset(pairs, self._own_tokenizer, self.config, progress=progress)

    def predict(
        self, prompts: Sequence[str], a: Sequence[str], b: Sequence[str], *, batch_size: int = 32, progress: bool = True
    ) -> Predictions:
        """Verdicts on many pairs.

        Args:
            prompts: One for each pair.
            a: Answers called A.
            b: Answers called B.
            batch_size: Pairs at once.
            progress: Show a bar.

        Raises:
            ValueError: Lists of different lengths or empty ones, texts that are not text, empty answers, no tokenizer.
        """
        if any(isinstance(part, str) for part in (prompts, a, b)):
            raise ValueError("predict: prompts, a and b are texts; needed lists of texts")
        if not len(prompts) == len(a) == len(b):
            raise ValueError(
                f"predict: {len(prompts)} prompts, {len(a)} and {len(b)} answers; needed lists of one length"
            )
        data = self.dataset(list(zip(prompts, a, b, strict=True)), progress=progress)
        return predict_pairs(self, data, batch_size=batch_size, progress=progress)

    @torch.no_grad()
    def rank(self, prompt: str, answers: Sequence[str]) -> Ranking:
        """A tournament of all pairs of answers to one prompt, each of which is encoded once.

        Args:
            prompt: What was asked.
            answers: Two or more.

        Raises:
            ValueError: Fewer than two answers, texts that are not text, empty answers, no tokenizer.
        """
        if isinstance(answers, str) or len(answers) < 2:
            raise ValueError(f"rank: answers are {answers!r:.60}, needed two texts or more")
        pairs = [(i, j) for j in range(len(answers)) for i in range(j)]
        sequences = answers_to(prompt, answers, self._own_tokenizer, self.config)
        batch = {name: value.to(self.device) for name, value in flat_batch([(sequences, pairs)]).items()}
        with evaluating(self):
            found = self(**batch, both_orders=True)
        orders = [log_probabilities(found.logits), swapped(log_probabilities(found.swapped_logits))]
        return ranking_of(torch.stack(orders).exp().mean(0).cpu(), pairs, len(answers))

    @property
    def _own_tokenizer(self) -> Any:
        if self.tokenizer is None:
            raise ValueError("PairwiseModel: it has no tokenizer; needed model.tokenizer = the encoder's")
        return self.tokenizer


AutoConfig.register(PairwiseConfig.model_type, PairwiseConfig, exist_ok=True)
AutoModel.register(PairwiseConfig, PairwiseModel, exist_ok=True)
