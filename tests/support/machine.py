"""What machine this is, for logs: ``python -m tests.support.machine cuda``. Fails where the device
cannot be used."""

import importlib
import importlib.metadata
import platform
import sys

import torch

PACKAGES = [
    "heads.lora",
    "heads.pairwise",
    "kronecker",
    "mergekit_lite.masks",
    "model_components",
    "thinker",
]
VERSIONS = [
    "torch",
    "triton",
    "transformers",
    "peft",
    "accelerate",
    "safetensors",
    "numpy",
    "sentence-transformers",
]


def main(device: str) -> None:
    """Print it."""
    print(f"Python {platform.python_version()}, {platform.machine()}")
    for name in PACKAGES:
        print(name, "from", importlib.import_module(name).__file__)
    for name in VERSIONS:
        try:
            print(name, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            print(name, "is not installed")
    torch.ones(2, device=device).sum().item()
    print(torch.cuda.get_device_name() if device == "cuda" else "CPU")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "cpu")
