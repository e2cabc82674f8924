"""Tune a model with each setting in a grid of ranks, alphas, learning rates and batch sizes.

    python examples/sweep_lora.py           # 16 runs of a small GPT-2 on made-up rows

`model-components lora sweep MODEL ROWS GRID OUT` does the same for your model and rows.
"""

import argparse
from pathlib import Path

from which_word import make_base, make_rows

from heads.lora import sweep

GRID = {
    "r": [8, 64],
    "lora_alpha": [16.0, 32.0],
    "learning_rate": [5e-4, 2e-3],
    "batch_size": [4, 8],
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs/sweep"), help="output folder")
    parser.add_argument("--ranks", type=int, nargs="+", default=GRID["r"])
    parser.add_argument("--steps", type=int, help="training steps; default: one pass over the rows")
    parser.add_argument(
        "--base-steps", type=int, default=1500, help="training steps of the small GPT-2"
    )
    args = parser.parse_args()
    base = make_base(args.out / "base", args.base_steps)
    grid = GRID | {"r": args.ranks}
    print(sweep(base, make_rows(), grid, out=args.out, epochs=1.0, max_steps=args.steps))


if __name__ == "__main__":
    main()
