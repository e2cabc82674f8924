"""`PairwiseConfig`: the settings of a `PairwiseModel`."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any, get_args

from transformers import CONFIG_MAPPING, PreTrainedConfig

from model_components._hub import hub_id

from .choices import Link, Pooling, Surface


def _refuse(what: str, got: object, needed: str) -> None:
    raise ValueError(f"PairwiseConfig: {what} is {got!r}; expected {needed}")


class PairwiseConfig(PreTrainedConfig):
    """The encoder, the head and how texts are cut for a `PairwiseModel`.

    Args:
        encoder: The encoder's config, or its dictionary.
        link: From features to A, B or tie. ``"davidson"`` gives each answer one score and learns
            how often close ones tie. ``"antisymmetric"`` compares both directly. ``"concat"``, a
            classifier over both side by side, is a baseline, and the only one whose verdict depends
            on which answer is called A.
        pooling: ``"mean"`` of an answer's last hidden states, the sequence's ``"first"`` or
            ``"last"`` one; or several of them, side by side.
        ties: Whether there is a class for ties.
        hidden_features: Inner width of the head; 0 for a linear one, and 64 inside
            ``"antisymmetric"``.
        dropout: On the features and inside the head.
        surface: What the head is told beside the encoder's states: any of the answers'
            ``"length"``, ``"style"`` and ``"overlap"`` with the prompt. Judges owe much to these;
            `pairwise_report` says how much.
        append_prompt: Encode the prompt before each answer.
        max_tokens: Most tokens of prompt, answer and special tokens together; default what the
            encoder takes.
        max_prompt_tokens: Tokens that a prompt keeps where an answer is long; default a quarter of
            ``max_tokens``.
        label_smoothing: Share of each target that is spread over all classes.
        swap_consistency: Weight of the divergence between both orders' verdicts, for ``"concat"``:
            both orders are trained then, at the price of the head alone.
        **rest: Of `transformers.PreTrainedConfig`.

    Raises:
        ValueError: A field outside what it says above.

    >>> from transformers import BertConfig
    >>> PairwiseConfig(encoder=BertConfig(), link="davidson").num_classes
    3
    >>> PairwiseConfig(encoder=BertConfig(), link="davidsson")
    Traceback (most recent call last):
    ValueError: PairwiseConfig: link is 'davidsson'; expected one of davidson, antisymmetric, concat
    """

    model_type = "pairwise"
    keys_to_ignore_at_inference = ["scores"]  # noqa: RUF012, the base class's own way

    def __init__(
        self,
        *,
        encoder: PreTrainedConfig | dict[str, Any] | None = None,
        link: Link = "davidson",
        pooling: Pooling | Sequence[Pooling] = "mean",
        ties: bool = True,
        hidden_features: int = 0,
        dropout: float = 0.1,
        surface: Sequence[Surface] = (),
        append_prompt: bool = True,
        max_tokens: int | None = None,
        max_prompt_tokens: int | None = None,
        label_smoothing: float = 0.0,
        swap_consistency: float = 0.0,
        **rest: Any,
    ):
        if isinstance(encoder, dict):
            kind = str(encoder.get("model_type"))
            if kind not in CONFIG_MAPPING:
                _refuse("the encoder's model_type", kind, "one that transformers knows")
            encoder = CONFIG_MAPPING[kind](
                **{k: v for k, v in encoder.items() if k != "model_type"}
            )
        self.encoder = encoder
        self.link = link
        if isinstance(pooling, str):
            self.pooling = [pooling]
        else:
            self.pooling = list(pooling or ())
        self.ties = ties
        self.hidden_features = hidden_features
        self.dropout = dropout
        self.surface = list(surface)
        self.append_prompt = append_prompt
        self.max_tokens = max_tokens
        self.max_prompt_tokens = max_prompt_tokens
        self.label_smoothing = label_smoothing
        self.swap_consistency = swap_consistency
        known = set(vars(self))
        for name in rest:
            near = difflib.get_close_matches(name, known, 1, 0.8)
            if near and not hasattr(PreTrainedConfig, name):
                raise ValueError(f"PairwiseConfig: there is no {name!r}; perhaps {near[0]!r}")
        self._check()
        super().__init__(**rest)

    def _check(self) -> None:
        self._check_choices()
        self._check_numbers()

    def _check_choices(self) -> None:
        if self.link not in get_args(Link):
            _refuse("link", self.link, f"one of {', '.join(get_args(Link))}")
        for name, choices, least in (
            ("pooling", get_args(Pooling), 1),
            ("surface", get_args(Surface), 0),
        ):
            value = getattr(self, name)
            if not all(isinstance(one, str) for one in value):
                _refuse(name, value, f"names, of {', '.join(choices)}")
            if len(value) < least or len(set(value)) < len(value) or not set(value) <= set(choices):
                _refuse(
                    name,
                    value,
                    f"{'one or more' if least else 'any'} of {', '.join(choices)}, each once",
                )
        if self.link == "concat" and self.surface:
            _refuse("surface", self.surface, "none of them for link='concat'")
        for name in ("ties", "append_prompt"):
            if not isinstance(getattr(self, name), bool):
                _refuse(name, getattr(self, name), "True or False")

    def _check_numbers(self) -> None:
        if not isinstance(self.hidden_features, int) or self.hidden_features < 0:
            _refuse("hidden_features", self.hidden_features, "a width, or 0")
        for name in ("dropout", "label_smoothing", "swap_consistency"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                _refuse(name, value, "a number")
        for name in ("dropout", "label_smoothing"):
            if not 0 <= getattr(self, name) < 1:
                _refuse(name, getattr(self, name), "a share in [0, 1)")
        if self.swap_consistency < 0 or (self.swap_consistency and self.link != "concat"):
            _refuse(
                "swap_consistency",
                self.swap_consistency,
                "a weight of at least 0, and 0 for links that are fair",
            )
        for name in ("max_tokens", "max_prompt_tokens"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                _refuse(name, value, "a number of tokens, or None")

    @property
    def num_classes(self) -> int:
        """A, B and, with ``ties``, tie."""
        return 3 if self.ties else 2

    def to_dict(self) -> dict[str, object]:
        """With the encoder's config as a dictionary, which names no folder."""
        fields = super().to_dict()
        if isinstance(self.encoder, PreTrainedConfig):
            fields["encoder"] = self.encoder.to_dict()
            fields["encoder"]["_name_or_path"] = (
                hub_id(fields["encoder"].get("_name_or_path") or "") or ""
            )
        return fields
