"""Folders as 0.1.0 writes them, and what each must load to.

    python -m tests.support.first_release   # writes tests/first_release anew, before 0.1.0 only

Later versions must read these folders, so they are never written again.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel
from torch import nn

import kronecker
from heads.lora import prepare_lora
from heads.pairwise import PairwiseModel
from mergekit_lite.masks import Merger
from tests.support.goldens import digest
from tests.support.models import save, tiny
from thinker import LatentThinker, ThinkerConfig

FOLDERS = Path(__file__).parents[1] / "first_release"
HASHES = FOLDERS / "hashes.json"


def _masks(folder: Path) -> nn.Module:
    """Components, and masks over them."""
    parts = [save(tiny("gpt2", seed), folder / f"component{seed}") for seed in range(2)]
    merger = Merger.from_pretrained(parts, granularity="output")
    with torch.no_grad():
        for number, parameter in enumerate(p for p in merger.parameters() if p.requires_grad):
            generator = torch.Generator().manual_seed(number)
            parameter.copy_(torch.rand(parameter.shape, generator=generator))
    merger.save_masks(folder / "masks.safetensors")
    return merger


def _pruned(folder: Path) -> nn.Module:
    """A model with fewer neurons, of another number in each block."""
    model = tiny("llama")
    rows = torch.randint(3, 90, (4, 16), generator=torch.Generator().manual_seed(0))
    config = kronecker.PruneConfig(size=0.9, allocate="influence", method="fast")
    kronecker.prune_(model, config, calibration=[rows], progress=False)
    model.save_pretrained(folder)
    return model


def _kronecker(folder: Path) -> nn.Module:
    """A model of Kronecker sums and of a low-rank table."""
    model = tiny("gpt2")
    rows = torch.randint(3, 90, (4, 16), generator=torch.Generator().manual_seed(0))
    configs = {
        "*.mlp.*": kronecker.KroneckerConfig(b_shape=(2, 2), rank=2, init="van_loan"),
        "*.attn.c_proj": kronecker.LowRankConfig(rank=4),
    }
    kronecker.convert_(model, configs, calibration=[rows], progress=False)
    model.save_pretrained(folder)
    return model


def _thinker(folder: Path) -> nn.Module:
    torch.manual_seed(0)
    config = ThinkerConfig(
        vocab_size=16, max_input_length=8, max_output_length=8, hidden_size=16, num_heads=2
    )
    model = LatentThinker(config).eval()
    model.save_pretrained(folder)
    return model


def _adapter(folder: Path) -> nn.Module:
    torch.manual_seed(0)
    config = LoraConfig(target_modules=["q_proj", "v_proj"], r=4, init_lora_weights=False)
    model = prepare_lora(tiny("llama"), config)
    model.save_pretrained(folder)
    return model


def _judge(folder: Path) -> nn.Module:
    from tests.heads.pairwise.support import tokenizer_of

    torch.manual_seed(0)
    judge = PairwiseModel.from_encoder(tiny("bert"), tokenizer_of())
    nn.init.normal_(next(judge.head.parameters()), std=0.5)
    judge.save_pretrained(folder)
    return judge


WRITERS: dict[str, Callable[[Path], nn.Module]] = {
    "masks": _masks,
    "pruned": _pruned,
    "kronecker": _kronecker,
    "thinker": _thinker,
    "adapter": _adapter,
    "judge": _judge,
}


def loaded(name: str) -> nn.Module:
    """Return the model of a folder, loaded as the guides say."""
    folder = FOLDERS / name
    if name == "masks":
        parts = [str(folder / f"component{k}") for k in range(2)]
        merger = Merger.from_pretrained(parts, granularity="output")
        merger.load_masks(folder / "masks.safetensors")
        return merger
    if name in ("pruned", "kronecker"):
        return kronecker.from_pretrained(folder)
    if name == "thinker":
        return LatentThinker.from_pretrained(folder)
    if name == "adapter":
        return PeftModel.from_pretrained(tiny("llama"), folder)
    return PairwiseModel.from_pretrained(folder)


def hashes_of(model: nn.Module) -> dict[str, str]:
    """Return a hash of each tensor that a folder holds, a merger's masks included."""
    state = dict(model.state_dict())
    if isinstance(model, PeftModel):  # whose base is not in the folder
        state = {key: value for key, value in state.items() if "lora_" in key}
    if isinstance(model, Merger):
        state |= {f"mask of {key}": mask.detach() for key, mask in model.masks().items()}
    return {key: digest(value)[:16] for key, value in state.items()}


def main() -> None:
    """Write all folders, and what they hold."""
    found = {}
    for name, write in WRITERS.items():
        shutil.rmtree(FOLDERS / name, ignore_errors=True)
        # files name the folders that were given, and these should not be one machine's
        with contextlib.chdir(FOLDERS):
            found[name] = hashes_of(write(Path(name)))
    HASHES.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
