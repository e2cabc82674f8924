"""`LatentThinker`: latents read an input, think for n steps with a memory, and are decoded.

All steps share one block of layers.

Shapes: B batch, n latents, L input length, O answer length, d width, H heads, h = d / H, T steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel

from model_components._autograd import needs_plain
from model_components._loading import CompleteModel

from .checks import (
    check_embeds,
    check_grid,
    check_kind,
    check_labels,
    check_latents,
    check_mask,
    check_numbers,
    check_tokens,
    chosen_plan,
    chosen_rows,
    chosen_steps,
)
from .config import OutputSteps, ThinkerConfig
from .exits import ExitRule, Exits, check_exit
from .flow import FlowPlan, FlowRow
from .frames import Frame, plain_frame, token_frame
from .layers import Readout, ThinkLayer
from .memory import Memory, make_memory
from .positions import Places, Positions
from .state import Context, ThinkerOutput, ThinkerState, Thought


class LatentThinker(CompleteModel):
    """A model whose latents read an input, think for n steps, and are decoded to an answer.

    All tensors are batch first. The input's keys and values are projected once, and every step
    reads them. Each call can set the numbers of steps and latents. If latents start from noise, a
    call can use more latents than training did.

    Args:
        config: The model's config; default: a config made from ``fields``.
        **fields: Fields of `ThinkerConfig`, instead of a config.

    Raises:
        ValueError: Both a config and fields are given, or `ThinkerConfig` rejects a value.

    >>> model = LatentThinker(vocab_size=16, max_input_length=8, max_output_length=8).eval()
    >>> out = model(torch.zeros(2, 5, dtype=torch.long), n_step=3, out_len=4)
    >>> out.logits.shape, out.steps.tolist()
    (torch.Size([2, 4, 16]), [3, 3])
    """

    # pyrefly: ignore[bad-override-mutable-attribute]: a PreTrainedModel narrows its config
    config: ThinkerConfig
    config_class = ThinkerConfig
    base_model_prefix = "thinker"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    _supports_sdpa = True

    def __init__(self, config: ThinkerConfig | None = None, **fields: Any):
        if config is not None and fields:
            raise ValueError(
                "LatentThinker: expected a config or fields, got a config and the field "
                f"{next(iter(fields))}"
            )
        config = config or ThinkerConfig(**fields)
        super().__init__(config)
        self.loss_function = F.cross_entropy
        d = config.hidden_size
        self.embedding = nn.Embedding(config.vocab_size, d)
        self.positions = Positions(config)
        # with noise, one vector is enough: the noise makes the latents differ
        rows = config.table_size or 1
        if config.at_tokens:
            self.latents = None
        else:
            self.latents = nn.Parameter(torch.empty(rows, d))
        if config.num_static_tokens:
            self.static_tokens = nn.Parameter(torch.empty(config.num_static_tokens, d))
        else:
            self.static_tokens = None
        self.layers = nn.ModuleList(ThinkLayer(config) for _ in range(config.layers_per_step))
        if config.step_update == "normalized":
            self.rate = nn.Parameter(torch.empty(d))
        else:
            self.rate = None
        self.readout = Readout(config)
        self.gradient_checkpointing = False
        # checks of tensor values wait for the device; set this to False to skip these checks
        self.check_inputs = True
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        std = self.config.initializer_range
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=module.in_features**-0.5)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=std)
        elif isinstance(module, nn.LayerNorm):
            nn.init.ones_(module.weight)
        elif module is self:
            for parameter in (self.latents, self.static_tokens):
                if parameter is not None:
                    nn.init.normal_(parameter, std=std)
            if self.rate is not None:
                nn.init.constant_(self.rate, self.config.step_rate)

    def reset_parameters(self) -> None:
        """Initialize all parameters again."""
        for module in self.modules():
            self._init_weights(module)

    def get_input_embeddings(self) -> nn.Module:
        """Return the token embeddings."""
        return self.embedding

    @property
    def plan(self) -> FlowPlan:
        """The default plan: the config's plan, or else every operation that the model has."""
        return chosen_plan(self.config)

    def answers_of(
        self,
        labels: Tensor,  # (..., O)
        n_latent: int | None = None,
    ) -> Tensor:  # (..., n) or the same
        """Return the labels of the positions that have a latent.

        These are all labels, except in a causal model with fewer latents than tokens: there, they
        are the last ``n_latent`` labels.
        """
        if not self.config.at_tokens:
            return labels
        return labels[
            ..., -(self.config.latents_for(labels.shape[-1]) if n_latent is None else n_latent) :
        ]

    def encode(
        self,
        tokens: Tensor | None,  # (B, L)
        mask: Tensor | None = None,  # (B, L)
        *,
        inputs_embeds: Tensor | None = None,  # (B, L, d)
        out_len: int | None = None,
        places: Places | None = None,
        generator: torch.Generator | None = None,
    ) -> Context:
        """Encode an input: project its keys and values once, for use in all steps.

        Args:
            tokens: Ids below ``vocab_size``, or None with ``inputs_embeds``.
            mask: True (or 1) at tokens, False at padding; default: no padding.
            inputs_embeds: Vectors to use instead of embedded tokens.
            out_len: Length of the longest answer that will be decoded, so that enough random
                positions are drawn; default: the input's length.
            places: Positions drawn in an earlier call, such as ``carry.places``; default: new
                positions are drawn.
            generator: The random generator for positions.

        Raises:
            ValueError: Tokens do not have shape (B, L), are too long or have ids outside the
                vocabulary; a row is all padding; or, with ``positions="rotary_2d"``, a row is not a
                square grid.
        """
        if inputs_embeds is not None:
            check_embeds(self.config, tokens, inputs_embeds)
            # positions need a (B, L) tensor, whose values do not matter
            tokens = torch.zeros(inputs_embeds.shape[:2], dtype=torch.long, device=self.device)
        if tokens is None:
            raise ValueError("LatentThinker: expected input_ids or inputs_embeds, got neither")
        check_kind(tokens, mask)
        checked = self._checked(tokens)
        check_tokens(self.config, tokens, mask, values=checked)
        if mask is not None:
            mask = mask.bool()
        if mask is not None and checked:
            check_mask(self.config, mask)
        if checked:
            check_grid(self.config, tokens, mask)
        if places is None:
            # input and answer share the drawn positions, so the longer one sets their number
            longest = max(tokens.shape[1], out_len or 0)
            places = self.positions.draw(longest, generator=generator, device=tokens.device)
        embedded = self.embedding(tokens) if inputs_embeds is None else inputs_embeds
        codes = self.positions.encode(tokens, mask, places)
        if codes is not None:
            embedded = embedded + codes
        index = self.positions.index(tokens, mask)
        turn = self.positions.turn(index)
        static = self.static_tokens
        return Context(
            keys_values=tuple(layer.read.project(embedded, turn) for layer in self._layers()),
            static=()
            if static is None
            # pyrefly: ignore[missing-attribute]: layers have it if the config has static tokens
            else tuple(layer.static.project(static[None]) for layer in self._layers()),
            mask=mask,
            index=index,
            places=places,
            embedded=embedded if self.config.at_tokens else None,
        )

    def think(
        self,
        context: Context,
        *,
        n_step: int | None = None,
        n_latent: int | None = None,
        plan: FlowPlan | None = None,
        carry: ThinkerState | None = None,
        output_steps: OutputSteps = "last",
        grad_steps: int | None = None,
        exit_rule: ExitRule | None = None,
        step_noise: float | None = None,
        generator: torch.Generator | None = None,
    ) -> Thought:
        """Run n steps of thinking on an encoded input.

        Args:
            context: The result of `encode`.
            n_step: Number of steps; default: the config's, adjusted to the plan by
                `FlowPlan.num_steps`.
            n_latent: Number of latents; default: the config's, or the carry's.
            plan: The operations of each step; default: the model's plan.
            carry: The state to continue from, such as an earlier output's ``carry``.
            output_steps: The steps whose latents are kept: ``"last"`` or ``"all"`` of the steps
                that output, or a list of step numbers, counted from 1.
            grad_steps: The number of steps at the end through which gradients flow (truncated
                backpropagation); default: all.
            exit_rule: A rule that stops rows of the batch early (only without gradients). In a
                causal model, a row's number of steps then also depends on its later tokens, so do
                not score next-token predictions with an exit rule.
            step_noise: Standard deviation of the noise added before each step; default: the
                config's in training, 0 in evaluation.
            generator: The random generator for step noise and initial latents. Without one,
                evaluation draws the same numbers each time.

        Raises:
            ValueError: There are no steps or too many latents, or the plan uses an operation that
                the model does not have.
        """
        config = self.config
        check_numbers(n_step, n_latent, grad_steps, step_noise)
        check_exit(config, exit_rule)
        rows = chosen_rows(config, plan, n_step)
        noise = self._step_noise(step_noise)
        if generator is None and (noise or (carry is None and config.latent_init == "noise")):
            generator = self._evaluation_generator(context.index.device)
        state = self._first_state(context, n_latent, carry, generator)
        keep = chosen_steps(output_steps, rows)
        first_grad = 0
        if grad_steps is not None:
            first_grad = max(0, len(rows) - grad_steps)
        exits = None
        if exit_rule is not None:
            exits = Exits(exit_rule, context, state, len(rows))
        latents = state.latents
        # the first call has no memory, and a carry after an early exit has none either
        memory = state.memory or make_memory(config)
        frame = self._frame(context, latents.shape[1])
        kept = {}
        residuals = []
        for number, row in enumerate(rows, 1):
            before = latents
            # never switches gradients on inside a caller's no_grad
            with torch.set_grad_enabled(torch.is_grad_enabled() and number > first_grad):
                if noise:
                    latents = latents + noise * _normal(latents.shape, latents, generator)
                latents, memory = self._step(latents, row, context, memory, frame)
            if number in keep:
                # rows that left the batch are included, with their last latents
                kept[number] = latents if exits is None else exits.merged(latents)
            residuals.append(frame.residual(before, latents))
            if exits is not None:
                rest = exits.step(number, row, latents, memory, residuals.pop())
                if rest is None:
                    break
                if rest is not exits.SAME:
                    context, latents, memory = rest
                    # masks and angles are needed only for the rows that remain in the batch
                    frame = self._frame(context, latents.shape[1])
        if exits is not None:
            return exits.thought(kept, keep)
        return Thought(
            state=ThinkerState(latents, memory, context.places),
            kept=kept,
            residuals=torch.stack(residuals, 1),
            steps=torch.full((latents.shape[0],), len(rows), device=latents.device),
        )

    def _step_noise(self, chosen: float | None) -> float:
        """Return the standard deviation of the step noise, which by default is 0 in evaluation."""
        if chosen is not None:
            return chosen
        return self.config.step_noise if self.training else 0.0

    def _first_state(
        self,
        context: Context,
        n_latent: int | None,
        carry: ThinkerState | None,
        generator: torch.Generator | None,
    ) -> ThinkerState:
        """Return the state before the first step: the carry if given, otherwise a new state."""
        if carry is None:
            return self._start(context, n_latent, generator)
        check_latents(self.config, n_latent, carry.latents.shape, context.shape, carried=True)
        return carry

    def _evaluation_generator(self, device: torch.device) -> torch.Generator | None:
        """Return a generator with a fixed seed, so that evaluation is reproducible.

        Return None in training, under torch.compile and on the meta device, where torch's global
        generator is used.
        """
        if self.training or torch.compiler.is_compiling() or device.type == "meta":
            return None
        return torch.Generator(device).manual_seed(0)

    def decode(
        self, state: ThinkerState, out_len: int | None = None
    ) -> Tensor:  # (B, O, output_size)
        """Compute the logits of the answer.

        Args:
            state: The ``state`` of a result of `think`.
            out_len: Length O of the answer; default: the config's ``max_output_length``. With
                ``latent_init="tokens"`` it is always the number of latents.

        Raises:
            ValueError: ``out_len`` is out of range or, with ``latent_init="tokens"``, is not the
                number of latents.
        """
        return self._decode(state.latents, out_len, state.places)

    def _checked_labels(
        self, labels: Tensor, n_latent: int | None, carry: ThinkerState | None
    ) -> Tensor:
        # a carry does not store its number of steps, so the next step's labels are unknown
        if labels.dim() == 3 and carry is not None:
            raise ValueError(
                "LatentThinker: expected labels of shape (B, O) with a carry, got labels for each "
                f"step, of shape {list(labels.shape)}"
            )
        return self.answers_of(labels, n_latent if carry is None else carry.latents.shape[1])

    def forward(
        self,
        input_ids: Tensor | None = None,  # (B, L)
        attention_mask: Tensor | None = None,  # (B, L)
        *,
        inputs_embeds: Tensor | None = None,  # (B, L, d)
        labels: Tensor | None = None,  # (B, O) or (B, T, O); -100 is ignored
        out_len: int | None = None,
        n_step: int | None = None,
        n_latent: int | None = None,
        plan: FlowPlan | None = None,
        output_steps: OutputSteps = "last",
        grad_steps: int | None = None,
        carry: ThinkerState | None = None,
        exit_rule: ExitRule | None = None,
        step_noise: float | None = None,
        generator: torch.Generator | None = None,
    ) -> ThinkerOutput:
        """Encode an input, think for n steps, and decode the answer.

        Args:
            input_ids: Ids below ``vocab_size``, or None with ``inputs_embeds``.
            attention_mask: 1 at tokens, 0 at padding.
            inputs_embeds: Vectors to use instead of embedded tokens.
            labels: The correct answer, from which ``loss`` is computed. With labels for each step,
                (B, T, O), the loss is computed from the last step's labels.
            out_len: Length of the answer; default: the length of the labels, or, without labels, as
                in `decode`.
            n_step: Number of steps; see `think` for this and the arguments below.
            n_latent: Number of latents.
            plan: The operations of each step.
            output_steps: The steps to compute logits for; each one costs a read-out.
            grad_steps: The number of steps at the end through which gradients flow.
            carry: The ``carry`` of an earlier output, from which to continue.
            exit_rule: The rule for stopping rows early.
            step_noise: Standard deviation of the noise added before each step.
            generator: The generator of all random choices.

        Raises:
            ValueError: An argument is invalid, as in `encode`, `think` and `decode`.
        """
        if labels is not None:
            labels = self._checked_labels(labels, n_latent, carry)
        if out_len is None and labels is not None:
            out_len = labels.shape[-1]
        elif out_len is None and not self.config.at_tokens:
            # set before encoding: random positions are drawn for input and answer together
            out_len = self.config.max_output_length
        # a carry keeps the positions that its input was encoded with
        places = None if carry is None else carry.places
        context = self.encode(
            input_ids,
            attention_mask,
            inputs_embeds=inputs_embeds,
            out_len=out_len,
            places=places,
            generator=generator,
        )
        thought = self.think(
            context,
            n_step=n_step,
            n_latent=n_latent,
            plan=plan,
            carry=carry,
            output_steps=output_steps,
            grad_steps=grad_steps,
            exit_rule=exit_rule,
            step_noise=step_noise,
            generator=generator,
        )
        steps = tuple(sorted(thought.kept))
        logits = self._decode(
            torch.cat([thought.kept[s] for s in steps]), out_len, thought.state.places
        )
        by_step = logits.unflatten(0, (len(steps), logits.shape[0] // len(steps)))
        step_logits = [by_step[i] for i in range(len(steps))]  # one read-out for all steps
        loss = None
        if labels is not None:
            if labels.dim() == 3:  # steps after the last one with labels use its labels
                labels = labels[:, min(steps[-1], labels.shape[1]) - 1]
            if self._checked(labels):
                check_labels(self.config, labels, step_logits[-1].shape)
            loss = self.loss_function(step_logits[-1].flatten(0, 1), labels.flatten())
        return ThinkerOutput(
            loss=loss,
            logits=step_logits[-1],
            step_logits=tuple(step_logits),
            output_steps=steps,
            residuals=thought.residuals,
            steps=thought.steps,
            carry=thought.state,
        )

    def _layers(self) -> list[ThinkLayer]:
        # pyrefly: ignore[bad-return]: a ModuleList of ThinkLayer
        return list(self.layers)

    def _checked(self, x: Tensor) -> bool:
        """Return whether to check the values of tensors; False while torch traces the model."""
        return self.check_inputs and not needs_plain(x)

    def _start(
        self, context: Context, n_latent: int | None, generator: torch.Generator | None
    ) -> ThinkerState:
        """Return a new state for the first step, used without a carry."""
        config, (batch, length) = self.config, context.shape
        n = config.latents_for(length) if n_latent is None else n_latent
        check_latents(config, n_latent, (batch, n, config.hidden_size), context.shape)
        if config.at_tokens:
            assert context.embedded is not None
            latents = context.embedded[:, length - n :]
        else:
            assert self.latents is not None
            latents = self.latents[: n if config.latent_init == "table" else 1].expand(batch, n, -1)
            if config.latent_init == "noise":
                latents = latents + config.latent_noise * _normal(latents.shape, latents, generator)
        return ThinkerState(latents, None, context.places)

    def _frame(self, context: Context, n: int) -> Frame:
        config = self.config
        if not config.at_tokens:
            return plain_frame(context)
        return token_frame(
            context, n, self.positions.turn, causal=config.causal, window=config.window
        )

    def _step(
        self, z: Tensor, row: FlowRow, context: Context, memory: Memory | None, frame: Frame
    ) -> tuple[Tensor, Memory | None]:
        written = [None if memory is None else memory.read(i) for i in range(len(self.layers))]
        if self.gradient_checkpointing and self.training and torch.is_grad_enabled():
            z = self._gradient_checkpointing_func(self._advance, z, row, context, written, frame)
        else:
            z = self._advance(z, row, context, written, frame)
        if row.mem_write and memory is not None:
            # pyrefly: ignore[missing-attribute]: layers have it if there is a memory
            memory = memory.write([layer.memory.project(z) for layer in self._layers()])
        return z, memory

    def _advance(
        self, z: Tensor, row: FlowRow, context: Context, written: list, frame: Frame
    ) -> Tensor:
        state = z
        for i, layer in enumerate(self.layers):
            memory_of_layer = written[i]
            state = layer(
                state,
                row,
                context.keys_values[i],
                context.static[i] if context.static else None,
                memory_of_layer,
                read_mask=frame.read,
                self_mask=frame.own,
                turn=frame.turn,
                memory_mask=None
                if memory_of_layer is None
                else frame.memory(memory_of_layer[0].shape[2]),
            )
        if self.rate is not None:
            # both have unit RMS, so that the rate is the fraction of the way from one to the other
            unit, to = (F.rms_norm(x, x.shape[-1:]) for x in (z, state))
            return F.rms_norm(unit + self.rate * (to - unit), z.shape[-1:])
        return state

    def _decode(self, latents: Tensor, out_len: int | None, places: Places) -> Tensor:
        config = self.config
        if config.at_tokens:
            if out_len not in (None, latents.shape[1]):
                raise ValueError(
                    "LatentThinker: with latent_init='tokens', out_len is the number of latents; "
                    f"expected None or {latents.shape[1]}, got {out_len}"
                )
            return self.readout(latents, None)
        length = config.max_output_length if out_len is None else out_len
        if not 1 <= length <= config.max_output_length:
            raise ValueError(
                f"LatentThinker: out_len is {length}; expected 1 to {config.max_output_length} "
                "(max_output_length)"
            )
        return self.readout(latents, self.positions.queries(length, places, latents.device))


def _normal(shape: Sequence[int], like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Draw N(0, 1) numbers on the generator's device, and move them to the device of ``like``."""
    if generator is None:
        # with dynamic sizes, torch.compile does not accept `generator`, even if it is None
        return torch.randn(shape, device=like.device, dtype=like.dtype)
    # drawn on the generator's device, so that a CPU generator gives a model on a GPU the same
    # numbers
    drawn = torch.randn(shape, generator=generator, device=generator.device, dtype=like.dtype)
    return drawn.to(like.device)


# so that `AutoModel.from_pretrained` can load the folders that `save_pretrained` writes
AutoConfig.register(ThinkerConfig.model_type, ThinkerConfig, exist_ok=True)
AutoModel.register(ThinkerConfig, LatentThinker, exist_ok=True)
