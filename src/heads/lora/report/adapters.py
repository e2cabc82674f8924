"""`lora_report`: what an adapter costs, how far its first step goes, what is probably wrong."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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
"""Outside of this, ``scaling`` is worth a second look."""


@dataclass(frozen=True)
class AdapterRow:
    """One layer's adapter.

    ``first_step`` is how far an output moves with Adam's first step, per unit of learning rate.

    Adam's first step is the gradient's sign times the learning rate, and B starts at zero: for
    inputs of size 1, an output moves by up to ``scaling * Σ_k |A_k x|``, about
    ``scaling * Σ_k ||A_k||``.

    Attributes:
        name: The layer's.
        rank: Of its adapter.
        scaling: That its update is multiplied by.
        parameters: Of its adapter.
        first_step: As above.
        update: Size of its change of the weight, |s B A| in the Frobenius norm.
    """

    name: str
    rank: int
    scaling: float
    parameters: int
    first_step: float
    update: float


@dataclass(frozen=True)
class LoraReport(Report):
    """Counts, bytes of a training step, adapters, and warnings.

    Attributes:
        parameters: How many numbers the model has, with its adapters.
        lora: How many of them are the active adapters'.
        trainable: How many of them require grad.
        weight_bytes: Size of all parameters.
        gradient_bytes: Size of the gradients of those that train.
        optimizer_bytes: Size of Adam's two averages.
        activation_bytes: Size of what a training step saves for backward; None where it was not
            asked for.
        adapters: One entry a layer and active adapter.
        warnings: What looks wrong.
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
        """Return the bytes that a training step holds, by kind."""
        sizes = {
            "weights": self.weight_bytes,
            "gradients": self.gradient_bytes,
            "AdamW's moments": self.optimizer_bytes,
        }
        if self.activation_bytes is None:
            return sizes
        return sizes | {"saved activations": self.activation_bytes}

    def table(self) -> Table:
        """Counts and bytes."""
        counts = {
            "parameters": f"{self.parameters:,}",
            "  trainable": f"{self.trainable:,}",
            "  in adapters": f"{self.lora:,}",
        }
        sizes = {name: f"{size / 2**20:,.2f} MB" for name, size in self.bytes().items()}
        return Table(("", "in all"), list((counts | sizes).items()))

    def remarks(self) -> list[str]:
        """List what trains, the adapters' first step, and warnings."""
        lines = [f"{self.trainable / max(1, self.parameters):.2%} of the parameters train"]
        for (rank, scaling), count in Counter(
            (row.rank, row.scaling) for row in self.adapters
        ).items():
            layers = Counter(
                r.name.rpartition(".")[2]
                for r in self.adapters
                if (r.rank, r.scaling) == (rank, scaling)
            )
            names = ", ".join(f"{number} {name}" for name, number in layers.items())
            lines.append(f"{count} adapters of rank {rank}, scaling {scaling:g}: {names}")
        # not on the meta device
        filled = [row for row in self.adapters if math.isfinite(row.update)]
        if any(row.update for row in filled):
            lines.append(f"updates s B A have norms of {_spread([row.update for row in filled])}")
        elif filled:
            steps = _spread([row.first_step for row in filled])
            lines.append(f"Adam's first step moves an output by {steps} learning rates")
        return lines + [f"warning: {text}" for text in self.warnings]

    def plot(self, ax: Axes | None = None) -> Figure:
        """The bytes of a training step (extra ``plot``), on ``ax`` or in a new figure.

        Raises:
            ImportError: matplotlib is not installed.
        """
        return bars(
            ax, "LoraReport.plot", {n: size / 2**20 for n, size in self.bytes().items()}, "MB"
        )


