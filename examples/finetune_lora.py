"""Tune a language model with LoRA, and plot its loss curve in OUT/lora/curves.png.

    python examples/finetune_lora.py                             # made-up rows; 2 minutes
    python examples/finetune_lora.py --model FOLDER --rows FILE  # yours

Without a model, a small GPT-2 is trained from scratch first. Nothing is downloaded, unless --model
or --rows is a hub id. `model-components lora tune --help` lists all settings.
"""

import argparse
from pathlib import Path

from heads.lora import tune


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="folder or hub id of a causal language model")
    parser.add_argument("--rows", help="file of rows, such as rows of instruction and output")
    parser.add_argument("--out", type=Path, default=Path("runs/finetuning"), help="output folder")
    parser.add_argument(
        "--steps", type=int, help="training steps; default: three passes over the rows"
    )
    parser.add_argument(
        "--base-steps", type=int, default=1500, help="training steps of the small GPT-2"
    )
    args = parser.parse_args()
    if (args.model is None) != (args.rows is None):
        parser.error("expected --model and --rows together, or neither")
    model = args.model
    rows = args.rows
    rate = None
    if model is None:
        from which_word import make_base, make_rows

        model = make_base(args.out / "base", args.base_steps)
        rows = make_rows()
        rate = 2e-3  # a model this small needs a higher rate
    report = tune(
        model,
        rows,
        out=args.out / "lora",
        judge="likelihood_gain",
        learning_rate=rate,
        max_steps=args.steps,
    )
    print(report)


if __name__ == "__main__":
    main()
