"""Find the MLPs of a model by running the model, not by the names of its layers.

A layer is the last layer of an MLP if each of its inputs depends on one output (or on one pair of
outputs) of the layers that ran just before it, at the same token, and on nothing else. These inputs
are the hidden neurons, which can be permuted, dropped and fitted one by one. Attention fails this
test: its values affect later tokens, and its queries affect all features of a head. An MLP with a
norm between its matrices fails the test, too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import chain, zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from model_components._modes import evaluating

from ..data.batches import first_output, positions_of
from ..layers.linear import SmallerLinear
from ..layers.weights import is_linear

# a probe batch holds two copies of a row of `_TOKENS` synthetic tokens, or of up to `_ROWS` rows of
# a given batch
_TOKENS = 8
_ROWS = 4
# tolerance, relative to a layer's input: far above the rounding differences between two equal rows,
# and far below the change that a test makes to one of them
_NEAR = 1e-2

# functions that return the indices of an up layer's outputs that belong to some neurons, given the
# neurons' indices and the number of all neurons
LAYOUTS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "plain": lambda neurons, count: neurons,
    "halves": lambda neurons, count: torch.cat([neurons, neurons + count]),
    "interleaved": lambda neurons, count: torch.stack([2 * neurons, 2 * neurons + 1], 1).flatten(),
}


@dataclass(frozen=True)
class Mlp:
    """The layers of an MLP, as names of the model's submodules.

    Attributes:
        ups: The layers that write the hidden neurons: an up layer, or a gate and an up layer.
        down: The layer that reads the hidden neurons, which is the MLP's last layer.
        layout: The order of an up layer's outputs. ``"plain"`` means one output per neuron. If gate
            and up are in one matrix, they are its ``"halves"``, or their rows are
            ``"interleaved"``.
    """

    ups: tuple[str, ...]
    down: str
    layout: str = "plain"

    def rows(self, neurons: Tensor, count: int) -> Tensor:
        """Return the indices of the outputs of an up layer that belong to ``neurons``.

        ``count`` is the number of all neurons of the MLP.

        >>> Mlp(("gate_up_proj",), "down_proj", "halves").rows(torch.tensor([0, 2]), 3)
        tensor([0, 2, 3, 5])
        """
        return LAYOUTS[self.layout](neurons, count)


@dataclass
class _Run:
    """A record of a linear layer's first call."""

    name: str
    module: nn.Module
    inputs: Tensor
    in_features: int
    out_features: int
    hypotheses: list[Mlp] = field(default_factory=list)  # MLPs of which it may be the last layer

    @property
    def square(self) -> bool:
        return self.in_features == self.out_features


@torch.no_grad()
def find_mlps(model: nn.Module, batch: Mapping[str, object] | None = None) -> list[Mlp]:
    """Return the MLPs of a model, in the order in which they run.

    Args:
        model: The model. It runs a few times, on two equal rows of at most eight tokens, or on two
            copies of the first four rows of ``batch``.
        batch: Arguments to run the model with, needed if the model reads neither tokens nor images.

    Raises:
        ValueError: Weights are on the meta device, the model cannot be run, a layer returns NaN or
            infinity, or a forward hook changes a layer's output.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> find_mlps(GPT2LMHeadModel(GPT2Config(vocab_size=9, n_embd=4, n_layer=1, n_head=1)))
    [Mlp(ups=('transformer.h.0.mlp.c_fc',), down='transformer.h.0.mlp.c_proj', layout='plain')]
    """
    if any(p.is_meta for p in model.parameters()):
        raise ValueError(
            f"kronecker: {type(model).__name__} has weights on the meta device, expected loaded "
            "weights"
        )
    layers = _linear_layers(model)
    with evaluating(model):
        rows = _equal_halves(model, batch)
        runs = _runs(model, layers, rows)
        for index, run in enumerate(runs):
            run.hypotheses = _hypotheses(runs[:index], run)
        confirmed: list[Mlp] = []
        # try the likeliest hypothesis of every layer, then the second of every layer, and so on
        for guesses in zip_longest(*(run.hypotheses for run in runs if not run.square)):
            trials = [mlp for mlp in guesses if mlp is not None]
            while trials:
                trials, now = _apart(trials, taken=names_of(confirmed))
                confirmed += _tried(model, now, runs, rows)[0]
        kinds = {_kind(m) for m in confirmed}
        # Square matrices are tried last and one by one: they are nearly always part of attention,
        # where a change affects many layers.
        for mlp in chain.from_iterable(run.hypotheses for run in runs if run.square):
            alike = _kind(mlp) in kinds or not kinds
            if alike and names_of(confirmed).isdisjoint((*mlp.ups, mlp.down)):
                confirmed += _tried(model, [mlp], runs, rows)[0]
        confirmed = _read_once(model, confirmed, runs, rows)
    order = {r.name: i for i, r in enumerate(runs)}
    return sorted(confirmed, key=lambda m: order[m.down])


