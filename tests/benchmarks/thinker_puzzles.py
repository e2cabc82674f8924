"""Puzzles that were not seen in training, solved by the command of `examples/solve_puzzles.py`: 5
seeds of 4 x 4 Sudoku, 3 of the others.

Beside it, for as many CPU seconds and on the same puzzles: for Sudoku a transformer of four layers,
which has one answer and no steps; for 4 x 4 the same model without segments; for 9 x 9 the same
model with attention, and TRM (`thinker_trm`); for mazes Deep Thinking with recall in two dimensions
(Bansal et al. 2022), 20 iterations of width 32, with their loss for mazes: a hundredth of it
progressive. Three seeds.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import thinker as th
from tests.benchmarks import thinker_trm
from tests.benchmarks.examples import load_example, run_example
from tests.benchmarks.results import RESULTS, ROOT, commit, hardware, put, today
from tests.benchmarks.thinker_anchors import DeepThinking

FOUND, GUIDE = RESULTS / "thinker_puzzles.json", ROOT / "docs" / "thinker_measured.md"
SEEDS = {"sudoku9": (11, 12, 13), "sudoku4": (11, 12, 13, 14, 15), "maze": (11, 12, 13)}
PUZZLES = {
    "sudoku9": "9 x 9 Sudoku, never seen",
    "sudoku4": "4 x 4 Sudoku, solutions never seen",
    "maze": "mazes, trained to 9 x 9",
}
TOLD = {"sudoku9": "{} clues", "maze": "{0} x {0}"}
SAMPLES = {"sudoku9": 256, "sudoku4": 512, "maze": 256}
GPU_GIGAFLOPS = 25_000  # small matrices leave most of a GPU unused


class Encoder(nn.Module):
    """Tokens and learned places, four layers, a head at every cell."""

    def __init__(self, vocabulary: int, symbols: int, cells: int):
        super().__init__()
        self.embedding, self.places = (
            nn.Embedding(vocabulary, 64),
            nn.Parameter(0.5 * torch.randn(cells, 64)),
        )
        layer = nn.TransformerEncoderLayer(
            64, 4, 256, 0.0, F.gelu, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, symbols))

    def forward(self, tokens: Tensor, steps: int) -> Tensor:
        """Logits of every cell."""
        return self.head(self.layers(self.embedding(tokens) + self.places))

    def loss(self, tokens: Tensor, labels: Tensor, steps: int) -> Tensor:
        """Cross-entropy."""
        return F.cross_entropy(self(tokens, 1).flatten(0, 1), labels.flatten())


def points_of(made: Any, puzzle: Any, samples: int) -> list[dict[str, Any]]:
    """Shares of right cells and puzzles."""
    points = []
    for number, data in puzzle.tests.items():
        batch = data.held_out(samples, 1 if data.task.default_length == 1 else number)
        counted = batch["labels"] != -100
        for step in [1] if isinstance(made, Encoder) else puzzle.steps(number):
            with torch.no_grad():
                right = (made(batch["input_ids"], step).argmax(-1) == batch["labels"]) & counted
            points.append(
                {
                    "length": number,
                    "steps": step,
                    "symbols": float(right.sum() / counted.sum()),
                    "rows": float((right | ~counted).all(1).float().mean()),
                }
            )
    return points


def rival(
    make: Callable[..., Any], puzzle: Any, seed: int, seconds: float, *, samples: int
) -> dict[str, Any]:
    """Another model, trained for so many CPU seconds on the puzzle's rows; of mazes one size in
    each batch."""
    torch.manual_seed(seed)
    random.seed(seed)
    data, longest = puzzle.train, puzzle.train.schedule.max_length
    data.segments = 1
    rate, generator, iterations = 1e-3, torch.Generator().manual_seed(seed), 0
    made = make(data.task.vocab_size, data.task.output_size)
    optimizer = torch.optim.AdamW(made.parameters(), lr=rate, betas=(0.9, 0.98), weight_decay=0.01)
    started = time.process_time()
    while (done := (time.process_time() - started) / seconds) < 1:
        for group in optimizer.param_groups:
            group["lr"] = (
                rate * min(1.0, (iterations + 1) / 50) * (0.525 + 0.475 * math.cos(math.pi * done))
            )
        length = (
            longest if random.random() < 0.5 else random.randint(data.schedule.min_length, longest)
        )
        sample = data.task.sample(generator, data.batch_size, length)
        loss = made.loss(sample.tokens, sample.targets, 20)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(made.parameters(), 1.0)
        optimizer.step()
        iterations += 1
    size = sum(p.numel() for p in made.parameters())
    points = points_of(made.eval(), puzzle, samples)
    return {
        "seed": seed,
        "cpu_seconds": seconds,
        "iterations": iterations,
        "parameters": size,
        "points": points,
    }


def variant(
    puzzle: Any, seed: int, iterations: int, *, samples: int, segments: int = 1, **model: Any
) -> dict[str, Any]:
    """The example's model, changed; without segments an optimizer step for each batch, of as many
    steps of thought as four segments have, at most."""
    import tempfile

    from transformers import set_seed

    set_seed(seed)
    data = puzzle.train
    if segments == 1:
        data = th.CurriculumDataset(
            data.task, n_step=(1, 12), batch_size=data.batch_size, holdout=0.0, seed=seed
        )
    made = th.LatentThinker(
        th.ThinkerConfig(**data.sizes() | {"latent_init": "tokens"} | puzzle.model | model)
    )
    with tempfile.TemporaryDirectory() as folder:
        arguments = th.thinker_arguments(
            folder,
            max_steps=iterations,
            learning_rate=puzzle.learning_rate,
            warmup_steps=50,
            use_cpu=True,
            disable_tqdm=True,
            seed=seed,
        )
        trainer, started = (
            th.ThinkerTrainer(made, arguments, train_dataset=data, segments=segments),
            time.process_time(),
        )
        trainer.train()
    taken = time.process_time() - started
    curves = puzzle.measured(made, samples)
    numbers = {
        "cpu_seconds": round(taken, 1),
        "iterations": arguments.max_steps,
        "parameters": made.num_parameters(),
    }
    return {"seed": seed, **numbers, "points": curves.rows()}


def others(
    name: str, puzzle: Any, seed: int, seconds: float, *, smoke: bool
) -> dict[str, Callable[[], dict[str, Any]]]:
    """What the example's model is compared with, each to be called for its run."""
    samples = SAMPLES[name]
    if name == "maze":
        make = partial(DeepThinking, width=32, axes=2, alpha=0.01)
        return {"Deep Thinking": partial(rival, make, puzzle, seed, seconds, samples=samples)}
    encoder = partial(Encoder, cells=puzzle.train.task.input_length(1))
    of_layers = partial(rival, encoder, puzzle, seed, seconds, samples=samples)
    if name == "sudoku4":
        # takes as long as four segments of a quarter of the steps
        iterations = 16 if smoke else puzzle.iterations // 3
        whole = partial(variant, puzzle, seed, iterations, samples=samples)
        return {"a transformer of 4 layers": of_layers, "without segments": whole}
    iterations = 8 if smoke else puzzle.iterations
    attention = partial(
        variant, puzzle, seed, iterations, samples=samples, segments=4, mixer="attention"
    )
    return {
        "TRM": partial(thinker_trm.run, puzzle, seed, seconds, samples=samples),
        "a transformer of 4 layers": of_layers,
        "with attention": attention,
    }


