"""Run a merge method over the blocks of a tensor.

As many passes as it asks for, then the result, block by block.

A method without requests is called once a block. A method that yields requests (`Sum`, `Largest`)
is a generator; it is replayed on every block in every pass: requests answered earlier are fed back
at once, the open ones are collected over all blocks, and the last replay returns the block's
result. Requests hold closures, so a replay computes only what its pass needs.

Shape letters: N elements of a tensor, n elements of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Protocol

from .._torch import Tensor, torch
from .noise import Noise
from .parameters import Bound
from .selection import Asking, Largest, Request, Selector, Summation, T

_SAMPLE = 1 << 14

Collector = Summation | Selector


class Answering(Protocol):
    """A collector that knows the answer to a request."""

    def answer(self, block: int) -> object:
        """The answer as it applies to block number ``block``."""
        ...


@dataclass(frozen=True)
class Block:
    """One stretch of a tensor: the models' values, the base's, and where it starts."""

    tensors: list[Tensor]
    base: Tensor | None
    offset: int = 0


class Blocks(Protocol):
    """The blocks of one tensor, loaded on demand."""

    @property
    def total(self) -> int:
        """Number of elements, N."""
        ...

    def __len__(self) -> int: ...

    def load(self, index: int) -> Block:
        """Block number ``index``, in the dtype to compute in."""
        ...

    def sample(self) -> Iterable[Block]:
        """Small stretches spread over the tensor."""
        ...


@dataclass(frozen=True)
class OneBlock:
    """A tensor held whole in memory."""

    block: Block
    total: int

    def __len__(self) -> int:
        return 1

    def load(self, index: int) -> Block:
        """The whole tensor."""
        return self.block

    def sample(self) -> Iterable[Block]:
        """Nothing: the first pass sees every element at once."""
        return ()


class Evaluation:
    """A method on one tensor, with its parameters bound.

    Args:
        function: The method's plain function or generator function.
        parameters: Its keyword arguments, for this tensor.
        blocks: The tensor.
        noise: The tensor's random source, for methods that take one.
        executor: Runs blocks side by side; None runs them in order.
    """

    def __init__(
        self,
        function: Callable[..., Tensor | Asking[Tensor]],
        parameters: Bound,
        blocks: Blocks,
        noise: Noise | None = None,
        executor: Executor | None = None,
    ):
        self._function = function
        self._parameters = parameters
        self._blocks = blocks
        self._noise = noise
        self._executor = executor
        self._answered: list[list[Answering]] = []
        self._first: Tensor | None = None
        self.passes = 0

    def map(self, work: Callable[[int], T]) -> list[T]:
        """``work(i)`` for every block number, in order."""
        numbers = range(len(self._blocks))
        if self._executor is None or len(self._blocks) == 1:
            return [work(i) for i in numbers]
        return list(self._executor.map(work, numbers))

    def _replay(self, block: Block, index: int) -> tuple[list[Request] | None, Tensor | None]:
        """Run the method on a block until it asks something new or returns.

        Return (requests, None) or (None, result).
        """
        if self._noise is None:
            extra = {}
        else:
            extra = {"noise": self._noise.at(block.offset)}
        outcome = self._function(block.tensors, block.base, **self._parameters, **extra)
        if isinstance(outcome, torch.Tensor):
            return None, outcome
        try:
            asked = next(outcome)
            for collectors in self._answered:
                answers = [collector.answer(index) for collector in collectors]
                asked = outcome.send(answers if isinstance(asked, (list, tuple)) else answers[0])
        except StopIteration as stop:
            return None, stop.value
        return list(asked) if isinstance(asked, (list, tuple)) else [asked], None

    def requests(self) -> list[Request] | None:
        """Return what the method asks next, as closures over the first block.

        None when it returns a result.
        """
        requests, self._first = self._replay(self._blocks.load(0), 0)
        return requests

    def answer(self, collectors: Sequence[Answering]) -> None:
        """Give the answers to the requests now open.

        They were collected elsewhere (the global scope).
        """
        self._answered.append(list(collectors))

    def observe(self, collectors: Sequence[Collector], first_number: int = 0) -> None:
        """One pass: show every block to the collectors that are not done."""

        def work(i: int) -> None:
            requests, _ = self._replay(self._blocks.load(i), i)
            assert requests is not None
            for collector, request in zip(collectors, requests, strict=True):
                if not collector.done:
                    collector.observe(first_number + i, request.compute())

        self.map(work)
        self.passes += 1

    def samples(self, number_of_requests: int) -> list[list[Tensor]]:
        """For each open request, its values on the tensor's sample."""
        values: list[list[Tensor]] = [[] for _ in range(number_of_requests)]
        for block in self._blocks.sample():
            requests, _ = self._replay(block, 0)
            assert requests is not None
            for scores, request in zip(values, requests, strict=True):
                if isinstance(request, Largest):
                    scores.append(request.compute().detach().flatten())
        return values

    def measure(self) -> None:
        """Answer every request of the method."""
        while (requests := self.requests()) is not None:
            thresholds = any(isinstance(request, Largest) for request in requests)
            if thresholds:
                samples = self.samples(len(requests))
            else:
                samples = [[] for _ in requests]
            collectors: list[Collector] = []
            for request, sampled in zip(requests, samples, strict=True):
                # one block: its own stride is the sample
                if isinstance(request, Largest) and not sampled:
                    scores = request.compute().detach().flatten()
                    sampled = [scores[:: max(1, scores.numel() // _SAMPLE)]]
                collectors.append(
                    request.start(
                        self._blocks.total, torch.cat(sampled) if sampled else torch.empty(0)
                    )
                )
            while not all(collector.done for collector in collectors):
                self.observe(collectors)
                for collector in collectors:
                    collector.advance()
            self.answer(collectors)

    def result(self, index: int) -> Tensor:
        """The merged values of block ``index``; every request must have been answered."""
        if index == 0 and self._first is not None:  # computed when it was asked for requests
            first = self._first
            self._first = None
            return first
        requests, result = self._replay(self._blocks.load(index), index)
        assert requests is None
        assert result is not None
        return result
