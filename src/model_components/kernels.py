"""`measure_kernels`: test and time the fused paths on a device, to set what ``impl="auto"`` uses.

`set_impl_` sets the implementation of a model's layers by hand.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import _fused
from ._cli import ON_TERMINAL
from ._report import Report, Table

if TYPE_CHECKING:
    import torch
    from torch import nn

_MOST_SHAPES = 4  # sizes taken from a model; a block rarely has more than four different sizes
_ROUNDS = 15  # pairs of timed steps; the median of so many varies by only a few percent
_WORTH = 0.95  # the largest ratio of fused to eager time at which a fused path is used
_DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True)
class KernelRow:
    """The measurement of one fused path at one size.

    Attributes:
        path: The name of the path.
        shape: (out_features, in_features).
        worst: The largest error divided by the largest allowed error (its budget), at most 1; None
            if the path could not be tested or is wrong.
        eager_ms: The median milliseconds of forward and backward in the eager path.
        fused_ms: The median milliseconds of forward and backward in the fused path.
        problem: Why the path was not tested or timed, or is wrong; None if all went well.
    """

    path: str
    shape: tuple[int, int]
    worst: float | None = None
    eager_ms: float | None = None
    fused_ms: float | None = None
    problem: str | None = None

    @property
    def cannot_run(self) -> bool:
        """Return whether the path could not run, for example because of the size or dtype."""
        # a path that is wrong has no `worst` either, but it did run
        return self.worst is None and not (self.problem or "").startswith("wrong:")

    @property
    def pays(self) -> bool:
        """Return whether the path is correct, and faster by more than noise."""
        if self.problem or self.eager_ms is None or self.fused_ms is None:
            return False
        return self.fused_ms <= _WORTH * self.eager_ms


@dataclass(frozen=True)
class KernelReport(Report):
    """The result of `measure_kernels`.

    Attributes:
        device: The name of the GPU, or ``"cpu"``.
        dtype: The dtype of the weights.
        rows: One row for each path and size.
        written: The path of the file that ``impl="auto"`` reads, or None if nothing was timed.
    """

    device: str
    dtype: str
    rows: tuple[KernelRow, ...]
    written: str | None

    def summary(self) -> list[str]:
        """Return a line that names the device and the dtype."""
        return [f"fused paths on {self.device}, {self.dtype}"]

    def table(self) -> Table:
        """List each path and shape with its error, its times and its problem."""
        rows = []
        for row in self.rows:
            shape = " x ".join(map(str, row.shape))
            worst = "" if row.worst is None else f"{row.worst:.2f}"
            times = ["" if t is None else f"{t:.3f}" for t in (row.eager_ms, row.fused_ms)]
            rows.append((row.path, shape, worst, *times, row.problem or ""))
        header = ("path", "shape", "error / budget", "eager ms", "fused ms", "problem")
        return Table(header, rows, sentences=True)

    def remarks(self) -> list[str]:
        """List the paths that "auto" uses from now on, or explain how to measure."""
        if self.written is None:
            return [
                'nothing was timed, so impl="auto" chooses as before; run this command on a '
                "machine with a CUDA device"
            ]
        chosen = sorted(_paying_paths(self.rows))
        taken = ", ".join(chosen) or "none of them"
        return [f'impl="auto" uses {taken} on this model of GPU ({self.written})']


def measure_kernels(
    *,
    device: str | None = None,
    shapes: tuple[tuple[int, int], ...] = ((4096, 4096),),
    model: str | None = None,
    tokens: int = 2048,
    dtype: str = "bfloat16",
    progress: bool = ON_TERMINAL,
) -> KernelReport:
    """Test every fused path against its definition in float64, then time it against the eager path.

    The result is written to ``model-components/kernels.json`` in your cache. ``impl="auto"`` reads
    this file and uses the fused paths that are correct and faster on this model of GPU. A result
    is valid for the same versions of this library, torch and triton. Without a valid result,
    ``"auto"`` uses the eager path.

    Args:
        device: Device such as cuda; default: a CUDA device if there is one. On a CPU the kernels
            are tested if TRITON_INTERPRET=1 is set, and nothing is timed.
        shapes: Sizes (out_features, in_features) of weights to time.
        model: A model folder or hub id. The four most frequent sizes of its weights are timed
            instead of ``shapes``.
        tokens: The number of rows of the input.
        dtype: bfloat16, float16 or float32.
        progress: Print each path as it is measured.

    Returns:
        The errors and times of each path and size.

    Raises:
        ValueError: The dtype is unknown, a size is below 1, the device is not available, or the
            model's folder has no matrices in safetensors files.

    >>> report = measure_kernels(device="cpu", shapes=[(8, 8)], tokens=4, dtype="float32")
    >>> report.device, report.written
    ('cpu', None)
    """
    # imported here, so that the command's --help does not load torch
    import torch

    from ._checks import Whole, check_choice, check_value
    from ._devices import find_device

    operation = "measure_kernels"
    check_choice(operation, "dtype", dtype, _DTYPES)
    check_value(operation, "tokens", tokens, Whole)
    asked = shapes if model is None else _shapes_of(model, operation)
    sizes = [_checked_shape(operation, shape) for shape in asked]
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    place = torch.device(find_device(device, operation))
    rows: list[KernelRow] = []
    for path in _fused.known_paths():
        for shape in sizes:
            row = _measure(path, shape, tokens, place, getattr(torch, dtype))
            if progress:
                print(f"{path.name} {shape}: {row.problem or 'measured'}")
            rows.append(row)
    card = _fused.device_name(place)
    written = None
    if card is not None and any(row.fused_ms is not None for row in rows):
        written = _write(card, dtype, rows)
    return KernelReport(card or "cpu", dtype, tuple(rows), written)


def _checked_shape(operation: str, shape: object) -> tuple[int, int]:
    """Return a shape as a tuple; raise an error unless it is two whole numbers, 1 or more."""
    from ._checks import is_whole

    pair = tuple(shape) if isinstance(shape, (tuple, list)) else ()
    if len(pair) != 2 or not all(is_whole(length, 1) for length in pair):
        raise ValueError(
            f"{operation}: expected shapes (out_features, in_features) of two whole numbers, 1 or "
            f"more, got {shape!r}"
        )
    return pair


def _shapes_of(model: str | Path, operation: str) -> list[tuple[int, int]]:
    """Return the most frequent sizes of a model's matrices, which are the sizes in its blocks."""
    from safetensors import SafetensorError, safe_open

    from ._hub import find_folder

    folder = find_folder(model, operation=operation)
    counts: Counter[tuple[int, int]] = Counter()
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, "pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118, no mapping
                    shape = tensors.get_slice(name).get_shape()
                    if len(shape) == 2 and min(shape):
                        counts[shape[0], shape[1]] += 1
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{operation}: {file} cannot be read: {error}") from error
    if not counts:
        raise ValueError(f"{operation}: expected matrices in {folder}/*.safetensors, got none")
    return [shape for shape, _ in counts.most_common(_MOST_SHAPES)]


