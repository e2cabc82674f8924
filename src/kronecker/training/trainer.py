"""`KroneckerTrainer`, a trainer for smaller models.

The trainer adds parameter groups, distillation, and norms in the logs.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.utils import ModelOutput

from model_components._folders import make_folder
from model_components._trainer import Loss, StepTrainer, TrainData, TrainerOptions, bare_optimizer

from ..data.batches import without_labels
from ..discovery.finding import COMPRESSED
from ..losses import DistillConfig, targets_of, token_errors, token_loss
from ..storage.checkpoints import has_smaller_layers, is_compressed, read_files, write_files
from .callbacks import FreezePretrained
from .parameters import group_kind, parameter_groups


class KroneckerTrainer(StepTrainer):
    """A `transformers.Trainer` for smaller models, compressed or pruned.

    The trainer adds a learning rate for each parameter group (`parameter_groups`), distillation
    from a teacher in the same process, and logs of the norms of factors, other parameters and their
    gradients. The callback `FreezePretrained` adds a schedule. `TrainingArguments` sets
    everything else (learning rate schedule, accumulation, mixed precision, resuming, DDP). Its
    ``learning_rate`` and ``weight_decay`` apply to the factors.

    Args:
        model: A model with compressed layers or, with a teacher, any model with the teacher's
            vocabulary, such as a pruned one.
        args: The `TrainingArguments`.
        train_dataset: Examples with ``input_ids``, and with ``labels`` if the loss uses them.
        teacher: The original model, which is frozen and set to evaluation mode.
        distill: The weights of the losses. The default with a teacher is to learn from its logits
            at temperature 2.
        pretrained_learning_rate: The learning rate of all parameters except factors and scales;
            default: the learning rate of the factors.
        **options: Other arguments of `Trainer`.

    Raises:
        ValueError: There is neither a compressed layer nor a teacher, ``distill`` is given without
            a teacher, the teacher shares parameters with the model, or ``distill`` compares hidden
            states that do not correspond.

    >>> KroneckerTrainer(nn.Linear(2, 2), None)
    Traceback (most recent call last):
    ValueError: KroneckerTrainer: Linear has no compressed layer, expected a model that convert_ ...
    """

    def __init__(
        self,
        model: nn.Module,
        args: TrainingArguments,
        *,
        train_dataset: TrainData = None,
        teacher: nn.Module | None = None,
        distill: DistillConfig | None = None,
        pretrained_learning_rate: float | None = None,
        **options: Unpack[TrainerOptions],
    ):
        _check_models(model, teacher, distill)
        if teacher is not None:
            _check_own_losses(args, options)
        learning = {p.dtype for p in model.parameters() if p.requires_grad}
        if not learning and train_dataset is not None:
            raise ValueError(
                "KroneckerTrainer: expected a model with trainable parameters, got one that is "
                "frozen, such as a copy of a teacher; call model.requires_grad_(True)"
            )
        if half := next((d for d in learning if d in (torch.bfloat16, torch.float16)), None):
            warnings.warn(
                f"KroneckerTrainer: trainable weights have dtype {half}, in which small updates "
                "are lost; load the model with dtype=torch.float32 (TrainingArguments(bf16=True) "
                "still computes in bfloat16)",
                stacklevel=2,
            )
        self.teacher = None
        self.distill = None
        if teacher is not None:
            self.teacher = teacher.eval().requires_grad_(False)
            self.distill = distill or DistillConfig()
            _check_distillation(self.distill, model, teacher)
        self.pretrained_learning_rate = pretrained_learning_rate
        callbacks = options.get("callbacks") or []
        if any(isinstance(c, FreezePretrained) for c in callbacks):
            args.ddp_find_unused_parameters = True  # the set of trained parameters changes
        self._gradients: dict[str, float] = {}
        super().__init__(model=model, args=args, train_dataset=train_dataset, **options)
        # after super().__init__, which chooses the device and moves only the model
        if self.teacher is not None:
            self.teacher.to(self.args.device)
        # kept for evaluation, which computes the model's own loss
        self._accepts = self.model_accepts_loss_kwargs
        if self.distill is not None:
            self.model_accepts_loss_kwargs = True  # losses are means over the tokens of a step
        self.add_callback(_GradientNorms(self._gradients))

    def optimizer_groups(self) -> list[dict[str, object]]:
        """Return `parameter_groups` with the learning rate and decay of the training arguments."""
        assert self.model is not None
        return parameter_groups(
            self.model,
            learning_rate=self.args.learning_rate,
            pretrained_learning_rate=self.pretrained_learning_rate,
            weight_decay=self.args.weight_decay,
        )

    def _get_num_items_in_batch(
        self, batch_samples: list[dict[str, Any]], device: torch.device
    ) -> Tensor | int | None:
        """Return the number of items in a step; without labels, count tokens except padding."""
        items = super()._get_num_items_in_batch(batch_samples, device)
        # other models may give one row of logits per sequence instead of per token
        of_tokens = self.unwrapped().can_generate() and not _has_two_sides(self.unwrapped())
        if items is not None or self.distill is None or not of_tokens:
            return items
        count = torch.zeros((), device=device)
        for batch in batch_samples:
            ids = batch.get("input_ids")
            mask = batch.get("attention_mask", ids)
            if not isinstance(ids, Tensor) or not isinstance(mask, Tensor):
                return None
            count += ids.numel() if mask is ids else mask.bool().sum().to(device)
        if self.args.average_tokens_across_devices:
            count = self.accelerator.reduce(count, "sum")
        return count

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Loss:
        """Return the distillation loss that `DistillConfig` sets.

        Without a teacher, and in evaluation, return the model's own loss.
        """
        # evaluation does not use the teacher, so that losses can be compared with other runs
        if self.distill is None or self.teacher is None or not model.training:
            return self._own_loss(model, inputs, return_outputs, num_items_in_batch)
        config = self.distill
        named = {"output_hidden_states": config.hidden > 0}
        unlabeled = self._without_labels(inputs)
        two_sides = _has_two_sides(self.unwrapped())
        with torch.no_grad():
            theirs = self.teacher(**unlabeled, **named)
        ours = model(**unlabeled, **named)
        keep, labels = targets_of(
            _shape_of_tokens(unlabeled, ours, two_sides),
            inputs.get("labels"),
            # an encoder-decoder's logits are for the decoder's tokens, so the encoder's mask does
            # not apply
            inputs.get("decoder_attention_mask" if two_sides else "attention_mask"),
            # a decoder's labels are already aligned with its positions
            shifted=self.unwrapped().can_generate() and not two_sides,
            device=self.args.device,
        )
        loss = torch.zeros((), device=self.args.device)
        answers = keep.sum()
        given = inputs.get("labels")
        if given is not None and given.shape != keep.shape:
            answers = len(given)  # one label per sequence
        if config.logits or config.labels:
            student = self._logits(ours)
            teacher = self._logits(theirs)
            if student.dim() == 3:
                student = student[keep]
                teacher = teacher[keep]
            else:
                answers = len(student)
            loss = loss + token_loss(config, student, teacher, labels)
        if config.hidden:
            errors = []
            for state, wanted in zip(ours.hidden_states, theirs.hidden_states, strict=True):
                errors.append(token_errors(state, wanted, keep))
            loss = loss + config.hidden * torch.stack(errors).mean()
        loss = self.share_of_step(loss, answers, num_items_in_batch)
        return (loss, ours) if return_outputs else loss

    def _without_labels(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Return the inputs without labels, plus decoder inputs derived from the labels.

        Decoder inputs are added only if they are missing and the model can derive them.
        """
        unlabeled = without_labels(inputs)
        has_decoder_input = any(name.startswith("decoder_input") for name in unlabeled)
        if "labels" in inputs and not has_decoder_input:
            # only some model families define this method
            prepare = getattr(self.unwrapped(), "prepare_decoder_input_ids_from_labels", None)
            if prepare:
                unlabeled["decoder_input_ids"] = prepare(inputs["labels"])
        return unlabeled

    def _logits(self, outputs: object) -> Tensor:
        logits = getattr(outputs, "logits", None)
        if logits is None:
            raise ValueError(
                f"KroneckerTrainer: {type(self.unwrapped()).__name__} returns no logits; expected "
                f"DistillConfig(logits=0, labels=0) with hidden above 0"
            )
        return logits

    def _own_loss(
        self,
        model: nn.Module,
        inputs: dict[str, object],
        return_outputs: bool,
        items: Tensor | int | None,
    ) -> Loss:
        """Return `Trainer`'s loss, computed with the original ``model_accepts_loss_kwargs``."""
        before = self.model_accepts_loss_kwargs
        self.model_accepts_loss_kwargs = self._accepts
        try:
            return super().compute_loss(
                model, inputs, return_outputs, items if self._accepts else None
            )
        finally:
            self.model_accepts_loss_kwargs = before

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Write the logs; in training, add the norms of each kind's parameters and gradients."""
        if "loss" in logs and self.optimizer is not None:
            for group in bare_optimizer(self.optimizer).param_groups:
                kind = group_kind(group)
                parameters = [p.detach() for p in group["params"]]
                logs[f"norm/{kind}"] = _norm(parameters, logs.get(f"norm/{kind}"))
            logs |= self._gradients
        super().log(logs, start_time)

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        """Write a checkpoint; `from_pretrained` can load the checkpoint of a compressed model."""
        folder = make_folder(output_dir or self.args.output_dir or ".", "KroneckerTrainer")
        if has_smaller_layers(self.unwrapped()):
            write_files(self.unwrapped(), folder)
            if self.processing_class is not None:
                self.processing_class.save_pretrained(folder)
            torch.save(self.args, folder / "training_args.bin")
        else:
            super()._save(output_dir, state_dict)

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: nn.Module | None = None
    ) -> None:
        if is_compressed(resume_from_checkpoint):
            self.unwrapped().load_state_dict(read_files(Path(resume_from_checkpoint))[1])
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        self._load_from_checkpoint(self.state.best_model_checkpoint or "")


