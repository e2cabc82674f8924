"""`Student`: a merge of which the weights, or adapters added to it, are trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from model_components._folders import new_file

from ..masks.config import KLConfig
from ..masks.distillation import distill
from ..masks.training import DistillTrainer

TRAINED = "trained.safetensors"


class Student(nn.Module):
    """A model that is trained on the cached hidden states of teachers, with the loss of `distill`.

    Args:
        model: The merge that training starts from. It is changed in place.
        heads: The teachers' output heads, (V, H) each.
        biases: The biases of these heads, (V,) each; None if the heads have no bias.
        rank: Rank of the adapters on all linear layers except the head. None: train all weights
            except the embeddings and the head.
    """

    # makes the Trainer pass the number of positions in all micro-batches of a step
    accepts_loss_kwargs = True

    def __init__(
        self,
        model: PreTrainedModel,
        heads: Sequence[Tensor],
        biases: Sequence[Tensor] | None,
        rank: int | None,
    ):
        super().__init__()
        self.count = len(heads)
        self._heads = list(heads)
        self._biases = biases
        self._adapted: Any = None
        if rank is None:
            tables: Any = (model.get_input_embeddings(), model.get_output_embeddings())
            # by identity, because a tied head is the embedding itself
            frozen = {id(p) for table in tables for p in table.parameters()}
            for parameter in model.parameters():
                parameter.requires_grad_(id(parameter) not in frozen)
        else:
            # alpha = 2 r scales an adapter's change by 2 at every rank
            config = LoraConfig(
                r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM"
            )
            # peft puts its layers into `model`; the wrapper is kept to merge adapters at the end
            self._adapted = get_peft_model(model, config)
        self.model = model

    def forward(self, *, kl: KLConfig, **batch: Any) -> CausalLMOutput:
        """Return the loss of a batch."""
        return CausalLMOutput(loss=distill(self, kl, **batch))

    def final_hidden(self, **inputs: object) -> Tensor:
        """Return the final hidden states, (B, L, H), in the dtype of the teachers."""
        return self.model.base_model(**self.uncached(inputs))[0].to(self._heads[0].dtype)

    def uncached(self, inputs: Mapping[str, object]) -> dict[str, object]:
        """Return the inputs with ``use_cache=False``, so that keys and values are not cached."""
        return {**inputs, "use_cache": False}

    def head_options(self) -> dict[str, Any]:
        """Return the heads of teachers and student as keyword arguments for `masked_kl`."""
        head: Any = self.model.get_output_embeddings()
        # detached: no student trains its head
        own = head.weight.detach()
        # a Trainer may have moved the student
        options = {"heads": [teacher.to(own.device) for teacher in self._heads], "head": own}
        # Phi and GPT-J have a bias in the head
        if self._biases is not None:
            options["bias"] = head.bias.detach()
            options["teacher_biases"] = [bias.to(own.device) for bias in self._biases]
        return options

    def trained(self) -> dict[str, nn.Parameter]:
        """Return the trained parameters by name."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def finished(self) -> Any:
        """Return the model; adapters, if there are any, are merged into its weights."""
        if self._adapted is None:
            return self.model
        return self._adapted.merge_and_unload()


class StudentTrainer(DistillTrainer):
    """A trainer for a `Student`. Its checkpoints hold only the tensors that are trained."""

    def needed_files(self) -> Sequence[str]:
        """Return the name of the file with the trained tensors."""
        return (TRAINED,)

    def _student(self) -> Student:
        student = self.unwrapped()
        assert isinstance(student, Student)
        return student

    def _save(self, output_dir: str | None = None, state_dict: object = None) -> None:
        tensors = {
            name: p.detach().cpu().contiguous() for name, p in self._student().trained().items()
        }
        folder = Path(output_dir or str(self.args.output_dir))
        with new_file(folder / TRAINED, "learn") as temporary:
            save_file(tensors, temporary)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: object = None) -> None:
        stored = load_file(Path(resume_from_checkpoint) / TRAINED)
        with torch.no_grad():
            for name, parameter in self._student().trained().items():
                parameter.copy_(stored[name])
