"""Attention heads that go: which layers make them, and the stock model without them.

Query heads that share a key and a value (grouped-query attention) are dropped together: the unit is a group.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ..config import PruneConfig
from ..data.batches import first_output
from ..layers.weights import bias_of, dense, is_linear
from .finding import set_parameters_
from .stock import attribute_changes, empty, parameter_shapes, set_attributes_

_NEAR = 1e-3  # of the outputs' size: far above float32's rounding, far below what another head's place does


@dataclass(frozen=True)
class Attention:
    """The layers of one attention. Names within the model."""

    ups: tuple[str, ...]  # queries, keys and values
    down: str  # reads the heads
    groups: int


def find_attentions(model: PreTrainedModel) -> list[Attention]:
    """Modules with four linear layers: three that make queries, keys and values, and one that reads the heads.

    Found by shape: their widths are those that the config's numbers of heads give.
    """
    config: object = model.config.get_text_config()
    heads: int = getattr(config, "num_attention_heads", None) or 0
    groups: int = getattr(config, "num_key_value_heads", None) or heads
    attentions = []
    for name, module in model.named_modules() if heads else ():
        linears = {f"{name}.{n}": dense(m).shape for n, m in module.named_children() if is_linear(m)}
        for down, (_, width) in reversed(linears.items()):
            ups = [n for n in linears if n != down]
            rows = sorted(linears[n][0] for n in ups)
            if width % heads == 0 and rows == sorted([width, *[width // heads * groups] * 2]):
                attentions.append(Attention(tuple(ups), down, groups))
                break
    return attentions


def groups_to_keep(model: nn.Module, attentions: Sequence[Attention], config: PruneConfig) -> int:
    """How many groups of heads stay in each attention."""
    groups = attentions[0].groups
    if config.budget is None:
        return max(1, round(config.share * groups))
    total = sum(p.numel() for p in model.parameters())
    shapes = parameter_shapes(model)
    one = sum(shapes[n].numel() - s.numel() for a in attentions for n, s in head_shapes(model, a, groups - 1).items())
    keep, least = groups - -(-(total - config.budget) // one), total - (groups - 1) * one
    if not least <= config.budget <= total:
        raise ValueError(
            f"prune_: budget is {config.budget:,}, needed {least:,} to {total:,}, one group of heads to all of them"
        )
    return keep


def head_shapes(model: nn.Module, attention: Attention, keep: int) -> dict[str, torch.Size]:
    """The shapes of an attention's parameters with so many groups."""
    every = torch.arange(keep)
    return {n: t.shape for n, t in _cut(model, attention, every, meta=True).items()}


def _cut(model: nn.Module, attention: Attention, kept: Tensor, *, meta: bool = False) -> dict[str, Tensor]:
    """An attention's parameters with these groups alone, by name."""
    state: dict[str, Tensor] = {}
    for name in (*attention.ups, attention.down):
        module = model.get_submodule(name)
        weight, bias = dense(module), bias_of(module)
        if meta:
            weight, bias = weight.to("meta"), None if bias is None else bias.to("meta")
        if name == attention.down:
            weight = weight.unflatten(1, (attention.groups, -1))[:, kept].flatten(1)
        else:
            weight = weight.unflatten(0, (attention.groups, -1))[kept].flatten(0, 1)
            bias = bias if bias is None else bias.unflatten(0, (attention.groups, -1))[kept].flatten()
        state[f"{name}.weight"] = weight.T if isinstance(module, Conv1D) else weight
        if bias is not None:
            state[f"{name}.bias"] = bias
    return state


def config_with_heads(model: PreTrainedModel, attentions: Sequence[Attention], keep: int) -> PretrainedConfig:
    """The config of the model with so many groups in each attention, of heads as wide as they were.

    Raises:
        ValueError: A family whose config ties the width of heads to their number (GPT-2, BERT).
    """
    config = copy.deepcopy(model.config)
    text: Any = config.get_text_config()
    groups, width = attentions[0].groups, dense(model.get_submodule(attentions[0].down)).shape[1]
    if getattr(text, "head_dim", None) is None:
        text.head_dim = width // text.num_attention_heads
    text.num_attention_heads = text.num_attention_heads // groups * keep
    if getattr(text, "num_key_value_heads", None) is not None:
        text.num_key_value_heads = keep
    wanted = parameter_shapes(model)
    for attention in attentions:
        wanted |= head_shapes(model, attention, keep)
    try:
        for part in (config, text):
            part.validate()
        shapes = parameter_shapes(empty(type(model), config))
        name = next((n for n, s in wanted.items() if shapes.get(n) != s), None)
        problem = f"{name} would be {list(shapes.get(name, ()))}, needed {list(wanted[name])}" if name else ""
    except (ValueError, StrictDataclassError) as error:
        problem = str(error).strip().splitlines()[-1].strip()
    if problem:
        raise ValueError(
            f"prune_: {type(config).__name__} cannot say that {keep} of {groups} groups of heads are left, as wide as "
            f"they were ({problem}); needed another share, or neurons or blocks to drop"
        )
    return config


@torch.no_grad()
def check_runs(model: PreTrainedModel, config: PretrainedConfig, batch: Mapping) -> None:
    """Refuse a config whose model cannot be run: something in it is as wide as all heads together (OLMoE's norms)."""
    on_meta = {n: v.to("meta") if isinstance(v, Tensor) else v for n, v in batch.items()}
    for one in (model.config, config):
        try:
            first_output(empty(type(model), copy.deepcopy(one)), on_meta)
        except Exception as error:
            if one is model.config:  # even the unchanged model cannot run on the meta device: nothing is learnt
                return
            raise ValueError(
                f"prune_: {type(model).__name__} cannot be run with fewer heads ({type(error).__name__}: {error}); "
                "needed another family, or neurons or blocks to drop"
            ) from error


def cut_heads_(
    model: PreTrainedModel, attentions: Sequence[Attention], keep: int, config: PretrainedConfig, batch: Mapping
) -> None:
    """Remove the groups that nothing reads, and check that the model's output on a batch is unchanged.

    Raises:
        ValueError: The output changed: heads of this family differ by their place (ALiBi).
    """
    before, changes = first_output(model, batch), attribute_changes(model, config)
    for attention in attentions:
        weight = dense(model.get_submodule(attention.down)).unflatten(1, (attention.groups, -1))
        chosen = weight.float().square().sum((0, 2)).topk(keep).indices.sort().values
        set_parameters_(model, _cut(model, attention, chosen))
    undo = set_attributes_(changes)
    try:
        _check_same(model, before, first_output(model, batch))
    except BaseException:
        set_attributes_(undo)
        raise


def _check_same(model: PreTrainedModel, before: Tensor, after: Tensor) -> None:
    near = max(_NEAR, 5 * torch.finfo(model.dtype).eps) * float(before.abs().mean())
    if not float((after - before).abs().mean()) <= near:
        raise ValueError(
            f"prune_: {type(model).__name__} says something else without heads that nothing reads, needed a family "
            f"whose heads do not depend on their place"
        )