def _has_two_sides(model: nn.Module) -> bool:
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def _shape_of_tokens(
    inputs: Mapping[str, Tensor], outputs: ModelOutput, two_sides: bool
) -> tuple[int, int]:
    """Return the numbers of sequences and of tokens per sequence that the losses cover."""
    if two_sides:
        names = ("decoder_input_ids", "decoder_inputs_embeds")
    else:
        names = ("input_ids", "inputs_embeds")
    states = [inputs[name] for name in names if name in inputs]
    # for images, the tokens are patches, whose number only the hidden states show
    states += getattr(outputs, "hidden_states", None) or ()
    if states:
        return states[0].shape[0], states[0].shape[1]
    # images with one label each, without hidden states
    return len(outputs[0]), 1


def _check_models(model: nn.Module, teacher: object, distill: object) -> None:
    if teacher is not None and not isinstance(teacher, nn.Module):
        raise ValueError(
            f"KroneckerTrainer: teacher is a {type(teacher).__name__}, expected a loaded model"
        )
    if distill is not None and not isinstance(distill, DistillConfig):
        raise ValueError(
            f"KroneckerTrainer: distill is a {type(distill).__name__}, expected a DistillConfig"
        )
    if teacher is None and not any(isinstance(m, COMPRESSED) for m in model.modules()):
        raise ValueError(
            f"KroneckerTrainer: {type(model).__name__} has no compressed layer, expected a model "
            "that convert_ has compressed, or a teacher to learn from"
        )
    if distill is not None and teacher is None:
        raise ValueError("KroneckerTrainer: expected a teacher for distill, got None")
    if teacher is None:
        return
    own = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    # freezing the teacher also freezes the parameters that it shares with the model
    shared = [name for name, parameter in teacher.named_parameters() if id(parameter) in own]
    if shared:
        raise ValueError(
            "KroneckerTrainer: expected a separately loaded original model as the teacher, got one "
            f"that shares {len(shared)} parameters with the model, such as {shared[0]}"
        )


