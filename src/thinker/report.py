"""How right a thinker is: by steps, latents and length; and the plots of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from model_components._modes import evaluating
from model_components._report import Axes, Figure, Report, Table, axes_for, plain

from .curriculum import CurriculumDataset
from .flow import FlowPlan
from .losses import exact, labels_of_steps
from .model import LatentThinker


@dataclass(frozen=True)
class Accuracy(Report):
    """Shares of right answers.

    Args:
        token: Of symbols.
        sequence: Of rows with every symbol right.
    """

    token: float
    sequence: float

    def summary(self) -> list[str]:
        """One line."""
        return [f"symbols {self.token:.3f}, rows {self.sequence:.3f}"]


@dataclass(frozen=True)
class Grid(Report):
    """Accuracy by number of latents (rows) and steps (columns)."""

    n_latents: tuple[int, ...]
    n_steps: tuple[int, ...]
    cells: tuple[tuple[Accuracy, ...], ...]

    def token(self) -> Tensor:
        """(latents, steps) shares of right symbols."""
        return torch.tensor([[cell.token for cell in row] for row in self.cells])

    def to_dict(self) -> dict[str, Any]:
        """For JSON: both shares, rounded to 4 digits."""
        parts = {
            name: [[round(getattr(c, name), 4) for c in row] for row in self.cells] for name in ("token", "sequence")
        }
        return plain({"n_latents": self.n_latents, "n_steps": self.n_steps, **parts})

    def table(self) -> Table:
        """Shares of right symbols."""
        rows = [[str(n), *(f"{c.token:.3f}" for c in row)] for n, row in zip(self.n_latents, self.cells, strict=True)]
        return Table(["latents \\ steps", *map(str, self.n_steps)], rows)

    def plot(self, ax: Axes | None = None) -> Figure:
        """A heat map of shares of right symbols (extra ``plot``), on ``ax`` or in a new figure.

        Raises:
            ImportError: matplotlib is not installed.
        """
        width, height = 0.6 * len(self.n_steps) + 2.5, 0.45 * len(self.n_latents) + 1.6
        figure, axes = axes_for(ax, "Grid.plot", width=width, height=height)
        values = self.token()
        low = float(values.min())
        image = axes.imshow(values.tolist(), cmap="viridis", aspect="auto", origin="lower", vmin=low, vmax=1.0)
        for i, row in enumerate(values.tolist()):
            for j, value in enumerate(row):
                shown, colour = f"{value:.3f}".removeprefix("0"), "white" if value < (low + 1) / 2 else "black"
                axes.text(j, i, shown, ha="center", va="center", fontsize=7, color=colour)
        axes.set_xticks(range(len(self.n_steps)), [str(n) for n in self.n_steps])
        axes.set_yticks(range(len(self.n_latents)), [str(n) for n in self.n_latents])
        axes.set(xlabel="steps", ylabel="latents")
        figure.colorbar(image, ax=axes, label="token accuracy")
        return figure


@dataclass(frozen=True)
class Curves(Report):
    """Accuracy by number of steps, a curve for each length."""

    lengths: tuple[int, ...]
    n_steps: tuple[tuple[int, ...], ...]  # of each length
    cells: tuple[tuple[Accuracy, ...], ...]

    def rows(self) -> list[dict[str, Any]]:
        """A mapping for each point: length, steps, shares of right symbols and of right rows."""
        return [
            {"length": length, "steps": step, "symbols": cell.token, "rows": cell.sequence}
            for length, steps, cells in zip(self.lengths, self.n_steps, self.cells, strict=True)
            for step, cell in zip(steps, cells, strict=True)
        ]

    def to_dict(self) -> dict[str, Any]:
        """For JSON: the points."""
        return plain({"points": self.rows()})

    def table(self) -> Table:
        """Shares of right symbols."""
        steps = sorted({step for steps in self.n_steps for step in steps})
        rows = []
        for length, own, cells in zip(self.lengths, self.n_steps, self.cells, strict=True):
            by_step = dict(zip(own, cells, strict=True))
            rows.append([str(length), *(f"{by_step[s].token:.4f}" if s in by_step else "" for s in steps)])
        return Table(["length \\ steps", *map(str, steps)], rows)

    def plot(self, ax: Axes | None = None) -> Figure:
        """Shares of right symbols against steps (extra ``plot``), on ``ax`` or in a new figure.

        Raises:
            ImportError: matplotlib is not installed.
        """
        figure, axes = axes_for(ax, "Curves.plot", width=6, height=3.4)
        for number, (length, steps, cells) in enumerate(zip(self.lengths, self.n_steps, self.cells, strict=True)):
            shade = 0.85 * number / max(1, len(self.lengths) - 1)
            shown = (0.1 + shade * 0.9, 0.2 + shade * 0.4, 0.7 - shade * 0.6)
            axes.plot(steps, [c.token for c in cells], marker="o", ms=3, color=shown, label=f"length {length}")
        axes.set(xlabel="steps", ylabel="right symbols", xscale="log")
        powers = [2**k for k in range(16) if 2**k <= max(map(max, self.n_steps))]
        ticks = powers[:: 1 + len(powers) // 8]
        axes.minorticks_off()
        axes.set_xticks(ticks, [str(t) for t in ticks])
        axes.set_ylim(top=1.02)
        axes.legend(fontsize=8)
        return figure


@dataclass(frozen=True)
class Calibration(Report):
    """What a halting head says against what is so, by tenths of its probability.

    Args:
        count: Looks in each tenth: rows times steps.
        said: Mean probability that the head gave.
        right: Share of whole answers that were right.
    """

    count: tuple[int, ...]
    said: tuple[float, ...]
    right: tuple[float, ...]

    @property
    def error(self) -> float:
        """Mean distance between what was said and what was so, by looks (expected calibration error)."""
        parts = zip(self.count, self.said, self.right, strict=True)
        return sum(n * abs(s - r) for n, s, r in parts) / max(1, sum(self.count))

    def summary(self) -> list[str]:
        """One line."""
        return [f"{sum(self.count)} looks, calibration error {self.error:.3f}"]

    def table(self) -> Table:
        """Tenths that were used."""
        parts = zip(range(10), self.count, self.said, self.right, strict=True)
        rows = [[f"{i / 10:.1f} to {(i + 1) / 10:.1f}", str(n), f"{s:.3f}", f"{r:.3f}"] for i, n, s, r in parts if n]
        return Table(["probability", "looks", "said", "right"], rows)


@torch.no_grad()
def accuracies(
    model: LatentThinker,
    batch: dict[str, Any],
    *,
    n_steps: Sequence[int],
    n_latent: int | None = None,
    plan: FlowPlan | None = None,
) -> list[Accuracy]:
    """Accuracy on a batch after each number of steps.

    Plans that output in every step run once, with the most steps; others once for each number.
    """
    inputs = {
        "input_ids": batch["input_ids"].to(model.device),
        "attention_mask": batch["attention_mask"].to(model.device),
        "out_len": batch["labels"].shape[-1],
        "n_latent": n_latent,
    }
    labels = batch["labels"].to(model.device)
    chosen, most = plan or model.default_plan(), max(n_steps)
    with evaluating(model):
        if chosen.loop and not chosen.prologue and not chosen.epilogue and all(row.output for row in chosen.loop):
            steps = sorted(set(n_steps))
            out = model(**inputs, n_step=most, plan=plan, output_steps=steps)
            by_step = dict(zip(steps, out.step_logits, strict=True))
            made = [by_step[n] for n in n_steps]
        else:
            made = [model(**inputs, n_step=n, plan=plan).logits for n in n_steps]
    counted = batch["counted"].to(model.device)
    found = []
    for logits, answers, counts in zip(
        made, labels_of_steps(labels, n_steps), labels_of_steps(counted, n_steps), strict=True
    ):
        right = (logits.argmax(-1) == answers) & counts
        found.append(Accuracy(float(right.sum() / counts.sum()), float((right | ~counts).all(1).float().mean())))
    return found


def evaluate_grid(
    model: LatentThinker,
    data: CurriculumDataset,
    *,
    n_latents: Sequence[int],
    n_steps: Sequence[int],
    length: int | None = None,
    samples: int = 512,
    plan: FlowPlan | None = None,
    seed: int = 0,
) -> Grid:
    """Accuracy on held-out samples for each number of latents and steps.

    Args:
        model: In any mode; it is left in it.
        data: Whose held-out samples.
        n_latents: Rows.
        n_steps: Columns.
        length: Of the samples; default the longest trained on.
        samples: How many.
        plan: What each step does.
        seed: Which samples.

    Raises:
        ValueError: Nothing to look at; more latents than a model with a table has.
    """
    if isinstance(n_latents, int) or isinstance(n_steps, int):
        raise ValueError(f"evaluate_grid: n_latents {n_latents}, n_steps {n_steps}; needed lists, as [{n_latents}]")
    if not n_latents or not n_steps or min(*n_latents, *n_steps, samples) < 1:
        raise ValueError(
            f"evaluate_grid: n_latents {list(n_latents)}, n_steps {list(n_steps)}, samples {samples}; needed 1 or more"
        )
    batch = data.held_out(samples, data.schedule.max_length if length is None else length, seed=seed)
    cells = [tuple(accuracies(model, batch, n_steps=n_steps, n_latent=n, plan=plan)) for n in n_latents]
    return Grid(tuple(n_latents), tuple(n_steps), tuple(cells))


def evaluate_lengths(
    model: LatentThinker,
    data: CurriculumDataset,
    lengths: Sequence[int],
    *,
    n_step: int | None = None,
    n_latent: int | None = None,
    samples: int = 512,
    plan: FlowPlan | None = None,
    seed: int = 0,
) -> dict[int, Accuracy]:
    """Accuracy on held-out samples of each length.

    Args:
        model: In any mode.
        data: Whose held-out samples; lengths beyond those trained on are all unseen.
        lengths: Of samples.
        n_step: Steps; default the config's, or the plan's own.
        n_latent: Latents; default the config's.
        samples: Of each length.
        plan: What each step does.
        seed: Which samples.
    """
    steps = [(plan or model.default_plan()).num_steps(model.config.n_step) if n_step is None else n_step]
    return {
        n: accuracies(model, data.held_out(samples, n, seed=seed), n_steps=steps, n_latent=n_latent, plan=plan)[0]
        for n in lengths
    }


def evaluate_steps(
    model: LatentThinker,
    data: CurriculumDataset,
    lengths: Sequence[int],
    *,
    n_steps: Sequence[int] | Callable[[int], Sequence[int]],
    n_latent: int | None = None,
    samples: int = 512,
    plan: FlowPlan | None = None,
    seed: int = 0,
) -> Curves:
    """Accuracy on held-out samples of each length after each number of steps.

    Args:
        model: In any mode.
        data: Whose held-out samples; lengths beyond those trained on are all unseen.
        lengths: Of samples.
        n_steps: Numbers of steps, or a function from a length to them.
        n_latent: Latents; default the config's.
        samples: Of each length.
        plan: What each step does.
        seed: Which samples.

    Raises:
        ValueError: Nothing to look at; samples longer than the model's.
    """
    steps = {n: sorted(set(n_steps(n) if callable(n_steps) else n_steps)) for n in lengths}
    if not steps or not all(steps.values()) or min(map(min, steps.values())) < 1 or samples < 1:
        raise ValueError(f"evaluate_steps: lengths and steps {steps}, samples {samples}; needed 1 or more of each")
    cells = []
    for length, numbers in steps.items():
        batch = data.held_out(samples, length, seed=seed)
        cells.append(tuple(accuracies(model, batch, n_steps=numbers, n_latent=n_latent, plan=plan)))
    return Curves(tuple(steps), tuple(map(tuple, steps.values())), tuple(cells))


@torch.no_grad()
def evaluate_halting(
    model: LatentThinker,
    data: CurriculumDataset,
    length: int,
    *,
    n_step: int,
    samples: int = 512,
    plan: FlowPlan | None = None,
    seed: int = 0,
) -> Calibration:
    """How often a halting head is right about the answer being right, after every step.

    Args:
        model: With ``halting=True``, trained with `ExactHalt`; in any mode.
        data: Whose held-out samples.
        length: Of the samples.
        n_step: Steps; each that outputs is looked at.
        samples: How many.
        plan: What each step does.
        seed: Which samples.

    Raises:
        ValueError: A model without the head.
    """
    if not model.config.halting:
        raise ValueError("evaluate_halting: the model has no halting head; needed ThinkerConfig(halting=True)")
    batch = {k: v.to(model.device) for k, v in data.held_out(samples, length, seed=seed).items()}
    with evaluating(model):
        out = model(
            batch["input_ids"], batch["attention_mask"], out_len=batch["labels"].shape[-1], n_step=n_step, plan=plan,
            output_steps="all",
        )  # fmt: skip
    said = out.halt_logits[:, torch.tensor(out.output_steps, device=model.device) - 1].float().sigmoid().flatten()
    right = exact(out, batch["labels"]).float().flatten()
    tenths = (said * 10).long().clamp(max=9)
    count = torch.zeros(10, device=said.device).index_add_(0, tenths, torch.ones_like(said))
    sums = [torch.zeros(10, device=said.device).index_add_(0, tenths, x) / count.clamp(min=1) for x in (said, right)]
    return Calibration(tuple(int(n) for n in count), *(tuple(x.tolist()) for x in sums))


def plot_training(history: Sequence[dict[str, Any]], ax: Axes | None = None) -> Figure:
    """Loss, accuracy and difficulty by step (extra ``plot``).

    Args:
        history: A trainer's ``state.log_history``.
        ax: Where to; default a new figure.

    Raises:
        ImportError: matplotlib is not installed.
    """
    figure, axes = axes_for(ax, "plot_training", width=7, height=3.4)
    rows = [row for row in history if "loss" in row]
    steps = [row["step"] for row in rows]
    axes.semilogy(steps, [row["loss"] for row in rows], color="tab:blue", label="loss")
    axes.set(xlabel="step", ylabel="loss")
    other = axes.twinx()
    most = max((row.get("difficulty", 0.0) for row in rows), default=0.0)
    for name, scale, colour in (("accuracy", 1.0, "tab:orange"), ("difficulty", most, "tab:green")):
        if scale and any(name in row for row in rows):
            shown = f"{name} (of {most:g})" if name == "difficulty" else name
            other.plot(steps, [row.get(name, float("nan")) / scale for row in rows], color=colour, label=shown)
    other.set(ylim=(0, 1.03), ylabel="share")
    lines = [*axes.get_lines(), *other.get_lines()]
    axes.legend(lines, [str(line.get_label()) for line in lines], loc="center right", fontsize=8)
    return figure
