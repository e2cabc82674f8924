"""Checks of a thinker's inputs and settings."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from model_components._checks import refuse

from .config import OutputSteps, ThinkerConfig, is_whole
from .flow import FlowPlan, FlowRow
from .tasks import AtTokens, Task
from .tasks.rows import symbols_of


def check_layout(operation: str, config: ThinkerConfig, task: Task) -> None:
    """Check that a task's layout, sizes and symbols match the model.

    Latents at the tokens need `AtTokens`; other models need a plain task.
    """
    if config.at_tokens != isinstance(task, AtTokens):
        if config.at_tokens:
            has = 'latent_init="tokens"'
        else:
            has = f"latent_init={config.latent_init!r}"
        if config.at_tokens:
            needed = "AtTokens(task)"
        else:
            needed = 'a plain task, or a model with latent_init="tokens"'
        raise ValueError(
            f"{operation}: the model has {has}, and the task is {task!r}; expected {needed}"
        )
    # rows with answers of other lengths can have the same symbols, but another layout
    for name in ("vocab_size", "output_size"):
        has = getattr(config, name)
        needed = getattr(task, name)
        if needed > has:
            raise ValueError(
                f"{operation}: the model's {name} is {has}, but the task {task!r} needs {needed}"
            )
    symbols = symbols_of(task)
    if config.symbols != symbols:
        raise ValueError(
            f"{operation}: expected a task with the symbols that the model was made for, "
            f"{config.symbols!r:.100}, got {symbols!r:.100} (None means: not a RowsTask)"
        )


def check_kind(tokens: object, mask: object) -> None:
    """Check that tokens are a tensor, and that the mask is a tensor or None."""
    if not isinstance(tokens, Tensor):
        raise ValueError(
            f"LatentThinker: tokens are a {type(tokens).__name__}; expected a tensor of ids (B, L)"
        )
    if not isinstance(mask, Tensor | None):
        raise ValueError(
            f"LatentThinker: the mask is a {type(mask).__name__}; expected a tensor (B, L) or None"
        )


def check_tokens(
    config: ThinkerConfig, tokens: Tensor, mask: Tensor | None, *, values: bool
) -> None:
    """Check the shape and length of tokens and, with ``values``, the ids."""
    if tokens.dim() != 2 or tokens.dtype not in (torch.int32, torch.int64) or not tokens.shape[1]:
        raise ValueError(
            f"LatentThinker: tokens have shape {list(tokens.shape)} and dtype {tokens.dtype}; "
            "expected int64 or int32 ids (B, L), L of 1 or more"
        )
    if mask is not None and mask.shape != tokens.shape:
        # torch's own transformers have time first unless batch_first is set
        if mask.shape == tokens.shape[::-1]:
            hint = "; the mask is time first, (L, B), so transpose it"
        else:
            hint = ""
        raise ValueError(
            f"LatentThinker: mask has shape {list(mask.shape)} and tokens have shape "
            f"{list(tokens.shape)}; expected equal shapes{hint}"
        )
    if tokens.shape[1] > config.max_input_length:
        hint = ""
        if tokens.shape[0] <= config.max_input_length:
            hint = "; if these are time first, (L, B), transpose them"
        raise ValueError(
            f"LatentThinker: tokens have shape {list(tokens.shape)}; expected (B, L) with L of at "
            f"most {config.max_input_length} (max_input_length){hint}"
        )
    if config.mixer == "mlp":
        _check_places(config, tokens, mask if values else None)
    if values and tokens.numel():
        _check_ids(config, tokens)


def _check_ids(config: ThinkerConfig, tokens: Tensor) -> None:
    """Check that token ids are in the vocabulary."""
    # on a GPU an id outside the vocabulary fails an assertion, which only a later operation reports
    low = int(tokens.min())
    high = int(tokens.max())
    if low < 0 or high >= config.vocab_size:
        wrong = low if low < 0 else high
        raise ValueError(
            f"LatentThinker: a token id is {wrong}; expected 0 to {config.vocab_size - 1} "
            "(vocab_size - 1)"
        )


def _check_places(config: ThinkerConfig, tokens: Tensor, mask: Tensor | None) -> None:
    """Check that each row fills all ``max_input_length`` positions, as the MLP mixer requires."""
    if tokens.shape[1] != config.max_input_length:
        raise ValueError(
            f"LatentThinker: tokens (B, L) have shape {list(tokens.shape)}; expected L of exactly "
            f'max_input_length, {config.max_input_length}, with mixer="mlp"'
        )
    if mask is not None and not bool(mask.all()):
        raise ValueError('LatentThinker: the mask has padding; expected none with mixer="mlp"')


def check_embeds(config: ThinkerConfig, tokens: Tensor | None, embeds: Tensor) -> None:
    """Check the shape of embeddings, and that neither tokens nor aligned positions are used."""
    if tokens is not None:
        raise ValueError("LatentThinker: expected either input_ids or inputs_embeds, got both")
    if embeds.dim() != 3 or embeds.shape[2] != config.hidden_size:
        raise ValueError(
            f"LatentThinker: inputs_embeds have shape {list(embeds.shape)}; expected (B, L, "
            f"{config.hidden_size})"
        )
    if config.positions == "aligned":
        raise ValueError(
            'LatentThinker: inputs_embeds have no separators, which positions="aligned" needs; '
            "expected input_ids, or other positions"
        )


def check_numbers(
    n_step: int | None, n_latent: int | None, grad_steps: int | None, noise: float | None
) -> None:
    """Check that counts are whole numbers, and that noise is finite and not negative."""
    for name, value, least in (
        ("n_step", n_step, 1),
        ("n_latent", n_latent, 1),
        ("grad_steps", grad_steps, 0),
    ):
        if value is not None and not is_whole(value, least):
            refuse("LatentThinker", name, value, f"a whole number, {least} or more")
    if noise is not None and not (isinstance(noise, int | float) and 0 <= noise < math.inf):
        raise ValueError(f"LatentThinker: step_noise is {noise!r}; expected 0 or more, and finite")


def check_mask(config: ThinkerConfig, mask: Tensor) -> None:
    """Check that no row is all padding, and that a causal model has padding on the left."""
    empty = (~mask.any(1)).nonzero()
    if len(empty):
        if len(empty) == len(mask):
            which = "every row"
        else:
            which = f"row {int(empty[0])}"
        raise ValueError(
            f"LatentThinker: the mask of {which} has no token; expected one or more in each row"
        )
    # the latents of a causal model are the last positions, which have to be tokens
    if config.causal and bool((mask[:, :-1] & ~mask[:, 1:]).any()):
        raise ValueError(
            "LatentThinker: expected padding on the left, since the model is causal, got padding "
            "after tokens"
        )


def check_grid(config: ThinkerConfig, tokens: Tensor, mask: Tensor | None) -> None:
    """Check that each row of a batch is a square grid, if positions are ``rotary_2d``."""
    if config.positions != "rotary_2d":
        return
    if mask is None:
        counts = torch.tensor([tokens.shape[1]])
    else:
        counts = mask.sum(1)
    whole = counts.double().sqrt().round().square() == counts
    if not bool(whole.all()):
        wrong = int((~whole).nonzero()[0])
        raise ValueError(
            f"LatentThinker: row {wrong} has {int(counts[wrong])} tokens; expected a square "
            'number, because positions is "rotary_2d"'
        )


def chosen_plan(config: ThinkerConfig, plan: FlowPlan | None = None) -> FlowPlan:
    """Return ``plan``, or else the config's plan, or else a plan of all the model's operations."""
    if not isinstance(plan, FlowPlan | None):
        raise ValueError(f"LatentThinker: plan is {plan!r}; expected a FlowPlan")
    if plan is None and config.plan is not None:
        return FlowPlan(**config.plan)
    return plan or FlowPlan.every_step(
        memory=config.memory != "none", static=config.num_static_tokens > 0
    )


def chosen_rows(
    config: ThinkerConfig, plan: FlowPlan | None, n_step: int | None
) -> Sequence[FlowRow]:
    """Return the plan's row for each step, after checking that the model supports it."""
    plan = chosen_plan(config, plan)
    # a plan may raise the config's number of steps, but does not change a call's number
    rows = plan.rows(plan.num_steps(config.n_step) if n_step is None else n_step)
    check_plan(config, rows)
    return rows


