"""A thinker's loop against the same model of `nn.TransformerDecoderLayer`, itself without cache,
and perceiver-pytorch.

One step is forward and backward of eight thinking steps and one read-out. All have the same widths,
read-out and, to within a few per cent, parameters; perceiver-pytorch's tied Perceiver has no
read-out for sequences and is timed with its own, a mean. Early exit: a scan that was trained, rows
of many lengths, the rule's own cost included.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

import thinker.frames as frames
from tests.benchmarks.measure import interleave, run_alone, saved_bytes
from tests.benchmarks.results import ROOT, Row, append, latest, put
from thinker import (
    AtTokens,
    CurriculumDataset,
    ExitRule,
    Frontier,
    LatentThinker,
    Reach,
    ThinkerConfig,
    ThinkerTrainer,
    make_task,
    thinker_arguments,
)
from thinker.tasks import Sample

IMPLS = (
    "nn.TransformerDecoderLayer",
    "LatentThinker",
    "LatentThinker, no cache",
    "perceiver-pytorch",
)
STEPS = 8
WINDOWS = {20: 64, 100: 16, 400: 4, 1600: 1, 10_000: 1}  # rows of each length
LONGEST_MASK = 2000  # a mask over all keys of 10,000 tokens takes a second a step
GRADIENTS = {"every step": None, "the last three": 3, "checkpointed": None}  # grad_steps
GUIDE = ROOT / "docs" / "thinker_measured.md"
SHAPES = {  # inputs: rows, width, latents, answer
    20: (64, 64, 8, 20),
    256: (16, 128, 16, 20),
    2048: (4, 128, 32, 20),
}
GPU_SHAPES = {20: (512, 64, 8, 20), 256: (512, 128, 16, 20), 2048: (64, 256, 32, 20)}


class Recomputing(LatentThinker):
    """Keys and values of the input made anew in every step after the first."""

    def __init__(self, config: ThinkerConfig):
        super().__init__(config)
        self.layers[0].read.source_norm.register_forward_pre_hook(
            lambda module, inputs: self.see(inputs[0])
        )

    def see(self, embedded: Tensor) -> None:
        """The input, as it was embedded."""
        self.embedded = embedded

    def encode(self, tokens: Tensor, mask: Tensor | None = None, **options):
        """The first time."""
        self.first = True
        return super().encode(tokens, mask, **options)

    def _step(self, z, row, context, memory, frame):
        if not self.first:
            fresh = tuple(layer.read.project(self.embedded) for layer in self.layers)
            context = replace(context, keys_values=fresh)
        self.first = False
        return super()._step(z, row, context, memory, frame)


class Stock(nn.Module):
    """The same flow with torch's own decoder layer as the shared block."""

    def __init__(self, config: ThinkerConfig):
        super().__init__()
        own = LatentThinker(config)
        self.embedding, self.positions, self.latents, self.readout = (
            own.embedding,
            own.positions.input,
            own.latents,
            own.readout,
        )
        self.queries = own.positions.output
        self.block = nn.TransformerDecoderLayer(
            config.hidden_size,
            config.num_heads,
            config.mlp_size * 3 // 2,
            dropout=0.0,
            batch_first=True,
            norm_first=True,
        )

    def forward(self, tokens: Tensor, n_step: int, out_len: int) -> Tensor:
        """Logits."""
        read = self.embedding(tokens) + self.positions.weight[: tokens.shape[1]]
        z = self.latents.expand(len(tokens), -1, -1)
        for _ in range(n_step):
            z = self.block(z, read)
        return self.readout(z, self.queries.weight[None, :out_len])


def prepare(
    impl: str, length: int, shape: tuple, device: str, backward: bool
) -> Callable[[], object]:
    """A step; ``step.forward`` and ``step.resident`` serve `saved_bytes`."""
    rows, width, latents, out_len = shape
    torch.manual_seed(0)
    config = ThinkerConfig(
        vocab_size=16,
        hidden_size=width,
        num_latents=latents,
        max_input_length=length,
        max_output_length=out_len,
    )
    tokens = torch.randint(16, (rows, length)).to(device)
    if impl == "perceiver-pytorch":
        from perceiver_pytorch import Perceiver

        model = Perceiver(
            input_channels=width,
            input_axis=1,
            num_freq_bands=1,
            max_freq=2.0,
            depth=STEPS,
            num_latents=latents,
            latent_dim=width,
            cross_heads=4,
            latent_heads=4,
            cross_dim_head=width // 4,
            latent_dim_head=width // 4,
            num_classes=16,
            weight_tie_layers=True,
            fourier_encode_data=False,
            self_per_cross_attn=1,
        ).to(device)
        table = nn.Embedding(16, width).to(device)

        def forward() -> Tensor:
            return model(table(tokens))

    else:
        kind = {IMPLS[0]: Stock, IMPLS[1]: LatentThinker, IMPLS[2]: Recomputing}[impl]
        model = kind(config).to(device).train()
        model.check_inputs = device == "cpu"

        def forward() -> Tensor:
            made = model(tokens, n_step=STEPS, out_len=out_len)
            return made if impl == IMPLS[0] else made.logits

    def step() -> object:
        if not backward:
            with torch.no_grad():
                return forward()
        forward().float().square().mean().backward()
        model.zero_grad()
        return None

    step.forward, step.resident = forward, sum(p.nbytes for p in model.parameters())
    return step


