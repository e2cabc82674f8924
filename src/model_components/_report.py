"""The base class of reports and plans, and helpers for plots.

Reports print as tables, render in notebooks and can be converted to JSON.
"""

from __future__ import annotations

import html
import importlib.util
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
else:  # names for type annotations; matplotlib itself is imported only for a plot
    Axes = Figure = Any


@dataclass(frozen=True)
class Table:
    """A table of text.

    The first column is left-aligned, and with ``sentences`` so is the last one. The other columns
    are right-aligned.
    """

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    sentences: bool = False

    def __str__(self) -> str:
        lines = [self.header, *self.rows]
        widths = [max(len(line[i]) for line in lines) for i in range(len(self.header))]
        left = {0, len(widths) - 1} if self.sentences else {0}
        aligned = [
            [
                cell.ljust(widths[i]) if i in left else cell.rjust(widths[i])
                for i, cell in enumerate(line)
            ]
            for line in lines
        ]
        return "\n".join("  ".join(line).rstrip() for line in aligned)

    def _repr_html_(self) -> str:
        def line(cells: Sequence[str], tag: str) -> str:
            return (
                "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"
            )

        body = "".join(line(row, "td") for row in self.rows)
        return f"<table><thead>{line(self.header, 'th')}</thead><tbody>{body}</tbody></table>"


class Report:
    """The base class of reports, which are dataclasses.

    A report defines its `table`, the lines above it (`summary`) and the lines below it (`remarks`).
    Text and HTML are made from these, JSON from the fields.

    >>> @dataclass(frozen=True)
    ... class Sizes(Report):
    ...     bytes: dict
    ...
    ...     def table(self):
    ...         return Table(("name", "bytes"), [(k, f"{v:,}") for k, v in self.bytes.items()])
    >>> print(Sizes({"weights": 1000, "b": 2}))
    name     bytes
    weights  1,000
    b            2
    >>> Sizes({"b": float("nan")}).to_dict()
    {'bytes': {'b': None}}
    """

    def summary(self) -> Sequence[str]:
        """Return the lines above the table."""
        return ()

    def table(self) -> Table | None:
        """Return the table, or None if there is none."""
        return None

    def remarks(self) -> Sequence[str]:
        """Return the lines below the table, such as warnings and notes on omissions."""
        return ()

    def __str__(self) -> str:
        table = self.table()
        return "\n".join(
            [*self.summary(), *([str(table)] if table and table.rows else []), *self.remarks()]
        )

    def _repr_html_(self) -> str:
        above, below = (
            "<br>".join(map(html.escape, lines)) for lines in (self.summary(), self.remarks())
        )
        table = self.table()
        parts = [
            f"<p>{above}</p>" if above else "",
            table._repr_html_() if table and table.rows else "",
        ]
        return "".join([*parts, f"<p>{below}</p>" if below else ""])

    def to_dict(self) -> dict[str, object]:
        """Return every field as a JSON value.

        Paths and dtypes become text, tensors become lists, NaN and infinity become None.
        """
        # pyrefly: ignore[bad-argument-type]: its subclasses are dataclasses
        return {field.name: plain(getattr(self, field.name)) for field in fields(self)}


def plain(value: object) -> Any:
    """Convert a value to JSON types.

    >>> from pathlib import Path
    >>> plain({"a": (1, Path("b"), float("inf"))})
    {'a': [1, 'b', None]}
    """
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    # call `to_dict` before reading fields, because it may return more; a class has no values
    if hasattr(value, "to_dict") and not isinstance(value, type):
        return plain(value.to_dict())
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    # tensors and NumPy's arrays, without importing either library
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]
    if type(value).__name__ == "dtype":
        return str(value).removeprefix("torch.")
    return str(value)


def needs_matplotlib(operation: str) -> None:
    """Raise an error, before any work starts, if a plot cannot be drawn.

    Raises:
        ImportError: matplotlib is not installed.
    """
    # do not import matplotlib yet, because that takes long and the plot comes last
    if importlib.util.find_spec("matplotlib") is None:
        raise ImportError(
            f"{operation}: a plot needs matplotlib; pip install 'model-components[plot]'"
        )


def axes_for(
    ax: Axes | None, operation: str, *, width: float = 6.4, height: float = 4.0
) -> tuple[Figure, Axes]:
    """Return the given axes with their figure, or axes in a new figure; sizes are in inches.

    A new figure is not part of pyplot's global state. Notebooks show it even if pyplot has not been
    used.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: ``ax`` is not matplotlib axes.
    """
    needs_matplotlib(operation)
    from matplotlib.figure import Figure

    if ax is not None and not hasattr(ax, "figure"):
        raise ValueError(
            f"{operation}: ax is {ax!r}, expected matplotlib axes; to save a plot, call "
            ".plot().savefig(path)"
        )
    if ax is not None:
        # pyrefly: ignore[bad-return]: no report draws on a subfigure
        return ax.figure, ax
    # pyplot would keep every figure in memory until it is closed
    figure = Figure((width, height), layout="constrained", dpi=150)
    # pyrefly: ignore[missing-attribute]: notebooks call it
    figure._repr_png_ = partial(_png, figure)
    return figure, figure.add_subplot()


def _png(figure: Figure) -> bytes:
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    return picture.getvalue()


def bars(ax: Axes | None, operation: str, values: Mapping[str, float], label: str) -> Figure:
    """Draw a horizontal bar for each name, the first at the top, on ``ax`` or in a new figure."""
    # inches: 0.9 for the axis and its label, 0.24 for each bar and its name
    figure, axes = axes_for(ax, operation, height=0.9 + 0.24 * max(1, len(values)))
    axes.barh(range(len(values)), list(values.values()), 0.7)
    axes.set_yticks(range(len(values)), list(values), fontsize=8)
    # the axis runs from large to small, which puts bar 0 at the top
    axes.set_ylim(len(values) - 0.4, -0.6)
    axes.set_xlim(left=0.0)
    axes.set_xlabel(label)
    return figure