def check_plan(config: ThinkerConfig, rows: Sequence[FlowRow]) -> None:
    """Check that the model supports the look-ups and writes of the plan's rows.

    Writing to a static memory while gradients are enabled is an error, too.
    """
    if config.memory == "none" and any(row.mem_lookup or row.mem_write for row in rows):
        raise ValueError(
            'LatentThinker: the plan uses the memory, but memory is "none"; expected '
            'ThinkerConfig(memory="grow"), or a '
            "plan without mem_lookup and mem_write"
        )
    if not config.num_static_tokens and any(row.static_mem_lookup for row in rows):
        raise ValueError(
            "LatentThinker: the plan looks up static tokens, but the model has none; expected a "
            "config such as ThinkerConfig(num_static_tokens=8)"
        )
    if config.memory == "static" and torch.is_grad_enabled() and any(row.mem_write for row in rows):
        raise ValueError(
            'LatentThinker: memory="static" writes in place, which would change tensors that '
            'autograd saved; expected memory="grow", or torch.no_grad()'
        )


def check_labels(config: ThinkerConfig, labels: Tensor, logits: Sequence[int]) -> None:
    """Check that labels are valid classes, in the shape of the logits' first two axes, (B, O)."""
    if tuple(labels.shape) != tuple(logits[:2]):
        raise ValueError(
            f"LatentThinker: labels have shape {list(labels.shape)}; expected {list(logits[:2])}, "
            "the shape of the answer"
        )
    known = labels[labels != -100]
    if not labels.numel():
        return
    # without any label, cross_entropy would return nan
    if not known.numel():
        raise ValueError("LatentThinker: expected one or more labels other than -100, got none")
    if int(known.min()) < 0 or int(known.max()) >= config.output_size:
        raise ValueError(
            f"LatentThinker: labels are {int(known.min())} to {int(known.max())}; expected 0 to "
            f"output_size - 1, {config.output_size - 1}, or -100 if there is no answer"
        )


