"""What each MLP becomes, of what it could: the least sum of errors within limits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from .choice import Choice

Limits = list[tuple[Callable[[Choice], float], float]]  # what is limited, and by what


def _within(chosen: Mapping[str, Choice], limits: Limits) -> bool:
    return all(sum(cost(c) for c in chosen.values()) <= limit for cost, limit in limits)


def same_for_all(options: Mapping[str, tuple[Choice, ...]], limits: Limits) -> dict[str, Choice]:
    """The structure that costs least when all MLPs have it."""
    shared = [c.config for c in next(iter(options.values()))[1:]]
    by_config = [
        {n: next((c for c in choices if c.config == s), None) for n, choices in options.items()} for s in shared
    ]
    plans = [{n: c for n, c in p.items() if c is not None} for p in by_config if all(p.values())]
    possible = [p for p in plans if _within(p, limits)]
    if not possible:
        raise ValueError("plan: no structure is within the budget for all MLPs; needed a larger one")
    return min(possible, key=squared_error)


def squared_error(chosen: Mapping[str, Choice]) -> float:
    """The sum over MLPs."""
    return sum(c.error**2 for c in chosen.values())


def best_of_each(options: Mapping[str, tuple[Choice, ...]], limits: Limits) -> dict[str, Choice]:
    """The least sum of errors within limits: by a price for each share of a limit, then by spending what is left.

    Never worse than the same for all.
    """
    solutions: list[dict[str, Choice]] = []
    with suppress(ValueError):
        solutions.append(_spend(options, limits, same_for_all(options, limits)))
    for mix in [(1.0,)] if len(limits) == 1 else [(i / 10, 1 - i / 10) for i in range(11)]:
        if (cheapest := _at_price(options, limits, mix)) is not None:
            solutions.append(_spend(options, limits, cheapest))
    if not solutions:
        raise ValueError("plan: no choice for all MLPs is within the budget of time, needed a larger one")
    return min(solutions, key=squared_error)


def _at_price(
    options: Mapping[str, tuple[Choice, ...]], limits: Limits, mix: Sequence[float]
) -> dict[str, Choice] | None:
    """The best choices at the lowest price at which they are within the limits."""

    def price(choice: Choice) -> float:
        return sum(m * cost(choice) / limit for m, (cost, limit) in zip(mix, limits, strict=True))

    def at(rate: float) -> dict[str, Choice]:
        return {n: min(choices, key=lambda c: c.error**2 + rate * price(c)) for n, choices in options.items()}

    low, high = 1e-12, 1e12
    if not _within(at(high), limits):
        return None
    for _ in range(100):
        middle = (low * high) ** 0.5
        low, high = (low, middle) if _within(at(middle), limits) else (middle, high)
    return at(high)


def _spend(options: Mapping[str, tuple[Choice, ...]], limits: Limits, chosen: dict[str, Choice]) -> dict[str, Choice]:
    """Improve choices greedily: as long as the limits allow it, take the one that lowers the error most."""
    while True:
        steps = [
            (chosen[n].error ** 2 - c.error**2, n, c)
            for n, choices in options.items()
            for c in choices
            if c.error < chosen[n].error and _within(chosen | {n: c}, limits)
        ]
        if not steps:
            return chosen
        _, name, choice = max(steps, key=lambda s: s[0])
        chosen = chosen | {name: choice}
