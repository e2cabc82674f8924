"""Tune a language model with LoRA, and look at the curve of its loss.

    python examples/finetune_lora.py                              # made-up rows; 3 minutes
    python examples/finetune_lora.py --model FOLDER --rows FILE   # yours

Without a model, a small GPT-2 of its own is trained first. Nothing is downloaded, unless a hub id
is given. `model-components lora tune --help` has all settings.
"""

import argparse
from pathlib import Path

from heads.lora import tune


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="folder or hub id of a causal language model")
    parser.add_argument("--rows", help="file of rows, such as instruction and output")
    parser.add_argument("--out", type=Path, default=Path("runs/finetuning"))
    parser.add_argument("--steps", type=int, help="default: three passes over the rows")
    parser.add_argument("--base-steps", type=int, default=1500, help="of the small GPT-2")
    given = parser.parse_args()
    if (given.model is None) != (given.rows is None):
        parser.error("expected --model and --rows together, or neither")
    model, rows, rate = given.model, given.rows, None
    if model is None:
        from which_word import make_base, make_rows

        model, rows = make_base(given.out / "base", given.base_steps), make_rows(2400)
        rate = 2e-3  # a model this small wants a higher rate
    report = tune(
        model,
        rows,
        out=given.out / "lora",
        judge="likelihood",
        learning_rate=rate,
        max_steps=given.steps,
    )
    print(report)


if __name__ == "__main__":
    main()