def measure_loop(length: int, shape: tuple, backward: bool, runs: int, device: str) -> list[Row]:
    """Rows of all implementations of one shape, in turn."""
    steps = {impl: prepare(impl, length, shape, device, backward) for impl in IMPLS}
    rows, dim, latents, _ = shape
    text = f"{rows} x {length} tokens, {latents} latents of {dim}, {STEPS} steps"
    made = []
    for impl, results in interleave(steps, runs, device).items():
        saved = saved_bytes(steps[impl].forward, steps[impl].resident) if backward else ""
        top = (
            run_alone(prepare, impl, length, shape, device, True, device=device)[0]
            if backward
            else 0
        )
        mode = "forward + backward" if backward else "forward"
        made.append(
            Row.of(
                "think",
                impl,
                mode,
                "float32",
                text,
                results,
                top,
                saved=saved,
                device=device,
                packages=("torch", "perceiver-pytorch"),
            )
        )
    report(made)
    return made


def trained_scan(longest: int) -> tuple[LatentThinker, CurriculumDataset]:
    """Prefix parity, learned on up to five symbols."""
    import tempfile

    from transformers import set_seed

    set_seed(12)
    task = AtTokens(make_task("prefix_sum"))
    data = CurriculumDataset(
        task, Frontier(max_length=5), n_step=lambda length: (1, length + 6), holdout=0.0, seed=12
    )
    model = LatentThinker(
        ThinkerConfig(
            **data.sizes(longest),
            hidden_size=32,
            num_heads=2,
            causal=True,
            window=2,
            positions="rotary",
        )
    )
    with tempfile.TemporaryDirectory() as folder:
        arguments = thinker_arguments(
            folder,
            max_steps=2000,
            learning_rate=4e-3,
            warmup_steps=50,
            disable_tqdm=True,
            use_cpu=True,
            seed=12,
        )
        ThinkerTrainer(model, arguments, train_dataset=data, step_loss=Reach()).train()
    return model, data


def measure_exit(runs: int, device: str) -> list[Row]:
    """Rows of 4 to 64 symbols, 80 steps at most, the rule itself running; and what a rule costs
    when no row stops."""
    model, data = trained_scan(64)
    model = model.eval().to(device)
    generator = torch.Generator().manual_seed(0)
    sample = data.task.sample(generator, 256, torch.randint(4, 65, (256,), generator=generator))
    tokens, mask, targets = (x.to(device) for x in sample[:3])
    rules: dict[str, ExitRule | None] = {
        "all rows": None,
        "residual": ExitRule(),
        "residual, threshold 0 (no row stops)": ExitRule(threshold=0.0),
    }

    @torch.no_grad()
    def run(rule: ExitRule | None) -> tuple[float, float]:
        out = model(tokens, mask, n_step=80, exit_rule=rule)
        right = (out.logits.argmax(-1) == targets)[targets != -100]
        return float(right.float().mean()), float(out.steps.float().mean())

    found = {name: run(rule) for name, rule in rules.items()}
    times = interleave({name: lambda r=rule: run(r) for name, rule in rules.items()}, runs, device)
    rows = []
    for name, measured in times.items():
        right, steps = found[name]
        mode = f"{steps:.1f} steps, {100 * right:.2f} % right"
        text = "256 rows of 4 to 64 symbols, at most 80 steps"
        rows.append(Row.of("early exit", name, mode, "float32", text, measured, 0, device=device))
    report(rows)
    return rows


