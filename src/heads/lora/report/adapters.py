"""`lora_report`: report the cost of adapters, their first step, and likely mistakes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call

from model_components._modes import in_mode
from model_components._report import Axes, Figure, Report, Table, bars

from ..layers import LeanForward, lora_layers
from ..surgery.prepare import PREFIX

USUAL_SCALING = (0.1, 4.0)
"""The usual range of ``scaling``. The report warns about values outside this range."""


@dataclass(frozen=True)
class AdapterRow:
    """Metrics of one adapter in one layer.

    Adam's first step is the sign of the gradient times the learning rate, and B starts at zero.
    Therefore, per unit of learning rate, the step moves an output by up to
    ``scaling * Σ_k |A_k x|``, where A_k is row k of A. If the elements of x have a size of about 1,
    this is about ``scaling * Σ_k ||A_k||``, which is the value of ``first_step``.

    Attributes:
        name: Name of the layer.
        rank: Rank of the adapter.
        scaling: Factor by which the update is multiplied.
        parameters: Number of parameters of the adapter.
        first_step: Estimated change of an output in Adam's first step, per unit of learning rate.
        update: Frobenius norm of the scaled update of the weight, |s B A|.
    """

    name: str
    rank: int
    scaling: float
    parameters: int
    first_step: float
    update: float


@dataclass(frozen=True)
class LoraReport(Report):
    """The parameter counts, memory, adapters and likely mistakes that `lora_report` found.

    Attributes:
        parameters: Number of parameters of the model, including its adapters.
        lora: Number of parameters in active adapters.
        trainable: Number of trainable parameters.
        weight_bytes: Size of all parameters.
        gradient_bytes: Size of the gradients of the trainable parameters.
        optimizer_bytes: Size of AdamW's two moments of the trainable parameters.
        activation_bytes: Size of the tensors that a training step saves for backward, or None if
            ``batch`` and ``context`` were not given.
        adapters: One entry per layer and active adapter.
        warnings: Descriptions of likely mistakes.
    """

    parameters: int
    lora: int
    trainable: int
    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int | None
    adapters: tuple[AdapterRow, ...]
    warnings: tuple[str, ...]

    def bytes(self) -> dict[str, int]:
        """Return the memory of a training step in bytes, by kind of tensor."""
        sizes = {
            "weights": self.weight_bytes,
            "gradients": self.gradient_bytes,
            "AdamW's moments": self.optimizer_bytes,
        }
        if self.activation_bytes is None:
            return sizes
        return sizes | {"saved activations": self.activation_bytes}

    def table(self) -> Table:
        """Return a table of the parameter counts and the memory of a training step."""
        counts = {
            "parameters": f"{self.parameters:,}",
            "  trainable": f"{self.trainable:,}",
            "  in adapters": f"{self.lora:,}",
        }
        rows = list(counts.items())
        for name, size in self.bytes().items():
            rows.append((name, f"{size / 2**20:,.2f} MiB"))
        return Table(("", "in all"), rows)

    def remarks(self) -> list[str]:
        """Return the trainable fraction, the ranks and sizes of the adapters, and the warnings."""
        lines = [f"{self.trainable / max(1, self.parameters):.2%} of the parameters are trainable"]
        # for each rank and scaling, the number of layers by the last part of their names
        alike: dict[tuple[int, float], Counter[str]] = {}
        for row in self.adapters:
            ends = alike.setdefault((row.rank, row.scaling), Counter())
            ends[row.name.rpartition(".")[2]] += 1
        for (rank, scaling), ends in alike.items():
            names = ", ".join(f"{number} {name}" for name, number in ends.items())
            lines.append(f"{ends.total()} adapters of rank {rank}, scaling {scaling:g}: {names}")
        # adapters on the meta device have no values
        filled = [row for row in self.adapters if math.isfinite(row.update)]
        if any(row.update for row in filled):
            lines.append(f"norms of the updates s B A: {_spread([row.update for row in filled])}")
        elif filled:
            steps = _spread([row.first_step for row in filled])
            lines.append(
                f"change of an output in Adam's first step, divided by the learning rate: {steps}"
            )
        lines += [f"warning: {text}" for text in self.warnings]
        return lines

    def plot(self, ax: Axes | None = None) -> Figure:
        """Plot the memory of a training step, on ``ax`` or in a new figure.

        Plotting requires the extra ``plot``.

        Raises:
            ImportError: matplotlib is not installed.
        """
        mebibytes = {name: size / 2**20 for name, size in self.bytes().items()}
        return bars(ax, "LoraReport.plot", mebibytes, "MiB")


def saved_activation_bytes(model: nn.Module, batch: int, context: int) -> int:
    """Return the size, in bytes, of the tensors that autograd would save in one training step.

    The step runs on fake tensors, which have no data. For a generative model, the step includes the
    loss of all tokens.
    """
    storages: dict[int, torch.UntypedStorage] = {}
    with in_mode(model, training=True), FakeTensorMode(allow_non_fake_inputs=True) as fake:
        fake_tensors: dict[str, Tensor] = {}
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            fake_tensors[name] = fake.from_tensor(tensor)
        # parameters and buffers are in memory anyway, so they are not counted
        resident = {tensor.untyped_storage()._cdata for tensor in fake_tensors.values()}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata not in resident:
                # keep the object alive: another storage could reuse the address of a freed one
                storages[storage._cdata] = storage
            return tensor

        device = next(iter(fake_tensors.values())).device
        ids = torch.zeros(batch, context, dtype=torch.int64, device=device)
        inputs: dict[str, object] = {"input_ids": ids, "use_cache": False}
        can_generate = getattr(model, "can_generate", None)
        if can_generate is not None and can_generate():
            inputs["labels"] = ids  # the loss saves more tensors than the logits alone
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            output = functional_call(model, fake_tensors, kwargs=inputs)
        size = sum(storage.nbytes() for storage in storages.values())
    del output
    return size


def lora_report(
    model: nn.Module,
    *,
    batch: int | None = None,
    context: int | None = None,
    base_vocab_size: int | None = None,
    trained: bool = False,
) -> LoraReport:
    """Report the size, the memory and likely mistakes of a peft model's LoRA adapters.

    Args:
        model: A peft model.
        batch: Number of samples per training step. If ``batch`` and ``context`` are given, the
            report includes the size of the activations that a step would save. No real step runs.
        context: Number of tokens per sample.
        base_vocab_size: The original vocabulary size of the base model. If the vocabulary has grown
            since then, the report warns about an embedding or a head that is not trained.
        trained: Whether the adapters have been trained. If True, the report warns about every B
            that is zero. If False, it does so only if the B of another adapter is not zero.

    Returns:
        The report, which prints as a table and can be plotted.

    Raises:
        ValueError: Only one of ``batch`` and ``context`` is given.

    >>> from peft import LoraConfig, get_peft_model
    >>> model = get_peft_model(
    ...     nn.Sequential(nn.Linear(4, 4)), LoraConfig(r=2, lora_alpha=64, target_modules=["0"])
    ... )
    >>> print(lora_report(model).warnings[0])
    scaling is 32 in 1 adapters (0, ...): expected 0.1 to 4, such as lora_alpha / r = 1 or 2
    """
    if (batch is None) != (context is None):
        raise ValueError(
            f"lora_report: expected both batch and context or neither, got batch={batch} and "
            f"context={context}"
        )
    findings = _Findings([], [], [], [])
    names = []
    for full_name, layer in lora_layers(model).items():
        names.append(full_name.removeprefix(PREFIX))
        for adapter in layer.active_adapters:
            if adapter in layer.r:
                findings.add(names[-1], layer, adapter)
    if not trained and len(findings.zero) == len(findings.rows):
        findings.zero.clear()  # before training, every B is zero
    warnings = _warnings(findings)
    warnings += _unused_targets(model, names)
    if base_vocab_size is not None:
        warnings += _untrained_tables(model, base_vocab_size)
    count = trainable = weight_bytes = gradient_bytes = 0
    for parameter in model.parameters():
        count += parameter.numel()
        weight_bytes += parameter.nbytes
        if parameter.requires_grad:
            trainable += parameter.numel()
            gradient_bytes += parameter.nbytes
    activations = None
    if batch is not None and context is not None:
        activations = saved_activation_bytes(model, batch, context)
    return LoraReport(
        parameters=count,
        lora=sum(row.parameters for row in findings.rows),
        trainable=trainable,
        weight_bytes=weight_bytes,
        gradient_bytes=gradient_bytes,
        optimizer_bytes=2 * gradient_bytes,
        activation_bytes=activations,
        adapters=tuple(findings.rows),
        warnings=tuple(warnings),
    )


@dataclass(frozen=True)
class _Findings:
    """The metrics of all adapters, and the names of the layers with likely mistakes.

    Attributes:
        rows: The metrics of each adapter.
        zero: Names of layers in which B is zero.
        broken: Names of layers in which A or B has NaN or infinity.
        copied: Names of layers whose input peft's forward copies into a wider dtype.
    """

    rows: list[AdapterRow]
    zero: list[str]
    broken: list[str]
    copied: list[str]

    def add(self, name: str, layer: LoraLayer, adapter: str) -> None:
        """Add the metrics and the problems of one adapter of a layer."""
        a, b = _factors_of(layer, adapter)
        self.rows.append(_measure_adapter(name, layer, adapter))
        if _casts_input(layer, a):
            self.copied.append(name)
        if a.device.type == "meta":  # meta tensors have no values
            return
        if not b.detach().any():
            self.zero.append(name)
        if not (a.isfinite().all() and b.isfinite().all()):
            self.broken.append(name)


def _measure_adapter(name: str, layer: LoraLayer, adapter: str) -> AdapterRow:
    """Return an adapter's metrics; on the meta device, the first step and the update are NaN."""
    a, b = _factors_of(layer, adapter)
    scaling = float(layer.scaling[adapter])
    step = update = math.nan
    if a.device.type != "meta":
        step = scaling * float(a.detach().float().flatten(1).norm(dim=1).sum())
        update = scaling * float((_gram(a) * _gram(b.flatten(1).T)).sum().clamp(min=0).sqrt())
    return AdapterRow(name, int(layer.r[adapter]), scaling, a.numel() + b.numel(), step, update)