def _measure(
    path: _fused.FusedPath,
    shape: tuple[int, int],
    tokens: int,
    device: torch.device,
    dtype: torch.dtype,
) -> KernelRow:
    """Test one path at its ``odd`` shape, then time it at the given shape."""
    from .testing import check_equivalent

    problem = path.problem(shape, device, dtype)
    if problem is not None:
        return KernelRow(path.name, shape, problem=problem)
    # 7 tokens are not a multiple of a tile size either
    trial = path.make(path.odd, 7, device, dtype)
    try:
        judgment = check_equivalent(
            trial.fused, trial.reference, trial.inputs, dtype=dtype, device=device, name=path.name
        )
    except AssertionError as error:
        return KernelRow(path.name, shape, problem=f"wrong: {error}")
    except RuntimeError as error:
        return KernelRow(path.name, shape, problem=f"failed: {error}")
    if not _is_timed(device):
        return KernelRow(path.name, shape, judgment.worst, problem="tested, not timed on a CPU")
    trial = path.make(shape, tokens, device, dtype)
    try:
        eager_ms, fused_ms = _times(trial, device, dtype)
    except RuntimeError as error:  # such as out of memory; the other paths are still measured
        return KernelRow(path.name, shape, judgment.worst, problem=f"not timed: {error}")
    return KernelRow(path.name, shape, judgment.worst, eager_ms, fused_ms)


