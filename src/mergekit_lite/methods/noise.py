"""Counter-based random bits.

The same element gets the same bits whatever the order, chunk, thread or device.

A stream is named by (seed, tensor name, model index). Its element at offset ``o`` is a hash of
``o`` keyed by the name, so that any slice can be drawn without what comes before it. The hash is
the multiply-and-xorshift finaliser "lowbias32" (Wellons, hash-prospector; public domain) with a
second key xored in between its rounds, which keeps the streams of two names apart. It is written in
int32 tensor operations, which wrap identically on every device.

Shape letters: N elements.
"""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass, replace

import numpy as np

from .._torch import Tensor, torch


def _signed(word: int) -> int:
    if word >= 1 << 31:
        return word - (1 << 32)
    return word


def _xor_shift_(x: Tensor, scratch: Tensor, shift: int) -> None:
    """Compute ``x ^= x >>> shift`` in place.

    Torch's int32 shift copies the sign bit, so the copies are masked away.
    """
    torch.bitwise_right_shift(x, shift, out=scratch)
    scratch.bitwise_and_((1 << (32 - shift)) - 1)
    x.bitwise_xor_(scratch)


@functools.lru_cache(maxsize=4)
def _kept_counter(count: int, device: torch.device) -> Tensor:
    return torch.arange(count, dtype=torch.int32, device=device)


def _counter(count: int, device: torch.device) -> Tensor:
    """0 … count - 1.

    Those of a block's size are kept, since making them costs as much as hashing.
    """
    make = _kept_counter if count <= 1 << 20 else _kept_counter.__wrapped__
    return make(count, device)


def _hash_(counters: Tensor, key: str) -> Tensor:
    """The keyed hash of each int32 counter, in place."""
    digest = hashlib.sha256(key.encode()).digest()
    first, second = (_signed(int.from_bytes(digest[i : i + 4], "little")) for i in (0, 4))
    scratch = torch.empty_like(counters)
    counters.add_(first)
    _xor_shift_(counters, scratch, 16)
    counters.mul_(0x7FEB352D).bitwise_xor_(second)
    _xor_shift_(counters, scratch, 15)
    counters.mul_(_signed(0x846CA68B))
    _xor_shift_(counters, scratch, 16)
    return counters


def random_bits(key: str, start: int, count: int, device: torch.device | str = "cpu") -> Tensor:
    """Random 32-bit words number ``start`` to ``start + count`` of the stream called ``key``.

    Args:
        key: The stream's name.
        start: Number of the first word.
        count: How many words, N.
        device: Where to make them; every device makes the same.

    Returns:
        An int32 tensor of shape (N,), every bit pattern equally likely.

    >>> torch.equal(random_bits("k", 0, 100)[40:60], random_bits("k", 40, 20))
    True
    """
    pieces = []
    end = start + count
    while start < end:  # one key serves 2**32 words
        page = start >> 32
        low = start & 0xFFFFFFFF
        size = min(end - start, (1 << 32) - low)
        pieces.append(_hash_(_counter(size, torch.device(device)) + _signed(low), f"{key}|{page}"))
        start += size
    if len(pieces) == 1:
        return pieces[0]
    return torch.cat([torch.empty(0, dtype=torch.int32, device=device), *pieces])


def bits_at(key: str, places: Tensor) -> Tensor:
    """Return the words of a stream at the given places, as `random_bits` would draw them.

    Places are int64, in any order.

    >>> torch.equal(bits_at("k", torch.tensor([7, 3])), random_bits("k", 0, 8)[[7, 3]])
    True
    """
    if not places.numel():
        return torch.empty(places.shape, dtype=torch.int32, device=places.device)
    pages = [int(page) >> 32 for page in places.aminmax()]
    if pages[0] == pages[1]:
        return _hash_((places & 0xFFFFFFFF).to(torch.int32), f"{key}|{pages[0]}")
    words = torch.empty(places.shape, dtype=torch.int32, device=places.device)
    for page in range(pages[0], pages[1] + 1):
        here = places >> 32 == page
        words[here] = _hash_((places[here] & 0xFFFFFFFF).to(torch.int32), f"{key}|{page}")
    return words


def _positions(lanes: Tensor, value: int) -> Tensor:
    """Find where an int8 tensor equals ``value``.

    Numpy finds a few among many faster than torch does on CPU.
    """
    if lanes.device.type == "cpu":
        return torch.from_numpy(np.flatnonzero(lanes.numpy() == value))
    return (lanes == value).nonzero().flatten()


@dataclass(frozen=True)
class Noise:
    """The random source of one block of one tensor; a method asks it which elements to keep.

    Args:
        seed: The merge's seed.
        name: The tensor's name.
        offset: Index of the block's first element in the flattened tensor.
    """

    seed: int = 0
    name: str = ""
    offset: int = 0

    def at(self, offset: int) -> Noise:
        """The same stream, for the block that starts at ``offset``."""
        return replace(self, offset=offset)

    def keep(self, model: int, like: Tensor, probability: float) -> Tensor:
        """Independent keep decisions of one probability, one for each element of ``like``.

        An element has 8 bits of a word that it shares with three neighbours. Where those equal the
        probability's first 8 bits, once in 256 elements and never for multiples of 1/256, 31 bits
        of a word of its own decide.

        Args:
            model: Index of the model, which has a stream of its own.
            like: The block (any shape); its shape, dtype and device are the result's.
            probability: Chance of keeping, exact to 2**-39.

        Returns:
            A tensor of 0 and 1 in ``like``'s shape and dtype.
        """
        if probability >= 1:
            return torch.ones_like(like)
        key = f"{self.seed}|{self.name}|{model}"
        first = self.offset // 4
        words = random_bits(key, first, (self.offset + like.numel() + 3) // 4 - first, like.device)
        lanes = words.view(torch.int8)[self.offset % 4 :][: like.numel()]
        whole, rest = divmod(probability * (1 << 8) - (1 << 7), 1)
        # A difference of whole numbers, clamped, is the decision: several times faster than a
        # boolean mask.
        decisions = lanes.to(like.dtype).neg_().add_(whole).clamp_(0, 1)
        if rest:
            undecided = _positions(lanes, int(whole))
            words = bits_at(f"{key}|own", undecided + self.offset).bitwise_and_(0x7FFFFFFF)
            decisions[undecided] = (words < rest * (1 << 31)).to(like.dtype)
        return decisions.view(like.shape)

    def keep_each(self, model: int, probabilities: Tensor) -> Tensor:
        """Independent keep decisions, each element with a probability of its own, exact to 2**-31.

        Args:
            model: Index of the model, which has a stream of its own.
            probabilities: Chances of keeping (any shape).

        Returns:
            A tensor of 0 and 1 in the shape and dtype of ``probabilities``.
        """
        key = f"{self.seed}|{self.name}|{model}|each"
        bits = random_bits(key, self.offset, probabilities.numel(), probabilities.device).view(
            probabilities.shape
        )
        limits = (probabilities.double() * 2**32 - 2**31).round_().clamp_(max=2**31 - 1)
        return (bits < limits.to(torch.int32)).to(probabilities.dtype)
