"""`ThinkerConfig`: the settings of a `LatentThinker`."""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, get_args

from transformers import PreTrainedConfig

from .flow import PARTS, FlowPlan

Positions = Literal["learned", "cyclic", "rotary", "rotary_2d", "random", "aligned"]
LatentInit = Literal["table", "noise", "tokens"]
MemoryKind = Literal["none", "grow", "static"]
StepUpdate = Literal["normalized", "replace"]
OutputSteps = Literal["last", "all"] | Sequence[int]

_KINDS = {
    "latent_init": LatentInit,
    "positions": Positions,
    "memory": MemoryKind,
    "step_update": StepUpdate,
}
_WHOLE = (
    "vocab_size",
    "output_size",
    "hidden_size",
    "num_heads",
    "mlp_size",
    "layers_per_step",
    "max_input_length",
    "max_output_length",
    "num_latents",
    "n_step",
    "window",
    "grid_width",
    "num_positions",
)


def refuse(what: str, got: object, needed: str) -> None:
    """Raise the one kind of error that configs raise."""
    raise ValueError(f"ThinkerConfig: {what} is {got!r}; expected {needed}")


def is_whole(value: object) -> bool:
    """A whole number, and not True or False."""
    return isinstance(value, int) and not isinstance(value, bool)


class ThinkerConfig(PreTrainedConfig):
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
        grid_width: With ``"rotary_2d"``, the grid's columns; default each row of the batch is a
            square.
        separators: Token ids that end an operand; for ``"aligned"``.
        max_offset: With ``"aligned"``, positions of a training batch start at a random place up to
            here.
        memory: Keys and values of past latents: ``"none"``, ``"grow"`` keeps all, ``"static"``
            writes in place into room for ``memory_size`` writes (only without gradients).
        memory_size: The room of a static memory, in writes.
        num_static_tokens: Learned vectors that ``static_mem_lookup`` attends to.
        step_update: What a step makes of latents z and the block's output f(z): ``"normalized"``, z
            + λ (f(z) - z) with z and f(z) at unit RMS, and the result too, where λ is learned for
            each channel (nGPT's, Loshchilov et al. 2024): latents stay as large as they were, and
            when they no longer move they have arrived; ``"replace"``, f(z), a sum that grows with
            the steps.
        step_rate: Where λ starts.
        step_noise: Standard deviation of what is added to the latents before each training step; it
            teaches steps to correct what they are given, so that answers stay right when thinking
            goes on.
        sandwich: Norms after attention and MLP too (Huginn, Geiping et al. 2025).
        decoder_self_attention: Answer positions look at each other before they are read off.
        causal: Nothing looks ahead; needs ``latent_init="tokens"``. With fewer latents than tokens
            these are the last ones (Perceiver AR, Hawthorne et al. 2022).
        window: With ``"tokens"``, each latent looks at those less than ``window`` places away,
            itself included: with 2 at its neighbours, in a grid (``"rotary_2d"``) at the eight
            around it. What a latent knows then travels one place a step, as in a scan; default
            everywhere.
        initializer_range: Standard deviation of the initial embeddings, positions, latents and
            static tokens. With a small one (0.02) copying is not learned in the time of the recipe.
        **rest: Of `transformers.PreTrainedConfig`.

    Raises:
        ValueError: A field outside what it says above.

    >>> ThinkerConfig(vocab_size=16).mlp_size
    176
    >>> ThinkerConfig(vocab_size=16, num_heads=5)
    Traceback (most recent call last):
    ValueError: ThinkerConfig: num_heads is 5; expected a divisor of hidden_size, 64
    """

    model_type = "latent_thinker"

    def __init__(
        self,
        *,
        vocab_size: int = 16,
        output_size: int | None = None,
        hidden_size: int = 64,
        num_heads: int = 4,
        mlp_size: int | None = None,
        layers_per_step: int = 1,
        max_input_length: int = 64,
        max_output_length: int = 64,
        num_latents: int | None = None,
        latent_init: LatentInit | None = None,
        latent_noise: float = 1.0,
        n_step: int = 4,
        plan: FlowPlan | Mapping[str, object] | None = None,
        positions: Positions = "learned",
        from_end: bool = False,
        num_positions: int | None = None,
        grid_width: int | None = None,
        separators: Sequence[int] = (),
        max_offset: int = 0,
        memory: MemoryKind = "none",
        memory_size: int | None = None,
        num_static_tokens: int = 0,
        step_update: StepUpdate = "normalized",
        step_rate: float = 0.95,
        step_noise: float = 0.1,
        sandwich: bool = False,
        decoder_self_attention: bool = False,
        causal: bool = False,
        window: int | None = None,
        initializer_range: float = 0.5,
        **rest: Any,
    ):
        sizes = {"hidden_size": hidden_size, "max_input_length": max_input_length}
        for name, value in (sizes | {"max_output_length": max_output_length}).items():
            if not is_whole(value):
                refuse(name, value, "a whole number")
        if not isinstance(separators, Sequence) or isinstance(separators, str):
            refuse("separators", separators, "token ids")
        self.vocab_size = vocab_size
        self.output_size = vocab_size if output_size is None else output_size
        self.hidden_size = hidden_size
        self.num_heads = num_heads
        if mlp_size is not None:
            self.mlp_size = mlp_size
        else:
            self.mlp_size = -(-hidden_size // 3) * 8
        self.layers_per_step = layers_per_step
        self.max_input_length = max_input_length
        self.max_output_length = max_output_length
        self.latent_init = latent_init or ("tokens" if causal else "table")
        self.latent_noise = latent_noise
        if num_latents is None and self.latent_init != "tokens":
            self.num_latents = 8
        else:
            self.num_latents = num_latents
        self.n_step = n_step
        self.plan: Any = plan
        self.positions = positions
        self.from_end = from_end
        longest = max(max_input_length, max_output_length)
        usual = 4 if positions == "cyclic" else 4 * longest
        self.num_positions = usual if num_positions is None else num_positions
        self.grid_width = grid_width
        self.separators = list(separators)
        self.max_offset = max_offset
        self.memory = memory
        self.memory_size = memory_size
        self.num_static_tokens = num_static_tokens
        self.step_update = step_update
        self.step_rate = step_rate
        self.step_noise = step_noise
        self.sandwich = sandwich
        self.decoder_self_attention = decoder_self_attention
        self.causal = causal
        self.window = window
        self.initializer_range = initializer_range
        self._check()
        super().__init__(**rest)
        for name in _strangers(rest):
            near = difflib.get_close_matches(name, _fields(), 1)
            if near:
                hint = f"; did you mean {near[0]}?"
            else:
                hint = f"; expected some of {', '.join(_fields())}"
            raise ValueError(
                f"ThinkerConfig: there is no {name} (which is {rest[name]!r} here){hint}"
            )

    def __setattr__(self, key: str, value: object) -> None:
        """Store a plan as plain lists, as in JSON.

        So is one given to ``from_pretrained`` or set later.
        """
        super().__setattr__(key, _plain(value) if key == "plan" else value)

    @classmethod
    def from_dict(cls, config_dict: Mapping[str, object], **kwargs: object) -> Any:
        """Read a saved config, without fields of other models that trainers may have left in it.

        ``use_cache`` is one of them.
        """
        strangers = _strangers(config_dict)
        known = {name: value for name, value in config_dict.items() if name not in strangers}
        return super().from_dict(known, **kwargs)

    def _check(self) -> None:
        for name in _WHOLE:
            value = getattr(self, name)
            if not is_whole(value) and not (
                value is None and name in ("num_latents", "window", "grid_width")
            ):
                refuse(name, value, "a whole number")
            if value is not None and value < 1:
                refuse(name, value, "1 or more")
        for name in ("from_end", "sandwich", "decoder_self_attention", "causal"):
            if not isinstance(getattr(self, name), bool):
                refuse(name, getattr(self, name), "True or False")
        for name, kinds in _KINDS.items():
            if getattr(self, name) not in get_args(kinds):
                refuse(name, getattr(self, name), f"one of {', '.join(get_args(kinds))}")
        for name in ("latent_noise", "step_rate", "step_noise", "initializer_range"):
            if not isinstance(getattr(self, name), int | float):
                refuse(name, getattr(self, name), "a number")
        self._check_heads()
        self._check_positions()
        self._check_steps()
        self._check_latents()

    def _check_heads(self) -> None:
        if self.hidden_size % self.num_heads:
            refuse("num_heads", self.num_heads, f"a divisor of hidden_size, {self.hidden_size}")
        size = self.hidden_size // self.num_heads
        if self.positions == "rotary" and size % 2:
            refuse("hidden_size / num_heads", size, "an even size for rotary positions")
        if self.positions == "rotary_2d" and size % 4:
            refuse(
                "hidden_size / num_heads",
                size,
                "a multiple of 4 for rotary positions in two dimensions",
            )

    def _check_positions(self) -> None:
        if self.grid_width is not None and self.positions != "rotary_2d":
            refuse("grid_width", self.grid_width, 'none without positions="rotary_2d"')
        if self.positions == "random" and self.num_positions < self.longest:
            refuse(
                "num_positions",
                self.num_positions,
                f"at least the longest sequence, {self.longest}",
            )
        if (self.positions == "aligned") != bool(self.separators):
            refuse(
                "separators",
                self.separators,
                'token ids with positions="aligned", and none without',
            )
        if not all(is_whole(t) and 0 <= t < self.vocab_size for t in self.separators):
            refuse("separators", self.separators, f"token ids, below vocab_size, {self.vocab_size}")
        if (
            not is_whole(self.max_offset)
            or self.max_offset < 0
            or (self.max_offset and self.positions != "aligned")
        ):
            refuse("max_offset", self.max_offset, '0, or more with positions="aligned"')

    def _check_steps(self) -> None:
        size = self.memory_size
        if (self.memory == "static") != (size is not None):
            refuse("memory_size", size, "writes, 1 or more, with memory static, and none without")
        if size is not None and (not is_whole(size) or size < 1):
            refuse("memory_size", size, "writes, a whole number, 1 or more")
        plan = FlowPlan(**self.plan) if self.plan else None
        if plan is not None and plan.uses_memory and self.memory == "none":
            refuse("memory", self.memory, 'another, as "grow": the plan uses it')
        if plan is not None and plan.uses_static and not self.num_static_tokens:
            refuse(
                "num_static_tokens", self.num_static_tokens, "some, as 8: the plan looks them up"
            )
        if not is_whole(self.num_static_tokens) or self.num_static_tokens < 0:
            refuse("num_static_tokens", self.num_static_tokens, "a whole number, 0 or more")
        if not 0 < self.step_rate <= 1:
            refuse("step_rate", self.step_rate, "above 0 and at most 1")
        if not 0 <= self.step_noise < math.inf:
            refuse("step_noise", self.step_noise, "0 or more, and finite")

    def _check_latents(self) -> None:
        if not 0 < self.latent_noise < math.inf or (
            self.latent_noise != 1 and self.latent_init != "noise"
        ):
            refuse(
                "latent_noise",
                self.latent_noise,
                'above 0 and finite, and 1 without latent_init="noise"',
            )
        if not 0 < self.initializer_range < math.inf:
            refuse("initializer_range", self.initializer_range, "above 0, and finite")
        if self.causal and self.latent_init != "tokens":
            refuse("latent_init", self.latent_init, '"tokens" in a causal flow')
        if self.causal and (self.positions not in ("learned", "cyclic", "rotary") or self.from_end):
            refuse(
                "positions", self.positions, "learned, cyclic or rotary, and no from_end, if causal"
            )
        if self.at_tokens and self.decoder_self_attention:
            refuse(
                "decoder_self_attention",
                True,
                'False with latent_init="tokens", whose latents are the answer',
            )
        if self.window is not None and not self.at_tokens:
            refuse("window", self.window, 'none without latent_init="tokens"')
        if self.at_tokens and not self.causal and self.num_latents is not None:
            refuse(
                "num_latents",
                self.num_latents,
                "none in a flow that looks both ways: every token has a latent",
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
        """The longest sequence, of input or answer."""
        return max(self.max_input_length, self.max_output_length)


def _plain(plan: Any) -> dict[str, object] | None:
    """A plan as a JSON file has it."""
    if isinstance(plan, Mapping) and set(plan) <= set(PARTS):
        plan = FlowPlan(**plan)
    if not isinstance(plan, FlowPlan | None):
        refuse("plan", plan, "a FlowPlan, or what its to_dict gives")
    return None if plan is None else plan.to_dict()


def _fields() -> list[str]:
    """Names of the fields that `ThinkerConfig` adds to transformers' own."""
    return [
        n for n in inspect.signature(ThinkerConfig.__init__).parameters if n not in ("self", "rest")
    ]


def _strangers(names: Iterable[str]) -> list[str]:
    """Names that neither a `ThinkerConfig` nor transformers' own configs have."""
    known = {*_fields(), *PreTrainedConfig().__dict__}
    return [
        n
        for n in names
        if n not in known and not hasattr(PreTrainedConfig, n) and not n.startswith("_")
    ]
