"""`PairwiseModel`: an encoder or a decoder with a head that compares two answers.

Shapes: T tokens of all sequences, S sequences, P pairs, C classes, W width of the features, F
surface features.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from model_components._formats import reading
from model_components._hub import hub_id, split_revision

from .checks import check_encoder, check_loadable, check_tokenizer, most_tokens
from .config import PairwiseConfig
from .data.collate import PairwiseDataset, answers_to
from .data.template import Template
from .inference import Predictions, Ranking, predict_pairs, rank_answers
from .layers import PairwiseHead, Pool
from .packing import PackingReport, check_packing
from .pairs import WordsLike
from .storage import SavedJudge
from .surface import SURFACE
from .surgery import keep_lowest_


class PairwiseModel(SavedJudge):
    """An encoder with a `PairwiseHead` that decides which of two answers to a prompt is better.

    The encoder can also be a decoder, such as a causal language model without its head. All answers
    of a batch go through the encoder in one pass. They are not padded if `check_packing` finds that
    this does not change the encoder's outputs. Features and head are float32, whatever the
    encoder's dtype is.

    Args:
        config: The settings of encoder and head; see `from_encoder` for a pretrained encoder.
        encoder: An existing encoder; default: an untrained one, built from ``config.encoder``.

    Attributes:
        tokenizer: The tokenizer for `predict` and `rank`; it is saved and loaded with the model.
        packing: Whether the encoder runs without padding, and if not, why. If
            ``model.encoder.set_attn_implementation`` later sets another attention implementation,
            that one is used, and sequences are padded.

    Raises:
        ValueError: ``config.encoder`` is None.

    >>> from transformers import BertConfig
    >>> small = BertConfig(
    ...     vocab_size=9,
    ...     hidden_size=8,
    ...     num_hidden_layers=1,
    ...     num_attention_heads=1,
    ...     intermediate_size=8,
    ... )
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
    _keep_in_fp32_modules_strict = ["pool", "head"]  # noqa: RUF012, as in the base class

    def __init__(self, config: PairwiseConfig, encoder: PreTrainedModel | None = None):
        super().__init__(config)
        if config.encoder is None:
            raise ValueError(
                "PairwiseModel: expected a config with an encoder, got none; load a trained judge "
                "with from_pretrained, or make a new one with from_encoder"
            )
        inner: Any = encoder
        if encoder is None:
            # use the dtype that was passed to from_pretrained, not the saved one
            inner = AutoModel.from_config(config.encoder, dtype=torch.get_default_dtype())
        else:
            for module in inner.modules():
                module._is_hf_initialized = True  # do not initialize its weights again
        _drop_pooler_(inner)
        inner.config.use_cache = False  # keys and values are never reused
        self.encoder = inner
        self.pool = Pool(config.pooling)
        self.head = PairwiseHead(
            config.encoder.hidden_size * len(config.pooling),
            link=config.link,
            ties=config.ties,
            hidden_features=config.hidden_features,
            dropout=config.dropout,
            surface=config.surface,
            uncertainty=config.uncertainty,
        )
        self.post_init()
        # from_pretrained builds the model on the meta device, and checks packing after loading
        if inner.device.type != "meta":
            self.packing: PackingReport = check_packing(inner)

    def _init_weights(self, module: nn.Module) -> None:
        # the encoder's class initializes the encoder's weights
        if isinstance(module, PairwiseHead):
            module.reset_parameters()

    @classmethod
    def from_encoder(
        cls,
        encoder: str | Path | PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | str | Path | None = None,
        *,
        dtype: torch.dtype | None = torch.float32,
        depth: int | None = None,
        revision: str | None = None,
        token: str | bool | None = None,
        trust_remote_code: bool = False,
        **options: Any,
    ) -> PairwiseModel:
        """Build a judge from a pretrained encoder, with a new head.

        Args:
            encoder: A folder, a hub id, or a model. The encoder of a model is changed in place: its
                pooler and the layers above ``depth`` are removed, it is cast to ``dtype`` and, if
                it can be packed, it gets another attention implementation. A model's own head is
                ignored.
            tokenizer: The encoder's tokenizer, or its folder or hub id; default: the tokenizer in
                the encoder's folder or hub repository, or none if ``encoder`` is a model.
            dtype: The dtype of the encoder's weights; None keeps the checkpoint's dtype. bfloat16
                suits a frozen encoder. Train an encoder in half precision only if you know that
                half precision works for this encoder.
            depth: The number of the encoder's layers to keep, from the lowest; default: all. Fewer
                layers are cheaper, and can judge better.
            revision: The revision of the encoder on the hub, and of a tokenizer that comes with it.
            token: The access token for the hub.
            trust_remote_code: Whether to run code that comes with the encoder or the tokenizer.
            **options: Fields of `PairwiseConfig`. The defaults here are the settings that performed
                best: ``link="antisymmetric"``, ``pooling=["mean", "last"]`` and all surface
                features (none with ``link="concat"``).

        Raises:
            ValueError: The tokenizer is not the encoder's or has only special tokens; the encoder
                returns no hidden states or cannot be rebuilt from its config; an option is unknown
                or invalid; or ``depth`` is out of range.
        """
        # check the options before anything is downloaded
        _check_options(options)
        options = _best_options(options)
        if isinstance(encoder, (str, Path)):
            place, at = split_revision(encoder)
            hub = {
                "revision": revision or at,
                "token": token,
                "trust_remote_code": trust_remote_code,
            }
            # token=False means to send no token, not even the stored one
            hub = {name: value for name, value in hub.items() if value is not None}
            encoder = _load_encoder(place, dtype, hub)
            if tokenizer is None:
                tokenizer = _load_tokenizer(place, hub)
        if isinstance(tokenizer, (str, Path)):
            name, at = split_revision(tokenizer)
            hub = {
                "revision": at or "main",
                "token": token,
                "trust_remote_code": trust_remote_code,
            }
            tokenizer = _load_tokenizer(name, hub)
        inner = _text_encoder(encoder)
        if dtype is not None:
            inner = inner.to(dtype)
        if depth is not None:
            keep_lowest_(inner, depth)
        # drop the pooler before check_encoder runs the encoder
        _drop_pooler_(inner)
        # check_packing would not raise for a failing encoder, but report that it must be padded
        check_encoder(inner)
        check_loadable(inner)
        packing = check_packing(inner)
        if tokenizer is not None:
            check_tokenizer(tokenizer, inner)
        encoder_config = copy.deepcopy(inner.config)
        # remove a local path
        encoder_config._name_or_path = hub_id(encoder_config._name_or_path or "") or ""
        config = PairwiseConfig(encoder=encoder_config, **options)
        # saved as a number, so that a loaded judge truncates texts as the trained one did
        config.max_tokens = most_tokens(
            "from_encoder", config.max_tokens, inner, packing, tokenizer
        )
        model = cls(config, inner)
        model.tokenizer = tokenizer
        if tokenizer is not None:
            Template(tokenizer, config)  # raises if max_tokens is too small for text
        return model

    def dataset(self, pairs: Sequence[object], *, progress: bool = True) -> PairwiseDataset:
        """Return a data set of pairs for this model; see `PairwiseDataset`."""
        return PairwiseDataset(pairs, self._own_tokenizer, self.config, progress=progress)

    def predict(
        self,
        prompts: Sequence[WordsLike],
        a: Sequence[WordsLike],
        b: Sequence[WordsLike],
        *,
        batch_size: int = 32,
        progress: bool = True,
    ) -> Predictions:
        """Predict the verdicts on pairs of answers.

        Args:
            prompts: The prompts, one for each pair.
            a: The answers called A.
            b: The answers called B.
            batch_size: Number of pairs in a batch.
            progress: Whether to show a progress bar.

        Raises:
            ValueError: The lists are empty or differ in length, an item is neither a string nor a
                list of turns, or the model has no tokenizer.
        """
        # a string is a sequence, too: its characters would be judged one by one
        if any(isinstance(part, str) for part in (prompts, a, b)):
            raise ValueError(
                "predict: expected lists of texts for prompts, a and b, got a single string"
            )
        if not len(prompts) == len(a) == len(b):
            raise ValueError(
                f"predict: expected lists of equal length, got {len(prompts)} prompts, {len(a)} "
                f"answers in a and {len(b)} in b"
            )
        data = self.dataset(list(zip(prompts, a, b, strict=True)), progress=progress)
        return predict_pairs(self, data, batch_size=batch_size, progress=progress)

    def rank(
        self, prompt: WordsLike, answers: Sequence[WordsLike], *, batch_size: int = 256
    ) -> Ranking:
        """Rank several answers to one prompt; each answer is encoded once.

        Link ``"davidson"`` orders answers by their scores. The other links compare each pair in
        both orders and fit Bradley-Terry scores to the verdicts.

        Args:
            prompt: The prompt: a string, or a list of turns.
            answers: One or more answers, each a string or a list of turns.
            batch_size: Number of pairs that are compared at once; a quarter as many answers are
                encoded at once.

        Raises:
            ValueError: There are no answers, ``batch_size`` is below 1, the prompt or an answer is
                neither a string nor a list of turns, or the model has no tokenizer.
        """
        if isinstance(answers, str) or not len(answers):
            raise ValueError(
                f"rank: answers is {answers!r:.60}, expected a list of 1 or more texts"
            )
        if batch_size < 1:
            raise ValueError(f"rank: batch_size is {batch_size}, expected 1 or more")
        return rank_answers(
            self, answers_to(prompt, answers, self._own_tokenizer, self.config), batch_size
        )

    @property
    def _own_tokenizer(self) -> PreTrainedTokenizerBase:
        if self.tokenizer is None:
            raise ValueError(
                "PairwiseModel: expected a model with a tokenizer, got none; set model.tokenizer "
                "to the encoder's tokenizer"
            )
        return self.tokenizer


