"""The kernels: registered soundly, compiled for sm_80 and sm_90 without a GPU, no spills."""

import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton")

COMPILE = """
import re, subprocess, tempfile
from pathlib import Path
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource
from kronecker import _triton as k

numbers = lambda *names: {n: "i32" for n in names}
compiled = 0
for capability in (80, 90):
    for dtype in ("bf16", "fp16", "fp32"):
        x, small = "*" + dtype, "*fp32"
        inner = {"x": x, "a": x, "b": small, "out": x, **numbers("M", "P", "U", "a_r", "a_p", "a_u")}
        outer = {"x": x, "a": x, "b": small, "out": x, "other": x, "parts": small}
        outer |= numbers("N", "P", "U", "a_r", "a_p", "a_u")
        factor = {"x": x, "g": x, "b": small, "out": x, **numbers("M", "P", "U", "o_r", "o_p", "o_u")}
        tiles = {"BM": k._M, "BP": k._P, "BU": k._U}
        jobs = []
        for o2, i2, r in ((1, 2, 1), (3, 3, 2), (2, 2, 2)):
            jobs.append((k.inner_kernel, inner, {"R": r, "O2": o2, "I2": i2} | tiles))
            jobs.append((k.factor_kernel, factor, {"O2": o2, "I2": i2} | k.factor_tiles(dtype != "fp32")))
        for o2, i2, r in ((4, 1, 1), (4, 1, 2), (3, 1, 4), (4, 2, 2)):
            sums = r * i2
            own = {"R": r, "O2": o2, "I2": i2, "SUMS": sums, "BM": k._M, "BP": k.outer_block(sums), "BU": k._U}
            jobs += [(k.outer_kernel, outer, own | {"MIX": m, "REDUCE": not m or sums < 4}) for m in (True, False)]
        for kernel, signature, constants in jobs:
            options = {"num_warps": constants.pop("num_warps", k.WARPS), "enable_fp_fusion": True}
            source = ASTSource(kernel, signature | {n: "constexpr" for n in constants}, constants)
            made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
            assert made.metadata.shared <= 96 * 1024, (kernel, made.metadata.shared)
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "k.ptx"
                path.write_text(made.asm["ptx"])
                arch = re.search(r"\\.target (sm_\\w+)", made.asm["ptx"])[1]
                command = [get_ptxas(capability).path, "-v", f"-arch={arch}", path, "-o", "/dev/null"]
                log = subprocess.run(command, capture_output=True, text=True)
            assert log.returncode == 0, log.stderr
            spills = re.findall(r"(\\d+) bytes spill (?:stores|loads)", log.stderr)
            assert spills and not any(map(int, spills)), (kernel, constants, dtype, capability, log.stderr)
            compiled += 1
print("compiled", compiled)
"""


def environment():
    held = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    return held | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}


def test_kernels_compile_for_gpus_that_are_not_here():
    done = subprocess.run(
        [sys.executable, "-c", COMPILE], env=environment(), capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "compiled 84" in done.stdout


def test_operators_are_registered_soundly():
    from kronecker import _triton

    device = "cuda" if torch.cuda.is_available() else "cpu"
    for o2, i2 in ((1, 2), (4, 1)):
        x = torch.randn(5, 3 * i2, device=device, requires_grad=True)
        a = torch.randn(2, 4, 3, device=device, requires_grad=True)
        b = torch.randn(2, o2, i2, device=device, requires_grad=True)
        scales = torch.rand(2, device=device, requires_grad=True)
        torch.library.opcheck(_triton.kron_matmul, (x, a, b, scales))


def test_fused_without_a_gpu_raises_and_does_not_fall_back():
    code = (
        "import torch; from kronecker import kron_linear\n"
        "try: kron_linear(torch.ones(1, 4), torch.ones(1, 2, 2), torch.ones(1, 1, 2), impl='fused')\n"
        "except ValueError as error: print(error)"
    )
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, timeout=120)
    assert "needs CUDA" in done.stdout, done.stderr
