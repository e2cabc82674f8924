"""A latent thinker learns an algorithmic task from scratch; what it can do by steps, by latents and by length.

    python examples/train_thinker.py --task copy                     # 20 s: copies 20 symbols, 99.9 %
    python examples/train_thinker.py --task copy --latents noise     # 60 s: and more latents or steps answer better
    python examples/train_thinker.py --task reverse                  # 30 s
    python examples/train_thinker.py --task add                      # 60 s: hexadecimal sums of numbers up to 1000
    python examples/train_thinker.py --task prefix_sum --plan plan.md   # your own table of steps

One CPU thread, seconds of a 2026 server core. Needs matplotlib (extra `plot`) for grid.png and training.png; writes
result.json with everything it prints. `--resume` goes on from the last checkpoint, `--smoke` is a run of seconds.
"""

import argparse
import json
import time
from pathlib import Path

import torch
from transformers import set_seed
from transformers.trainer_utils import get_last_checkpoint

import thinker as th

# what differs from the defaults, by task: options of the task, positions, iterations
RECIPES = {
    "copy": {"iterations": 400},
    "reverse": {"iterations": 700, "model": {"from_end": True}},
    "roll": {"iterations": 700, "model": {"from_end": True}},
    "add": {
        "iterations": 1200,
        "batch": 128,
        "length": 3,
        "task": {"max_value": 1000},
        "model": {"positions": "aligned"},
    },
    "hops": {"iterations": 1500, "batch": 128, "length": 6},
}


def parse():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--task", default="copy", choices=sorted(th.TASKS))
    parser.add_argument("--option", action="append", default=[], metavar="NAME=JSON", help="of the task: symbols=32")
    parser.add_argument("--length", type=int, help="longest in training (default 20, or the task's)")
    parser.add_argument("--test-lengths", type=int, nargs="*", default=[], help="beyond those trained on too")
    parser.add_argument("--latents", choices=["table", "noise"], default="table")
    parser.add_argument("--positions", choices=["learned", "sinusoidal", "rotary", "random", "random_float", "aligned"])
    parser.add_argument("--schedule", choices=["frontier", "uniform", "progressive", "dynamic", "fixed"])
    parser.add_argument("--plan", default="every_step", help="every_step, read_once, or a file with a Markdown table")
    parser.add_argument("--memory", choices=["none", "grow", "window"], default="none")
    parser.add_argument("--iterations", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/thinker"))
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in OUT")
    parser.add_argument("--smoke", action="store_true", help="a run of seconds, to see that it works")
    return parser.parse_args()


def plan_of(name: str, memory: bool) -> th.FlowPlan | None:
    if name in ("every_step", "read_once"):
        return getattr(th.FlowPlan, name)(memory=memory)
    return th.FlowPlan.from_table(Path(name).read_text(encoding="utf-8"))


def main():
    args = parse()
    torch.set_num_threads(1)
    set_seed(args.seed)
    recipe = RECIPES.get(args.task, {})
    options = recipe.get("task", {}) | {k: json.loads(v) for k, v in (o.split("=", 1) for o in args.option)}
    task = th.make_task(args.task, **options)
    length = args.length or (4 if args.smoke else recipe.get("length", 20))
    kind = args.schedule or ("fixed" if "max_value" in options else "frontier")
    schedule = getattr(th, kind.capitalize())(max_length=length)
    noise = args.latents == "noise"
    plan = plan_of(args.plan, args.memory != "none")
    least = plan.min_steps
    n_step = (max(least, 1), max(least, 6)) if plan.loop else least
    data = th.CurriculumDataset(
        task,
        schedule,
        batch_size=recipe.get("batch", 64),
        seed=args.seed,
        n_step=n_step,
        n_latent=(8, 16) if noise else None,
    )
    longest = max([length, *args.test_lengths])
    changes = recipe.get("model", {}) | ({"positions": args.positions} if args.positions else {})
    if changes.get("positions") == "aligned":
        changes["separators"] = task.separators
    config = th.ThinkerConfig(
        vocab_size=task.vocab_size, output_size=task.output_size, max_input_length=task.input_length(longest),
        max_output_length=task.output_length(longest), latent_init=args.latents, num_latents=16 if noise else 8,
        memory=args.memory, memory_size=4 if args.memory == "window" else None, **changes,
    )  # fmt: skip
    model = th.LatentThinker(config)
    iterations = args.iterations or (20 if args.smoke else recipe.get("iterations", 1500) * (2 if noise else 1))
    arguments = th.thinker_arguments(
        args.out / "checkpoints", max_steps=iterations, save_strategy="steps", save_steps=max(10, iterations // 4),
        save_total_limit=1, seed=args.seed, use_cpu=True,
    )  # fmt: skip
    trainer = th.ThinkerTrainer(model, arguments, train_dataset=data, plan=plan, callbacks=[th.RewindOnPeak()])
    checkpoint = get_last_checkpoint(args.out / "checkpoints") if args.resume else None
    seconds = time.process_time()
    trainer.train(resume_from_checkpoint=checkpoint)
    seconds = time.process_time() - seconds

    steps = [1, 2, 4, 6, 8, 12, 16, 24] if plan.loop and least == 1 else [max(n, least) for n in (2, 4, 6, 12)]
    steps = steps if plan.loop else [least]
    grid = th.evaluate_grid(
        model, data, n_latents=[4, 6, 8, 12, 16, 24, 32] if noise else [8], n_steps=steps, plan=plan,
        samples=64 if args.smoke else 1024,
    )  # fmt: skip
    shorter = [] if kind == "fixed" else range(schedule.min_length, length, max(1, length // 4))
    lengths = sorted({*shorter, length, *args.test_lengths})
    by_length = th.evaluate_lengths(model, data, lengths, n_step=6 if 6 in steps else steps[-1], plan=plan, samples=512)
    accuracy = trainer.evaluate()
    print(
        f"\n{args.task} up to length {length}: {iterations} iterations of {data.batch_size}, {seconds:.0f} CPU seconds"
    )
    print(
        f"held out, length {length}: {accuracy['eval_accuracy']:.4f} of symbols, "
        f"{accuracy['eval_sequence_accuracy']:.4f} of rows"
    )
    print(f"\n{grid}\n\nlength  symbols     rows")
    for n, found in by_length.items():
        print(f"{n:>6} {found.token:>8.4f} {found.sequence:>8.4f}{'  (longer than trained)' if n > length else ''}")

    model.save_pretrained(args.out / "model")
    result = {
        "task": args.task, "options": options, "length": length, "latents": args.latents, "seed": args.seed,
        "iterations": iterations, "cpu_seconds": round(seconds, 1), "resumed": checkpoint is not None,
        "parameters": model.num_parameters(), "token": round(accuracy["eval_accuracy"], 5),
        "sequence": round(accuracy["eval_sequence_accuracy"], 5), "grid": grid.to_dict(),
        "by_length": {n: [round(a.token, 4), round(a.sequence, 4)] for n, a in by_length.items()},
    }  # fmt: skip
    (args.out / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    th.plot_grid(grid, args.out / "grid.png", title=f"{args.task}, length {length}")
    th.plot_training(trainer.state.log_history, args.out / "training.png", title=f"{args.task}, length {length}")
    print(f"\n{args.out}: model/, result.json, grid.png, training.png")


if __name__ == "__main__":
    main()
