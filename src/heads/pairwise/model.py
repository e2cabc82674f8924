"""`PairwiseModel`: an encoder or a decoder, and a head that says which of two answers is better, or that they tie.

Shapes: T tokens of all sequences, S sequences, P pairs, C classes, W width of the features, F of surface features.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import ModelOutput

from model_components._hub import hub_id, split_revision

from .checks import check_encoder, check_tokenizer, most_tokens
from .collate import PairwiseDataset, answers_to
from .config import PairwiseConfig
from .freeze import keep_lowest_
from .functional import pairwise_loss, swap_divergence, swapped
from .inference import Predictions, Ranking, predict_pairs, rank_answers
from .links import SCORED, PairwiseHead, Pool
from .packing import ATTENTION, PackingReport, check_packing, encode_packed, encode_padded
from .saving import SavedJudge
from .surface import SURFACE, columns_of
from .template import Template


@dataclass
class PairwiseOutput(ModelOutput):
    """Logits of A, B and tie, (P, C), and with labels the loss; scores (P, 2) and the other order's logits, if any."""

    loss: Tensor | None = None
    logits: Tensor | None = None
    scores: Tensor | None = None
    swapped_logits: Tensor | None = None


class PairwiseModel(SavedJudge):
    """An encoder with a `PairwiseHead`: prompts and two answers to probabilities of A, B and tie.

    The encoder may be a decoder, such as any causal language model without its head. All answers of a batch go through
    it in one pass, without padding where `check_packing` finds that this changes nothing. Features and head are
    float32, whatever the encoder is.

    Args:
        config: Of encoder and head; see `from_encoder` for a pretrained one.
        encoder: One that is there already; default: made of its config, untrained.

    Attributes:
        tokenizer: What `predict` and `rank` use; saved and loaded with the model.
        packing: Whether the encoder runs without padding, and if not, why. An attention that is chosen afterwards, by
            ``model.encoder.set_attn_implementation``, stays, and sequences are padded then.

    Raises:
        ValueError: A config without an encoder's.

    >>> from transformers import BertConfig
    >>> small = BertConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)
    >>> model = PairwiseModel(PairwiseConfig(encoder=small)).eval()
    >>> ids, lengths = torch.tensor([2, 3, 4, 5, 6]), torch.tensor([2, 3])
    >>> model(input_ids=ids, lengths=lengths, pairs=torch.tensor([[0, 1]])).logits.shape
    torch.Size([1, 3])
    """

    config_class = PairwiseConfig
    base_model_prefix = "pairwise"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _keep_in_fp32_modules_strict = ["pool", "head"]  # noqa: RUF012, the base class's own way

    def __init__(self, config: PairwiseConfig, encoder: PreTrainedModel | None = None):
        super().__init__(config)
        if config.encoder is None:
            raise ValueError(
                "PairwiseModel: there is no encoder in its config, so it is no judge; needed one that was trained and "
                "saved, or from_encoder, which makes a new one"
            )
        dtype_asked = {"dtype": torch.get_default_dtype()}  # what from_pretrained was asked for, not what was saved
        inner: Any = AutoModel.from_config(config.encoder, **dtype_asked) if encoder is None else encoder
        for module in () if encoder is None else inner.modules():
            module._is_hf_initialized = True  # its weights are not to be drawn again
        if getattr(inner, "pooler", None) is not None:
            inner.pooler = None  # what pools here is ours, and parameters without gradients stop DDP
        inner.config.use_cache = False  # of keys and values, which nothing here asks for again
        self.encoder = inner
        self.pool = Pool(config.encoder.hidden_size, config.pooling)
        self.head = PairwiseHead(
            config.encoder.hidden_size * len(config.pooling), link=config.link, ties=config.ties,
            hidden_features=config.hidden_features, dropout=config.dropout, surface=config.surface,
        )  # fmt: skip
        self.post_init()
        if inner.device.type != "meta":
            self.packing: PackingReport = check_packing(inner)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, (Pool, PairwiseHead)):
            module.reset_parameters()

    @classmethod
    def from_encoder(
        cls, encoder: str | Path | PreTrainedModel, tokenizer: PreTrainedTokenizerBase | str | Path | None = None,
        *, dtype: torch.dtype | None = torch.float32, depth: int | None = None, revision: str | None = None,
        token: str | bool | None = None, trust_remote_code: bool = False, **options: Any,
    ) -> PairwiseModel:  # fmt: skip
        """A new head on a pretrained encoder.

        Args:
            encoder: A folder, a hub id, or a model, which is taken over: of one with a head of its own the encoder
                inside, without its pooler, in ``dtype`` and with our attention.
            tokenizer: The encoder's, or where it is; loaded from the encoder's place when None and a place is given.
            dtype: Of the encoder's weights; None keeps the checkpoint's. bfloat16 serves one that stays frozen; half
                precision is else for those who know that the encoder can be trained in it.
            depth: How many of the encoder's layers there are to be, the lowest; default all. Fewer are cheaper, and
                can judge better.
            revision: Of encoder and tokenizer on the hub.
            token: Of the hub.
            trust_remote_code: Run code that comes with a model.
            **options: Fields of `PairwiseConfig`.

        Raises:
            ValueError: A tokenizer that is not the encoder's, an encoder without hidden states, an unknown option, more
                layers than there are.
        """
        fields = [name for name in inspect.signature(PairwiseConfig).parameters if name not in ("encoder", "rest")]
        if not set(options) <= set(fields):
            unknown = ", ".join(sorted(set(options) - set(fields)))
            raise ValueError(f"from_encoder: there is no option {unknown}; there are {', '.join(fields)}")
        if isinstance(encoder, (str, Path)):
            place, at = split_revision(encoder)
            hub = {"revision": revision or at, "token": token, "trust_remote_code": trust_remote_code}
            hub = {name: value for name, value in hub.items() if value}
            try:
                encoder = AutoModel.from_pretrained(place, dtype="auto" if dtype is None else dtype, **hub)
            except OSError as error:
                reason = str(error).strip().split("\n")[0]
                raise ValueError(
                    f"from_encoder: {place} is no model's folder, nor found on the hub ({reason})"
                ) from error
            tokenizer = AutoTokenizer.from_pretrained(place, **hub) if tokenizer is None else tokenizer
        if isinstance(tokenizer, (str, Path)):
            tokenizer = AutoTokenizer.from_pretrained(str(tokenizer))
        if not isinstance(encoder, PreTrainedModel):
            raise ValueError(f"from_encoder: encoder is a {type(encoder).__name__}; needed a transformers model")
        inner: Any = getattr(encoder, encoder.base_model_prefix, encoder)
        inner = inner if dtype is None else inner.to(dtype)
        if getattr(inner.config, "is_encoder_decoder", False) or not hasattr(inner.config, "hidden_size"):
            raise ValueError(f"from_encoder: {type(inner).__name__} is no encoder that gives hidden states of a text")
        if depth is not None:
            keep_lowest_(inner, depth)
        check_encoder(inner)
        packing = check_packing(inner)
        if tokenizer is not None:
            check_tokenizer(tokenizer, inner)
        encoder_config = copy.deepcopy(inner.config)
        encoder_config._name_or_path = hub_id(encoder_config._name_or_path or "") or ""  # no folder of this machine
        config = PairwiseConfig(encoder=encoder_config, **options)
        config.max_tokens = most_tokens("from_encoder", config.max_tokens, inner, packing, tokenizer)
        model = cls(config, inner)
        model.tokenizer = tokenizer
        if tokenizer is not None:
            Template(tokenizer, config)  # refuses what leaves no room for text
        return model

    @property
    def packs(self) -> bool:
        """Whether sequences go through the encoder without padding now."""
        return self.packing.packed and self._base.config._attn_implementation == ATTENTION

    @property
    def _base(self) -> Any:
        """The encoder without what peft may have put around it."""
        return self.encoder.get_base_model() if hasattr(self.encoder, "get_base_model") else self.encoder

    def get_input_embeddings(self) -> Any:
        """The encoder's."""
        return self.encoder.get_input_embeddings()

    def features(
        self, input_ids: Tensor, lengths: Tensor, begins: Tensor | None = None, token_type_ids: Tensor | None = None
    ) -> Tensor:
        """(S, W) float32 features of S sequences, whose T tokens are one flat run.

        Args:
            input_ids: (T,).
            lengths: (S,) tokens of each, at least 1.
            begins: (S,), where answers begin in their sequences; default at once.
            token_type_ids: (T,); None for encoders that have no types, or zeros.

        Raises:
            ValueError: Lengths that do not add up to T.
        """
        sizes = lengths.tolist()
        if sum(sizes) != len(input_ids) or min(sizes, default=0) < 1:
            raise ValueError(f"PairwiseModel: lengths are {sizes!r:.60} for {len(input_ids)} tokens; needed their sum")
        kinds = token_type_ids if (getattr(self.config.encoder, "type_vocab_size", 0) or 0) > 1 else None
        if self.packs:
            states = encode_packed(self.encoder, input_ids, sizes, kinds, self.packing.offset)
        else:
            states = encode_padded(self.encoder, input_ids, sizes, kinds)
        with torch.autocast(states.device.type, enabled=False):
            return self.pool(states, lengths, torch.zeros_like(lengths) if begins is None else begins)

    def forward(
        self, input_ids: Tensor | None = None, lengths: Tensor | None = None, pairs: Tensor | None = None,
        begins: Tensor | None = None, token_type_ids: Tensor | None = None, surface: Tensor | None = None,
        features: Tensor | None = None, labels: Tensor | None = None, both_orders: bool = False,
    ) -> PairwiseOutput:  # fmt: skip
        """Logits of pairs of sequences; `PairwiseCollator` makes the arguments.

        Args:
            input_ids: (T,) tokens of all sequences.
            lengths: (S,).
            pairs: (P, 2), which sequences are A and B.
            begins: (S,); see `features`.
            token_type_ids: (T,).
            surface: (S, F) surface features, for a model that looks at them.
            features: (S, W) in place of tokens, of a data set that was encoded.
            labels: (P,) classes or (P, C) shares.
            both_orders: Also give the logits with A and B exchanged.

        Raises:
            ValueError: Lengths or labels that do not fit; neither tokens nor features.
        """
        if features is None:
            if input_ids is None or lengths is None:
                raise ValueError("PairwiseModel: input_ids, lengths and features are None; needed tokens or features")
            features = self.features(input_ids, lengths, begins, token_type_ids)
        if pairs is None:
            raise ValueError("PairwiseModel: pairs are None; needed which sequences are compared")
        with torch.autocast(features.device.type, enabled=False):
            sides = [features[pairs[:, k]] for k in (0, 1)]
            looks = [None if surface is None else surface[pairs[:, k]] for k in (0, 1)]
            return self.compare(*sides, *looks, labels=labels, both_orders=both_orders)

    def compare(
        self, a: Tensor, b: Tensor, surface_a: Tensor | None = None, surface_b: Tensor | None = None, *,
        labels: Tensor | None = None, both_orders: bool = False, alike: str | None = None,
    ) -> PairwiseOutput:  # fmt: skip
        """The same from (P, W) features of A and of B and (P, F) surface features, which need no encoder.

        Args:
            a: Of A.
            b: Of B.
            surface_a: Of A.
            surface_b: Of B.
            labels: (P,) classes or (P, C) shares.
            both_orders: Also give the logits with A and B exchanged.
            alike: Take both answers to be the same in this: ``"encoder"``, ``"length"``, ``"style"``, ``"overlap"``.
        """
        dtype = self.head.outer.weight.dtype
        a, b = a.to(dtype), b.to(dtype)
        surface_a, surface_b = (look if look is None else look.to(dtype) for look in (surface_a, surface_b))
        if alike == "encoder":
            a = b = (a + b) / 2
        elif alike is not None and surface_a is not None and surface_b is not None:
            columns = columns_of([alike])
            mean = (surface_a[:, columns] + surface_b[:, columns]) / 2
            surface_a, surface_b = surface_a.clone(), surface_b.clone()
            surface_a[:, columns] = surface_b[:, columns] = mean
        divisor = 1.0 if self.training else self.head.temperature
        consistent = self.config.swap_consistency if self.config.link == "concat" and labels is not None else 0.0
        loss = scores = other = None
        if self.config.link in SCORED:
            scores = torch.stack([self.head.score(a, surface_a), self.head.score(b, surface_b)], -1)
            logits = self.head.linked(*scores.unbind(-1)) / divisor
            other = swapped(logits) if both_orders else None
        else:
            logits = self.head(a, b, surface_a, surface_b) / divisor
            other = self.head(b, a, surface_b, surface_a) / divisor if both_orders or consistent else None
        if labels is not None:
            smoothing = self.config.label_smoothing
            loss = pairwise_loss(logits, labels, label_smoothing=smoothing)
            if consistent and other is not None:
                turned = pairwise_loss(swapped(other), labels, label_smoothing=smoothing)
                loss = (loss + turned) / 2 + consistent * swap_divergence(logits, other)
        return PairwiseOutput(loss, logits, None if self.training else scores, other if both_orders else None)

    @property
    def parts(self) -> tuple[str, ...]:
        """What verdicts may be made of: the encoder, and kinds of surface features."""
        return ("encoder", *(kind for kind in SURFACE if kind in self.config.surface))

    def dataset(self, pairs: Sequence[Any], *, progress: bool = True) -> PairwiseDataset:
        """Pairs as this model reads them."""
        return PairwiseDataset(pairs, self._own_tokenizer, self.config, progress=progress)

    def predict(
        self, prompts: Sequence[Any], a: Sequence[Any], b: Sequence[Any], *, batch_size: int = 32, progress: bool = True
    ) -> Predictions:
        """Verdicts on many pairs.

        Args:
            prompts: One for each pair.
            a: Answers called A.
            b: Answers called B.
            batch_size: Pairs at once.
            progress: Show a bar.

        Raises:
            ValueError: Lists of different lengths or empty ones, what is neither text nor turns, no tokenizer.
        """
        if any(isinstance(part, str) for part in (prompts, a, b)):
            raise ValueError("predict: prompts, a and b are texts; needed lists of texts")
        if not len(prompts) == len(a) == len(b):
            raise ValueError(
                f"predict: {len(prompts)} prompts, {len(a)} and {len(b)} answers; needed lists of one length"
            )
        data = self.dataset(list(zip(prompts, a, b, strict=True)), progress=progress)
        return predict_pairs(self, data, batch_size=batch_size, progress=progress)

    def rank(self, prompt: Any, answers: Sequence[Any], *, batch_size: int = 256) -> Ranking:
        """The order of several answers to one prompt, each of which is encoded once.

        A link that has scores puts answers in their order; another compares each pair, in both orders, and the scores
        are those of a tournament.

        Args:
            prompt: What was asked: a text, or turns.
            answers: One or more.
            batch_size: Pairs that are compared at once, and a quarter of it answers that are encoded at once.

        Raises:
            ValueError: No answers, what is neither text nor turns, no tokenizer.
        """
        if isinstance(answers, str) or not len(answers):
            raise ValueError(f"rank: answers are {answers!r:.60}, needed a text or more")
        if batch_size < 1:
            raise ValueError(f"rank: batch_size is {batch_size}, needed 1 or more")
        return rank_answers(self, answers_to(prompt, answers, self._own_tokenizer, self.config), batch_size)

    @property
    def _own_tokenizer(self) -> Any:
        if self.tokenizer is None:
            raise ValueError("PairwiseModel: it has no tokenizer; needed model.tokenizer = the encoder's")
        return self.tokenizer


AutoConfig.register(PairwiseConfig.model_type, PairwiseConfig, exist_ok=True)
AutoModel.register(PairwiseConfig, PairwiseModel, exist_ok=True)
