"""The kernels: registered soundly, compiled for three GPUs that are not here, no spills, no fused
multiply-adds."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from mergekit_lite import AccurateMaskedLinear
from tests.support.kernels import uninterpreted

pytest.importorskip("triton")

COMPILE = """
from mergekit_lite.masks import _triton as kernels
from tests.support.kernels import CAPABILITIES, compiled, integers

sizes = {"ROWS": kernels._ROWS, "COLUMNS": kernels._COLUMNS}
count = 0
for dtype in ("bf16", "fp16", "fp32"):
    four = {f"w{k}": "*" + dtype for k in range(4)}
    blend = four | {"masks": "*fp32", "out": "*" + dtype}
    blend |= integers("rows", "columns", "w_row", "m_k", "m_row", "m_column")
    reduce = {"grad": "*" + dtype, **four, "out": "*fp32", **integers("rows", "columns", "g_row", "w_row")}
    jobs = [(kernels.blend_kernel, blend, {"K": k}) for k in (2, 4)]
    steps = [1, kernels._STEPS, kernels._STEPS // 8, kernels._STEPS]
    for k, s in enumerate(steps):
        own = {"out": "*fp64"} if k == 3 else {}
        jobs.append((kernels.reduce_kernel, reduce | own, {"K": 4, "KIND": k, "STEPS": s}))
    for kernel, signature, own in jobs:
        for capability in CAPABILITIES:
            ptx = compiled(kernel, signature, own | sizes, capability, shared=48, enable_fp_fusion=False)
            assert kernel is not kernels.blend_kernel or "fma.rn.f32" not in ptx
            count += 1
print("compiled", count)
"""


def test_kernels_compile_for_gpus_that_are_not_here():
    assert "compiled 54" in uninterpreted(COMPILE)


def test_operators_are_registered_soundly():
    from mergekit_lite.masks import _triton

    device = "cuda" if torch.cuda.is_available() else "cpu"
    weights = [torch.randn(5, 7, device=device) for _ in range(2)]
    torch.library.opcheck(_triton.blend, (weights, torch.rand(2, 1, 7, device=device)))
    torch.library.opcheck(_triton.reduce, (weights[0], weights, [2, 5, 1]))


def test_tracers_see_an_operator_and_transforms_take_another_path(monkeypatch):
    layer = AccurateMaskedLinear([torch.nn.Linear(9, 4), torch.nn.Linear(9, 4)], impl="fused")
    x = torch.randn(3, 9)
    if torch.cuda.is_available():
        layer, x = layer.cuda(), x.cuda()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert layer(mode.from_tensor(x)).shape == (3, 4)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), layer(x))
    compiled(x).sum().backward()
    torch.testing.assert_close(make_fx(layer)(x)(x), layer(x))
    with pytest.raises(ValueError, match=r"torch\.func"):
        torch.func.vmap(layer)(x)
    monkeypatch.setattr("model_components._fused.fused_pays", lambda *_: True)
    layer.impl = "auto"
    torch.testing.assert_close(torch.func.vmap(layer)(x), layer(x))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_fused_without_a_gpu_raises_and_does_not_fall_back():
    code = (
        "import torch; from mergekit_lite.masks import blend\n"
        "try: blend([torch.ones(2, 2)] * 2, torch.ones(2, 1, 2), impl='fused')\n"
        "except ValueError as error: print(error)"
    )
    assert "expected weights on CUDA (or TRITON_INTERPRET=1), got weights on cpu" in uninterpreted(
        code
    )
