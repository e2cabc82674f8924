"""`PairwiseConfig`: the settings of a `PairwiseModel`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field
from typing import Annotated, Any

from transformers import CONFIG_MAPPING, PreTrainedConfig

from model_components._checks import (
    MaybeWhole,
    Range,
    problem,
    refuse,
)
from model_components._hub import hub_id
from model_components._pretrained import CheckedModelConfig

from .choices import Link, Pooling, Surface

# below 1, because dropout or label smoothing of 1 would leave nothing to learn from
Share = Annotated[float, Range(least=0, below=1)]


class PairwiseConfig(CheckedModelConfig):
    """Settings of a `PairwiseModel`: the encoder, the head and the truncation of long texts.

    Args:
        encoder: The encoder's config, or this config as a dictionary.
        link: The function from features to logits of A, B and tie. ``"davidson"`` gives each answer
            a score and learns how often answers with close scores tie. ``"antisymmetric"`` compares
            the two answers directly. ``"concat"``, a classifier over their concatenated features,
            is a baseline; it is the only link whose verdict depends on which answer is called A.
        pooling: The states of the last layer that represent an answer: the ``"mean"`` over the
            answer's tokens, or the state of the sequence's ``"first"`` or ``"last"`` token. If
            several are given, they are concatenated.
        ties: Whether there is a class for ties.
        hidden_features: Hidden width of the head. 0 means a width of 64 with ``"antisymmetric"``,
            and a linear function of the features with any other link.
        dropout: Dropout probability, for the features and inside the head.
        surface: Surface features that the head reads in addition to the encoder's states: any of
            the answers' ``"length"``, ``"style"`` and ``"overlap"`` with the prompt. Verdicts can
            depend on them strongly; `pairwise_report` shows how much.
        append_prompt: Whether to encode the prompt before each answer.
        max_tokens: Maximum number of tokens in a sequence: prompt, answer and special tokens. If it
            is None, `PairwiseModel.from_encoder` sets it to the limit of encoder and tokenizer.
        max_prompt_tokens: Number of tokens that a prompt keeps even if the answer is long; default:
            a quarter of ``max_tokens``.
        label_smoothing: Fraction of each target that is spread evenly over all classes.
        uncertainty: Whether the head has a covariance of the last layers' weights, which
            `fit_uncertainty_` sets.
        **rest: Fields of `transformers.PreTrainedConfig`.

    Raises:
        ValueError: A field is invalid, or two fields conflict.

    >>> from transformers import BertConfig
    >>> PairwiseConfig(encoder=BertConfig(), link="davidson").num_classes
    3
    >>> PairwiseConfig(encoder=BertConfig(), link="davidsson")
    Traceback (most recent call last):
    ValueError: PairwiseConfig: link is 'davidsson', expected one of davidson, antisymmetric, concat
    """

    model_type = "pairwise"
    keys_to_ignore_at_inference = ["scores"]  # noqa: RUF012, as in the base class

    encoder: Any = None
    link: Link = "davidson"
    pooling: list[Pooling] = field(default_factory=lambda: ["mean"])
    ties: bool = True
    hidden_features: Annotated[int, Range(least=0)] = 0
    dropout: Share = 0.1
    surface: list[Surface] = field(default_factory=list)
    append_prompt: bool = True
    max_tokens: MaybeWhole = None
    max_prompt_tokens: MaybeWhole = None
    label_smoothing: Share = 0.0
    uncertainty: bool = False

    def derive(self) -> None:
        """Convert ``encoder`` to a config, and ``pooling`` and ``surface`` to lists."""
        if isinstance(self.encoder, dict):
            self.encoder = encoder_config(self.encoder)
        elif not isinstance(self.encoder, PreTrainedConfig | None):
            refuse(
                "PairwiseConfig", "encoder", self.encoder, "a transformers config or a dictionary"
            )
        if isinstance(self.pooling, str):
            self.pooling = [self.pooling]
        for name in ("pooling", "surface"):
            if isinstance(getattr(self, name), tuple):
                setattr(self, name, list(getattr(self, name)))

    def problems(self) -> Iterator[str]:
        """Yield messages about fields that are invalid or conflict."""
        if not self.pooling:
            yield problem(self, "pooling", "at least one kind of pooling")
        for name in ("pooling", "surface"):
            if len(set(getattr(self, name))) < len(getattr(self, name)):
                yield problem(self, name, "each value at most once")
        # concat reads only the encoder's features and would silently ignore these
        if self.surface and self.link == "concat":
            yield problem(self, "surface", "no surface features with link='concat'")
        if self.uncertainty and self.link != "antisymmetric":
            yield problem(self, "uncertainty", "False unless link='antisymmetric'")

    @property
    def num_classes(self) -> int:
        """The number of classes: A, B and, with ``ties``, tie."""
        return 3 if self.ties else 2

    def to_dict(self) -> dict[str, object]:
        """Return all fields, with the encoder's config as a dictionary without local paths."""
        fields = super().to_dict()
        if isinstance(self.encoder, PreTrainedConfig):
            fields["encoder"] = self.encoder.to_dict()
            # a hub id is kept, because the model card refers to the base model by this id
            fields["encoder"]["_name_or_path"] = (
                hub_id(fields["encoder"].get("_name_or_path") or "") or ""
            )
        return fields


def encoder_config(values: dict[str, Any]) -> PreTrainedConfig:
    """Build an encoder's config from a dictionary.

    Raises:
        ValueError: transformers has no such ``model_type``.
    """
    kind = str(values.get("model_type"))
    if kind not in CONFIG_MAPPING:
        refuse("PairwiseConfig", "the encoder's model_type", kind, "a model type of transformers")
    return CONFIG_MAPPING[kind](**{k: v for k, v in values.items() if k != "model_type"})