def gigaflops(puzzle: Any) -> float:
    """The products of one step of training of the example's model, the mean over its draws of
    steps of thought."""
    config = th.ThinkerConfig(
        **puzzle.train.sizes() | {"latent_init": "tokens", "n_step": 2} | puzzle.model
    )
    model, batch = th.LatentThinker(config), puzzle.train.batch(0)
    with FlopCounterMode(display=False) as counter:
        model(batch["input_ids"], labels=batch["labels"], output_steps="all").loss.backward()
    return counter.get_total_flops() / 1e9


def percent(values: list[float]) -> str:
    """The median, and the worst of several."""
    return f"{statistics.median(values):.1%} ({min(values):.1%})"


def write_table() -> None:
    """The guide's table, from the committed results."""
    if not FOUND.exists():
        return
    found = json.loads(FOUND.read_text(encoding="utf-8"))
    lines: list[str] = []
    for name, entry in found.items():
        points = entry["runs"]["LatentThinker"][0]["points"]
        lengths = list(dict.fromkeys(p["length"] for p in points))
        side = lengths[0] if name == "maze" else 1
        steps = [p["steps"] // side for p in points if p["length"] == lengths[0]]
        heads = [f"{s} step{'s' * (s > 1)}{' a side' * (name == 'maze')}" for s in steps]
        lines += [
            f"| {PUZZLES[name]} | CPU s | {' | '.join(heads)} |",
            "|---" * (2 + len(steps)) + "|",
        ]
        for length in lengths:
            for model, runs in entry["runs"].items():
                cells = []
                for step in steps:
                    after = step * length if name == "maze" else step
                    own = [
                        [
                            p["rows"]
                            for p in r["points"]
                            if (p["length"], p["steps"]) == (length, after)
                        ]
                        for r in runs
                    ]
                    cells.append(percent([p[0] for p in own]) if all(own) else "")
                seconds = statistics.median(r["cpu_seconds"] for r in runs)
                which = f"{model}, {TOLD[name].format(length)}" if len(lengths) > 1 else model
                lines.append(f"| {which} | {seconds:.0f} | {' | '.join(cells)} |")
        # a rival's runs may have been made again by themselves
        later = (r.get("commit") for runs in entry["runs"].values() for r in runs)
        made = ", ".join(dict.fromkeys([entry["commit"], *filter(None, later)]))
        place = f"{entry['hardware']}, one thread; measured {entry['date']} at {made}."
        count = SAMPLES[name]
        if "gigaflops" in entry:
            place += " " + on_paper(entry)
        lines += [
            "",
            f"Whole puzzles solved, of {count}: the median of the seeds, and the worst. {place}",
            "",
        ]
    put(GUIDE, lines[:-1], "puzzles")


def on_paper(entry: dict[str, Any]) -> str:
    """What a GPU hour would have room for, beside a run here; with attention it has as many steps."""
    seconds = statistics.median(r["cpu_seconds"] for r in entry["runs"]["LatentThinker"])
    whole = entry["gigaflops"] * entry["runs"]["with attention"][0]["iterations"]
    times = round(GPU_GIGAFLOPS * 3600 / whole, -3)
    return (
        f"Estimated, not measured: a training step of LatentThinker is {entry['gigaflops']:.1f} "
        f"GFLOP, a run {whole / 1000:.1f} TFLOP ({whole / seconds:.0f} GFLOP/s on this CPU). A GPU "
        f"that reaches {GPU_GIGAFLOPS / 1000:.0f} TFLOP/s (5% of an H100's 495 with TF32) would do "
        f"about {times:,.0f} such runs in an hour."
    )


def save(name: str, entry: dict[str, Any], *, smoke: bool) -> None:
    """Write what there is so far, with the earlier rows of the other puzzle."""
    if not smoke:
        found = json.loads(FOUND.read_text(encoding="utf-8")) if FOUND.exists() else {}
        found[name] = entry
        FOUND.write_text(
            json.dumps({n: found[n] for n in PUZZLES if n in found}, indent=1) + "\n",
            encoding="utf-8",
        )


def main(arguments: list[str] | None = None) -> None:
    """Train, test, write results and table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--device", default="cpu", help="not looked at: the example trains on the CPU"
    )
    parser.add_argument("--only", nargs="*", choices=PUZZLES, help="puzzles; the others are kept")
    parser.add_argument(
        "--missing", action="store_true", help="only rivals and seeds that have no rows yet"
    )
    parser.add_argument(
        "--smoke",
        action="store_true",
        help="seconds each, to see that it works; nothing is written",
    )
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    example = load_example("solve_puzzles")
    for name in options.only or PUZZLES:
        command = [
            "--puzzle",
            name,
            "--samples",
            str(SAMPLES[name]),
            *(["--smoke"] if options.smoke else []),
        ]
        seeds = SEEDS[name][:1] if options.smoke else SEEDS[name]
        if options.missing:
            entry = json.loads(FOUND.read_text(encoding="utf-8"))[name]
        else:
            ours = [run_example("solve_puzzles", command, s) for s in seeds]
            entry = {"date": today(), "commit": commit(), "hardware": hardware()}
            entry["runs"] = {"LatentThinker": ours}
        if name == "sudoku9":
            entry["gigaflops"] = gigaflops(example.PUZZLES[name](seeds[0], options.smoke))
        runs: dict[str, list[dict[str, Any]]] = entry["runs"]
        seconds = (
            2.0
            if options.smoke
            else statistics.median(r["cpu_seconds"] for r in runs["LatentThinker"])
        )
        save(name, entry, smoke=options.smoke)
        for seed in seeds[:3]:
            puzzle = example.PUZZLES[name](seed, options.smoke)
            for model, run in others(name, puzzle, seed, seconds, smoke=options.smoke).items():
                known = runs.setdefault(model, [])
                if any(other["seed"] == seed for other in known):
                    continue
                found = run()
                known.append(found | {"commit": commit()} if options.missing else found)
                print(name, model, found, flush=True)
            save(name, entry, smoke=options.smoke)
    if not options.smoke:
        write_table()


if __name__ == "__main__":
    main()
