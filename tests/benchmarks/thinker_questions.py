"""What the log that this package grew out of asked, each answered by a table:
thinker_questions.json, and its page.

Not timed: what is compared is accuracy, or bits of text. Every number is the median of the seeds,
on held-out samples.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import thinker as th
import thinker.losses
import thinker.schedules
from tests.benchmarks.examples import load_example
from tests.benchmarks.pictures import save_picture
from tests.benchmarks.results import RESULTS, ROOT, commit, hardware, put, today
from tests.support.real import alpaca, smollm2
from tests.support.real import data as data_file
from thinker.state import ThinkerOutput
from thinker.tasks import Sample, TensorTask

FOUND, PAGE = RESULTS / "thinker_questions.json", ROOT / "docs" / "thinker_questions.md"
PLOT = ROOT / "docs" / "thinker_raised.svg"
WORK = Path(__file__).parent / "work" / "distill"
GRID_LATENTS, GRID_STEPS = (4, 8, 16, 24, 32), (1, 2, 4, 8, 12, 16, 24)
SEEDS, FEWER = (0, 1, 2), {"text": (0, 1)}  # a run of text takes minutes
NODES = 8  # of the graphs of `paths`
COPY = {"hidden_size": 64, "num_heads": 4, "num_latents": 8}
Rows = list[dict[str, Any]]


def train(
    data: th.CurriculumDataset, model: dict[str, Any], iterations: int, seed: int, **options: Any
) -> tuple[th.LatentThinker, float]:
    """A model of the recipe, and its CPU seconds."""
    from transformers import set_seed

    set_seed(seed)
    made = th.LatentThinker(th.ThinkerConfig(**{**data.sizes(), **model}))
    return made, train_on(made, data, iterations, seed, **options)


def train_on(
    made: th.LatentThinker, data: th.CurriculumDataset, iterations: int, seed: int, **options: Any
) -> float:
    """The CPU seconds of training a model, from where it is."""
    rate = options.pop("learning_rate", 3e-3)
    with tempfile.TemporaryDirectory() as folder:
        arguments = th.thinker_arguments(
            folder,
            max_steps=iterations,
            disable_tqdm=True,
            use_cpu=True,
            seed=seed,
            learning_rate=rate,
        )
        trainer = th.ThinkerTrainer(made, arguments, train_dataset=data, **options)
        seconds = time.process_time()
        trainer.train()
        return time.process_time() - seconds


def copying(
    seed: int, length: int = 20, schedule: th.schedules.Schedule | None = None, **options: Any
) -> Any:
    """Sixteen symbols."""
    schedule = schedule or th.Frontier(max_length=length)
    return th.CurriculumDataset(th.make_task("copy"), schedule, seed=seed, **options)


def symbols(
    model: th.LatentThinker,
    data: th.CurriculumDataset,
    n_steps: Sequence[int],
    *,
    length: int | None = None,
    **options: Any,
) -> list[float]:
    """Shares of right symbols after each number of steps."""
    length = length or data.schedule.max_length
    curves = th.evaluate_steps(model, data, [length], n_steps=n_steps, samples=1024, **options)
    return [point["symbols"] for point in curves.rows()]


def self_attention(seed: int, few: int) -> Rows:
    """With and without latents that look at each other."""
    rows = []
    adding = th.CurriculumDataset(th.make_task("add"), th.Frontier(max_length=3), seed=seed)
    tasks = {
        "copy 20": (copying(seed), {}, 400),
        "add, base 16, 3 digits": (adding, {}, 800),
        "4 hops": (
            th.CurriculumDataset(
                th.make_task("hops"), th.schedules.Fixed(max_length=4), n_step=5, seed=seed
            ),
            {"step_loss": th.AllSteps()},
            600,
        ),
    }
    for name, (data, options, iterations) in tasks.items():
        for on in (True, False):
            plan = th.FlowPlan.every_step(memory=False, self_attention=on)
            model, seconds = train(data, COPY | {"plan": plan}, few or iterations, seed, **options)
            right = symbols(model, data, [5])[0]
            rows.append(
                {
                    "task": name,
                    "self-attention": "yes" if on else "no",
                    "symbols": right,
                    "CPU s": seconds,
                }
            )
    return rows


def fixed_steps(seed: int, few: int) -> Rows:
    """Trained with one number of steps each, as the log did, and with the recipe's random ones."""
    rows = []
    small = {"hidden_size": 32, "num_heads": 8, "num_latents": 8}
    for iterations in (300, 1200):
        for kind in ("as the log", "the recipe, with a fixed number of steps"):
            row: dict[str, Any] = {"trained": kind, "iterations": iterations}
            for n in (1, 2, 3, 4):
                schedule = th.schedules.Fixed(max_length=20) if kind == "as the log" else None
                data = copying(seed, schedule=schedule, n_step=n)
                model = small | ({"step_update": "replace", "step_noise": 0.0} if schedule else {})
                loss = th.losses.LastAndRandom(1.0, 0.0) if schedule else None
                made, _ = train(data, model, few or iterations, seed, step_loss=loss)
                row[f"{n} steps"] = symbols(made, data, [n])[0]
            rows.append(row)
        data = copying(seed)
        made, _ = train(data, small, few or iterations, seed)
        right = symbols(made, data, [1, 2, 3, 4])
        rows.append(
            {"trained": "the recipe, 1 to 6 steps in one model", "iterations": iterations}
            | {f"{n} steps": value for n, value in zip((1, 2, 3, 4), right, strict=True)}
        )
    return rows