def saved_activation_bytes(model: nn.Module, batch: int, context: int) -> int:
    """Return the bytes that autograd would keep for one training step.

    Of a model that generates text, the loss of all tokens is counted. The step runs on tensors that
    hold no numbers.
    """
    storages: dict[int, torch.UntypedStorage] = {}
    with in_mode(model, training=True), FakeTensorMode(allow_non_fake_inputs=True) as fake:
        fake_tensors: dict[str, Tensor] = {
            name: fake.from_tensor(t)
            for name, t in (*model.named_parameters(), *model.named_buffers())
        }
        resident = {t.untyped_storage()._cdata for t in fake_tensors.values()}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata not in resident:
                storages[storage._cdata] = storage
            return tensor

        ids = torch.zeros(
            batch, context, dtype=torch.int64, device=next(iter(fake_tensors.values())).device
        )
        inputs: dict[str, object] = {"input_ids": ids, "use_cache": False}
        can_generate = getattr(model, "can_generate", None)
        if can_generate is not None and can_generate():
            inputs["labels"] = ids  # its loss saves more than its logits
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
    """Report counts, bytes and warnings of a peft model's LoRA adapters.

    Args:
        model: A peft model.
        batch: With ``context``, also count the activations that one training step saves, without
            running one.
        context: Tokens a sample.
        base_vocab_size: How many tokens the base model came with; more now, and an untrained head,
            is a warning.
        trained: The model has been trained: a B that is still zero is a warning.

    Returns:
        Counts, bytes and warnings; it prints as a table and can be drawn.

    Raises:
        ValueError: One of ``batch`` and ``context`` without the other.

    >>> from peft import LoraConfig, get_peft_model
    >>> model = get_peft_model(
    ...     nn.Sequential(nn.Linear(4, 4)), LoraConfig(r=2, lora_alpha=64, target_modules=["0"])
    ... )
    >>> print(lora_report(model).warnings[0])
    scaling is 32 in 1 adapters (0, ...): usual is 0.1 to 4, lora_alpha / r of 1 or 2
    """
    if (batch is None) != (context is None):
        raise ValueError(
            f"lora_report: batch is {batch} and context {context}, expected both or neither"
        )
    layers = {name.removeprefix(PREFIX): layer for name, layer in lora_layers(model).items()}
    rows: list[AdapterRow] = []
    zero: list[str] = []
    broken: list[str] = []
    copied: list[str] = []
    for name, layer in layers.items():
        for adapter in layer.active_adapters:
            if adapter not in layer.r:
                continue
            a, b = _factors_of(layer, adapter)
            rows.append(_measure_adapter(name, layer, adapter))
            if a.device.type != "meta":
                if not b.detach().any():
                    zero.append(name)
                if not (a.isfinite().all() and b.isfinite().all()):
                    broken.append(name)
            if _casts_input(layer, a):
                copied.append(name)
    zero = zero if trained or len(zero) < len(rows) else []
    warnings = _warnings(model, layers, rows, zero, broken, copied, base_vocab_size)
    trainable = [p for p in model.parameters() if p.requires_grad]
    size = sum(p.nbytes for p in trainable)
    if batch is None or context is None:
        activations = None
    else:
        activations = saved_activation_bytes(model, batch, context)
    return LoraReport(
        parameters=sum(p.numel() for p in model.parameters()),
        lora=sum(row.parameters for row in rows),
        trainable=sum(p.numel() for p in trainable),
        weight_bytes=sum(p.nbytes for p in model.parameters()),
        gradient_bytes=size,
        optimizer_bytes=2 * size,
        activation_bytes=activations,
        adapters=tuple(rows),
        warnings=tuple(warnings),
    )


def _measure_adapter(name: str, layer: LoraLayer, adapter: str) -> AdapterRow:
    """Return an adapter's counts, and the sizes of its step and update; nan without weights."""
    a, b = _factors_of(layer, adapter)
    scaling = float(layer.scaling[adapter])
    step = update = math.nan
    if a.device.type != "meta":
        step = scaling * float(a.detach().float().flatten(1).norm(dim=1).sum())
        update = scaling * float((_gram(a) * _gram(b.T)).sum().clamp(min=0).sqrt())
    return AdapterRow(name, int(layer.r[adapter]), scaling, a.numel() + b.numel(), step, update)


