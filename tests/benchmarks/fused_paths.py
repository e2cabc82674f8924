"""Every fused path beside its floor, the plain way, torch.compile of the plain way, and a library.

The floor of a way is the larger of two times: the fewest operations that the result needs, at the
rate of a large matrix product, and the fewest bytes (each tensor once), at the rate of a large
copy. Both rates are measured here. Training is forward and backward, with gradients of the input
and of what learns.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.benchmarks.measure import cuda_peak, interleave
from tests.benchmarks.results import Row, append, latest

PLAIN, COMPILED = "plain", "torch.compile of plain"
EAGER, FUSED = "ours, eager", "ours, fused"
WAYS = (PLAIN, COMPILED, EAGER, FUSED, "ours, compiled")
LIBRARIES = ("peft", "nn.Linear")


@dataclass
class Case:
    """One operation at one size.

    Attributes:
        op: The operation.
        text: Its sizes.
        ways: Functions of no arguments that return the output.
        learns: Leaves that get a gradient.
        reads: Bytes of the tensors that forward reads.
        writes: Bytes of the gradients that one way writes.
        forward_flops: Operations of forward.
        backward_flops: Operations of backward.
    """

    op: str
    text: str
    ways: dict[str, Callable[[], Tensor]]
    learns: list[Tensor]
    reads: int
    writes: int
    forward_flops: float
    backward_flops: float

    def floor(self, training: bool, copy_rate: float, product_rate: float) -> float:
        """Return the seconds of the necessary bytes and operations at the measured rates."""
        with torch.no_grad():
            written = next(iter(self.ways.values()))().nbytes
        moved = self.reads + written
        flops = self.forward_flops
        if training:
            moved += self.reads + written + self.writes
            flops += self.backward_flops
        return max(moved / copy_rate, flops / product_rate)


def compiled(function: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Compile a function for fixed shapes."""
    return torch.compile(function, dynamic=False)


def masks(tokens: int, width: int, dtype: torch.dtype, device: str) -> Case:
    """Accurate masks over two linear layers."""
    from mergekit_lite.masks import masked_linear

    made = {"dtype": dtype, "device": device}
    x = torch.randn(tokens, width, **made, requires_grad=True)
    weights = [torch.randn(width, width, **made) / width**0.5 for _ in range(2)]
    masks = torch.full((2, 1, width), 0.5, device=device, requires_grad=True)
    dense = torch.randn(width, width, **made, requires_grad=True)

    def plain() -> Tensor:
        return F.linear(x, (masks[0] * weights[0] + masks[1] * weights[1]).to(dtype))

    ways = {
        "nn.Linear": lambda: F.linear(x, dense),
        PLAIN: plain,
        COMPILED: compiled(plain),
        EAGER: lambda: masked_linear(x, weights, masks, impl="eager"),
        "ours, efficient": lambda: masked_linear(x, weights, masks, mode="efficient"),
    }
    if device == "cuda":
        ways[FUSED] = lambda: masked_linear(x, weights, masks, impl="fused")
    flops = 2.0 * tokens * width * width
    text = f"{tokens} tokens, {width} x {width}, 2 components"
    reads = x.nbytes + 2 * weights[0].nbytes
    return Case("masked_linear", text, ways, [x, masks, dense], reads, x.nbytes, flops, 2 * flops)


def kronecker(tokens: int, side: int, dtype: torch.dtype, device: str) -> Case:
    """One term with balanced factors."""
    from kronecker import kron_linear

    made = {"dtype": dtype, "device": device, "requires_grad": True}
    width = side * side
    x = torch.randn(tokens, width, **made)
    a, b = (torch.randn(1, side, side, **made) for _ in range(2))
    dense = torch.randn(width, width, **made)

    def plain() -> Tensor:
        y = torch.einsum("nuv,pu,qv->npq", x.view(-1, side, side), a[0], b[0])
        return y.reshape(tokens, -1)

    ways = {
        "nn.Linear": lambda: F.linear(x, dense),
        PLAIN: plain,
        COMPILED: compiled(plain),
        EAGER: lambda: kron_linear(x, a, b, impl="eager"),
    }
    if device == "cuda":
        ways[FUSED] = lambda: kron_linear(x, a, b, impl="fused")
    flops = 4.0 * tokens * width * side
    text = f"{tokens} tokens, ({side}, {side}) ⊗ ({side}, {side})"
    return Case("kron_linear", text, ways, [x, a, b, dense], x.nbytes, x.nbytes, flops, 1.5 * flops)