def _linear_layers(model: nn.Module) -> dict[str, nn.Module]:
    layers = {}
    for name, module in model.named_modules():
        if is_linear(module) or isinstance(module, SmallerLinear):
            layers[name] = module
    return layers


def _kind(mlp: Mlp) -> tuple[str, ...]:
    """Return an MLP's layer names with # for numbers, so that they are equal in all blocks."""
    # layers.3.fc1 and layers.7.fc1 are of one kind
    return tuple(re.sub(r"\d+", "#", name) for name in (*mlp.ups, mlp.down))


def names_of(mlps: Iterable[Mlp]) -> set[str]:
    """Return the names of all layers of MLPs."""
    return set(chain.from_iterable((*m.ups, m.down) for m in mlps))


def _apart(trials: Sequence[Mlp], taken: set[str]) -> tuple[list[Mlp], list[Mlp]]:
    """Split candidate MLPs into those to test later and those to test now.

    Those to test now share no layer. Candidates with a layer in ``taken`` are dropped.
    """
    later: list[Mlp] = []
    now: list[Mlp] = []
    for mlp in trials:
        if taken.isdisjoint((*mlp.ups, mlp.down)):
            is_apart = names_of(now).isdisjoint((*mlp.ups, mlp.down))
            (now if is_apart else later).append(mlp)
    return later, now


def _equal_halves(model: nn.Module, batch: Mapping[str, object] | None) -> dict[str, object]:
    """Return a probe batch whose two halves are equal.

    Each half is a synthetic row if the model can run on one, else the first rows of ``batch``.
    """
    device = next(model.parameters()).device
    if isinstance(model, PreTrainedModel):
        simple = _simple_arguments(model, device)
    else:
        simple = {}
    if batch is None:
        from_batch = {}
    else:
        from_batch = {k: _doubled(v, device) for k, v in batch.items()}
    why = ""
    for arguments in (simple, from_batch):
        if arguments:
            try:
                model(**arguments)
            except (TypeError, ValueError, RuntimeError, IndexError, AttributeError) as error:
                why = (
                    f" ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''})"
                )
                continue
            return arguments
    needed = (
        "a first calibration batch that the model can run on or, for convert_, a map from layer "
        "names to configs"
    )
    raise ValueError(
        f"kronecker: {type(model).__name__} could not be run to find its MLPs{why}; expected "
        f"{needed}"
    )


