"""A latent thinker learns an algorithmic task from scratch; what it can do by steps, by latents and by length.

    python examples/train_thinker.py                            # copies 20 symbols: 99.9 % in half a minute
    python examples/train_thinker.py --model latent_init=noise  # more latents, more steps: better answers; 2 minutes
    python examples/train_thinker.py --task add                 # hexadecimal sums of numbers up to 1000; 2 minutes
    python examples/train_thinker.py --task sort --plan plan.md --model memory=grow  # your own table of steps

One CPU thread. Writes OUT/result.json with all it prints, and grid.png and training.png (matplotlib, extra `plot`).
"""

import argparse
import json
import time
from pathlib import Path

import torch
import yaml
from common import can_draw, save_plot
from transformers import set_seed
from transformers.trainer_utils import get_last_checkpoint

import thinker as th

RECIPES = {  # what a task needs beyond the defaults
    "reverse": {"iterations": 1000, "model": {"from_end": True}},
    "roll": {"iterations": 1000, "model": {"from_end": True}},
    "add": {
        "iterations": 2000,
        "batch": 128,
        "length": 3,
        "task": {"max_value": 1000},
        "model": {"positions": "aligned"},
    },
}


def settings(pairs: list[str]) -> dict:
    return {name: yaml.safe_load(value) for name, value in (pair.split("=", 1) for pair in pairs)}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="copy", choices=sorted(n for n, t in th.TASKS.items() if not t.by_step))
    parser.add_argument("--options", nargs="*", default=[], metavar="NAME=VALUE", help="of the task: symbols=32")
    parser.add_argument("--model", nargs="*", default=[], metavar="NAME=VALUE", help="of ThinkerConfig: num_heads=8")
    parser.add_argument("--length", type=int, help="longest in training (default 20, or the task's)")
    parser.add_argument("--test-lengths", type=int, nargs="*", default=[], help="longer ones to look at")
    parser.add_argument("--schedule", choices=["frontier", "uniform", "progressive", "dynamic", "fixed"])
    parser.add_argument("--plan", default="every_step", help="every_step, read_once, or a file with a Markdown table")
    parser.add_argument(
        "--steps", type=int, nargs=2, default=[1, 6], metavar=("LEAST", "MOST"), help="of training batches"
    )
    parser.add_argument("--iterations", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="default runs/thinker/TASK")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in OUT")
    parser.add_argument("--smoke", action="store_true", help="a run of seconds, to see that it works")
    return parser.parse_args()


def main() -> None:
    args, plots = parse(), can_draw()
    args.out = args.out or Path("runs/thinker", args.task)
    torch.set_num_threads(1)
    set_seed(args.seed)
    recipe = RECIPES.get(args.task, {})
    task = th.make_task(args.task, **recipe.get("task", {}) | settings(args.options))
    kind = args.schedule or ("fixed" if "task" in recipe else "frontier")
    schedule = getattr(th.schedules, kind.capitalize())(
        max_length=args.length or (4 if args.smoke else recipe.get("length", 20))
    )
    choices = recipe.get("model", {}) | settings(args.model)
    if choices.get("positions") == "aligned":
        choices["separators"] = task.separators
    noise = choices.get("latent_init") == "noise"
    if args.plan in ("every_step", "read_once"):
        plan = getattr(th.FlowPlan, args.plan)(memory=choices.get("memory", "none") != "none")
    else:
        plan = th.FlowPlan.from_table(Path(args.plan).read_text(encoding="utf-8"))
    n_step = tuple(plan.num_steps(n) for n in args.steps)
    numbers = {"batch_size": recipe.get("batch", 64), "n_step": n_step, "n_latent": (8, 16) if noise else None}
    data = th.CurriculumDataset(task, schedule, seed=args.seed, **numbers)
    longest = max([schedule.max_length, *args.test_lengths])
    usual = {"n_step": n_step[1], "plan": plan, "num_latents": 16 if noise else 8}
    model = th.LatentThinker(th.ThinkerConfig(**data.sizes(longest), **usual | choices))

    iterations = args.iterations or (20 if args.smoke else 2400 if noise else recipe.get("iterations", 500))
    arguments = th.thinker_arguments(
        args.out / "checkpoints", max_steps=iterations, save_steps=max(10, iterations // 4),
        save_total_limit=1, seed=args.seed, use_cpu=True, logging_steps=5 if args.smoke else 50,
    )  # fmt: skip
    trainer = th.ThinkerTrainer(model, arguments, train_dataset=data, callbacks=[th.RewindOnPeak()])
    checkpoint = get_last_checkpoint(args.out / "checkpoints") if args.resume else None
    seconds = time.process_time()
    trainer.train(resume_from_checkpoint=checkpoint)
    seconds = time.process_time() - seconds

    samples = 64 if args.smoke else 1024
    steps = sorted({plan.num_steps(n) for n in (1, 2, 4, 6, 8, 12, 16, 24, n_step[1])})
    latents = [4, 6, 8, 12, 16, 24, 32] if noise else [model.config.num_latents]
    grid = th.evaluate_grid(model, data, n_latents=latents, n_steps=steps, samples=samples)
    shorter = (
        [] if kind == "fixed" else range(schedule.min_length, schedule.max_length, max(1, schedule.max_length // 4))
    )
    lengths = sorted({*shorter, schedule.max_length, *args.test_lengths})
    by_length = th.evaluate_lengths(model, data, lengths, samples=samples)
    found = by_length[schedule.max_length]
    print(f"\n{args.task}, length {schedule.max_length}: {iterations} iterations, {seconds:.0f} CPU seconds")
    print(f"held out: {found.token:.4f} of symbols, {found.sequence:.4f} of rows\n\n{grid}\n\nlength  symbols     rows")
    for n, each in by_length.items():
        print(f"{n:>6} {each.token:>8.4f} {each.sequence:>8.4f}{'  (longer)' if n > schedule.max_length else ''}")

    model.save_pretrained(args.out / "model")
    result = {
        "task": args.task, "length": schedule.max_length, "seed": args.seed, "iterations": iterations,
        "cpu_seconds": round(seconds, 1), "resumed": checkpoint is not None, "parameters": model.num_parameters(),
        "token": round(found.token, 5), "sequence": round(found.sequence, 5), "grid": grid.to_dict(),
        "by_length": {n: [round(a.token, 4), round(a.sequence, 4)] for n, a in by_length.items()},
    }  # fmt: skip
    (args.out / "result.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    drawn = save_plot(plots, args.out / "grid.png", grid.plot)
    curves = save_plot(plots, args.out / "training.png", lambda: th.plot_training(trainer.state.log_history))
    print(f"\n{args.out}: model/, result.json; plots: {drawn}, {curves}")


if __name__ == "__main__":
    main()