def _is_timed(device: torch.device) -> bool:
    """Return whether times are meaningful; times of Triton's interpreter on a CPU are not."""
    return device.type == "cuda"


def _times(trial: _fused.Trial, device: torch.device, dtype: torch.dtype) -> tuple[float, float]:
    """Return the median milliseconds of forward and backward, first eager and then fused."""
    import torch

    inputs: dict[str, Any] = {}
    for name, value in trial.inputs.items():
        floating = value.is_floating_point()
        inputs[name] = value.to(device, dtype if floating else None).requires_grad_(floating)

    def timed(function: Callable[..., torch.Tensor]) -> float:
        # CUDA events, because a launch returns before the work is done
        begin = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        begin.record()
        function(**inputs).sum().backward()
        end.record()
        torch.cuda.synchronize(device)
        return begin.elapsed_time(end)

    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(_ROUNDS + 3):
        # time both in each round, so that a GPU that slows down as it heats up affects both equally
        for kept, function in zip(times, (trial.eager, trial.fused), strict=True):
            kept.append(timed(function))
    # the first rounds compile and warm up
    eager, fused = (sorted(kept[3:])[_ROUNDS // 2] for kept in times)
    return eager, fused


def _paying_paths(rows: Sequence[KernelRow]) -> set[str]:
    """Return the names of the paths that are correct and faster at every size they support."""
    taken = [row for row in rows if not row.cannot_run]
    names = {row.path for row in taken}
    # "auto" looks up a path only by its name, so one answer must hold for all sizes
    return {name for name in names if all(row.pays for row in taken if row.path == name)}


def _write(card: str, dtype: str, rows: Sequence[KernelRow]) -> str:
    """Add a GPU's measurements to the file in the user's cache; return the file's path."""
    from ._folders import make_folder, write_json

    paying = _paying_paths(rows)
    paths: dict[str, Any] = {}
    for row in rows:
        if row.cannot_run:
            continue
        path = paths.setdefault(
            row.path, {"fused": row.path in paying, "dtype": dtype, "times": []}
        )
        path["times"].append([row.shape, row.eager_ms, row.fused_ms])
    devices = _fused.read_measurements()
    before = devices.get(card)
    # measurements made with other versions of the packages are not valid
    if isinstance(before, dict) and before.get("versions") == _fused.versions():
        paths = {**before.get("paths", {}), **paths}  # keep paths that this run did not measure
    devices[card] = {"versions": _fused.versions(), "paths": paths}
    file = _fused.cache_file()
    make_folder(file.parent, "measure_kernels")
    write_json(file, {"devices": devices}, "measure_kernels")
    # this process may have read the file before
    _fused.forget()
    return str(file)


def set_impl_(model: nn.Module, impl: str) -> int:
    """Set ``impl`` of the layers of this library in a model; return the number of layers set.

    Layers that do not support ``impl`` keep their own. For example, LoRA layers have no fused path.

    Args:
        model: The model, whose layers' ``impl`` is changed in place.
        impl: ``"auto"``, ``"eager"``, ``"fused"`` or ``"reference"``. If an explicit choice
            cannot run, the forward raises an error.

    Raises:
        ValueError: ``model`` is not a module, or none of its layers supports ``impl``.

    >>> from kronecker import KroneckerLinear
    >>> set_impl_(torch.nn.Sequential(KroneckerLinear(256, 256), torch.nn.ReLU()), "eager")
    1
    """
    from torch import nn

    if not isinstance(model, nn.Module):
        raise ValueError(f"set_impl_: expected a module, got {type(model).__name__}")
    known: set[str] = set()
    layers: list[Any] = []
    for module in model.modules():
        choices = getattr(type(module), "impls", ())
        known.update(choices)
        if impl in choices:
            layers.append(module)
    if not layers:
        raise ValueError(
            "set_impl_: expected an impl that the model's layers support "
            f"({', '.join(sorted(known)) or 'none'}), got {impl!r}"
        )
    # only after the check, so that an error leaves every layer unchanged
    for layer in layers:
        layer.impl = impl
    return len(layers)
