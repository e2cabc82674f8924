"""Learning masks over ever deeper models: the memory of a whole job, from files to the baked model.

`Merger` holds both models, takes one step and bakes. Each job runs in a process of its own; the
peak is what the job adds to the imports.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from tests.benchmarks.measure import run_alone
from tests.benchmarks.results import Row, append

BLOCKS = (2, 4, 8, 12)
LENGTH, EXAMPLES = 64, 16


def save_models(folder: Path, blocks: int) -> list[str]:
    """Two random Llamas of that many blocks (3.5M parameters each), 4,096 tokens."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=4096,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=blocks,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
    )
    paths = []
    for seed in range(2):
        torch.manual_seed(seed)
        paths.append(str(folder / f"{blocks} {seed}"))
        transformers.LlamaForCausalLM(config).save_pretrained(paths[-1])
    return paths


def prepare(paths: list[str], out: str) -> Callable[[], object]:
    """Return the whole job."""
    from mergekit_lite.masks import KLConfig, Merger

    torch.set_num_threads(1)
    ids = torch.randint(4096, (EXAMPLES, LENGTH), generator=torch.Generator().manual_seed(0))

    def whole() -> None:
        merger = Merger.from_pretrained(paths).train()
        task = torch.arange(EXAMPLES) % 2
        merger(kl=KLConfig(), input_ids=ids[:8], task=task[:8]).loss.backward()
        merger.eval().bake(out, progress=False)

    return whole


def main(arguments: list[str] | None = None) -> None:
    """Measure and append rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args(arguments)
    for blocks in BLOCKS:
        with tempfile.TemporaryDirectory() as folder:
            paths = save_models(Path(folder), blocks)
            results = [run_alone(prepare, paths, f"{folder}/{run}") for run in range(options.runs)]
        peak, times = max(r[0] for r in results), [r[1] for r in results]
        made = (
            "masks, a whole job",
            "Merger",
            "one step a block",
            "torch.float32",
            f"two Llamas of {blocks} blocks",
        )
        row = Row.of(*made, times, peak, packages=("torch", "transformers"))
        print(f"{blocks} blocks: peak {peak / 1e6:.0f} MB, {row.wall_p50:.2f} s", flush=True)
        append("mask_depth.csv", [row])


if __name__ == "__main__":
    main()
