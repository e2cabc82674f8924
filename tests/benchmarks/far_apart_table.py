"""The tables of `far_apart` in the guide to learned merges."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from tests.benchmarks.far_apart_pairs import (
    ABLATED,
    LENGTH,
    LONG,
    MODULES,
    MORE,
    PAIRS,
    STEPS,
    read_found,
)
from tests.benchmarks.pictures import dot_plot
from tests.benchmarks.results import ROOT, put

GUIDE = ROOT / "docs" / "masks.md"
LOST = ROOT / "docs" / "what_did_not_win.md"
PLOT = ROOT / "docs" / "learned_merges.svg"
TITLES = {
    "chain": "base and fine-tune",
    "siblings": "two fine-tunes",
    "adapters": "two LoRA adapters",
}
STARTS = ("average", "regmean")
SETTINGS = ("granularity", "coefficients", "temperature")
ABOUT = {
    "chain": "SmolLM2-135M-Instruct, and the same after training on German manual pages",
    "siblings": "SmolLM2 with all weights trained, on German manual pages and on Python sources",
    "adapters": "SmolLM2 with LoRA adapters of rank 16, trained on the same two tasks",
}


def write_tables() -> None:
    """Write the tables: starts and students; other seeds with rivals; masks of all modules."""
    put(GUIDE, table(PAIRS, f"{STEPS} steps"), "far apart")
    put(GUIDE, table(MORE, f"{STEPS} steps ({LONG} where the row says so)"), "far apart, more")
    put(GUIDE, settings_table(), "far apart, settings")
    put(LOST, modules_table(), "all modules")
    draw()


def in_table(row: dict[str, Any]) -> bool:
    """Return whether a row is of a merge without training, or of a student as it is by default."""
    if "start" not in row:
        return row["merge"] != "regmean-search"
    changed = set(SETTINGS) & row.keys()
    return not row["search"] and row["rows"] == 1 and not changed


def name_of(row: dict[str, Any]) -> str:
    """Return how the tables call a merge."""
    if "start" not in row:
        return row["merge"]
    steps = "" if row["steps"] == STEPS else f", {row['steps']} steps"
    modules = " of all modules" if row.get("all_modules") else ""
    return f"{row['merge']}{modules} from {row['start']}{steps}"


def by_pair(rows: Sequence[dict[str, Any]]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Return the rows of each pair and hardware.

    A pair's second models are trained, which gives others on other hardware.
    """
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault((row["pair"], row["hardware"]), []).append(row)
    return found


def recovered(rows: Sequence[dict[str, Any]]) -> tuple[dict[str, float], float]:
    """Return what share of a pair's gap each merge recovers, and the mean gap in nats."""
    losses = {name_of(row): row["losses"] for row in rows}
    average = sum(losses["average"])
    gap = average - losses.pop("first")[0] - losses.pop("second")[1]
    return {name: (average - sum(values)) / gap for name, values in losses.items()}, gap / 2


def shares_of(
    pairs: Sequence[str],
) -> tuple[dict[str, dict[str, list[float]]], list[str], list[dict[str, Any]]]:
    """Return the shares of each kind of pair, by merge; what each kind is; and their rows."""
    rows = [row for row in read_found() if in_table(row) and row["pair"] in pairs]
    kinds: dict[str, list[list[dict[str, Any]]]] = {}
    for (pair, _), own in sorted(by_pair(rows).items(), key=lambda item: pairs.index(item[0][0])):
        # a pair that was begun may lack what shares are computed from
        if {"average", "first", "second"} <= {row["merge"] for row in own}:
            kinds.setdefault(pair.partition("-")[0], []).append(own)
    columns: dict[str, dict[str, list[float]]] = {}
    described: list[str] = []
    for kind, members in kinds.items():
        found = [recovered(own) for own in members]
        gap = statistics.mean(gap for _, gap in found)
        seeds = f"; mean of {len(members)} seeds ± standard deviation" if len(members) > 1 else ""
        described.append(f"{TITLES[kind]}: {ABOUT[kind]} (gap {gap:.2f} nats{seeds})")
        columns[kind] = {}
        for shares, _ in found:
            for name, share in shares.items():
                columns[kind].setdefault(name, []).append(share)
    return columns, described, [row for members in kinds.values() for own in members for row in own]