def plateau(seed: int, few: int) -> Rows:
    """The log's model and task under four schedules."""
    rows = []
    kinds = {
        "only 20 symbols": th.schedules.Fixed(max_length=20),
        "1 to 20, uniform": th.schedules.Uniform(max_length=20),
        "half at 20, half uniform": th.Frontier(max_length=20),
        "by accuracy, from 1": th.schedules.Progressive(max_length=20),
    }
    for name, schedule in kinds.items():
        data = copying(seed, schedule=schedule, n_step=6)
        model = {"hidden_size": 16, "num_heads": 4, "num_latents": 4}
        row: dict[str, Any] = {"lengths in training": name}
        made, seconds = train(
            data, model, few or 2000, seed, learning_rate=1e-2, step_loss=th.AllSteps()
        )
        row |= {f"length {n}": symbols(made, data, [6], length=n)[0] for n in (5, 10, 15, 20)}
        rows.append(row | {"CPU s": seconds})
    return rows


def random_plan(generator: torch.Generator, n_step: int) -> th.FlowPlan:
    """A random plan for a model without static tokens."""
    drawn = th.FlowPlan.random(0.5, n_step, generator=generator)
    return th.FlowPlan([row._replace(static_mem_lookup=False) for row in drawn.rows()])


def plans(seed: int, few: int) -> Rows:
    """Trained with one plan, or with a random one for each batch; tested with all."""
    rows = []
    kinds: dict[str, Any] = {
        "do all the time": th.FlowPlan.every_step(),
        "read once, think, answer": th.FlowPlan.read_once(),
        "a random one for each batch": random_plan,
    }
    generator = torch.Generator().manual_seed(1)
    draws = [kinds["a random one for each batch"](generator, 6) for _ in range(16)]
    for name, plan in kinds.items():
        data = copying(seed, n_step=(2, 6))
        own, drawn = (plan, None) if isinstance(plan, th.FlowPlan) else (None, plan)
        model, _ = train(
            data, COPY | {"memory": "grow", "plan": own}, few or 800, seed, draw_plan=drawn
        )
        row: dict[str, Any] = {"trained with": name}
        for other in ("do all the time", "read once, think, answer"):
            row[other] = symbols(model, data, [6], plan=kinds[other])[0]
        row["random ones"] = statistics.mean(
            symbols(model, data, [6], plan=other)[0] for other in draws
        )
        rows.append(row)
    return rows


class Neighbors(th.losses.LastAndRandom):
    """The recipe's loss, and one of the log's ideas about embeddings.

    Args:
        kind: ``"mean"``, the mean embedding of the answer against that of what was said;
            ``"closest"``, each said embedding against the closest of the answer's, wherever it is;
            ``"near"``, cross-entropy against the symbols one place away too.
        embedding: Of symbols.
        weight: Of the idea.
    """

    def __init__(self, kind: str, embedding: Tensor, weight: float):
        super().__init__()
        self.kind, self.embedding, self.weight = kind, embedding, weight

    def penalty(self, output: ThinkerOutput, labels: Tensor) -> Tensor:
        """Of the last step."""
        assert output.logits is not None
        known = labels != -100
        logs = output.logits.float().log_softmax(-1)
        target = F.one_hot(labels.clamp(min=0), logs.shape[-1]).float() * known[..., None]
        if self.kind == "near":
            beside = F.pad(target, (0, 0, 1, 1))
            beside = (beside[:, :-2] + beside[:, 2:]) / 2
            return -self.weight * ((beside * logs).sum(-1) * known).sum() / known.sum()
        table = self.embedding.detach()
        said, meant = logs.exp() @ table, target @ table
        if self.kind == "mean":
            apart = ((said - meant) * known[..., None]).sum(1) / known.sum(1, keepdim=True)
            return self.weight * apart.square().sum(-1).mean()
        far = torch.cdist(said, meant).square().masked_fill(~known[:, None], math.inf).amin(-1)
        return self.weight * (far * known).sum() / known.sum()


