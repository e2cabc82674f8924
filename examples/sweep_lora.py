"""Many runs of finetune_lora.py from one file: rank by alpha by rate by batch, or any of its options, as one table.

    python examples/sweep_lora.py examples/sweeps/which_word.yml --out runs/sweep          # 16 runs, 20 minutes
    python examples/sweep_lora.py mine.yml --out runs/sweep --model FOLDER --data rows.json

The file has `common`, options of every run, and `runs`, a list of grids: each option is a value or a list of them, and
a grid is all combinations. What --model and --data say is common, too. A run that is in OUT/runs.csv is not made again
and one that was interrupted goes on. Writes OUT/table.md and OUT/sweep.png (extra `plot`) after every run.
"""

import argparse
import csv
import itertools
import json
import math
import subprocess
import sys
from pathlib import Path

import yaml
from common import can_draw

SHOWN = ("name", "batch", "epochs", "optimizer", "lr", "min_lr", "warmup", "weight_decay", "rank", "alpha", "loss",
         "perplexity", "judge", "overfits_from", "spikes", "seconds", "peak_mb")  # fmt: skip


def settings(config: dict) -> list[dict]:
    """The options of each run."""
    if not isinstance(config, dict) or not isinstance(config.get("runs"), list):
        sys.exit("the file has no list of runs; see examples/sweeps/which_word.yml")
    found = []
    for grid in config["runs"]:
        spread = {key: value if isinstance(value, list) else [value] for key, value in grid.items()}
        for values in itertools.product(*spread.values()):
            found.append(config.get("common", {}) | dict(zip(spread, values, strict=True)))
    return found


def name_of(setting: dict, varied: list[str]) -> str:
    said = [key if setting[key] is True else f"{key}{setting[key]}" for key in varied if setting.get(key) is not None]
    return "-".join(said).replace("/", "_") or "run"


def words_of(setting: dict) -> list[str]:
    """Options as a command line has them."""
    words = []
    for key, value in setting.items():
        if value is not None and value is not False:
            words += [f"--{key.replace('_', '-')}", *([] if value is True else [str(value)])]
    return words


def read_runs(path: Path) -> list[dict]:
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def write_table(out: Path, names: list[str]) -> str:
    rows = [row for row in read_runs(out / "runs.csv") if row["name"] in names]
    lines = [SHOWN, ["---"] * len(SHOWN), *([row[key] for key in SHOWN] for row in rows)]
    text = "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + "\n"
    (out / "table.md").write_text(text, encoding="utf-8")
    return text


def draw(out: Path, names: list[str]) -> None:
    """Held-out losses on the way, and in the end."""
    from matplotlib.figure import Figure

    ended = {row["name"]: float(row["loss"]) for row in read_runs(out / "runs.csv") if row["name"] in names}
    figure = Figure((11, max(3.6, 0.3 * len(ended))), layout="constrained", dpi=150)
    way, end = figure.subplots(1, 2)
    for name in ended:
        log = json.loads((out / name / "log.json").read_text(encoding="utf-8"))
        looks = [(entry["step"], entry["eval_loss"]) for entry in log if "eval_loss" in entry]
        way.plot(*zip(*looks, strict=True), linewidth=1)
    way.set(xlabel="step", ylabel="loss of held-out rows")
    end.barh(list(ended), list(ended.values()))
    end.invert_yaxis()
    finite = [loss for loss in ended.values() if math.isfinite(loss)]
    end.set(xlabel="held-out loss in the end", xlim=(0.95 * min(finite), None) if finite else None)
    end.tick_params(axis="y", labelsize=7)
    figure.savefig(out / "sweep.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--out", type=Path, default=Path("runs/sweep"))
    parser.add_argument("--model")
    parser.add_argument("--data")
    parser.add_argument("--smoke", action="store_true", help="runs of seconds, to see that they work")
    given = parser.parse_args()
    try:
        config = yaml.safe_load(given.config.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        sys.exit(f"{given.config}: {error}")
    runs = settings(config)
    given.out = given.out / "smoke" if given.smoke else given.out  # these are not the runs that are asked for
    varied = [key for key in dict.fromkeys(k for run in runs for k in run) if len({str(r.get(key)) for r in runs}) > 1]
    names = [name_of(run, varied) for run in runs]
    if len(set(names)) < len(names):
        sys.exit(f"two runs are the same: {sorted(name for name in names if names.count(name) > 1)[0]}")
    common = {"model": given.model, "data": given.data, "smoke": given.smoke, "out": given.out}
    plots, script = can_draw(), Path(__file__).with_name("finetune_lora.py")
    for number, (name, run) in enumerate(zip(names, runs, strict=True), 1):
        if name in {row["name"] for row in read_runs(given.out / "runs.csv")}:
            print(f"{number} of {len(runs)}: {name} is there already")
            continue
        print(f"{number} of {len(runs)}: {name}", flush=True)
        words = words_of(run | {k: v for k, v in common.items() if v} | {"name": name, "resume": True})
        if subprocess.run([sys.executable, str(script), *words], check=False).returncode:
            sys.exit(f"{name} stopped; the same command goes on from there")
        print(write_table(given.out, names))
        if plots:
            draw(given.out, names)


if __name__ == "__main__":
    main()