def check_latents(
    config: ThinkerConfig,
    n_latent: int | None,
    shape: Sequence[int],
    context: tuple[int, int],
    *,
    carried: bool = False,
) -> None:
    """Check that the model supports the number of latents, and that a carry fits the input.

    Args:
        config: The model's config.
        n_latent: The number of latents that the call sets, if any.
        shape: The shape of the latents, (B, n, d).
        context: The shape of the input, (B, L).
        carried: Whether the latents are from a carry.
    """
    n = shape[1]
    if carried and (shape[0] != context[0] or (n_latent is not None and n_latent != n)):
        raise ValueError(
            f"LatentThinker: the carry has {shape[0]} rows of {n} latents; expected {context[0]} "
            f"rows{'' if n_latent is None else f' of {n_latent}'}"
        )
    if config.at_tokens and (n > context[1] or (n < context[1] and not config.causal)):
        needed = "at most" if config.causal else "exactly"
        raise ValueError(
            f"LatentThinker: n_latent is {n}; expected {needed} the number of tokens, {context[1]}"
        )
    if config.table_size is not None and n > config.table_size:
        raise ValueError(
            f"LatentThinker: expected n_latent of at most {config.table_size}, the size of the "
            f'table, got {n}; a model with latent_init="noise" takes any number'
        )


def chosen_steps(output_steps: OutputSteps, rows: Sequence[FlowRow]) -> set[int]:
    """Return the requested output steps, counted from 1, or raise an error if one has no output."""
    can = [number for number, row in enumerate(rows, 1) if row.output]
    # a single number could mean a step or a number of steps
    if isinstance(output_steps, str | int | None):
        if output_steps not in ("last", "all"):
            raise ValueError(
                f"LatentThinker: output_steps is {output_steps!r}; expected 'last', 'all', or a "
                f"list of steps from {can}"
            )
        return set(can if output_steps == "all" else can[-1:])
    wrong = sorted(set(output_steps) - set(can))
    if wrong or not output_steps:
        raise ValueError(
            f"LatentThinker: output_steps is {list(output_steps)}; expected one or more of {can}, "
            "the steps that have an output in the plan"
        )
    return set(output_steps)
