"""What machine this is, for logs: ``python -m tests.support.machine cuda``. Fails where the device
cannot be used. ``kernels cuda`` measures the fused paths, which needs no command-line parser."""

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


def kernels(device: str) -> None:
    """Print the table of `measure_kernels`, on a CPU of tiny sizes."""
    from model_components import measure_kernels

    small = {"dtype": "float16", "tokens": 4, "shapes": [(256, 256)]} if device == "cpu" else {}
    print(measure_kernels(device=device, progress=True, **small))


if __name__ == "__main__":
    if sys.argv[1] == "kernels":
        kernels(sys.argv[2])
    else:
        main(sys.argv[1])
