"""File merges: ours, mergekit, and the floors, each run in a fresh process, in turn.

Three random Llama-like checkpoints (bfloat16, shards of about 100 MB) are built once under the work
folder. The floors are a plain copy (read every input, write one output, 16 MB at a time),
``import numpy`` and ``import torch``. Cold is the first merge on a machine, which compiles its
kernels; eager runs torch functions in their place. More methods than the first five run when they
are named, without these two. Spectral methods, which have no kernel, stand
beside a script that loads both models whole. A size that follows two others in the same run has its
seconds predicted by the line through them before it is measured.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from tests.benchmarks.results import Row, append
from tests.support.headers import llama_shapes

WORK = Path(__file__).parent / "work"
SIZES = {  # hidden, mlp, layers; the last are Mistral 7B's
    "30M": (512, 1408, 4),
    "300M": (2048, 2816, 6),
    "1B": (2048, 5632, 18),
    "7B": (4096, 14336, 32),
}
SHARD = {"7B": 2e9}  # bytes a file, where not about 100 MB
METHODS = {
    "linear": (["a", "b"], None, {"weight": 0.5}),
    "slerp": (["b"], "a", {"t": 0.5}),
    "model_stock": (["b", "c"], "a", {}),
    "dare_ties": (["b", "c"], "a", {"weight": 0.5, "density": 0.5}),
    "ties": (["b", "c"], "a", {"weight": 0.5, "density": 0.5}),
}
MORE = {
    "passthrough": (["a"], None, {}),
    "nuslerp": (["b", "c"], None, {"weight": 0.5}),
    "karcher": (["a", "b", "c"], None, {}),
    "breadcrumbs": (["b", "c"], "a", {"weight": 0.5, "density": 0.5}),
    "sce": (["b", "c"], "a", {"select_topk": 0.1}),
    "arcee_fusion": (["b"], "a", {}),
    "della": (["b", "c"], "a", {"weight": 0.5, "density": 0.5}),
}
SPECTRAL = {"tsv": (["b", "c"], "a", {}), "iso_c": (["b", "c"], "a", {})}
DENSE = """
import os, sys, torch
from safetensors.torch import load_file, save_file
torch.set_num_threads(1)
def load(folder):
    files = [os.path.join(folder, f) for f in sorted(os.listdir(folder)) if f.endswith(".safetensors")]
    return {k: v for f in files for k, v in load_file(f).items()}
method, out, base, *models = sys.argv[1:]
base, models = load(base), [load(m) for m in models]
def nearest(m):
    u, _, v = torch.linalg.svd(m, full_matrices=False)
    return u @ v
merged = {}
for name, b in base.items():
    deltas = [m[name].double() - b.double() for m in models]
    if b.dim() != 2:
        delta = sum(deltas) / len(deltas)
    elif method == "iso_c":
        u, s, v = torch.linalg.svd(sum(deltas), full_matrices=False)
        delta = s.mean() * u @ v
    else:
        keep = min(b.shape) // len(deltas)
        parts = [torch.linalg.svd(d, full_matrices=False) for d in deltas]
        u, v = nearest(torch.cat([p[0][:, :keep] for p in parts], 1)), nearest(torch.cat([p[2][:keep] for p in parts]))
        delta = u * torch.cat([p[1][:keep] for p in parts]) @ v
    merged[name] = (b.double() + delta).to(b.dtype)
