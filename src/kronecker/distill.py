"""Training back: `KroneckerTrainer`, with groups of parameters, distillation, and norms in its logs."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel, Trainer, TrainerCallback

from .groups import group_kind, parameter_groups
from .schedule import FadeIn, FreezePretrained
from .sites import COMPRESSED, find_mlps
from .storage import is_compressed, read_files, write_files


@dataclass(frozen=True, kw_only=True)
class DistillConfig:
    """What a student learns from: labels * cross-entropy + logits * KL + hidden * MSE + layers * MSE.

    Args:
        labels: Weight of the model's own loss.
        logits: Weight of T² KL(teacher ‖ student) over the vocabulary, a mean over tokens.
        temperature: T of both distributions.
        hidden: Weight of the squared error of hidden states over the teacher's mean square, a mean over layers.
        layers: Weight of the same for each MLP on the teacher's real inputs: each learns alone, and at once.

    Raises:
        ValueError: A negative weight, all of them zero, a temperature that is not positive.

    >>> DistillConfig(logits=1.0, labels=0.5).temperature
    2.0
    """

    labels: float = 0.0
    logits: float = 1.0
    temperature: float = 2.0
    hidden: float = 0.0
    layers: float = 0.0

    def __post_init__(self) -> None:
        weights = {n: getattr(self, n) for n in ("labels", "logits", "hidden", "layers")}
        if min(weights.values()) < 0 or not any(weights.values()):
            raise ValueError(f"DistillConfig: weights are {weights}, needed none below 0 and one above")
        if self.temperature <= 0:
            raise ValueError(f"DistillConfig: temperature is {self.temperature}, needed above 0")


def hidden_loss(student: tuple[Tensor, ...], teacher: tuple[Tensor, ...], mask: Tensor | None) -> Tensor:
    """Mean over layers of the squared error over the teacher's mean square, on tokens that are not padding."""
    losses = [_relative(s, t, mask) for s, t in zip(student, teacher, strict=True)]
    return torch.stack(losses).mean()


def _relative(student: Tensor, teacher: Tensor, mask: Tensor | None) -> Tensor:
    if mask is not None and mask.shape == teacher.shape[:-1]:
        student, teacher = student[mask.bool()], teacher[mask.bool()]
    teacher = teacher.float()
    return (student.float() - teacher).square().mean() / teacher.square().mean().clamp_min(1e-12)