def measure_windows(runs: int, device: str) -> list[Row]:
    """A step of a scan with a window of two: as a band, and as torch's kernel with a mask."""
    rows = []
    task = AtTokens(make_task("prefix_sum"))
    widest = frames._BAND
    for length, batch in WINDOWS.items():
        data = CurriculumDataset(task, Frontier(max_length=5), holdout=0.0)
        sizes = {"hidden_size": 32, "num_heads": 2, "causal": True, "window": 2}
        config = ThinkerConfig(**data.sizes(length), **sizes, positions="rotary")
        model = LatentThinker(config).eval().to(device)
        bits = torch.randint(2, (batch, length), generator=torch.Generator().manual_seed(0))
        sample = task.laid_out(Sample(bits, torch.ones_like(bits, dtype=torch.bool), bits))
        tokens, mask = sample.tokens.to(device), sample.mask.to(device)

        @torch.no_grad()
        def run(
            least: int, model: LatentThinker = model, tokens: Tensor = tokens, mask: Tensor = mask
        ) -> None:
            frames._BAND = least  # keys for each place of a band, from which it is taken
            model(tokens, mask, n_step=STEPS)

        ways: dict[str, Callable[[], None]] = {"band": lambda run=run: run(0)}
        if length <= LONGEST_MASK:
            ways["mask"] = lambda run=run: run(10**9)
        times = interleave(ways, runs, device)
        for way, measured in times.items():
            shape = f"{batch} x {length} tokens"
            rows.append(
                Row.of("window", way, "forward", "float32", shape, measured, 0, device=device)
            )
    frames._BAND = widest
    return rows


def prepare_gradients(way: str, device: str) -> Callable[[], object]:
    """Return a training step of 32 thinking steps, by one of `GRADIENTS`.

    Latents take 3.3 MB, for the allocator gives smaller blocks back late (`run_alone`).
    """
    torch.manual_seed(0)
    data = CurriculumDataset(AtTokens(make_task("prefix_sum")), Frontier(max_length=99))
    sizes = {"hidden_size": 64, "num_heads": 4, "causal": True, "window": 2}
    config = ThinkerConfig(**data.sizes(99), **sizes, positions="rotary")
    model = LatentThinker(config).to(device).train()
    if way == "checkpointed":
        model.gradient_checkpointing_enable()
    tokens = torch.randint(2, (128, 100)).to(device)

    def step() -> None:
        logits = model(tokens, n_step=32, grad_steps=GRADIENTS[way]).logits
        logits.square().mean().backward()
        model.zero_grad()

    return step


def measure_gradients(runs: int, device: str) -> list[Row]:
    """Rows of peak memory and CPU seconds of `GRADIENTS`."""
    times = interleave({way: prepare_gradients(way, device) for way in GRADIENTS}, runs, device)
    rows = []
    for way, measured in times.items():
        peak = run_alone(prepare_gradients, way, device, device=device)[0]
        shape = "128 x 100 tokens, latents of 64, 32 steps"
        mode = "forward + backward"
        rows.append(Row.of("gradients", way, mode, "float32", shape, measured, peak, device=device))
    report(rows)
    return rows


def measure_data(runs: int) -> list[Row]:
    """A batch of 512 x 20, vectorised, and row by row in Python as reasoning libraries make them."""
    import random

    task = make_task("reverse")
    data = CurriculumDataset(task, batch_size=512)
    plain, generator, lengths = (
        iter(range(10**9)),
        torch.Generator().manual_seed(0),
        torch.randint(1, 21, (512,)),
    )

    def by_row() -> None:
        tokens = torch.zeros(512, 20, dtype=torch.long)
        labels = torch.full((512, 20), -100)
        for row in range(512):
            draw = random.Random(next(plain))
            made = [draw.randrange(16) for _ in range(draw.randint(1, 20))]
            tokens[row, : len(made)] = torch.tensor(made)
            labels[row, : len(made)] = torch.tensor(made[::-1])

    turns = {
        "a Python loop": by_row,
        "Task.sample": lambda: task.sample(generator, 512, lengths),
        "CurriculumDataset": lambda: data.batch(next(plain)),
    }
    held = interleave(turns, runs)
    made = [Row.of("batch", i, "reverse", "int64", "512 x 20", t, 0) for i, t in held.items()]
    report(made)
    return made


def measure_training(device: str, steps: int) -> list[Row]:
    """Samples per second of copy-20 training, through the trainer, and of its loop alone."""
    import tempfile
    import time

    task = make_task("copy")
    rows, made = 64 if device == "cpu" else 512, []
    for seed in (0, 1, 2):
        torch.manual_seed(seed)
        data = CurriculumDataset(task, batch_size=rows, seed=seed, device="cpu")
        model = LatentThinker(
            ThinkerConfig(vocab_size=16, max_input_length=20, max_output_length=20)
        )
        with tempfile.TemporaryDirectory() as folder:
            arguments = thinker_arguments(
                folder, max_steps=steps, disable_tqdm=True, use_cpu=device == "cpu", seed=seed
            )
            trainer = ThinkerTrainer(model, arguments, train_dataset=data)
            cpu, wall = time.process_time(), time.perf_counter()
            trainer.train()
            made.append(((time.process_time() - cpu) / steps, (time.perf_counter() - wall) / steps))
    row = Row.of(
        "copy-20, a training step",
        "ThinkerTrainer",
        "train",
        "float32",
        f"{rows} rows",
        made,
        0,
        device=device,
    )
    print(f"copy-20: {rows / row.wall_p50:.0f} samples a second")
    return [row]


