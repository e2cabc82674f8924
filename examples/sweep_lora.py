"""Run finetune_lora.py many times from one file, and make one table.

Rank by alpha by rate by batch, or any of its options.

    python examples/sweep_lora.py examples/sweeps/which_word.yml --out runs/sweep
    python examples/sweep_lora.py mine.yml --out runs/sweep --model FOLDER --data rows.json

The first makes 16 runs in 20 minutes.

The file has `common`, options of every run, and `runs`, a list of grids: each option is a value or
a list of them, and a grid is all combinations. What --model and --data say is common, too. A run
that is in OUT/runs.csv is not made again and one that was interrupted goes on. Writes OUT/table.md
and OUT/sweep.png (extra `plot`) after every run.
"""

import argparse
import itertools
import json
import subprocess
import sys
from pathlib import Path

import yaml
from common import can_draw
from finetune_lora import read_runs

WRONG_OPTIONS = 2  # as argparse ends
SHOWN = (
    "name",
    "batch",
    "steps",
    "epochs",
    "optimizer",
    "lr",
    "min_lr",
    "warmup",
    "weight_decay",
    "rank",
    "alpha",
    "loss",
    "perplexity",
    "judge",
    "overfits_from",
    "spikes",
    "seconds",
    "peak_mb",
)


def settings(config: dict) -> list[dict]:
    """The options of each run."""
    if not isinstance(config, dict) or not isinstance(config.get("runs"), list):
        sys.exit("the file has no list of runs; see examples/sweeps/which_word.yml")
    common, found = config.get("common") or {}, []
    for grid in config["runs"]:
        if not isinstance(grid, dict) or not isinstance(common, dict):
            sys.exit(f"common and each of the runs are options with values; one is {grid!r:.60}")
        spread = {key: value if isinstance(value, list) else [value] for key, value in grid.items()}
        for values in itertools.product(*spread.values()):
            found.append(common | dict(zip(spread, values, strict=True)))
    return found


def name_of(setting: dict, varied: list[str]) -> str:
    said = [
        key if setting[key] is True else f"{key}{setting[key]}"
        for key in varied
        if setting.get(key) is not None
    ]
    return "-".join(said).replace("/", "_") or "run"


def words_of(setting: dict) -> list[str]:
    """Options as a command line has them.

    A list, which only common options can be, is several words.
    """
    words = []
    for key, value in setting.items():
        if value is not None and value is not False:
            several = value if isinstance(value, list) else [] if value is True else [value]
            words += [f"--{key.replace('_', '-')}", *map(str, several)]
    return words


def write_table(out: Path, names: list[str]) -> str:
    rows = [row for row in read_runs(out / "runs.csv") if row["name"] in names]
    lines = [SHOWN, ["---"] * len(SHOWN), *([row[key] for key in SHOWN] for row in rows)]
    text = "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + "\n"
    (out / "table.md").write_text(text, encoding="utf-8")
    return text


def draw(out: Path, names: list[str]) -> None:
    """Held-out losses on the way, and in the end."""
    from matplotlib.figure import Figure

    ended = {
        row["name"]: float(row["loss"])
        for row in read_runs(out / "runs.csv")
        if row["name"] in names
    }
    figure = Figure((11, max(3.6, 0.3 * len(ended))), layout="constrained", dpi=150)
    way, end = figure.subplots(1, 2)
    for place, (name, loss) in enumerate(ended.items()):
        log = json.loads((out / name / "log.json").read_text(encoding="utf-8"))
        looks = [(entry["step"], entry["eval_loss"]) for entry in log if "eval_loss" in entry]
        (line,) = way.plot(*zip(*looks, strict=True), linewidth=1)
        end.plot(loss, place, "o", color=line.get_color())
    way.set(xlabel="step", ylabel="loss of held-out rows")
    end.set_yticks(range(len(ended)), list(ended))
    end.invert_yaxis()
    end.set(xlabel="held-out loss in the end")
    end.tick_params(axis="y", labelsize=7)
    figure.savefig(out / "sweep.png")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", type=Path)
    parser.add_argument("--out", type=Path, default=Path("runs/sweep"))
    parser.add_argument("--model")
    parser.add_argument("--data")
    parser.add_argument(
        "--smoke", action="store_true", help="runs of seconds, to see that they work"
    )
    given = parser.parse_args()
    try:
        config = yaml.safe_load(given.config.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        sys.exit(f"{given.config}: {error}")
    named = {key: getattr(given, key) for key in ("model", "data") if getattr(given, key)}
    runs = [run | named for run in settings(config)]
    # these are not the runs that are asked for
    given.out = given.out / "smoke" if given.smoke else given.out
    varied = [
        key
        for key in dict.fromkeys(k for run in runs for k in run)
        if len({str(r.get(key)) for r in runs}) > 1
    ]
    names = [name_of(run, varied) for run in runs]
    if len(set(names)) < len(names):
        sys.exit(
            f"two runs are the same: {sorted(name for name in names if names.count(name) > 1)[0]}"
        )
    plots, script = can_draw(), Path(__file__).with_name("finetune_lora.py")
    for number, (name, run) in enumerate(zip(names, runs, strict=True), 1):
        if name in {row["name"] for row in read_runs(given.out / "runs.csv")}:
            print(f"{number} of {len(runs)}: {name} is there already")
            if run != json.loads((given.out / name / "sweep.json").read_text(encoding="utf-8")):
                sys.exit(f"{name} was made with other options; expected another --out")
            continue
        print(f"{number} of {len(runs)}: {name}", flush=True)
        words = words_of(
            run | {"out": given.out, "smoke": given.smoke, "name": name, "resume": True}
        )
        code = subprocess.run([sys.executable, str(script), *words], check=False).returncode
        if code:
            sys.exit(
                f"{name} stopped"
                + ("; the same command goes on from there" if code != WRONG_OPTIONS else "")
            )
        (given.out / name / "sweep.json").write_text(json.dumps(run) + "\n", encoding="utf-8")
        print(write_table(given.out, names))
        if plots:
            draw(given.out, names)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("\nstopped; the same command goes on from there")
