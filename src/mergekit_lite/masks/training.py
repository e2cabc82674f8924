"""`MaskTrainer`: a transformers Trainer that trains and saves only masks.

`shard_frozen_` shards the frozen weights over ranks.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import TrainingArguments

from model_components._trainer import Loss, StepTrainer, TrainData, TrainerOptions

from .config import KLConfig
from .data import TaskMixture
from .merger import Merger
from .storage import MASKS


class DistillTrainer(StepTrainer):
    """A trainer for models that compute the distillation loss of a batch, given a `KLConfig`.

    Args:
        model: A module whose ``forward`` takes ``kl``, ``normalizer`` and a batch, and returns an
            output with a ``loss``.
        args: `TrainingArguments`; ``remove_unused_columns`` is turned off, since examples carry
            their task.
        kl: The settings of the loss.
        **options: Further arguments of `Trainer`.
    """

    def __init__(
        self,
        model: nn.Module,
        args: TrainingArguments,
        *,
        kl: KLConfig | None = None,
        **options: Any,
    ):
        args.remove_unused_columns = False
        self.kl = kl or KLConfig()
        super().__init__(model=model, args=args, **options)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Mapping[str, object],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Loss:
        """Return what a batch adds to the loss, the mean over a step's supervised positions.

        The mean is over the positions of all micro-batches and ranks.
        """
        loss = model(kl=self.kl, normalizer=num_items_in_batch, **inputs).loss
        if num_items_in_batch is not None:
            # DDP averages gradients over processes, but the normalizer already counts all processes
            loss = loss * self.processes_of_mean()
        return (loss, {}) if return_outputs else loss

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, object],
        prediction_loss_only: bool,
        ignore_keys: object = None,
    ) -> tuple[Tensor, None, None]:
        """Return the loss of an evaluation batch, and None in place of logits and labels."""
        with torch.no_grad(), self.compute_loss_context_manager():
            loss = self.compute_loss(model, self._prepare_inputs(inputs))
        assert isinstance(loss, Tensor)
        return loss.detach(), None, None


class MaskTrainer(DistillTrainer):
    """A `transformers.Trainer` for a `Merger`: only masks are trained, and only masks are saved.

    All settings of `TrainingArguments` apply, such as learning rate, schedule, gradient
    accumulation, mixed precision and gradient checkpointing. DDP and resuming also work. If
    ``eval_dataset`` is a dict, its entries are evaluated separately (``eval_NAME_loss``).
    Checkpoints hold ``masks.safetensors`` and the states of optimizer, schedule and random
    generators.

    Args:
        model: A `Merger`.
        args: `TrainingArguments`; ``remove_unused_columns`` is turned off, since examples carry
            their task.
        train_dataset: Examples with their task, such as a `TaskMixture`.
        kl: The settings of the loss.
        **options: Further arguments of `Trainer`: ``data_collator`` (a `MaskCollator`, required),
            ``eval_dataset``, ...

    Raises:
        ValueError: ``model`` is not a `Merger`. There is no collator, there are no examples, or
            there are more tasks than components. Several GPUs are used without torchrun.

    >>> import tempfile
    >>> from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments
    >>> from mergekit_lite.masks import MaskCollator
    >>> tiny = GPT2Config(vocab_size=11, n_positions=8, n_embd=4, n_layer=1, n_head=1)
    >>> merger = Merger([GPT2LMHeadModel(tiny), GPT2LMHeadModel(tiny)])
    >>> data = TaskMixture([[{"input_ids": [1, 2, 3]}], [{"input_ids": [4, 5]}]])
    >>> with tempfile.TemporaryDirectory() as out:
    ...     arguments = TrainingArguments(
    ...         out, max_steps=1, report_to="none", use_cpu=True, disable_tqdm=True
    ...     )
    ...     collator = MaskCollator(pad_token_id=0)
    ...     MaskTrainer(
    ...         merger, arguments, train_dataset=data, data_collator=collator
    ...     ).train().global_step
    {'train_runtime': ...}
    1
    """

    def __init__(
        self,
        model: Merger,
        args: TrainingArguments,
        *,
        train_dataset: TrainData = None,
        kl: KLConfig | None = None,
        **options: Unpack[TrainerOptions],
    ):
        if not isinstance(model, Merger):
            raise ValueError(
                f"MaskTrainer: the model is a {type(model).__name__}, expected a Merger"
            )
        # nn.DataParallel would copy all frozen components to each GPU in every step
        if args.n_gpu > 1:
            raise ValueError(
                f"MaskTrainer: expected one GPU per process, got {args.n_gpu}; start one process "
                "per GPU with torchrun"
            )
        if options.get("data_collator") is None:
            raise ValueError(
                "MaskTrainer: data_collator is missing, expected a MaskCollator, which pads "
                "examples and keeps their tasks"
            )
        data = train_dataset
        if hasattr(data, "__len__") and not len(data):
            raise ValueError("MaskTrainer: train_dataset is empty, expected at least one example")
        if isinstance(data, TaskMixture) and (kl or KLConfig()).coefficients == "task":
            _check_mixture(data, model)
        # masks of an encoder's pooler may be unused, so DDP must search for unused parameters there
        if args.ddp_find_unused_parameters is None and model.model.can_generate():
            args.ddp_find_unused_parameters = False  # every mask takes part in every step
        super().__init__(model, args, kl=kl, train_dataset=train_dataset, **options)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log the metrics and, during training, the mean of each component's masks."""
        if "loss" in logs:
            with torch.no_grad():
                masks = self.merger.trained_masks()
                sums = torch.stack([m.float().flatten(1).sum(1) for m in masks]).sum(0)
            places = sum(m[0].numel() for m in masks)
            logs |= {f"mask_{k}": round(float(s) / places, 5) for k, s in enumerate(sums)}
        super().log(logs, start_time)

    def _masks_of(self, folder: str | None) -> Path:
        return Path(folder or self.args.output_dir or ".") / MASKS

    def _save(self, output_dir: str | None = None, state_dict: object = None) -> None:
        if self.args.should_save:
            self.merger.save_masks(self._masks_of(output_dir))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: object = None) -> None:
        self.merger.load_masks(self._masks_of(resume_from_checkpoint))

    def _load_best_model(self) -> None:
        self.merger.load_masks(self._masks_of(self.state.best_model_checkpoint))

    @property
    def merger(self) -> Merger:
        """The merger, without the wrappers that training puts around it."""
        merger = self.unwrapped()
        assert isinstance(merger, Merger)
        return merger


