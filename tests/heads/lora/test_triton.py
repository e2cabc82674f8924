"""The kernels: registered soundly, compiled for sm_80 and sm_90 without a GPU, no spills."""

import pytest
import torch

from tests.support.kernels import uninterpreted

pytest.importorskip("triton")

COMPILE = """
from heads.lora import _triton as k
from tests.support.kernels import CAPABILITIES, compiled, integers

count = 0
for dtype in ("bf16", "fp16", "fp32"):
    x, words, scale = "*" + dtype, {"row_words": "*i32", "column_words": "*i32"}, {"scale": "fp32"}
    down = {"x": x, "a": x, **words, "out": x, **integers("T", "C", "R", "x_t", "a_r", "a_c"), **scale}
    up = {"y": x, "h": x, "b": x, **words, **integers("T", "C", "R", "y_t", "h_t", "b_c", "b_r"), **scale}
    outer = {"h": x, "x": x, **words, "parts": "*fp32", **integers("T", "C", "R", "SPAN", "h_t", "x_t")}
    for kernel, signature in ((k.down_kernel, down), (k.up_kernel, up), (k.outer_kernel, outer)):
        for rank in (8, 32, 64, 256):
            for drop in (False, True):
                hashed = drop and kernel is k.down_kernel
                constants = k.tiles(rank, dtype != "fp32", hashed=hashed) | {"DROP": drop}
                for capability in CAPABILITIES:
                    compiled(kernel, signature | integers("threshold"), constants, capability, shared=96)
                    count += 1
print("compiled", count)
"""


def test_kernels_compile_for_gpus_that_are_not_here():
    assert "compiled 144" in uninterpreted(COMPILE)


def test_operators_are_registered_soundly():
    from heads.lora import _triton
    from heads.lora._eager import products

    device = "cuda" if torch.cuda.is_available() else "cpu"
    x, a, h = (torch.randn(shape, device=device) for shape in ((5, 6), (3, 6), (5, 3)))
    for drop in ((None, None, 0), tuple(products.dropout(torch.tensor(3, device=device), 5, 6, 0.5))):
        tests = ("test_schema", "test_faketensor")  # `autograd._Lora` is what differentiates them
        torch.library.opcheck(_triton.down, (x, a, 0.5, *drop), test_utils=tests)
        torch.library.opcheck(_triton.up_, (x.clone(), h, a.T, 0.5, *drop), test_utils=tests)
        torch.library.opcheck(_triton.outer, (h, x, 0.5, *drop), test_utils=tests)


def test_sums_over_many_tokens_are_made_in_parts():
    from heads.lora import _triton
    from heads.lora._eager import products

    device = "cuda" if torch.cuda.is_available() else "cpu"
    h, x = torch.randn(700, 5, device=device), torch.randn(700, 40, device=device)
    drop = products.dropout(torch.tensor(3, device=device), 700, 40, 0.3)
    for given, seen in (((None, None, 0), x), (tuple(drop), x * drop.keep(slice(None)))):
        expected = 0.5 * h.double().T @ seen.double()
        torch.testing.assert_close(_triton.outer(h, x, 0.5, *given).double(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_fused_without_a_gpu_raises_and_does_not_fall_back():
    code = (
        "import torch; from heads.lora import lora_linear\n"
        "one = torch.ones(1, 1)\n"
        "try: lora_linear(one, one, one, one, scaling=1.0, impl='fused')\n"
        "except ValueError as error: print(error)"
    )
    assert "needs CUDA" in uninterpreted(code)