def lora(tokens: int, width: int, dtype: torch.dtype, device: str) -> Case:
    """An adapter of rank 16 beside a frozen layer."""
    from peft import LoraConfig, inject_adapter_in_model

    from heads.lora import LoraLinear

    base = nn.Linear(width, width, bias=False).to(device, dtype).requires_grad_(False)
    x = torch.randn(tokens, width, dtype=dtype, device=device, requires_grad=True)
    ours = LoraLinear.from_linear(base, r=16, alpha=16).to(dtype)
    holder = nn.ModuleDict({"linear": base})
    config = LoraConfig(target_modules=["linear"], r=16, lora_alpha=16)
    peer: Any = inject_adapter_in_model(config, holder)["linear"].to(dtype)
    a, b = peer.lora_A["default"].weight, peer.lora_B["default"].weight
    with torch.no_grad():
        b.normal_()

    def plain() -> Tensor:
        return F.linear(x, base.weight) + F.linear(F.linear(x, a), b)

    ways = {
        "nn.Linear, frozen": lambda: F.linear(x, base.weight),
        PLAIN: plain,
        COMPILED: compiled(plain),
        "peft": lambda: peer(x),
        EAGER: lambda: ours(x),
    }
    leaves = [x, a, b, *(p for p in ours.parameters() if p.requires_grad)]
    product = 2.0 * tokens * width * width
    adapter = 4.0 * tokens * width * 16
    reads = x.nbytes + base.weight.nbytes
    text = f"{tokens} tokens, {width} x {width}, rank 16"
    return Case(
        "lora_linear", text, ways, leaves, reads, x.nbytes, product + adapter, product + 2 * adapter
    )


