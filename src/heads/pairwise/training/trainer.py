"""`PairwiseTrainer`: `transformers.Trainer` for pairs.

It adds layerwise learning rates and a guard that stops runs that learn nothing.
"""

from __future__ import annotations

import os
from typing import Any, Unpack

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Sampler
from transformers import EvalPrediction, TrainingArguments
from transformers.trainer_utils import EvalLoopOutput
from transformers.training_args import ParallelMode

from model_components._devices import warn_if_slow
from model_components._trainer import Loss, StepTrainer, TrainData, TrainerOptions

from ..choices import CLASSES
from ..data.collate import PairwiseCollator, PairwiseDataset
from ..functional import log_probabilities, pairwise_loss
from ..inference import sides_of
from ..judge import Judge
from ..pairs import count_labels
from ..report.metrics import pairwise_metrics
from .guard import DeadRunGuard
from .parameters import parameter_groups

# number of pairs from which the scales of features are estimated, without and with `encode_`
_SOME = 256
_ALL = 20_000


class PairwiseTrainer(StepTrainer):
    """A trainer for a `PairwiseModel` on a `PairwiseDataset`.

    Batches are collated by `PairwiseCollator`; encoders that cannot be packed get batches of pairs
    of similar length. A new head starts with the tie rate of the training data, and with feature
    scales that are estimated on some of these data. A `DeadRunGuard` stops a run that learns
    nothing, unless ``guard`` is False. Evaluation reports accuracy, log-loss and calibration error.

    Args:
        model: A `PairwiseModel`, which peft may have wrapped. For `hyperparameter_search`, pass
            None, and a ``model_init`` that builds a model for each run.
        args: `TrainingArguments`.
        train_dataset: A `PairwiseDataset` with labels.
        layer_decay: The factor by which the learning rate falls from each encoder layer to the
            layer below it; see `parameter_groups`.
        head_lr_ratio: The head's learning rate divided by the encoder's. A new head starts from
            zeros and needs a higher rate.
        guard: A `DeadRunGuard`; True for the default one, False for none.
        **options: Options of `Trainer`, such as ``eval_dataset`` and ``callbacks``.

    Raises:
        ValueError: A data set is not a `PairwiseDataset` or has no labels, no parameter is
            trainable, an argument is not supported, every label is a tie, or, with link
            ``"concat"``, the same side (A or B) wins every pair.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        args: TrainingArguments | None = None,
        *,
        train_dataset: TrainData = None,
        layer_decay: float = 1.0,
        head_lr_ratio: float = 10.0,
        guard: DeadRunGuard | bool = True,
        **options: Unpack[TrainerOptions],
    ):
        if options.get("compute_loss_func") is not None:
            raise ValueError(
                "PairwiseTrainer: compute_loss_func would not be called, expected None; override "
                "compute_loss to use another loss"
            )
        if options.get("data_collator") is None:
            options["data_collator"] = PairwiseCollator()
        if options.get("compute_metrics") is None:
            options["compute_metrics"] = _metrics
        super().__init__(model=model, args=args, train_dataset=train_dataset, **options)
        _check_arguments(self.args)
        _check_labeled("train_dataset", self.train_dataset)
        _check_labeled("eval_dataset", self.eval_dataset)
        self.layer_decay = layer_decay
        self.head_lr_ratio = head_lr_ratio
        self.args.remove_unused_columns = False  # the collator reads all columns
        # on the CPU there is nothing to pin memory for
        self.args.dataloader_pin_memory &= self.args.device.type != "cpu"
        if self.args.ddp_find_unused_parameters is None:
            # there are no unused parameters, and looking for some takes time
            self.args.ddp_find_unused_parameters = False
        self.model_accepts_loss_kwargs = True  # losses are means over the pairs of a whole step
        if not any(p.requires_grad for p in self.judge.parameters()):
            raise ValueError("PairwiseTrainer: expected trainable parameters, got none")
        self._begin(self.judge)
        self.guard = (DeadRunGuard() if guard is True else guard) or None
        if self.guard is not None:
            self.guard.trainer = self
            self.add_callback(self.guard)

    @property
    def judge(self) -> Judge:
        """The model, which peft may have wrapped."""
        model: Any = self.model
        return model

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """Return a model for a run, with its head initialized from the training data."""
        judge: Any = super().call_model_init(trial)
        if hasattr(self, "train_dataset"):  # not while Trainer is being constructed
            self._begin(judge)
        return judge

    def _begin(self, judge: Judge) -> None:
        """Check the data, and initialize a new head from their tie rate and their features."""
        data: TrainData = self.train_dataset
        if data is None:
            return
        check_training_data(data, judge)
        if self.eval_dataset is not None:
            held_out = self.eval_dataset
            named = held_out if isinstance(held_out, dict) else {"eval_dataset": held_out}
            for name, one in named.items():
                assert isinstance(one, PairwiseDataset)  # checked by `_check_labeled`
                _check_features(name, one, judge)
        # a trained head's weights depend on its scales, so these must not change
        if not judge.head.untrained:
            return
        if not any(p.requires_grad for p in judge.head.parameters()):
            raise ValueError(
                "PairwiseTrainer: expected a trainable head, got a new head that is frozen, so no "
                "gradient would reach the encoder; call model.head.requires_grad_(True)"
            )
        if judge.config.ties:
            # at least half a pair, because rates of 0 and 1 have infinite logits
            least = 0.5 / len(data)
            ties = 0.0
            for label in data.labels:
                ties += label[2] if isinstance(label, tuple) else label == 2
            judge.head.set_tie_rate_(min(max(ties / len(data), least), 1 - least))
        # evenly spaced, because the pairs may be sorted
        some = range(0, len(data), max(1, len(data) // (_ALL if data.encoded else _SOME)))
        judge.head.fit_(*sides_of(judge, data, some))

    def _get_train_sampler(self, train_dataset: TrainData = None) -> Sampler | None:
        """Return a sampler that groups pairs of similar length if the encoder pads sequences."""
        if train_dataset is None:
            data: TrainData = self.train_dataset
        else:
            data = train_dataset
        # nothing is padded, so batches can be random
        if self.judge.packs or data.encoded:
            return super()._get_train_sampler(train_dataset)
        return self.batches_of_like_length(data.lengths)

    def optimizer_groups(self) -> list[dict[str, object]]:
        """Return `parameter_groups` with the learning rate and weight decay of ``args``."""
        return parameter_groups(
            self.judge,
            learning_rate=self.args.learning_rate,
            weight_decay=self.args.weight_decay,
            layer_decay=self.layer_decay,
            head_lr_ratio=self.head_lr_ratio,
        )

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Loss:
        """Return the model's loss, weighted by the batch's fraction of the pairs of the step."""
        outputs = model(**inputs)
        if model.training and self.guard is not None:
            self.guard.observe(outputs.logits, inputs["labels"])
        loss = self.share_of_step(outputs.loss, inputs["labels"].numel(), num_items_in_batch)
        if return_outputs:
            return (loss, outputs)
        return loss

    def evaluation_loop(self, *args: Any, **named: Any) -> EvalLoopOutput:
        """Return predictions and metrics; the loss is over all pairs, each counted once.

        With several processes, the loss of `transformers.Trainer` counts some pairs twice, because
        pairs of the first process also fill up the last batches of other processes.
        """
        output = super().evaluation_loop(*args, **named)
        config = self.judge.config
        metrics = output.metrics or {}
        name = f"{named.get('metric_key_prefix', 'eval')}_loss"
        if name in metrics and isinstance(output.predictions, np.ndarray):
            metrics[name] = float(
                pairwise_loss(
                    torch.as_tensor(output.predictions),
                    torch.as_tensor(output.label_ids),
                    label_smoothing=config.label_smoothing,
                )
            )
        return output


def _check_arguments(args: TrainingArguments) -> None:
    """Check that the trainer supports these arguments."""
    several = int(os.environ.get("WORLD_SIZE", 1)) > 1
    if several and args.parallel_mode != ParallelMode.DISTRIBUTED:
        raise ValueError(
            "PairwiseTrainer: several processes were started (WORLD_SIZE), but no process group "
            "connects them, so each would train alone; without an accelerator, set use_cpu=True"
        )
    if args.n_gpu > 1:
        raise ValueError(
            f"PairwiseTrainer: expected one GPU per process, got {args.n_gpu}; DataParallel would "
            "split packed sequences, so start the script with torchrun"
        )
    # Trainer smooths labels in its own compute_loss, so here the argument would have no effect
    if args.label_smoothing_factor:
        raise ValueError(
            "PairwiseTrainer: expected label_smoothing_factor=0, got "
            f"{args.label_smoothing_factor}; set label_smoothing in the model's config"
        )


def _check_labeled(name: str, data: object) -> None:
    """Check that ``data`` is None, a labeled `PairwiseDataset`, or a dict of these."""
    for one in data.values() if isinstance(data, dict) else [data]:
        if one is None:
            continue
        if not isinstance(one, PairwiseDataset) or not len(one) or one.labels[0] is None:
            raise ValueError(
                f"PairwiseTrainer: {name} is {_told(one)}; expected a PairwiseDataset with labels"
            )


def _check_features(name: str, data: PairwiseDataset, judge: Judge) -> None:
    """Check that features in a data set, if any, are from this judge, with a frozen encoder."""
    encoder = [*judge.encoder.parameters(), *judge.pool.parameters()]
    if data.encoded and any(p.requires_grad for p in encoder):
        raise ValueError(
            f"PairwiseTrainer: {name} holds features of a frozen encoder, but the encoder is "
            "trained; call freeze_(model, 'all'), or pass a data set without features"
        )
    data.check_made_for("PairwiseTrainer", judge)


def check_training_data(data: PairwiseDataset, judge: Judge) -> None:
    """Check that the data suit the model's link, and that not all labels are ties."""
    _check_features("train_dataset", data, judge)
    if not data.encoded:
        warn_if_slow("PairwiseTrainer", judge.encoder)
    if all(
        label == 2 or (isinstance(label, tuple) and label[2:] == (1.0,)) for label in data.labels
    ):
        raise ValueError(
            "PairwiseTrainer: every label is a tie; expected some pairs in which A or B is better"
        )
    won = count_labels(data.pairs)[:2]
    if judge.config.link == "concat" and not all(won):
        raise ValueError(
            f"PairwiseTrainer: {CLASSES[won.index(max(won))]} wins every pair, so link 'concat' "
            "would learn only the position; expected pairs of which A wins some and B wins some, "
            "or another link"
        )


def _told(data: object) -> str:
    if not isinstance(data, PairwiseDataset):
        return f"a {type(data).__name__}"
    if len(data):
        return f"{len(data)} pairs without labels"
    return "empty"


def _metrics(found: EvalPrediction) -> dict[str, float]:
    logits: object = found.predictions
    labels: object = found.label_ids
    metrics = pairwise_metrics(
        log_probabilities(torch.as_tensor(logits).double()), torch.as_tensor(labels)
    )
    return {name: getattr(metrics, name) for name in ("accuracy", "log_loss", "calibration_error")}
