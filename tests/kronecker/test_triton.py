"""The kernels: registered soundly, compiled for sm_80 and sm_90 without a GPU, no spills."""

import pytest
import torch

from tests.support.kernels import uninterpreted

pytest.importorskip("triton")

COMPILE = """
from kronecker import _triton as k
from tests.support.kernels import CAPABILITIES, compiled, integers

count = 0
for dtype in ("bf16", "fp16", "fp32"):
    x, small = "*" + dtype, "*fp32"
    inner = {"x": x, "a": x, "b": small, "out": x, **integers("M", "P", "U", "a_r", "a_p", "a_u")}
    outer = {"x": x, "a": x, "b": small, "out": x, "other": x, "parts": small}
    outer |= integers("N", "P", "U", "a_r", "a_p", "a_u")
    factor = {"x": x, "g": x, "b": small, "out": x, **integers("M", "P", "U", "o_r", "o_p", "o_u")}
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
        warps = constants.pop("num_warps", k.WARPS)
        for capability in CAPABILITIES:
            compiled(kernel, signature, constants, capability, shared=96, num_warps=warps, enable_fp_fusion=True)
            count += 1
print("compiled", count)
"""


def test_kernels_compile_for_gpus_that_are_not_here():
    assert "compiled 84" in uninterpreted(COMPILE)


def test_operators_are_registered_soundly():
    from kronecker import _triton

    device = "cuda" if torch.cuda.is_available() else "cpu"
    for o2, i2 in ((1, 2), (4, 1)):
        x = torch.randn(5, 3 * i2, device=device, requires_grad=True)
        a = torch.randn(2, 4, 3, device=device, requires_grad=True)
        b = torch.randn(2, o2, i2, device=device, requires_grad=True)
        scales = torch.rand(2, device=device, requires_grad=True)
        torch.library.opcheck(_triton.kron_matmul, (x, a, b, scales))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_fused_without_a_gpu_raises_and_does_not_fall_back():
    code = (
        "import torch; from kronecker import kron_linear\n"
        "try: kron_linear(torch.ones(1, 4), torch.ones(1, 2, 2), torch.ones(1, 1, 2), impl='fused')\n"
        "except ValueError as error: print(error)"
    )
    assert "needs CUDA" in uninterpreted(code)