def attention(tokens: int, dtype: torch.dtype, device: str) -> Case:
    """Packed attention of the pairwise head's encoder: sequences of many lengths, 16 heads of 64."""
    from heads.pairwise.functional import packed_attention

    lengths = [tokens // 32 * k // 8 for k in (2, 4, 6, 8, 8, 10, 12, 14)] * 4
    ends = torch.tensor([0, *lengths]).cumsum(0).tolist()
    total, longest = ends[-1], max(lengths)
    made = {"dtype": dtype, "device": device, "requires_grad": True}
    q, k, v = (torch.randn(total, 16, 64, **made) for _ in range(3))
    starts = torch.tensor(ends[:-1], device=device)
    sizes = torch.tensor(lengths, device=device)
    places = torch.arange(longest, device=device)
    real = places < sizes[:, None]  # (S, L)
    rows = (starts[:, None] + places).clamp(max=total - 1)
    mask = real[:, None, None, :]

    def plain() -> Tensor:
        parts = (t[rows].transpose(1, 2) for t in (q, k, v))
        return F.scaled_dot_product_attention(*parts, attn_mask=mask).transpose(1, 2)[real]

    ways = {
        PLAIN: plain,
        COMPILED: compiled(plain),
        EAGER: lambda: packed_attention(q, k, v, ends, impl="eager"),
    }
    if device == "cuda":
        ways[FUSED] = lambda: packed_attention(q, k, v, ends, impl="fused")
    flops = sum(4.0 * n * n * 16 * 64 for n in lengths)
    text = f"32 sequences of {min(lengths)} to {longest} tokens, 16 heads of 64"
    return Case(
        "packed_attention", text, ways, [q, k, v], 3 * q.nbytes, 3 * q.nbytes, flops, 2.5 * flops
    )


def thinking(rows: int, width: int, dtype: torch.dtype, device: str) -> Case:
    """Four thinking steps over 2,048 input tokens, whose fused path is torch's attention."""
    from torch.utils.flop_counter import FlopCounterMode

    from thinker import LatentThinker

    tokens = torch.randint(16, (rows, 2048), device=device)
    model = LatentThinker(
        vocab_size=16,
        hidden_size=width,
        num_latents=32,
        max_input_length=2048,
        max_output_length=20,
    ).to(device, dtype)
    model.check_inputs = False

    def ours() -> Tensor:
        return model(tokens, n_step=4, out_len=20).logits

    def plain() -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return ours()

    with FlopCounterMode(display=False) as counter, torch.no_grad():
        plain()
    flops = float(counter.get_total_flops())
    ways = {PLAIN: plain, COMPILED: compiled(plain), FUSED: ours, "ours, compiled": compiled(ours)}
    leaves = list(model.parameters())
    text = f"{rows} x 2048 tokens, 32 latents of {width}, 4 steps"
    weights = sum(leaf.nbytes for leaf in leaves)
    reads = tokens.nbytes + weights
    return Case("LatentThinker", text, ways, leaves, reads, weights, flops, 2 * flops)


def cases(dtype: torch.dtype, device: str) -> Iterator[Case]:
    """Yield all operations, at sizes that fill the device."""
    cuda = device == "cuda"
    for tokens in (2048, 16384) if cuda else (512,):
        yield masks(tokens, 4096 if cuda else 1024, dtype, device)
        yield kronecker(tokens, 64 if cuda else 32, dtype, device)
        yield lora(tokens, 4096 if cuda else 1024, dtype, device)
    yield attention(16384 if cuda else 2048, dtype, device)
    yield thinking(*((64, 256) if cuda else (2, 64)), dtype, device)


def rates(dtype: torch.dtype, device: str) -> tuple[float, float]:
    """Bytes a second of a large copy, both directions counted, and operations of a product."""
    cuda = device == "cuda"
    source = torch.randn(1 << (28 if cuda else 25), device=device)
    target = torch.empty_like(source)
    side = 8192 if cuda else 1024
    left, right = (torch.randn(side, side, dtype=dtype, device=device) for _ in range(2))
    held = interleave(
        {"copy": lambda: target.copy_(source), "product": lambda: left @ right}, 7, device
    )
    copy, product = (statistics.median(wall for _, wall in times) for times in held.values())
    return 2 * source.nbytes / copy, 2 * side**3 / product


def steps_of(case: Case, training: bool, repeat: int) -> dict[str, Callable[[], None]]:
    """Return for each way a function that runs it ``repeat`` times."""
    output = next(iter(case.ways.values()))()
    grad = torch.randn_like(output)

    def step(way: Callable[[], Tensor]) -> Callable[[], None]:
        def run() -> None:
            for _ in range(repeat):
                if not training:
                    with torch.no_grad():
                        way()
                    continue
                way().backward(grad)
                for leaf in case.learns:
                    leaf.grad = None

        return run

    return {name: step(way) for name, way in case.ways.items()}


def measure(case: Case, training: bool, dtype: torch.dtype, device: str, runs: int) -> list[Row]:
    """Return rows of all ways of one case, in turn."""
    repeat = 10 if device == "cuda" else 1
    mode = "forward + backward" if training else "forward"
    made = ("torch", "transformers", "peft")
    # two warm turns: the first one compiles
    steps = steps_of(case, training, repeat)
    for step in steps.values():
        step()
    rows = []
    for way, times in interleave(steps, runs, device).items():
        each = [(cpu / repeat, wall / repeat) for cpu, wall in times]
        peak = cuda_peak(steps[way]) if device == "cuda" else 0
        rows.append(
            Row.of(
                case.op, way, mode, str(dtype), case.text, each, peak, device=device, packages=made
            )
        )
    return rows


def section() -> list[str]:
    """Return the part of docs/performance.md: a line for each operation, size and mode."""
    lines = [
        "## Fused paths",
        "",
        "Median times in milliseconds. All variants run alternately in one process, and each "
        'operation, size and mode has one line. "floor" is a lower bound on the time (a roofline): '
        "the larger of (1) the fewest operations that the result needs, divided by the rate of a "
        "large matrix product, and (2) the fewest bytes that must be moved, divided by the rate "
        "of a large copy. Both rates are measured in the same process. "
        '"library" is a trainable `nn.Linear` for masks and '
        'Kronecker factors, and peft for LoRA. "plain" is the formula in torch; "eager" and '
        '"fused" are the paths of this library. For `LatentThinker`, "plain" and "fused" are '
        "the same model with torch's plain and fused attention. On the GPU, times below about "
        "0.3 ms are mostly the time to start kernels; on a shared CPU the rates of the lower "
        "bound vary, too.",
        "",
    ]
    rows = latest("fused_paths.csv")
    for hardware in dict.fromkeys(row["hardware"] for row in rows):
        own = [row for row in rows if row["hardware"] == hardware]
        made = dict.fromkeys(f"{row['date']} at {row['commit']}" for row in own)
        lines += [
            f"{hardware}; {own[0]['versions']}; {', '.join(made)}. "
            "[All rows](measured/fused_paths.csv).",
            "",
            f"| operation | dtype | mode | floor | library | {PLAIN} | {COMPILED} | eager | fused "
            "| fused, compiled |",
            "|---" * 10 + "|",
        ]
        for key in dict.fromkeys((r["op"], r["shape"], r["dtype"], r["mode"]) for r in own):
            times = {
                r["impl"]: float(r["wall_p50"]) * 1e3
                for r in own
                if (r["op"], r["shape"], r["dtype"], r["mode"]) == key
            }
            library = next((times[name] for name in LIBRARIES if name in times), None)
            cells = [times.get("floor"), library, *(times.get(name) for name in WAYS)]
            op, shape, dtype, mode = key
            told = " | ".join("" if t is None else f"{t:.3g}" for t in cells)
            lines.append(f"| {op}, {shape} | {dtype} | {mode} | {told} |")
        lines.append("")
    return lines


def main(arguments: list[str] | None = None) -> None:
    """Measure and append rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--only", help="measure this operation alone")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    dtypes = [torch.bfloat16] if options.device == "cuda" else [torch.float32, torch.bfloat16]
    for dtype in dtypes:
        copy_rate, product_rate = rates(dtype, options.device)
        print(
            f"{dtype}: copy {copy_rate / 1e9:.0f} GB/s, product {product_rate / 1e12:.2f} TFLOP/s"
        )
        for case in cases(dtype, options.device):
            if options.only not in (None, case.op):
                continue
            for training in (False, True):
                begun = time.perf_counter()
                rows = measure(case, training, dtype, options.device, options.runs)
                floor = case.floor(training, copy_rate, product_rate)
                rows.append(
                    Row.of(
                        case.op,
                        "floor",
                        rows[0].mode,
                        str(dtype),
                        case.text,
                        [(floor, floor)],
                        0,
                        device=options.device,
                    )
                )
                append("fused_paths.csv", rows)
                told = ", ".join(f"{row.impl} {1e3 * row.wall_p50:.3f}" for row in rows)
                took = time.perf_counter() - begun
                print(
                    f"{case.op}, {case.text}, {rows[0].mode}, ms: {told} ({took:.0f} s)", flush=True
                )


if __name__ == "__main__":
    main()