def _check_own_losses(args: TrainingArguments | None, options: TrainerOptions) -> None:
    """Check that no option of `Trainer` would replace or change the distillation loss."""
    own = []
    if options.get("compute_loss_func") is not None:
        own.append("compute_loss_func")
    if args is not None and args.label_smoothing_factor:
        own.append("label_smoothing_factor")
    if own:
        raise ValueError(
            f"KroneckerTrainer: expected no {own[0]} with a teacher, as DistillConfig sets the loss"
        )


def _check_distillation(distill: DistillConfig, model: nn.Module, teacher: nn.Module) -> None:
    """Check that student and teacher states can be compared, if their loss weight is above 0."""
    if not distill.hidden:
        return
    _check_depth(model, teacher)
    if _has_two_sides(model):
        raise ValueError(
            f"KroneckerTrainer: expected hidden=0 for an encoder-decoder, whose encoder and "
            f"decoder have different tokens, got {distill} for {type(model).__name__}"
        )


def _check_depth(model: nn.Module, teacher: nn.Module) -> None:
    """Check that the model and its teacher have the same number of hidden states."""
    ours = _depth(model)
    theirs = _depth(teacher)
    if ours != theirs:
        raise ValueError(
            f"KroneckerTrainer: the model has {ours} blocks and its teacher has {theirs}, expected "
            "the same number for hidden above 0; use only logits and labels in DistillConfig"
        )


def _depth(model: nn.Module) -> int | None:
    """Return the number of a model's blocks, or None if the config does not name the number."""
    return getattr(getattr(model, "config", None), "num_hidden_layers", None)


class _GradientNorms(TrainerCallback):
    """A callback that records the norms of gradients, after clipping, in steps that are logged."""

    def __init__(self, norms: dict[str, float]):
        self.norms = norms

    def on_pre_optimizer_step(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        every = 1
        if args.logging_strategy == "steps":
            every = max(1, int(state.logging_steps or 1))
        # the step is counted after this hook, hence + 1; the first step is always measured
        if (state.global_step + 1) % every and state.global_step:
            return
        self.norms.clear()
        for group in bare_optimizer(kwargs["optimizer"]).param_groups:
            gradients = [p.grad for p in group["params"] if p.grad is not None]
            name = f"gradient/{group_kind(group)}"
            self.norms[name] = _norm(gradients, self.norms.get(name))


def _norm(tensors: list[Tensor], before: float | None) -> float:
    total = sum(float(t.float().square().sum()) for t in tensors)
    # groups of one kind, such as factors with several learning rates, share one norm
    return (total + (before or 0.0) ** 2) ** 0.5