def _simple_arguments(model: PreTrainedModel, device: torch.device) -> dict[str, object]:
    """Return a batch of two equal rows for a model that reads tokens or images."""
    config: Any = model.config
    if model.main_input_name == "input_ids":
        count = getattr(config.get_text_config(), "vocab_size", None)
        if not isinstance(count, int):  # CANINE hashes ids
            return {}
        length = min(_TOKENS, positions_of(model) or _TOKENS)
        # from 3, since the first ids are special tokens in many vocabularies
        ids = (torch.arange(3, 3 + length, device=device) % count).expand(2, -1)
        simple: dict[str, object] = {"input_ids": ids}
        if config.is_encoder_decoder:
            simple["decoder_input_ids"] = ids
        return simple
    has_sizes = hasattr(config, "image_size") and hasattr(config, "num_channels")
    if model.main_input_name == "pixel_values" and has_sizes:
        height, width = (
            config.image_size
            if isinstance(config.image_size, (tuple, list))
            else [config.image_size] * 2
        )
        # noise, since all patches of a uniform image would be equal
        picture = torch.randn(
            1, config.num_channels, height, width, generator=torch.Generator().manual_seed(0)
        )
        return {"pixel_values": picture.to(device, model.dtype).expand(2, -1, -1, -1)}
    return {}


def _doubled(value: object, device: torch.device) -> Any:
    if isinstance(value, Tensor) and value.dim():
        return torch.cat([value[:_ROWS]] * 2).to(device)
    return value


def _runs(
    model: nn.Module, layers: Mapping[str, nn.Module], rows: Mapping[str, object]
) -> list[_Run]:
    """Run the model, and return the first run of each linear layer, in the order they ran."""
    runs: dict[str, _Run] = {}

    def see(name: str, given: Tensor, out: Tensor) -> None:
        module = layers[name]
        # `watched` has added one hook; any other hook may change the output
        if len(module._forward_hooks) > 1 and not torch.equal(module.forward(given), out):
            raise ValueError(
                f"kronecker: a forward hook changes the output of {name}, expected a model without "
                "such hooks; remove the hook"
            )
        # no test below can pass with NaN, so the layer would be skipped silently
        if not torch.isfinite(out).all():
            raise ValueError(
                f"kronecker: {name} returns NaN or infinity, expected finite outputs; check its "
                "weight"
            )
        if name not in runs and len(given) % 2 == 0:
            runs[name] = _Run(name, module, given, given.shape[-1], out.shape[-1])

    with watched(layers, see):
        model(**rows)
    return list(runs.values())


def _hypotheses(before: Sequence[_Run], run: _Run) -> list[Mlp]:
    """Return candidate MLPs that end with the given layer, the likeliest first.

    Their other layers are the one or two that ran just before this layer.
    """
    # gate and up read one tensor and run one after the other, just before the last layer
    ups = []
    for up in before[-2:]:
        if up.in_features == run.out_features and up.inputs is before[-1].inputs:
            ups.append(up)
    # a layer with the same input as the layer before is parallel to it, as k and v are to q
    if not ups or ups[-1] is not before[-1] or run.inputs is before[-1].inputs:
        return []
    sizes = [r.out_features for r in ups]
    names = tuple(r.name for r in ups)
    mlps = [Mlp(names, run.name)] if sizes == [run.in_features] * 2 else []
    if sizes[-1] == run.in_features:
        mlps.append(Mlp(names[-1:], run.name))
    if sizes[-1] == 2 * run.in_features:
        mlps.append(Mlp(names[-1:], run.name, "halves"))
        mlps.append(Mlp(names[-1:], run.name, "interleaved"))
    return mlps


def _read_once(
    model: nn.Module, mlps: list[Mlp], runs: Sequence[_Run], rows: Mapping[str, object]
) -> list[Mlp]:
    """Return the MLPs whose hidden neurons are read only by their own last layer."""
    # one pass for all MLPs; each is tried alone only if another layer reads a neuron
    if not mlps or _tried(model, mlps, runs, rows)[1]:
        return mlps
    return [mlp for mlp in mlps if _tried(model, [mlp], runs, rows)[1]]


