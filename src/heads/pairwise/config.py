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

# below 1: dropout or smoothing of 1 would leave nothing to learn from
Share = Annotated[float, Range(least=0, below=1)]


class PairwiseConfig(CheckedModelConfig):
    """The encoder, the head and how texts are cut for a `PairwiseModel`.

    Args:
        encoder: The encoder's config, or its dictionary.
        link: The function from features to A, B or tie. ``"davidson"`` gives each answer one score
            and learns how often close ones tie. ``"antisymmetric"`` compares both directly.
            ``"concat"``, a classifier over both side by side, is a baseline, and the only one whose
            verdict depends on which answer is called A.
        pooling: ``"mean"`` of an answer's last hidden states, the sequence's ``"first"`` or
            ``"last"`` one; or several of them, side by side.
        ties: Whether there is a class for ties.
        hidden_features: Inner width of the head; 0 for a linear one, and 64 inside
            ``"antisymmetric"``.
        dropout: The dropout on the features and inside the head.
        surface: What the head reads beside the encoder's states: any of the answers'
            ``"length"``, ``"style"`` and ``"overlap"`` with the prompt. Judges owe much to these;
            `pairwise_report` says how much.
        append_prompt: Encode the prompt before each answer.
        max_tokens: Most tokens of prompt, answer and special tokens together; default what the
            encoder takes.
        max_prompt_tokens: Tokens that a prompt keeps where an answer is long; default a quarter of
            ``max_tokens``.
        label_smoothing: Share of each target that is spread over all classes.
        uncertainty: Whether the head has a covariance, which `fit_uncertainty_` sets.
        **rest: Of `transformers.PreTrainedConfig`.

    Raises:
        ValueError: A field outside what it says above.

    >>> from transformers import BertConfig
    >>> PairwiseConfig(encoder=BertConfig(), link="davidson").num_classes
    3
    >>> PairwiseConfig(encoder=BertConfig(), link="davidsson")
    Traceback (most recent call last):
    ValueError: PairwiseConfig: link is 'davidsson', expected one of davidson, antisymmetric, concat
    """

    model_type = "pairwise"
    keys_to_ignore_at_inference = ["scores"]  # noqa: RUF012, the base class's own way

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
        """Build the encoder's config from a dict; turn a single word or a tuple into a list."""
        if isinstance(self.encoder, dict):
            self.encoder = encoder_config(self.encoder)
        elif not isinstance(self.encoder, PreTrainedConfig | None):
            refuse("PairwiseConfig", "encoder", self.encoder, "a config or its dictionary")
        if isinstance(self.pooling, str):
            self.pooling = [self.pooling]
        for name in ("pooling", "surface"):
            if isinstance(getattr(self, name), tuple):
                setattr(self, name, list(getattr(self, name)))

    def problems(self) -> Iterator[str]:
        """Yield what does not go together."""
        if not self.pooling:
            yield problem(self, "pooling", "one or more")
        for name in ("pooling", "surface"):
            if len(set(getattr(self, name))) < len(getattr(self, name)):
                yield problem(self, name, "each once")
        # concat reads the encoder's features alone, and would ignore these in silence
        if self.surface and self.link == "concat":
            yield problem(self, "surface", "none of them for link='concat'")
        if self.uncertainty and self.link != "antisymmetric":
            yield problem(self, "uncertainty", "False without link='antisymmetric'")

    @property
    def num_classes(self) -> int:
        """The number of classes: A, B and, with ``ties``, tie."""
        return 3 if self.ties else 2

    def to_dict(self) -> dict[str, object]:
        """Return all fields, with the encoder's config as a dictionary, which names no folder."""
        fields = super().to_dict()
        if isinstance(self.encoder, PreTrainedConfig):
            fields["encoder"] = self.encoder.to_dict()
            # an id of the hub stays, since the card names the base model by it
            fields["encoder"]["_name_or_path"] = (
                hub_id(fields["encoder"].get("_name_or_path") or "") or ""
            )
        return fields


def encoder_config(values: dict[str, Any]) -> PreTrainedConfig:
    """Return the config of a kind of encoder that transformers knows."""
    kind = str(values.get("model_type"))
    if kind not in CONFIG_MAPPING:
        refuse("PairwiseConfig", "the encoder's model_type", kind, "one that transformers knows")
    return CONFIG_MAPPING[kind](**{k: v for k, v in values.items() if k != "model_type"})
