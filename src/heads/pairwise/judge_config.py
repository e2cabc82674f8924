"""`JudgeConfig`: the settings of `train_judge`.

Importing this module loads neither torch nor transformers.
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
            and the N lowest layers. With freeze=all, each answer is encoded only once.
        depth: Number of encoder layers to use, counted from the lowest. Default: two thirds of the
            layers with freeze=all if the encoder can run without its upper layers, otherwise all.
        dtype: Dtype of the encoder's weights. auto means bfloat16 with freeze=all if the device is
            faster in bfloat16 (on x86, this requires AMX), and float32 otherwise.
        link: Function from features to logits; see PairwiseConfig.
        pooling: Hidden states that represent an answer; see PairwiseConfig.
        surface: Surface features given to the head: length, style, overlap. Must be empty with
            link=concat.
        ties: keep gives the judge a class for ties if any pair is a tie. drop leaves tied pairs
            out, and the judge has only A and B. auto means drop if less than one pair in 20 is a
            tie, and keep otherwise.
        max_tokens: Maximum number of tokens in a sequence (prompt, answer and special tokens);
            default: the limit of encoder and tokenizer.
        hidden_features: Hidden width of the head. 0 means a width of 64 with link=antisymmetric,
            and a linear head with any other link.
        dropout: Dropout probability, for the features and inside the head.
        epochs: Maximum number of epochs; default: 8, or 3 if the encoder is trained.
        batch_size: Number of pairs per step.
        learning_rate: Peak learning rate; default: 1e-3, or 3e-5 if the encoder is trained.
        head_lr_ratio: Learning rate of the head divided by the learning rate of the encoder;
            ignored with freeze=all.
        layer_decay: Factor by which the learning rate falls from each encoder layer to the layer
            below it.
        weight_decay: Weight decay.
        held_out: Fraction of the prompts in each of three held-out parts: one to choose the epoch,
            one to fit the temperature, one to test the judge.
        unseen_writers: Number of answering models (models that wrote answers) to hold out. The
            pairs with their answers are tested separately. Default: a sixth of the models that
            answer in less than half of the pairs, or 0 if there are fewer than six such models.
        seed: Random seed for the split, the new head and the order of the pairs.

    Raises:
        ValueError: A value has the wrong type or is out of range, or two values conflict.
    """

    freeze: str = "all"
    depth: MaybeWhole = None
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    link: Link = "antisymmetric"
    pooling: tuple[Pooling, ...] = ("mean", "last")
    surface: tuple[Surface, ...] = SURFACE
    ties: Literal["auto", "keep", "drop"] = "auto"
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
            yield problem(self, "surface", "no surface features with link='concat'")

    @property
    def trains_encoder(self) -> bool:
        """Return whether any part of the encoder is trained."""
        return self.freeze != "all"
