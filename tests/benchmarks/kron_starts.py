"""Every start on a real 6-layer encoder, before any training: cosine of its embeddings to the
original's.

Calibration and held-out texts are answers from `shared/data`; skipped where that or the encoder's
package is absent.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from dataclasses import replace

import torch

from kronecker import KroneckerConfig, convert_
from tests.benchmarks.results import KRONECKER_GUIDE, RESULTS, commit, put, today
from tests.support import real

FOUND = RESULTS / "kron_starts.json"
SETTINGS = {
    "half, B (2, 1)": KroneckerConfig(b_shape=(2, 1)),
    "half, B (1, 2)": KroneckerConfig(b_shape=(1, 2)),
    "quarter, B (4, 1)": KroneckerConfig(b_shape=(4, 1)),
    "quarter, B (2, 2)": KroneckerConfig(b_shape=(2, 2)),
}
STARTS = {
    "random": {"init": "random"},
    "van_loan": {"init": "van_loan"},
    "prune": {"init": "prune"},
    "sequential, epochs=0": {"epochs": 0},
    "sequential": {},
}


def write_table() -> None:
    """The guide's table, from the committed results."""
    if not FOUND.exists():
        return
    found = json.loads(FOUND.read_text(encoding="utf-8"))
    lines = [
        f"| FFN parameters kept | {' | '.join(f'`{s}`' for s in STARTS)} |",
        "|---" * (len(STARTS) + 1) + "|",
    ]
    for name, row in found["rows"].items():
        lines.append(f"| {name} | {' | '.join(f'{row[s]:.3f}' for s in STARTS)} |")
    text = (
        f"{found['tokens']:,} calibration tokens, 96 held-out texts. Measured {found['date']} at "
        f"{found['commit']}."
    )
    put(KRONECKER_GUIDE, [*lines, "", text], "starts")


def main(arguments: list[str] | None = None) -> None:
    """Run every start and write the results and the guide's table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", help="not looked at: it is not timed")
    parser.parse_args(arguments)
    try:
        folder, rows = real.minilm(), real.alpaca(5000)
    except real.AbsentError as error:
        print(f"kron_starts: skipped, {error}")
        return
    from transformers import AutoTokenizer, BertModel

    model, tokenizer = (
        BertModel.from_pretrained(folder).eval(),
        AutoTokenizer.from_pretrained(folder),
    )
    texts = [t for r in rows if len(t := r["output"]) > 200]

    def batches(chosen: list[str]) -> list[dict]:
        made = []
        for i in range(0, len(chosen), 16):
            batch = tokenizer(
                chosen[i : i + 16],
                padding=True,
                truncation=True,
                max_length=128,
                return_tensors="pt",
            )
            made.append({k: batch[k] for k in ("input_ids", "attention_mask")})
        return made

    held, calibration = batches(texts[:96]), batches(texts[200:328])

    @torch.no_grad()
    def embed(encoder: torch.nn.Module) -> torch.Tensor:
        made = []
        for batch in held:
            states, mask = encoder(**batch).last_hidden_state, batch["attention_mask"][..., None]
            made.append((states * mask).sum(1) / mask.sum(1))
        return torch.cat(made)

    original, rows = embed(model), {}
    for name, config in SETTINGS.items():
        rows[name] = {}
        for start, fields in STARTS.items():
            torch.manual_seed(0)
            small, begin = copy.deepcopy(model), time.perf_counter()
            convert_(small, replace(config, **fields), calibration=calibration, progress=False)
            cosine = torch.cosine_similarity(embed(small), original, dim=-1).mean()
            rows[name][start] = round(float(cosine), 4)
            print(
                name, start, rows[name][start], f"{time.perf_counter() - begin:.0f} s", flush=True
            )
    tokens = sum(int(b["attention_mask"].sum()) for b in calibration)
    found = {"date": today(), "commit": commit(), "tokens": tokens, "rows": rows}
    FOUND.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    write_table()


if __name__ == "__main__":
    main()
