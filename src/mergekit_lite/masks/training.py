"""`MaskTrainer`: transformers' Trainer with the masks' loss and the masks' files.

`shard_frozen_` shards frozen weights over ranks.
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
    """A trainer whose model computes the distillation loss of a batch, given a `KLConfig`.

    Args:
        model: Its ``forward`` takes ``kl``, ``normalizer`` and a batch, and returns a loss.
        args: `TrainingArguments`; ``remove_unused_columns`` is turned off, since examples carry
            their task.
        kl: The settings of the loss.
        **options: Of `Trainer`.
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
        """Return the loss over the positions of all micro-batches and ranks of a step."""
        loss = model(kl=self.kl, normalizer=num_items_in_batch, **inputs).loss
        if num_items_in_batch is not None:
            # DDP takes the mean of gradients, and the normalizer counts all processes already
            loss = loss * self.processes_of_mean()
        return (loss, {}) if return_outputs else loss

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, object],
        prediction_loss_only: bool,
        ignore_keys: object = None,
    ) -> tuple[Tensor, None, None]:
        """Return the loss; logits are never made."""
        with torch.no_grad(), self.compute_loss_context_manager():
            loss = self.compute_loss(model, self._prepare_inputs(inputs))
        assert isinstance(loss, Tensor)
        return loss.detach(), None, None


class MaskTrainer(DistillTrainer):
    """A `transformers.Trainer` for a `Merger`: only masks learn, and only masks are saved.

    The learning rate, schedule, accumulation, mixed precision, gradient checkpointing, logs, resume
    and DDP are `TrainingArguments`' own. A dict as ``eval_dataset`` is evaluated task by task
    (``eval_NAME_loss``). Checkpoints hold ``masks.safetensors`` beside optimizer, schedule and
    random state.

    Args:
        model: A `Merger`.
        args: `TrainingArguments`; ``remove_unused_columns`` is turned off, since examples carry
            their task.
        train_dataset: Examples with their task, such as a `TaskMixture`.
        kl: The settings of the loss.
        **options: Of `Trainer`: ``eval_dataset``, ``data_collator`` (a `MaskCollator`), ...

    Raises:
        ValueError: ``model`` is not a `Merger`; more tasks than components; several GPUs without
            torchrun.

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
            raise ValueError(f"MaskTrainer: model is {type(model).__name__}, expected a Merger")
        # nn.DataParallel would copy all frozen components to each card in every step
        if args.n_gpu > 1:
            raise ValueError(
                f"MaskTrainer: {args.n_gpu} GPUs in one process; start one for each with torchrun"
            )
        if options.get("data_collator") is None:
            raise ValueError(
                "MaskTrainer: data_collator is missing, expected a MaskCollator, which pads and "
                "keeps the task"
            )
        data = train_dataset
        if hasattr(data, "__len__") and not len(data):
            raise ValueError("MaskTrainer: train_dataset is empty; expected examples")
        if isinstance(data, TaskMixture) and (kl or KLConfig()).coefficients == "task":
            _check_mixture(data, model)
        # no loss reaches the masks of an encoder's pooler, so DDP has to look for them there
        if args.ddp_find_unused_parameters is None and model.model.can_generate():
            args.ddp_find_unused_parameters = False  # every mask takes part in every step
        super().__init__(model, args, kl=kl, train_dataset=train_dataset, **options)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """The logs, while it trains with the mean of each component's masks."""
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
        """The model without wrappers."""
        merger = self.unwrapped()
        assert isinstance(merger, Merger)
        return merger


def _check_mixture(data: TaskMixture, model: Merger) -> None:
    """Raise if there are more tasks than components; warn of a component without examples."""
    if len(data.datasets) > model.count:
        raise ValueError(
            f"MaskTrainer: expected at most one task per component ({model.count}), got "
            f"{len(data.datasets)}; or coefficients='evidence', which ignores tasks"
        )
    followed = [any(len(d) for d in parts) for parts in data.datasets]
    for k, label in enumerate(model.labels[: model.count]):
        if k >= len(followed) or not followed[k]:
            warnings.warn(f"MaskTrainer: component {k} ({label}) has no examples", stacklevel=3)
            break


def shard_frozen_(merger: Merger, mesh: DeviceMesh | None = None) -> list[str]:
    """Shard the blocks' frozen weights over the ranks (FSDP2), for models larger than one card.

    Masks stay whole.

    Each block is gathered when it runs, forward and backward, and let go after. Call it in every
    process, before the trainer is made; DDP then reduces the masks' gradients as ever. Embeddings
    and head stay whole on every rank.

    Args:
        merger: Changed in place.
        mesh: A `DeviceMesh` of one dimension; default: all ranks.

    Returns:
        The names of the sharded blocks.

    Raises:
        ValueError: No process group, or a model without a list of blocks.

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
        # experts are a list inside a block, and are sharded with it
        if not any(name.startswith(f"{other}.") for other in lists)
        # a masked embedding or head holds a list, too: its components
        and not name.endswith("components")
        for i, block in enumerate(modules)
    }
    if not blocks:
        raise ValueError(f"shard_frozen_: {type(merger.model).__name__} has no list of blocks")
    merger.hashes()  # from whole weights
    masks = set(merger.masks().values())
    for block in blocks.values():
        fully_shard(block, mesh=mesh, ignored_params=masks)
    # DDP would spread the first rank's values at its start, and shards differ by rank
    frozen = [n for n, p in merger.named_parameters() if not p.requires_grad]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(merger, frozen)
    return list(blocks)
