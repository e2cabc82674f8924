"""Positions of input tokens and of answer symbols.

Shapes: B batch, L input length, O answer length, d width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .config import ThinkerConfig
from .functional import Turn, angles

SHARED = ("random", "aligned")  # kinds whose codes are the same for input and answer


@dataclass(frozen=True)
class Places:
    """Positions drawn for a batch, shared by its input and its answer.

    Args:
        drawn: Random positions in ascending order, (n,); None unless positions are ``"random"``.
    """

    drawn: Tensor | None = None


def token_index(
    tokens: Tensor,  # (B, L)
    mask: Tensor | None,  # (B, L)
) -> Tensor:  # (B or 1, L)
    """Return the position of each token in its sequence, not counting padding on either side.

    >>> token_index(torch.zeros(1, 3), torch.tensor([[False, True, True]]))
    tensor([[0, 0, 1]])
    """
    if mask is None:
        return torch.arange(tokens.shape[1], device=tokens.device)[None]
    return (mask.cumsum(1) - 1).clamp_(min=0)


def operand_index(
    tokens: Tensor,  # (B, L)
    mask: Tensor | None,  # (B, L)
    separators: list[int],
) -> Tensor:  # (B, L)
    """Return the distance of each token from the start of its operand.

    A separator is the last token of the operand that it ends.

    >>> operand_index(torch.tensor([[5, 5, 9, 5, 5]]), None, [9])
    tensor([[0, 1, 2, 0, 1]])
    """
    place = token_index(tokens, mask).expand_as(tokens)
    ends = torch.isin(tokens, torch.tensor(separators, device=tokens.device))
    if mask is not None:
        ends = ends & mask
    # where the next operand starts
    after = torch.where(ends, place + 1, 0).cummax(1).values.roll(1, 1)
    # `roll` has moved the last column to the front
    after[:, :1] = 0
    return (place - after).clamp_(min=0)


def grid_index(
    tokens: Tensor,  # (B, L)
    mask: Tensor | None,  # (B, L)
) -> Tensor:  # (B or 1, L, 2)
    """Return the row and the column of each token in a square grid, read row by row.

    >>> grid_index(torch.zeros(1, 4), None)
    tensor([[[0, 0],
             [0, 1],
             [1, 0],
             [1, 1]]])
    """
    if mask is None:
        count = torch.tensor([[tokens.shape[1]]], device=tokens.device)
    else:
        count = mask.sum(1, keepdim=True)
    # exact, since `check_grid` rejects counts that are not squares
    columns = count.double().sqrt().round().long()
    place = token_index(tokens, mask)
    return torch.stack([place // columns, place % columns], -1)


class Positions(nn.Module):
    """Position codes of the input, and the queries of the answer.

    See ``positions`` in `ThinkerConfig`.
    """

    def __init__(self, config: ThinkerConfig):
        super().__init__()
        self.config = config
        d = config.hidden_size
        kind = config.positions
        num = config.num_positions
        # an operand can be as long as a whole sequence
        table_sizes = {"random": num, "cyclic": num, "aligned": config.longest}
        inputs = table_sizes.get(kind, config.max_input_length)
        outputs = config.max_output_length
        if kind in ("learned", "cyclic", "random", "aligned"):
            self.input = nn.Embedding(inputs, d)
        else:
            self.input = None
        if config.from_end:
            self.end = nn.Embedding(config.max_input_length, d)
        else:
            self.end = None
        if config.at_tokens:
            outputs = 0  # the latents are the answer
        elif kind in SHARED:
            outputs = 1  # the codes are the input's; one vector marks them as queries
        self.output = nn.Embedding(outputs, d) if outputs else None

    def extra_repr(self) -> str:
        """Return the kind of positions."""
        return f"{self.config.positions!r}"

    def draw(
        self, length: int, *, generator: torch.Generator | None = None, device: torch.device
    ) -> Places:
        """Draw positions for a batch whose longest input or answer has ``length`` tokens.

        Only ``"random"`` positions are drawn. Evaluation without a generator draws the same
        positions each time.
        """
        config = self.config
        if config.positions != "random":
            return Places()
        if generator is None and not self.training and not torch.compiler.is_compiling():
            generator = torch.Generator().manual_seed(0)
        if generator is not None:
            where = generator.device
        else:
            where = torch.device("cpu")
        # from the whole table, so that the codes for long inputs are trained as well
        drawn = (
            torch.randperm(config.num_positions, generator=generator, device=where)[:length]
            .sort()
            .values
        )
        return Places(drawn.to(device))

    def encode(
        self,
        tokens: Tensor,  # (B, L)
        mask: Tensor | None,  # (B, L)
        places: Places,
    ) -> Tensor | None:  # (B or 1, L, d)
        """Return the codes to add to the input's embeddings; None if positions are only rotary."""
        index = token_index(tokens, mask)
        kind = self.config.positions
        code = None
        if kind == "aligned":
            index = operand_index(tokens, mask, self.config.separators)
        elif places.drawn is not None:
            index = places.drawn[index]
        elif kind == "cyclic":
            index = index % self.config.num_positions
        if self.input is not None:
            code = self.input(index)
        if self.end is not None:
            count = tokens.shape[1] if mask is None else mask.sum(1, keepdim=True)
            from_end = self.end((count - 1 - token_index(tokens, mask)).clamp(min=0))
            # rotary positions add no code, so the code from the end may be the only one
            code = from_end if code is None else code + from_end
        return code

    def index(self, tokens: Tensor, mask: Tensor | None) -> Tensor:  # (B or 1, L, 1 or 2)
        """Return each token's position in its sequence; with ``rotary_2d``, its row and column."""
        if self.config.positions == "rotary_2d":
            return grid_index(tokens, mask)
        return token_index(tokens, mask)[..., None]

    def turn(self, index: Tensor) -> Turn | None:
        """Return the cosines and sines that rotate keys and queries; None without rotary positions.

        Each axis of `index` rotates an equal share of a head.

        In two dimensions the fastest pair rotates by 90 degrees from one cell to the next, and the
        base is 30, because the sides of a grid are short (for separate axes, see Heo et al. 2024,
        section 3.1).
        """
        if not self.config.positions.startswith("rotary"):
            return None
        axes = index.shape[-1]
        size = self.config.hidden_size // self.config.num_heads // 2 // axes
        if axes == 1:
            radians = angles(index[..., 0], size)
        else:
            by_axis = [angles(axis, size, base=30.0) for axis in index.unbind(-1)]
            radians = torch.cat([math.pi / 2 * one for one in by_axis], -1)
        return radians.cos(), radians.sin()

    def queries(self, out_len: int, places: Places, device: torch.device) -> Tensor:  # (1, O, d)
        """Return the queries of the read-out, one for each answer position."""
        assert self.output is not None
        index = torch.arange(out_len, device=device)[None]
        if places.drawn is not None:
            if out_len > len(places.drawn):
                raise ValueError(
                    f"LatentThinker: out_len is {out_len}, but the input was encoded for at most "
                    f"{len(places.drawn)} answer positions; call encode(..., out_len={out_len})"
                )
            index = places.drawn[index]
        if self.config.positions not in SHARED:
            return self.output(index)
        assert self.input is not None
        return self.input(index) + self.output.weight