def table(pairs: Sequence[str], steps: str) -> list[str]:
    """Return a table's lines: a column for each kind of pair, with the spread of its seeds."""
    columns, described, rows = shares_of(pairs)
    first = next(iter(columns.values()))
    lines = [
        f"| merge | {' | '.join(TITLES[kind] for kind in columns)} |",
        "|---" * (1 + len(columns)) + "|",
    ]
    names = dict.fromkeys(name for shares in columns.values() for name in shares)
    # merges without a value in the first column come last
    for name in sorted(names, key=lambda name: -statistics.mean(first.get(name, [-9]))):
        cells = [
            _cell(shares.get(name, []), max(map(len, shares.values())))
            for shares in columns.values()
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    made = dict.fromkeys(f"{row['date']} at {row['commit']}" for row in rows)
    searched = " and ".join(sorted({row["merge"] for row in rows if "strength" in row}))
    hardware = dict.fromkeys(f"{row['hardware']}, {row['versions']}" for row in rows)
    about = (
        "Share of the gap in mean held-out loss that a merge recovers. 0 %: the average of the two "
        "models. 100 %: each model on its own task. Above 100 %: better than that. Below 0 %: worse "
        f"than the average. Empty: not measured. {'; '.join(described)}. Students were trained for "
        f"{steps} of 8 rows of at most {LENGTH} tokens. Their learning rates, and the "
        f"strengths of {searched}, were chosen on other rows. "
        f"{'; '.join(hardware)}; {', '.join(made)}."
    )
    return [*lines, "", about]


def draw() -> None:
    """Draw the share of the gap that the starts and the students from them recover, by pair."""
    panels: dict[str, dict[str, dict[str, float]]] = {}
    columns, _, _ = shares_of(PAIRS)
    for kind, shares in columns.items():
        cells = panels.setdefault(f"{TITLES[kind]}: % of the gap", {})
        for row, student in (("all weights", "all"), ("LoRA", "lora"), ("masks", "masks")):
            cells[row] = {}
            for start in STARTS:
                found = shares.get(f"{student} from {start}")
                if found:
                    cells[row][f"from {start}"] = 100 * statistics.mean(found)
        cells["without training"] = {
            f"from {start}": 100 * statistics.mean(shares[start]) for start in STARTS
        }
    dot_plot(PLOT, panels, line=100)


def modules_table() -> list[str]:
    """Return a table of masks with and without those of the embedding and the head."""
    rows = [row for row in read_found() if row["pair"] == MODULES]
    shares, gap = recovered(rows)
    lines = ["| merge | share of the gap |", "|---|---|"]
    for name, share in sorted(shares.items(), key=lambda item: -item[1]):
        lines.append(f"| {name} | {100 * share:.0f} % |")
    made = dict.fromkeys(f"{row['date']} at {row['commit']}" for row in rows)
    about = (
        "Share of the gap between the average and each model on its own task, on held-out rows: "
        f"{ABOUT['chain']} ({gap:.2f} nats). {STEPS} steps of 8 rows of at most {LENGTH} tokens, "
        f"rate .03. {rows[0]['hardware']}; {', '.join(made)}."
    )
    return [*lines, "", about]


def settings_table() -> list[str]:
    """Return a table of students with other settings, on one pair."""
    of_hardware = by_pair([row for row in read_found() if row["pair"] == ABLATED])
    rows = max(of_hardware.values(), key=len)
    losses = {row["merge"]: row["losses"] for row in rows if "start" not in row}
    average = sum(losses["average"])
    gap = average - losses["first"][0] - losses["second"][1]
    lines = ["| student | setting | share of the gap |", "|---|---|---|"]
    students = [
        row for row in rows if "start" in row and row["steps"] == STEPS and not row["search"]
    ]
    for row in sorted(students, key=lambda row: (row["merge"] != "masks", sum(row["losses"]))):
        changed = [f"`{name}={row[name]!r}`" for name in SETTINGS if name in row]
        if row["rows"] < 1:
            changed.append(f"{100 * row['rows']:.0f} % of the rows")
        share = 100 * (average - sum(row["losses"])) / gap
        setting = ", ".join(changed) or "as by default"
        lines.append(f"| {row['merge']} | {setting} | {share:.0f} % |")
    made = dict.fromkeys(f"{row['date']} at {row['commit']}" for row in students)
    about = (
        f"Share of the gap as above, from the average: {ABOUT['chain']} ({gap / 2:.2f} nats; one "
        f"seed). {STEPS} steps of 8 rows of at most {LENGTH} tokens, each at the rate of the "
        f"defaults. {students[0]['hardware']}; {', '.join(made)}."
    )
    return [*lines, "", about]


def _cell(shares: Sequence[float], seeds: int) -> str:
    if not shares:
        return ""
    spread = f" ± {100 * statistics.stdev(shares):.0f}" if len(shares) > 1 else ""
    fewer = f" ({len(shares)} of {seeds} seeds)" if len(shares) < seeds else ""
    return f"{100 * statistics.mean(shares):.0f}{spread} %{fewer}"
