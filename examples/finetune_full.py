"""Full fine-tuning on instructions, to compare LoRA with: the same data, the same table of runs.

    python examples/finetune_full.py                            # a small GPT-2 learns which word to say; 3 minutes
    python examples/finetune_full.py --data rows.json --model openai-community/gpt2-medium --lr 5e-5

Writes OUT/NAME/model, and OUT/runs.csv with OUT/runs.png (matplotlib, extra `plot`).
"""

from finetuning import finetune, parse


def main() -> None:
    def prepare(base):
        count = sum(p.numel() for p in base.parameters())
        size = sum(p.nbytes for p in base.parameters()) / 2**20
        print(f"parameters          {count:>16,}\n  trainable         {count:>16,}  (100.00%)")
        print(f"weights, gradients and AdamW's moments  {4 * size:.1f} MB")
        return base

    finetune(parse(__doc__, name="full", lr=5e-4).parse_args(), prepare)


if __name__ == "__main__":
    main()
