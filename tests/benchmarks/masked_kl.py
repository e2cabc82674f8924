"""masked_kl with its gradients: ours, and the plain way with whole logits.

The floor is four products, of the teacher's head once and of the student's three times: 8 N H V
FLOPs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
import torch.nn.functional as F

from mergekit_lite.masks import masked_kl
from tests.benchmarks.measure import interleave, run_alone
from tests.benchmarks.results import Row, append

IMPLS = ("masked_kl", "plain")


def prepare(
    impl: str, tokens: int, hidden: int, vocabulary: int, dtype: torch.dtype, device: str
) -> Callable[[], object]:
    """The loss of one batch, half of it of each task, and its gradients."""
    torch.manual_seed(0)
    made = {"dtype": dtype, "device": device}
    student = torch.randn(tokens, hidden, **made).requires_grad_()
    teachers = [torch.randn(tokens, hidden, **made) for _ in range(2)]
    heads = [torch.randn(vocabulary, hidden, **made) * 0.02 for _ in range(2)]
    masks = torch.full((2, 1, hidden), 0.5, device=device, requires_grad=True)
    task = torch.arange(tokens, device=device) % 2
    shares = F.one_hot(task, 2).float()

    def ours() -> torch.Tensor:
        return masked_kl(student, teachers, heads, masks, coefficients=shares)

    def plain() -> torch.Tensor:
        with torch.no_grad():
            own = [t[task == k] @ heads[k].T for k, t in enumerate(teachers)]
            logits = own[0].new_empty(tokens, vocabulary)
            for k in range(2):
                logits[task == k] = own[k]
            del own
            target = F.softmax(logits.float(), -1)
            del logits
        weight = (masks[0] * heads[0] + masks[1] * heads[1]).to(dtype)
        return F.kl_div(
            F.log_softmax((student @ weight.T).float(), -1), target, reduction="batchmean"
        )

    def step() -> None:
        (ours if impl == "masked_kl" else plain)().backward()
        student.grad = masks.grad = None

    return step


def main(arguments: list[str] | None = None) -> None:
    """Measure and append rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args(arguments)
    cuda = options.device == "cuda"
    shapes = [(8192, 3072, 128256), (2048, 768, 50257)] if cuda else [(2048, 768, 50257)]
    rows = []
    for shape in shapes:
        for dtype in (torch.bfloat16,) if cuda else (torch.float32,):
            place = (*shape, dtype, options.device)
            steps = {impl: prepare(impl, *place) for impl in IMPLS}
            for impl, results in interleave(steps, options.runs, options.device).items():
                peak = run_alone(prepare, impl, *place, device=options.device)[0]
                described = "{} positions, hidden {}, vocabulary {}, 2 components".format(*shape)
                made = ("masked_kl", impl, "loss + gradients", str(dtype), described, results, peak)
                rows.append(Row.of(*made, device=options.device))
                append("masked_kl.csv", rows[-1:])
                part = peak / (shape[0] * shape[2] * 4)
                print(
                    f"{described} {impl}: {rows[-1].wall_p50:.2f} s, peak {part:.2f} of one "
                    "float32 logits tensor"
                )


if __name__ == "__main__":
    main()
