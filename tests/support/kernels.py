"""Triton kernels where there is no GPU: compiled for three of them, in a process that does not
interpret them."""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

CAPABILITIES = (80, 90, 100)  # A100, H100 and B200


def uninterpreted(code: str) -> str:
    """What Python code prints in a process of its own, where kernels are compiled and not
    interpreted."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def integers(*names: str) -> dict[str, str]:
    """The types of a kernel's integers, for a signature."""
    return dict.fromkeys(names, "i32")


def compiled(
    kernel: Any,
    signature: Mapping[str, str],
    constants: Mapping[str, Any],
    capability: int,
    *,
    shared: int,
    **options: Any,
) -> str:
    """The PTX of a kernel, which takes at most ``shared`` KB of shared memory and spills no
    register.

    Pointers are multiples of 16 bytes, as torch's are: so Triton compiles it at a real launch.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import get_ptxas
    from triton.compiler import ASTSource

    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(kernel.arg_names)
        if signature.get(name, "i32") != "i32"
    }
    types = {**signature, **dict.fromkeys(constants, "constexpr")}
    source = ASTSource(kernel, types, dict(constants), aligned)
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    assert made.metadata.shared <= shared * 1024, (kernel, made.metadata.shared)
    ptx = made.asm["ptx"]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx)
        target: Any = re.search(r"\.target (sm_\w+)", ptx)
        command = [get_ptxas(capability).path, "-v", f"-arch={target[1]}", path, "-o", "/dev/null"]
        done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", done.stderr)
    assert spills, done.stderr
    assert not any(map(int, spills)), (kernel, constants, signature, capability, done.stderr)
    return ptx