def _check_options(options: Mapping[str, object]) -> None:
    """Check that all options are fields of `PairwiseConfig`."""
    # encoder is a separate argument, and rest stands for transformers' fields
    fields = [
        name
        for name in inspect.signature(PairwiseConfig).parameters
        if name not in ("encoder", "rest")
    ]
    if unknown := sorted(set(options) - set(fields)):
        raise ValueError(
            f"from_encoder: expected options among {', '.join(fields)}, got {', '.join(unknown)}"
        )


def _load_encoder(place: str, dtype: torch.dtype | None, hub: Mapping[str, Any]) -> PreTrainedModel:
    """Load a model from a folder or the hub; if ``dtype`` is None, in its checkpoint's dtype."""
    with reading(place, "from_encoder"):
        return AutoModel.from_pretrained(place, dtype="auto" if dtype is None else dtype, **hub)


def _load_tokenizer(place: str, hub: Mapping[str, Any]) -> Any:
    """Load a tokenizer from a folder or the hub."""
    with reading(place, "from_encoder"):
        return AutoTokenizer.from_pretrained(place, **hub)


class _NoPooler(nn.Module):
    """A pooler that returns the states unchanged and ignores other arguments."""

    def forward(self, states: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        return states


def _drop_pooler_(encoder: Any) -> None:
    """Remove an encoder's pooler, if it has one.

    `Pool` replaces it, and DDP fails if parameters get no gradients.
    """
    if getattr(encoder, "pooler", None) is not None:
        encoder.pooler = _NoPooler()  # not None, because SqueezeBERT always calls its pooler


def _text_encoder(model: object) -> Any:
    """Return a model's encoder; raise a ValueError if it does not encode text."""
    if not isinstance(model, PreTrainedModel):
        raise ValueError(
            f"from_encoder: expected a transformers model as encoder, got a {type(model).__name__}"
        )
    # a model with a head keeps its encoder under this name; a bare encoder lacks it
    inner: Any = getattr(model, model.base_model_prefix, model)
    if (
        getattr(inner.config, "is_encoder_decoder", False)
        or not hasattr(inner.config, "hidden_size")
        or inner.main_input_name != "input_ids"  # the model takes images or audio
    ):
        raise ValueError(
            "from_encoder: expected an encoder that computes hidden states of text, got "
            f"{type(inner).__name__}"
        )
    return inner


AutoConfig.register(PairwiseConfig.model_type, PairwiseConfig, exist_ok=True)
AutoModel.register(PairwiseConfig, PairwiseModel, exist_ok=True)


def _best_options(options: dict[str, Any]) -> dict[str, Any]:
    """Return options of `PairwiseConfig`, completed with the defaults that performed best."""
    best: dict[str, Any] = {"link": "antisymmetric", "pooling": ["mean", "last"]}
    if options.get("link") != "concat":  # concat takes no surface features
        best["surface"] = list(SURFACE)
    return best | options
