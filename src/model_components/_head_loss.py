"""Compute losses of logits in chunks, so that the logits of all positions never exist at once.

The forward pass computes the gradients of each chunk, and the backward pass only scales them.

Letters: N positions, H hidden size, V vocabulary.

Source: gradients in the forward pass, as in Hsu et al., arXiv 2410.10989.
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

# elements of a chunk's logits; several buffers of this size are in memory. On an H200, half the
# size took 1.3 to 1.6 times as long; twice the size took 0.92 to 0.95 times as long and twice the
# memory
_ELEMENTS = {"cpu": 1 << 22, "cuda": 1 << 25}
_FEWEST = 16  # the smallest number of positions in a chunk


ChunkLoss = Callable[[Tensor, slice, bool], tuple[Tensor, Tensor | None]]
"""A loss of one chunk: a function of (logits, rows, needs_gradient) that returns (loss, gradient).

The function may overwrite the logits, (n, V). ``rows`` are the chunk's positions. The loss is the
sum over the chunk. The gradient is with respect to the logits, or None if it is not needed.
"""


def head_loss(
    hidden: Tensor,  # (N, H)
    labels: Tensor,  # (N,)
    head: Callable[[Tensor], Tensor],
    parameters: Sequence[nn.Parameter],
    *,
    vocabulary: int,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Return the sum of the cross-entropies of ``head(hidden)``, in nats, in float32 or float64.

    Args:
        hidden: Final hidden states.
        labels: Token ids; positions with `IGNORED` are skipped.
        head: A function from hidden states, (n, H), to logits, (n, V).
        parameters: The head's parameters that require gradients.
        vocabulary: The size V of the vocabulary.
        label_smoothing: The share of each target that is spread over the vocabulary.

    >>> hidden, head = torch.ones(2, 3), nn.Linear(3, 4, bias=False).requires_grad_(False)
    >>> nn.init.zeros_(head.weight)  # all four tokens alike: log 4
    Parameter containing:
    ...
    >>> head_loss(hidden, torch.tensor([1, -100]), head, [], vocabulary=4)
    tensor(1.3863)
    """
    trained = (labels != IGNORED).nonzero()[:, 0]
    # if all positions are trained, indexing would only copy them
    if len(trained) < len(labels):
        hidden = hidden[trained]
        labels = labels[trained]

    def loss_of(logits: Tensor, rows: slice, needs_gradient: bool) -> tuple[Tensor, Tensor | None]:
        with torch.set_grad_enabled(needs_gradient):
            loss = nn.functional.cross_entropy(
                logits.requires_grad_(needs_gradient),
                labels[rows],
                reduction="sum",
                label_smoothing=label_smoothing,
            )
        return loss.detach(), torch.autograd.grad(loss, logits)[0] if needs_gradient else None

    size = chunk_rows(hidden.device, vocabulary)
    return chunked_loss(hidden, head, parameters, loss_of, size)


def chunk_rows(device: torch.device, vocabulary: int) -> int:
    """Return the number of positions in a chunk of logits, for a device and a vocabulary size."""
    most = _ELEMENTS.get(device.type, _ELEMENTS["cuda"])
    return max(_FEWEST, most // vocabulary)


def chunked_loss(
    hidden: Tensor,  # (N, H)
    head: Callable[[Tensor], Tensor],
    parameters: Sequence[Tensor],
    loss_of: ChunkLoss,
    size: int,
    leaves: Sequence[Tensor] | None = None,
) -> Tensor:
    """Return a loss of ``head(hidden)``, summed over chunks of positions, in float32 or float64.

    Args:
        hidden: Final hidden states.
        head: A function from hidden states, (n, H), to logits, (n, V), in a new tensor.
        parameters: The tensors that the head uses and that require gradients.
        loss_of: The loss of a chunk.
        size: The number of positions in a chunk.
        leaves: Tensors that the head uses instead of the parameters: detached copies, so that the
            graph and the hooks of the parameters are not used until backward. Default: the head
            uses the parameters themselves, as a module does.
    """
    # `needs_input_grad` ignores no_grad, so gradients would be computed for nothing
    if not torch.is_grad_enabled():
        parameters = ()
        hidden = hidden.detach()
    used = parameters if leaves is None else leaves
    return _ChunkedLoss.apply((head, loss_of, size, used), hidden, *parameters)


class _ChunkedContext(Context, Protocol):
    dtypes: list[torch.dtype]


class _ChunkedLoss(torch.autograd.Function):
    """The loss of `chunked_loss`, whose forward also computes and saves the gradients."""

    @staticmethod
    def forward(
        ctx: _ChunkedContext,
        settings: tuple[Callable[[Tensor], Tensor], ChunkLoss, int, Sequence[Tensor]],
        hidden: Tensor,
        *parameters: Tensor,
    ) -> Tensor:
        head, loss_of, size, used = settings
        wanted = ctx.needs_input_grad[1:]
        # in float32, because many chunks are added
        gradients = [
            torch.zeros_like(tensor, dtype=_wide(tensor.dtype)) if needed else None
            for tensor, needed in zip((hidden, *parameters), wanted, strict=True)
        ]
        ctx.dtypes = [tensor.dtype for tensor in (hidden, *parameters)]
        total = torch.zeros((), dtype=torch.float64, device=hidden.device)
        for start in range(0, len(hidden), size):
            rows = slice(start, min(start + size, len(hidden)))
            # torch disables gradients within a custom forward
            with torch.set_grad_enabled(any(wanted)):
                states = hidden[rows].detach().requires_grad_(wanted[0])
                logits = head(states)
            loss, gradient = loss_of(
                logits.detach().to(_wide(logits.dtype)), rows, logits.requires_grad
            )
            total += loss
            if gradient is None:
                continue
            # if `parameters` is empty, `wanted` is shorter than `used`
            needed = [t for t, want in zip((states, *used), wanted, strict=False) if want]
            # the output may not depend on some of them, such as an inactive adapter's parameters
            found = iter(
                torch.autograd.grad(logits, needed, gradient.to(logits.dtype), allow_unused=True)
            )
            if gradients[0] is not None:
                gradients[0][rows] = next(found)
            for sums in gradients[1:]:
                if sums is not None and (part := next(found)) is not None:
                    sums += part
        ctx.save_for_backward(*gradients)
        return total.to(_wide(hidden.dtype))

    @staticmethod
    @once_differentiable
    # pyrefly: ignore[bad-override]: torch types it (ctx, *gradients)
    def backward(ctx: _ChunkedContext, grad: Tensor) -> tuple[Tensor | None, ...]:
        scaled = [
            None if gradient is None else (gradient * grad).to(dtype)
            for gradient, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return None, *scaled


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
