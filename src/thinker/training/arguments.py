"""The recipe that solves the early tasks in seconds: arguments of a trainer, groups of parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn
from transformers import TrainingArguments


def thinker_arguments(output_dir: str | Path, **changes: Any) -> TrainingArguments:
    """`TrainingArguments` of the recipe that solves the early tasks in seconds.

    AdamW 3e-3 with β2 .98, weight decay .01 (on matrices only, `parameter_groups`), 100 warm-up steps, cosine to 5 %,
    gradients clipped at 1; 1000 steps, no checkpoints (say ``save_steps``).

    Args:
        output_dir: Of checkpoints.
        **changes: Other fields, or other values.

    Returns:
        transformers' own, for a `ThinkerTrainer`.

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
    if "save_steps" in changes:
        recipe["save_strategy"] = "steps"
    return TrainingArguments(output_dir=str(output_dir), **(recipe | changes))


def parameter_groups(model: nn.Module, *, weight_decay: float) -> list[dict[str, object]]:
    """Weight decay on matrices of linear layers only: not on embeddings, positions, latents, norms, biases.

    Args:
        model: A module of any kind.
        weight_decay: Of the matrices.

    Returns:
        What a torch optimizer takes: with decay, and without.
    """
    matrices = {id(m.weight) for m in model.modules() if isinstance(m, nn.Linear)}
    by_kind: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for parameter in model.parameters():
        if parameter.requires_grad:
            by_kind[id(parameter) in matrices].append(parameter)
    kinds = ((by_kind[True], weight_decay), (by_kind[False], 0.0))
    return [{"params": parameters, "weight_decay": decay} for parameters, decay in kinds if parameters]
