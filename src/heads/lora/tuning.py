"""Training on instructions: a sound recipe as arguments, LoRA+ as a trainer's option, a loss exact by tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Unpack

import torch
from peft.optimizers import create_loraplus_optimizer
from torch import nn
from tqdm.auto import tqdm
from transformers import TrainingArguments

from model_components._modes import evaluating
from model_components._trainer import StepTrainer, TrainerOptions

from .instruct import IGNORED, InstructionCollator


def instruction_arguments(output_dir: str | Path, **changes: Any) -> TrainingArguments:
    """`TrainingArguments` of a recipe that does not spike.

    AdamW at 2e-4, the usual rate of LoRA at alpha / r of 1 or 2, whatever the rank; warm-up over 3 % of the steps,
    cosine to 10 %; gradients clipped at 1 from the first step on; no weight decay.

    Args:
        output_dir: Of checkpoints.
        **changes: Other fields, or other values.

    >>> instruction_arguments("runs/x", learning_rate=1e-3).max_grad_norm
    1.0
    """
    recipe: dict[str, Any] = {
        "learning_rate": 2e-4,
        "lr_scheduler_type": "cosine_with_min_lr",
        "lr_scheduler_kwargs": {"min_lr_rate": 0.1},
        "warmup_steps": 0.03,
        "max_grad_norm": 1.0,
        "weight_decay": 0.0,
        "optim": "adamw_torch",
        "logging_steps": 10,
        "save_strategy": "no",
        "report_to": "none",
        "remove_unused_columns": False,
        "dataloader_pin_memory": torch.cuda.is_available(),
    }
    if "save_steps" in changes:
        recipe["save_strategy"] = "steps"
    if "lr_scheduler_type" in changes:
        del recipe["lr_scheduler_kwargs"]  # they are of the recipe's own schedule
    return TrainingArguments(output_dir=str(output_dir), **(recipe | changes))


class InstructionTrainer(StepTrainer):
    """`transformers.Trainer` with LoRA+ as an option, and `InstructionCollator` where no collator is given.

    Args:
        model: A causal language model, usually a peft one.
        args: `TrainingArguments`; `instruction_arguments` makes sound ones.
        loraplus_lr_ratio: B's learning rate over A's (Hayou et al., "LoRA+", 2024: about 16); None for one rate.
        **options: Of `Trainer`: ``eval_dataset``, ``data_collator``, ...

    Raises:
        ValueError: Nothing to train, a ratio below 1, or one for a model without LoRA.
    """

    def __init__(
        self,
        model: nn.Module,
        args: TrainingArguments,
        *,
        train_dataset: Any = None,
        loraplus_lr_ratio: float | None = None,
        **options: Unpack[TrainerOptions],
    ):
        if options.get("data_collator") is None:
            options["data_collator"] = InstructionCollator(pad_token_id=0)  # any id: padding is masked by place
        super().__init__(model=model, args=args, train_dataset=train_dataset, **options)
        held: Any = self.model
        if not any(p.requires_grad for p in held.parameters()):
            raise ValueError("InstructionTrainer: nothing is trainable; load_lora(..., is_trainable=True) makes it so")
        if loraplus_lr_ratio is not None:
            if loraplus_lr_ratio < 1:
                raise ValueError(f"InstructionTrainer: loraplus_lr_ratio is {loraplus_lr_ratio}, needed at least 1")
            if not any(".lora_B." in name for name, _ in held.named_parameters()):
                raise ValueError("InstructionTrainer: loraplus_lr_ratio is given, but the model has no lora_B")
        self.loraplus_lr_ratio = loraplus_lr_ratio

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Peft's LoRA+ optimizer where a ratio was given, else the trainer's own."""
        if self.loraplus_lr_ratio is None:
            return super().create_optimizer(model)
        if self.optimizer is None:
            held: Any = self.model
            kind, options = self.get_optimizer_cls_and_kwargs(self.args)
            self.optimizer = create_loraplus_optimizer(
                held, kind, loraplus_lr_ratio=self.loraplus_lr_ratio,
                loraplus_weight_decay=self.args.weight_decay, loraplus_lr_embedding=self.args.learning_rate, **options,
            )  # fmt: skip
        return self.optimizer


@torch.no_grad()
def answer_loss(
    model: nn.Module, dataset: Any, collator: Callable[[Sequence[Any]], dict[str, Any]], *, batch_size: int = 8,
    progress: bool = True,
) -> tuple[float, float]:  # fmt: skip
    """Mean loss of all trained tokens, and its perplexity; the batch size changes neither.

    Args:
        model: A causal language model.
        dataset: Examples with ``labels``.
        collator: Examples to a batch of tensors.
        batch_size: Examples at once.
        progress: Show a bar.

    Returns:
        Loss in nats a token, and e to that.

    Raises:
        ValueError: No token is trained.
    """
    device = next(model.parameters()).device
    total, count = 0.0, 0
    with evaluating(model):
        for start in tqdm(range(0, len(dataset), batch_size), "evaluating", disable=not progress, leave=False):
            batch = collator([dataset[i] for i in range(start, min(start + batch_size, len(dataset)))])
            batch = {k: v.to(device) for k, v in batch.items()}
            labels = batch.pop("labels")[:, 1:].flatten()
            logits = model(**batch, use_cache=False).logits[:, :-1].flatten(0, 1).float()
            total += float(nn.functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum"))
            count += int((labels != IGNORED).sum())
    if not count:
        raise ValueError("answer_loss: no token of the data set is trained")
    loss = total / count
    return loss, math.exp(min(loss, 700.0))
