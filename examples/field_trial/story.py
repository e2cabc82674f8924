"""The code that the chapters of the field trial share.

It has the flags, the stored results of a run, and the models of the stages by name.
"""

import argparse
import json
import resource
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

sys.path.append(str(Path(__file__).parents[1]))  # modules that all examples share
from specialists import KINDS, Trial

from mergekit_lite import merge_models


class Story(Trial):
    """A base model, two specialists of it, and the models made from them.

    Every result is stored in OUT, and no result is computed twice.
    """

    # steps and rate of each kind's specialist; fewer steps than `train_masks_on_instructions.py`
    # has, because all chapters together should take at most 90 CPU minutes
    tuned = ((60, 1e-3), (70, 2e-3))

    def models(self) -> dict[str, Path]:
        """Return the folders of the stages that exist, in the order of the chapters."""
        stages = ("merged", "pruned", "pruned, trained back")
        folders = {
            "base": Path(self.model),
            **{stage: self.out / "models" / stage for stage in stages},
        }
        return {
            name: folder for name, folder in folders.items() if (folder / "config.json").is_file()
        }

    def figure(self, chapter: str, name: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Print and return the results of ``make``, which runs only if they are not stored yet."""
        file = self.out / "figures" / chapter / f"{name}.json"
        if not file.is_file():
            begin = cpu_seconds()
            found = {
                **make(),
                "cpu_seconds": round(cpu_seconds() - begin, 1),
                "settings": self.settings,
            }
            file.parent.mkdir(parents=True, exist_ok=True)
            part = file.with_suffix(".partial")
            part.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
            part.rename(file)
        found = json.loads(file.read_text(encoding="utf-8"))
        if found.pop("settings") != self.settings:
            sys.exit(f"{file} belongs to a run with other settings; choose another --out")
        shown = (
            f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}"
            for k, v in found.items()
            if _short(v)
        )
        print(f"{name:34s} {', '.join(shown)}", flush=True)
        return found

    def keep_model(self, stage: str, model: Any) -> Path:
        """Write a stage's checkpoint if there is none, and return the folder.

        The folder appears only when the checkpoint is complete.
        """
        folder = self.out / "models" / stage
        if not folder.is_dir():
            part = folder.with_name(f".{stage}.partial")
            model.save_pretrained(part)
            self.tokenizer.save_pretrained(part)
            part.rename(folder)
        return folder

    def checkpoint_of(self, k: int) -> Path:
        """Return the folder of a specialist with its adapter merged in.

        Some programs do not accept adapters.
        """
        folder = self.out / "models" / list(KINDS)[k]
        if not folder.is_dir():
            merge_models(
                [self.components[k]],
                "linear",
                weight=[1.0],
                out=folder,
                dtype="bfloat16",
                progress=False,
            )
        return folder

    def texts(self, examples: Sequence[dict[str, Any]]) -> list[dict[str, str]]:
        """Return examples as rows of two texts, ``prompt`` and ``completion``."""
        rows = []
        for example in examples:
            pairs = list(zip(example["input_ids"], example["labels"], strict=True))
            prompt = self.tokenizer.decode([token for token, label in pairs if label == -100])
            answer = [token for token, label in pairs if label != -100]
            completion = self.tokenizer.decode(answer, skip_special_tokens=True)
            rows.append({"prompt": prompt, "completion": completion})
        return rows

    def batches(self, count: int) -> Iterator[dict[str, Any]]:
        """Yield batches of 8 training examples, with 4 of each kind."""
        for start in range(0, count * 4, 4):
            rows = [part[k % len(part)] for part in self.train for k in range(start, start + 4)]
            yield self.collator(
                [{name: row[name] for name in ("input_ids", "labels")} for row in rows]
            )


def begin(description: str | None) -> Story | None:
    """Read the flags and return the `Story`, or print what is missing and return None."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", type=Path, default=Path("build/real/smollm2"), help="folder of the base model"
    )
    parser.add_argument(
        "--data", type=Path, default=Path("../shared/data"), help="folder of instruction data"
    )
    parser.add_argument(
        "--judge", type=Path, help="folder of the judge's encoder (default: that of `make real`)"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("runs/field_trial"), help="folder for all outputs"
    )
    parser.add_argument("--smoke", action="store_true", help="only a few steps, to test the script")
    given = parser.parse_args()
    given.seeds, given.only = 1, ["*"]
    logging.disable_progress_bar()
    # warnings inside transformers and peft
    warnings.filterwarnings("ignore", message=".*is deprecated.*")
    if not any(given.data.glob("*.json")):
        print(
            f"skipped: {given.data} has no *.json files of instructions; name a folder with --data"
        )
        return None
    if not (given.model / "config.json").is_file():
        print(f"skipped: {given.model} is not a model folder; run `make real`, or use --model")
        return None
    return Story(given)


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and of the processes it has waited for."""
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + spent.ru_utime + spent.ru_stime


def head(story: Story) -> None:
    """Print the header of the table."""
    print(
        f"{'nats per token, held out':34s} {' '.join(f'{kind:>8s}' for kind in KINDS)}     mean   "
        "CPU s to make the model"
    )


def seconds_of(work: Callable[[], Any]) -> float:
    """Return the CPU seconds of one call."""
    begin = time.process_time()
    work()
    return time.process_time() - begin


@torch.no_grad()
def tokens_a_second(model: Any, batch: dict[str, Any]) -> float:
    """Return the tokens per CPU second of a forward pass, the better of two measurements."""
    ids = {name: batch[name] for name in ("input_ids", "attention_mask")}
    return ids["input_ids"].numel() / min(seconds_of(lambda: model(**ids)) for _ in range(2))


def _short(value: Any) -> bool:
    return isinstance(value, (int, float, str)) and len(str(value)) < 60
