"""`FlowPlan`: a table of the operations of each step."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from model_components._checks import is_whole


class FlowRow(NamedTuple):
    """The operations of one step.

    Their order is: read, static look-up, memory look-up, self-attention, MLP, write, output.

    Every step runs the MLP, and self-attention unless a row turns it off. A row that selects no
    further operation neither reads nor writes.
    """

    read_input: bool = False
    mem_lookup: bool = False
    mem_write: bool = False
    static_mem_lookup: bool = False
    output: bool = False
    # last, and True by default, so that rows of five values keep their meaning
    self_attention: bool = True


COLUMNS = FlowRow._fields
PARTS = ("prologue", "loop", "epilogue")
_TRUE = {"1", "x", "✓", "true", "yes"}
_FALSE = {"", "0", "-", "false", "no"}


@dataclass(frozen=True)
class FlowPlan:
    """A plan of the operations of all steps, with one row for each step.

    The rows of the prologue are followed by rows that repeat as often as needed (the loop), and
    then by the rows of the epilogue. Without a loop the plan has a fixed number of steps. A memory
    look-up attends to the latents that earlier steps wrote. Before the first write it does nothing.

    Args:
        prologue: The first rows. Each is a `FlowRow`, a list of 1s and 0s in the order of its
            fields, or a mapping from the names of columns to 1 or 0.
        loop: The rows that repeat in the middle, so that one plan works for many numbers of steps.
        epilogue: The last rows.

    Raises:
        ValueError: There are no rows, a row is invalid, or the last row does not output.

    >>> print(FlowPlan.read_once(4))
    | step | read_input | mem_lookup | mem_write | static_mem_lookup | output |
    |------|------------|------------|-----------|-------------------|--------|
    | 1    | 1          | 0          | 1         | 0                 | 0      |
    | 2    | 0          | 1          | 1         | 0                 | 0      |
    | 3    | 0          | 1          | 1         | 0                 | 0      |
    | 4    | 0          | 1          | 0         | 0                 | 1      |
    """

    prologue: tuple[FlowRow, ...] = ()
    loop: tuple[FlowRow, ...] = ()
    epilogue: tuple[FlowRow, ...] = ()

    def __post_init__(self):
        for part in PARTS:
            rows = getattr(self, part)
            # a FlowRow is a sequence, too, and would be read as six rows
            if not isinstance(rows, Sequence) or isinstance(rows, str | FlowRow):
                raise ValueError(f"FlowPlan: {part} is {rows!r}; expected a list of rows")
            object.__setattr__(self, part, tuple(map(_row, rows)))
        every = self.prologue + self.loop + self.epilogue
        if not any(row.output for row in every):
            raise ValueError(
                f"FlowPlan: expected output = 1 in the last row, got no output in {len(every)} rows"
            )
        if not every[-1].output:
            raise ValueError("FlowPlan: the last step has no output; expected output = 1 there")

    @classmethod
    def every_step(
        cls,
        n_step: int | None = None,
        *,
        memory: bool = True,
        static: bool = False,
        self_attention: bool = True,
    ) -> FlowPlan:
        """Return a plan in which every step reads, looks up, writes and outputs.

        Args:
            n_step: Fixed number of steps; default: any number.
            memory: Whether to look up and write the memory.
            static: Whether to look up static tokens.
            self_attention: Whether latents attend to each other.

        >>> len(FlowPlan.every_step().rows(7))
        7
        """
        plan = cls(loop=(FlowRow(True, memory, memory, static, True, self_attention),))
        if n_step is None:
            return plan
        return cls(plan.rows(n_step))

    @classmethod
    def read_once(
        cls, n_step: int | None = None, *, memory: bool = True, static: bool = False
    ) -> FlowPlan:
        """Return a plan that reads only in the first step and outputs only in the last.

        The plan has two or more steps.

        Args:
            n_step: Fixed number of steps; default: any number from 2.
            memory: Whether to look up and write the memory.
            static: Whether to look up static tokens.
        """
        plan = cls(
            (FlowRow(True, False, memory, static, False),),
            (FlowRow(False, memory, memory, static, False),),
            (FlowRow(False, memory, False, static, True),),
        )
        if n_step is None:
            return plan
        return cls(plan.rows(n_step))

    @classmethod
    def random(
        cls,
        p: float,
        n_step: int,
        *,
        generator: torch.Generator | None = None,
    ) -> FlowPlan:
        """Draw a plan in which each step runs each operation with probability p.

        The first row always reads, and the last row always outputs.

        Args:
            p: The probability.
            n_step: Number of steps.
            generator: The random generator.

        >>> FlowPlan.random(0.5, 3, generator=torch.Generator().manual_seed(0)).rows(3)[
        ...     0
        ... ].read_input
        True
        """
        if not is_whole(n_step, 1) or not isinstance(p, float | int) or not 0 <= p <= 1:
            raise ValueError(
                f"FlowPlan.random: p is {p!r}, n_step {n_step!r}; expected a probability for p, "
                "and 1 or more for n_step"
            )
        drawn = torch.rand(n_step, len(COLUMNS), generator=generator) < p
        rows = [FlowRow(*row) for row in drawn.tolist()]
        # otherwise a plan could output without ever reading the input
        rows[0] = rows[0]._replace(read_input=True)
        rows[-1] = rows[-1]._replace(output=True)
        return cls(tuple(rows))

    @classmethod
    def from_table(cls, table: str) -> FlowPlan:
        """Make a plan from a Markdown table.

        Args:
            table: The table. Its first line names the columns. A missing column counts as 0, except
                ``self_attention``, which counts as 1. A cell is 1 or x if the operation is on, and
                0 or empty if it is off. Rows whose ``step`` ends in * form the loop.

        Raises:
            ValueError: A column is unknown or repeated, a cell is neither 1 nor 0, a row has too
                many or too few cells, or the rows of the loop are not adjacent.

        >>> FlowPlan.from_table('''
        ... step | read_input | output
        ... -----|------------|-------
        ...   1  |     1      |   0
        ...   2  |     0      |   1
        ... ''') == FlowPlan((FlowRow(read_input=True), FlowRow(output=True)))
        True
        """
        if not isinstance(table, str):
            raise ValueError(f"FlowPlan.from_table: table is {table!r}; expected a string")
        rows = _rows_of(table)
        steps = tuple(_row({c: v for c, v in row.items() if c != "step"}) for row in rows)
        # `print` marks the loop in the same way, so a printed plan can be read back
        marked = [i for i, row in enumerate(rows) if str(row.get("step", "")).endswith("*")]
        if not marked:
            return cls(steps)
        first = marked[0]
        end = marked[-1] + 1
        if len(marked) != end - first:
            raise ValueError(
                "FlowPlan.from_table: rows marked with * have other rows between them; expected "
                "one loop of adjacent rows"
            )
        return cls(steps[:first], steps[first:end], steps[end:])

    @property
    def uses_memory(self) -> bool:
        """Return whether any step looks up or writes the memory."""
        return any(
            row.mem_lookup or row.mem_write for row in self.prologue + self.loop + self.epilogue
        )

    @property
    def uses_static(self) -> bool:
        """Return whether any step looks up static tokens."""
        return any(row.static_mem_lookup for row in self.prologue + self.loop + self.epilogue)

    @property
    def min_steps(self) -> int:
        """The smallest number of steps that the plan allows."""
        # a plan that is only a loop runs the whole loop once
        return self._ends_in_output(len(self.prologue) + len(self.epilogue) or len(self.loop))

    def num_steps(self, usual: int) -> int:
        """Return a number of steps that the plan allows, ``usual`` if possible.

        With a loop, this is the smallest number from ``usual`` on with which the last step outputs.
        Without a loop, it is the plan's fixed number.
        """
        if self.loop:
            return self._ends_in_output(max(usual, self.min_steps))
        return self.min_steps

    def _ends_in_output(self, n: int) -> int:
        """Return the smallest number of steps from ``n`` on with which the last step outputs.

        Such a number exists, since the last row of a plan always outputs.
        """
        while not self._cut(n)[-1].output:
            n += 1
        return n

    def rows(self, n_step: int | None = None) -> tuple[FlowRow, ...]:
        """Return the row of each step.

        Args:
            n_step: The number of steps; default: `min_steps`. If the number does not fit whole
                repetitions of the loop, the last repetition is cut short.

        Raises:
            ValueError: The plan does not allow the number of steps, or the last step would not
                output.
        """
        n = self.min_steps if n_step is None else n_step
        room = n - len(self.prologue) - len(self.epilogue)
        if n < 1 or room < 0 or (room and not self.loop):
            needed = f"{self.min_steps}{' or more' if self.loop else ''}"
            raise ValueError(f"FlowPlan: n_step is {n}; this plan needs {needed}")
        rows = self._cut(n)
        if not rows[-1].output:
            raise ValueError(
                f"FlowPlan: n_step is {n}, which cuts the loop of {len(self.loop)} rows at a row "
                f"that does not output; expected for example {self.num_steps(n)}"
            )
        return rows

    def _cut(self, n: int) -> tuple[FlowRow, ...]:
        room = n - len(self.prologue) - len(self.epilogue)
        return (
            # -(-a // b) rounds up: enough repetitions to fill the steps, the last one cut short
            self.prologue + (self.loop * -(-room // max(1, len(self.loop))))[:room] + self.epilogue
        )

    def output_steps(self, n_step: int | None = None) -> tuple[int, ...]:
        """Return the steps that output, counted from 1.

        Args:
            n_step: The number of steps, as in `rows`.

        >>> FlowPlan.read_once().output_steps(5)
        (5,)
        """
        return tuple(number for number, row in enumerate(self.rows(n_step), 1) if row.output)

    def to_dict(self) -> dict[str, list[list[int]]]:
        """Return prologue, loop and epilogue as lists of rows of ones and zeros, for JSON.

        `FlowPlan(**plan.to_dict())` equals the plan.
        """
        return {part: [[int(v) for v in row] for row in getattr(self, part)] for part in PARTS}

    def __str__(self) -> str:
        every = self.prologue + self.loop + self.epilogue
        first = len(self.prologue)
        if not all(row.self_attention for row in every):
            shown = COLUMNS
        else:
            shown = COLUMNS[:-1]
        names = ["step", *shown]
        lines = [f"| {' | '.join(names)} |", f"|{'|'.join('-' * (len(n) + 2) for n in names)}|"]
        for number, row in enumerate(every):
            repeated = first <= number < first + len(self.loop)
            cells = [
                f"{number + 1}{'*' if repeated else ''}",
                *(str(int(v)) for v in row[: len(shown)]),
            ]
            lines.append(
                f"| {' | '.join(c.ljust(len(n)) for c, n in zip(cells, names, strict=True))} |"
            )
        return "\n".join(lines)


def _cells_of(table: str) -> list[list[str]]:
    lines = [line.strip() for line in table.splitlines() if line.strip()]
    # if the first line has an outer bar, all lines have one
    for bar in (str.removeprefix, str.removesuffix):
        if lines and bar(lines[0], "|") != lines[0]:
            lines = [bar(line, "|") for line in lines]
    return [[c.strip() for c in line.split("|")] for line in lines]


def _rows_of(table: str) -> list[Mapping[str, object]]:
    """Return the rows of a Markdown table as mappings from columns to cells."""
    cells = _cells_of(table)
    if not cells:
        return []
    names = [c.lower() for c in cells[0]]
    cells = cells[1:]
    # a dict would silently keep only the last of two columns with the same name
    for name in names:
        if names.count(name) > 1:
            raise ValueError(
                f"FlowPlan.from_table: two columns are called {name!r}; expected different names"
            )
    # two dashes at least: a single one is a cell that means 0
    if cells and all(re.fullmatch(":?-{2,}:?", c) for c in cells[0]):
        cells = cells[1:]
    rows: list[Mapping[str, object]] = []
    for number, line in enumerate(cells, 1):
        if len(line) != len(names):
            raise ValueError(
                f"FlowPlan.from_table: row {number} has {len(line)} cells; expected {len(names)}"
            )
        rows.append(dict(zip(names, line, strict=True)))
    return rows


def _row(row: object) -> FlowRow:
    """Convert a step's values, a sequence or a mapping from columns, to a `FlowRow`."""
    if isinstance(row, FlowRow):
        return FlowRow(*map(bool, row))
    if not isinstance(row, Mapping):
        if not isinstance(row, Sequence) or isinstance(row, str) or len(row) > len(COLUMNS):
            raise ValueError(f"FlowPlan: a row is {row!r}; expected {len(COLUMNS)} values or fewer")
        row = dict(zip(COLUMNS, row, strict=False))
    if unknown := sorted(map(str, set(row) - set(COLUMNS))):
        raise ValueError(
            f"FlowPlan: expected columns among {', '.join(COLUMNS)}, got {unknown[0]!r}"
        )
    return FlowRow(**{column: _cell(value) for column, value in row.items()})


def _cell(value: object) -> bool:
    text = str(int(value) if isinstance(value, bool) else value).strip().lower()
    if text not in _TRUE | _FALSE:
        raise ValueError(f"FlowPlan: a cell is {value!r}; expected 1 or 0")
    return text in _TRUE
