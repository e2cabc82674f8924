"""Frames: the attention masks and rotary angles of latents.

Shapes: B batch, n latents, L input length, h = d / H.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .functional import Band, Turn
from .state import Context

_BAND = 16
"""A band is used if the number of keys is at least this many times the band's width. On a CPU, a
band was then at least as fast as torch's attention with a mask."""


@dataclass(frozen=True)
class Frame:
    """The attention masks and rotary angles of n latents.

    Args:
        read: (B or 1, 1, 1 or n, L), True where latents may attend to the input, or a `Band`; None:
            everywhere.
        own: (B or 1, 1, n, n), True where latents may attend to latents, or a `Band`; None:
            everywhere.
        turn: Rotary cosines and sines of the n latents; None: no rotation.
        real: (B, n, 1), 1 at latents of tokens and 0 at latents of padding; None: no padding.
    """

    read: Tensor | Band | None
    own: Tensor | Band | None = None
    turn: Turn | None = None
    real: Tensor | None = None

    def residual(
        self,
        before: Tensor,  # (B, n, d)
        after: Tensor,  # (B, n, d)
    ) -> Tensor:  # (B,)
        """Return ‖after - before‖ / ‖before‖ of the latent that moved most, ignoring padding.

        A norm over all latents would be small for a long row in which a few latents still change.
        """
        with torch.no_grad():
            moved = torch.linalg.vector_norm(after - before, dim=2)  # (B, n)
            size = torch.linalg.vector_norm(before, dim=2)
            # latents may start at 0, and 0 / 0 is nan
            share = moved / size.clamp(min=1e-12)
            if self.real is not None:
                share = share * self.real[..., 0]
            return share.amax(1)

    def memory(self, length: int) -> Tensor | None:
        """Return the mask of a memory look-up: `own`, if any, repeated for each write."""
        if self.own is None:
            return None
        own = self.own.mask() if isinstance(self.own, Band) else self.own
        # each write has the keys of all n latents, in their order
        return own.repeat(1, 1, 1, length // own.shape[-1])


def plain_frame(context: Context) -> Frame:
    """Return a frame in which latents attend to all latents and to all input except padding."""
    return Frame(None if context.mask is None else context.mask[:, None, None])


def token_frame(
    context: Context,
    n: int,
    turn: Callable[[Tensor], Turn | None],
    *,
    causal: bool,
    window: int | None,
) -> Frame:
    """Return the frame of latents that are the last n tokens.

    With ``causal`` a latent does not attend to later tokens. With ``window`` it attends only to
    tokens less than ``window`` positions away.
    """
    length = context.shape[1]
    if context.mask is None:
        real = None
    else:
        # latents of padding change as well, but must not decide when a row stops
        real = context.mask[:, -n:, None].to(context.keys_values[0][0].dtype)
    turned = turn(context.index[:, -n:])
    is_grid = context.index.shape[-1] > 1
    if window is not None and not is_grid and _is_band(length, window, causal):
        ahead = 0 if causal else window - 1
        read, own = (_band(context, n, keys, window - 1, ahead) for keys in (length, n))
        return Frame(read, own, turned, real)
    place = torch.arange(length, device=context.index.device)
    # a latent's position minus a token's: 0 for its own token, negative for later tokens
    after = place[-n:, None] - place  # (n, L)
    near = torch.ones(1, *after.shape, dtype=torch.bool, device=after.device)
    where = context.index if is_grid else place[None, :, None]
    if window is not None:
        for axis in where.to(torch.int32).unbind(-1):  # a grid has two axes, row and column
            near = near & ((axis[:, -n:, None] - axis[:, None]).abs() < window)
    if causal:
        near = near & (after >= 0)
    # padding attends to itself, since a softmax over nothing is nan
    if context.mask is None:
        read = near[:, None]
    else:
        read = near[:, None] & context.mask[:, None, None] | (after == 0)
    # the columns of `read` are tokens, and the latents are the last n of them
    return Frame(read, read[..., -n:], turned, real)


def _is_band(length: int, window: int, causal: bool) -> bool:
    """Return whether a window costs less as a band than as a mask over all keys."""
    width = window if causal else 2 * window - 1
    # a compiled graph must not depend on the length, and it fuses the operations of a narrow band
    if torch.compiler.is_compiling():
        return width < _BAND
    return length >= _BAND * width


def _band(context: Context, n: int, num_keys: int, behind: int, ahead: int) -> Band:
    """Return the `Band` with which the last n tokens attend to the last ``num_keys`` tokens."""
    length = context.shape[1]
    device = context.index.device
    own = torch.arange(length - n, length, device=device)
    places = own[:, None] + torch.arange(-behind, ahead + 1, device=device)  # of keys, (n, W)
    seen = ((places >= length - num_keys) & (places < length))[None]
    if context.mask is not None:
        # padding attends to itself, since a softmax over nothing is nan
        itself = places == own[:, None]
        seen = seen & context.mask[:, places.clamp(0, length - 1)] | itself
    return Band(seen, behind, ahead)