def _takes_one(module: nn.Module) -> bool:
    """Whether its forward needs nothing but one tensor."""
    parameters = list(inspect.signature(module.forward).parameters.values())
    needed = [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    return len(needed) == 1


class _Mlps:
    """A teacher's MLPs, watched, and the student's on the same inputs."""

    def __init__(self, teacher: nn.Module, student: nn.Module):
        self.teacher, self.student = teacher, student
        self.pairs = find_mlps(teacher)
        for mlp in self.pairs:
            up, down = mlp.ups[0].rpartition("."), mlp.down.rpartition(".")
            if up[0] != down[0] and not mlp.ups[0].endswith("intermediate.dense"):
                raise ValueError(f"KroneckerTrainer: layers={mlp.down!r} has no MLP of its own to run; needed layers=0")
            if not mlp.ups[0].endswith("intermediate.dense") and not _takes_one(teacher.get_submodule(up[0])):
                raise ValueError(f"KroneckerTrainer: {up[0]} is more than an MLP; needed layers=0")

    def watch(self, found: dict[str, tuple[Tensor, Tensor]]) -> list[Any]:
        """Hooks that keep each MLP's input and what its last layer says."""
        handles, inputs = [], {}
        for mlp in self.pairs:
            up, down = self.teacher.get_submodule(mlp.ups[0]), self.teacher.get_submodule(mlp.down)
            handles.append(up.register_forward_hook(lambda m, x, y, n=mlp.down: inputs.update({n: x[0]})))
            handles.append(down.register_forward_hook(lambda m, x, y, n=mlp.down: found.update({n: (inputs[n], y)})))
        return handles

    def loss(self, found: Mapping[str, tuple[Tensor, Tensor]], mask: Tensor | None) -> Tensor:
        losses = []
        for mlp in self.pairs:
            x, y = found[mlp.down]
            losses.append(_relative(self._run(mlp, x), y, mask))
        return torch.stack(losses).mean()

    def _run(self, mlp: Any, x: Tensor) -> Tensor:
        parent = mlp.ups[0].rpartition(".")[0]
        if mlp.ups[0].endswith("intermediate.dense"):  # BERT's two modules
            return self.student.get_submodule(mlp.down)(self.student.get_submodule(parent)(x))
        return self.student.get_submodule(parent)(x)


class KroneckerTrainer(Trainer):
    """A `transformers.Trainer` that trains a compressed model back.

    Learning rates by group (`parameter_groups`), distillation from a teacher in the same process, and the norms of
    factors, the rest and their gradients in the logs. Schedules are callbacks: `FreezePretrained`, `FadeIn`. Everything
    else (schedule of rates, accumulation, mixed precision, resume, DDP) is `TrainingArguments`' own; its
    ``learning_rate`` and ``weight_decay`` are the factors'.

    Args:
        model: With compressed layers.
        args: `TrainingArguments`.
        teacher: The original model; frozen, in evaluation mode.
        distill: What to learn from; default with a teacher: its logits at temperature 2.
        pretrained_learning_rate: Of everything but factors; default: the same.
        structure_aware: See `parameter_groups`.
        **rest: Of `Trainer`.

    Raises:
        ValueError: No compressed layer, a ``distill`` that needs a teacher and there is none.

    >>> KroneckerTrainer(nn.Linear(2, 2), None)
    Traceback (most recent call last):
    ValueError: KroneckerTrainer: Linear has no compressed layer; convert_ it first
    """

    def __init__(
        self,
        model: nn.Module,
        args: Any,
        *,
        teacher: nn.Module | None = None,
        distill: DistillConfig | None = None,
        pretrained_learning_rate: float | None = None,
        structure_aware: bool = False,
        **rest: Any,
    ):
        if not any(isinstance(m, COMPRESSED) for m in model.modules()):
            raise ValueError(f"KroneckerTrainer: {type(model).__name__} has no compressed layer; convert_ it first")
        if distill is not None and teacher is None:
            raise ValueError("KroneckerTrainer: distill needs a teacher, got None")
        self.teacher = None if teacher is None else teacher.eval().requires_grad_(False)
        self.distill = (distill or DistillConfig()) if teacher is not None else None
        self.rates = {"pretrained_learning_rate": pretrained_learning_rate, "structure_aware": structure_aware}
        self._mlps = _Mlps(teacher, model) if teacher is not None and self.distill and self.distill.layers else None
        callbacks = rest.get("callbacks") or []
        if any(isinstance(c, (FreezePretrained, FadeIn)) for c in callbacks):
            args.ddp_find_unused_parameters = True  # what learns changes on the way
        self._gradients: dict[str, float] = {}
        super().__init__(model=model, args=args, **rest)
        if self.teacher is not None:
            self.teacher.to(self.args.device)
        self._accepts = self.model_accepts_loss_kwargs
        if self.distill is not None:
            self.model_accepts_loss_kwargs = True  # losses are over the tokens of a whole step
        self.add_callback(_GradientNorms(self._gradients))

    def create_optimizer(self, *ignored: Any, **named: Any) -> torch.optim.Optimizer:
        """The arguments' optimizer over `parameter_groups`."""
        if self.optimizer is None:
            assert self.model is not None
            groups = parameter_groups(
                self.model,
                learning_rate=self.args.learning_rate,
                weight_decay=self.args.weight_decay,
                **self.rates,
            )
            kind, options = self.get_optimizer_cls_and_kwargs(self.args, self.model)  # pyrefly: ignore
            self.optimizer = kind(groups, **options)
        return self.optimizer

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """The weighted sum of `DistillConfig`; without a teacher the model's own loss."""
        if self.distill is None or self.teacher is None or not model.training:
            return self._own_loss(model, inputs, return_outputs, num_items_in_batch)
        config, found = self.distill, {}
        named = {"output_hidden_states": config.hidden > 0}
        given = {k: v for k, v in inputs.items() if k not in ("labels", "label")}
        handles = self._mlps.watch(found) if self._mlps else []
        try:
            with torch.no_grad():
                theirs = self.teacher(**given, **named)
        finally:
            for handle in handles:
                handle.remove()
        ours = model(**given, **named)
        mask, labels = inputs.get("attention_mask"), inputs.get("labels")
        loss = torch.zeros((), device=self.args.device)
        if config.logits or config.labels:
            loss = loss + self._token_loss(ours, theirs, labels, mask, num_items_in_batch)
        # the trainer divides by the micro-batches of a step itself, when nothing is counted
        share = 1 if num_items_in_batch is None else self.current_gradient_accumulation_steps
        if config.hidden:
            loss = loss + config.hidden * hidden_loss(ours.hidden_states, theirs.hidden_states, mask) / share
        if self._mlps:
            everything = 0.0 * ours[0].float().sum()  # DDP waits for every parameter that the forward used
            loss = loss + config.layers * self._mlps.loss(found, mask) / share + everything
        return (loss, ours) if return_outputs else loss

    def _own_loss(self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool, items: Any) -> Any:
        """The stock trainer's loss, with the stock flag."""
        held, self.model_accepts_loss_kwargs = self.model_accepts_loss_kwargs, self._accepts
        try:
            return super().compute_loss(model, inputs, return_outputs, items if self._accepts else None)
        finally:
            self.model_accepts_loss_kwargs = held

    def _token_loss(
        self, ours: Any, theirs: Any, labels: Tensor | None, mask: Tensor | None, items: Tensor | int | None
    ) -> Tensor:
        """KL and cross-entropy over the tokens of a step: those that have a label, shifted for language models."""
        config, student, teacher = self.distill, getattr(ours, "logits", None), getattr(theirs, "logits", None)
        assert config is not None
        if student is None or teacher is None:
            raise ValueError(
                f"KroneckerTrainer: {type(self._unwrapped()).__name__} has no logits; needed "
                f"DistillConfig(logits=0) with hidden or layers"
            )
        if labels is not None and student.dim() == 3 and labels.shape == student.shape[:2]:
            if self._unwrapped().can_generate() and not self._unwrapped().config.is_encoder_decoder:
                labels = F.pad(labels, (0, 1), value=-100)[:, 1:]
            keep = labels != -100
            student, teacher, labels = student[keep], teacher[keep], labels[keep]
        elif student.dim() == 3 and mask is not None:
            student, teacher, items = student[mask.bool()], teacher[mask.bool()], None
        student = student.float().reshape(-1, student.shape[-1])
        count = len(student) if items is None else items
        total = torch.zeros((), device=student.device)
        if config.logits:
            t = config.temperature
            log_p, log_q = (F.log_softmax(z.float().view_as(student) / t, -1) for z in (teacher, student))
            total = total + config.logits * t * t * F.kl_div(log_q, log_p, log_target=True, reduction="sum")
        if config.labels:
            if labels is None:
                raise ValueError("KroneckerTrainer: DistillConfig has labels > 0, but the batch has none")
            total = total + config.labels * F.cross_entropy(student, labels.reshape(-1), reduction="sum")
        if items is None:
            return total / max(1, len(student))
        return total / count * (self.accelerator.num_processes if self.args.average_tokens_across_devices else 1)

    def _unwrapped(self) -> Any:
        return self.accelerator.unwrap_model(self.model)

    def log(self, logs: dict[str, float], *rest: Any, **named: Any) -> None:
        """The logs, with norms of each group's parameters and gradients while it trains."""
        if "loss" in logs and self.optimizer is not None:
            groups = getattr(self.optimizer, "optimizer", self.optimizer).param_groups
            for group in groups:
                kind = group_kind(group)
                held = [p.detach() for p in group["params"]]
                logs[f"norm/{kind}"] = _norm(held, logs.get(f"norm/{kind}"))
            logs |= self._gradients
        super().log(logs, *rest, **named)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """A checkpoint that `from_pretrained` loads; tied factors are written once."""
        folder = Path(output_dir or self.args.output_dir or ".")
        folder.mkdir(parents=True, exist_ok=True)
        if isinstance(self._unwrapped(), PreTrainedModel):
            write_files(self._unwrapped(), folder)
            if self.processing_class is not None:
                self.processing_class.save_pretrained(folder)
            torch.save(self.args, folder / "training_args.bin")
        else:
            super()._save(output_dir, state_dict)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if is_compressed(resume_from_checkpoint):
            self._unwrapped().load_state_dict(read_files(Path(resume_from_checkpoint))[1])
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        self._load_from_checkpoint(self.state.best_model_checkpoint or "")


class _GradientNorms(TrainerCallback):
    """Norms of each group's gradients, taken in the step that is logged."""

    def __init__(self, found: dict[str, float]):
        self.found = found

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        every = max(1, int(state.logging_steps or 1))
        if (state.global_step + 1) % every and state.global_step:
            return
        self.found.clear()
        optimizer = kwargs["optimizer"]
        for group in getattr(optimizer, "optimizer", optimizer).param_groups:
            held = [p.grad for p in group["params"] if p.grad is not None]
            name = f"gradient/{group_kind(group)}"
            self.found[name] = _norm(held, self.found.get(name))


def _norm(tensors: list[Tensor], before: float | None) -> float:
    total = sum(float(t.float().square().sum()) for t in tensors)
    return (total + (before or 0.0) ** 2) ** 0.5
