"""`TuneConfig`: the settings of `tune`."""

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
"""Learning-rate schedules of transformers that need only settings in `TuneConfig`."""


@dataclass(frozen=True, kw_only=True)
class TuneConfig(CheckedConfig):
    """Settings of `tune`.

    By default, gradients are clipped from the first step, the warm-up is short, and the learning
    rate decays to a tenth of its peak. Updates are scaled by lora_alpha / r; scaling them by
    lora_alpha alone made training unstable in our measurements (docs/lora.md).

    Args:
        r: Rank of the adapters; 0 trains the parameters of the model itself, without adapters.
        lora_alpha: Numerator of the factor lora_alpha / r that scales the updates; default: 2 r.
        lora_dropout: Dropout probability on the input of the adapters.
        target_modules: Names of the layers that get adapters; default: all linear layers except the
            head.
        use_rslora: Scale the updates by lora_alpha / sqrt(r) instead of lora_alpha / r.
        last_blocks: Number of transformer blocks to train, counted from the last; default: all.
        learning_rate: Peak learning rate; default: 5e-4 for adapters and 5e-5 for all parameters,
            or 2e-4 and 2e-5 in models of a billion parameters or more.
        lr_scheduler_type: Name of a learning-rate schedule of transformers.
        min_lr_ratio: Final learning rate of the default schedule, as a fraction of the peak. Other
            schedules ignore this setting.
        warmup: Length of the warm-up, as a fraction of all steps.
        max_grad_norm: Maximum norm of the gradient; larger gradients are scaled down to this norm.
        weight_decay: Weight decay of the optimizer.
        optim: Name of an optimizer of transformers, such as sgd or adafactor.
        epochs: Number of passes over the training rows.
        max_steps: Number of optimizer steps. If this is given, epochs is ignored.
        batch_size: Number of rows in a batch on each device.
        accumulation: Number of batches whose gradients are accumulated for one optimizer step.
        max_length: Maximum number of tokens of an example; longer rows are truncated at the end.
        pack: Concatenate the rows of a batch into one sequence instead of padding them.
        gradient_checkpointing: Recompute activations in the backward pass to save memory.
        held_out: Fraction of the rows to hold out for evaluation, at most 200 rows. This setting is
            ignored if held-out rows are given.
        evaluations: Approximate number of evaluations of the held-out loss during training, in
            addition to the one before training.
        answers: Maximum number of held-out prompts that the model answers before and after tuning.
        answer_length: Maximum number of tokens of each answer.
        dtype: Dtype in which the model is loaded. auto: the dtype of its files, or float32 if r is
            0. Adapters are always in float32.
        merge: Also write an ordinary checkpoint, with the adapters merged into the weights. If r is
            0, the tuned model is always written.
        seed: Seed of the initial adapters, dropout and the order of the rows. It does not affect
            which rows are held out.

    Raises:
        ValueError: A value has the wrong type or is out of range, or a setting of the adapters is
            given although r is 0.
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
    # the first token is not predicted, so an example of 1 token has no loss
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
        """Yield a message for each adapter setting that is given although r=0 (no adapters)."""
        names = ("lora_alpha", "lora_dropout", "target_modules", "use_rslora")
        for name in names if not self.r else ():
            if getattr(self, name):
                yield (
                    f"{name} is {getattr(self, name)!r} with r=0, which trains no adapters; "
                    f"expected no {name}, or an r of 1 or more"
                )