os.makedirs(out)
save_file(merged, os.path.join(out, "model.safetensors"), metadata={"format": "pt"})
"""
# A child's first reading of its largest resident size is its parent's; this parent is small.
SPAWN = """
import json, os, subprocess, sys, time
started = time.perf_counter()
child = subprocess.Popen(sys.argv[1:], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
errors = child.stderr.read()
_, status, used = os.wait4(child.pid, 0)
wall = time.perf_counter() - started
if status:
    sys.stderr.write(errors.decode())
    sys.exit(1)
print(json.dumps([used.ru_utime + used.ru_stime, wall, used.ru_maxrss]))
"""
COPY = """
import os, sys
block = bytearray(1 << 24)
view = memoryview(block)
def shards(folder):
    return sorted(os.path.join(folder, f) for f in os.listdir(folder) if f.endswith(".safetensors"))
out, *models = sys.argv[1:]
os.makedirs(out)
for number, model in enumerate(models):
    for path in shards(model):
        with open(path, "rb", buffering=0) as source:
            target = open(os.path.join(out, os.path.basename(path)), "wb", buffering=0) if number == 0 else None
            while got := source.readinto(view):
                if target:
                    target.write(view[:got])
"""


def shapes_of(size: str) -> dict[str, tuple[int, ...]]:
    """Every tensor of a Llama-like model."""
    hidden, mlp, layers = SIZES[size]
    return llama_shapes(hidden, mlp, layers, vocabulary=32000, keys=hidden // 4)


def build(size: str, name: str, seed: int) -> Path:
    """One random checkpoint, file by file: a common base plus noise of a tenth of its size."""
    folder = WORK / size / name
    if (folder / "config.json").exists():
        return folder
    import torch
    from safetensors.torch import save_file

    shapes, limit = shapes_of(size), SHARD.get(size, 100e6)
    shards: list[list[str]] = [[]]
    filled = 0
    for tensor, shape in shapes.items():
        nbytes = 2 * math.prod(shape)
        if filled and filled + nbytes > limit:
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += nbytes
    common, own = torch.Generator().manual_seed(99), torch.Generator().manual_seed(seed)

    def value(shape: tuple[int, ...]) -> torch.Tensor:
        drawn = torch.randn(shape, generator=common) * 0.02
        return (drawn + torch.randn(shape, generator=own) * 0.002 if seed else drawn).bfloat16()

    folder.mkdir(parents=True, exist_ok=True)
    weight_map = {}
    for i, members in enumerate(shards):
        file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        save_file(
            {tensor: value(shapes[tensor]) for tensor in members},
            folder / file,
            metadata={"format": "pt"},
        )
        weight_map |= dict.fromkeys(members, file)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    hidden, mlp, layers = SIZES[size]
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 128,
        "num_key_value_heads": hidden // 512,
        "head_dim": 128,
        "vocab_size": 32000,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def inputs_of(method: str) -> list[str]:
    """The models that a method reads, a base first."""
    models, base, _ = (METHODS | MORE | SPECTRAL)[method]
    return [*([base] if base else []), *models]


def recipe(size: str, method: str) -> Path:
    """The YAML that both read."""
    models, base, parameters = (METHODS | MORE | SPECTRAL)[method]
    folder = WORK / size
    listed = (
        [folder / base, *(folder / m for m in models)]
        if method == "slerp"
        else [folder / m for m in models]
    )
    text = f"merge_method: {method}\nmodels: {json.dumps([{'model': str(m)} for m in listed])}\n"
    text += f"base_model: {folder / base}\n" if base else ""
    text += f"parameters: {json.dumps(parameters)}\ndtype: bfloat16\n"
    path = folder / f"{method}.yml"
    path.write_text(text)
    return path


def commands(
    size: str, method: str, out: Path, device: str, peer: bool
) -> dict[tuple[str, str], list[str]]:
    """(implementation, mode) → command line."""
    inputs = [str(WORK / size / name) for name in inputs_of(method)]
    path = str(recipe(size, method))
    ours = [
        sys.executable,
        "-m",
        "mergekit_lite",
        "merge",
        path,
        str(out),
        "--no-progress",
        "--device",
        device,
    ]
    threads = f"{os.cpu_count()} threads"
    cold = ["env", f"XDG_CACHE_HOME={WORK / 'cold'}", *ours]
    if method in SPECTRAL:
        return {
            ("dense script", "1 thread"): [sys.executable, "-c", DENSE, method, str(out), *inputs],
            ("mergekit_lite", "1 thread"): [*ours, "--threads", "1"],
        }
    chosen = {
        ("copy", f"{len(inputs)} in, 1 out"): [sys.executable, "-c", COPY, str(out), *inputs],
        ("mergekit_lite", "1 thread"): [*ours, "--threads", "1"],
        ("mergekit_lite", threads): [*ours, "--threads", str(os.cpu_count())],
    }
    if size == "7B":
        return chosen
    if method in METHODS:
        chosen |= {
            ("import numpy", ""): [sys.executable, "-c", "import numpy"],
            ("import torch", ""): [sys.executable, "-c", "import torch"],
            ("mergekit_lite", "1 thread, cold"): [*cold, "--threads", "1"],
            ("mergekit_lite", "1 thread, eager"): [*ours, "--threads", "1", "--impl", "eager"],
        }
    if peer:
        theirs = [
            str(Path(sys.executable).parent / "mergekit-yaml"),
            path,
            str(out),
            "--no-write-model-card",
        ]
        chosen[f"mergekit {version('mergekit')}", "1 thread"] = theirs + (
            ["--cuda"] if device == "cuda" else []
        )
    return chosen


def timed(command: list[str], out: Path) -> tuple[float, float, int]:
    """CPU seconds, wall seconds and peak resident bytes of one run in a fresh process."""
    shutil.rmtree(out, ignore_errors=True)
    shutil.rmtree(WORK / "cold", ignore_errors=True)
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPYCACHEPREFIX": str(WORK / "pyc"),
    }
    # both sides run from compiled files, as installed packages do
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    done = subprocess.run(
        [sys.executable, "-c", SPAWN, *command], env=environment, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    shutil.rmtree(out, ignore_errors=True)
    cpu, wall, peak = json.loads(done.stdout.splitlines()[-1])
    return cpu, wall, peak * 1024


def predicted(known: dict[str, tuple[float, float]], size: str) -> tuple[float, float]:
    """CPU and wall seconds by the line through the last two sizes: a start, and so much for each
    parameter."""
    (small, before), (large, after) = [*known.items()][-2:]
    counts = [
        sum(math.prod(shape) for shape in shapes_of(s).values()) for s in (small, large, size)
    ]
    along = (counts[2] - counts[0]) / (counts[1] - counts[0])
    cpu, wall = (round(x + along * (y - x), 4) for x, y in zip(before, after, strict=True))
    return cpu, wall


def main(arguments: list[str] | None = None) -> None:
    """Measure and append rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", nargs="+", default=["300M", "1B"], choices=SIZES)
    parser.add_argument(
        "--methods", nargs="+", default=[*METHODS], choices=[*METHODS, *MORE, *SPECTRAL]
    )
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--no-peer", action="store_true", help="without mergekit")
    options = parser.parse_args(arguments)

    medians: dict[tuple[str, str, str], dict[str, tuple[float, float]]] = {}
    for size in options.sizes:
        for name in sorted({name for method in options.methods for name in inputs_of(method)}):
            # In a process of its own: a child inherits its parent's largest resident size as its
            # own first value.
            maker = multiprocessing.get_context("spawn").Process(
                target=build, args=(size, name, "abc".index(name))
            )
            maker.start()
            maker.join()
        # Peers are timed at the first size; a larger one shows only how our memory grows.
        peer = not options.no_peer and size == options.sizes[0]
        rows = []
        for method in options.methods:
            out, shape = WORK / size / "out", f"Llama-like, {size} parameters"
            results: dict[tuple[str, str], list[tuple[float, float, int]]] = {}
            for run in range(options.runs + 1):  # the first round fills caches and is not counted
                for key, command in commands(
                    size, method, out, options.device, peer and run > 0
                ).items():
                    measured = timed(command, out)
                    if run:
                        results.setdefault(key, []).append(measured)
                    cpu, wall, peak = measured
                    print(
                        f"{size} {method} {' '.join(key)}: {cpu:.2f} CPU s, {wall:.2f} s, "
                        f"{peak / 1e6:.0f} MB",
                        flush=True,
                    )
            for (impl, mode), runs in results.items():
                times, peak = [r[:2] for r in runs], max(r[2] for r in runs)
                measured_row = Row.of(
                    method, impl, mode, "bfloat16", shape, times, peak, device=options.device
                )
                rows.append(measured_row)
                known = medians.setdefault((method, impl, mode), {})
                if impl == "mergekit_lite" and len(known) >= 2:
                    mode = f"{mode}, predicted from {' and '.join([*known][-2:])}"
                    rows.append(
                        Row.of(method, impl, mode, "bfloat16", shape, [predicted(known, size)], 0)
                    )
                known[size] = measured_row.cpu_p50, measured_row.wall_p50
        append("merge_models.csv", rows)


if __name__ == "__main__":
    main()
