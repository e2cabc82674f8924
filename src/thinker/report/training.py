"""Report of how a training went."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from model_components._report import Axes, Figure, axes_for


def plot_training(history: Sequence[Mapping[str, float]], ax: Axes | None = None) -> Figure:
    """Loss, accuracy and difficulty by step (extra ``plot``).

    Args:
        history: A trainer's ``state.log_history``.
        ax: Where to; default a new figure.

    Returns:
        The figure, matplotlib's.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: ``history`` is not a list of logs.
    """
    if not isinstance(history, Sequence) or not all(isinstance(row, Mapping) for row in history):
        raise ValueError(
            f"plot_training: history is a {type(history).__name__}; expected "
            "trainer.state.log_history"
        )
    figure, axes = axes_for(ax, "plot_training", width=7, height=3.4)
    rows = [row for row in history if "loss" in row]
    steps = [row["step"] for row in rows]
    axes.semilogy(steps, [row["loss"] for row in rows], color="tab:blue", label="loss")
    axes.set(xlabel="step", ylabel="loss")
    other = axes.twinx()
    most = max((row.get("difficulty", 0.0) for row in rows), default=0.0)
    for name, scale, color in (("accuracy", 1.0, "tab:orange"), ("difficulty", most, "tab:green")):
        if scale and any(name in row for row in rows):
            shown = f"{name} (of {most:g})" if name == "difficulty" else name
            other.plot(
                steps,
                [row.get(name, float("nan")) / scale for row in rows],
                color=color,
                label=shown,
            )
    other.set(ylim=(0, 1.03), ylabel="share")
    lines = [*axes.get_lines(), *other.get_lines()]
    axes.legend(lines, [str(line.get_label()) for line in lines], loc="center right", fontsize=8)
    return figure
