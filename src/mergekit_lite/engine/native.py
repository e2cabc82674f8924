"""Run compiled kernels from the user's cache. On first use, numba compiles a kernel.

numba takes half a second to start, which is a large part of the time of a short merge. So compiled
kernels are cached as object code, which LLVM loads in milliseconds.

A kernel is compiled for the dtypes and numbers of dimensions of its arguments. It receives each
array as a pointer and its sizes, and any other argument as a number. Arrays must be C-contiguous.
A kernel allocates no memory and never raises.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from model_components._folders import OutputError, cache_folder, new_file

from ..dtypes import Array
from .tiles import Kind

_SOURCES = ("_numba.py", "tiles.py")  # a change in either invalidates cached kernels
_NUMBERS: dict[type, tuple[str, Any]] = {
    bool: ("?", ctypes.c_bool),
    int: ("q", ctypes.c_int64),
    np.uint32: ("I", ctypes.c_uint32),
    np.float32: ("f", ctypes.c_float),
}
# symbols for error handling: kernels never call them, but the loader needs their addresses
_NEVER_CALLED = (
    "NRT_Free",
    "NRT_MemInfo_call_dtor",
    "numba_do_raise",
    "numba_gil_ensure",
    "numba_gil_release",
    "numba_runtime_build_excinfo_struct",
    "numba_unpickle",
)
_lock = threading.Lock()
_loaded: dict[tuple[str, tuple[Kind, ...]], Callable[..., bool]] = {}
_engines: list[Any] = []  # LLVM engines own loaded code, so they must not be deleted


def why_unavailable() -> str | None:
    """Return the reason why kernels cannot run on this machine, or None if they can."""
    if os.environ.get("NUMBA_DISABLE_JIT", "0") != "0":
        return "numba's compiler is disabled (NUMBA_DISABLE_JIT)"
    try:
        # do not import the packages: numba takes half a second to start
        missing = [name for name in ("llvmlite", "numba") if importlib.util.find_spec(name) is None]
    except ImportError as error:
        return str(error)
    return f"{missing[0]} is not installed" if missing else None


def run(name: str, *arguments: Array | float | np.generic) -> bool:
    """Run a kernel of `_numba`.

    Args:
        name: The kernel's name.
        *arguments: C-contiguous arrays, and numbers of the types bool, int, `numpy.uint32` and
            `numpy.float32`.

    Returns:
        The kernel's result, which the kernel's docstring explains. For most kernels, it is whether
        the written values include NaN or infinity.
    """
    kinds: list[Kind] = []
    values: list[object] = []
    for argument in arguments:
        if isinstance(argument, np.ndarray):
            assert argument.flags.c_contiguous, f"{name}: expected a C-contiguous array"
            kinds.append((argument.dtype.char, argument.ndim))
            values += [argument.ctypes.data, *argument.shape]
        else:
            kinds.append((_NUMBERS[type(argument)][0], 0))
            values.append(argument)
    key = name, tuple(kinds)
    function = _loaded.get(key)
    if function is None:
        with _lock:
            # another thread may have loaded the kernel while this thread waited for the lock
            function = _loaded.get(key) or _load_kernel(*key)
            _loaded[key] = function
    return function(*values)


def _load_kernel(name: str, kinds: tuple[Kind, ...]) -> Callable[..., bool]:
    """Return a kernel as a function of pointers, sizes and numbers."""
    from llvmlite import binding

    symbol, code = _object_code(name, kinds)
    # an engine must start with a module, here an empty one; the object code is then added
    engine = binding.create_mcjit_compiler(binding.parse_assembly(""), _target_machine())
    engine.add_object_file(binding.ObjectFileRef.from_data(code))
    engine.finalize_object()
    _engines.append(engine)
    types: list[Any] = []
    numbers = dict(_NUMBERS.values())
    for dtype, dimensions in kinds:
        if dimensions:
            types += [ctypes.c_void_p, *[ctypes.c_int64] * dimensions]
        else:
            types.append(numbers[dtype])
    return ctypes.CFUNCTYPE(ctypes.c_bool, *types)(engine.get_function_address(symbol))


@functools.cache
def _target_machine() -> Any:
    from llvmlite import binding

    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    any_address = ctypes.cast(ctypes.pythonapi.Py_IncRef, ctypes.c_void_p).value
    for name in _NEVER_CALLED:
        binding.add_symbol(name, any_address)
    return binding.Target.from_default_triple().create_target_machine(
        cpu=binding.get_host_cpu_name(),
        features=binding.get_host_cpu_features().flatten(),
        opt=3,
        codemodel="jitdefault",
    )


def _object_code(name: str, kinds: tuple[Kind, ...]) -> tuple[str, bytes]:
    """Return the name of a kernel's C function and its object code, from the cache if possible."""
    path = None
    try:
        path = cache_folder() / "merge" / f"{name}-{_identity(name, kinds)}.o"
        head, _, code = path.read_bytes().partition(b"\n")
        symbol, digest = head.decode().split()
        if hashlib.sha256(code).hexdigest() == digest:
            return symbol, code
    except (OSError, ValueError):
        pass  # not cached yet, or damaged
    except RuntimeError:
        pass  # the user has no home folder
    from ._numba import compile_kernel

    symbol, code = compile_kernel(name, kinds, _target_machine())
    if path is None:
        return symbol, code
    try:
        # if two processes compile a kernel at once, the rename prevents reading half a file
        with new_file(path, "merge_models") as temporary:
            digest = hashlib.sha256(code).hexdigest()
            temporary.write_bytes(f"{symbol} {digest}\n".encode() + code)
    except OutputError:
        pass  # not cached: the next process compiles the kernel again
    return symbol, code


def _identity(name: str, kinds: tuple[Kind, ...]) -> str:
    return hashlib.sha256(f"{_build_environment()} {name} {kinds}".encode()).hexdigest()[:32]


@functools.cache
def _build_environment() -> str:
    """Return a description of the sources, compilers and processor that object code depends on."""
    from llvmlite import binding

    sources = hashlib.sha256()
    for source in _SOURCES:
        sources.update(Path(__file__).with_name(source).read_bytes())
    versions = [importlib.metadata.version(package) for package in ("numba", "llvmlite")]
    # machines with different processors may share a home folder
    processor = [binding.get_host_cpu_name(), binding.get_host_cpu_features().flatten()]
    parts = [sources.hexdigest(), *versions, binding.get_default_triple(), *processor]
    return " ".join(parts)
