"""`ThinkerConfig`: the settings of a `LatentThinker`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from typing import Annotated, Any, Literal

from model_components._checks import MaybeWhole, Range, Whole, is_whole, problem, refuse
from model_components._pretrained import CheckedModelConfig

from .flow import PARTS, FlowPlan

Positions = Literal["learned", "cyclic", "rotary", "rotary_2d", "random", "aligned"]
LatentInit = Literal["table", "noise", "tokens"]
MemoryKind = Literal["none", "grow", "static"]
StepUpdate = Literal["normalized", "replace"]
Mixer = Literal["attention", "mlp"]
OutputSteps = Literal["last", "all"] | Sequence[int]

Rate = Annotated[float, Range(above=0)]
_DERIVED: Any = None
"""The default of a field that is derived from other fields."""


class ThinkerConfig(CheckedModelConfig):
    """The sizes and other settings of a `LatentThinker`.

    With the defaults, a model learns to copy sequences in seconds on a CPU. To learn to reverse
    sequences, it needs ``from_end=True``; to learn to add numbers, it needs
    ``positions="aligned"``.

    Args:
        vocab_size: Number of token ids; ids are 0 to ``vocab_size - 1``.
        output_size: Number of answer symbols; default: ``vocab_size``.
        hidden_size: Width d of token embeddings and latents.
        num_heads: Number of attention heads; must divide ``hidden_size``.
        mlp_size: Inner width of the SwiGLU MLP; default: 8/3 d, rounded up to a multiple of 8.
        layers_per_step: Number of layers in the shared block. Each step runs all of them.
        max_input_length: Maximum input length, in tokens.
        max_output_length: Maximum answer length, in symbols.
        num_latents: Number of latents, unless a call sets ``n_latent``. Default: 8, or one for each
            token with ``latent_init="tokens"``. With ``latent_init="table"``, this number is also
            the maximum.
        latent_init: The initial latents. ``"table"``: a learned vector for each latent (the
            default). ``"noise"``: one shared learned vector, plus N(0, 1) noise for each latent, so
            that a trained model can use more latents than in training. ``"tokens"``: the embedded
            input tokens; the logits of these latents are the answer (the default with ``causal``).
        latent_noise: Standard deviation of the noise that ``latent_init="noise"`` adds.
        n_step: Number of steps, unless a call sets ``n_step``.
        plan: The operations of each step, unless a call sets ``plan``: a `FlowPlan`, or the
            dictionary that its `to_dict` returns. Default: every step runs all operations that the
            model has. A plan without a loop has a fixed number of steps, which replaces ``n_step``.
        positions: Position codes of input and answer. ``"learned"``: a learned vector for each
            index. ``"cyclic"``: learned vectors that repeat after ``num_positions``, so that longer
            inputs need no new ones. ``"rotary"``: the input's keys are rotated, and so are queries
            of latents that start from tokens; the answer's queries are learned. ``"rotary_2d"``:
            like ``"rotary"``, but half of each head is rotated by the token's row and half by its
            column in a square grid, which is read row by row. ``"random"``: a sorted random subset
            of ``num_positions`` learned codes, drawn once for each batch and shared by input and
            answer (Ruoss et al. 2023). ``"aligned"``: a learned vector for each position within an
            operand (McLeish et al. 2024); operands end at ``separators``.
        from_end: Whether to add a learned code for the position counted from the input's end.
        num_positions: Number of learned codes of ``"random"`` (default: four times the longest
            sequence) or ``"cyclic"`` (default: 4).
        separators: Token ids that end an operand, for ``positions="aligned"``.
        symbols: The symbols of the `RowsTask` that the model is made for. Tasks with other symbols
            are rejected.
        memory: The memory of past latents' keys and values. ``"none"``: no memory. ``"grow"``: a
            memory that keeps every write. ``"static"``: storage for ``memory_size`` writes, which
            is filled in place (only without gradients).
        memory_size: Capacity of a static memory, in writes.
        num_static_tokens: Number of learned vectors that ``static_mem_lookup`` attends to.
        step_update: How a step combines the latents z and the block's output f(z).
            ``"normalized"``: z + λ (f(z) - z), where z, f(z) and the result have unit RMS and λ is
            learned for each channel (nGPT, Loshchilov et al. 2024). The norm of the latents stays
            the same, and they have converged when they no longer change. ``"replace"``: f(z), whose
            norm grows with the number of steps.
        step_rate: The initial value of λ.
        step_noise: Standard deviation of the noise that is added to the latents before each step in
            training. The noise teaches the model to correct errors, so that correct answers stay
            correct in further steps.
        decoder_self_attention: Whether answer positions also attend to each other in the read-out.
        causal: Whether latents attend only to their own and earlier tokens; needs
            ``latent_init="tokens"``. If there are fewer latents than tokens, they are the last
            tokens (Perceiver AR, Hawthorne et al. 2022).
        window: With ``latent_init="tokens"``, each latent attends only to positions less than
            ``window`` away. With 2, these are its own position and the adjacent ones (with
            ``"rotary_2d"``, the eight cells around it), so information moves one position per step.
            Default: no limit.
        mixer: The layer that mixes latents: ``"attention"`` (the default) or, with
            ``latent_init="tokens"``, ``"mlp"``, a token-mixing MLP over the positions. The MLP is
            for inputs of one length without padding, such as grids (TRM, Jolicoeur-Martineau 2025).
        initializer_range: Standard deviation of the initial embeddings, positions, latents and
            static tokens. With a small value such as 0.02, a model did not learn to copy within the
            time that the default needs.
        **rest: Fields of `transformers.PreTrainedConfig`.

    Raises:
        ValueError: A field is invalid, or conflicts with another.

    >>> ThinkerConfig(vocab_size=16).mlp_size
    176
    >>> ThinkerConfig(vocab_size=16, num_heads=5)
    Traceback (most recent call last):
    ValueError: ThinkerConfig: num_heads is 5, expected a divisor of hidden_size, 64
    """

    model_type = "latent_thinker"

    vocab_size: Whole = 16
    output_size: Whole = _DERIVED
    hidden_size: Whole = 64
    num_heads: Whole = 4
    mlp_size: Whole = _DERIVED
    # a larger number means a damaged config
    layers_per_step: Annotated[int, Range(least=1, most=1000)] = 1
    max_input_length: Whole = 64
    max_output_length: Whole = 64
    num_latents: MaybeWhole = None
    latent_init: LatentInit = _DERIVED
    latent_noise: Rate = 1.0
    # a plan has a row for each step, so a huge number in a damaged config would fill the memory
    n_step: Annotated[int, Range(least=1, most=1_000_000)] = 4
    plan: Any = None
    positions: Positions = "learned"
    from_end: bool = False
    num_positions: Whole = _DERIVED
    separators: list[int] = field(default_factory=list)
    symbols: Any = None
    memory: MemoryKind = "none"
    memory_size: MaybeWhole = None
    num_static_tokens: Annotated[int, Range(least=0)] = 0
    step_update: StepUpdate = "normalized"
    # with 0.5, accuracy drops when a model takes more steps than in training: for copying, from
    # 0.99 to 0.65 with four times as many steps
    step_rate: Annotated[float, Range(above=0, most=1)] = 0.95
    step_noise: Annotated[float, Range(least=0)] = 0.1
    decoder_self_attention: bool = False
    causal: bool = False
    window: MaybeWhole = None
    mixer: Mixer = "attention"
    initializer_range: Rate = 0.5

    def derive(self) -> None:
        """Fill in the fields that were not given, from the values of other fields."""
        # `Task.separators` is a tuple, but a config that was saved as JSON has a list
        if isinstance(self.separators, tuple | range):
            self.separators = list(self.separators)
        if self.output_size is None:
            self.output_size = self.vocab_size
        # fields are checked after this, so a size may still be a string
        if self.mlp_size is None and is_whole(self.hidden_size):
            self.mlp_size = swiglu_size(self.hidden_size)
        if self.latent_init is None:
            self.latent_init = "tokens" if self.causal else "table"
        if self.num_latents is None and self.latent_init != "tokens":
            self.num_latents = 8
        if self.num_positions is None:
            self.num_positions = 4
            lengths = (self.max_input_length, self.max_output_length)
            if self.positions != "cyclic" and all(is_whole(length) for length in lengths):
                self.num_positions = 4 * self.longest

    def __setattr__(self, key: str, value: object) -> None:
        """Set a field. A plan is converted to plain lists, as in JSON.

        A plan that is passed to ``from_pretrained`` or set later is converted, too.
        """
        super().__setattr__(key, _plain(value) if key == "plan" else value)

    def problems(self) -> Iterator[str]:
        """Yield a message for each conflict between fields."""
        yield from self._problems_of_positions()
        yield from self._problems_of_steps()
        yield from self._problems_of_latents()
        yield from self._problems_of_mixer()

    def _problems_of_positions(self) -> Iterator[str]:
        if self.hidden_size % self.num_heads:
            yield problem(self, "num_heads", f"a divisor of hidden_size, {self.hidden_size}")
        size = self.hidden_size // self.num_heads
        if self.positions == "rotary" and size % 2:
            yield f"hidden_size / num_heads is {size}, expected an even size for rotary positions"
        # there are two axes, and each axis rotates pairs of features
        if self.positions == "rotary_2d" and size % 4:
            yield (
                f"hidden_size / num_heads is {size}, expected a multiple of 4 for rotary positions "
                "in two dimensions"
            )
        if self.positions == "random" and self.num_positions < self.longest:
            yield problem(self, "num_positions", f"at least the longest sequence, {self.longest}")
        if (self.positions == "aligned") != bool(self.separators):
            yield problem(self, "separators", 'token ids with positions="aligned", otherwise []')
        if not all(0 <= token < self.vocab_size for token in self.separators):
            yield problem(self, "separators", f"token ids, below vocab_size, {self.vocab_size}")

    def _problems_of_steps(self) -> Iterator[str]:
        if (self.memory == "static") != (self.memory_size is not None):
            yield problem(self, "memory_size", 'a number with memory="static", otherwise None')
        plan = FlowPlan(**self.plan) if self.plan else None
        if plan is not None and plan.uses_memory and self.memory == "none":
            yield problem(self, "memory", '"grow" or "static", since the plan uses the memory')
        if plan is not None and plan.uses_static and not self.num_static_tokens:
            yield problem(
                self, "num_static_tokens", "1 or more, since the plan looks up static tokens"
            )

    def _problems_of_latents(self) -> Iterator[str]:
        if self.latent_noise != 1 and self.latent_init != "noise":
            yield problem(self, "latent_noise", '1 unless latent_init="noise"')
        if self.causal and not self.at_tokens:
            yield problem(self, "latent_init", '"tokens" with causal=True')
        # from_end and the side of a grid depend on the number of later tokens
        if self.causal and self.positions not in ("learned", "cyclic", "rotary"):
            yield problem(self, "positions", "learned, cyclic or rotary with causal=True")
        if self.causal and self.from_end:
            yield problem(self, "from_end", "False with causal=True")
        if self.at_tokens and self.decoder_self_attention:
            yield problem(
                self,
                "decoder_self_attention",
                'False with latent_init="tokens", whose latents are the answer',
            )
        if self.window is not None and not self.at_tokens:
            yield problem(self, "window", 'None unless latent_init="tokens"')
        if self.at_tokens and not self.causal and self.num_latents is not None:
            yield problem(
                self,
                "num_latents",
                'None with latent_init="tokens" and causal=False: every token has a latent',
            )

    def _problems_of_mixer(self) -> Iterator[str]:
        has_other_places = self.causal or self.window is not None or self.num_latents is not None
        if self.mixer == "mlp" and (not self.at_tokens or has_other_places):
            yield (
                'mixer is "mlp", expected latent_init="tokens" and causal=False, without window '
                "and num_latents"
            )

    @property
    def at_tokens(self) -> bool:
        """Return whether each latent starts from an input token and gives the answer there."""
        return self.latent_init == "tokens"

    def latents_for(self, length: int) -> int:
        """Return the default number of latents for an input of ``length`` tokens."""
        if self.at_tokens:
            if self.num_latents is None:
                return length
            return min(self.num_latents, length)
        assert self.num_latents is not None
        return self.num_latents

    @property
    def table_size(self) -> int | None:
        """The number of latents in the table of initial latents, or None without a table."""
        if self.latent_init == "table":
            return self.num_latents
        return None

    @property
    def longest(self) -> int:
        """The larger of the maximum input length and the maximum output length."""
        return max(self.max_input_length, self.max_output_length)


def swiglu_size(width: int) -> int:
    """Return the inner width of a SwiGLU: 8/3 of the width, rounded up to a multiple of 8."""
    return -(-width // 3) * 8


def _plain(plan: Any) -> dict[str, list[list[int]]] | None:
    """Convert a plan to plain lists, as in JSON."""
    if isinstance(plan, Mapping) and set(plan) <= set(PARTS):
        plan = FlowPlan(**plan)
    if not isinstance(plan, FlowPlan | None):
        refuse("ThinkerConfig", "plan", plan, "a FlowPlan, or the result of its to_dict")
    return None if plan is None else plan.to_dict()