def embeddings(seed: int, few: int) -> Rows:
    """The log's ideas of losses on embeddings, beside cross-entropy."""
    rows = []
    for name, kind, weight in (
        ("cross-entropy", "mean", 0.0),
        ("and the mean embedding", "mean", 0.1),
        ("and the closest embedding", "closest", 0.1),
        ("and the neighboring symbols", "near", 0.1),
    ):
        row: dict[str, Any] = {"loss": name}
        for iterations in (150, 250, 400):
            data = copying(seed)
            from transformers import set_seed

            set_seed(seed)
            table = th.LatentThinker(th.ThinkerConfig(**{**data.sizes(), **COPY})).embedding.weight
            model, _ = train(
                data,
                COPY,
                few or iterations,
                seed,
                step_loss=Neighbors(kind, table.detach().clone(), weight),
            )
            row[f"{iterations} iterations"] = symbols(model, data, [6])[0]
        rows.append(row)
    return rows


def latent_noise(seed: int, few: int) -> Rows:
    """How latents start."""
    rows = []
    starts: dict[str, dict[str, Any]] = {
        "a learned table": {},
        "one vector + N(0, 0.1)": {"latent_init": "noise", "latent_noise": 0.1},
        "one vector + N(0, 1)": {"latent_init": "noise"},
    }
    for name, start in starts.items():
        data = copying(seed, length=12, n_latent=None if not start else (6, 12))
        model, seconds = train(data, COPY | start, few or 1200, seed)
        row: dict[str, Any] = {"latents start from": name}
        for n_latent in (8, 16) if start else (8,):
            right = symbols(model, data, [1, 2, 6, 24], n_latent=n_latent)
            row |= {
                f"{n_latent} latents, {s} steps": v
                for s, v in zip((1, 2, 6, 24), right, strict=True)
            }
        rows.append(row | {"CPU s": seconds})
    return rows


