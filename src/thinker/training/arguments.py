"""`thinker_arguments`: the optimizer, rates and schedule that work for most tasks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import TrainingArguments


def thinker_arguments(output_dir: str | Path, **changes: Any) -> TrainingArguments:
    """Return `TrainingArguments` with which a model learns most of the package's tasks.

    AdamW has a learning rate of 3e-3, β2 = 0.98 and a weight decay of 0.01 (only for matrices, see
    `parameter_groups`). The rate warms up for 100 steps and then falls along a cosine to 5% of its
    maximum. Gradients are clipped at norm 1. There are 1000 steps, and no checkpoints unless
    ``save_steps`` is given.

    Args:
        output_dir: The folder of checkpoints.
        **changes: Fields of `TrainingArguments` to change or add.

    Returns:
        The arguments, for a `ThinkerTrainer`.

    >>> thinker_arguments("runs/x", max_steps=10).learning_rate
    0.003
    """
    recipe: dict[str, Any] = {
        "max_steps": 1000,
        "learning_rate": 3e-3,
        "adam_beta2": 0.98,
        "weight_decay": 0.01,
        "warmup_steps": 100,
        "lr_scheduler_type": "cosine_with_min_lr",
        "lr_scheduler_kwargs": {"min_lr_rate": 0.05},
        "max_grad_norm": 1.0,
        "optim": "adamw_torch_fused",
        "logging_steps": 50,
        "save_strategy": "no",
        "report_to": "none",
    }
    usual = recipe["lr_scheduler_type"]
    if changes.get("lr_scheduler_type", usual) != usual:  # other schedules have no such setting
        del recipe["lr_scheduler_kwargs"]
    if "save_steps" in changes:
        recipe["save_strategy"] = "steps"
    return TrainingArguments(output_dir=str(output_dir), **(recipe | changes))