def write_table() -> None:
    """The guide's table of speed, from the newest rows."""
    rows = [r for r in latest("thinker.csv") if "CPU" in r["hardware"]]
    if not rows:
        return
    held = {(r["op"], r["shape"], r["mode"], r["impl"]): float(r["cpu_p50"]) for r in rows}
    lines = [
        "Times as fast as the same model with `nn.TransformerDecoderLayer` as its block "
        f"({rows[0]['hardware']}, one thread):",
        "",
        "| input | forward | forward + backward | without the cache | perceiver-pytorch |",
        "|---|---|---|---|---|",
    ]
    modes = ("forward", "forward + backward")
    for shape in dict.fromkeys(r["shape"] for r in rows if r["op"] == "think"):
        base, ours, plain, peer = (
            [held["think", shape, mode, impl] for mode in modes] for impl in IMPLS
        )
        cells = [f"{b / o:.2f}" for b, o in zip(base, ours, strict=True)]
        cells += [f"{base[1] / other[1]:.2f}" for other in (plain, peer)]
        lines.append(f"| {shape} | {' | '.join(cells)} |")
    windows = [r for r in rows if r["op"] == "window"]
    lines += ["", "A step of a scan with `window=2`, microseconds a token:", ""]
    lines += ["| rows x tokens | as a band | as a mask over all keys |", "|---|---|---|"]
    for shape in dict.fromkeys(r["shape"] for r in windows):
        of_shape = {r["impl"]: r["cpu_p50"] for r in windows if r["shape"] == shape}
        batch_rows, length = (int(part) for part in shape.removesuffix(" tokens").split(" x "))
        micro = [
            f"{1e6 * float(of_shape[way]) / STEPS / batch_rows / length:.2f}"
            if way in of_shape
            else ""
            for way in ("band", "mask")
        ]
        lines.append(f"| {shape.removesuffix(' tokens')} | {' | '.join(micro)} |")
    gradients = [r for r in rows if r["op"] == "gradients"]
    lines += ["", f"Gradients through steps, {gradients[0]['shape']}, forward + backward:", ""]
    lines += ["| gradients | peak, MB | CPU seconds |", "|---|---|---|"]
    for row in gradients:
        peak = int(row["peak_bytes"]) / 1e6
        lines.append(f"| {row['impl']} | {peak:.0f} | {float(row['cpu_p50']):.2f} |")
    batch = {i: v for (op, _, _, i), v in held.items() if op == "batch"}
    exits = [r for r in rows if r["op"] == "early exit"]
    whole = next(float(r["cpu_p50"]) for r in exits if r["impl"] == "all rows")
    lines += ["", f"Early exit, {exits[0]['shape']}, the rule's own cost included:", ""]
    lines += ["| rule | mean steps | symbols right | times as fast |", "|---|---|---|---|"]
    for row in exits:
        steps, right = row["mode"].split(" steps, ")
        lines.append(
            f"| {row['impl']} | {steps} | {right.split(' right')[0]} | "
            f"{whole / float(row['cpu_p50']):.2f} |"
        )
    lines.append("")
    took = {impl: f"{1e3 * seconds:.2f} ms" for impl, seconds in batch.items()}
    lines += [
        f"A batch of 512 x 20: {took['Task.sample']} to sample, {took['CurriculumDataset']} with "
        f"lengths and hold-out; {took['a Python loop']} row by row in Python."
    ]
    train = next(r for r in rows if r["op"].startswith("copy-20"))
    rate = int(train["shape"].split()[0]) / float(train["wall_p50"])
    lines.append(
        f"Training to copy 20 symbols: {rate:.0f} samples a second through `ThinkerTrainer`."
    )
    put(GUIDE, lines, "speed")


def report(rows: list[Row]) -> None:
    """Medians against the first."""
    ratios = {r.impl: round(rows[0].cpu_p50 / r.cpu_p50, 2) for r in rows}
    print(rows[0].op, rows[0].shape, rows[0].mode, "times as fast:", ratios, flush=True)


def main(arguments: list[str] | None = None) -> None:
    """Measure and append rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--runs", type=int, default=15)
    options = parser.parse_args(arguments)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rows = []
        for length, shape in (SHAPES if options.device == "cpu" else GPU_SHAPES).items():
            for backward in (False, True):
                rows += measure_loop(length, shape, backward, options.runs, options.device)
        rows += measure_windows(options.runs, options.device)
        rows += measure_gradients(options.runs, options.device)
        rows += measure_exit(options.runs, options.device)
        rows += measure_data(options.runs)
        rows += measure_training(options.device, 100)
    finally:
        torch.set_num_threads(threads)
    append("thinker.csv", rows)


if __name__ == "__main__":
    main()
