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
"""The default of a field that is made from other fields."""


class ThinkerConfig(CheckedModelConfig):
    """The sizes and choices of a `LatentThinker`.

    The defaults learn to copy in seconds on a CPU; the recipe for reversing adds ``from_end=True``,
    that for addition ``positions="aligned"``.

    Args:
        vocab_size: Token ids of the input are below it.
        output_size: Symbols of the answer; default ``vocab_size``.
        hidden_size: d, the width of tokens and latents.
        num_heads: Attention heads; divides ``hidden_size``.
        mlp_size: Inner width of the SwiGLU; default 8/3 d, up to a multiple of 8.
        layers_per_step: Layers in the shared block; each step runs all of them.
        max_input_length: Longest input.
        max_output_length: Longest answer.
        num_latents: Latents when a call does not say, default 8; with ``latent_init="table"`` also
            the most there can be. With ``"tokens"`` one for each token is the default.
        latent_init: ``"table"``, a learned vector for each (the default); ``"noise"``, one learned
            vector plus N(0, 1) each, which lets a trained model think with more latents than it has
            seen; ``"tokens"``, the input's tokens themselves, whose own logits are the answer (the
            default with ``causal``).
        latent_noise: Standard deviation of what ``"noise"`` adds, instead of 1.
        n_step: Steps when a call does not say.
        plan: What each step does when a call does not say, a `FlowPlan` or its `to_dict`; default
            everything that the model has. One of a fixed length takes its own number of steps,
            whatever ``n_step`` is.
        positions: Codes of position for input and answer: ``"learned"`` by index; ``"cyclic"``,
            learned and the same again after ``num_positions`` places, so that none is new at any
            length; ``"rotary"`` turns the input's keys (the answer's queries are learned);
            ``"rotary_2d"``, half of each head by the row and half by the column of a grid that is
            read row by row; ``"random"``, an ordered random subset of ``num_positions`` learned
            ones, drawn once a batch and shared by both (Ruoss et al. 2023); ``"aligned"``, by place
            inside the operand (McLeish et al. 2024), where operands end at ``separators``.
        from_end: Add a learned position counted from the input's end.
        num_positions: The size of the table of ``"random"``, default four times the longest
            sequence, or of ``"cyclic"``, default 4.
        separators: Token ids that end an operand; for ``"aligned"``.
        symbols: The symbols that the ids of a `RowsTask` stand for; another task's rows are
            refused.
        memory: Keys and values of past latents: ``"none"``, ``"grow"`` keeps all, ``"static"``
            writes in place into room for ``memory_size`` writes (only without gradients).
        memory_size: The room of a static memory, in writes.
        num_static_tokens: Learned vectors that ``static_mem_lookup`` attends to.
        step_update: What a step makes of latents z and the block's output f(z): ``"normalized"``, z
            + λ (f(z) - z) with z and f(z) at unit RMS, and the result too, where λ is learned for
            each channel (nGPT's, Loshchilov et al. 2024): latents stay as large as they were, and
            when they no longer move they have arrived; ``"replace"``, f(z), a sum that grows with
            the steps.
        step_rate: The initial value of λ.
        step_noise: Standard deviation of what is added to the latents before each training step; it
            teaches steps to correct what they are given, so that answers stay right when thinking
            goes on.
        decoder_self_attention: Answer positions look at each other before they are read off.
        causal: Nothing looks ahead; needs ``latent_init="tokens"``. With fewer latents than tokens
            these are the last ones (Perceiver AR, Hawthorne et al. 2022).
        window: With ``"tokens"``, each latent looks at those less than ``window`` places away,
            itself included: with 2 at its neighbors, in a grid (``"rotary_2d"``) at the eight
            around it. What a latent knows then travels one place a step, as in a scan; default
            everywhere.
        mixer: The layer that mixes latents of tokens: ``"attention"``, the default; ``"mlp"``, a
            token-mixing MLP over the places, for inputs of one length without padding, as grids
            (TRM, Jolicoeur-Martineau 2025).
        initializer_range: Standard deviation of the initial embeddings, positions, latents and
            static tokens. With a small one (0.02) copying is not learned in the time of the recipe.
        **rest: Of `transformers.PreTrainedConfig`.

    Raises:
        ValueError: A field outside what it says above.

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
    # more layers than that are a damaged config
    layers_per_step: Annotated[int, Range(least=1, most=1000)] = 1
    max_input_length: Whole = 64
    max_output_length: Whole = 64
    num_latents: MaybeWhole = None
    latent_init: LatentInit = _DERIVED
    latent_noise: Rate = 1.0
    # a plan makes a row for each step: a damaged number would fill the memory
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
    # with 0.5 further steps forget: 0.99 of a copy became 0.65 at four times the steps
    step_rate: Annotated[float, Range(above=0, most=1)] = 0.95
    step_noise: Annotated[float, Range(least=0)] = 0.1
    decoder_self_attention: bool = False
    causal: bool = False
    window: MaybeWhole = None
    mixer: Mixer = "attention"
    initializer_range: Rate = 0.5

    def derive(self) -> None:
        """Set the fields that follow from others where they are not given."""
        # `Task.separators` is a tuple; JSON gives lists back
        if isinstance(self.separators, tuple | range):
            self.separators = list(self.separators)
        if self.output_size is None:
            self.output_size = self.vocab_size
        # fields are checked after this, so a size may still be text
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
        """Store a plan as plain lists, as in JSON.

        So is one given to ``from_pretrained`` or set later.
        """
        super().__setattr__(key, _plain(value) if key == "plan" else value)

    def problems(self) -> Iterator[str]:
        """Yield what does not go together."""
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
        # two axes, and pairs within each
        if self.positions == "rotary_2d" and size % 4:
            yield (
                f"hidden_size / num_heads is {size}, expected a multiple of 4 for rotary positions "
                "in two dimensions"
            )
        if self.positions == "random" and self.num_positions < self.longest:
            yield problem(self, "num_positions", f"at least the longest sequence, {self.longest}")
        if (self.positions == "aligned") != bool(self.separators):
            yield problem(
                self, "separators", 'token ids with positions="aligned", and none without'
            )
        if not all(0 <= token < self.vocab_size for token in self.separators):
            yield problem(self, "separators", f"token ids, below vocab_size, {self.vocab_size}")

    def _problems_of_steps(self) -> Iterator[str]:
        if (self.memory == "static") != (self.memory_size is not None):
            yield problem(self, "memory_size", 'a number with memory="static", and none without')
        plan = FlowPlan(**self.plan) if self.plan else None
        if plan is not None and plan.uses_memory and self.memory == "none":
            yield problem(self, "memory", 'another, as "grow": the plan uses it')
        if plan is not None and plan.uses_static and not self.num_static_tokens:
            yield problem(self, "num_static_tokens", "some, as 8: the plan looks them up")

    def _problems_of_latents(self) -> Iterator[str]:
        if self.latent_noise != 1 and self.latent_init != "noise":
            yield problem(self, "latent_noise", '1 without latent_init="noise"')
        if self.causal and not self.at_tokens:
            yield problem(self, "latent_init", '"tokens" in a causal flow')
        # from_end, and the side of a square, depend on how many tokens are still to come
        if self.causal and (self.positions not in ("learned", "cyclic", "rotary") or self.from_end):
            yield problem(
                self, "positions", "learned, cyclic or rotary, and no from_end, if causal"
            )
        if self.at_tokens and self.decoder_self_attention:
            yield problem(
                self,
                "decoder_self_attention",
                'False with latent_init="tokens", whose latents are the answer',
            )
        if self.window is not None and not self.at_tokens:
            yield problem(self, "window", 'none without latent_init="tokens"')
        if self.at_tokens and not self.causal and self.num_latents is not None:
            yield problem(
                self,
                "num_latents",
                "none in a flow that looks both ways: every token has a latent",
            )

    def _problems_of_mixer(self) -> Iterator[str]:
        has_other_places = self.causal or self.window is not None or self.num_latents is not None
        if self.mixer == "mlp" and (not self.at_tokens or has_other_places):
            yield (
                'mixer is mlp, expected latent_init="tokens" beside it, and no causal, window or '
                "num_latents"
            )

    @property
    def at_tokens(self) -> bool:
        """The latents are the input's tokens, and their own logits are the answer."""
        return self.latent_init == "tokens"

    def latents_for(self, length: int) -> int:
        """Return how many latents an input of ``length`` tokens has when a call does not say."""
        if self.at_tokens:
            if self.num_latents is None:
                return length
            return min(self.num_latents, length)
        assert self.num_latents is not None
        return self.num_latents

    @property
    def table_size(self) -> int | None:
        """The most latents there can be; none with noise or tokens."""
        if self.latent_init == "table":
            return self.num_latents
        return None

    @property
    def longest(self) -> int:
        """The larger of the maximum input length and the maximum output length."""
        return max(self.max_input_length, self.max_output_length)


def swiglu_size(width: int) -> int:
    """Return the inner width of a SwiGLU: 8/3 of its width, up to a multiple of 8."""
    return -(-width // 3) * 8


def _plain(plan: Any) -> dict[str, list[list[int]]] | None:
    """Return a plan as a JSON file has it."""
    if isinstance(plan, Mapping) and set(plan) <= set(PARTS):
        plan = FlowPlan(**plan)
    if not isinstance(plan, FlowPlan | None):
        refuse("ThinkerConfig", "plan", plan, "a FlowPlan, or what its to_dict gives")
    return None if plan is None else plan.to_dict()
