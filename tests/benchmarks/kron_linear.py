"""kron_linear against `nn.Linear`, `torch.kron`, einsum and tensorly-torch, with the presets'
shapes.

tensorly-torch's is its factorised layer, a block tensor train of two cores: the same sum of
Kronecker products. One token is timed over twelve layers with weights of their own, as in decoding:
no cache holds them all.
"""

from __future__ import annotations

import argparse
import importlib.util
import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F

from kronecker import kron_linear, reference
from tests.benchmarks.measure import interleave, run_alone, saved_bytes
from tests.benchmarks.results import Row, append

IMPLS = ("nn.Linear", "kron_linear", "torch.kron", "einsum", "tensorly-torch")
SHAPES = (
    ((3072, 384), (1, 2), (1, 4)),
    ((384, 3072), (2, 1), (1,)),
    ((1536, 768), (2, 1), (1,)),
    ((768, 768), (4, 1), (1, 2, 4)),
    ((1536, 384), (2, 2), (1, 4)),
    ((1024, 256), (3, 3), (1, 2, 4)),
    ((256, 64), (12, 12), (2, 4)),
    ((64, 32), (48, 24), (1,)),
    ((32, 32), (32, 32), (1,)),
    ((64, 64), (64, 64), (1,)),
)
LAYERS = 12  # of one-token decoding


def prepare(
    impl: str,
    a_shape: tuple,
    b_shape: tuple,
    rank: int,
    tokens: int,
    dtype: torch.dtype,
    device: str,
    backward: bool,
    seed: int = 0,
) -> Callable[[], object]:
    """A step with leaves of its own; ``step.forward`` and ``step.resident`` serve `saved_bytes`."""
    generator = torch.Generator().manual_seed(seed)
    (o1, i1), (o2, i2) = a_shape, b_shape

    def draw(*shape: int) -> torch.Tensor:
        made = torch.randn(shape, generator=generator).to(device, dtype)
        return made.requires_grad_(backward)

    x, grad = draw(tokens, i1 * i2), draw(tokens, o1 * o2).detach()
    leaves = [x]
    if impl == "nn.Linear":
        leaves.append(draw(o1 * o2, i1 * i2))
    elif impl != "tensorly-torch":
        leaves += [draw(rank, o1, i1), draw(rank, o2, i2)]
    if impl == "tensorly-torch":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from tltorch import FactorizedLinear

            layer = FactorizedLinear(
                (i1, i2),
                (o1, o2),
                bias=False,
                factorization="blocktt",
                rank=(1, rank, 1),
                implementation="factorized",
            ).to(device, dtype)
        leaves += list(layer.parameters())

    def einsum() -> torch.Tensor:
        y = torch.einsum("nuv,rpu,rqv->npq", x.view(-1, i1, i2), *leaves[1:])
        return y.reshape(tokens, -1)

    forward = {
        "nn.Linear": lambda: F.linear(x, leaves[1]),
        "kron_linear": lambda: kron_linear(x, *leaves[1:]),
        "torch.kron": lambda: reference.kron_linear(x, *leaves[1:]),
        "einsum": einsum,
        "tensorly-torch": lambda: layer(x),
    }[impl]

    def step() -> object:
        if not backward:
            with torch.no_grad():
                return forward()
        forward().backward(grad)
        for leaf in leaves:
            leaf.grad = None
        return None

    step.forward, step.resident = forward, sum(leaf.nbytes for leaf in leaves[1:])
    return step


def measure(impls, place: tuple, runs: int, options: argparse.Namespace, peak: bool) -> list[Row]:
    """Rows of all implementations of one case, in turn."""
    a_shape, b_shape, rank, tokens, dtype, device, backward = place
    many, peer = LAYERS if tokens == 1 else 1, importlib.util.find_spec("tltorch") is not None
    impls = [i for i in impls if peer or i != "tensorly-torch"]
    steps = {impl: [prepare(impl, *place, seed) for seed in range(many)] for impl in impls}
    turns = {impl: (lambda held=held: [step() for step in held]) for impl, held in steps.items()}
    rows = []
    for impl, results in interleave(turns, runs, device).items():
        first = steps[impl][0]
        saved = saved_bytes(first.forward, first.resident) if backward else ""
        top = run_alone(prepare, impl, *place, device=device)[0] if peak else 0
        mode = "forward + backward" if backward else "forward"
        text = (
            f"{tokens} tokens, {rank} x {a_shape} ⊗ {b_shape}"
            if tokens > 1
            else f"{LAYERS} layers of 1 token, {rank} x {a_shape} ⊗ {b_shape}"
        )
        rows.append(
            Row.of(
                "kron_linear",
                impl,
                mode,
                str(dtype),
                text,
                results,
                top,
                saved=saved,
                device=device,
                packages=("torch", *(["tensorly-torch"] if peer else [])),
            )
        )
    base = rows[0].cpu_p50
    print(text, dtype, mode, {r.impl: round(r.cpu_p50 / base, 2) for r in rows}, flush=True)
    return rows


def main(arguments: list[str] | None = None) -> None:
    """Measure and append rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--runs", type=int, default=7)
    options = parser.parse_args(arguments)
    cuda = options.device == "cuda"
    tokens, dtype = (16384, torch.bfloat16) if cuda else (1024, torch.float32)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for a_shape, b_shape, ranks in SHAPES:
            for rank in ranks:
                for backward in (False, True):
                    place = (a_shape, b_shape, rank, tokens, dtype, options.device, backward)
                    append(
                        "kron_linear.csv", measure(IMPLS, place, options.runs, options, peak=False)
                    )
                place = (a_shape, b_shape, rank, 1, dtype, options.device, False)
                append(
                    "kron_linear.csv",
                    measure(
                        IMPLS[:3] if rank < 4 else IMPLS[:2],
                        place,
                        4 * options.runs,
                        options,
                        peak=False,
                    ),
                )
        if not cuda:
            for a_shape, b_shape, rank in (
                ((1536, 768), (2, 1), 1),
                ((768, 768), (4, 1), 1),
                ((1024, 256), (3, 3), 4),
            ):
                for backward in (False, True):
                    place = (
                        a_shape,
                        b_shape,
                        rank,
                        tokens,
                        torch.bfloat16,
                        options.device,
                        backward,
                    )
                    append(
                        "kron_linear.csv",
                        measure(IMPLS[:3], place, options.runs, options, peak=backward),
                    )
    finally:
        torch.set_num_threads(threads)


if __name__ == "__main__":
    main()