def _check_mixture(data: TaskMixture, model: Merger) -> None:
    """Raise an error if tasks outnumber components; warn if a component has no examples."""
    if len(data.datasets) > model.count:
        raise ValueError(
            f"MaskTrainer: expected at most one task per component ({model.count}), got "
            f"{len(data.datasets)} tasks; or set coefficients='evidence', which ignores tasks"
        )
    followed = [any(len(d) for d in parts) for parts in data.datasets]
    for k, label in enumerate(model.labels[: model.count]):
        if k >= len(followed) or not followed[k]:
            warnings.warn(f"MaskTrainer: component {k} ({label}) has no examples", stacklevel=3)
            break


def shard_frozen_(merger: Merger, mesh: DeviceMesh | None = None) -> list[str]:
    """Shard the blocks' frozen weights over the ranks (FSDP2), for models larger than one GPU.

    The weights of a block are gathered when it runs, forward and backward, and freed afterwards.
    Masks, embeddings and head stay whole on every rank. Call this function in every process, before
    the trainer is created. DDP then reduces the masks' gradients as usual.

    Args:
        merger: The merger, which is changed in place.
        mesh: A `DeviceMesh` of one dimension; default: all ranks.

    Returns:
        The names of the sharded blocks.

    Raises:
        ValueError: There is no process group, or the model has no list of blocks.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> tiny = GPT2Config(vocab_size=11, n_positions=8, n_embd=4, n_layer=1, n_head=1)
    >>> shard_frozen_(Merger([GPT2LMHeadModel(tiny), GPT2LMHeadModel(tiny)]))
    Traceback (most recent call last):
    ValueError: shard_frozen_: expected a process group, got none; start with torchrun
    """
    from torch.distributed import is_initialized
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    if not is_initialized():
        raise ValueError("shard_frozen_: expected a process group, got none; start with torchrun")
    lists = {n: m for n, m in merger.model.named_modules() if isinstance(m, nn.ModuleList)}
    blocks = {
        f"{name}.{i}": block
        for name, modules in lists.items()
        # experts are a list inside a block, and are sharded with the block
        if not any(name.startswith(f"{other}.") for other in lists)
        # a masked embedding or head holds a list, too: its components
        and not name.endswith("components")
        for i, block in enumerate(modules)
    }
    if not blocks:
        raise ValueError(
            "shard_frozen_: expected a model with a list of blocks (nn.ModuleList), got "
            f"{type(merger.model).__name__}"
        )
    merger.hashes()  # computed now, while the weights are whole, and kept
    masks = set(merger.masks().values())
    for block in blocks.values():
        fully_shard(block, mesh=mesh, ignored_params=masks)
    # DDP would first broadcast the values of rank 0, but every rank has another shard
    frozen = [n for n, p in merger.named_parameters() if not p.requires_grad]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(merger, frozen)
    return list(blocks)
