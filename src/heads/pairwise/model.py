"""`PairwiseModel`: an encoder or a decoder with a head that compares two answers.

Shapes: T tokens of all sequences, S sequences, P pairs, C classes, W width of the features, F of
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
    """An encoder with a `PairwiseHead`: prompts and two answers to probabilities of A, B and tie.

    The encoder may be a decoder, such as any causal language model without its head. All answers of
    a batch go through it in one pass, without padding where `check_packing` finds that this changes
    nothing. Features and head are float32, whatever the encoder is.

    Args:
        config: The settings of encoder and head; see `from_encoder` for a pretrained one.
        encoder: One that is there already; default: made of its config, untrained.

    Attributes:
        tokenizer: The tokenizer for `predict` and `rank`; it is saved and loaded with the model.
        packing: Whether the encoder runs without padding, and if not, why. An attention that is
            chosen afterwards, by ``model.encoder.set_attn_implementation``, stays, and sequences
            are padded then.

    Raises:
        ValueError: A config without an encoder's.

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
    _keep_in_fp32_modules_strict = ["pool", "head"]  # noqa: RUF012, the base class's own way

    def __init__(self, config: PairwiseConfig, encoder: PreTrainedModel | None = None):
        super().__init__(config)
        if config.encoder is None:
            raise ValueError(
                "PairwiseModel: expected a config with an encoder, got none; load a trained judge "
                "with from_pretrained, or make a new one with from_encoder"
            )
        inner: Any = encoder
        if encoder is None:
            # what from_pretrained was asked for, not what was saved
            inner = AutoModel.from_config(config.encoder, dtype=torch.get_default_dtype())
        else:
            for module in inner.modules():
                module._is_hf_initialized = True  # its weights are not to be drawn again
        if getattr(inner, "pooler", None) is not None:
            # what pools here is ours, and parameters without gradients stop DDP
            inner.pooler = None
        inner.config.use_cache = False  # of keys and values, which nothing here asks for again
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
        # from_pretrained makes the model without data, and checks when the weights are there
        if inner.device.type != "meta":
            self.packing: PackingReport = check_packing(inner)

    def _init_weights(self, module: nn.Module) -> None:
        # the encoder's own class draws the encoder's weights
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
        """A new head on a pretrained encoder.

        Args:
            encoder: A folder, a hub id, or a model, which is changed in place: of a model with a
                head its encoder is taken, loses its pooler, is cast to ``dtype`` and gets our
                attention.
            tokenizer: The encoder's, or where it is; loaded from the encoder's place when None and
                a place is given.
            dtype: The dtype of the encoder's weights; None keeps the checkpoint's. bfloat16 is good
                for an encoder that stays frozen; train one in half precision only if you know that
                it can be.
            depth: The number of the encoder's layers to keep, from the lowest; default: all. Fewer
                are cheaper, and can judge better.
            revision: The revision of encoder and tokenizer on the hub.
            token: The access token of the hub.
            trust_remote_code: Run code that comes with a model.
            **options: Fields of `PairwiseConfig`. By default the settings that judged best are
                taken: ``link="antisymmetric"``, ``pooling=["mean", "last"]`` and all surface
                features (none with ``link="concat"``, which takes none).

        Raises:
            ValueError: A tokenizer that is not the encoder's or has no words, an encoder without
                hidden states or that could not be loaded again, an unknown option, more layers than
                there are.
        """
        # first of all: a misspelled option must not cost a download
        _check_options(options)
        options = _best_options(options)
        if isinstance(encoder, (str, Path)):
            place, at = split_revision(encoder)
            hub = {
                "revision": revision or at,
                "token": token,
                "trust_remote_code": trust_remote_code,
            }
            # token=False means to send none, not even the one that is stored
            hub = {name: value for name, value in hub.items() if value is not None}
            encoder = _load_encoder(place, dtype, hub)
            if tokenizer is None:
                with reading(place, "from_encoder"):
                    tokenizer = AutoTokenizer.from_pretrained(place, **hub)
        if isinstance(tokenizer, (str, Path)):
            name, at = split_revision(tokenizer)
            with reading(name, "from_encoder"):
                tokenizer = AutoTokenizer.from_pretrained(
                    name, revision=at or "main", token=token, trust_remote_code=trust_remote_code
                )
        if not isinstance(encoder, PreTrainedModel):
            raise ValueError(
                f"from_encoder: encoder is a {type(encoder).__name__}; expected a transformers "
                "model"
            )
        # a model with a head keeps its encoder under this name; a bare encoder lacks it
        inner: Any = getattr(encoder, encoder.base_model_prefix, encoder)
        inner = inner if dtype is None else inner.to(dtype)
        if (
            getattr(inner.config, "is_encoder_decoder", False)
            or not hasattr(inner.config, "hidden_size")
            or inner.main_input_name != "input_ids"  # of pictures or sounds
        ):
            raise ValueError(
                "from_encoder: expected an encoder that gives hidden states of a text, got "
                f"{type(inner).__name__}"
            )
        if depth is not None:
            keep_lowest_(inner, depth)
        # a judge has no pooler, and some encoders do not run without theirs
        if getattr(inner, "pooler", None) is not None:
            inner.pooler = None
        # check_packing would not notice: to it an encoder that fails is one to be padded
        check_encoder(inner)
        check_loadable(inner)
        packing = check_packing(inner)
        if tokenizer is not None:
            check_tokenizer(tokenizer, inner)
        encoder_config = copy.deepcopy(inner.config)
        # no folder of this machine
        encoder_config._name_or_path = hub_id(encoder_config._name_or_path or "") or ""
        config = PairwiseConfig(encoder=encoder_config, **options)
        # saved as a number: a loaded judge cuts texts where the trained one did
        config.max_tokens = most_tokens(
            "from_encoder", config.max_tokens, inner, packing, tokenizer
        )
        model = cls(config, inner)
        model.tokenizer = tokenizer
        if tokenizer is not None:
            Template(tokenizer, config)  # refuses what leaves no room for text
        return model

    def dataset(self, pairs: Sequence[object], *, progress: bool = True) -> PairwiseDataset:
        """Return pairs as a data set for this model."""
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
        """Judge many pairs.

        Args:
            prompts: One for each pair.
            a: Answers called A.
            b: Answers called B.
            batch_size: Pairs at once.
            progress: Show a bar.

        Raises:
            ValueError: Lists of different lengths or empty ones, what is neither text nor turns, no
                tokenizer.
        """
        # a text is a sequence, too: its letters would be judged one by one
        if any(isinstance(part, str) for part in (prompts, a, b)):
            raise ValueError("predict: prompts, a and b are texts; expected lists of texts")
        if not len(prompts) == len(a) == len(b):
            raise ValueError(
                f"predict: {len(prompts)} prompts, {len(a)} and {len(b)} answers; expected lists "
                "of one length"
            )
        data = self.dataset(list(zip(prompts, a, b, strict=True)), progress=progress)
        return predict_pairs(self, data, batch_size=batch_size, progress=progress)

    def rank(
        self, prompt: WordsLike, answers: Sequence[WordsLike], *, batch_size: int = 256
    ) -> Ranking:
        """The order of several answers to one prompt, each of which is encoded once.

        Link ``"davidson"`` puts answers in the order of their scores. Another link compares each
        pair, in both orders, and the scores are those of a tournament.

        Args:
            prompt: The prompt: a text, or turns.
            answers: One or more.
            batch_size: Pairs that are compared at once, and a quarter of it answers that are
                encoded at once.

        Raises:
            ValueError: No answers, what is neither text nor turns, no tokenizer.
        """
        if isinstance(answers, str) or not len(answers):
            raise ValueError(f"rank: answers are {answers!r:.60}, expected a text or more")
        if batch_size < 1:
            raise ValueError(f"rank: batch_size is {batch_size}, expected 1 or more")
        return rank_answers(
            self, answers_to(prompt, answers, self._own_tokenizer, self.config), batch_size
        )

    @property
    def _own_tokenizer(self) -> PreTrainedTokenizerBase:
        if self.tokenizer is None:
            raise ValueError(
                "PairwiseModel: it has no tokenizer; expected model.tokenizer = the encoder's"
            )
        return self.tokenizer


def _check_options(options: Mapping[str, object]) -> None:
    """Raise for options that `PairwiseConfig` does not have."""
    # encoder is an argument of its own, and rest stands for transformers' fields
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
    """Load a model from a folder or the hub, in its checkpoint's dtype where none is given."""
    with reading(place, "from_encoder"):
        return AutoModel.from_pretrained(place, dtype="auto" if dtype is None else dtype, **hub)


AutoConfig.register(PairwiseConfig.model_type, PairwiseConfig, exist_ok=True)
AutoModel.register(PairwiseConfig, PairwiseModel, exist_ok=True)


def _best_options(options: dict[str, Any]) -> dict[str, Any]:
    """Return options of `PairwiseConfig`, with those that judged best where none are given."""
    best: dict[str, Any] = {"link": "antisymmetric", "pooling": ["mean", "last"]}
    if options.get("link") != "concat":  # which takes no surface features
        best["surface"] = list(SURFACE)
    return best | options
