"""LoRA on instructions: loss, perplexity, samples, a judge's score and a line in a table of runs.

    python examples/finetune_lora.py                            # a small GPT-2 learns which word to say; 3 minutes
    python examples/finetune_lora.py --rank 64 --merge          # the same rate serves every rank
    python examples/finetune_lora.py --data rows.json --model openai-community/gpt2-medium --lr 2e-4 --dtype bfloat16

The rate of 2e-3 is for the small model; large ones take about 2e-4, and less with --loraplus or --rslora.
GPT-2's fused q, k, v projection gets an adapter for each of the three: OUT/NAME/model loads with `load_lora`, and
OUT/NAME/stock in plain peft. --merge writes OUT/NAME/merged. OUT/runs.csv and runs.png (matplotlib, extra `plot`) keep
all runs. Nothing is downloaded unless it is named.
"""

from common import remove_earlier
from finetuning import finetune, parse
from peft import LoraConfig

from heads.lora import export_lora, lora_report, merge_lora, prepare_lora


def main() -> None:
    parser = parse(__doc__, name="lora", lr=2e-3)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--alpha", type=float, default=32)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--rslora", action="store_true", help="scale by alpha / sqrt(rank)")
    parser.add_argument("--loraplus", type=float, help="B's learning rate over A's, such as 16")
    parser.add_argument(
        "--targets", nargs="*", help="names of layers (default: all linear ones; in GPT-2 also the head)"
    )
    parser.add_argument("--merge", action="store_true", help="also write a full checkpoint")
    given = parser.parse_args()
    held = []

    def prepare(base):
        fused = base.config.model_type == "gpt2"
        targets = given.targets or (["c_attn", "c_proj", "c_fc", "lm_head"] if fused else "all-linear")
        config = LoraConfig(
            r=given.rank, lora_alpha=given.alpha, lora_dropout=given.dropout, use_rslora=given.rslora,
            target_modules=targets, task_type="CAUSAL_LM",
        )  # fmt: skip
        model = prepare_lora(base, config, split_fused_qkv=fused and given.targets is None)
        print(lora_report(model, batch=given.batch, context=given.max_length))
        held[:] = model, fused and given.targets is None
        return model

    finetune(given, prepare)
    out = given.out / given.name
    for name in ("stock", "merged"):
        remove_earlier(out / name)
    if held[1]:
        export_lora(held[0], out / "stock")
    if given.merge:
        print(merge_lora(held[0], out / "merged"))


if __name__ == "__main__":
    main()
