"""Cross-entropy of a language model without the logits of all positions.

Only positions with a label are worked on, some at a time. Forward makes the gradients of each
chunk, so that backward only scales them. Only logits of one chunk are in memory at a time.

Letters: N positions, H hidden size, V vocabulary.

Source: gradients made in forward after Hsu et al., arXiv 2410.10989.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ._autograd import Context

IGNORED = -100
"""The label of positions that are not trained."""

# elements of a chunk's logits; several buffers of this size are in memory. On an H200 half the size
# took 1.3 to 1.6 times as long; twice the size .92 to .95 times as long, and twice the memory
_ELEMENTS = {"cpu": 1 << 22, "cuda": 1 << 25}
_FEWEST = 16  # positions of a chunk


def head_loss(
    hidden: Tensor,  # (N, H)
    labels: Tensor,  # (N,)
    head: Callable[[Tensor], Tensor],
    parameters: Sequence[nn.Parameter],
    *,
    vocabulary: int,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Return the sum of the cross-entropies of ``head(hidden)``, in nats, float32 or better.

    Args:
        hidden: Final hidden states.
        labels: Token ids; positions with `IGNORED` count for nothing.
        head: Function from hidden states, (n, H), to logits, (n, V).
        parameters: The head's parameters that require grad.
        vocabulary: V.
        label_smoothing: Share of the target that is spread over the vocabulary.

    >>> hidden, head = torch.ones(2, 3), nn.Linear(3, 4, bias=False).requires_grad_(False)
    >>> nn.init.zeros_(head.weight)  # all four tokens alike: log 4
    Parameter containing:
    ...
    >>> head_loss(hidden, torch.tensor([1, -100]), head, [], vocabulary=4)
    tensor(1.3863)
    """
    trained = (labels != IGNORED).nonzero()[:, 0]
    settings = (head, vocabulary, label_smoothing)
    # an index of all positions would copy them
    if len(trained) < len(labels):
        hidden = hidden[trained]
        labels = labels[trained]
    # `needs_input_grad` does not know of no_grad, and gradients would be made for nothing
    if not torch.is_grad_enabled():
        parameters = ()
        hidden = hidden.detach()
    return _HeadLoss.apply(settings, labels, hidden, *parameters)


class _HeadLossContext(Context, Protocol):
    dtypes: list[torch.dtype]


class _HeadLoss(torch.autograd.Function):
    """The loss of `head_loss`, whose forward also computes and saves the gradients."""

    @staticmethod
    def forward(
        ctx: _HeadLossContext,
        settings: tuple[Callable[[Tensor], Tensor], int, float],
        labels: Tensor,
        hidden: Tensor,
        *parameters: nn.Parameter,
    ) -> Tensor:
        head, vocabulary, smoothing = settings
        wanted = ctx.needs_input_grad[2:]
        # float32, as many chunks are added
        gradients = [
            torch.zeros_like(tensor, dtype=_wide(tensor.dtype)) if needed else None
            for tensor, needed in zip((hidden, *parameters), wanted, strict=True)
        ]
        ctx.dtypes = [tensor.dtype for tensor in (hidden, *parameters)]
        total = torch.zeros((), dtype=torch.float64, device=hidden.device)
        most = _ELEMENTS.get(hidden.device.type, _ELEMENTS["cuda"])
        size = max(_FEWEST, most // vocabulary)
        for start in range(0, len(labels), size):
            rows = slice(start, start + size)
            # within a custom forward torch has switched gradients off
            with torch.set_grad_enabled(any(wanted)):
                states = hidden[rows].detach().requires_grad_(wanted[0])
                logits = head(states)
                loss = nn.functional.cross_entropy(
                    logits.to(_wide(logits.dtype)),
                    labels[rows],
                    reduction="sum",
                    label_smoothing=smoothing,
                )
            total += loss.detach()
            if not loss.requires_grad:
                continue
            needed = [t for t, want in zip((states, *parameters), wanted, strict=True) if want]
            # an adapter of the head may be inactive
            found = iter(torch.autograd.grad(loss, needed, allow_unused=True))
            if gradients[0] is not None:
                gradients[0][rows] = next(found)
            for gradient in gradients[1:]:
                if gradient is not None and (part := next(found)) is not None:
                    gradient += part
        ctx.save_for_backward(*gradients)
        return total.to(_wide(hidden.dtype))

    @staticmethod
    @once_differentiable
    # pyrefly: ignore[bad-override]: torch types it (ctx, *gradients)
    def backward(ctx: _HeadLossContext, grad: Tensor) -> tuple[Tensor | None, ...]:
        scaled = [
            None if gradient is None else (gradient * grad).to(dtype)
            for gradient, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return None, None, *scaled


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