def text(seed: int, few: int) -> Rows:
    """Bits for each byte of English instructions that were held out, by steps of thought."""
    rows: Rows = []
    whole = "\n".join(f"{r['instruction']}\n{r['output']}" for r in alpaca(5000)).encode(
        "ascii", "replace"
    )
    stream = torch.frombuffer(bytearray(whole), dtype=torch.uint8).long().clamp(max=127)
    length = 96
    pieces = stream[: (len(stream) - 1) // length * length].view(-1, length)
    following = stream[1 : 1 + pieces.numel()].view(-1, length)
    task = th.AtTokens(TensorTask(pieces, following))
    shape = {"hidden_size": 96, "num_heads": 4, "causal": True, "positions": "rotary"}
    kinds: dict[str, tuple[int | tuple[int, int], int | None]] = {
        "always 1 step": (1, None),
        "always 4 steps": (4, None),
        "1 to 8 steps": ((1, 8), None),
        "1 to 8 steps, 32 latents at the end (Perceiver AR)": ((1, 8), 32),
    }
    for name, (n_step, latents) in kinds.items():
        data = th.CurriculumDataset(
            task, batch_size=16, n_step=n_step, n_latent=latents, seed=seed, holdout=0.05
        )
        model, seconds = train(data, shape, few or 700, seed)
        row: dict[str, Any] = {"trained with": name}
        held = data.held_out(256, 1)
        labels = held["labels"][:, -32:]  # of all the same ones, with 64 before them
        with torch.no_grad():
            for steps in (1, 2, 4, 8, 16):
                logits = model.eval()(held["input_ids"], n_step=steps, n_latent=latents).logits[
                    :, -32:
                ]
                loss = F.cross_entropy(
                    logits.flatten(0, 1).float(), labels.flatten(), ignore_index=-100
                )
                row[f"{steps} steps"] = float(loss) / math.log(2)
        rows.append(row | {"CPU s": seconds})
    return rows


def raised(seed: int, few: int) -> Rows:
    """Copying before the ranges of latents and steps are raised, after, and after as many iterations
    without."""
    rows = []
    narrow, wide = (
        {"n_latent": (4, 16), "n_step": (4, 12)},
        {"n_latent": (4, 24), "n_step": (4, 16)},
    )
    model = COPY | {"latent_init": "noise"}
    before, seconds = train(copying(seed, length=12, **narrow), model, few or 800, seed)
    trained = {"800 iterations": (before, seconds)}
    for name, ranges in (("and 400 more", narrow), ("and 400 more, wider", wide)):
        made = copy.deepcopy(before)
        more = train_on(made, copying(seed + 10, length=12, **ranges), few or 400, seed)
        trained[name] = (made, seconds + more)
    for name, (made, took) in trained.items():
        for latents in GRID_LATENTS:
            right = symbols(made, copying(seed, length=12), GRID_STEPS, n_latent=latents)
            row: dict[str, Any] = {"trained with": name, "latents": str(latents)}
            row |= {f"{n} steps": share for n, share in zip(GRID_STEPS, right, strict=True)}
            rows.append(row | {"CPU s": took})
    return rows


@dataclass(frozen=True)
class Paths(th.Task):
    """Distances from the first of eight nodes to each node of a random graph, in edges.

    The input says for each of the 28 pairs of nodes whether an edge joins them, with probability
    1/4; a node that cannot be reached has the answer 8.
    """

    default_length = NODES

    @property
    def vocab_size(self) -> int:
        """An edge or none."""
        return 2

    @property
    def output_size(self) -> int:
        """Distances from 0 to 7, and 8 for no path."""
        return NODES + 1

    def input_length(self, length: int) -> int:
        """The number of pairs of nodes."""
        return NODES * (NODES - 1) // 2

    def num_samples(self, length: int) -> int:
        """The number of graphs."""
        return 2 ** self.input_length(length)

    def sample(self, generator: torch.Generator, batch: int, length: int | Tensor) -> Sample:
        """Draw graphs, and walk through each from its first node, all edges at once."""
        edges = torch.rand(batch, self.input_length(NODES), generator=generator) < 0.25
        joined = torch.zeros(batch, NODES, NODES, dtype=torch.bool)
        first, second = torch.triu_indices(NODES, NODES, 1)
        joined[:, first, second] = edges
        joined = joined | joined.mT
        distance = torch.full((batch, NODES), NODES)
        distance[:, 0] = 0
        for step in range(1, NODES):
            reached = distance < NODES
            new = (joined & reached[:, :, None]).any(1) & ~reached
            distance[new] = step
        return Sample(edges.long(), torch.ones_like(edges), distance)


def paths(seed: int, few: int) -> Rows:
    """Rows that are right after more steps than in training, and what keeps them right."""
    rows: Rows = []
    kinds: dict[str, tuple[tuple[int, int], int, dict[str, Any]]] = {
        "1 to 4 steps": ((1, 4), 3000, {}),
        "1 to 4 steps, twice as long": ((1, 4), 6000, {}),
        "1 to 4 steps, four segments": ((1, 4), 6000, {"segments": 4}),
        "1 to 12 steps": ((1, 12), 3000, {}),
    }
    for name, (n_step, iterations, options) in kinds.items():
        schedule = th.schedules.Fixed(max_length=NODES)
        data = th.CurriculumDataset(Paths(), schedule, n_step=n_step, seed=seed)
        model, seconds = train(data, COPY, few or iterations, seed, **options)
        steps = (1, 2, 4, 12, 24, 48)
        curves = th.evaluate_steps(model, data, [NODES], n_steps=steps, samples=1024)
        row: dict[str, Any] = {"trained with": name}
        row |= {f"{point['steps']} steps": point["rows"] for point in curves.rows()}
        held = data.held_out(1024, NODES)
        for threshold in (0.03, 0.2):
            rule = th.ExitRule(threshold=threshold)
            with torch.no_grad():
                out = model.eval()(held["input_ids"], n_step=48, out_len=NODES, exit_rule=rule)
            right = (out.logits.argmax(-1) == held["labels"]).all(1)
            row[f"exit at {threshold}"] = float(right.float().mean())
            row[f"steps, exit at {threshold}"] = float(out.steps.float().mean())
        rows.append(row | {"CPU s": seconds})
    return rows


class Distilled:
    """Models of bytes that learn SmolLM2's probabilities as `examples/distill_language_model.py`
    does: the thinker, and transformers of as many parameters and of as many operations."""

    def __init__(self) -> None:
        self.example = load_example("distill_language_model")
        texts = self.example.read_texts(data_file("alpaca_5000.json"), 3000)
        kept = WORK / "teacher.pt"
        kept.parent.mkdir(parents=True, exist_ok=True)
        whole, self.held_out = self.example.kept_streams(smollm2(), texts, kept)
        # rates are chosen on the last twentieth of what is trained on, which then is not
        cut = len(whole.data) * 19 // 20
        self.chosen_on = self.example.Stream(whole.data[cut:], whole.expected[cut:])
        self.training = self.example.Stream(whole.data[:cut], whole.expected[:cut])
        self.rates: dict[str, float] = {}
        one_hot = F.one_hot(self.training.data.long(), 256).half()
        self.untaught = self.example.Stream(self.training.data, one_hot)

    def make(self, kind: str, seed: int) -> tuple[torch.nn.Module, Any]:
        """A model, and its answers for bytes and a number of steps."""
        from transformers import LlamaConfig, LlamaForCausalLM, set_seed

        set_seed(seed)
        if kind.startswith("thinker"):
            made = self.example.make_thinker(128)
            return made, self.example.thinker_forward(made)
        width, inner, layers = SHAPES[kind]
        config = LlamaConfig(
            vocab_size=256,
            hidden_size=width,
            intermediate_size=inner,
            num_hidden_layers=layers,
            num_attention_heads=4,
        )
        model = LlamaForCausalLM(config)
        return model, lambda read, steps: [model(read).logits]

    def trained(
        self, kind: str, seed: int, iterations: int, rate: float
    ) -> tuple[torch.nn.Module, Any, float]:
        """A trained model, its answers and its CPU seconds."""
        model, forward = self.make(kind, seed)
        stream = self.untaught if kind == UNTAUGHT else self.training
        seconds = time.process_time()
        self.example.train(
            model, forward, stream, iterations=iterations, learning_rate=rate, seed=seed
        )
        return model, forward, time.process_time() - seconds

    def rate(self, kind: str, few: int) -> float:
        """The rate that is best after a fifth of the iterations."""
        if kind not in self.rates:
            found = {}
            for rate in RATES:
                _, forward, _ = self.trained(kind, 99, few or DISTILLED // 5, rate)
                found[rate] = self.example.nats(forward, self.chosen_on, 4, 256)
            print(kind, found, flush=True)
            self.rates[kind] = min(found, key=found.__getitem__)
        return self.rates[kind]


SHAPES = {
    "transformer, as many parameters": (104, 304, 2),
    "transformer, as many operations": (128, 344, 5),
}
"""Width, inner width and layers: the thinker has 329,472 parameters, and four of its steps cost
about as much as five layers of its width."""
UNTAUGHT = "thinker, on the text alone"
RATES, DISTILLED = (2e-3, 4e-3, 8e-3), 1500
distilled = cache(Distilled)


def distillation(seed: int, few: int) -> Rows:
    """Nats for each byte of texts that were held out, by steps of thought."""
    work, rows = distilled(), []
    pieces = 8 if few else 512
    nats = work.example.nats
    for kind in ("thinker", UNTAUGHT, *SHAPES):
        rate = work.rate(kind, few)
        model, forward, seconds = work.trained(kind, seed, few or DISTILLED, rate)
        row: dict[str, Any] = {"model": kind, "rate": str(rate)}
        row["parameters"] = f"{sum(p.numel() for p in model.parameters()):,}"
        for steps in (1, 2, 4, 8, 16) if kind.startswith("thinker") else (1,):
            with FlopCounterMode(display=False) as counter, torch.no_grad():
                forward(torch.zeros(1, 128, dtype=torch.long), steps)
            row[f"{steps} steps"] = nats(forward, work.held_out, steps, pieces)
            if steps in (1, 4):
                row[f"MFLOP a byte, {steps} steps"] = f"{counter.get_total_flops() / 128e6:.2f}"
        rows.append(row | {"CPU s": seconds})
    teacher = work.example.teacher_nats(work.held_out, pieces)
    return [*rows, {"model": "SmolLM2 itself", "1 steps": teacher}]


QUESTIONS: dict[str, Callable[[int, int], Rows]] = {
    "self_attention": self_attention,
    "fixed_steps": fixed_steps,
    "plateau": plateau,
    "plans": plans,
    "embeddings": embeddings,
    "latent_noise": latent_noise,
    "text": text,
    "paths": paths,
    "raised": raised,
    "distillation": distillation,
}


def shown(column: str, values: Sequence[Any]) -> str:
    """A cell: the median of the seeds and, where they differ in what is shown, their range."""
    if not isinstance(values[0], float):
        return str(values[0])
    digits = 3
    if column == "CPU s":
        digits = 0
    elif column.startswith("steps,"):
        digits = 1
    low, middle, high = (
        f"{v:.{digits}f}" for v in (min(values), statistics.median(values), max(values))
    )
    return middle if digits == 0 or low == high else f"{middle} ({low} to {high})"


def write_tables() -> None:
    """The page's tables, from the committed results."""
    if not FOUND.exists():
        return
    found = json.loads(FOUND.read_text(encoding="utf-8"))
    for name, entry in found.items():
        columns = list(dict.fromkeys(column for row in entry["seeds"][0] for column in row))
        names = [re.sub(r"\b1 steps", "1 step", column) for column in columns]
        lines = [f"| {' | '.join(names)} |", "|" + "---|" * len(columns)]
        for rows in zip(*entry["seeds"], strict=True):
            cells = [shown(c, [r[c] for r in rows]) if c in rows[0] else "" for c in columns]
            lines.append(f"| {' | '.join(cells)} |")
        count = len(entry["seeds"])
        place = f"{entry['hardware']}, one thread; measured {entry['date']} at {entry['commit']}."
        put(PAGE, [*lines, "", f"Median of {count} seeds, and their range. {place}"], name)


def draw() -> None:
    """Heat maps of the question `raised`: shares of right symbols by latents and steps."""
    from matplotlib.figure import Figure

    found = json.loads(FOUND.read_text(encoding="utf-8"))
    if "raised" not in found:
        return
    seeds = found["raised"]["seeds"]
    names = list(dict.fromkeys(row["trained with"] for row in seeds[0]))
    figure = Figure((11, 3.2), layout="constrained")
    for number, name in enumerate(names):
        cells = []
        for rows in zip(*seeds, strict=True):
            if rows[0]["trained with"] == name:
                by_step = [[row[f"{n} steps"] for row in rows] for n in GRID_STEPS]
                cells.append([statistics.median(values) for values in by_step])
        axes = figure.add_subplot(1, len(names), number + 1)
        axes.imshow(cells, cmap="viridis", aspect="auto", origin="lower", vmin=0, vmax=1)
        for y, row in enumerate(cells):
            for x, value in enumerate(row):
                color = "white" if value < 0.5 else "black"
                axes.text(x, y, f"{value:.2f}", ha="center", va="center", color=color, fontsize=7)
        axes.set_xticks(range(len(GRID_STEPS)), GRID_STEPS)
        axes.set_yticks(range(len(GRID_LATENTS)), GRID_LATENTS)
        axes.set(xlabel="steps", ylabel="latents", title=name)
    save_picture(figure, PLOT)


def main(arguments: list[str] | None = None) -> None:
    """Answer every question; write results and tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", help="not looked at: it is not timed")
    parser.add_argument(
        "--only", nargs="*", choices=QUESTIONS, help="questions; the others are kept"
    )
    parser.add_argument(
        "--smoke", action="store_true", help="a few iterations each, to see that it works"
    )
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    for name in options.only or QUESTIONS:
        seeds = []
        for seed in SEEDS[:1] if options.smoke else FEWER.get(name, SEEDS):
            seeds.append(QUESTIONS[name](seed, 3 if options.smoke else 0))
            print(name, seed, seeds[-1], flush=True)
        if not options.smoke:
            found = json.loads(FOUND.read_text(encoding="utf-8")) if FOUND.exists() else {}
            found[name] = {
                "date": today(),
                "commit": commit(),
                "hardware": hardware(),
                "seeds": seeds,
            }
            ordered = {n: found[n] for n in QUESTIONS if n in found}
            FOUND.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")
    if not options.smoke:
        draw()
        write_tables()


if __name__ == "__main__":
    main()
