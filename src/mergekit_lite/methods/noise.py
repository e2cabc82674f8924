"""Random choices of elements to keep, which depend only on the seed, the tensor and the model.

A stream is a sequence of random 32-bit words, named by seed, tensor name and model index. Word
number ``n`` is a hash of ``n``, with the stream's name as the key. So the order of computation,
threads and the device do not change the words. The hash is the multiply-and-xorshift finalizer
"lowbias32" (Wellons, hash-prospector; public domain) with a second key xored in between its rounds,
which keeps the streams of two names apart. It is written in int32 tensor operations, which wrap
identically on every device. A stream repeats after 2**32 words.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from .._torch import Tensor, torch


def stream_keys(stream: str) -> tuple[int, int]:
    """Return the two 32-bit keys of a stream."""
    digest = hashlib.sha256(stream.encode()).digest()
    # a fixed byte order, so that the keys are the same on all machines
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:8], "little")


def _signed(word: int) -> int:
    """Return the int32 with the same bits as an unsigned 32-bit number."""
    if word >= 1 << 31:
        return word - (1 << 32)
    return word


def _xor_shift_(x: Tensor, shift: int) -> None:
    """Compute ``x ^= x >>> shift`` in place."""
    shifted = x >> shift
    shifted &= (1 << (32 - shift)) - 1  # torch's shift of an int32 copies the sign bit
    x ^= shifted


def random_words(stream: str, places: Tensor) -> Tensor:
    """Return the words of a stream at the given indices (int64, any shape), as int32.

    >>> random_words("k", torch.tensor([1, 0])).equal(random_words("k", torch.arange(2)).flip(0))
    True
    """
    first, second = (_signed(key) for key in stream_keys(stream))
    words = places.to(torch.int32).add_(first)
    _xor_shift_(words, 16)
    # lowbias32's multipliers, and its shifts 16, 15 and 16
    words.mul_(0x7FEB352D).bitwise_xor_(second)
    _xor_shift_(words, 15)
    words.mul_(_signed(0x846CA68B))
    _xor_shift_(words, 16)
    return words


@dataclass(frozen=True)
class Noise:
    """The random source of a tensor, which chooses the elements that a method keeps.

    Args:
        seed: The merge's seed.
        name: The tensor's name.
    """

    seed: int = 0
    name: str = ""

    def keep(self, model: int, like: Tensor, probability: float) -> Tensor:
        """Choose elements to keep, independently and with the same probability.

        Each element uses 8 bits of a word that it shares with three neighbors. If these bits equal
        the probability's first 8 bits, 31 bits of another word decide. This happens for one element
        in 256, and never if the probability is a multiple of 1/256.

        Args:
            model: The index of the model. Each model has its own stream.
            like: A tensor (any shape) with the shape, dtype and device of the result.
            probability: The probability of keeping an element, exact to 2**-32.

        Returns:
            A tensor of 1 for kept elements and 0 for others.
        """
        if probability >= 1:
            return torch.ones_like(like)
        stream = f"{self.seed}|{self.name}|{model}"
        count = like.numel()
        words = random_words(stream, torch.arange((count + 3) // 4, device=like.device))
        lanes = words.view(torch.int8)[:count]
        # bytes are int8, so a probability p becomes the limit p * 2**8 - 2**7
        whole, rest = divmod(probability * (1 << 8) - (1 << 7), 1)
        decisions = lanes < whole
        if rest:
            undecided = (lanes == whole).nonzero().flatten()
            own = random_words(f"{stream}|own", undecided) & 0x7FFFFFFF
            decisions[undecided] = own < rest * (1 << 31)
        return decisions.view(like.shape).to(like.dtype)

    def keep_each(self, model: int, probabilities: Tensor) -> Tensor:
        """Choose elements to keep, independently and each with its own probability.

        Args:
            model: The index of the model. Each model has its own stream.
            probabilities: The probability of keeping each element (any shape), exact to 2**-31.

        Returns:
            A tensor of 1 for kept elements and 0 for others, with the shape and dtype of
            ``probabilities``.
        """
        places = torch.arange(probabilities.numel(), device=probabilities.device)
        words = random_words(f"{self.seed}|{self.name}|{model}|each", places)
        # words are int32, so a probability p becomes the limit p * 2**32 - 2**31
        limits = (probabilities.double() * 2**32 - 2**31).round_().clamp_(max=2**31 - 1)
        kept = words.view(probabilities.shape) < limits.to(torch.int32)
        return kept.to(probabilities.dtype)
