"""The kernels: registered soundly, compiled for sm_80 and sm_90 without a GPU, no spills, no fused multiply-adds."""

import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton")

COMPILE = """
import re, subprocess, sys, tempfile
from pathlib import Path
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource
from mergekit_lite.masks import _triton as kernels

sizes = {"ROWS": kernels._ROWS, "COLUMNS": kernels._COLUMNS}
numbers = lambda *names: {n: "i32" for n in names}
compiled = 0
for capability in (80, 90):
    for dtype in ("bf16", "fp16", "fp32"):
        four = {f"w{k}": "*" + dtype for k in range(4)}
        blend = four | {"masks": "*fp32", "out": "*" + dtype}
        blend |= numbers("rows", "columns", "w_row", "m_k", "m_row", "m_column")
        reduce = {"grad": "*" + dtype, **four, "out": "*fp32", **numbers("rows", "columns", "g_row", "w_row")}
        jobs = [(kernels.blend_kernel, blend, {"K": k}) for k in (2, 4)]
        steps = [1, kernels._STEPS, kernels._STEPS // 8, kernels._STEPS]
        jobs += [(kernels.reduce_kernel, reduce, {"K": 4, "KIND": k, "STEPS": s}) for k, s in enumerate(steps)]
        for kernel, signature, own in jobs:
            constants = own | sizes
            source = ASTSource(kernel, signature | {n: "constexpr" for n in constants}, constants)
            made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"enable_fp_fusion": False})
            assert made.metadata.shared <= 48 * 1024, (kernel, made.metadata.shared)
            ptx = made.asm["ptx"]
            if kernel is kernels.blend_kernel:
                assert "fma.rn.f32" not in ptx
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "k.ptx"
                path.write_text(ptx)
                arch = re.search(r"\\.target (sm_\\w+)", ptx)[1]
                command = [get_ptxas(capability).path, "-v", f"-arch={arch}", path, "-o", "/dev/null"]
                log = subprocess.run(command, capture_output=True, text=True)
            assert log.returncode == 0, log.stderr
            spills = re.findall(r"(\\d+) bytes spill (?:stores|loads)", log.stderr)
            assert spills and not any(map(int, spills)), log.stderr
            compiled += 1
print("compiled", compiled)
"""


def test_kernels_compile_for_gpus_that_are_not_here():
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    done = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "compiled 36" in done.stdout


def test_operators_are_registered_soundly():
    from mergekit_lite.masks import _triton

    device = "cuda" if torch.cuda.is_available() else "cpu"
    weights = [torch.randn(5, 7, device=device) for _ in range(2)]
    torch.library.opcheck(_triton.blend, (weights, torch.rand(2, 1, 7, device=device)))
    torch.library.opcheck(_triton.reduce, (weights[0], weights, [2, 5, 1]))


def test_fused_without_a_gpu_raises_and_does_not_fall_back():
    code = (
        "import torch; from mergekit_lite.masks import blend\n"
        "try: blend([torch.ones(2, 2)] * 2, torch.ones(2, 1, 2), impl='fused')\n"
        "except ValueError as error: print(error)"
    )
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert "needs CUDA" in done.stdout, done.stderr
