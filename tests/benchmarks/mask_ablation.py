"""Granularity × constraint × coefficients × initial masks on the demo: ablation.json to a JSON of results.

Not timed: what is compared is the accuracy of the baked merge on both tasks, and the last loss.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path

import torch

from mergekit_lite.masks import KLConfig, MaskCollator, MaskConfig, MaskTrainer, Merger, TaskMixture
from tests.benchmarks.ablations import settings
from tests.benchmarks.results import GUIDE, RESULTS, ROOT, commit, put, today

CONFIG, FOUND = Path(__file__).parent / "ablation.json", RESULTS / "mask_ablation.json"
sys.path.insert(0, str(ROOT / "examples"))


def run(setting: dict[str, str], config: dict, components: list[Path], data: TaskMixture) -> dict:
    """Train the demo's masks under one setting, bake, and look."""
    from transformers import GPT2LMHeadModel, set_seed
    from two_tasks import accuracy, arguments, make_tokenizer

    set_seed(0)
    own = {k: setting[k] for k in ("granularity", "constraint", "initial")}
    merger = Merger.from_pretrained(components, **MaskConfig(**own).__dict__)
    with tempfile.TemporaryDirectory() as folder:
        options = arguments(Path(folder) / "trainer", config["steps"], config["learning_rate"])
        options.disable_tqdm = True
        kl, collator = KLConfig(coefficients=setting["coefficients"]), MaskCollator(pad_token_id=0)
        trainer = MaskTrainer(merger, options, kl=kl, train_dataset=data, data_collator=collator)
        loss = trainer.train().training_loss
        merger.bake(Path(folder) / "baked", progress=False)
        baked, tokenizer = GPT2LMHeadModel.from_pretrained(Path(folder) / "baked"), make_tokenizer()
    scores = {task: accuracy(baked, tokenizer, task) for task in ("reverse", "upper")}
    return setting | scores | {"loss": round(loss, 4)}


@torch.no_grad()
def differences(components: list[Path], data: TaskMixture) -> dict[str, float]:
    """How far an efficient merger's logits are from its baked checkpoint's, as a share of the largest."""
    found = {}
    batch = MaskCollator(pad_token_id=0)([data[i] for i in range(0, len(data), len(data) // 200)])
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        made = {
            mode: Merger.from_pretrained(components, dtype=dtype, mode=mode, initial="random")(
                input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]
            ).logits.float()
            for mode in ("accurate", "efficient")  # accurate has the bits of the baked checkpoint
        }
        gap = (made["efficient"] - made["accurate"]).abs().max() / made["accurate"].abs().max()
        found[str(dtype).removeprefix("torch.")] = float(f"{float(gap):.2g}")
    return found


def write_table() -> None:
    """The guide's table, from the committed results."""
    if not FOUND.exists():
        return
    found = json.loads(FOUND.read_text(encoding="utf-8"))
    lines = [
        "| granularity | constraint | coefficients | initial | reverse | upper |",
        "|---|---|---|---|---|---|",
    ]
    for row in found["rows"]:
        names = " | ".join(row[k] for k in ("granularity", "constraint", "coefficients", "initial"))
        lines.append(f"| {names} | {row['reverse']:.1%} | {row['upper']:.1%} |")
    lines += ["", f"Measured {found['date']} at {found['commit']}; one seed, 200 held-out words a task."]
    put(GUIDE, lines, "ablation")
    gaps = ", ".join(f"{gap:g} in {dtype}" for dtype, gap in found["efficient"].items())
    text = f"On the demo's model, as a share of the largest logit: {gaps} ({found['date']}, {found['commit']})."
    put(GUIDE, [text], "difference")


def main(arguments: list[str] | None = None) -> None:
    """Run every setting and write the results and the guide's table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", help="not looked at: it is not timed")
    parser.add_argument("--steps", type=int, help="instead of the config's")
    options = parser.parse_args(arguments)
    from two_tasks import dataset, make_specialists, make_tokenizer

    config = json.loads(CONFIG.read_text(encoding="utf-8"))
    config |= {"steps": options.steps} if options.steps else {}
    work = Path(__file__).parent / "work" / "ablation"
    shutil.rmtree(work, ignore_errors=True)
    torch.manual_seed(0)
    make_specialists(work, smoke=False)
    data = TaskMixture([dataset(make_tokenizer(), task, 10_000) for task in ("reverse", "upper")])
    rows = []
    for setting in settings(config):
        rows.append(run(setting, config, [work / "reverse", work / "upper"], data))
        print(rows[-1], flush=True)
    gaps = differences([work / "reverse", work / "upper"], data)
    found = {"date": today(), "commit": commit(), "config": config, "efficient": gaps, "rows": rows}
    FOUND.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    write_table()


if __name__ == "__main__":
    main()
