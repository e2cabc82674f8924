"""Counter-based random numbers: each one depends only on the integers that it is computed from."""

from __future__ import annotations

_WORD = (1 << 64) - 1


def mix(*words: int) -> int:
    """Return a 64-bit hash of the integers ``words``, which depends on their order.

    The integers are mixed by SplitMix64's finalizer (Steele et al. 2014).

    >>> mix(1, 2) == mix(1, 2), mix(1, 2) == mix(2, 1)
    (True, False)
    """
    state = 0
    for word in words:
        # the increment of SplitMix64, 2^64 divided by the golden ratio, and then its multipliers
        state = (state + (word & _WORD) + 0x9E3779B97F4A7C15) & _WORD
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _WORD
        state ^= state >> 31
    return state


def signed(word: int) -> int:
    """Return a 64-bit word reinterpreted as a signed integer, as in torch's int64."""
    return word - (1 << 64) if word >> 63 else word


def between(pair: tuple[int, int], word: int) -> int:
    """Map an integer to one of the numbers from ``pair[0]`` to ``pair[1]``.

    >>> between((2, 4), 7)
    3
    """
    return pair[0] + word % (pair[1] - pair[0] + 1)


def seed_of(*words: int) -> int:
    """Return a seed of 63 bits for a generator, computed from the integers ``words``."""
    return mix(*words) >> 1
