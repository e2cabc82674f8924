"""What the thinker's recipe owes to each of its parts: thinker_ablation.json to a JSON of results.

Copying 20 symbols at two sizes; one part at a time is changed. Not timed: what is compared is the
accuracy on held-out samples, at the steps trained with and at four times as many.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import thinker as th
import thinker.losses
import thinker.schedules
from tests.benchmarks.ablations import settings
from tests.benchmarks.pictures import save_picture
from tests.benchmarks.results import RESULTS, ROOT, commit, put, today

CONFIG, FOUND = Path(__file__).parent / "thinker_ablation.json", RESULTS / "thinker_ablation.json"
GUIDE, PLOT = ROOT / "docs" / "thinker_measured.md", ROOT / "docs" / "thinker_ablation.svg"
LOSSES = {
    "last": lambda: th.losses.LastAndRandom(1.0, 0.0),
    "last + random": th.losses.LastAndRandom,
    "all": th.AllSteps,
    "learned": lambda: th.losses.LearnedWeights(8),
}
UPDATES = {
    "normalized": {},
    "replace": {"step_update": "replace", "step_noise": 0.0},
    "replace + noise": {"step_update": "replace"},
    "without noise": {"step_noise": 0.0},
    "rate 0.5": {"step_rate": 0.5},
}


def run(setting: dict[str, Any], size: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """Train under one setting, and look."""
    from transformers import set_seed

    set_seed(setting["seed"])
    length, iterations = config["length"], size["iterations"]
    task, kind = (
        th.make_task("copy", symbols=config["symbols"]),
        getattr(th.schedules, setting["schedule"].capitalize()),
    )
    schedule = kind(max_length=length)
    noise = setting["latents"] == "noise"
    data = th.CurriculumDataset(task, schedule, seed=setting["seed"])
    positions, _, end = setting["positions"].partition(" + ")
    model = th.LatentThinker(
        th.ThinkerConfig(
            vocab_size=task.vocab_size,
            max_input_length=length,
            max_output_length=length,
            latent_init=setting["latents"],
            positions=positions,
            from_end=bool(end),
            initializer_range=setting["init_std"],
            **size["model"],
            **UPDATES[setting["update"]],
        )
    )
    with tempfile.TemporaryDirectory() as folder:
        arguments = th.thinker_arguments(
            folder, max_steps=iterations, disable_tqdm=True, use_cpu=True, seed=setting["seed"]
        )
        trainer = th.ThinkerTrainer(
            model, arguments, train_dataset=data, step_loss=LOSSES[setting["loss"]]()
        )
        seconds = time.process_time()
        trainer.train()
        seconds = time.process_time() - seconds
    n_latent = size["model"]["num_latents"]
    grid = th.evaluate_grid(model, data, n_latents=[n_latent], n_steps=[1, 6, 24], samples=1024)
    more = (
        th.evaluate_grid(model, data, n_latents=[2 * n_latent], n_steps=[6], samples=1024)
        if noise
        else None
    )
    one, trained, longer = (round(c.token, 4) for c in grid.cells[0])
    return setting | {
        "1 step": one,
        "6 steps": trained,
        "24 steps": longer,
        "cpu_seconds": round(seconds, 1),
        "twice the latents": None if more is None else round(more.cells[0][0].token, 4),
    }


def write_table() -> None:
    """The guide's table, from the committed results."""
    if not FOUND.exists():
        return
    found = json.loads(FOUND.read_text(encoding="utf-8"))
    base, sizes = found["config"]["base"], list(found["config"]["sizes"])
    rows = {size: {label(r, base): r for r in found["rows"][size]} for size in sizes}
    lines = [
        f"| changed | {' | '.join(f'{s}: 6 steps | 24 steps' for s in sizes)} |",
        "|---" * (1 + 2 * len(sizes)) + "|",
    ]
    for name in rows[sizes[0]]:
        cells = [f"{rows[s][name][k]:.3f}" for s in sizes for k in ("6 steps", "24 steps")]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    iterations = "; ".join(
        f"{v['iterations']} iterations for {s}" for s, v in found["config"]["sizes"].items()
    )
    text = (
        f"Token accuracy of copying {found['config']['length']} held-out symbols. d is the width. "
        f"Trained on batches of 64 rows: {iterations}."
    )
    put(GUIDE, [*lines, "", f"{text} Measured {found['date']} at {found['commit']}."], "ablation")


def label(row: dict[str, Any], base: dict[str, Any]) -> str:
    """What a row changes."""
    changed = [f"{k} {row[k]}" for k in base if row[k] != base[k]]
    return ", ".join(changed) or "nothing (the recipe)"


def draw(found: dict[str, Any]) -> None:
    """Accuracy by change, at both sizes."""
    from matplotlib.figure import Figure

    base, sizes = found["config"]["base"], list(found["config"]["sizes"])
    names = [label(r, base) for r in found["rows"][sizes[0]]]
    figure = Figure((7.5, 0.24 * len(names) + 1), layout="constrained")
    axes = figure.add_subplot()
    for size, color, shift in zip(sizes, ("C0", "C1"), (-0.18, 0.18), strict=True):
        values = [r["6 steps"] for r in found["rows"][size]]
        axes.barh([i + shift for i in range(len(names))], values, 0.34, color=color, label=size)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set(xlabel="token accuracy, copying 20 held-out symbols", xlim=(0, 1.01))
    figure.legend(loc="outside upper center", ncols=2, fontsize=8)
    save_picture(figure, PLOT)


def main(arguments: list[str] | None = None) -> None:
    """Run every setting at every size; write the results, the table and the plot."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", help="not looked at: it is not timed")
    parser.add_argument("--iterations", type=int, help="instead of the config's")
    parser.add_argument("--only", nargs="*", help="rows, such as 'loss all'; the others are kept")
    options = parser.parse_args(arguments)
    config = json.loads(CONFIG.read_text(encoding="utf-8"))
    torch.set_num_threads(1)
    before: dict[str, Any] = json.loads(FOUND.read_text(encoding="utf-8")) if options.only else {}
    made = f"{before['commit']}, {commit()}" if before else commit()
    found: dict[str, Any] = {"date": today(), "commit": made, "config": config, "rows": {}}
    for name, size in config["sizes"].items():
        size |= {"iterations": options.iterations} if options.iterations else {}
        found["rows"][name] = []
        for number, setting in enumerate(settings(config)):
            if options.only and label(setting, config["base"]) not in options.only:
                found["rows"][name].append(before["rows"][name][number])
                continue
            found["rows"][name].append(run(setting, size, config))
            print(name, found["rows"][name][-1], flush=True)
    FOUND.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    draw(found)
    write_table()


if __name__ == "__main__":
    main()