def _casts_input(layer: LoraLayer, a: Tensor) -> bool:
    """Return whether the layer runs peft's forward and copies its input into a wider dtype."""
    base = getattr(layer.get_base_layer(), "weight", a)
    return (
        base.dtype.itemsize < a.dtype.itemsize
        and base.is_floating_point()
        and not isinstance(layer, LeanForward)
    )


def _factors_of(layer: LoraLayer, adapter: str) -> tuple[Tensor, Tensor]:
    """Return the factors A and B of one adapter of a layer."""
    if adapter in layer.lora_embedding_A:
        return layer.lora_embedding_A[adapter], layer.lora_embedding_B[adapter]
    a = layer.lora_A[adapter].get_parameter("weight")
    return a, layer.lora_B[adapter].get_parameter("weight")


def _gram(a: Tensor) -> Tensor:  # (r, r)
    # |B A|² is the sum of the elements of (A Aᵀ) * (Bᵀ B), so B A is never built
    rows = a.detach().float().flatten(1)
    return rows @ rows.T


def _spread(values: Sequence[float]) -> str:
    ordered = sorted(values)
    return f"median {ordered[len(ordered) // 2]:.2g} ({ordered[0]:.2g} to {ordered[-1]:.2g})"


def _some(names: list[str]) -> str:
    return f"{len(names)} adapters ({names[0]}, ...)"


