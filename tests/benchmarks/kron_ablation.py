"""Start × freezing × learning rates × distillation on a small GPT-2: kron_ablation.json to a JSON of results.

Not timed: what is compared is the loss on held-out text before and after training back, half of the MLPs' parameters.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from pathlib import Path

import torch

from kronecker import DistillConfig, FreezePretrained, KroneckerConfig, KroneckerTrainer, convert_, perplexity
from tests.benchmarks.ablations import settings
from tests.benchmarks.results import KRONECKER_GUIDE, RESULTS, ROOT, commit, put, today

CONFIG, FOUND = Path(__file__).parent / "kron_ablation.json", RESULTS / "kron_ablation.json"
WORK = Path(__file__).parent / "work" / "kron_ablation"
PLOT = ROOT / "docs" / "kronecker_training.svg"
sys.path.insert(0, str(ROOT / "examples"))


def run(setting: dict, config: dict, teacher, rows: torch.Tensor, held: torch.Tensor) -> dict:
    """Convert, train back, look."""
    from small_gpt2 import Rows, arguments
    from transformers import GPT2LMHeadModel, set_seed

    set_seed(setting["seed"])
    model = GPT2LMHeadModel(teacher.config).eval()
    model.load_state_dict(teacher.state_dict())
    calibration = rows[torch.randperm(len(rows))[:94]].split(8)
    convert_(model, KroneckerConfig(b_shape=(2, 1), init=setting["init"]), calibration=calibration, progress=False)
    before, steps = math.log(perplexity(model, held.split(16))), config["steps"]
    freeze = {"none": [], "first half": [FreezePretrained(steps // 2)]}
    freeze["in turns"] = [FreezePretrained(max(1, steps // 4), repeat=True)]
    distill = config["distill"][setting["distill"]]
    with tempfile.TemporaryDirectory() as folder:
        options = arguments(Path(folder), steps, setting["rate"], config["batch"], seed=setting["seed"])
        options.disable_tqdm = True
        trainer = KroneckerTrainer(
            model, options, teacher=None if distill is None else teacher,
            distill=None if distill is None else DistillConfig(**distill), train_dataset=Rows(rows),
            pretrained_learning_rate=setting["pretrained_rate"], callbacks=freeze[setting["freeze"]],
        )  # fmt: skip
        trainer.train()
    return setting | {"before": round(before, 4), "after": round(math.log(perplexity(model.eval(), held.split(16))), 4)}


def write_table() -> None:
    """The guide's table and plot, from the committed results."""
    if not FOUND.exists():
        return
    found = json.loads(FOUND.read_text(encoding="utf-8"))
    names = ("init", "freeze", "rate", "pretrained_rate", "distill", "seed")
    lines = [f"| {' | '.join(names)} | loss before | after |", "|---" * (len(names) + 2) + "|"]
    for row in found["rows"]:
        cells = " | ".join(f"{row[n]:g}" if isinstance(row[n], float) else str(row[n]) for n in names)
        lines.append(f"| {cells} | {row['before']:.3f} | {row['after']:.3f} |")
    config = found["config"]
    text = f"The original: {found['original']:.3f}. {config['steps']} steps of {config['batch']} x 128 tokens; "
    put(KRONECKER_GUIDE, [*lines, "", f"{text}measured {found['date']} at {found['commit']}."], "ablation")


def draw(found: dict) -> None:
    """Loss before and after training back, by start."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "kronecker"
    import matplotlib.pyplot as plt

    base = found["config"]["base"]
    starts = found["config"]["grids"][0]["init"]
    same = [r for r in found["rows"] if all(r[k] == v for k, v in base.items() if k not in ("init", "seed"))]
    figure, axes = plt.subplots(figsize=(6, 3.4), layout="constrained")
    for place, start in enumerate(starts):
        for row in [r for r in same if r["init"] == start]:
            axes.plot([place, place], [row["before"], row["after"]], color="0.7", zorder=1)
            axes.scatter(place, row["before"], color="C3", zorder=2)
            axes.scatter(place, row["after"], color="C0", zorder=2)
    axes.axhline(found["original"], color="k", linestyle=":", linewidth=1)
    axes.text(-0.5, found["original"], " the original", ha="left", va="bottom", fontsize=8)
    axes.scatter([], [], color="C3", label="before training")
    axes.scatter([], [], color="C0", label=f"after {found['config']['steps']} steps")
    axes.set_xticks(range(len(starts)), starts)
    axes.set(ylabel="loss on held-out text", xlabel="start", xlim=(-0.5, len(starts) - 0.5))
    axes.legend()
    figure.savefig(PLOT, metadata={"Date": None})
    plt.close(figure)


def main(arguments: list[str] | None = None) -> None:
    """Run every setting and write the results, the guide's table and the plot."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", help="not looked at: it is not timed")
    parser.add_argument("--steps", type=int, help="instead of the config's")
    options = parser.parse_args(arguments)
    from small_gpt2 import make_tokenizer, python_text, train_original, windows
    from transformers import GPT2LMHeadModel

    config = json.loads(CONFIG.read_text(encoding="utf-8"))
    config |= {"steps": options.steps} if options.steps else {}
    text = python_text()
    tokenizer = make_tokenizer(text)
    rows, held = windows(tokenizer, text)
    if (WORK / "original" / "model.safetensors").exists():
        teacher = GPT2LMHeadModel.from_pretrained(WORK / "original").eval()
    else:
        teacher = train_original(WORK, rows, len(tokenizer), config["original_steps"])
        teacher.save_pretrained(WORK / "original")
    found = {"date": today(), "commit": commit(), "config": config, "rows": []}
    found["original"] = round(math.log(perplexity(teacher, held.split(16))), 4)
    for setting in settings(config):
        found["rows"].append(run(setting, config, teacher, rows, held))
        print(found["rows"][-1], flush=True)
    FOUND.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    draw(found)
    write_table()


if __name__ == "__main__":
    main()