def _tried(
    model: nn.Module, trials: Sequence[Mlp], runs: Sequence[_Run], rows: Mapping[str, object]
) -> tuple[list[Mlp], bool]:
    """Test candidate MLPs in one pass of the model.

    Return the confirmed MLPs, and whether no other layer reads their hidden neurons.

    The batch has two equal halves, and each MLP is tested in the second half. At the first token,
    some outputs of the up layers are changed. The last layer's input must then change at the
    neurons of these outputs and nowhere else. At the last token, the up layers' outputs are
    replaced by their outputs for the first half's second token. The last layer's input must then
    equal its input at that token, which fails if there is a residual connection. Finally, the
    second half of the last layer's output is replaced by the first half, so that the layers that
    follow get equal halves again.

    If the model's outputs for the two halves still differ, another layer has read hidden neurons.
    """
    generator = torch.Generator().manual_seed(0)
    layers = {r.name: r.module for r in runs}
    sizes = {r.name: r.in_features for r in runs}
    chosen: dict[str, Tensor] = {}
    changes: dict[str, Callable[[str, Tensor, Tensor], Tensor]] = {}
    right: dict[str, bool] = {}

    def disturb(rows: Tensor) -> Callable:
        def changed(name: str, given: Tensor, out: Tensor) -> Tensor:
            out = out.clone()
            parts = out.view(2, -1, out.shape[-1])
            # several times larger than usual, so that the change is visible after a ReLU or a gate
            other = torch.randn(len(rows), generator=generator).to(out) * (
                1 + 3 * parts.float().std().to(out)
            )
            parts[1, 0, rows.to(out.device)] = other
            if parts.shape[1] > 2:
                parts[1, -1] = parts[0, 1]
            return out

        return changed

    def compare(name: str, given: Tensor, out: Tensor) -> Tensor:
        first, second = given.float().reshape(2, -1, given.shape[-1])
        near = _NEAR * first.square().mean().sqrt()
        changed = (second - first).abs() > near
        copied = len(first) < 3 or not bool(((second[-1] - first[1]).abs() > near).any())
        # the last token was changed on purpose
        changed[len(first) - 1 if len(first) > 2 else len(first) :] = False
        alone = bool(changed[0].any()) and not bool(changed[1:].any())
        # the neurons that were changed may differ; all others must not
        changed[0, chosen[name].to(changed.device)] = False
        # a layer that runs several times has to pass the test every time
        right[name] = right.get(name, True) and copied and alone and not bool(changed.any())
        parts = out.clone().view(2, -1, out.shape[-1])
        parts[1] = parts[0]
        return parts.view_as(out)

    for mlp in trials:
        count = sizes[mlp.down]
        # half of the neurons are changed; the other half must not depend on them
        chosen[mlp.down] = torch.randperm(count, generator=generator)[: (count + 1) // 2]
        changes |= dict.fromkeys(mlp.ups, disturb(mlp.rows(chosen[mlp.down], count)))
    changes |= dict.fromkeys((mlp.down for mlp in trials), compare)
    with watched(
        {n: layers[n] for n in changes}, lambda name, given, out: changes[name](name, given, out)
    ):
        same = _same_halves(first_output(model, rows))
    verified = [m for m in trials if right.get(m.down, False)]
    return verified, same


def _same_halves(out: Tensor) -> bool:
    """Return whether the outputs for two equal halves are the same."""
    if len(out) % 2:
        return True  # the output does not have one entry per row of the batch
    first, second = out.reshape(2, -1)
    return bool(((second - first).abs() <= _NEAR * first.square().mean().sqrt()).all())


@contextmanager
def watched(
    modules: Mapping[str, nn.Module], see: Callable[[str, Tensor, Tensor], Tensor | None]
) -> Iterator[None]:
    """Call ``see(name, input, output)`` whenever one of the modules runs.

    A tensor that ``see`` returns replaces the output.
    """
    with ExitStack() as hooks:
        for name, module in modules.items():
            hooks.enter_context(
                module.register_forward_hook(
                    # name is bound as a default value, or all lambdas would see the last name
                    lambda module, given, out, name=name: see(name, given[0], out)
                )
            )
        yield