def _casts_input(layer: LoraLayer, a: Tensor) -> bool:
    """Return whether peft's forward copies the input into the adapter's wider dtype."""
    base = getattr(layer.get_base_layer(), "weight", a)
    return (
        base.dtype.itemsize < a.dtype.itemsize
        and base.is_floating_point()
        and not isinstance(layer, LeanForward)
    )


def _factors_of(layer: LoraLayer, adapter: str) -> tuple[Tensor, Tensor]:
    """A and B of a linear layer's adapter, or of an embedding's."""
    if adapter in layer.lora_embedding_A:
        return layer.lora_embedding_A[adapter], layer.lora_embedding_B[adapter]
    return layer.lora_A[adapter].get_parameter("weight"), layer.lora_B[adapter].get_parameter(
        "weight"
    )


def _gram(a: Tensor) -> Tensor:  # (r, r)
    rows = a.detach().float().flatten(1)
    return rows @ rows.T


def _spread(values: Sequence[float]) -> str:
    ordered = sorted(values)
    return f"{ordered[len(ordered) // 2]:.2g} ({ordered[0]:.2g} to {ordered[-1]:.2g})"


def _some(names: list[str]) -> str:
    return f"{len(names)} adapters ({names[0]}, ...)"


def _warnings(
    model: nn.Module,
    layers: Mapping[str, object],
    rows: list[AdapterRow],
    zero: list[str],
    broken: list[str],
    copied: list[str],
    base_vocab_size: int | None,
) -> list[str]:
    warnings = []
    low, high = USUAL_SCALING
    for scaling in sorted({row.scaling for row in rows if not low <= row.scaling <= high}):
        names = [row.name for row in rows if row.scaling == scaling]
        usual = f"usual is {low:g} to {high:g}, lora_alpha / r of 1 or 2"
        warnings.append(f"scaling is {scaling:g} in {_some(names)}: {usual}")
    if zero:
        warnings.append(
            f"lora_B is still zero in {_some(zero)}: they were not trained, or got no gradient"
        )
    if broken:
        warnings.append(f"{_some(broken)} have numbers that are not finite")
    if copied:
        warnings.append(
            f"{_some(copied)} are float32 on a half-precision model and go through peft's forward, "
            "which copies their input: call accelerate_lora_, or pass autocast_adapter_dtype=False"
        )
    for name, config in getattr(model, "peft_config", {}).items():
        if not isinstance(config.target_modules, str):
            targets = config.target_modules
        else:
            targets = ()
        unused = [
            t for t in targets or () if not any(n == t or n.endswith(f".{t}") for n in layers)
        ]
        warnings += [
            f"adapter {name!r} has the target {t!r}, which matched no layer" for t in sorted(unused)
        ]
    return warnings + ([] if base_vocab_size is None else _untrained_tables(model, base_vocab_size))


def _untrained_tables(model: object, base_vocab_size: int) -> list[str]:
    """Warnings of tables that grew and do not learn."""
    if hasattr(model, "get_base_model"):
        base = model.get_base_model()
    else:
        base = model
    if not hasattr(base, "get_input_embeddings"):
        return []
    if hasattr(base, "get_output_embeddings"):
        head = base.get_output_embeddings()
    else:
        head = None
    tables = {"embedding": base.get_input_embeddings(), "head": head}
    size = tables["embedding"].weight.shape[0]
    return [
        f"the vocabulary grew from {base_vocab_size} to {size} and the {kind} is not trained: its "
        "new rows stay as they were made; add it to modules_to_save or to the targets"
        for kind, table in tables.items()
        if size > base_vocab_size
        and table is not None
        and not any(p.requires_grad for p in table.parameters())
    ]