def _warnings(findings: _Findings) -> list[str]:
    """Return warnings about the adapters."""
    warnings = []
    low, high = USUAL_SCALING
    strange: dict[float, list[str]] = {}
    for row in findings.rows:
        if not low <= row.scaling <= high:
            strange.setdefault(row.scaling, []).append(row.name)
    for scaling, names in sorted(strange.items()):
        usual = f"expected {low:g} to {high:g}, such as lora_alpha / r = 1 or 2"
        warnings.append(f"scaling is {scaling:g} in {_some(names)}: {usual}")
    if findings.zero:
        warnings.append(
            f"lora_B is still zero in {_some(findings.zero)}: these adapters were not trained, or "
            "received no gradient"
        )
    if findings.broken:
        warnings.append(f"{_some(findings.broken)} have numbers that are not finite")
    if findings.copied:
        warnings.append(
            f"{_some(findings.copied)} are in float32 on a half-precision model and run peft's "
            "forward, which copies their input into float32: call accelerate_lora_, or load the "
            "adapters with autocast_adapter_dtype=False"
        )
    return warnings


def _unused_targets(model: object, layers: Sequence[str]) -> list[str]:
    """Return a warning for each target of an adapter that matched no layer."""
    warnings = []
    for name, config in getattr(model, "peft_config", {}).items():
        # peft itself rejects a pattern that matches nothing
        if isinstance(config.target_modules, str):
            continue
        for target in sorted(config.target_modules or ()):
            # like peft, match whole parts at the end of a name: proj does not match q_proj
            if not any(f".{layer}".endswith(f".{target}") for layer in layers):
                warnings.append(
                    f"adapter {name!r} has the target {target!r}, which matched no layer"
                )
    return warnings


def _untrained_tables(model: object, base_vocab_size: int) -> list[str]:
    """Return warnings if the vocabulary has grown but the embedding or head is not trained."""
    base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model
    if not hasattr(base, "get_input_embeddings"):
        return []
    tables = {"embedding": base.get_input_embeddings()}
    if hasattr(base, "get_output_embeddings"):
        tables["head"] = base.get_output_embeddings()
    size = tables["embedding"].weight.shape[0]
    warnings = []
    for kind, table in tables.items():
        if size <= base_vocab_size or table is None:
            continue
        if not any(parameter.requires_grad for parameter in table.parameters()):
            warnings.append(
                f"the vocabulary grew from {base_vocab_size} to {size}, but the {kind} is not "
                "trained, so its new rows keep their initial values; add the layer to "
                "modules_to_save or target_modules"
            )
    return warnings
