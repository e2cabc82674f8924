"""`JudgeConfig`: the settings of `train_judge`.

Importing this loads neither torch nor transformers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from model_components._checks import CheckedConfig, MaybeWhole, Range, Whole, problem

from .choices import Link, Pooling, Surface

SURFACE: tuple[Surface, ...] = ("length", "style", "overlap")
Rate = Annotated[float | None, Range(above=0)]


@dataclass(frozen=True, kw_only=True)
class JudgeConfig(CheckedConfig):
    """Settings of `train_judge`.

    Args:
        freeze: Part of the encoder to freeze: all, none, embeddings, or bottom:N for the embeddings
            and the N lowest layers. A frozen encoder reads each answer once.
        depth: Number of the encoder's layers to use, from the lowest; default: two thirds of the
            layers if the encoder is frozen and can do without the others, otherwise all.
        dtype: Dtype of the encoder's weights. auto: bfloat16 if the encoder is frozen and the
            device is faster in it (on x86: with AMX), else float32.
        link: Function from features to logits; see PairwiseConfig.
        pooling: Hidden states that stand for an answer; see PairwiseConfig.
        surface: Surface features given to the head: length, style, overlap. Must be empty with
            link=concat.
        max_tokens: Maximum number of tokens of prompt, answer and special tokens; default: the
            encoder's limit.
        hidden_features: Hidden width of the head. 0 means a width of 64 with link=antisymmetric,
            and a linear head with any other link.
        dropout: Dropout on the features and inside the head.
        epochs: Maximum number of epochs; default: 8, or 3 if the encoder trains.
        batch_size: Number of pairs per step.
        learning_rate: Peak learning rate; default: 1e-3, or 3e-5 if the encoder trains.
        head_lr_ratio: Learning rate of the head divided by the encoder's, if the encoder trains.
        layer_decay: Factor of the learning rate from each layer of the encoder to the one below.
        weight_decay: Weight decay.
        held_out: Fraction of the prompts in each of three held-out parts: one to choose the epoch,
            one to fit the temperature, one to test the judge.
        unseen_writers: Number of answering models to hold out; their pairs are tested separately.
            Default: a sixth of the models that answer in less than half of the pairs, or 0 if there
            are fewer than six such models.
        seed: Seed of the split, the head and the order of pairs.

    Raises:
        ValueError: A value has another type or is out of range.
    """

    freeze: str = "all"
    depth: MaybeWhole = None
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    link: Link = "antisymmetric"
    pooling: tuple[Pooling, ...] = ("mean", "last")
    surface: tuple[Surface, ...] = SURFACE
    max_tokens: MaybeWhole = None
    hidden_features: Annotated[int, Range(least=0)] = 0
    dropout: Annotated[float, Range(least=0, below=1)] = 0.3
    epochs: MaybeWhole = None
    batch_size: Whole = 64
    learning_rate: Rate = None
    head_lr_ratio: Annotated[float, Range(above=0)] = 30.0
    layer_decay: Annotated[float, Range(above=0, most=1)] = 1.0
    weight_decay: Annotated[float, Range(least=0)] = 0.05
    held_out: Annotated[float, Range(above=0, most=0.25)] = 0.1
    unseen_writers: Annotated[int | None, Range(least=0)] = None
    seed: Annotated[int, Range(least=0)] = 0

    def problems(self) -> Iterator[str]:
        """Yield messages about fields that conflict."""
        if self.link == "concat" and self.surface:
            yield problem(self, "surface", "none of them for link='concat'")

    @property
    def trains_encoder(self) -> bool:
        """Return whether a part of the encoder trains."""
        return self.freeze != "all"
