"""Distill a language model into a thinker that reads bytes, and see what each step of thought adds.

python examples/distill_language_model.py build/real/smollm2 texts.json --out runs/distill

A language model, the teacher, computes the probabilities of each next byte, and a small causal
thinker learns them. The thinker is tested on held-out texts, and its loss is given in nats per
byte. ``texts.json`` is a list of objects; the texts of an object are joined by newlines. With
SmolLM2 and 3000 texts of Alpaca this takes about 20 minutes on one CPU core. Most of this time is
the teacher's. Its probabilities are kept in ``--out`` with the thinker. ``--json`` names a file for
the results: the teacher's loss in nats per byte, and a list of {steps, nats}.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed
from transformers.convert_slow_tokenizer import bytes_to_unicode

import thinker as th

LENGTH = 128
"""The number of bytes in a piece of text that the thinker reads."""
STEPS = 8
"""The maximum number of steps of thought in training."""
END = 0
"""The byte that ends each text."""
_LEAST = 1e-12
"""The number added to the probability of an observed byte; cumulative sums have errors of 1e-16."""
RATE = 4e-3
"""The best of three learning rates that were tried with the default size."""


class NextByte:
    """The next-byte probabilities of a language model with byte-level tokens.

    Inside a token, all tokens that begin with the same bytes up to this point are grouped by their
    next byte, and the probabilities of each group are added. Tokens that end at this point are left
    out, because the byte after them would need another call of the model.

    Args:
        folder: Folder of the model and its tokenizer.

    Raises:
        ValueError: The tokenizer is not byte-level, or has no token that begins a text.
    """

    def __init__(self, folder: Path):
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        letters = {letter: byte for byte, letter in bytes_to_unicode().items()}
        names = self.tokenizer.convert_ids_to_tokens(range(len(self.tokenizer)))
        special = set(self.tokenizer.all_special_ids)
        if self.tokenizer.bos_token_id is None:
            raise ValueError(f"{folder}: expected a tokenizer with a token that begins a text")
        for number, name in enumerate(names):
            if number not in special and not letters.keys() >= set(name):
                raise ValueError(
                    f"{folder}: expected a byte-level tokenizer, got the token {name!r}"
                )
        self.words = [
            b"" if number in special else bytes(letters[letter] for letter in name)
            for number, name in enumerate(names)
        ]
        self.order = torch.tensor(sorted(range(len(names)), key=self.words.__getitem__))
        self.sorted = sorted(self.words)
        self.bounds = cache(self._bounds)

    def _bounds(self, prefix: bytes) -> Tensor:  # (257,)
        """Return, for each byte, the index of the first sorted token with ``prefix`` and this byte.

        The last number is the index after all tokens that begin with ``prefix``.
        """
        firsts = [bisect_left(self.sorted, prefix + bytes([byte])) for byte in range(256)]
        end = bisect_right(self.sorted, prefix + b"\xff" * len(max(self.sorted, key=len)))
        return torch.tensor([*firsts, end])

    @torch.no_grad()
    def __call__(self, text: str) -> Tensor:  # (bytes of the text, 256)
        """Return the probabilities of each byte of a text, given the bytes before it."""
        tokens = self.tokens_of(text)
        words = [self.words[token] for token in tokens]
        start = self.tokenizer.bos_token_id
        logits = self.model(torch.tensor([[start, *tokens[:-1]]])).logits[0]
        # in float64: differences of sums lose small probabilities in float32
        shares = logits[:, self.order].softmax(-1).double().cumsum(-1)
        shares = F.pad(shares, (1, 0))
        rows = [row for row, word in enumerate(words) for _ in word]
        bounds = [self.bounds(word[:place]) for word in words for place in range(len(word))]
        found = shares[torch.tensor(rows)[:, None], torch.stack(bounds)].diff()
        # an observed byte must not have probability 0
        place = torch.arange(len(found))
        found[place, torch.tensor([*text.encode()])] += _LEAST
        if not found.isfinite().all():
            raise ValueError(
                f"expected finite probabilities of the bytes of {text[:40]!r}, got NaN"
            )
        return (found / found.sum(-1, keepdim=True)).float()

    def tokens_of(self, text: str) -> list[int]:
        """Return the tokens of a text; raise an error if their bytes do not make up the text."""
        tokens = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        words = [self.words[token] for token in tokens]
        if b"".join(words) != text.encode():
            raise ValueError(
                f"expected tokens whose bytes make up the text {text[:40]!r}, got {words[:8]}"
            )
        return tokens


@dataclass(frozen=True)
class Stream:
    """The bytes of all texts in one sequence, and the teacher's probabilities of each byte."""

    data: Tensor  # (N,), bytes
    expected: Tensor  # (N, 256), probabilities

    def pieces(self, starts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the bytes to read, and the bytes that follow with their probabilities.

        Args:
            starts: The starts of the pieces, (B,).

        Returns:
            (B, LENGTH), (B, LENGTH) and (B, LENGTH, 256).
        """
        read = starts[:, None] + torch.arange(LENGTH)
        return self.data[read].long(), self.data[read + 1].long(), self.expected[read + 1].float()

    def batch(self, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        """Return pieces with random starts."""
        last = len(self.data) - LENGTH - 1
        return self.pieces(torch.randint(last + 1, (size,), generator=generator))


def read_texts(file: Path, count: int) -> list[str]:
    """Return the first texts of a JSON file."""
    try:
        rows = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise SystemExit(f"{file}: expected JSON in UTF-8, got {error}") from error
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise SystemExit(f"{file}: expected a list of objects, got {str(rows)[:60]}")
    texts = [
        "\n".join(value for value in row.values() if isinstance(value, str) and value)
        for row in rows
    ]
    return [text for text in texts if text][:count]


def make_stream(texts: Sequence[str], teacher: NextByte) -> Stream:
    """Return texts with the teacher's probabilities; each byte `END` has probability 1."""
    data = []
    expected = []
    end = F.one_hot(torch.tensor([END]), 256).half()
    for text in tqdm(texts, desc="teacher"):
        data += [*text.encode(), END]
        expected += [teacher(text).half(), end]
    return Stream(torch.tensor(data, dtype=torch.uint8), torch.cat(expected))


Forward = Callable[[Tensor, int], Sequence[Tensor]]
"""A function of bytes (B, LENGTH) and a number of steps.

It returns logits (B, LENGTH, 256) after one or more of the steps, the last of them after all steps.
"""


def thinker_forward(model: th.LatentThinker) -> Forward:
    """Return a thinker's forward, which gives logits after half of the steps and after all."""

    def forward(read: Tensor, steps: int) -> Sequence[Tensor]:
        return model(read, n_step=steps, output_steps=sorted({-(-steps // 2), steps})).step_logits

    return forward


def train(
    model: nn.Module,
    forward: Forward,
    stream: Stream,
    *,
    iterations: int,
    learning_rate: float,
    seed: int,
    batch_size: int = 16,
) -> None:
    """Train on the teacher's probabilities, with a random number of steps for each batch."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.98))

    def rate(done: int) -> float:
        # 50 iterations of warm-up, then a cosine from 1 to 0.05
        return min(1, (done + 1) / 50) * (0.525 + 0.475 * math.cos(math.pi * done / iterations))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    model.train()
    for _ in (bar := tqdm(range(iterations), desc="training")):
        read, _, expected = stream.batch(batch_size, generator)
        steps = int(torch.randint(1, STEPS + 1, (1,), generator=generator))
        answers = forward(read, steps)
        losses = [F.cross_entropy(a.flatten(0, 1), expected.flatten(0, 1)) for a in answers]
        loss = torch.stack(losses).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        bar.set_postfix(loss=f"{losses[-1].detach():.3f}")
    model.eval()


def spread(stream: Stream, pieces: int) -> Tensor:  # (pieces,)
    """Return the starts of evenly spread pieces."""
    return torch.linspace(0, len(stream.data) - LENGTH - 1, pieces).long()


@torch.no_grad()
def nats(forward: Forward, stream: Stream, steps: int, pieces: int) -> float:
    """Return the mean loss in nats per byte, on the second halves of evenly spread pieces."""
    read, following, _ = stream.pieces(spread(stream, pieces))
    half = LENGTH // 2  # so that each measured byte has at least as many bytes before it
    logits = torch.cat([forward(part, steps)[-1][:, half:] for part in read.split(32)])
    return float(F.cross_entropy(logits.flatten(0, 1), following[:, half:].flatten()))


def teacher_nats(stream: Stream, pieces: int) -> float:
    """Return the teacher's mean loss in nats per byte, on the same bytes as `nats`.

    The teacher has an easier task: it reads each text from the start, it knows the boundaries of
    the tokens, and it does not have to predict the end of a text.
    """
    _, following, expected = stream.pieces(spread(stream, pieces))
    half = LENGTH // 2
    found = expected[:, half:].gather(-1, following[:, half:, None])
    # half precision stores very small probabilities as 0
    return float(-found.clamp(min=1e-7).log().mean())


def kept_streams(model: Path, texts: Sequence[str], file: Path) -> tuple[Stream, Stream]:
    """Return the streams of the training texts and of the held-out texts.

    The first twentieth of the texts is held out. The streams are kept in ``file``, and computed
    again for another folder or other texts. Remove the file if the model in the folder changes.
    """
    held = -(-len(texts) // 20)
    parts = (texts[held:], texts[:held])
    for part in parts:
        size = len("".join(part).encode())
        if size <= LENGTH:
            raise SystemExit(
                f"expected more than {LENGTH} bytes to train and to test on, got {size}; use more "
                "texts"
            )
    key = hashlib.sha256(repr([str(model.resolve()), *texts]).encode()).hexdigest()
    kept = torch.load(file) if file.is_file() else {"key": None}
    if kept["key"] != key:
        teacher = NextByte(model)
        for text in texts:
            teacher.tokens_of(text)  # raises before the teacher runs
        streams = [make_stream(part, teacher) for part in parts]
        kept = {"key": key, "streams": [(one.data, one.expected) for one in streams]}
        temporary = file.with_suffix(".part")
        torch.save(kept, temporary)
        temporary.replace(file)
    training, held_out = (Stream(*one) for one in kept["streams"])
    return training, held_out


def make_thinker(width: int) -> th.LatentThinker:
    """Return a causal thinker that reads bytes."""
    return th.LatentThinker(
        vocab_size=256,
        hidden_size=width,
        num_heads=4,
        causal=True,
        positions="rotary",
        max_input_length=LENGTH,
        max_output_length=LENGTH,
    )


def main() -> None:
    """Run the teacher, train the thinker, and measure and print the losses."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="folder of the language model")
    parser.add_argument("texts", type=Path, help="JSON file: a list of objects with texts")
    parser.add_argument(
        "--count", type=int, default=3000, help="number of texts to use, from the first on"
    )
    parser.add_argument("--iterations", type=int, default=1500)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("runs/distill_language_model"),
        help="folder for the teacher's probabilities and the thinker",
    )
    parser.add_argument("--json", type=Path, help="a JSON file for the results")
    parser.add_argument("--smoke", action="store_true", help="only a few steps, to test the script")
    options = parser.parse_args()
    if options.smoke:
        options.count, options.iterations, options.width = 20, 4, 32
    for place in (options.model / "config.json", options.texts):
        if not place.is_file():
            parser.error(f"{place} is missing; expected a model's folder and a JSON file of texts")
    if min(options.count, options.iterations) < 1 or options.width < 8 or options.width % 8:
        parser.error("expected --count and --iterations of 1 or more, and --width a multiple of 8")
    if options.json is not None:
        if options.json.is_dir():
            parser.error(f"--json: expected a file, got the folder {options.json}")
        options.json.parent.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    out = options.out
    out.mkdir(parents=True, exist_ok=True)
    texts = read_texts(options.texts, options.count)
    training, held_out = kept_streams(options.model, texts, out / "teacher.pt")
    set_seed(options.seed)
    model = make_thinker(options.width)
    forward = thinker_forward(model)
    started = time.process_time()
    train(
        model,
        forward,
        training,
        iterations=options.iterations,
        learning_rate=RATE,
        seed=options.seed,
    )
    seconds = time.process_time() - started
    print(f"{model.num_parameters()} parameters, {len(training.data)} bytes, {seconds:.0f} CPU s")
    pieces = 4 if options.smoke else 512
    figures: dict[str, Any] = {"teacher": teacher_nats(held_out, pieces)}
    print(f"the teacher: {figures['teacher']:.3f} nats per byte")
    figures["steps"] = []
    for steps in (1, 2, 4, 8, 16):
        loss = nats(forward, held_out, steps, pieces)
        figures["steps"].append({"steps": steps, "nats": loss})
        print(f"steps {steps}: {loss:.3f} nats per byte")
    model.save_pretrained(out / "thinker")
    print(f"the thinker: {out / 'thinker'}")
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
