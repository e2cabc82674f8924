"""`TuneConfig`: the settings of a tuning."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Literal

from model_components._checks import CheckedConfig, MaybeWhole, Range, Whole

Schedule = Literal[
    "cosine_with_min_lr",
    "cosine",
    "linear",
    "constant",
    "constant_with_warmup",
    "inverse_sqrt",
    "polynomial",
]
"""Learning-rate schedules that need no further settings."""


@dataclass(frozen=True, kw_only=True)
class TuneConfig(CheckedConfig):
    """Settings of `tune`.

    By default, gradients are clipped from the first step, the warm-up is short, and the learning
    rate decays to a tenth of its peak. Updates that are scaled by alpha instead of alpha / r made
    training unstable in our measurements (docs/lora.md).

    Args:
        r: Rank of the adapters; 0 trains the parameters of the model itself, without adapters.
        lora_alpha: Updates are scaled by lora_alpha / r; default: 2 r.
        lora_dropout: Dropout of the adapters' input.
        target_modules: Names of adapted layers; default: all linear layers but the head.
        use_rslora: Scale by lora_alpha / sqrt(r) instead, which is more than lora_alpha / r.
        last_blocks: Number of transformer blocks to train, counted from the end; default: all.
        learning_rate: Peak learning rate; default: 5e-4 for adapters and 5e-5 for all parameters,
            or 2e-4 and 2e-5 in models of a billion parameters or more.
        lr_scheduler_type: A learning-rate schedule of transformers.
        min_lr_ratio: Last rate of the default schedule, as a fraction of the peak.
        warmup: Length of the warm-up, as a fraction of all steps.
        max_grad_norm: Largest norm of the gradient; larger gradients are scaled down to it.
        weight_decay: Weight decay.
        optim: An optimizer of transformers, such as sgd or adafactor.
        epochs: Number of passes over the rows.
        max_steps: Number of steps, instead of epochs.
        batch_size: Rows per batch on each device.
        accumulation: Batches per step, whose gradients are accumulated.
        max_length: Maximum number of tokens of an example; longer rows lose their end.
        pack: Put the rows of a batch into one sequence instead of padding them.
        gradient_checkpointing: Compute activations again in the backward pass, to save memory.
        held_out: Fraction of the rows that is held out, 200 rows at most.
        evaluations: Approximate number of evaluations of the held-out loss during training, besides
            the one before it.
        answers: Maximum number of held-out prompts to answer, before and after tuning.
        answer_length: Maximum number of tokens of each answer.
        dtype: Dtype in which the model is loaded. auto: the dtype of its files, or float32 if r is
            0. Adapters are always in float32.
        merge: Also write an ordinary checkpoint, with the adapters merged into the weights. If r is
            0, it is written anyway.
        seed: Seed of the adapters and of the order of rows. Held-out rows do not depend on it.

    Raises:
        ValueError: A value has the wrong type or is out of range, or a setting of adapters is given
            although r is 0.
    """

    r: Annotated[int, Range(least=0)] = 16
    lora_alpha: Annotated[float | None, Range(above=0)] = None
    lora_dropout: Annotated[float, Range(least=0, below=1)] = 0.0
    target_modules: tuple[str, ...] = ()
    use_rslora: bool = False
    last_blocks: MaybeWhole = None
    learning_rate: Annotated[float | None, Range(above=0)] = None
    lr_scheduler_type: Schedule = "cosine_with_min_lr"
    min_lr_ratio: Annotated[float, Range(least=0, most=1)] = 0.1
    warmup: Annotated[float, Range(least=0, below=1)] = 0.03
    max_grad_norm: Annotated[float, Range(above=0)] = 1.0
    weight_decay: Annotated[float, Range(least=0)] = 0.0
    optim: str = "adamw_torch"
    epochs: Annotated[float, Range(above=0)] = 3.0
    max_steps: MaybeWhole = None
    batch_size: Whole = 8
    accumulation: Whole = 1
    # nothing predicts a first token, so an example of 1 token has no loss
    max_length: Annotated[int, Range(least=2)] = 512
    pack: bool = False
    gradient_checkpointing: bool = False
    held_out: Annotated[float, Range(above=0, below=1)] = 0.1
    evaluations: Annotated[int, Range(least=2)] = 10
    answers: Annotated[int, Range(least=0)] = 20
    answer_length: Whole = 64
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    merge: bool = True
    seed: int = 0

    def problems(self) -> Iterable[str]:
        """Yield a message for each setting of adapters that is given although r is 0."""
        names = ("lora_alpha", "lora_dropout", "target_modules", "use_rslora")
        for name in names if not self.r else ():
            if getattr(self, name):
                yield f"{name} is {getattr(self, name)!r} with r=0, which trains without adapters"
