"""Attention within packed sequences, the Davidson link, and a loss that is symmetric in A and B.

Shapes: T tokens of all sequences, S sequences, H query heads, G key and value heads, d width of a
head, P pairs, C classes: A, B and, unless the data have no ties, tie.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from model_components._autograd import needs_plain
from model_components._checks import check_choice

from . import reference

IMPLS = ("reference", "eager", "fused", "auto")


def packed_attention(
    query: Tensor,  # (T, H, d)
    key: Tensor,  # (T, G, d)
    value: Tensor,  # (T, G, d)
    cu_seq_lens: Tensor | Sequence[int],  # (S + 1,)
    *,
    scale: float | None = None,
    dropout_p: float = 0.0,
    window: int | None = None,
    causal: bool = False,
    impl: str = "auto",
) -> Tensor:
    """Compute attention over concatenated sequences, where each sequence attends only to itself.

    The eager path calls `torch.nn.functional.scaled_dot_product_attention` once for each sequence,
    on views. It needs no padding, and it needs a mask only for sequences longer than ``window + 1``
    tokens. The fused path is torch's variable-length flash attention.

    Args:
        query: The queries of all sequences, one after the other.
        key: The keys; the number of query heads is a multiple of their number of heads.
        value: The values, with as many heads as the keys.
        cu_seq_lens: The cumulative lengths of the sequences: 0, l1, l1 + l2, ..., T.
        scale: The factor by which attention scores are multiplied; default: ``1 / sqrt(d)``.
        dropout_p: Dropout probability of the attention weights.
        window: The largest distance between tokens that attend to each other; None means no limit.
        causal: Whether a token attends only to itself and to earlier tokens.
        impl: ``"reference"`` (dense), ``"eager"``, ``"fused"`` (on CUDA, in half precision, without
            dropout), or ``"auto"``: fused if the inputs allow it, otherwise eager.

    Returns:
        The attention outputs, (T, H, d).

    Raises:
        ValueError: The shapes do not match, ``cu_seq_lens`` does not rise from 0 to T, or ``impl``
            is unknown or does not support the inputs.

    >>> q = torch.randn(5, 1, 2)
    >>> both = packed_attention(q, q, q, [0, 2, 5])
    >>> torch.equal(both[:2], packed_attention(q[:2], q[:2], q[:2], [0, 2]))
    True
    """
    operation = "packed_attention"
    _check_packed(operation, query, key, value)
    check_choice(operation, "impl", impl, IMPLS)
    ends = _checked_ends(operation, cu_seq_lens, len(query))
    lengths = [after - before for before, after in pairwise(ends)]
    unsupported = _not_fused(query, dropout_p)
    if impl == "fused" and unsupported:
        raise ValueError(f"{operation}: with impl='fused', expected {unsupported}")
    if impl == "reference":
        if dropout_p:
            raise ValueError(
                f"{operation}: expected dropout_p=0 with impl='reference', got {dropout_p}"
            )
        places = torch.tensor(ends, device=query.device)
        return reference.packed_attention(
            query, key, value, places, scale=scale, window=window, causal=causal
        )
    # flash attention needs the length of the longest sequence, so there must be a sequence
    if unsupported is None and impl != "eager" and lengths:
        return _flash(query, key, value, ends, max(lengths), scale, window, causal)
    outputs = [
        _attend(*parts, scale, dropout_p, window, causal)
        for parts in zip(
            query.split(lengths), key.split(lengths), value.split(lengths), strict=True
        )
    ]
    if outputs:
        return torch.cat(outputs)
    return query.clone()


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float | None,
    dropout_p: float,
    window: int | None,
    causal: bool,
) -> Tensor:
    """Compute attention within one sequence of L tokens, (L, H, d)."""
    near = None
    # up to window + 1 tokens are all within the window, so they need no mask
    if window is not None and len(query) > window + 1:
        near = _near(len(query), window, causal, query.device)
    attended = F.scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        key.transpose(0, 1)[None],
        value.transpose(0, 1)[None],
        near,
        dropout_p,
        # sdpa takes either a mask or is_causal, and the mask is already causal
        is_causal=causal and near is None,
        scale=scale,
        enable_gqa=key.shape[1] < query.shape[1],
    )
    return attended[0].transpose(0, 1)


def _checked_ends(operation: str, cu_seq_lens: Tensor | Sequence[int], tokens: int) -> list[int]:
    """Return cumulative lengths as a list; raise ValueError unless they rise from 0 to tokens."""
    ends = cu_seq_lens.tolist() if isinstance(cu_seq_lens, Tensor) else list(cu_seq_lens)
    rises = all(before <= after for before, after in pairwise(ends))
    if not ends or ends[0] != 0 or ends[-1] != tokens or not rises:
        raise ValueError(
            f"{operation}: cu_seq_lens is {ends!r:.80}, expected numbers that rise from 0 to "
            f"{tokens}, the number of tokens"
        )
    return ends


def _check_packed(operation: str, query: Tensor, key: Tensor, value: Tensor) -> None:
    """Check that query is (T, H, d), key and value are (T, G, d), and H is a multiple of G."""
    if query.dim() == key.dim() == 3 and key.shape == value.shape and key.shape[1]:
        tokens, heads, width = query.shape
        groups = key.shape[1]
        if key.shape == (tokens, groups, width) and heads % groups == 0:
            return
    raise ValueError(
        f"{operation}: expected query, key and value of shapes (T, H, d), (T, G, d) and (T, G, d), "
        f"with H a multiple of G, got shapes {list(query.shape)}, {list(key.shape)} and "
        f"{list(value.shape)}"
    )


def _not_fused(query: Tensor, dropout_p: float) -> str | None:
    """Return a requirement of the fused path that this call does not meet, or None."""
    if not query.is_cuda:
        return "CUDA tensors"
    if torch.cuda.get_device_capability(query.device) < (8, 0):
        return "a GPU of compute capability 8.0 or more"
    if query.dtype not in (torch.float16, torch.bfloat16):
        return f"float16 or bfloat16, got {query.dtype}"
    if query.shape[-1] % 8 or query.shape[-1] > 256:
        return f"a head width that is a multiple of 8 and at most 256, got {query.shape[-1]}"
    if dropout_p:
        return f"dropout_p=0, got {dropout_p}"
    return None


def _flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ends: list[int],
    longest: int,
    scale: float | None,
    window: int | None,
    causal: bool,
) -> Tensor:
    # imported here, because the import is slow and only GPUs need it
    from torch.nn.attention.varlen import varlen_attn

    places = _places(tuple(ends), query.device)
    # for the kernel, -1 means no limit
    far = -1 if window is None else window
    grouped: dict[str, Any] = {}
    if key.shape[1] < query.shape[1]:
        if "enable_gqa" in inspect.signature(varlen_attn).parameters:
            grouped = {"enable_gqa": True}
        else:  # before torch 2.12
            shared = query.shape[1] // key.shape[1]
            key = key.repeat_interleave(shared, 1)
            value = value.repeat_interleave(shared, 1)
    output: Any = varlen_attn(
        query,
        key,
        value,
        places,
        places,
        longest,
        longest,
        scale=scale,
        # left and right: a causal token attends to nothing on its right
        window_size=(far, 0 if causal else far),
        **grouped,
    )
    return output


@lru_cache(maxsize=4)  # every layer of an encoder needs the same tensor
def _places(ends: tuple[int, ...], device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # a later training step may use the cached tensor
        return torch.tensor(ends, device=device, dtype=torch.int32)


def _near(length: int, window: int, causal: bool, device: torch.device) -> Tensor:
    """Return a mask, (length, length), that is True where a query attends to a key.

    Such keys are at most ``window`` away and, if ``causal``, not later than the query.
    """
    place = torch.arange(length, device=device)
    apart = place[:, None] - place[None]
    if causal:
        return (apart.abs() <= window) & (apart >= 0)
    return apart.abs() <= window


def davidson(score_a: Tensor, score_b: Tensor, log_nu: Tensor) -> Tensor:
    """Return log-probabilities of A, B and tie from two scores, up to a constant for each pair.

    Source: Davidson 1970.

    For scores a and b, the log-probabilities are ``(a, b, (a + b) / 2 + log ν)``: the probability
    of a tie is ν times the geometric mean of the probabilities of A and B.

    Args:
        score_a: The scores of A, (P,).
        score_b: The scores of B, (P,).
        log_nu: The logarithm of the tie parameter ν, a scalar.

    Returns:
        The log-probabilities, (P, 3). Swapping the scores swaps the first two columns bit for bit.

    >>> davidson(torch.tensor([2.0]), torch.tensor([0.0]), torch.tensor(0.0)).tolist()
    [[2.0, 0.0, 1.0]]
    """
    return torch.stack([score_a, score_b, 0.5 * (score_a + score_b) + log_nu], -1)


def swapped(classes: Tensor) -> Tensor:
    """Swap the first two columns, A and B, of a tensor of shape (..., C).

    >>> swapped(torch.tensor([[0.5, 0.3, 0.2]]))
    tensor([[0.3000, 0.5000, 0.2000]])
    """
    return torch.cat([classes[..., 1:2], classes[..., 0:1], classes[..., 2:]], -1)


def log_probabilities(logits: Tensor) -> Tensor:
    """Compute the log-softmax over the classes A, B and, if there are three, tie.

    Swapping A and B swaps the results bit for bit.

    Args:
        logits: The logits, (P, C), where C is 2 or 3.

    Returns:
        The log-probabilities, (P, C).

    Raises:
        ValueError: C is neither 2 nor 3.

    >>> log_probabilities(torch.tensor([[0.0, 0.0]])).exp()
    tensor([[0.5000, 0.5000]])
    """
    if logits.shape[-1] not in (2, 3):
        raise ValueError(
            "log_probabilities: expected logits of 2 or 3 classes in the last dimension, got shape "
            f"{list(logits.shape)}"
        )
    # A and B first: a sum of two terms is bitwise equal in both orders, a sum of three may not be
    total = torch.logaddexp(logits[..., 0], logits[..., 1])
    if logits.shape[-1] == 3:
        total = torch.logaddexp(total, logits[..., 2])
    return logits - total[..., None]


def pairwise_loss(logits: Tensor, labels: Tensor, *, label_smoothing: float = 0.0) -> Tensor:
    """Compute the cross-entropy over the classes A, B and tie, averaged over pairs.

    Args:
        logits: The logits, (*B, C), where B is any number of batch dimensions.
        labels: Class indices (*B), or soft labels (*B, C): the fraction of annotators who chose
            each class.
        label_smoothing: Fraction of each target that is spread evenly over all classes.

    Returns:
        The loss in nats, a scalar.

    Raises:
        ValueError: The shapes of labels and logits do not match, or a label is not a class index.

    >>> pairwise_loss(torch.zeros(1, 3), torch.tensor([[0.5, 0.5, 0.0]]))
    tensor(1.0986)
    """
    if labels.shape not in (logits.shape, logits.shape[:-1]):
        raise ValueError(
            f"pairwise_loss: expected class indices of shape {list(logits.shape[:-1])} or soft "
            f"labels of shape {list(logits.shape)}, got labels of shape {list(labels.shape)}"
        )
    # labels have no values while a graph is being traced
    if labels.dim() < logits.dim() and labels.numel() and not needs_plain(labels):
        low, high = (int(value) for value in labels.aminmax())
        if low < 0 or high >= logits.shape[-1]:
            raise ValueError(
                f"pairwise_loss: expected labels from 0 to {logits.shape[-1] - 1}, got {low} to "
                f"{high}"
            )
    log_probs = log_probabilities(logits)
    if labels.dim() == logits.dim():
        wanted = labels.to(log_probs.dtype)
    else:
        wanted = F.one_hot(labels, logits.shape[-1]).to(log_probs.dtype)
    wanted = wanted * (1 - label_smoothing) + label_smoothing / logits.shape[-1]
    return -(wanted * log_probs).sum(-1).mean()
